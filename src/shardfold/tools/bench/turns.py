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
from typing import Any, NamedTuple

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
    """Memory that can be had without swapping; infinite where the system does not tell."""
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

    @property
    def alive(self) -> bool:
        """Whether there are any."""
        return bool(self._alive)

    def admit(self, contender: Contender) -> Team:
        """Starts the contender. What it needs is known from then on."""
        team = Team(contender, self._settings)
        self._alive[contender.name] = team
        self._most = max(self._most, team.needs)
        self._measured.optimizers[contender.name] = team.optimizer
        self._measured.masters[contender.name] = team.master
        self._measured.versions.update(team.versions)
        return team

    def make_room(self, contender: Contender) -> None:
        """Closes the contender again if the largest of all would not fit beside those that are alive."""
        if contender.name in self._alive and available_bytes() < SPARE * self._most:
            self._alive.pop(contender.name).close()
            self._measured.restarted.add(contender.name)

    def turn(self, contender: Contender) -> list[dict[str, Any]]:
        team = self._alive.get(contender.name) or self.admit(contender)
        return team.turn(self._settings.steps)

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
        for contender in sorted(contenders, key=lambda each: not (each.ours or each.kind == "bare")):
            if over(STARTING) and teams.alive:
                measured.not_started.append(contender.name)
                continue
            watch.doing(f"starting {contender.name}")
            try:
                teams.admit(contender)
            except ContenderFailed as error:
                measured.failures[contender.name] = Failure(error.reason, error.said)
            teams.make_room(contender)
        for number in range(settings.rounds):
            if number and over(1.0):
                break
            measured.rounds = number + 1
            for contender in reversed(contenders) if number % 2 else contenders:
                if contender.name in measured.failures or contender.name in measured.not_started:
                    continue
                watch.doing(f"round {number + 1} of {settings.rounds}: {contender.name}")
                try:
                    measured.turns[contender.name].append(_turn(teams, contender, settings, number))
                except ContenderFailed as error:
                    measured.failures[contender.name] = Failure(error.reason, error.said)
                    teams.drop(contender)
                teams.make_room(contender)
                watch.turned(measured)
    finally:
        with suppress(KeyboardInterrupt):
            teams.close()
    return measured


def _turn(teams: _Teams, contender: Contender, settings: Settings, number: int) -> Turn:
    before = loopback_bytes()
    ranks = teams.turn(contender)
    after = loopback_bytes()
    sent = None
    if before is not None and after is not None:
        sent = (after - before) / settings.ranks / (settings.steps + 1)
    return Turn(round=number, ranks=ranks, sent=sent)
