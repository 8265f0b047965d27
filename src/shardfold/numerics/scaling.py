"""The loss scale of fp16: what small gradients are lifted by, and what follows when large ones overflow.

Gradients smaller than 6e-8 are zero in fp16. So the loss is multiplied by a scale S before backward, and gradients by
1/S in fp32 as they arrive (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740). A dynamic scale is halved
whenever a gradient is inf or NaN, in which case no rank updates, and doubled after 2000 updates without one.

With the defaults scales and skipped steps are those of ``torch.amp.GradScaler``; ``hysteresis``, ``refill`` and
``floor`` are DeepSpeed's, with its meaning, and with ``delay=1`` so are its scales.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.plan.checks import changes_of, check_flags, described, is_integer, is_number, known_arguments
from shardfold.plan.layout import Precision

__all__ = ["LossScale", "Scaler", "all_finite", "make_scaler", "scaled", "sum_of", "sum_of_all"]

LARGEST = torch.finfo(torch.float32).max


@known_arguments
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How a loss scale begins and moves.

    Attributes:
        initial: the first scale.
        growth: factor after ``interval`` updates in a row.
        backoff: factor after an overflow.
        interval: updates without overflow until the scale grows.
        hysteresis: so many overflows since the scale last grew lower it for the first time; 1: each does.
        refill: whether each step without overflow refills the hysteresis too, not only one after which the scale grows.
        delay: updates after the start, and after each overflow, that do not count towards ``interval``.
        floor: the scale is never lowered below it.
        patience: overflows in a row that would lower the scale below its floor, until ``engine.step()`` raises; None:
            it never does.

    Raises:
        ConfigError: a number is out of its range.

    Examples:
        >>> half = sf.Engine(nn.Linear(8, 8), optimizer=adam, precision="fp16", loss_scale=sf.LossScale(initial=1024.0))
        >>> half.loss_scale.scale
        1024.0
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    refill: bool = False
    delay: int = 0
    floor: float = 1.0
    patience: int | None = 10

    def __post_init__(self) -> None:
        check_flags("LossScale", refill=self.refill)
        legal = {
            "initial": is_number(self.initial, 0, LARGEST) and self.initial > 0,
            "growth": is_number(self.growth, 1),
            "backoff": is_number(self.backoff, 0, 1) and self.backoff > 0,
            "interval": is_integer(self.interval, 1),
            "hysteresis": is_integer(self.hysteresis, 1),
            "delay": is_integer(self.delay, 0),
            "floor": is_number(self.floor, 0) and is_number(self.initial) and 0 < self.floor <= self.initial,
            "patience": self.patience is None or is_integer(self.patience, 1),
        }
        for name, is_legal in legal.items():
            if not is_legal:
                raise ConfigError(
                    f"LossScale.{name} is {described(getattr(self, name))}: initial and floor are numbers > 0 with "
                    "floor <= initial, growth >= 1, 0 < backoff <= 1, interval, hysteresis, patience integers >= 1, "
                    "delay an integer >= 0."
                )

    def __str__(self) -> str:
        return changes_of(self)

    @staticmethod
    def static(scale: float, *, patience: int | None = 10) -> LossScale:
        """A scale that stays; a step whose gradients overflow is skipped all the same."""
        return LossScale(initial=scale, growth=1.0, backoff=1.0, floor=scale, patience=patience)


class Scaler:
    """The loss scale of one engine: the same on every rank, as all ranks see the same overflows.

    Attributes:
        scale: what the losses of the next step are multiplied by.
        skipped: steps skipped so far.
        stuck: steps skipped in a row that would have lowered the scale below its floor.
        last_scales: of the last 16 steps, done or skipped.

    Examples:
        >>> half = sf.Engine(nn.Linear(8, 8), optimizer=adam, precision="fp16")
        >>> half.loss_scale.scale
        65536.0
    """

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self.scale = float(rule.initial)
        self.skipped = self.stuck = 0
        self.last_scales: deque[float] = deque(maxlen=16)
        self._good = -rule.delay  # updates since the scale last moved, or since an overflow
        self._left = rule.hysteresis  # overflows until the scale is lowered

    def __repr__(self) -> str:
        return f"Scaler(scale={self.scale:g}, skipped={self.skipped}, rule={self.rule!r})"

    @property
    def exhausted(self) -> bool:
        """Whether so many steps were skipped at the floor that lowering the scale cannot be the remedy."""
        return self.rule.patience is not None and self.stuck >= self.rule.patience

    @property
    def last_chance(self) -> bool:
        """Whether another overflow exhausts it."""
        rule = self.rule
        at_floor = self.scale <= rule.floor and self._left <= 1
        return rule.patience is not None and at_floor and self.stuck + 1 >= rule.patience

    def update(self, overflowed: bool) -> None:
        """A step was skipped because gradients overflowed, or was done."""
        rule = self.rule
        self.last_scales.append(self.scale)
        if overflowed:
            self.skipped += 1
            self._good = -rule.delay
            self._left -= 1
            self.stuck = self.stuck + 1 if self.scale <= rule.floor and self._left <= 0 else 0
            if self._left <= 0:
                self.scale = max(self.scale * rule.backoff, rule.floor)
            return
        self.stuck = 0
        self._good += 1
        grows = self._good >= rule.interval
        if grows or rule.refill:
            self._left = rule.hysteresis
        if grows:
            self._good = 0
            if self.scale * rule.growth <= LARGEST:
                self.scale *= rule.growth

    def state_dict(self) -> dict[str, Any]:
        """The state, with the names of ``torch.amp.GradScaler``, which can load it."""
        return {
            "scale": self.scale,
            "growth_factor": self.rule.growth,
            "backoff_factor": self.rule.backoff,
            "growth_interval": self.rule.interval,
            "_growth_tracker": self._good,
            "hysteresis_left": self._left,
            "skipped": self.skipped,
            "stuck": self.stuck,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state of this class or of ``torch.amp.GradScaler``; hysteresis, floor and patience stay as they are.

        Raises:
            ConfigError: what every such state has is missing, or no number.
        """
        try:
            scale, good = float(state["scale"]), int(state["_growth_tracker"])
            factors = {"growth": float(state["growth_factor"]), "backoff": float(state["backoff_factor"])}
            interval = int(state["growth_interval"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the state of a loss scale lacks {error}: load what engine.loss_scale.state_dict() or "
                "torch.amp.GradScaler.state_dict() gave."
            ) from error
        if not (isfinite(scale) and scale > 0):
            raise ConfigError(f"the state of a loss scale has scale {scale!r}: it must be a finite number > 0.")
        initial = max(self.rule.initial, self.rule.floor)
        self.rule = replace(self.rule, initial=initial, interval=interval, **factors)
        self.scale, self._good = max(scale, self.rule.floor), good
        self._left = int(state.get("hysteresis_left", self.rule.hysteresis))
        self.skipped, self.stuck = int(state.get("skipped", 0)), int(state.get("stuck", 0))


def scaled(loss: Tensor, scale: float) -> Tensor:
    """``loss * scale``, in fp32 at least: 65536 times a loss of 1 is more than fp16 can hold."""
    wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
    return wide * scale


def make_scaler(given: float | LossScale | None, precisions: Iterable[Precision]) -> Scaler | None:
    """The loss scale that an engine was given, or needs because something is computed in fp16.

    Raises:
        ConfigError: ``given`` is no number, no :class:`LossScale` and not None.
    """
    if given is None:
        fp16 = any("fp16" in (precision.compute, precision.autocast) for precision in precisions)
        return Scaler(LossScale()) if fp16 else None
    if isinstance(given, LossScale):
        return Scaler(given)
    if not (is_number(given, 0, LARGEST) and given):
        raise ConfigError(f"loss_scale= is {described(given)}: it is a finite number > 0, a LossScale, or None.")
    return Scaler(LossScale.static(float(given)))


def sum_of_all(flats: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of all elements, 0-d fp64: finite only if every element is."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        total += sum_of(flat).to(device)
    return total


def sum_of(flat: Tensor) -> Tensor:
    """The sum of all elements, 0-d: finite only if every element is."""
    return flat.sum(dtype=_wide(flat))


def all_finite(flats: Iterable[Tensor]) -> bool:
    """Whether no element is inf or NaN, where the sum of all did not tell."""
    found: dict[torch.device, list[Tensor]] = {}
    for flat in flats:
        found.setdefault(flat.device, []).append(torch.isfinite(flat).all())
    return all(bool(torch.stack(some).all()) for some in found.values())


def _wide(flat: Tensor) -> torch.dtype:
    return torch.float64 if flat.dtype == torch.float64 else torch.float32
