"""Updates in host memory before it is known whether they are the step's, as SuperOffload's speculation (arXiv
2509.21271, section 4.4), but restored from copies: an update that is computed backwards does not give the same bits.

A unit's shard is updated on a thread as soon as its summed gradients are in host memory, while earlier units still run
backward. Before that what the update writes is copied: master, moments and counts. What it makes of ``params`` waits
beside these, so that nothing that forward reads changes before the step. The step compares what the update was made
with (:class:`Terms`) with what it should have been made with. If they are equal, the update stands; else what was
copied is restored, and the update computed again.

Between backward and step whoever reads a state that was updated has it restored first (``Segment.under_way``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from logging import getLogger
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from shardfold import accelerator
from shardfold.plan.report import MemoryRow
from shardfold.sharding.segment import Segment
from shardfold.torch_internals import profiler_is_on

__all__ = ["ByteBuffer", "Snapshots", "Speculation", "Terms"]

LOG = getLogger("shardfold")


class Terms(NamedTuple):
    """What an update depends on besides the shard's states and gradients.

    Attributes:
        options: of the optimizer's group, as far as the update reads them.
        used: which parameters of the segment some rank used.
        factor: what gradients are multiplied by; None: nothing.
    """

    options: Mapping[str, Any]
    used: tuple[bool, ...]
    factor: float | None


class Speculation:
    """The update of one segment's shard before its step. It begins at once, on a thread of ``snapshots``.

    Attributes:
        owns_grads: it reads gradients, which stay what they are, or else it is undone.

    Args:
        segment: whose shard.
        terms: that the update is made with.
        update: does it: ``update(terms, out)``, where ``out`` takes the compute-dtype copy.
        states: that it writes: of each its memory, once it is at rest.
        restore: brings back what no tensor holds.
        out: for the copy, ``(n,)``; None: the update makes none.
        copies: memory for those of the states.
        name: of the operation, for a trace.
        begin: runs it on the thread.
    """

    owns_grads = False

    def __init__(
        self,
        segment: Segment,
        terms: Terms,
        update: Callable[[Terms, Tensor | None], None],
        states: Callable[[], Sequence[Tensor]],
        restore: Callable[[], None],
        out: Tensor | None,
        copies: Sequence[Tensor],
        name: str,
        begin: Callable[[Callable[[], None]], Future[None]],
    ) -> None:
        self._segment, self._terms, self._update, self._states = segment, terms, update, states
        self._restore, self._out, self._copies, self._name = restore, out, copies, name
        self._thread = 0
        self._written: list[tuple[Tensor, Tensor]] = []  # states of which there is a copy
        self._done = False
        segment.begin_update(self)
        self._run = begin(self._go)

    def _go(self) -> None:
        self._thread = get_ident()
        try:
            with torch.no_grad():
                assert self._segment.update_grads.device.type == "cpu"  # waits until they are in host memory
                for state, copy in zip(self._states(), self._copies, strict=True):
                    copy.copy_(state)
                    self._written.append((state, copy))
                if profiler_is_on():
                    with record_function(f"{self._name}: update"):
                        self._update(self._terms, self._out)
                else:
                    self._update(self._terms, self._out)
            self._done = True
        except Exception as error:  # the step updates it, and raises what is then still wrong
            LOG.info("%s failed, and is done in the step: %s", self._name, error)

    def stands(self, terms: Terms) -> bool:
        """Whether the step would do the same; waits until it is done."""
        if terms != self._terms:
            return False
        self._run.result()
        if self._done:
            self._segment.end_update()
        return self._done

    def settle(self) -> None:
        """What it wrote is as it was before."""
        if get_ident() == self._thread:
            return
        if not self._run.cancel():
            self._run.result()
        self._segment.end_update(undone=True)
        with torch.no_grad():
            for state, copy in self._written:
                state.copy_(copy)
        self._restore()


class ByteBuffer:
    """Memory of bytes, which is taken from its beginning on."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next tensor of so many elements, 1-D."""
        size = numel * dtype.itemsize
        taken, self._memory = self._memory[:size], self._memory[size:]
        return taken.view(dtype)


class Snapshots:
    """Memory of the host for copies of states, and the thread on which updates run that need them.

    Args:
        device: that the model computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._places: dict[str, tuple[int, int]] = {}  # by unit: where in the memory, and how many bytes
        self._thread: ThreadPoolExecutor | None = None

    @property
    def planned(self) -> int:
        """Bytes for all units that have room."""
        return sum(num_bytes for _, num_bytes in self._places.values())

    def row(self) -> MemoryRow:
        """For a report of memory."""
        return MemoryRow("snapshots", "host", self.planned, 0.0, self._memory.nbytes if self._memory is not None else 0)

    def place(self, sizes: Mapping[str, int]) -> None:
        """These units, by name, get so many bytes each. Between a step and the next last backward, or in that backward
        before any unit is updated; what was taken before stays with who has it."""
        at = 0
        self._places = {}
        for name, num_bytes in sizes.items():
            self._places[name] = at, num_bytes
            at += num_bytes
        if self._memory is None or self._memory.nbytes != at:
            self._memory = accelerator.host_memory((at,), torch.uint8, self._device) if at else None

    def room(self, unit: str) -> ByteBuffer | None:
        """What a unit has; None: it has none."""
        if unit not in self._places or self._memory is None:
            return None
        at, num_bytes = self._places[unit]
        return ByteBuffer(self._memory[at : at + num_bytes])

    def begin(self, run: Callable[[], None]) -> Future[None]:
        """Runs it behind what was begun before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardfold-speculation")
        return self._thread.submit(run)

    def close(self) -> None:
        """Ends the thread and gives the memory back."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._places, self._memory = {}, None
