"""Models of many blocks that are alike are traced with a few of them; what the others do is repeated.

Of a list of blocks the first three and the last two run. Where the second and the third do the same, event by event,
in forward and in backward, with the same bytes and the same work, those that were left out would do it too: their
events are put in between, with the bytes that each leaves behind. Where anything differs, the whole model is traced.
Blocks of several kinds that take turns are taken by groups of one of each, and others may be in front of them and
behind them in the list, which may be the model itself.

Of a stage of a pipeline its own blocks are taken so; of those of every other stage, which stand for what they give, the
first is there.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from shardfold.parallel.pipeline.stages import Stages
from shardfold.planner.trace import Event, Trace

__all__ = ["Folded", "TracedBlocks", "fold", "fold_stage", "renumbered"]

LEFT_OUT = 7
"""Blocks of a list that it is worth to leave out."""
FRONT, KEPT = 3, 5
"""Groups of blocks that run: so many of the first, so many in all."""
KINDS = 6
"""Of blocks that take turns, at most."""
Described = tuple[Any, list[tuple[str, Any]]]
"""Of a block: classes and shapes, and settings."""
SIMPLE = (int, float, str, bool, type(None))
"""Of settings of modules: these are compared."""


@dataclass(frozen=True)
class _HeldBytes:
    """Bytes that are held on the device, and that are away."""

    level: float = 0.0
    away: float = 0.0

    def __add__(self, other: _HeldBytes) -> _HeldBytes:
        return _HeldBytes(self.level + other.level, self.away + other.away)

    def __sub__(self, other: _HeldBytes) -> _HeldBytes:
        return self + other * -1

    def __mul__(self, times: float) -> _HeldBytes:
        return _HeldBytes(self.level * times, self.away * times)


class TracedBlocks(NamedTuple):
    """Blocks of a list that are traced for.

    Attributes:
        number: how many.
        there: the first of them in the whole model.
        here: the first of them in the copy, which has :attr:`kept` of them.
        kinds: of blocks, which take turns.
    """

    number: int
    there: int = 0
    here: int = 0
    kinds: int = 1

    @property
    def kept(self) -> int:
        return min(self.number, KEPT * self.kinds)

    def whole(self, at: int) -> int:
        """The number in the whole model of the ``at``-th that was kept, counted from the first of them."""
        return self.there + (at if at < FRONT * self.kinds else at + self.number - self.kept)

    def copied(self, at: int) -> int | None:
        """The number in the copy of one of the whole model; None: it was left out."""
        behind = at - self.there - FRONT * self.kinds
        if behind < 0:
            return self.here + at - self.there
        return None if behind < self.number - self.kept else self.here + at - self.there - self.number + self.kept

    @property
    def stay(self) -> list[int]:
        """The numbers in the whole model of those that were kept."""
        return [self.whole(at) for at in range(self.kept)]


@dataclass(frozen=True)
class Folded:
    """A model with some blocks left out.

    Attributes:
        model: a copy.
        lists: blocks of each list of which some are left out, by its path.
        begins: of a stage the first piece of each stage but the first.
    """

    model: nn.Module
    lists: Mapping[str, TracedBlocks]
    begins: Sequence[str] = ()

    def kept(self, name: str) -> str | None:
        """The path that a unit of the whole model has here; None: it was left out."""
        path, _, at = name.rpartition(".")
        if path not in self.lists or not at.isdecimal():
            return name
        copied = self.lists[path].copied(int(at))
        return None if copied is None else _path(path, copied)

    def unfolded(self, trace: Trace) -> Trace | None:
        """The trace of the whole model; None: blocks differ."""
        events: list[Event] | None = list(trace.events)
        for path in self.lists:
            events = self._repeated(events, path)
            if events is None or any(self._place(name)[0] for name in trace.touched):
                return None
        return replace(trace, events=tuple(events or ()))

    def _place(self, name: str) -> tuple[str | None, int]:
        """The list of a unit, and which it is of those of its blocks that were kept."""
        path, _, at = name.rpartition(".")
        return (path, int(at) - self.lists[path].here) if path in self.lists and at.isdecimal() else (None, 0)

    def _repeated(self, events: list[Event] | None, path: str) -> list[Event] | None:
        """Events with those that a list's blocks would have that were left out."""
        if events is None:
            return None
        number, _, here, kinds = self.lists[path]
        if number <= KEPT * kinds:
            return [self._named(event, path, None) for event in events]
        firsts = [_path(path, here + at * kinds) for at in range(KEPT)]
        entered = [_all_at(events, "enter", first) for first in firsts]
        reached = [_all_at(events, "enter_backward", first)[:1] for first in firsts]
        if any(len(found) != 1 for found in (*entered, *reached)):
            return None
        forward, backward = ([at for (at,) in each] for each in (entered, reached))
        ways = [forward, backward]
        parts = [n for n, event in enumerate(events) if event.kind == "inputs"]
        if parts:  # gradients of weights come in a part of their own
            each = [_all_at(events, "gradient", first)[-1:] for first in firsts]
            if not all(each):
                return None
            ways.append([at for (at,) in each])
        if any(way != sorted(way, reverse=bool(n)) for n, way in enumerate(ways)):
            return None
        if any(before[-1] > way[-1] for before, way in pairwise(ways)):
            return None
        return self._longer(events, path, ways)

    def _longer(self, events: list[Event], path: str, ways: Sequence[Sequence[int]]) -> list[Event] | None:
        """Events with more of those between two blocks. ``ways``: where each of the blocks that were kept comes, in
        forward, and in each part of a backward, in which the last of them comes first."""
        number, _, here, kinds = self.lists[path]
        times, last = number // kinds - KEPT, number // kinds - 2
        found: list[Event] = []
        begin, above = 0, _HeldBytes()  # of what is left, and how much higher it is
        for n, way in enumerate(ways):
            first, second, third = (way[1], way[2], way[3]) if not n else (way[3], way[2], way[1])
            one, other = _span(events, first, second), _span(events, second, third)
            more, again = (other, one) if not n else (one, other)
            anchors = (2, 1) if not n else (3, 2)
            begins = (second, first) if not n else (first, second)
            if _relative(more, events[begins[0]], path, here + anchors[0] * kinds) != _relative(
                again, events[begins[1]], path, here + anchors[1] * kinds
            ):
                return None
            changes = _HeldBytes(more[-1].level, more[-1].away) - _HeldBytes(
                events[begins[0]].level, events[begins[0]].away
            )
            found += [self._named(_raised(e, above), path, None) for e in events[begin : first + 1]]
            if not n:
                found += [self._named(e, path, (1, 1)) for e in again]
            for k in range(times + 1):
                shift = (2, 2 + k) if not n else (3, last - k)
                found += [self._named(_raised(e, above + changes * k), path, shift) for e in more]
            above = above + changes * times
            begin = third + 1
            if n:
                found += [self._named(_raised(e, above), path, (2, 2)) for e in again]
        return None if above.level or above.away else found + [self._named(e, path, None) for e in events[begin:]]

    def _named(self, event: Event, path: str, anchor: tuple[int, int] | None) -> Event:
        """The event under the name of the whole model: of blocks near the ``anchor``'s first number, which is that
        group's here, by its second, which is its there."""
        of, at = self._place(event.unit)
        if of != path:
            return event
        blocks = self.lists[path]
        whole = blocks.whole(at) if anchor is None else blocks.there + at + (anchor[1] - anchor[0]) * blocks.kinds
        unit = _path(path, whole)
        slot = unit + event.slot.removeprefix(event.unit) if event.slot else ""
        return event._replace(unit=unit, slot=slot)


def fold(model: nn.Module, units: Sequence[str]) -> Folded | None:
    """The model with some of the blocks left out that are alike; None: there are not so many.

    Args:
        model: without memory; it stays as it is.
        units: paths of its units.
    """
    lists: dict[str, TracedBlocks] = {}
    keeps: dict[str, list[int]] = {}
    for path, blocks in _lists(model):
        if (found := _run(model, path, blocks, set(units))) is not None:
            lists[path] = found
            keeps[path] = [at for at in range(len(blocks)) if found.copied(at) is not None]
    return Folded(_without(model, keeps), lists) if lists else None


def fold_stage(model: nn.Module, units: Sequence[str], stages: Stages, stage: int) -> Folded | None:
    """The model with some of the blocks of a stage left out, and most of those of others; None: there are not so many.

    Args:
        model: without memory, with the parameters of all stages; it stays as it is.
        units: paths of the stage's units.
        stages: of the model.
        stage: number of the one that is traced.
    """
    of = {piece.path: at for piece, at in zip(stages.pieces, stages.stage_of, strict=True)}
    lists: dict[str, TracedBlocks] = {}
    keeps: dict[str, list[int]] = {}
    for path, blocks in _lists(model):
        if len(blocks) < KEPT + LEFT_OUT or not _alike(blocks):
            continue
        homes = [of.get(f"{path}.{n}", -1) for n in range(len(blocks))]
        own = [n for n, home in enumerate(homes) if home == stage]
        if -1 in homes or not own or _under(units, path) != [f"{path}.{n}" for n in own]:
            continue
        firsts = sorted({homes.index(home) for home in homes if home != stage})
        lists[path] = TracedBlocks(len(own), own[0], sum(first < own[0] for first in firsts))
        keeps[path] = sorted([*firsts, *lists[path].stay])
    if not lists:
        return None
    begins = [
        f"{path}.{keeps[path].index(int(at))}" if path in keeps else begin
        for begin in stages.begins
        for path, _, at in (begin.rpartition("."),)
    ]
    return Folded(_without(model, keeps), lists, begins)


def renumbered(events: Sequence[Event], path: str, by: int) -> Iterator[Event]:
    """Events as they are of blocks of a list so many further on."""
    for event in events:
        of, _, at = event.unit.rpartition(".")
        if of != path:
            yield event
            continue
        unit = _path(path, int(at) + by)
        yield event._replace(unit=unit, slot=unit + event.slot.removeprefix(event.unit) if event.slot else "")


def _path(path: str, at: int) -> str:
    """Of a block of a list."""
    return f"{path}.{at}" if path else str(at)


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Lists of blocks, by their paths."""
    for path, module in model.named_modules():
        if type(module) in (nn.ModuleList, nn.Sequential):
            blocks = [*module.children()]
            if [*module._modules] == [str(n) for n in range(len(blocks))]:
                yield path, blocks


def _run(model: nn.Module, path: str, blocks: Sequence[nn.Module], units: Set[str]) -> TracedBlocks | None:
    """The longest run of blocks that are alike, or of kinds that take turns; None: there is none that is long enough,
    or blocks have parameters that are not of units of their own."""
    if len(blocks) < KEPT + LEFT_OUT:
        return None
    own = [_path(path, n) in units for n in range(len(blocks))]
    if any(not one and next(block.parameters(), None) is not None for one, block in zip(own, blocks, strict=True)):
        return None
    described, best = [_described(block) for block in blocks], TracedBlocks(0)
    for kinds in range(1, KINDS + 1):
        for start, stop in _repeats(described, own, kinds):
            number = (stop - start) // kinds * kinds
            if number - KEPT * kinds >= max(LEFT_OUT, best.number - best.kept + 1):
                best = TracedBlocks(number, start, start, kinds)
    return best if best.number and not _shared(model, blocks[best.there : best.there + best.number]) else None


def _repeats(described: Sequence[Described], own: Sequence[bool], kinds: int) -> Iterator[tuple[int, int]]:
    """Where blocks begin that are each like the one so many before it, and end; the first of them is a unit."""
    start = 0
    while start < len(described):
        stop = start
        if own[start]:
            while stop < len(described) and _like(described, own, start + (stop - start) % kinds, stop):
                stop += 1
            yield start, stop
        start = max(stop - kinds, start) + 1


def _like(described: Sequence[Described], own: Sequence[bool], first: int, at: int) -> bool:
    """Whether two blocks of a list are the same but for their own numbers."""
    if own[first] != own[at] or described[first][0] != described[at][0]:
        return False
    settings, mine = described[first][1], described[at][1]
    if len(mine) != len(settings):
        return False
    for (name, value), (own_name, its) in zip(settings, mine, strict=True):
        numbered = type(value) is type(its) is int and (value, its) == (first, at)
        if name != own_name or (value != its and not numbered):
            return False
    return True


def _shared(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether something else has a parameter of some blocks, too."""
    times = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return any(times[id(p)] > 1 for block in blocks for p in block.parameters())


def _under(units: Sequence[str], path: str) -> list[str]:
    return [unit for unit in units if unit.startswith(f"{path}.")]


def _without(model: nn.Module, keeps: Mapping[str, Sequence[int]]) -> nn.Module:
    """A copy that has the same parameters, and of some lists these blocks only."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for path, kept in keeps.items():
        for at, block in enumerate(model.get_submodule(path).children()):
            if at not in kept:
                memo[id(block)] = nn.Identity()
    made = copy.deepcopy(model, memo)
    for path, kept in keeps.items():
        whole = made.get_submodule(path)
        whole._modules = {str(n): whole._modules[str(at)] for n, at in enumerate(kept)}
    return made


def _alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks are the same but for their own numbers."""
    described, own = [_described(block) for block in blocks], [True] * len(blocks)
    return all(_like(described, own, 0, at) for at in range(len(blocks)))


def _described(block: nn.Module) -> Described:
    """Classes and shapes of a block, and its settings."""
    shapes: list[Any] = []
    settings: list[tuple[str, Any]] = []
    for path, part in block.named_modules():
        tensors = [*part._parameters.items(), *part._buffers.items()]
        shapes.append((path, type(part), [(n, t.shape, t.dtype, t.requires_grad) for n, t in tensors if t is not None]))
        settings += [(name, value) for name, value in sorted(vars(part).items()) if type(value) in SIMPLE]
    return shapes, settings


def _all_at(events: Sequence[Event], kind: str, unit: str) -> list[int]:
    return [at for at, event in enumerate(events) if event.kind == kind and event.unit == unit]


def _span(events: list[Event], start: int, stop: int) -> list[Event]:
    """What is behind one event, to another."""
    return events[start + 1 : stop + 1]


def _raised(event: Event, by: _HeldBytes) -> Event:
    return event._replace(peak=event.peak + by.level, level=event.level + by.level, away=event.away + by.away)


def _relative(events: Sequence[Event], before: Event, path: str, anchor: int) -> list[Any]:
    """Events as they look from a block: bytes above those before it, blocks by their distance."""
    level, away = before.level, before.away
    found: list[Any] = []
    for e in events:
        of, _, at = e.unit.rpartition(".")
        unit = int(at) - anchor if of == path else e.unit
        slot = e.slot.removeprefix(e.unit) if of == path else e.slot
        found.append((e.kind, unit, e.peak - level, e.level - level, e.size, slot, e.work, e.away - away))
    return found
