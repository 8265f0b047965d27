"""``torch.sim``: what PyTorch and programs ask of a device's module, under the names that ``torch.cuda`` has."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import UsageError
from shardfold.testing.simulated.arena import Arena
from shardfold.testing.simulated.device import PROCESS, the_device
from shardfold.testing.simulated.memory import NAME
from shardfold.testing.simulated.streams import SimulatedEvent, Stream, a_stream

__all__ = ["device_module"]

MEMORY = 1 << 36  # bytes that it says it has where nobody limits them


def device_module() -> ModuleType:
    """The module, ready to be registered."""
    module = ModuleType(f"torch.{NAME}", __doc__)
    for name, value in vars(_Functions).items():
        if isinstance(value, staticmethod) or name in ("Stream", "Event", "_initialized", "compiles"):
            setattr(module, name, getattr(_Functions, name))
    return module


def _check(device: Any) -> None:
    if device is None or isinstance(device, int):
        index = device
    else:
        index = torch.device(device).index
    if index not in (None, 0, -1):
        raise UsageError(f"device={str(device)!r}: a process has one simulated device, {NAME}:0.")


class _Functions:
    Stream, Event = Stream, SimulatedEvent
    compiles = False
    """Nothing makes kernels for it."""
    _initialized = True
    """As torch.utils.checkpoint asks, before it keeps the state of random numbers for a recomputation."""

    # -- devices

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return PROCESS.forked

    @staticmethod
    def init() -> None: ...

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def set_device(device: Any) -> None:
        _check(device)

    @staticmethod
    def device(device: Any) -> AbstractContextManager[None]:
        _check(device)
        return nullcontext()

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "simulated device"

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        _check(device)
        own = f"{socket.gethostname()}/{os.getpid()}"  # each process has its own
        total = _memory().limit or MEMORY
        return SimpleNamespace(name="simulated device", total_memory=total, multi_processor_count=1, uuid=own)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        _check(device)
        sim = the_device()
        sim.findings.host_sync("device.synchronize", sim.here())
        sim.synchronize()

    # -- streams

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return the_device().current

    @staticmethod
    def default_stream(device: Any = None) -> torch.Stream:
        return the_device().default

    @staticmethod
    def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else a_stream(stream, "stream")

    @staticmethod
    def set_stream(stream: torch.Stream | None) -> None:
        if stream is not None:
            the_device().enter(a_stream(stream, "set_stream"))

    # -- memory

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return _memory().allocated

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return _memory().peak

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        memory = _memory()
        memory.peak = memory.allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = _memory()
        total = memory.limit or MEMORY
        return total - memory.allocated, total

    @staticmethod
    def empty_cache() -> None: ...

    # -- random numbers

    @staticmethod
    def manual_seed(seed: int) -> None:
        the_device().generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    @staticmethod
    def seed() -> None:
        the_device().generator.seed()

    @staticmethod
    def initial_seed() -> int:
        return the_device().generator.initial_seed()

    @staticmethod
    def get_rng_state(device: Any = 0) -> Tensor:
        return the_device().generator.get_state()

    @staticmethod
    def set_rng_state(new_state: Tensor, device: Any = 0) -> None:
        the_device().generator.set_state(new_state)

    @staticmethod
    def get_rng_state_all() -> list[Tensor]:
        return [the_device().generator.get_state()]

    @staticmethod
    def set_rng_state_all(new_states: list[Tensor]) -> None:
        the_device().generator.set_state(new_states[0])

    # -- automatic mixed precision

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return True


def _memory() -> Arena:
    sim = the_device()
    with sim.lock:
        sim.allocator.collect()
    return sim.allocator.arena
