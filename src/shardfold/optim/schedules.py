"""Learning-rate schedules: what ``Engine(lr_schedule=...)`` takes, and what any ``torch.optim`` optimizer takes.

:func:`warmup_cosine` is the short way. The classes have the argument names, the defaults and the curves of DeepSpeed's
schedules of the same names, as ordinary ``torch.optim.lr_scheduler.LRScheduler`` objects: made with arguments
(``partial(WarmupLR, warmup_num_steps=100)``), stepped once after each update, saved with ``state_dict()``.

A rate given as a number is that of every parameter group; a list has one for each. Groups with different peaks keep
their ratio at every step wherever their other rates have that ratio too (0 has every ratio).

Rates are a closed formula of the number of updates done, ``last_epoch``; ``i`` below is ``last_epoch - 1``, DeepSpeed's
``last_batch_iteration``: the first update of a run, for which no schedule has been stepped yet, has ``i = -1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.checks import known_arguments

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "renew_rates", "warmup_cosine"]

Rates = float | Sequence[float]
WARMUPS = ("log", "linear")


@known_arguments
def warmup_cosine(*, warmup: int, total: int, floor: float = 0.1) -> Callable[[Optimizer], LambdaLR]:
    """Linear warm-up over ``warmup`` steps, then half a cosine down to ``floor`` times the peak at step ``total``.

    The first step already trains: its rate is ``1 / warmup`` of the peak (Loshchilov & Hutter, arXiv 1608.03983).

    Raises:
        ConfigError: the numbers do not describe a schedule.

    Examples:
        >>> scheduled = sf.Engine(
        ...     nn.Linear(8, 8), optimizer=adam, lr_schedule=sf.optim.warmup_cosine(warmup=10, total=100)
        ... )
        >>> scheduled.backward(scheduled(x).square().mean())
        >>> scheduled.step().lr < 1e-3
        True
    """
    if not 0 <= warmup <= total or total < 1 or not 0.0 <= floor <= 1.0:
        raise ConfigError(
            f"warmup_cosine(warmup={warmup}, total={total}, floor={floor}): "
            "0 <= warmup <= total, total >= 1 and 0 <= floor <= 1 must hold."
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(total - warmup, 1), 1.0)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return lambda optimizer: LambdaLR(optimizer, factor)


def renew_rates(schedule: Any) -> None:
    """Gives the groups of the optimizer the rates that a schedule of functions of the step has for the one that comes,
    where it has gone on from a run whose functions or base rates were others. Other schedules stay."""
    if isinstance(schedule, LambdaLR):
        schedule._update_lr(schedule.last_epoch)  # pyright: ignore[reportAttributeAccessIssue]


class _Curve(LRScheduler):
    """Rates as a formula of ``last_epoch``; subclasses set their numbers and then call this constructor."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int, unknown: Mapping[str, Any]) -> None:
        if unknown:
            import inspect

            known = [name for name in inspect.signature(type(self).__init__).parameters if name not in NOT_ARGUMENTS]
            name = next(iter(unknown))
            raise ConfigError(f"{type(self).__name__} has no argument {name!r}.{did_you_mean(name, known)}")
        self._check_count("last_batch_iteration", last_batch_iteration, at_least=-1)
        if last_batch_iteration >= 0:  # a run that goes on: PyTorch wants to find the rates that it began with
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group after ``last_epoch`` updates."""
        return [self.rate(group, self.last_epoch) for group in range(len(self.base_lrs))]

    def rate(self, group: int, updates: int) -> float | Tensor:
        """The rate of a group after so many updates."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict()`` gave, and gives every group of the optimizer its rate of that moment."""
        super().load_state_dict(state_dict)
        self.last_epoch -= 1
        self._update_lr()

    def _per_group(self, name: str, value: Rates, optimizer: Optimizer) -> Rates:
        """Checks a rate, or one for each group."""
        groups = len(optimizer.param_groups)
        if isinstance(value, (list, tuple)) and len(value) != groups:
            raise self._error(name, value, f"a number, or a list with one for each of the {groups} parameter groups")
        values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        if not all(_is_number(number) and number >= 0 for number in values):
            raise self._error(name, value, "a number >= 0, or a list with one for each parameter group")
        return list(value) if isinstance(value, (list, tuple)) else value

    def _check_count(self, name: str, value: Any, *, at_least: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self._error(name, value, f"an integer >= {at_least}")

    def _check_number(self, name: str, value: Any, low: float = 0.0, high: float = math.inf) -> None:
        if not _is_number(value) or not low <= value <= high:
            raise self._error(name, value, f"a number >= {low:g}" + (f" and <= {high:g}" if high < math.inf else ""))

    def _error(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}({name}={value!r}): it is {wanted}.")


NOT_ARGUMENTS = ("self", "optimizer", "unknown")


class _Warmup(_Curve):
    """The rising part that three schedules share."""

    def _set_warmup(self, warmup_num_steps: int, warmup_type: str) -> None:
        self._check_count("warmup_num_steps", warmup_num_steps, at_least=1)
        if warmup_type not in WARMUPS:
            raise ConfigError(
                f"{type(self).__name__}(warmup_type={warmup_type!r}): it is one of {', '.join(map(repr, WARMUPS))}."
                + did_you_mean(str(warmup_type), WARMUPS)
            )
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type

    def _risen(self, i: int) -> float | None:
        """How much of the way up has been done, in [0, 1); None when it is over."""
        if i >= self.warmup_num_steps:
            return None
        if self.warmup_type == "log":
            return math.log(max(i, 0) + 1) / math.log(self.warmup_num_steps)
        return max(i, 0) / self.warmup_num_steps


@known_arguments
class WarmupLR(_Warmup):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, then constant.

    Args:
        optimizer: whose groups get their rates.
        warmup_min_lr: a number, or one for each group.
        warmup_max_lr: likewise; None: each group's own ``lr``.
        warmup_num_steps: at least 2 are taken.
        warmup_type: ``"log"``: ``log(i + 1) / log(n)`` of the way; ``"linear"``: ``i / n``.
        last_batch_iteration: ``i`` of the last update of a run that goes on.

    Raises:
        ConfigError: an argument is unknown or out of its range.

    Examples:
        >>> sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        >>> schedule = sf.optim.WarmupLR(sgd, warmup_max_lr=1.0, warmup_num_steps=10, warmup_type="linear")
        >>> sgd.param_groups[0]["lr"] <= 1.0
        True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        **unknown: Any,
    ) -> None:
        self._set_warmup(warmup_num_steps, warmup_type)
        self.min_lr = self._per_group("warmup_min_lr", warmup_min_lr, optimizer)
        self.max_lr = None if warmup_max_lr is None else self._per_group("warmup_max_lr", warmup_max_lr, optimizer)
        super().__init__(optimizer, last_batch_iteration, unknown)

    def rate(self, group: int, updates: int) -> float | Tensor:
        low = of_group(self.min_lr, group)
        high = self.base_lrs[group] if self.max_lr is None else of_group(self.max_lr, group)
        return low + (high - low) * self._factor(updates - 1)

    def _factor(self, i: int) -> float:
        risen = self._risen(i)
        return 1.0 if risen is None else risen


@known_arguments
class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, then in a straight line down to ``warmup_min_lr`` at ``i = total_num_steps``.

    Args:
        optimizer: whose groups get their rates.
        total_num_steps: of the whole run.
        warmup_min_lr: a number, or one for each group.
        warmup_max_lr: likewise; None: each group's own ``lr``.
        warmup_num_steps: at least 2 are taken.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: ``i`` of the last update of a run that goes on.

    Raises:
        ConfigError: an argument is unknown or out of its range.

    Examples:
        >>> sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        >>> schedule = sf.optim.WarmupDecayLR(sgd, total_num_steps=100, warmup_max_lr=1.0, warmup_num_steps=10)
        >>> sgd.param_groups[0]["lr"] <= 1.0
        True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        **unknown: Any,
    ) -> None:
        self._check_count("total_num_steps", total_num_steps, at_least=1)
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration, **unknown
        )

    def _factor(self, i: int) -> float:
        risen = self._risen(i)
        if risen is not None:
            return risen
        return max(0.0, (self.total_num_steps - i) / max(1, self.total_num_steps - self.warmup_num_steps))


@known_arguments
class WarmupCosineLR(_Warmup):
    """From ``warmup_min_ratio`` to 1 of each group's own rate, then half a cosine down to ``cos_min_ratio`` of it.

    Args:
        optimizer: whose groups get their rates.
        total_num_steps: of the whole run; from there on the rate stays.
        warmup_min_ratio: of the rate, in [0, 1].
        warmup_num_steps: at least 2 are taken.
        cos_min_ratio: of the rate, in [0, 1].
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: ``i`` of the last update of a run that goes on.

    Raises:
        ConfigError: an argument is unknown or out of its range.

    Examples:
        >>> sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        >>> schedule = sf.optim.WarmupCosineLR(sgd, total_num_steps=100, warmup_num_steps=10)
        >>> sgd.param_groups[0]["lr"] <= 1.0
        True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        **unknown: Any,
    ) -> None:
        self._set_warmup(warmup_num_steps, warmup_type)
        self._check_count("total_num_steps", total_num_steps, at_least=1)
        self._check_number("warmup_min_ratio", warmup_min_ratio, high=1.0)
        self._check_number("cos_min_ratio", cos_min_ratio, high=1.0)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration, unknown)

    def rate(self, group: int, updates: int) -> float | Tensor:
        return self.base_lrs[group] * self._ratio(updates - 1)

    def _ratio(self, i: int) -> float:
        risen = self._risen(i)
        if risen is not None:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * risen
        fallen = min(1.0, (i - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * fallen)) / 2


@known_arguments
class LRRangeTest(_Curve):
    """Rates that grow from ``lr_range_test_min_lr`` without end, to see where training diverges (arXiv 1803.09820).

    After ``n`` updates: ``min_lr * (1 + step_rate * n / step_size)``.

    Args:
        optimizer: whose groups get their rates.
        lr_range_test_min_lr: a number, or one for each group.
        lr_range_test_step_size: updates in which the rate grows by ``step_rate`` times ``min_lr``.
        lr_range_test_step_rate: see there.
        lr_range_test_staircase: it grows at once at the end of each ``step_size`` updates.
        last_batch_iteration: ``i`` of the last update of a run that goes on.

    Raises:
        ConfigError: an argument is unknown or out of its range.

    Examples:
        >>> sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        >>> schedule = sf.optim.LRRangeTest(sgd, lr_range_test_min_lr=0.01, lr_range_test_step_size=10)
        >>> sgd.param_groups[0]["lr"]
        0.01
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
        **unknown: Any,
    ) -> None:
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self._check_count("lr_range_test_step_size", lr_range_test_step_size, at_least=1)
        self._check_number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = bool(lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration, unknown)

    def rate(self, group: int, updates: int) -> float:
        intervals = updates // self.step_size if self.staircase else updates / self.step_size
        return of_group(self.min_lr, group) * (1 + self.step_rate * intervals)


@known_arguments
class OneCycle(_Curve):
    """One cycle up and down, then decay; momentum goes the other way (arXiv 1803.09820).

    Up from ``cycle_min_lr`` to ``cycle_max_lr`` in ``cycle_first_step_size`` updates, down again in
    ``cycle_second_step_size``, then ``cycle_min_lr / (1 + decay_lr_rate * n / decay_step_size)``. Momentum (first of
    a group's ``betas``, or its ``momentum``; of a group that has neither, nothing) goes from ``cycle_max_mom`` to
    ``cycle_min_mom`` and back, then it is ``cycle_max_mom * (1 + decay_mom_rate * n / decay_step_size)``.

    Args:
        optimizer: whose groups get their rates.
        cycle_min_lr, cycle_max_lr: numbers, or one for each group.
        decay_lr_rate: 0 does not decay.
        cycle_first_step_size, cycle_second_step_size: in updates; None: as the first.
        cycle_first_stair_count, cycle_second_stair_count: stairs in each half, 0: none; None: as the first.
        decay_step_size: in updates; 0 does not decay.
        cycle_momentum: whether momentum is cycled at all.
        cycle_min_mom, cycle_max_mom: numbers, or one for each group.
        decay_mom_rate: 0 does not change it.
        last_batch_iteration: ``i`` of the last update of a run that goes on.

    Raises:
        ConfigError: an argument is unknown or out of its range.

    Examples:
        >>> sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0, momentum=0.9)
        >>> schedule = sf.optim.OneCycle(sgd, cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=10)
        >>> sgd.param_groups[0]["lr"]
        0.1
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        **unknown: Any,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._check_number("cycle_first_step_size", cycle_first_step_size)
        if not cycle_first_step_size:
            raise self._error("cycle_first_step_size", cycle_first_step_size, "a number > 0")
        self._check_number("cycle_second_step_size", second)
        self._check_count("cycle_first_stair_count", cycle_first_stair_count, at_least=0)
        self._check_count("cycle_second_stair_count", stairs, at_least=0)
        numbers = {"decay_lr_rate": decay_lr_rate, "decay_step_size": decay_step_size, "decay_mom_rate": decay_mom_rate}
        for name, value in numbers.items():
            self._check_number(name, value)
        self.halves, self.stairs = (cycle_first_step_size, second), (cycle_first_stair_count, stairs)
        self.min_lr = self._per_group("cycle_min_lr", cycle_min_lr, optimizer)
        self.max_lr = self._per_group("cycle_max_lr", cycle_max_lr, optimizer)
        self.min_mom = self._per_group("cycle_min_mom", cycle_min_mom, optimizer)
        self.max_mom = self._per_group("cycle_max_mom", cycle_max_mom, optimizer)
        self.decay_lr_rate, self.decay_mom_rate, self.decay_step_size = decay_lr_rate, decay_mom_rate, decay_step_size
        self.cycle_momentum = cycle_momentum
        super().__init__(optimizer, last_batch_iteration, unknown)

    def rate(self, group: int, updates: int) -> float:
        low, high = of_group(self.min_lr, group), of_group(self.max_lr, group)
        height, decay = self._height(updates)
        return (low + (high - low) * height) / (1 + self.decay_lr_rate * decay)

    def momentum(self, group: int, updates: int) -> float:
        """The momentum of a group after so many updates."""
        low, high = of_group(self.min_mom, group), of_group(self.max_mom, group)
        height, decay = self._height(updates)
        return (high - (high - low) * height) * (1 + self.decay_mom_rate * decay)

    def _height(self, updates: int) -> tuple[float, float]:
        """How high in the cycle, in [0, 1], and for how many intervals it has decayed behind it."""
        first, second = self.halves
        if updates >= first + second:
            return 0.0, (updates - first - second) / self.decay_step_size if self.decay_step_size else 0.0
        rising = updates <= first
        part, whole = (updates, first) if rising else (first + second - updates, second)
        stairs = self.stairs[0 if rising else 1]
        return math.floor(part * stairs / whole) / stairs if stairs else part / whole, 0.0

    def _update_lr(self, epoch: int | None = None) -> None:
        super()._update_lr(epoch)
        for i, group in enumerate(self.optimizer.param_groups if self.cycle_momentum else ()):
            if "betas" in group:
                group["betas"] = (self.momentum(i, self.last_epoch), *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = self.momentum(i, self.last_epoch)


def of_group(rates: Rates, group: int) -> float:
    """The rate of a group, of one for all or one for each."""
    return rates[group] if isinstance(rates, Sequence) else rates


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
