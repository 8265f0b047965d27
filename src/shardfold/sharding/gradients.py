"""The gradients of one unit since the last step: where they lie, and how far they are summed.

    resting      a buffer over ``grads`` itself, where those are not split
    local        a buffer that the next reduction sends, where gradients cannot be sent from where they rest
    sending      what the transport works on, and ``sent``, the buffer that it is done with when they are
    summed       what a reduction scatters, where ``grads`` rest in a slower tier: it is added to those there
    grads        of each segment: what the step uses (see ``segment``)

What ``grads`` hold is one enum, :class:`Sums`. The program says when ``local`` is made (``GRADS``) and given back
(``DROP``); gradients that come outside of that, in ``no_sync()`` or behind their unit's reduction, make it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.transport import Pending, Waiter, drain
from shardfold.errors import StepError
from shardfold.plan.layout import Tier
from shardfold.sharding.gradient_buffer import GradientBuffer
from shardfold.sharding.segment import Segment
from shardfold.tiers.device import DeviceTier

__all__ = ["Gradients", "SlotNumbers", "Sums"]

SlotNumbers = tuple[int, int]
"""The number of the trainable segment, and of the slot."""


class Sums(Enum):
    """Over which ranks ``grads`` are summed."""

    OWN = "over none: this rank's own, if any came"
    REDUCED = "over the axes of the first reduction of the step"
    TWICE = "over those, and over the axes of a second one (HSDP)"


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
        summed: by segment, this rank's shard of what a reduction gives, on its way to a slower tier; else None.
        node: by segment, between two hops: what the first has summed.
        extra: by segment: a second reduce-scatter's result of a step that has :attr:`Sums.TWICE` already; it is added
            to ``grads`` when it is summed over the other axes too.
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
        self.extra: list[Tensor] | None = None
        self.seen: set[SlotNumbers] = set()
        self.used = [[False] * len(segment.parameters) for segment in self.segments]
        self.count = sum(map(len, self.used))
        self.summed: list[Tensor] | None = None
        self.node: list[Tensor] = []
        self._store = store
        self._away = any(segment.table.grads.tier is not Tier.DEVICE for segment in self.segments)
        self._filed = any(segment.table.grads.tier is Tier.DISK for segment in self.segments)
        self._direct = not accelerator.has_streams(store.device)  # reductions can write in host memory
        self._adds = False  # a reduction has added to what came from the files
        self._lost: OSError | None = None  # why sums of earlier micro-batches are not there
        self._again = False  # a second one follows each, which must not have earlier sums in what it sums
        self._there = False  # and one has

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
        self.segments = []

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

    def send(self, sends: Sequence[Callable[..., None]], *, scatter: bool) -> None:
        """Hands the flat of each segment to one of ``sends``, which take ``(flat, pending=)`` and, to ``scatter``,
        ``out=``, ``add=`` and ``state=``. The buffer is :attr:`sent` until it is given back."""
        self._send(sends, self._complete(), [segment.format_state for segment in self.segments], scatter=scatter)

    def send_within(self, sends: Sequence[Callable[..., None]], ranks: int) -> None:
        """As :meth:`send`, the first of two hops, between so many ranks: its sums are :attr:`node`."""
        flats = self._complete()
        self.node = [
            self._store.empty(len(flat) // ranks, flat.dtype if flat.dtype == torch.float64 else torch.float32)
            for flat in flats
        ]
        for segment, send, flat, out in zip(self.segments, sends, flats, self.node, strict=True):
            send(flat, pending=self.sending, out=out, add=False, state=segment.format_state)

    def send_between(self, sends: Sequence[Callable[..., None]], waiter: Waiter) -> None:
        """As :meth:`send`, the second of two hops, behind the first: what that has summed within the node."""
        self.arrive(waiter)
        node, self.node = self.node, []
        self._send(sends, node, [segment.node_state for segment in self.segments], scatter=True)
        self.sending.append(Pending([], lambda: [self._store.recycle(flat) for flat in node]))

    def _complete(self) -> list[Tensor]:
        """The flats of what is sent next, all there."""
        buffer = self.resting if self.sums is Sums.OWN else None
        if buffer is None:
            return self._take_local().flats
        with torch.no_grad():
            buffer.complete()
        return buffer.flats

    def _send(
        self,
        sends: Sequence[Callable[..., None]],
        flats: list[Tensor],
        states: Sequence[Tensor | None],
        *,
        scatter: bool,
    ) -> None:
        self._there = self._away and scatter and self._direct and not self._filed
        if self._away and not self._there:
            self._send_away(sends, flats, states, scatter=scatter)
            return
        add = self.sums is not Sums.OWN
        if self.sums is Sums.OWN:
            self.sums = Sums.REDUCED
        if self.sums is Sums.TWICE and self.extra is None:
            self.extra = [torch.zeros_like(segment.master_grads) for segment in self.segments]
        for segment, send, flat, out, state in zip(self.segments, sends, flats, self._scattered(), states, strict=True):
            if scatter:
                send(flat, pending=self.sending, out=out, add=add, state=state)
            else:
                send(flat, pending=self.sending)
                if add:
                    self.sending.append(Pending([], partial(segment.add_to_grads, flat)))

    def _take_local(self) -> GradientBuffer:
        """:attr:`local`, complete; from now on it is :attr:`sent`."""
        buffer = self.sent = self.make()
        self.local = None
        with torch.no_grad():
            buffer.complete()
        return buffer

    def _send_away(
        self,
        sends: Sequence[Callable[..., None]],
        flats: Sequence[Tensor],
        states: Sequence[Tensor | None],
        *,
        scatter: bool,
    ) -> None:
        """As :meth:`send`, of gradients whose sum goes to a slower tier (:meth:`store`)."""
        if scatter:
            # In the order in which they would be added up in memory, so that sums are the same to the bit.
            self._adds = self._filed and self._direct and self.sums is not Sums.OWN and not self._again
            self.summed = [
                self._earlier(s) if self._adds else self._store.empty(s.shard_numel, s.dtypes["grads"])
                for s in self.segments
            ]
            for send, flat, out, state in zip(sends, flats, self.summed, states, strict=True):
                send(flat, pending=self.sending, out=out, add=self._adds, state=state)
        else:
            for send, flat in zip(sends, flats, strict=True):
                send(flat, pending=self.sending)

    def store(self, note: Callable[[Segment, Tensor], None]) -> None:
        """What this rank keeps of the sums of a backward begins to go to the tier that gradients rest in; where nothing
        is sent, its gradients as they came. ``note`` is shown what goes to a file.

        Raises:
            OSError: see :meth:`Region.store`; all is taken.
            StepError: what was summed before could not be read.
        """
        if self._there:
            self._there = False
            return
        if self.summed is None and self.sent is None:
            self._take_local()
        flats = self.summed
        if flats is None:
            assert self.sent is not None
            flats = self.sent.flats
        problem: OSError | None = None
        for segment, flat in zip(self.segments, flats, strict=True):
            try:
                self._store_one(segment, flat.to(segment.dtypes["grads"]), note)
            except OSError as error:
                problem = problem or error
        for flat in self.summed or ():
            self._store.recycle(flat)
        self.sums, self.summed, self._adds = Sums.REDUCED, None, False
        lost, self._lost = self._lost, None
        if lost is not None:
            raise StepError(f"{lost}: the gradients of earlier micro-batches are lost") from lost
        if problem is not None:
            raise problem

    def _store_one(self, segment: Segment, values: Tensor, note: Callable[[Segment, Tensor], None]) -> None:
        if segment.under_way is not None and segment.under_way.owns_grads:
            segment.under_way.settle()
        region = segment.regions["grads"]
        if region.resting is not None:
            if self.sums is Sums.OWN:
                region.store(values)
            else:
                region.add(values)
            return
        if self.sums is not Sums.OWN and not self._adds:
            values = self._earlier(segment).add_(values.to("cpu"))
        note(segment, values)
        region.store(values)

    def _earlier(self, segment: Segment) -> Tensor:
        """Sums of earlier micro-batches, out of their file; the memory is whoever's asks. What cannot be read is told
        when the sums are stored: other ranks are about to send theirs."""
        try:
            values = segment.bring("grads")
            values = segment.regions["grads"].values() if values is None else values
        except OSError as error:
            self._lost = error
            values = torch.zeros(segment.shard_numel, dtype=segment.dtypes["grads"])
        segment.here.pop("grads", None)
        return values

    def send_scattered(self, sends: Sequence[Callable[..., None]]) -> None:
        """The second of two reductions: sums the scattered gradients over the other axes (HSDP)."""
        if self.summed is not None:
            self._again = True
            for send, flat in zip(sends, self.summed, strict=True):
                send(flat, pending=self.sending)
            return
        for segment, send, target in zip(self.segments, sends, self._scattered(), strict=True):
            send(target, pending=self.sending)
            if self.extra is not None:
                self.sending.append(Pending([], partial(segment.master_grads.add_, target)))
        self.sums, self.extra = Sums.TWICE, None

    def _scattered(self) -> list[Tensor]:
        return self.extra or [segment.master_grads for segment in self.segments]

    def arrive(self, waiter: Waiter) -> None:
        """The sums are in ``grads``."""
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
            if self.extra is not None:
                self.extra[segment][held.own_piece(slot)[0]].zero_()

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
        self.local = self.extra = self.summed = None
        self.node = []
        self._there = self._adds = False
        for segment in self.segments:
            segment.drop_noted()
        self.sums = Sums.OWN
        self.seen.clear()
        for used in self.used:
            used[:] = [False] * len(used)
        if self.resting is not None:
            self.resting.clear()
