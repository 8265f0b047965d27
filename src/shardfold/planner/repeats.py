"""Models of many blocks that are alike are traced with a few of them; what the others do is repeated.

Of a list of blocks the first three and the last two run. Where the second and the third do the same, event by event,
in forward and in backward, with the same bytes and the same work, those that were left out would do it too: their
events are put in between, with the bytes that each leaves behind. Where anything differs, the whole model is traced.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardfold.planner.trace import Event, Trace

__all__ = ["Folded", "fold"]

LEAST = 12
"""Blocks of a list of which some are left out."""
FRONT, KEPT = 3, 5
"""Those that run: so many of the first, so many in all."""
SIMPLE = (int, float, str, bool, type(None))
"""Of settings of modules: these are compared."""


@dataclass(frozen=True)
class Folded:
    """A model with some blocks left out.

    Attributes:
        model: a copy.
        lists: by the path of each list of which some are left out, how many blocks it has.
    """

    model: nn.Module
    lists: Mapping[str, int]

    def renamed(self, name: str) -> str:
        """The path that a unit has in the whole model."""
        path, at = self._place(name)
        return name if path is None else f"{path}.{self._whole(path, at)}"

    def kept(self, name: str) -> str | None:
        """The path that a unit of the whole model has here; None: it was left out."""
        path, at = self._place(name)
        if path is None:
            return name
        number = self.lists[path]
        if FRONT <= at < number - (KEPT - FRONT):
            return None
        return f"{path}.{at if at < FRONT else at - number + KEPT}"

    def unfolded(self, trace: Trace) -> Trace | None:
        """The trace of the whole model; None: blocks differ."""
        events: list[Event] | None = list(trace.events)
        for path in self.lists:
            events = self._repeated(events, path)
            if events is None or any(self._place(name)[0] for name in trace.touched):
                return None
        return replace(trace, events=tuple(events or ()))

    def _place(self, name: str) -> tuple[str | None, int]:
        path, _, at = name.rpartition(".")
        return (path, int(at)) if path in self.lists else (None, 0)

    def _whole(self, path: str, at: int) -> int:
        return at if at < FRONT else at + self.lists[path] - KEPT

    def _repeated(self, events: list[Event] | None, path: str) -> list[Event] | None:
        """Events with those that a list's blocks would have that were left out."""
        if events is None:
            return None
        entered = [_all_at(events, "enter", f"{path}.{at}") for at in range(KEPT)]
        reached = [_all_at(events, "enter_backward", f"{path}.{at}")[:1] for at in range(KEPT)]
        if any(len(found) != 1 for found in (*entered, *reached)):
            return None
        forward, backward = ([at for (at,) in each] for each in (entered, reached))
        if forward != sorted(forward) or backward != sorted(backward, reverse=True) or forward[-1] > backward[-1]:
            return None
        times = self.lists[path] - KEPT
        model, again = _span(events, forward[2], forward[3]), _span(events, forward[1], forward[2])
        back, back_again = _span(events, backward[3], backward[2]), _span(events, backward[2], backward[1])
        grows, shrinks = model[-1].level - events[forward[2]].level, back[-1].level - events[backward[3]].level
        if grows + shrinks or _relative(model, events[forward[2]].level, path, 2) != _relative(
            again, events[forward[1]].level, path, 1
        ):
            return None
        if _relative(back, events[backward[3]].level, path, 3) != _relative(
            back_again, events[backward[2]].level, path, 2
        ):
            return None
        last = self.lists[path] - 2
        found = [self._named(e, path, None) for e in events[: forward[1] + 1]]
        found += [self._named(e, path, (1, 1)) for e in again]
        found += [self._named(e, path, (2, 2)) for e in model]
        for n in range(1, times + 1):
            found += [self._named(_raised(e, n * grows), path, (2, 2 + n)) for e in model]
        between = events[forward[3] + 1 : backward[3] + 1]
        found += [self._named(_raised(e, times * grows), path, None) for e in between]
        found += [self._named(_raised(e, times * grows), path, (3, last)) for e in back]
        for n in range(1, times + 1):
            found += [self._named(_raised(e, times * grows + n * shrinks), path, (3, last - n)) for e in back]
        found += [self._named(e, path, (2, 2)) for e in back_again]
        return found + [self._named(e, path, None) for e in events[backward[1] + 1 :]]

    def _named(self, event: Event, path: str, anchor: tuple[int, int] | None) -> Event:
        """The event under the name of the whole model: of blocks near the ``anchor``'s first number, which is that
        block's here, by its second, which is its there."""
        of, at = self._place(event.unit)
        if of != path:
            return event
        whole = self._whole(path, at) if anchor is None else at - anchor[0] + anchor[1]
        unit = f"{path}.{whole}"
        slot = unit + event.slot.removeprefix(event.unit) if event.slot else ""
        return event._replace(unit=unit, slot=slot)


def fold(model: nn.Module, units: Sequence[str]) -> Folded | None:
    """The model with some of the blocks left out that are alike; None: there are not so many.

    Args:
        model: without memory; it stays as it is.
        units: paths of its units.
    """
    lists: dict[str, int] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if type(module) in (nn.ModuleList, nn.Sequential) and len(module) >= LEAST:
            blocks = list(module)
            own = [unit for unit in units if unit.startswith(f"{path}.")]
            if own == [f"{path}.{n}" for n in range(len(blocks))] and _alike(blocks):
                lists[path] = len(blocks)
    if not lists:
        return None
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for path, number in lists.items():
        for block in list(model.get_submodule(path))[FRONT : number - (KEPT - FRONT)]:  # pyright: ignore
            memo[id(block)] = nn.Identity()
    made = copy.deepcopy(model, memo)
    for path, number in lists.items():
        whole = made.get_submodule(path)
        kept = [*range(FRONT), *range(number - (KEPT - FRONT), number)]
        whole._modules = {str(n): whole._modules[str(at)] for n, at in enumerate(kept)}
    return Folded(made, lists)


def _alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks are the same but for their own numbers."""
    first, settings = _described(blocks[0])
    for at, block in enumerate(blocks):
        shapes, mine = _described(block)
        if shapes != first or len(mine) != len(settings):
            return False
        for (name, value), (own_name, own) in zip(settings, mine, strict=True):
            numbered = type(value) is type(own) is int and (value, own) == (0, at)
            if name != own_name or (value != own and not numbered):
                return False
    return True


def _described(block: nn.Module) -> tuple[Any, list[tuple[str, Any]]]:
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


def _raised(event: Event, by: float) -> Event:
    return event._replace(peak=event.peak + by, level=event.level + by)


def _relative(events: Sequence[Event], level: float, path: str, anchor: int) -> list[Any]:
    """Events as they look from a block: bytes above those before it, blocks by their distance."""
    found: list[Any] = []
    for e in events:
        of, _, at = e.unit.rpartition(".")
        unit = int(at) - anchor if of == path else e.unit
        slot = e.slot.removeprefix(e.unit) if of == path else e.slot
        found.append((e.kind, unit, e.peak - level, e.level - level, e.size, slot, e.work))
    return found
