"""What this process holds: storages of tensors, resident sets, page faults."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.torch_internals import no_subclass_functions

__all__ = ["clear_peak", "disk_bytes", "free_bytes", "held_bytes", "minor_faults", "peak_bytes", "resident_bytes"]

STATUS, IO = Path("/proc/self/status"), Path("/proc/self/io")


def held_bytes() -> int:
    """Bytes of all storages that a tensor known to the garbage collector, or its gradient, lies in; each counted once.

    Buffers that only C++ knows are not seen, such as the buckets of DistributedDataParallel.
    """
    gc.collect()
    storages: dict[int, int] = {}
    # A parameter that is freed refuses to be read, and a distributed tensor answers for its local one.
    with no_subclass_functions():
        for tensor in [each for each in gc.get_objects() if issubclass(type(each), Tensor)]:
            for each in (tensor, tensor.grad if tensor.is_leaf else None):
                if each is None or each.device.type == "meta":
                    continue
                with suppress(RuntimeError, NotImplementedError):  # a wrapper that has no storage of its own
                    storage = each.untyped_storage()
                    if storage.data_ptr():
                        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _status(field: str) -> int | None:
    if not STATUS.exists():
        return None
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(field))


def resident_bytes(device: torch.device) -> int | None:
    """What is resident now; on CUDA, what is allocated. None where the system does not tell."""
    if accelerator.has_streams(device):
        return accelerator.allocated(device)
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """The most that was resident (on CUDA: allocated) since :func:`clear_peak`."""
    if accelerator.has_streams(device):
        return accelerator.peak(device)
    return _status("VmHWM")


def clear_peak(device: torch.device) -> None:
    """The peak starts again at what is resident now, without what malloc keeps of earlier tensors."""
    if accelerator.has_streams(device):
        accelerator.reset_peak(device)
    elif STATUS.exists():
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def free_bytes(device: torch.device) -> int | None:
    """What others may have of the device once this process has given back what it holds for later; None on the CPU and
    where the device does not tell."""
    if not accelerator.has_streams(device):
        return None
    accelerator.give_back(device)
    return accelerator.free_memory(device)


def disk_bytes() -> tuple[int, int] | None:
    """Bytes that this process has had read from drives and written to them, as the system counts; None where it does
    not. What the page cache holds back is counted as written when it is handed over, and never read."""
    try:
        fields = dict(line.split(": ") for line in IO.read_text().splitlines())
    except OSError:
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def minor_faults() -> int:
    """Page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
