"""Checksums of what is in memory: whether bytes that nobody wrote have changed, of which unit and state, on which rank.

    shards, replicas    summed behind an update, looked at in front of the next one, which reads them
    gathered buffers    summed when all is there, looked at when they are given back; and, as all ranks have the same in
                        them, compared between ranks, and so are replicas

What is written on purpose, from a user's hand or a load, tells by PyTorch's count of writes, and is summed anew. The
sum of what is in the host's memory is its XXH3, which reads at the speed of memory; one flipped bit in 2^64 would go
unseen. Elsewhere it is that of all 64-bit words, modulo 2^64, once plain and once weighted by the row that a word is
in: a single flipped bit changes the first by a power of two, which is never 0, so it is always found; what is swapped
between rows shows in the second.

Where another rank has the same bytes and its sum holds, they come from there (see ``engine/healing``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from zlib import crc32

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from shardfold.comm.launcher_notes import tell_launcher
from shardfold.errors import StepError, by_rank
from shardfold.sharding.segment import Segment
from shardfold.sharding.unit import Unit
from shardfold.tiers.tier import Region

__all__ = ["Checksums", "summed", "word_sums"]

Heal = Callable[[Collection[int] | None, bool], bool | None]
"""Takes where this rank's bytes have changed (see :func:`broken_in`), and whether some had that were gathered, and says
what :meth:`Checksums.verify` does; None: nothing was done, on any rank."""
LOG = getLogger("shardfold")
HEALED = "It is as it was, from where another rank has the same. If a rank is named again, take its host out."
WIDTH = 1024
"""Words of a row."""
RESTS = ("params", "master", "global", "momentum")
"""States of a segment that only steps write."""
COPY = "the copy of another rank's states of {}"
TOLD = 4
"""Places that are named."""


@dataclass
class _Summed:
    """What lay in memory when it was summed.

    Attributes:
        where: unit and state, for people.
        memory: as it is now; None: it is elsewhere.
        writes: how often it, and parameters that are views of it, have been written by now.
        region: that it rests in; None: it was gathered.
    """

    where: str
    memory: Callable[[], Tensor | None]
    writes: Callable[[], int]
    region: Region | None = None

    def __post_init__(self) -> None:
        self.place, self.written, self.sums = self._place(), self.writes(), self.now()

    def _place(self) -> int:
        values = self.memory()
        return 0 if values is None else values.data_ptr()

    def now(self) -> Tensor:
        """The sums of what lies there."""
        values = self.memory()
        return torch.zeros(1, dtype=torch.int64) if values is None else summed(values)

    @property
    def holds(self) -> bool:
        """Whether nobody has written it, or moved it, since."""
        return self._place() == self.place and self.writes() == self.written


class Checksums:
    """Of one engine's states, on one rank.

    Args:
        units: as they are now.
        moments: what the optimizer keeps of a segment.
        copies: what this rank holds of another's part of it.
        compares: all ranks have the same bytes in what is gathered and in replicas.
    """

    def __init__(
        self,
        units: Callable[[], Iterable[Unit]],
        moments: Callable[[Segment], list[Region]],
        copies: Callable[[Segment], list[Region]],
        *,
        compares: bool,
    ) -> None:
        self._units, self._moments, self._copies, self._compares = units, moments, copies, compares
        self._resting: list[_Summed] = []
        self._gathered: dict[str, list[_Summed]] = {}
        self._ended: list[
            tuple[str, Tensor, Tensor]
        ] = []  # gathered: sums when it was there, and when it was given back
        self._alike: list[tuple[str, Tensor]] = []  # what all ranks have the same of, since the last step

    def connect(self) -> None:
        """Units tell of what is gathered from now on."""
        for unit in self._units():
            unit.tell(self.gathered, self.released)

    def close(self) -> None:
        for unit in self._units():
            unit.tell(None, None)
        self._resting, self._gathered, self._ended = [], {}, []

    # -- gathered buffers

    def gathered(self, unit: Unit) -> None:
        """A unit's values are there."""
        known = [
            _Summed(f"the gathered parameters of {unit.name}", _of(segment.flat), lambda: unit.version)
            for segment in unit.segments
            if segment.split
        ]
        self._gathered[unit.name] = known
        if not any(segment.spec.distinct for segment in unit.segments):
            self._alike += [(each.where, each.sums) for each in known]

    def released(self, unit: Unit) -> None:
        """They are about to be given back."""
        for known in self._gathered.pop(unit.name, ()):
            if known.holds:
                self._ended.append((known.where, known.sums, known.now()))

    # -- what rests

    def rest(self) -> None:
        """Behind an update: what rests now stays as it is until the next one."""
        self.connect()
        self._resting = list(self._places())

    def _places(self) -> Iterator[_Summed]:
        for unit in self._units():
            for segment in unit.segments:
                regions = [(state, segment.regions.get(state)) for state in RESTS]
                if segment.spec.trainable:
                    regions += [("moments", region) for region in self._moments(segment)]
                regions += [("copies", region) for region in self._copies(segment)]
                for state, region in regions:
                    if region is not None and region.resting is not None and region.resting.numel():
                        whole = state == "params" and not segment.split
                        views = segment.parameters if whole else []
                        what = "replica" if whole else "shard"
                        where = f"the {what} of {state} of {unit.name}" if state != "copies" else COPY.format(unit.name)
                        yield _Summed(where, _rested(region), _count(region, views), region)

    # -- in front of an update

    def verify(
        self, exchange: Callable[[str, str], list[str]], ranks: Sequence[int], number: int, heal: Heal | None
    ) -> bool:
        """All ranks: nothing has changed that nobody wrote, and what all have the same is the same.

        Args:
            exchange: what every rank says under a name.
            ranks: these, in their order there, by their number in the job.
            number: of the step.
            heal: makes it right again; None: nothing does.

        Returns:
            Whether gradients are of values that had not changed.

        Raises:
            StepError: on every rank: where bytes have changed, and on which.
        """
        there = [*self._resting, *(known for each in self._gathered.values() for known in each)]
        looked = [known for known in there if known.holds]
        pairs = [*((known.where, known.sums, known.now()) for known in looked), *self._ended]
        replicas = [(known.where, known.sums) for known in self._resting if known.where.startswith("the replica")]
        same = [*self._alike, *replicas] if self._compares else []
        before, after, alike_sums = _read(
            [sums for _, sums, _ in pairs], [sums for *_, sums in pairs], [sums for _, sums in same]
        )
        changed = [one != other for one, other in zip(before, after, strict=True)]
        broken = [known for known, differs in zip(looked, changed, strict=False) if differs]
        freed = [where for (where, *_), differs in zip(self._ended, changed[len(looked) :], strict=True) if differs]
        found = [*(known.where for known in broken), *freed]
        alike = [(where, sums) for (where, _), sums in zip(same, alike_sums, strict=True)]
        self._ended, self._alike = [], []
        mine = json.dumps([list(dict.fromkeys(found))[:TOLD], crc32(json.dumps(alike).encode())])
        said = [json.loads(text) for text in exchange(f"checksums/{number}", mine)]
        wrong = {rank: ", ".join(places) for rank, (places, _) in zip(ranks, said, strict=True)}
        if any(wrong.values()):
            stands = heal(broken_in(broken), bool(freed)) if heal is not None else None
            if stands is None:
                raise _corrupt(by_rank(wrong), follows=not found)
            if found:
                dropped = "" if stands else " Gradients were made with it: the step is skipped on all ranks."
                LOG.warning("memory has changed that nobody wrote: %s. %s%s", by_rank(wrong), HEALED, dropped)
            return stands
        if len({code for _, code in said}) > 1:
            told = [json.loads(text) for text in exchange(f"checksums/{number}/apart", json.dumps(alike))]
            raise _corrupt(_apart(told, ranks))
        return True


def broken_in(known: Sequence[_Summed]) -> Collection[int] | None:
    """The regions, by their ``id``, in which bytes have changed; None: some are in what is gathered still."""
    regions = [each.region for each in known]
    return None if None in regions else {id(region) for region in regions}


def _read(*lists: Sequence[Tensor]) -> list[list[list[int]]]:
    """The values of sums, for which the host waits once for each device."""
    every = [sums for each in lists for sums in each]
    found = dict[int, list[int]]()
    for device in {sums.device for sums in every}:
        at = [number for number, sums in enumerate(every) if sums.device == device]
        found |= zip(at, torch.stack([every[number] for number in at]).tolist(), strict=True)
    numbers = iter(range(len(every)))
    return [[found[next(numbers)] for _ in each] for each in lists]


def _of(flat: Tensor) -> Callable[[], Tensor | None]:
    return lambda: flat if flat.untyped_storage().size() else None


def _rested(region: Region) -> Callable[[], Tensor | None]:
    return lambda: None if region.resting is None else region.values()


def _count(region: Region, views: list[torch.nn.Parameter]) -> Callable[[], int]:
    def writes() -> int:
        resting = region.resting
        return (resting._version if resting is not None else -1) + sum(view._version for view in views)

    return writes


def _apart(every: list[list[tuple[str, list[int]]]], ranks: Sequence[int]) -> str:
    """Which ranks have other bytes than most, and of what; at first."""
    for place in range(min(map(len, every))):
        sums = [tuple(each[place][1]) for each in every]
        most = max(sums, key=sums.count)
        if odd := [rank for rank, own in zip(ranks, sums, strict=True) if own != most]:
            where = every[0][place][0]
            if 2 * sums.count(most) <= len(sums):
                return f"{where} differs between ranks {', '.join(map(str, ranks))}"
            return f"rank {', '.join(map(str, odd))}: {where} differs from the other ranks'"
    return "ranks have gathered different units"


def _corrupt(where: str, *, follows: bool = False) -> StepError:
    """The error, of which the launcher is told too; ``follows``: only other ranks' memory has changed."""
    error = StepError(
        f"memory has changed that nobody wrote: {where}. Nothing was updated with it on any rank; engine.load() of a "
        "checkpoint puts it right. If a rank is named again, its memory or device is broken: take its host out."
    )
    tell_launcher(str(error), follows=follows)
    return error


def summed(values: Tensor) -> Tensor:
    """A sum of the bytes of ``values``, which are contiguous: int64, on their device."""
    raw = values.detach().reshape(-1).view(torch.uint8)
    return torch.tensor([xxh3_64_intdigest(raw.numpy().data) - 2**63]) if raw.is_cpu else word_sums(raw)


def word_sums(raw: Tensor) -> Tensor:
    """Two sums modulo 2^64 of bytes, by operations that any device has."""
    size = raw.numel() // 8
    if raw.storage_offset() % 8:
        raw = raw.clone()
    tail = raw[size * 8 :]
    words = raw[: size * 8].view(torch.int64)
    rows = size // WIDTH
    each = words[: rows * WIDTH].view(rows, WIDTH).sum(1)
    rest = torch.cat([each, words[rows * WIDTH :], tail.to(torch.int64)])
    weights = torch.arange(1, rest.numel() + 1, device=rest.device)
    return torch.stack([rest.sum(), (rest * weights).sum()])
