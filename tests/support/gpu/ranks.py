"""A function on the ranks of a setting, in warm processes of which each has its device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardfold import accelerator
from shardfold.comm.backend import start_group
from shardfold.comm.mesh import pick_device
from shardfold.testing import Ranks, RanksFailed
from tests.support.gpu.section import Clock, Outcome
from tests.support.gpu.setting import SIM, Setting

__all__ = ["Field", "Here", "device_type", "how_many", "product"]

LEAST = 5.0  # seconds that a call has, even where fewer are left of the section
START = 90.0  # seconds for a call: the first of a process sets the device up


@dataclass(frozen=True, kw_only=True)
class Here:
    """What a function is told on a rank.

    Attributes:
        setting: as it was asked.
        device: of this rank.
        sim: the simulation; None on any other device.
    """

    setting: Setting
    device: torch.device
    sim: Any


class Field:
    """Warm processes, for each number of ranks others: after a failure all of one call are new. A context manager.

    Args:
        device: the type of what each has.
        clock: of the section.
    """

    def __init__(self, device: str, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._pools: dict[int, Ranks] = {}

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def run(
        self, setting: Setting, fn: Callable[..., Any], *args: Any, mode: str = "check", seed: int = 0
    ) -> list[Any]:
        """``fn(here, *args)`` on each rank; the results by rank. ``mode`` and ``seed`` are the simulation's.

        Raises:
            Outcome: a rank raised, died or did not answer in time; the sentence is of the first that did.
        """
        # Here is a store that listens already: between asking for a free port and using it others may take it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )  # fmt: skip
        timeout = max(LEAST, min(START, self._clock.left))
        if setting.ranks not in self._pools:
            self._pools[setting.ranks] = Ranks(setting.ranks, device=SIM if self._device == SIM else None)
        try:
            return self._pools[setting.ranks].run(
                _on_rank, setting, fn, args, mode, seed, world_size=setting.ranks,
                distributed=False, timeout=timeout, warnings_as_errors=False,
            )  # fmt: skip
        except RanksFailed as error:
            first = error.failures[0]
            raise Outcome(f"rank {first.rank} {first.kind}: {first.summary}", str(error)) from error


def _on_rank(setting: Setting, fn: Callable[..., Any], args: tuple[Any, ...], mode: str, seed: int) -> Any:
    with ExitStack() as held:
        sim = None
        if setting.device == SIM:
            simulated = importlib.import_module("shardfold.testing.simulated").simulated
            sim = held.enter_context(simulated(mode, seed=seed + int(os.environ["RANK"])))
        device = pick_device(setting.device)
        accelerator.use(device)
        if setting.backend is not None:
            start_group(device, timedelta(seconds=START), setting.backend)
        return fn(Here(setting=setting, device=device, sim=sim), *args)


def how_many(device: str) -> int:
    """How many devices of this type there are."""
    return 0 if device in (SIM, "cpu") else accelerator.count(torch.device(device))


def product(device: str) -> str:
    """What their driver calls devices of this type; empty where nobody tells."""
    return accelerator.product(torch.device(device)) or "" if how_many(device) else ""


def device_type(asked: str) -> str | None:
    """The type that ``asked`` names; ``auto``: that of the accelerator there is, None where there is none."""
    if asked != "auto":
        return asked
    found = accelerator.found()
    return None if found is None else found.type
