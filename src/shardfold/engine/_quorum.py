"""Which groups an outer step goes on with, found out before anything of it is sent.

Outer steps are numbered. The first rank of each group says in the store that all ranks share that the group has come to
the next one, and how many tokens it has learned from since its last. Whoever waits may decide, and the store takes the
first decision, so that all read the same one:

    all that are there have come                                it is held
    enough have come, and the others are later than they use    it is held without them
    so long nobody else has come, and they are too few          it is put off

There are those that took part in the last one, and who has come back since and says so: who is away is waited for once.
One of those that come has to have the newest global weights, so there is one history of them, whoever was away when. A
group that an outer step was held without, or put off, comes to the next one as soon as another group has, whatever
number of steps it has done by then: from there on it is in time again. If those with the newest weights stay away, or
all groups have come and none has them, the others go on from the newest that they have, and what the outer step had
changed that they lack is lost. So a new set of runs begins anew on the store of one that is over.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from statistics import median
from time import monotonic, sleep
from typing import Any

from shardfold.comm.polling import come
from shardfold.errors import CollectiveError, ConfigError
from shardfold.optim.present_groups import OuterMeeting
from shardfold.plan.outer import Outer

__all__ = ["Quorum"]

LOG = logging.getLogger("shardfold")
PAUSE = 0.005
"""Seconds between two looks at who has come: groups wait for each other rarely, and then for moments."""
KNOWN, KEPT = 8, 64
"""How late groups use to be is known from so many times, and from no more of the newest."""
SPREAD = 4 * 1.4826
"""Median absolute deviations that a group may be later than the median, which are four standard deviations."""
STEPS = 2.0
"""Own steps that others are waited for at least: one that was away looks only behind each step whether others meet."""
PACES = 5
"""How long a step takes is the median over so many rounds: in one of them the group may have been away."""
ALONE = 2
"""Rounds without a meeting, behind which a group that was away begins one by itself."""
VAIN = 2
"""Outer steps in a row that are put off by enough groups, as none has the newest weights; the next one is held."""


class Quorum:
    """One rank's part in it.

    Args:
        store: that all share; None: there is one rank.
        group, groups: which it is in, of how many.
        leads: whether this rank speaks for its group.
        outer: the rules.

    Attributes:
        version: of this group's global weights: outer steps that have changed them, or more.
    """

    def __init__(self, store: Any, group: int, groups: int, outer: Outer, *, leads: bool) -> None:
        assert outer.quorum is not None and outer.deadline is not None
        self._store, self._group, self._groups, self._leads = store, group, groups, leads
        self._own = store  # in which this group's ranks read what the first of them has heard
        self._ranks, self._life = 0, 0  # of each group, if these are runs of their own; how often this one was started
        self._least, self._deadline, self._every = min(outer.quorum, groups), float(outer.deadline), outer.every
        self.version = 0
        self._turns = self._last = 0  # times that this group has asked; the last outer step that it has come to
        self._late = False  # whether it comes as soon as others do: the last one was held without it, or put off
        self._back = 0  # the outer step for which it has said that it is there again
        self._waited, self._ended = 0, 0.0  # steps since the last one that it has come to, and when that was over
        self._paces: deque[float] = deque(maxlen=PACES)  # seconds of a step, in the last rounds
        self._lags: deque[float] = deque(maxlen=KEPT)

    def meet_runs(self, store: Any, ranks: int, rules: str) -> None:
        """The groups are runs of their own, of so many ranks each, which all have another store.

        Raises:
            ConfigError: another run has other rules, or other ranks.
            CollectiveError: the store does not answer.
        """
        self._store, self._ranks = store, ranks
        try:
            theirs = store.compare_set("round/rules", "", rules).decode()
            self._life = store.add(f"round/life/{self._group}", 1) if self._leads else 0
        except RuntimeError as error:
            raise CollectiveError(self._silent(error)) from error
        if theirs != rules:
            raise ConfigError(
                f"this run has {rules}, and the first that came to their store has {theirs}: give all runs the same "
                "model, layout and ranks, and runs of another kind a store of their own."
            )

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
            said = json.dumps(self._asked(due, everyone, steps, tokens)) if self._leads else ""
            if self._own is not None:
                if self._leads:
                    self._own.set(key, said)
                while not come(self._own, [key], self._deadline):
                    pass
                said = self._own.get(key)
        except RuntimeError as error:
            raise CollectiveError(self._silent(error)) from error
        return self._taken(json.loads(said))

    def _silent(self, error: RuntimeError) -> str:
        whose = "that all ranks share" if not self._ranks else "that all runs share"
        where = "the host of rank 0" if not self._ranks else "its host"
        return (
            f"which groups an outer step goes on with cannot be asked of the store {whose} "
            f"({str(error).splitlines()[0]}): the link to {where} is cut, or its process is gone; look at its output, "
            "and at the network between the hosts."
        )

    def settled(self, meeting: OuterMeeting, *, whole: bool) -> bool:
        """Whether the outer step is taken: all ranks of all runs that take part have what they need for it; else all
        drop it.

        Args:
            meeting: that step.
            whole: this rank has it.

        Raises:
            CollectiveError: the store does not answer.
        """
        if not self._ranks:
            return True
        try:
            key = f"round/{self._last}/outcome"
            if not whole:
                self._store.compare_set(key, "", "dropped")
            elif self._store.add(f"round/{self._last}/done", 1) == self._ranks * len(meeting.groups):
                self._store.compare_set(key, "", "taken")
            taken = self._came_of(self._last) == "taken"
        except RuntimeError as error:
            raise CollectiveError(self._silent(error)) from error
        if taken:
            self.version = meeting.version
        return taken

    def _came_of(self, number: int) -> str:
        """What came of an outer step of runs: whoever waits for longer than a group may take drops it for all."""
        key = f"round/{number}/outcome"
        if not come(self._store, [key], self._deadline):
            self._store.compare_set(key, "", "dropped")
        return self._store.get(key).decode()

    def _taken(self, said: Mapping[str, Any]) -> OuterMeeting | None:
        """What this group has come to, as all of its ranks read it."""
        here = said.get("here", {})
        if said["number"] > self._last:
            self._last, self._ended, self._waited = said["number"], monotonic(), 0
        self._late = said["late"]
        if str(self._group) not in here:
            return None
        if not self._ranks:
            self.version = said["version"]
        groups = sorted(map(int, here))
        each = [here[str(group)] for group in groups]  # of each its version, steps, life and tokens
        whole, newest = sum(tokens for *_, tokens in each), max(version for version, *_ in each)
        shares = tuple(tokens / whole if whole else 1 / len(groups) for *_, tokens in each)
        behind = tuple(group for group, (version, *_) in zip(groups, each, strict=True) if version < newest)
        source = next(group for group in groups if group not in behind)
        lives = tuple(life for *_, life, _ in each) if self._ranks else ()
        steps = max(steps for _, steps, *_ in each)
        return OuterMeeting(tuple(groups), shares, behind, source, steps, said["version"], lives)

    # -- the rank that speaks for its group

    def _asked(self, due: bool, everyone: bool, steps: int, tokens: float) -> dict[str, Any]:
        decided = self._number()
        number = max(decided, self._last) + 1
        if not (everyone or self._store.add(f"round/{number}/came", 0) or (due and self._begins(decided))):
            if self._back != number:
                self._store.set(f"round/{number}/back/{self._group}", "")
                self._back = number
            return {"number": self._last, "late": True}
        if self._ended and self._waited:
            self._paces.append((monotonic() - self._ended) / self._waited)
        self._store.set(f"round/{number}/of/{self._group}", json.dumps([self.version, steps, self._life, tokens]))
        self._store.add(f"round/{number}/came", 1)
        said = self._decided(number, everyone)
        return {"number": number, "late": str(self._group) not in said["here"], **said}

    def _begins(self, decided: int) -> bool:
        """Whether this group may be the first: it has missed none, or nothing by it, or it has waited for long, or all
        runs that had the newest weights have ended since, and been started again."""
        if not (self._late or decided > self._last) or self._waited > ALONE * self._every:
            return True
        known = self._known(decided)
        ended = (self._store.add(f"round/life/{group}", 0) > life for group, life in known["had"].items())
        return known["newest"] == self.version or (self._ranks > 0 and all(ended))

    def _decided(self, number: int, everyone: bool) -> dict[str, Any]:
        """What each group has said that takes part, if any does, and which version they then have."""
        key, seen, said, enough = f"round/{number}/decided", dict[int, float](), dict[str, list[float]](), 0.0
        begun, before = monotonic(), self._known(number - 1)
        newest = before["newest"] if before["vain"] < VAIN else 0
        while not self._store.check([key]):
            now, awaited = monotonic(), False
            for group in range(self._groups):
                if group not in seen and self._store.check([place := f"round/{number}/of/{group}"]):
                    seen[group], said[str(group)] = now, json.loads(self._store.get(place))
                elif group not in seen:
                    there = group in before["there"] or self._store.check([f"round/{number}/back/{group}"])
                    awaited = awaited or there or everyone
            if not enough and len(seen) >= self._least:
                lacks = max(each[0] for each in said.values()) < newest and len(seen) < self._groups
                enough = 0.0 if lacks else now
            late = now - (enough or begun) > self.grace and not everyone
            if late or (not awaited and (enough or len(seen) == self._groups)):
                version = max(before["newest"], *(each[0] for each in said.values())) + 1
                had = {each: life for each, (_, _, life, _) in said.items()}
                words = {"here": said, "version": version, "newest": version, "had": had, "vain": 0}
                words["there"] = sorted(seen)
                if not enough:
                    words = {**before, "here": {}, "vain": before["vain"] + (len(seen) >= self._least)}
                self._store.compare_set(key, "", json.dumps(words))
            else:
                sleep(PAUSE)
        self._store.compare_set("round/number", str(number - 1) if number > 1 else "", str(number))
        if enough and not everyone:
            self._lags.extend(max(0.0, at - enough) for at in seen.values())
        decided = json.loads(self._store.get(key))
        if decided["vain"] > before["vain"]:
            LOG.warning(
                "An outer step is put off, as of groups %s, which have come, none has the newest global weights: if "
                "groups %s, which have them, stay away, the next one behind %s such is held with the newest there is.",
                ", ".join(map(str, sorted(seen))),
                ", ".join(sorted(before["had"])),
                VAIN,
            )
        return decided

    def _known(self, number: int) -> dict[str, Any]:
        """What was decided of an outer step: what each group has said that took part; by the last one that was held
        which one it was, who has its weights, in which life, and who was there; and how many were put off since, as the
        newest weights were away."""
        if not number:
            return {"here": {}, "newest": 0, "had": {}, "there": list(range(self._groups)), "vain": 0}
        known = json.loads(self._store.get(f"round/{number}/decided"))
        if self._ranks and known["here"] and self._came_of(number) != "taken":
            return {**self._known(number - 1), "there": known["there"]}
        return known

    def _number(self) -> int:
        """Of the last outer step that is decided."""
        return int(self._store.get("round/number")) if self._store.check(["round/number"]) else 0

    @property
    def grace(self) -> float:
        """Seconds that others are waited for, once enough have come, or until that."""
        step = median(self._paces) if self._paces else 0.0
        if len(self._lags) < KNOWN:
            return min(self._deadline, step * self._every / 2) if step else self._deadline
        middle = median(self._lags)
        usual = middle + SPREAD * median(abs(lag - middle) for lag in self._lags)
        return min(self._deadline, max(usual, STEPS * step))

    def begin_anew(self, version: int = 0) -> None:
        """All groups have the same global weights, as behind a load, which all ranks do together; of runs each loads by
        itself, and has the version that its checkpoint was of."""
        self._late = False
        if self._ranks or self._store is None:
            self.version = version
            return
        self._last = max(self._last, self._number())
        self.version = self._known(self._last)["newest"]
