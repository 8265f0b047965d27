"""The gradients of one unit since the last step: where they lie, and how far they are summed.

    resting      a buffer over ``grads`` itself, where those are not split
    local        a buffer that the next reduction sends, where gradients cannot be sent from where they rest
    sending      what the transport works on, and ``sent``, the buffer that it is done with when they are
    summed       what a reduction scatters, where ``grads`` rest in a slower tier: it is added to those there
    grads        of each segment: what the step uses (see ``segment``)

What ``grads`` hold is one enum, :class:`Sums`, and where sums go is chosen once (see ``sums``). The program says when
``local`` is made (``GRADS``) and given back (``DROP``); gradients that come outside of that, in ``no_sync()`` or behind
their unit's reduction, make it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardfold.comm.transport import Pending, Waiter, drain
from shardfold.errors import StepError
from shardfold.sharding.gradient_buffer import GradientBuffer
from shardfold.sharding.segment import Segment
from shardfold.sharding.sums import InPlaceSums, Note, Reduction, Send, Sums, sums_of
from shardfold.tiers.device import DeviceTier

__all__ = ["Gradients", "SlotNumbers"]

SlotNumbers = tuple[int, int]
"""The number of the trainable segment, and of the slot."""


class Gradients:
    """The gradients of a unit.

    Args:
        segments: its trainable segments.
        store: makes buffers, and takes them back.

    Attributes:
        sums: what ``grads`` hold.
        resting: over ``grads``, where they are not split; None where they are.
        local: in the dtype in which gradients are sent; None while there is none.
        sending: operations on their way.
        sent: the buffer that they send; None: ``resting``, or none.
        node: by segment, between two hops: what the first has summed.
        seen: places whose gradient came in this backward.
        used: by segment and slot, whether a gradient came since the last step.
        count: of all places.
    """

    def __init__(self, segments: Sequence[Segment], store: DeviceTier) -> None:
        self.segments = list(segments)
        self.sums = Sums.OWN
        self.resting: GradientBuffer | None = None
        self.local: GradientBuffer | None = None
        self.sending: list[Pending] = []
        self.sent: GradientBuffer | None = None
        self.seen: set[SlotNumbers] = set()
        self.used = [[False] * len(segment.parameters) for segment in self.segments]
        self.count = sum(map(len, self.used))
        self.node: list[Tensor] = []
        self._store = store
        self._to = sums_of(self.segments, store)

    @property
    def summed(self) -> list[Tensor] | None:
        """By segment, this rank's shard of what a reduction gives, on its way to a slower tier; else None."""
        return self._to.summed

    def rest(self, *, adopt: bool) -> None:
        """``grads`` are whole on this rank: gradients are added where they rest. ``adopt``: see GradientBuffer."""
        flats = [segment.grads for segment in self.segments if segment.grads is not None]
        self.resting = GradientBuffer(self.segments, flats, adopt=adopt)
        for flat in flats if adopt else ():  # until something reads it, it needs no memory
            self._store.vacate(flat)

    def give_up(self) -> None:
        """The unit is no more: nothing here keeps memory."""
        self.resting = None
        for segment in self.segments:
            segment.adopted.clear()
        self.segments, self._to = [], InPlaceSums([], self._store)

    # -- arriving

    def accept(self, place: SlotNumbers, grad: Tensor) -> None:
        """Takes a gradient."""
        segment, slot = place
        self.used[segment][slot] = True
        buffer = self.resting if self.sums is Sums.OWN else None
        if buffer is None:
            buffer = self.local or self.make()
        buffer.add(segment, slot, grad, self.segments[segment].factor)

    def make(self) -> GradientBuffer:
        """The buffer that gradients are copied into in the dtype in which they are sent; made if there is none."""
        if self.local is None:
            flats = [self._store.empty(s.spec.length, s.dtypes["reduce"]) for s in self.segments]
            self.local = GradientBuffer(self.segments, flats)
        return self.local

    def flush(self) -> None:
        """At the end of a pass: no gradient waits to be copied."""
        for buffer in (self.resting, self.local):
            if buffer is not None:
                buffer.flush()

    @property
    def unsent(self) -> bool:
        """Whether gradients are here that no reduction has taken."""
        return self.local is not None

    # -- sending

    def send(self, sends: Sequence[Send], *, scatter: bool) -> None:
        """Hands the flat of each segment to one of ``sends``. The buffer is :attr:`sent` until it is given back."""
        flats, states = self._complete(), [segment.format_state for segment in self.segments]
        arranged = [segment.arranged(f, self._store.empty) for segment, f in zip(self.segments, flats, strict=True)]
        flats = [flat if made is None else made for flat, made in zip(flats, arranged, strict=True)]
        self.sums = self._to.send(self.sums, Reduction(sends, flats, states, self.sending, scatter))
        for made in arranged:
            if made is not None:
                self.sending.append(Pending([], partial(self._store.recycle, made)))

    def send_within(self, sends: Sequence[Send], ranks: int) -> None:
        """As :meth:`send`, the first of two hops, between so many ranks: its sums are :attr:`node`."""
        flats = self._complete()
        self.node = [
            self._store.empty(len(flat) // ranks, flat.dtype if flat.dtype == torch.float64 else torch.float32)
            for flat in flats
        ]
        for segment, send, flat, out in zip(self.segments, sends, flats, self.node, strict=True):
            send(flat, pending=self.sending, out=out, add=False, state=segment.format_state)

    def send_between(self, sends: Sequence[Send], waiter: Waiter) -> None:
        """As :meth:`send`, the second of two hops, behind the first: what that has summed within the node."""
        self.arrive(waiter)
        node, self.node = self.node, []
        states = [segment.node_state for segment in self.segments]
        self.sums = self._to.send(self.sums, Reduction(sends, node, states, self.sending, scatter=True))
        self.sending.append(Pending([], lambda: [self._store.recycle(flat) for flat in node]))

    def _complete(self) -> list[Tensor]:
        """The flats of what is sent next, all there."""
        buffer = self.resting if self.sums is Sums.OWN else None
        if buffer is None:
            return self._take_local().flats
        with torch.no_grad():
            buffer.complete()
        return buffer.flats

    def _take_local(self) -> GradientBuffer:
        """:attr:`local`, complete; from now on it is :attr:`sent`."""
        buffer = self.sent = self.make()
        self.local = None
        with torch.no_grad():
            buffer.complete()
        return buffer

    def spread(self, sends: Sequence[Send]) -> None:
        """Sums of which each rank has a part come together."""
        self._to.spread(sends, self.sending)

    def send_scattered(self, sends: Sequence[Send]) -> None:
        """The second of two reductions: sums the scattered gradients over the other axes (HSDP)."""
        self.sums = self._to.send_again(self.sums, sends, self.sending)

    def store(self, note: Note) -> None:
        """What this rank keeps of the sums of a backward begins to go to the tier that gradients rest in; where nothing
        is sent, its gradients as they came. ``note`` is shown what goes to a file.

        Raises:
            OSError: see :meth:`Region.store`; all is taken.
            StepError: what was summed before could not be read.
        """
        self.sums, lost, refused = self._to.store(self.sums, self._whole, note)
        if lost is not None:
            raise StepError(f"{lost}: the gradients of earlier micro-batches are lost") from lost
        if refused is not None:
            raise refused

    def _whole(self) -> list[Tensor]:
        """What was sent, or would be next."""
        return (self.sent or self._take_local()).flats

    def arrive(self, waiter: Waiter) -> None:
        """The sums are in ``grads``."""
        if self.local is not None and any(segment.adds_alone for segment in self.segments):
            self.send([_kept] * len(self.segments), scatter=True)
        drain(self.sending, waiter)

    def give_back(self) -> None:
        """The buffer that was sent is not needed any more."""
        if self.sent is not None:
            for flat in self.sent.flats:
                self._store.recycle(flat)
            self.sent = None

    def end_pass(self, waiter: Waiter) -> None:
        """Nothing is on its way, and no gradient waits to be copied."""
        self.arrive(waiter)
        self.give_back()
        self.flush()

    def complete(self) -> None:
        """Before the step: where nothing was sent, what no gradient reached is zero."""
        if self.resting is not None and self.sums is Sums.OWN:
            self.resting.complete()

    # -- forgetting

    def drop(self, place: SlotNumbers, *, zero: bool = False) -> None:
        """Forgets the gradient of one parameter, or makes it ``zero``: with that an update still counts."""
        segment, slot = place
        held = self.segments[segment]
        self.used[segment][slot] = zero and self.used[segment][slot]
        if self.local is not None:
            self.local.drop(segment, slot)
        with torch.no_grad():
            if self.resting is not None:
                if self.resting.touched[segment][slot] or self.sums is not Sums.OWN:
                    self.resting.views[segment][slot].zero_()
                self.resting.drop(segment, slot)
            elif self.sums is not Sums.OWN:
                shard = held.shard("grads")
                assert shard is not None
                own = shard.part(held.own_piece(slot)[0])
                own.write(torch.zeros(own.numel(), dtype=own.dtype))
                held.drop_noted()
            self._to.drop(segment, held.own_piece(slot)[0])

    def drop_all(self, *, zero: bool = False) -> None:
        """Forgets the gradients of all parameters, or makes them ``zero``."""
        for i, used in enumerate(self.used):
            for slot in range(len(used)):  # also what only other ranks used: their sums are here
                self.drop((i, slot), zero=zero)

    def forget_lost(self) -> None:
        """Formats keep nothing of what they have lost so far."""
        for segment in self.segments:
            for state in (segment.format_state, segment.node_state):
                if state is not None:
                    state.zero_()

    def forget(self) -> None:
        """As before the first backward of a step."""
        self.local, self.node = None, []
        self._to.forget()
        for segment in self.segments:
            segment.drop_noted()
        self.sums = Sums.OWN
        self.seen.clear()
        for used in self.used:
            used[:] = [False] * len(used)
        if self.resting is not None:
            self.resting.clear()


def _kept(flat: Tensor, *, out: Tensor, add: bool, **_: Any) -> None:
    """Takes what other ranks would be sent, where there are none."""
    with torch.no_grad():
        out.add_(flat) if add else out.copy_(flat)
