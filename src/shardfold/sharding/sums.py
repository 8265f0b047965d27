"""Where the sums of a unit's gradients go: chosen once, when its ``Gradients`` are made.

InPlaceSums  into ``grads`` themselves, in memory of the device
AwaySums     into memory for a short while, and from there to the slower tier that ``grads`` rest in: where the
             device has streams, reductions cannot write in host memory
HostSums     what is scattered into ``grads`` in host memory; what is whole as by ``AwaySums``
FileSums     as by ``AwaySums``; what is scattered is added to earlier sums, which came from their file
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.transport import Pending
from shardfold.plan.layout import Tier
from shardfold.sharding.segment import Segment
from shardfold.tiers.device import DeviceTier

__all__ = ["InPlaceSums", "Note", "Reduction", "Send", "Sums", "sums_of"]

Send = Callable[..., None]
"""Takes ``(flat, pending=)`` and, to scatter, ``out=``, ``add=`` and ``state=``."""
Note = Callable[[Segment, Tensor], None]
"""Is shown what goes to a file."""


class Sums(Enum):
    """Over which ranks ``grads`` are summed."""

    OWN = "over none: this rank's own, if any came"
    REDUCED = "over the axes of the first reduction of the step"
    TWICE = "over those, and over the axes of a second one (HSDP)"


class Reduction(NamedTuple):
    """The first of a backward.

    Attributes:
        sends: one for each segment.
        flats: what they are handed.
        states: what the format of each keeps, if anything.
        pending: where what is under way goes.
        scatter: whether each rank gets a part.
    """

    sends: Sequence[Send]
    flats: Sequence[Tensor]
    states: Sequence[Tensor | None]
    pending: list[Pending]
    scatter: bool


class SumsStored(NamedTuple):
    """What became of sums on their way to a slower tier: what ``grads`` hold, and what first went wrong.

    Attributes:
        sums: of ``grads``.
        lost: why those of earlier micro-batches could not be read.
        refused: why what was stored earlier is not there.
    """

    sums: Sums
    lost: OSError | None = None
    refused: OSError | None = None


class InPlaceSums:
    """
    Args:
        segments: trainable ones of a unit.
        store: makes memory for a short while, and takes it back.

    Attributes:
        summed: by segment, this rank's shard of what a reduction gives, on its way to a slower tier; else None.
    """

    def __init__(self, segments: Sequence[Segment], store: DeviceTier) -> None:
        self._segments, self._store = segments, store
        self.summed: list[Tensor] | None = None
        # By segment: a second reduce-scatter's result of a step that has Sums.TWICE already; it is added to ``grads``
        # when it is summed over the other axes too.
        self._extra: list[Tensor] | None = None

    def send(self, sums: Sums, of: Reduction) -> Sums:
        """Begins a reduction. ``sums``: of ``grads`` so far; returns what they will be."""
        add = sums is not Sums.OWN
        if sums is Sums.TWICE and self._extra is None:
            self._extra = [torch.zeros_like(segment.master_grads) for segment in self._segments]
        given = zip(self._segments, of.sends, of.flats, self._scattered(), of.states, strict=True)
        for segment, send, flat, out, state in given:
            if of.scatter:
                send(flat, pending=of.pending, out=out, add=add, state=state)
            else:
                send(flat, pending=of.pending)
                if add:
                    of.pending.append(Pending([], partial(segment.add_to_grads, flat)))
        return sums if add else Sums.REDUCED

    def send_again(self, sums: Sums, sends: Sequence[Send], sending: list[Pending]) -> Sums:
        """The second of two reductions: sums what was scattered over the other axes (HSDP)."""
        for segment, send, target in zip(self._segments, sends, self._scattered(), strict=True):
            send(target, pending=sending)
            if self._extra is not None:
                sending.append(Pending([], partial(segment.master_grads.add_, target)))
        self._extra = None
        return Sums.TWICE

    def spread(self, sends: Sequence[Send], sending: list[Pending]) -> None:
        """Brings together what each rank has summed of what all keep."""
        for segment, send in zip(self._segments, sends, strict=True):
            send(segment.master_grads, pending=sending)

    def _scattered(self) -> list[Tensor]:
        return self._extra or [segment.summed_grads for segment in self._segments]

    def store(self, sums: Sums, whole: Callable[[], list[Tensor]], note: Note) -> SumsStored:
        """What this rank keeps of the sums of a backward begins to go to the tier that gradients rest in; where it was
        not scattered, of ``whole()``, flats of gradients."""
        return SumsStored(sums)

    def drop(self, segment: int, piece: slice) -> None:
        """Forgets a range of a shard."""
        if self._extra is not None:
            self._extra[segment][piece].zero_()

    def forget(self) -> None:
        """As before the first backward of a step."""
        self._extra = self.summed = None


class AwaySums(InPlaceSums):
    def __init__(self, segments: Sequence[Segment], store: DeviceTier) -> None:
        super().__init__(segments, store)
        self._lost: OSError | None = None  # why earlier sums could not be read, until that may be told

    def send(self, sums: Sums, of: Reduction) -> Sums:
        if of.scatter:
            add = self._adds(sums)
            self.summed = [
                self._earlier(s) if add else self._store.empty(s.shard_numel, s.dtypes["grads"]) for s in self._segments
            ]
            for send, flat, out, state in zip(of.sends, of.flats, self.summed, of.states, strict=True):
                send(flat, pending=of.pending, out=out, add=add, state=state)
        else:
            for send, flat in zip(of.sends, of.flats, strict=True):
                send(flat, pending=of.pending)
        return sums

    def _adds(self, sums: Sums) -> bool:
        """Whether the next reduction adds to earlier sums."""
        return False

    def send_again(self, sums: Sums, sends: Sequence[Send], sending: list[Pending]) -> Sums:
        if self.summed is None:
            return super().send_again(sums, sends, sending)
        for send, flat in zip(sends, self.summed, strict=True):
            send(flat, pending=sending)
        return sums

    def store(self, sums: Sums, whole: Callable[[], list[Tensor]], note: Note) -> SumsStored:
        flats = whole() if self.summed is None else self.summed
        refused: OSError | None = None
        for segment, flat in zip(self._segments, flats, strict=True):
            try:
                self._store_one(sums, segment, flat.to(segment.dtypes["grads"]), note)
            except OSError as error:
                refused = refused or error
        for flat in self.summed or ():
            self._store.recycle(flat)
        self.summed = None
        lost, self._lost = self._lost, None
        return SumsStored(Sums.REDUCED, lost, refused)

    def _store_one(self, sums: Sums, segment: Segment, values: Tensor, note: Note) -> None:
        if segment.under_way is not None and segment.under_way.owns_grads:
            segment.under_way.settle()
        region = segment.regions["grads"]
        if region.resting is None:
            values = values if sums is Sums.OWN else self._with_earlier(segment, values)
            note(segment, values)
            region.store(values)
        elif sums is Sums.OWN:
            region.store(values)
        else:
            region.add(values)

    def _with_earlier(self, segment: Segment, values: Tensor) -> Tensor:
        """``values``, and what was summed before, which is in a file."""
        return self._earlier(segment).add_(values.to("cpu"))

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


class HostSums(AwaySums):
    _there = False  # a reduction has written in host memory

    def send(self, sums: Sums, of: Reduction) -> Sums:
        self._there = of.scatter
        return InPlaceSums.send(self, sums, of) if of.scatter else super().send(sums, of)

    def store(self, sums: Sums, whole: Callable[[], list[Tensor]], note: Note) -> SumsStored:
        there, self._there = self._there, False
        return SumsStored(sums) if there else super().store(sums, whole, note)

    def forget(self) -> None:
        super().forget()
        self._there = False


class FileSums(AwaySums):
    """Sums are added up in the order in which they would be in memory, so that they are the same to the bit."""

    _added = False  # a reduction has added to what came from the files
    _again = False  # a second one follows each, which must not have earlier sums in what it sums

    def _adds(self, sums: Sums) -> bool:
        self._added = sums is not Sums.OWN and not self._again
        return self._added

    def send_again(self, sums: Sums, sends: Sequence[Send], sending: list[Pending]) -> Sums:
        self._again |= self.summed is not None
        return super().send_again(sums, sends, sending)

    def store(self, sums: Sums, whole: Callable[[], list[Tensor]], note: Note) -> SumsStored:
        stored = super().store(sums, whole, note)
        self._added = False
        return stored

    def _with_earlier(self, segment: Segment, values: Tensor) -> Tensor:
        return values if self._added else super()._with_earlier(segment, values)

    def forget(self) -> None:
        super().forget()
        self._added = False


def sums_of(segments: Sequence[Segment], store: DeviceTier) -> InPlaceSums:
    """How a unit with these trainable segments sums its gradients."""
    tiers = {segment.table.grads.tier for segment in segments}
    if tiers <= {Tier.DEVICE}:
        return InPlaceSums(segments, store)
    if accelerator.has_streams(store.device):
        return AwaySums(segments, store)
    return FileSums(segments, store) if Tier.DISK in tiers else HostSums(segments, store)
