"""Devices that compute beside the host, by the module that PyTorch has for each type of them.

Everything else asks here for streams, pinned memory, memory figures, indices and random generators of a device, so the
same lines run on every type whose module offers what is ``NEEDED``: ``torch.cuda`` (NVIDIA, and AMD by ROCm),
``torch.xpu``, and that of a backend somebody registered under a name of its own. The CPU has no streams: what is queued
elsewhere runs there as it is.

Streams and events themselves are ``torch.Stream`` and ``torch.Event``, which all of these share.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "NEEDED",
    "allocated",
    "count",
    "current",
    "current_stream",
    "found",
    "has_streams",
    "host_memory",
    "identity",
    "indexed",
    "is_known",
    "lacking",
    "multiplies_fp8",
    "multiplies_groups",
    "new_stream",
    "on",
    "peak",
    "product_dtype",
    "reset_peak",
    "rng_state",
    "seeded",
    "set_rng_state",
    "synchronize",
    "taken",
    "total_memory",
    "use",
    "used_here",
]

NEEDED = (
    "Stream",
    "current_stream",
    "stream",
    "synchronize",
    "is_available",
    "device_count",
    "current_device",
    "set_device",
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "get_rng_state",
    "set_rng_state",
    "manual_seed",
)
"""What the module of a device type offers, or nothing trains there."""

WITHOUT = ("cpu", "meta")  # device types that have no streams and need none


GRANULE = 512
"""Bytes: what PyTorch's allocators of CUDA, ROCm and XPU give a tensor is a multiple of it."""


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


# -- which devices there are


def is_known(device: torch.device) -> bool:
    """Whether PyTorch has a module for this type of device."""
    try:
        return _module(device) is not None
    except RuntimeError:
        return False


def lacking(device: torch.device) -> list[str]:
    """What the module of this type of device does not offer, of what is needed."""
    module = _module(device)
    return [name for name in NEEDED if not hasattr(module, name)]


def has_streams(device: torch.device) -> bool:
    """Whether the device computes beside the host, in the order of streams."""
    return device.type not in WITHOUT


def found() -> torch.device | None:
    """The type of the accelerator that this process sees; None: there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def count(device: torch.device | None) -> int:
    """How many devices of this type the process sees."""
    if device is None or not has_streams(device):
        return 0
    module = _module(device)
    return int(module.device_count()) if module.is_available() else 0


def indexed(device: torch.device) -> torch.device:
    """The device by its number; one without a number is this local rank's, and ranks beyond the last share them.

    Without a number it would be whatever is current when it is asked for, and unequal to that of any tensor on it.
    """
    if device.index is not None or not has_streams(device):
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")) % max(count(device), 1))


def current(*, used: bool = False) -> torch.device | None:
    """The device that this process uses where it names none; None: there is none.

    Args:
        used: None too as long as nothing was done on it, where asking would set it up.
    """
    device = found()
    if device is None or lacking(device):
        return None
    module = _module(device)
    if used and not getattr(module, "is_initialized", lambda: True)():
        return None
    return torch.device(device.type, int(module.current_device()))


def use(device: torch.device) -> None:
    """Makes it the one that this process uses where it names none: barriers, kernels and users' own tensors otherwise
    go to the first, on every rank."""
    if has_streams(device):
        _module(device).set_device(device)


def identity(device: torch.device) -> str:
    """What tells one physical device from another, equal in every process that sees it, under whatever number."""
    unique = getattr(_properties(device), "uuid", None)
    return f"{socket.gethostname()}/{device}" if unique is None else str(unique)


def product(device: torch.device) -> str | None:
    """What the driver calls the device, as ``"NVIDIA H200"``; None where its module does not tell."""
    return getattr(_properties(device), "name", None)


def _properties(device: torch.device) -> Any:
    ask = getattr(_module(device), "get_device_properties", None) if has_streams(device) else None
    return None if ask is None else ask(device)


# -- streams


def new_stream(device: torch.device, *, urgent: bool = False) -> Any:
    """A stream of the device; None where there are none.

    Args:
        device: as above.
        urgent: its kernels go first where the device has no room for all: the computation waits for what they do.
    """
    if not has_streams(device):
        return None
    return _module(device).Stream(device, priority=-1 if urgent else 0)


def current_stream(device: torch.device) -> Any:
    """The stream into which this thread queues what it computes; None where there are none."""
    return _module(device).current_stream(device) if has_streams(device) else None


def on(stream: Any) -> AbstractContextManager[Any]:
    """What runs inside is queued into ``stream``; None: it runs as it is."""
    return nullcontext() if stream is None else _module(stream.device).stream(stream)


def used_here(tensor: Tensor) -> None:
    """The memory of ``tensor``, made in another stream, is not given to anyone before what is queued here so far and
    reads it is done."""
    if has_streams(tensor.device):
        tensor.record_stream(current_stream(tensor.device))


def synchronize(device: torch.device) -> None:
    """The host waits for everything that was queued on the device, in any stream."""
    if has_streams(device):
        _module(device).synchronize(device)


# -- memory


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zero: bool = False) -> Tensor:
    """Memory of the host whose copies to and from ``device`` run beside both: pinned, where the device has streams.

    PyTorch's allocator rounds pinned memory up to a power of 2, and keeps what is given back for the next of that size,
    so up to twice the bytes of tensors are pinned; states that rest there share slabs. That is its setting
    (``pinned_max_round_threshold_mb``, 2.13), of the whole process, and the user's: memory that is pinned by other
    means is not kept by PyTorch until the copies under way are over, which regions that are dropped rely on.

    Args:
        shape, dtype: of the tensor.
        device: as above.
        zero: of zeros; else its values are undefined.
    """
    make = torch.zeros if zero else torch.empty
    return make(tuple(shape), dtype=dtype, pin_memory=has_streams(device))


def allocated(device: torch.device) -> int | None:
    """Bytes of the tensors on the device; None where nobody counts them."""
    return int(_module(device).memory_allocated(device)) if has_streams(device) else None


def peak(device: torch.device) -> int | None:
    """The most bytes that tensors had there since :func:`reset_peak`; None where nobody counts them."""
    return int(_module(device).max_memory_allocated(device)) if has_streams(device) else None


def reset_peak(device: torch.device) -> None:
    """The peak starts again at what is allocated now."""
    if has_streams(device):
        _module(device).reset_peak_memory_stats(device)


def taken(nbytes: int, device: torch.device) -> int:
    """Bytes of the device that a tensor of so many takes: its allocator gives it whole granules.

    More is lost where a block of more than 1 MiB is not split because less than that would be left of it, and to free
    blocks that fit no tensor. That depends on the order of all allocations, so it is nobody's here.
    """
    return -(-nbytes // GRANULE) * GRANULE if has_streams(device) else nbytes


def total_memory(device: torch.device) -> int | None:
    """Bytes that the device has; None where its module does not tell."""
    return getattr(_properties(device), "total_memory", None)


def give_back(device: torch.device) -> None:
    """Memory that the allocator keeps for later goes back to the device, for other processes."""
    if has_streams(device) and (empty := getattr(_module(device), "empty_cache", None)) is not None:
        empty()


def free_memory(device: torch.device) -> int | None:
    """Bytes of the device that no process has; None where its module does not tell."""
    ask = getattr(_module(device), "mem_get_info", None) if has_streams(device) else None
    return None if ask is None else int(ask(device)[0])


# -- random numbers


def rng_state(device: torch.device) -> Tensor:
    """The state of the device's generator; uint8, on the CPU."""
    return _module(device).get_rng_state(device) if has_streams(device) else torch.get_rng_state()


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """The device's generator goes on from ``state``."""
    if has_streams(device):
        _module(device).set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state.cpu())


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the generators of the CPU and of this device begin at ``seed``; behind it, they go on as before. Those of
    other devices are left alone, which ``torch.manual_seed`` would seed too."""
    before, there = torch.get_rng_state(), rng_state(device)
    try:
        torch.default_generator.manual_seed(seed)
        _seed(device, seed)
        yield
    finally:
        set_rng_state(device, there)
        torch.set_rng_state(before)


def _seed(device: torch.device, seed: int) -> None:
    if has_streams(device):
        module = _module(device)
        index = module.current_device()
        module.set_device(device)  # a module seeds the current one
        module.manual_seed(seed)
        module.set_device(index)


# -- what is compiled


def compiles(device: torch.device) -> bool:
    """Whether ``torch.compile`` may make kernels for it: the module of one that has none says ``compiles = False``."""
    return device.type == "cpu" or bool(getattr(_module(device), "compiles", True))


# -- products of matrices


def product_dtype(device: torch.device) -> torch.dtype:
    """In which dtype the device multiplies matrices where 16 bits are enough: bf16 if it has instructions for such
    products, else fp32.

    It goes by what the device is and not by a measurement, which could fall out otherwise in the next process. A CPU
    without them takes 20 to 60 times as long in bf16 as in fp32. Devices of one job may differ: where replicas have to
    compute alike, an engine asks all ranks (``optim.master_ranks``).
    """
    if not has_streams(device):
        return torch.bfloat16 if _cpu_multiplies_bf16() else torch.float32
    if device.type == "cuda" and torch.version.hip is None:
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    ask = getattr(_module(device), "is_bf16_supported", None)  # what cannot be asked is newer than those that lack it
    return torch.bfloat16 if ask is None or ask(including_emulation=False) else torch.float32


@cache
def _cpu_multiplies_bf16() -> bool:
    """Whether the CPU has instructions for it and PyTorch's library for products, oneDNN, uses them."""
    known = getattr(torch.cpu, "get_capabilities", dict)()  # of PyTorch 2.11 too; one that does not tell: fp32
    found = any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # the last: of ARM
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    allowed = any(word in limit.upper() for word in ("ALL", "DEFAULT", "BF16", "FP16", "AMX", "AVX10"))
    return found and allowed and torch.backends.mkldnn.is_available()


def multiplies_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``F.grouped_mm`` has a kernel for it."""
    if device.type == "cuda":
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16, torch.float16)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` has a kernel for e4m3 by e5m2 (AMD's first ones have other formats); on the CPU it
    multiplies in fp32."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    return device.type == "cpu"
