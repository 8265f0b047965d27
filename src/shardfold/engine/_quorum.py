"""Which groups an outer step goes on with, found out before anything of it is sent.

Outer steps are numbered. The first rank of each group says in the store that all ranks share that the group has come to
the next one, and how many tokens it has learned from since its last. Whoever waits may decide, and the store takes the
first decision, so that all read the same one:

    all have come                                               it is held
    enough have come, and the others are later than they use    it is held without them
    the deadline is over, and too few have come                 it is put off

One of those that come has to have the newest global weights, so there is one history of them, whoever was away when. A
group that an outer step was held without comes to the next one as soon as another group has, whatever number of steps
it has done by then: from there on it is in time again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from statistics import median
from time import monotonic, sleep
from typing import Any

from shardfold.comm.polling import come
from shardfold.errors import CollectiveError
from shardfold.optim.present_groups import OuterMeeting
from shardfold.plan.outer import Outer

__all__ = ["Quorum"]

PAUSE = 0.005
"""Seconds between two looks at who has come: groups wait for each other rarely, and then for moments."""
KNOWN, KEPT = 8, 64
"""How late groups use to be is known from so many times, and from no more of the newest."""
SPREAD = 4 * 1.4826
"""Median absolute deviations that a group may be later than the median, which are four standard deviations."""
STEPS = 2.0
"""Own steps that others are waited for at least: one that was away looks only behind each step whether others meet."""
ALONE = 2
"""Rounds without a meeting, behind which a group that was away begins one by itself."""


class Quorum:
    """One rank's part in it.

    Args:
        store: that all share; None: there is one rank.
        group, groups: which it is in, of how many.
        leads: whether this rank speaks for its group.
        outer: the rules.

    Attributes:
        version: number of the last outer step that changed this group's global weights.
    """

    def __init__(self, store: Any, group: int, groups: int, outer: Outer, *, leads: bool) -> None:
        assert outer.quorum is not None and outer.deadline is not None
        self._store, self._group, self._groups, self._leads = store, group, groups, leads
        self._least, self._deadline, self._every = min(outer.quorum, groups), float(outer.deadline), outer.every
        self.version = 0
        self._turns = self._last = 0  # times that this group has asked; the last outer step that it has come to
        self._late = False  # whether the others have held one without it, as far as it knows
        self._waited = 0  # steps since then
        self._ended, self._step = 0.0, 0.0  # when the last turn was over, and seconds of a step since
        self._lags: deque[float] = deque(maxlen=KEPT)

    def turn(self, *, due: bool, everyone: bool, steps: int, tokens: float) -> OuterMeeting | None:
        """The outer step that this group takes part in now; None: it goes on training.

        Args:
            due: a round of its own is over.
            everyone: all groups come, however long it takes.
            steps, tokens: that it has done and learned from; of the latter, since its last outer step.

        Raises:
            CollectiveError: the store does not answer.
        """
        if self._store is None:
            return OuterMeeting((0,), (1.0,), (), 0, steps)
        self._waited += 1
        if not (due or self._late or everyone):
            return None
        self._turns += 1
        key = f"round/turn/{self._group}/{self._turns}"
        try:
            if self._leads:
                self._store.set(key, json.dumps(self._asked(everyone, steps, tokens)))
            else:
                while not come(self._store, [key], self._deadline):
                    pass
            said = json.loads(self._store.get(key))
        except RuntimeError as error:
            raise CollectiveError(
                "which groups an outer step goes on with cannot be asked of the store that all ranks share "
                f"({str(error).splitlines()[0]}): the link to the host of rank 0 is cut, or its process is gone; look "
                "at its output, and at the network between the hosts."
            ) from error
        return self._taken(said)

    def _taken(self, said: Mapping[str, Any]) -> OuterMeeting | None:
        """What this group has come to, as all of its ranks read it."""
        self._last, self._ended = max(self._last, said["number"]), monotonic()
        here = said.get("here", {})
        if not self._late or str(self._group) in here:
            self._waited = 0
        self._late = said["late"]
        if str(self._group) not in here:
            return None
        self.version = said["number"]
        groups = sorted(map(int, here))
        each = [here[str(group)] for group in groups]  # of each its version, its steps and its tokens
        whole, newest = sum(tokens for *_, tokens in each), max(version for version, *_ in each)
        shares = tuple(tokens / whole if whole else 1 / len(groups) for *_, tokens in each)
        behind = tuple(group for group, (version, *_) in zip(groups, each, strict=True) if version < newest)
        source = next(group for group in groups if group not in behind)
        return OuterMeeting(tuple(groups), shares, behind, source, max(steps for _, steps, _ in each))

    # -- the rank that speaks for its group

    def _asked(self, everyone: bool, steps: int, tokens: float) -> dict[str, Any]:
        decided = self._number()
        number = max(decided, self._last) + 1
        joins = decided > self._last and not everyone and self._waited <= ALONE * self._every
        if joins and not self._store.add(f"round/{number}/came", 0):
            return {"number": self._last, "late": True}
        if self._ended and self._waited:
            self._step = (monotonic() - self._ended) / self._waited
        self._store.set(f"round/{number}/of/{self._group}", json.dumps([self.version, steps, tokens]))
        self._store.add(f"round/{number}/came", 1)
        here = self._decided(number, everyone)
        return {"number": number, "late": bool(here) and str(self._group) not in here, "here": here}

    def _decided(self, number: int, everyone: bool) -> dict[str, list[float]]:
        """What each group has said that takes part; empty: it is put off."""
        key, seen, said, enough = f"round/{number}/decided", dict[int, float](), dict[str, list[float]](), 0.0
        begun, newest = monotonic(), 0
        if number > 1:
            newest = json.loads(self._store.get(f"round/{number - 1}/decided"))["newest"]
        while not self._store.check([key]):
            now = monotonic()
            for group in range(self._groups):
                if group not in seen and self._store.check([place := f"round/{number}/of/{group}"]):
                    seen[group], said[str(group)] = now, json.loads(self._store.get(place))
            if not enough and len(seen) >= self._least and max(each[0] for each in said.values()) == newest:
                enough = now
            late = now - enough > self.grace if enough else now - begun > self._deadline
            if len(seen) == self._groups or (late and not everyone):
                held = len(seen) == self._groups or enough
                words = {"here": said, "newest": number} if held else {"here": {}, "newest": newest}
                self._store.compare_set(key, "", json.dumps(words))
            else:
                sleep(PAUSE)
        self._store.compare_set("round/number", str(number - 1) if number > 1 else "", str(number))
        self._lags.extend(max(0.0, at - (enough or begun)) for at in seen.values())
        return json.loads(self._store.get(key))["here"]

    def _number(self) -> int:
        """Of the last outer step that is decided."""
        return int(self._store.get("round/number")) if self._store.check(["round/number"]) else 0

    @property
    def grace(self) -> float:
        """Seconds that groups are waited for once enough have come."""
        if len(self._lags) < KNOWN:
            return min(self._deadline, self._step * self._every / 2) if self._step else self._deadline
        middle = median(self._lags)
        usual = middle + SPREAD * median(abs(lag - middle) for lag in self._lags)
        return min(self._deadline, max(usual, STEPS * self._step))

    def begin_anew(self) -> None:
        """All groups have the same global weights, as behind a load, which all ranks do together."""
        self.version, self._late = (self.version if self._store is None else self._number()), False
        self._last = max(self._last, self.version)
