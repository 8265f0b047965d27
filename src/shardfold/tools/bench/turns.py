"""Who runs when.

All contenders are started and warmed up; then each takes one turn per round, in an order that is reversed in every
second round. Only one runs at a time, the others wait on their pipes. Where memory is short, a contender that leaves
too little for the largest of the others is closed after each of its turns and started again for the next.

Where the time is limited, contenders that were not started in its first three quarters do not take part, and no round
begins behind its end; the first does in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardfold.tools.bench.contenders import Contender
from shardfold.tools.bench.results import Failure, MeasuredRounds, Turn
from shardfold.tools.bench.settings import Settings
from shardfold.tools.bench.teams import ContenderFailed, Team

__all__ = ["Callbacks", "available_bytes", "compare"]

SPARE = 1.1  # of what the largest contender needs has to be available
STARTING = 0.75  # of a limited time is for starting
MEMINFO, DEVICES = Path("/proc/meminfo"), Path("/proc/net/dev")


class Callbacks(NamedTuple):
    """Called before something that takes a while, and after each turn."""

    doing: Callable[[str], object] = lambda _: None
    turned: Callable[[MeasuredRounds], object] = lambda _: None


def available_bytes() -> float:
    """Memory of the host that can be had without swapping; infinite where the system does not tell."""
    if not MEMINFO.exists():
        return float("inf")
    lines = MEMINFO.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def loopback_bytes() -> int | None:
    """Bytes sent over the loopback device since the system started."""
    if not DEVICES.exists():
        return None
    fields = next(line.split() for line in DEVICES.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(fields[9])


class _Teams:
    """The contenders that are alive."""

    def __init__(self, settings: Settings, measured: MeasuredRounds) -> None:
        self._settings, self._measured = settings, measured
        self._alive: dict[str, Team] = {}
        self._most = 0.0  # bytes that the largest contender takes
        self._free: float | None = None  # of the device, when a contender was last asked

    @property
    def alive(self) -> bool:
        """Whether there are any."""
        return bool(self._alive)

    def admit(self, *contenders: Contender) -> None:
        """Starts contenders, at once. What they need is known from then on."""
        teams = [Team(each, self._settings) for each in contenders]
        for contender, team in zip(contenders, teams, strict=True):
            try:
                team.ready()
            except ContenderFailed as error:
                self.fail(contender, error)
                continue
            self._alive[contender.name], self._free = team, team.free
            self._most = max(self._most, team.needs)
            self._measured.first.setdefault(contender.name, team.first)
            self._measured.optimizers[contender.name] = team.optimizer
            self._measured.masters[contender.name] = team.master
            self._measured.versions.update(team.versions)

    def make_room(self, *contenders: Contender) -> None:
        """Closes contenders again if the largest of all would not fit beside those that are alive."""
        for contender in contenders:
            free = available_bytes() if self._free is None else self._free
            if contender.name in self._alive and free < SPARE * self._most:
                self._alive.pop(contender.name).close()
                self._measured.restarted.add(contender.name)
                self._free = None  # whoever is asked next tells it

    def turn(self, contender: Contender, number: int) -> None:
        """The contender's turn of a round; one that fails is noted, and gone."""
        if contender.name not in self._alive:
            self.admit(contender)
        if (team := self._alive.get(contender.name)) is None:
            return
        before = loopback_bytes()
        try:
            ranks = team.turn(self._settings.steps)
        except ContenderFailed as error:
            self.fail(contender, error)
            return
        after, sent = loopback_bytes(), None
        if before is not None and after is not None:
            sent = (after - before) / self._settings.ranks / (self._settings.steps + 1)
        self._free = team.free
        self._measured.turns[contender.name].append(Turn(round=number, ranks=ranks, sent=sent))

    def fail(self, contender: Contender, error: ContenderFailed) -> None:
        self._measured.failures[contender.name] = Failure(error.reason, error.said)
        self.drop(contender)

    def drop(self, contender: Contender) -> None:
        if team := self._alive.pop(contender.name, None):
            team.close(patience=0.0)

    def close(self) -> None:
        for team in self._alive.values():
            team.close()
        self._alive.clear()


def compare(settings: Settings, contenders: Sequence[Contender], watch: Callbacks | None = None) -> MeasuredRounds:
    """Runs the rounds. A contender that fails is noted with what it said, and the others go on."""
    watch = watch or Callbacks()
    measured = MeasuredRounds(settings=settings, contenders=list(contenders))
    teams = _Teams(settings, measured)
    begun = time.monotonic()

    def over(part: float) -> bool:
        return settings.within is not None and time.monotonic() - begun > part * settings.within

    try:
        waiting = sorted(contenders, key=lambda each: not (each.ours or each.kind == "bare"))
        while waiting:
            some, waiting = waiting[: settings.together], waiting[settings.together :]
            if over(STARTING) and teams.alive:
                measured.not_started.extend(each.name for each in (*some, *waiting))
                break
            watch.doing(f"starting {', '.join(each.name for each in some)}")
            teams.admit(*some)
            teams.make_room(*some)
        for number in range(settings.rounds):
            if number and over(1.0):
                break
            measured.rounds = number + 1
            for contender in reversed(contenders) if number % 2 else contenders:
                if contender.name in measured.failures or contender.name in measured.not_started:
                    continue
                watch.doing(f"round {number + 1} of {settings.rounds}: {contender.name}")
                teams.turn(contender, number)
                teams.make_room(contender)
                watch.turned(measured)
    finally:
        with suppress(KeyboardInterrupt):
            teams.close()
    return measured
