"""What is asked of a device here alone, by the names that PyTorch's module for its type has: what it waits for, delays,
reserved bytes. What a module lacks is a case that is skipped, with its name."""

from __future__ import annotations

import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardfold import accelerator
from tests.support.gpu.section import Skip

__all__ = ["delayed", "on_one_stream", "reserved_peak", "sleep", "waits"]

SAID = "called a synchronizing"  # by the debug mode of a module, of each wait
SOURCES = Path(accelerator.__file__).parent
SHORTEST, LONGEST = 20_000, 3_000_000  # cycles of a delay: 10 us to 2 ms
OFTEN = 0.5  # of the places where a delay may be


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def reserved_peak(device: torch.device) -> int | None:
    """The most bytes that the allocator took from the device; None where its module does not tell."""
    ask = getattr(_module(device), "max_memory_reserved", None)
    return None if ask is None else int(ask(device))


def sleep(device: torch.device, cycles: int) -> None:
    """The current stream does nothing for so many cycles.

    Raises:
        Skip: the device has no such kernel.
    """
    spend = getattr(_module(device), "_sleep", None)
    if spend is None:
        raise Skip(f"torch.{device.type} has no _sleep, which delays a stream")
    spend(cycles)


@contextmanager
def on_one_stream(device: torch.device) -> Iterator[None]:
    """Engines that are made and run inside have no second stream: all is queued into the one of the computation."""

    def the_same(of: torch.device, **_: Any) -> Any:
        return accelerator.current_stream(of)

    with mock.patch.object(accelerator, "new_stream", the_same):
        yield


@contextmanager
def delayed(device: torch.device, seed: int) -> Iterator[None]:
    """Wherever the engine enters a stream inside, that stream or the computation's is kept busy for a random time, so
    that what nothing orders happens in another order each time.

    Raises:
        Skip: see :func:`sleep`.
    """
    sleep(device, 1)
    draw, enter = random.Random(seed), accelerator.on

    @contextmanager
    def late(stream: Any) -> Iterator[None]:
        if stream is not None and draw.random() < OFTEN:
            sleep(device, draw.randint(SHORTEST, LONGEST))
        with enter(stream):
            if stream is not None and draw.random() < OFTEN:
                sleep(device, draw.randint(SHORTEST, LONGEST))
            yield

    def on(stream: Any) -> AbstractContextManager[Any]:
        return late(stream)

    with mock.patch.object(accelerator, "on", on):
        yield


@contextmanager
def waits(device: torch.device, sim: Any = None) -> Iterator[Counter[str]]:
    """How often the host waits for the device inside, by the place; what PyTorch's debug mode does not see, such as a
    wait for an event, is not counted, but by the simulated device.

    Args:
        device: as above.
        sim: the simulation, where the device is the simulated one.

    Raises:
        Skip: the device's module does not tell.
    """
    found: Counter[str] = Counter()
    if sim is not None:
        before = Counter(sim.host_syncs)
        yield found
        for (what, where), times in (sim.host_syncs - before).items():
            found[f"{what} at {where}"] += times
        return
    choose: Callable[[str], object] | None = getattr(_module(device), "set_sync_debug_mode", None)
    if choose is None:
        raise Skip(f"torch.{device.type} has no set_sync_debug_mode, which tells of waits")

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if SAID in str(message):
            found[_place(f"{Path(filename).name}:{lineno}")] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")  # the mode itself warns that it is a prototype
        warnings.showwarning = note
        choose("warn")
        try:
            yield found
        finally:
            choose("default")


def _place(otherwise: str) -> str:
    """The innermost line of the library that is being run."""
    for frame in reversed(traceback.extract_stack()):
        file = Path(frame.filename)
        if file.is_relative_to(SOURCES):
            return f"{file.relative_to(SOURCES).as_posix()}:{frame.lineno}"
    return otherwise
