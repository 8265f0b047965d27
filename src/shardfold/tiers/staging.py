"""Staging buffers: host memory of a fixed size through which values go to drives and come from them.

Direct I/O takes memory that begins at the edge of a page; tensors begin anywhere. So values are copied through buffers
that do. Their number is fixed when they are made, and whoever takes one where none is left waits for one to come back:
that, and nothing that grows with what is stored, bounds the host memory of a disk.
"""

from __future__ import annotations

import queue
from contextlib import suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.tiers.pages import huge

__all__ = ["BLOCK", "Buffer", "Staging"]

BLOCK = 4096
"""Bytes: direct I/O begins and ends at multiples of it, in memory and in a file."""


class Buffer:
    """One of them.

    Attributes:
        memory: uint8, ``(size,)``.
        view: the same memory, for system calls.
        address: where it begins.
        event: streams: behind the copy between it and the device that was queued last; None: there is none.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.view, self.address = memory, memory.numpy().data, memory.data_ptr()
        self.event: Any = None

    def settle(self) -> None:
        """The host waits for the copy to or from the device that is under way."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None

    def copied(self, event: Any) -> None:
        """A copy between it and the device is queued; the event is behind that."""
        self.event = event


class Staging:
    """``count`` buffers of ``size`` bytes each, pinned where the device has streams."""

    def __init__(self, device: torch.device, count: int, size: int) -> None:
        memory = accelerator.host_memory((count * size,), torch.uint8, device)
        if memory.data_ptr() % BLOCK:
            memory = accelerator.host_memory((count * size + BLOCK,), torch.uint8, device)
            memory = memory[-memory.data_ptr() % BLOCK :]
        huge(memory.data_ptr(), count * size)
        # What comes back may come from a destructor, which may run anywhere, so nothing that it does takes a lock.
        self._back: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._spare = [Buffer(memory[i * size : (i + 1) * size]) for i in reversed(range(count))]
        self._lock = Lock()
        self._streams = accelerator.has_streams(device)

    def take(self) -> Buffer:
        """One that nobody uses: on the CPU the one that came back last, which is in the cache, and so no more of them
        take memory than were in use at once; with streams the one that came back first, whose copy is over by now."""
        with self._lock:
            if not self._streams:
                with suppress(queue.Empty):
                    while True:
                        self._spare.append(self._back.get_nowait())
            buffer = self._spare.pop() if self._spare else self._back.get()
        buffer.settle()
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        self._back.put(buffer)
