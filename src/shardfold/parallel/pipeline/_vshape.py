"""Orders of stages in the shape of a V: each rank has two, and the first and the last stage are on the first rank.

    zbv         no waiting between a rank's first and last action where all takes equally long, at the memory of 1F1B
                (arXiv 2401.10241, section 6)
    v-half      half of that memory (arXiv 2405.15362)
    v-min       a third of it
    dualpipev   forwards and backwards of both directions side by side (DualPipe, arXiv 2412.19437, cut in half)

What a rank does is written with words of a letter and which of its two stages: ``F0 F1 I1 W1 ...``; each takes the next
micro-batch that it has not done.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import product

from shardfold.parallel.pipeline.action import Action

__all__ = ["V_SHAPED", "v_place", "v_shaped"]

V_SHAPED = ("zbv", "v-half", "v-min", "dualpipev")
PERIOD = 6
"""Slots that both stages of a rank need for a micro-batch: a forward, and two parts of a backward."""
STEPS = {"v-half": (2, 1, 2, 1), "v-min": (1, 1, 1, 1)}
"""Slots from a rank to the next, of forwards of the first and second stage and of their backwards: what comes on its
way down and up again adds to 3, or 2, where 6 would keep as much as 1F1B."""


def v_place(stage: int, ranks: int) -> int:
    """The place of a stage."""
    return stage if stage < ranks else 2 * ranks - 1 - stage


def v_shaped(name: str, ranks: int, batches: int) -> list[list[Action]]:
    """What each rank does."""
    if name in STEPS:
        fixed = [_repeated(STEPS[name], ranks, batches, place) for place in range(ranks)]
        room = 2 + -(-ranks * sum(STEPS[name]) // PERIOD)  # of stages, of which each rank has two
        return _with_weights(fixed, 2 * ranks, room)
    found: list[list[Action]] = []
    for place in range(ranks):
        zbv = name == "zbv"
        words = _zbv(ranks, place, max(batches, 2 * ranks - 1)) if zbv else _dual(ranks, place, max(batches, 2 * ranks))
        actions = _numbered(words, (place, 2 * ranks - 1 - place))
        found.append([action for action in actions if action.batch < batches])
    return found


def _numbered(words: Iterable[str], stages: tuple[int, int]) -> list[Action]:
    """The words with their micro-batches; ``W`` alone is the oldest that is open, if any is."""
    counts: Counter[tuple[str, int]] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    found: list[Action] = []
    for word in words:
        if word == "W":
            if waiting:
                found.append(Action("W", *waiting.popleft()))
            continue
        verb, stage = word[0], stages[int(word[1])]
        kind = "B" if verb == "I" else verb  # both take the next backward
        batch = counts[kind, stage]
        counts[kind, stage] += 1
        found.append(Action(verb, stage, batch))
        if verb == "I":
            waiting.append((stage, batch))
    return found


def _zbv(ranks: int, place: int, batches: int) -> list[str]:
    below = ranks - place
    first = 2 * ranks - place - 1  # forwards of the first stage before both stages take turns
    words = ["F0"] * (2 * below - 1) + ["F1", "F0"] * place + ["F1", "I1", "W1"] * below
    words += ["F0", "I0", "W0", "F1", "I1", "W1"] * (batches - first)
    words += ["I0", "W0", "F1", "I1", "W1"] * (first - ranks)
    words += ["I0", "I1"] * place + ["I0", "W0"] * below
    for which in "10":
        words += [f"W{which}"] * (sum(w == f"I{which}" for w in words) - sum(w == f"W{which}" for w in words))
    return words


def _dual(ranks: int, place: int, batches: int) -> list[str]:
    below = ranks - place - 1
    words = ["F0"] * (2 * below) + ["F0", "F1"] * (place + 1) + ["I1", "W", "F1"] * below
    words += ["F0", "B1", "F1", "B0"] * (batches - 2 * ranks + place + 1)
    words += ["B1", "F1", "B0"] * below
    half, odd = (place + 1) // 2, place % 2  # from there on backwards are in two parts, to fill the end with those
    for i in range(place + 1):
        words.append("I1" if i > half or (i == half and odd) else "B1")
        words.append("I0" if i >= half else "B0")
    return words + ["W", "I0"] * below + ["W"] * (place + 1)


def _repeated(steps: tuple[int, int, int, int], ranks: int, batches: int, place: int) -> list[Action]:
    """Forwards, and the parts of backwards for inputs: a block of slots for one micro-batch, put side by side every
    :data:`PERIOD` slots."""
    slots = _slots(steps, ranks, place, _gaps(steps, ranks))
    kinds = [("F", place), ("F", 2 * ranks - 1 - place), ("I", 2 * ranks - 1 - place), ("I", place)]
    found: list[tuple[int, Action]] = []
    for (verb, stage), slot in zip(kinds, slots, strict=True):
        found += [(slot + PERIOD * batch, Action(verb, stage, batch)) for batch in range(batches)]
    return [action for _, action in sorted(found)]


def _gaps(steps: tuple[int, int, int, int], ranks: int) -> tuple[int, int, int]:
    """The shortest waits where the way turns (from the first stages to the second, to backwards, and back to those of
    the first) with which no rank has two things to do in a slot."""
    waits = range(1, PERIOD + 1)
    for gaps in sorted(product(waits, waits, waits), key=lambda each: (sum(each), each)):
        taken = [{slot % PERIOD for slot in _slots(steps, ranks, place, gaps)} for place in range(ranks)]
        if all(len(each) == 4 for each in taken):
            return gaps
    raise AssertionError(f"no block of {steps} for {ranks} ranks")


def _slots(steps: tuple[int, int, int, int], ranks: int, place: int, gaps: tuple[int, int, int]) -> list[int]:
    """Those of the four actions with a neighbour: forwards of the first and second stage, backwards of the second and
    the first."""
    down, up, back, home = steps
    last = ranks - 1
    turn = down * last + gaps[0]
    loss = turn + up * last + gaps[1]
    again = loss + back * last + gaps[2]
    return [down * place, turn + up * (last - place), loss + back * place, again + home * (last - place)]


def _with_weights(fixed: Sequence[Sequence[Action]], stages: int, room: int) -> list[list[Action]]:
    """Puts the parts of backwards for weights where a rank would wait, slot by slot; and in front of a forward, where
    it keeps ``room`` micro-batches of stages already."""
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in fixed]
    at, kept, waiting = [0] * len(fixed), [0] * len(fixed), [deque[Action]() for _ in fixed]
    while any(i < len(actions) for actions, i in zip(fixed, at, strict=True)) or any(waiting):
        begun: list[Action] = []
        for rank, actions in enumerate(fixed):
            action = actions[at[rank]] if at[rank] < len(actions) else None
            full = action is not None and action.verb == "F" and kept[rank] >= room and bool(waiting[rank])
            if action is not None and not full and _ready(action, done, stages):
                at[rank] += 1
                if action.verb == "I":
                    waiting[rank].append(action._replace(verb="W"))
            elif waiting[rank]:
                action = waiting[rank].popleft()
            else:
                continue
            kept[rank] += {"F": 1, "W": -1}.get(action.verb, 0)
            rows[rank].append(action)
            begun.append(action)
        done.update(begun)
    return rows


def _ready(action: Action, done: set[Action], stages: int) -> bool:
    verb, stage, batch = action
    if verb == "F":
        return not stage or Action("F", stage - 1, batch) in done
    return Action("F", stage, batch) in done and (stage == stages - 1 or Action("I", stage + 1, batch) in done)
