"""Rare steps over one axis: between them each group of ranks trains by itself, and in them the groups' weights meet.

The ranks along ``axis`` are of different *groups*. Within a group the rest of the table holds as ever: gradients are
summed, states are split. Along the axis nothing is summed until ``every`` steps are done. Then each group's *outer
gradient*, the last global weights minus its own, is averaged over the groups, an outer optimizer takes a step on the
global weights, and every group goes on from these.

    average     global -= lr * mean of the outer gradients: with the rate of 1 that it has by default local SGD, whose
                groups' weights are averaged (arXiv 1602.05629, 1805.09767)
    nesterov    SGD with Nesterov momentum on them: DiLoCo (arXiv 2311.08105)

``fragments`` lets parts of the model take turns, and ``delay`` lets what is sent come so many steps later, while the
groups train on; ``alpha`` of a group's own weights then stays (Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.checks import described, is_integer, is_number, known_arguments
from shardfold.plan.format import typed
from shardfold.plan.outer_runs import OuterRuns

__all__ = ["OPTIMIZERS", "Outer"]

OPTIMIZERS = ("average", "nesterov")
RESTS = ("device", "host")


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Outer:
    """When and how the groups along an axis of data come together.

    Attributes:
        every: steps of a round: each part of the model is synchronized once in so many.
        axis: that the groups are along; an axis of data, by default the slow one.
        optimizer: one of :data:`OPTIMIZERS`.
        lr: of the outer optimizer; None: 1 to average, 0.7 for ``nesterov``. To average with less goes that part of
            the way from the last global weights to the groups' average.
        momentum: of ``nesterov``; None: 0.9.
        fragments: parts of the model that are synchronized one after the other, ``every / fragments`` steps apart.
        delay: steps between sending and taking in.
        alpha: how much of a group's own weights stays when the global ones come; None: nothing without ``delay``, half
            with it.
        format: what outer gradients, and what the outer step changes, are on the link: the name of a format; None: the
            elements as they are kept.
        tier: where the last global weights and the momentum rest: ``"device"`` or ``"host"``.
        deadline: seconds that a group waits for the others at an outer step; if some group is later, that outer step is
            put off for all, and the round goes on up to the next. None: as long as it takes.
        quorum: groups, with which an outer step goes on: with a ``deadline``, it is held when so many have come and the
            others are later than they use to be. They take in what they have missed when they come back; each group
            counts by the tokens that it has learned from. None: all groups take part.
        runs: the groups are runs of their own, and this one is one of them; ``axis`` then is of size 1. With a
            ``quorum``. None: they are the ranks along ``axis``.
        put_off: how many outer steps of a fragment in a row may be, with a ``deadline``; the next waits as long as it
            takes. None: 1.

    Raises:
        ConfigError: a field is of a wrong type or value, or does not go with another.

    Examples:
        >>> diloco = sf.Outer(every=500, optimizer="nesterov")
        >>> diloco.axis
        'inter'
    """

    every: int
    axis: str = "inter"
    optimizer: str = "average"
    lr: float | None = None
    momentum: float | None = None
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    format: str | None = None
    tier: str = "device"
    deadline: float | None = None
    put_off: int | None = None
    quorum: int | None = None
    runs: OuterRuns | None = None

    def __post_init__(self) -> None:
        for name, least, unit in (
            ("every", 1, "steps"),
            ("fragments", 1, "parts"),
            ("delay", 0, "steps"),
            ("put_off", 1, "outer steps"),
            ("quorum", 2, "groups"),
        ):
            if name in ("put_off", "quorum") and getattr(self, name) is None:
                continue
            if not is_integer(getattr(self, name), least):
                raise ConfigError(
                    f"Outer.{name} is {described(getattr(self, name))}: it is a number of {unit}, {least} or more."
                )
        given: Any = self.axis
        if not isinstance(given, str):
            raise ConfigError(f"Outer.axis is {described(given)}: it is the name of an axis, as 'inter'.")
        for name, known in (("optimizer", OPTIMIZERS), ("tier", RESTS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"Outer.{name} is {described(getattr(self, name))}: it is {' or '.join(map(repr, known))}."
                    f"{did_you_mean(str(getattr(self, name)), known)}"
                )
        if self.lr is not None and (not is_number(self.lr, 0) or not self.lr):
            raise ConfigError(f"Outer.lr is {described(self.lr)}: it is a number above 0, or None.")
        for name, below in (("momentum", 1.0), ("alpha", 1.0)):
            value = getattr(self, name)
            if value is not None and (not is_number(value, 0, below) or value == below):
                raise ConfigError(f"Outer.{name} is {described(value)}: it is a number in [0, 1), or None.")
        if self.momentum and self.optimizer == "average":
            raise ConfigError(
                f"Outer.momentum is {self.momentum} and optimizer='average', which has none: take 'nesterov'."
            )
        if self.every % self.fragments:
            raise ConfigError(
                f"Outer.fragments is {self.fragments} and every={self.every}: parts take turns, so their number "
                "divides that of the steps."
            )
        if self.deadline is not None and (not is_number(self.deadline, 0) or not self.deadline):
            raise ConfigError(
                f"Outer.deadline is {described(self.deadline)}: it is a number of seconds above 0, or None."
            )
        if self.put_off is not None and self.deadline is None:
            raise ConfigError(
                f"Outer.put_off is {self.put_off} and there is no deadline=, without which no outer step is put off: "
                "give deadline=, in seconds, or leave put_off= out."
            )
        if self.deadline is not None and self.delay:
            raise ConfigError(
                f"Outer.deadline is {self.deadline:g} and delay={self.delay}: with a delay no group waits at an outer "
                "step; leave one of the two out."
            )
        if self.quorum is not None:
            self._check_quorum()
        if self.runs is not None and not isinstance(self.runs, OuterRuns):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"Outer.runs is {described(self.runs)}: it is an OuterRuns, or None.")
        if self.runs is not None and self.quorum is None:
            raise ConfigError(
                "Outer.runs is given and there is no quorum=: runs come and go, so say with how many of them an outer "
                "step is held, and give deadline=."
            )
        if self.delay >= self.every:
            raise ConfigError(
                f"Outer.delay is {self.delay} and every={self.every}: what is sent has to come before the same part is "
                "sent again, so let it be less."
            )

    def _check_quorum(self) -> None:
        """
        Raises:
            ConfigError: another field does not go with a quorum.
        """
        if self.deadline is None:
            raise ConfigError(
                f"Outer.quorum is {self.quorum} and there is no deadline=: give the seconds that groups are waited for "
                "at most."
            )
        for name, usual in (("fragments", 1), ("format", None), ("put_off", None)):
            if (value := getattr(self, name)) != usual:
                raise ConfigError(
                    f"Outer.quorum is {self.quorum} and {name}={value!r}: where groups come and go the whole model is "
                    "sent at once, as it is kept, and put off as often as too few have come; leave one of the two out."
                )

    @property
    def rate(self) -> float:
        """Of the outer optimizer."""
        return float(self.lr) if self.lr is not None else 1.0 if self.optimizer == "average" else 0.7

    @property
    def beta(self) -> float:
        """The momentum; 0: none is kept."""
        if self.optimizer == "average":
            return 0.0
        return 0.9 if self.momentum is None else float(self.momentum)

    @property
    def stays(self) -> float:
        """How much of a group's own weights stays."""
        return float(self.alpha) if self.alpha is not None else 0.5 if self.delay else 0.0

    @property
    def most_put_off(self) -> int:
        """How many outer steps of a fragment in a row may be put off."""
        return 1 if self.put_off is None else int(self.put_off)

    @property
    def turn(self) -> int:
        """Steps behind sending after which the averaged outer gradients are used, and what that changes is sent."""
        return -(-self.delay // 2)

    def due(self, steps: int, fragment: int, behind: int = 0) -> bool:
        """Whether behind so many steps it is a fragment's turn to be sent, or was ``behind`` steps before."""
        since = steps - behind - fragment * (self.every // self.fragments)
        return since > 0 and since % self.every == 0

    def fragment_of(self, numbers: Sequence[int], number: int) -> int:
        """Which fragment the ``number``-th of the units is in, whose elements are ``numbers``: one run of units after
        the other, of nearly as many elements each."""
        before, total = sum(numbers[:number]), max(1, sum(numbers))
        middle = before + numbers[number] / 2
        return min(self.fragments - 1, int(middle * self.fragments / total))

    def __str__(self) -> str:
        said = [f"every {self.every} steps over {self.axis}", f"{self.optimizer} with lr {self.rate:g}"]
        if self.beta:
            said[-1] += f" and momentum {self.beta:g}"
        if self.fragments > 1:
            said.append(f"in {self.fragments} fragments")
        if self.delay:
            said.append(f"taken in {self.delay} step{'s' * (self.delay > 1)} later")
        if self.stays:
            said.append(f"keeping {self.stays:g} of a group's own")
        if self.format is not None:
            said.append(f"as {typed(self.format)}")
        if self.runs is not None:
            said.append(f"as run {self.runs.number} of {self.runs.count} that meet at {self.runs.at}")
        if self.quorum is not None:
            said.append(f"with {self.quorum} groups or more, which wait for the others for {self.deadline:g} s at most")
        elif self.deadline is not None:
            said.append(f"put off if a group is {self.deadline:g} s late, {self.most_put_off} in a row")
        return ", ".join(said)
