"""What carries tensors of a device between ranks, and how ``torch.distributed`` is started with it."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardfold import accelerator
from shardfold.comm._shown_traceback import prefixed_once
from shardfold.errors import CollectiveError, ConfigError

__all__ = ["GLOO", "MARGIN", "backend_in", "device_backend", "import_compiler", "start_group"]

LOG = getLogger("shardfold")
GLOO = "gloo"
MARGIN = timedelta(seconds=60)
"""By which a backend gives up later than the engine, whose sentence says more. Gloo, too, would close its connections
then, and ranks that see that first would take another for dead."""


def device_backend(device: torch.device) -> str:
    """What carries tensors of such a device where each rank has its own: ``nccl`` for ``cuda``, ``gloo`` for the CPU,
    and for others what is registered with ``torch.distributed``.

    Raises:
        ConfigError: nothing is.
    """
    known = dist.Backend.default_device_backend_map
    if device.type not in known:
        raise ConfigError(
            f"torch.distributed knows no backend for devices of the type {device.type}: register one with "
            "torch.distributed.Backend.register_backend(name, make, devices=[...]), or train on one rank."
        )
    return known[device.type]


def backend_in(config: str, device: torch.device) -> str:
    """What carries tensors of ``device`` in a group whose backends are ``config``, as ``cpu:gloo,cuda:nccl``.

    Raises:
        ConfigError: nothing does.
    """
    parts = dict(part.split(":") for part in config.split(","))
    if device.type == "cpu":
        return parts.get("cpu", GLOO)  # meshes have a group over Gloo of their own
    if device.type not in parts:
        raise ConfigError(
            f"torch.distributed was started with backends for {', '.join(parts)}, which do not carry tensors of "
            f"{device.type}: start it with init_process_group({device_backend(device)!r}), or let the engine start it."
        )
    return parts[device.type]


def import_compiler() -> None:
    """The first torch.optim optimizer imports torch._dynamo, and what that import does keeps every group there is alive
    for good: destroy_process_group would not end its threads (see DataMesh.close). So it comes before any group."""
    importlib.import_module("torch._dynamo")


def start_group(device: torch.device, timeout: timedelta, backend: str | None = None, **where: Any) -> None:
    """Initializes ``torch.distributed`` for ranks of which each computes on its ``device``, which becomes the current
    one.

    Args:
        device: of this rank.
        timeout: of collectives.
        backend: None: :func:`device_backend`'s where each rank has a device of its own, else Gloo, with a warning.
        where: what ``init_process_group`` is told of ranks and stores.

    Raises:
        ConfigError: ranks share a device of which Gloo carries no tensors.
        CollectiveError: not every rank came.
    """
    import_compiler()
    accelerator.use(device)
    more: dict[str, Any] = {}
    if backend is None:
        backend = device_backend(device)
        if backend != GLOO:
            where = _with_store(where, timeout)
            if shared := _shared_by(device, timeout, **where):
                backend = _without_own(device, shared)
    if accelerator.has_streams(device) and backend != GLOO:
        # 2: when NCCL fails, or the engine ends its kernels (see DataMesh.end_kernels), whoever waits for the device
        # goes on and raises the engine's sentence. By default NCCL's own watchdog would end the process instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        timeout += MARGIN
        if device.type in dist.Backend.backend_capability[GLOO]:
            # Communicators are made at once, so that what is wrong with them shows here and not in the first step,
            # groups of some ranks are split off them, and no barrier has to guess the device by the rank's number.
            # PyTorch asks every later group for a backend of that device, and one over Gloo has none for other types.
            more["device_id"] = device
    with prefixed_once():
        dist.init_process_group(backend, timeout=timeout, **where, **more)


def _with_store(where: dict[str, Any], timeout: timedelta) -> dict[str, Any]:
    """The same ranks, by their store: there is something to ask before the group is made."""
    if "store" in where:
        return where
    url, rank, size = where.get("init_method", "env://"), where.get("rank", -1), where.get("world_size", -1)
    store, rank, size = next(rendezvous(url, rank, size, timeout=timeout))
    return {"store": dist.distributed_c10d.PrefixStore("default_pg", store), "rank": rank, "world_size": size}


def _shared_by(device: torch.device, timeout: timedelta, *, store: Any, rank: int, world_size: int) -> str:
    """Two ranks that share one device, in words; empty if each rank has its own. Every rank calls it.

    Devices are compared by what identifies them and not by how many this process sees: a scheduler may show each
    process only its own, which is number 0 for all of them.
    """
    store = dist.distributed_c10d.PrefixStore("shardfold/devices", store)
    first = store.compare_set(accelerator.identity(device), "", str(rank)).decode()
    if first != str(rank):
        one, other = sorted((int(first), rank))
        store.compare_set("shared", "", f"ranks {one} and {other} share one device, {device} of rank {rank}")
    if store.add("came", 1) == world_size:
        store.set("all", "")
    try:
        store.wait(["all"], timeout)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank}: not every rank came to start torch.distributed within {timeout.total_seconds():.0f} s "
            f"({str(error).splitlines()[0]}); another rank has probably died: look at its output."
        ) from error
    return store.get("shared").decode() if store.check(["shared"]) else ""


def _without_own(device: torch.device, shared: str) -> str:
    own = device_backend(device)
    if device.type not in dist.Backend.backend_capability[GLOO]:
        raise ConfigError(f"{shared}: {own} refuses that, and Gloo carries no tensors of it; start fewer ranks.")
    LOG.warning(
        "%s, which %s refuses: gradients and parameters travel by way of the host (Gloo), which is 10 to 100 times "
        "slower; start one rank per device for anything but a trial.",
        shared,
        own,
    )
    return GLOO
