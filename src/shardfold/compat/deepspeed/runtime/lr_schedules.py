"""DeepSpeed's learning-rate schedules: the curves of ``shardfold.optim``, with DeepSpeed's methods and attributes.

``last_batch_iteration`` counts calls of ``step()`` from -1; ``step(n)`` goes to ``n``; ``state_dict()`` has it alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardfold.compat.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.errors import ConfigError, did_you_mean
from shardfold.optim import schedules

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "parse_arguments",
]

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

# DeepSpeed's words for the arguments' names.
LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"
BETA2 = 0.99  # of Adam under OneCycle with cycle_momentum
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"


class WrongScheduleError(ConfigError, TypeError):
    """What a schedule cannot be made of; a ``TypeError`` too, as of DeepSpeed's."""


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer, or the one inside of it; of what ``initialize`` returned, which is one too, the one inside.

    Raises:
        WrongScheduleError: (a ``TypeError``) there is none.
    """
    inner = getattr(optimizer, "optimizer", None)
    for candidate in (inner, optimizer) if isinstance(optimizer, DeepSpeedOptimizer) else (optimizer, inner):
        if isinstance(candidate, Optimizer):
            return candidate
    raise WrongScheduleError(
        f"{type(optimizer).__name__} is not a torch.optim.Optimizer, nor has it one as .optimizer."
    )


class _Iterations(LRScheduler):
    """The methods; ``last_epoch`` is one more than ``last_batch_iteration``."""

    def describe(self) -> None:
        """Sets the attributes that DeepSpeed's schedule of this name has."""

    def _of_groups(self, values: schedules.Rates | None) -> list[Any]:
        """A value for each group; of None its own rate."""
        groups = range(len(self.base_lrs))
        return list(self.base_lrs) if values is None else [schedules.of_group(values, i) for i in groups]

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    @last_batch_iteration.setter
    def last_batch_iteration(self, value: int) -> None:
        self.last_epoch = value + 1

    def step(self, last_batch_iteration: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Goes to the next iteration, or to the one given, and sets the rate of every group."""
        self._step_count += 1
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        self._update_lr()  # which counts

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Goes to the iteration of the state, and sets the rate of every group; takes a curve's own state too."""
        self.step(sd["last_batch_iteration"] if "last_epoch" not in sd else sd["last_epoch"] - 1)


class _Batches(_Iterations):
    """As :class:`_Iterations`; these two call the iteration otherwise."""

    def step(self, batch_iteration: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(batch_iteration)


def _taking(curve: type[LRScheduler]) -> Callable[..., None]:
    """The constructor of a curve, which takes what wraps an optimizer too, and any ``warmup_type``."""
    signature = inspect.signature(curve.__init__)
    known = [parameter for parameter in signature.parameters.values() if parameter.name != "unknown"]
    own = signature.replace(parameters=known)

    @functools.wraps(curve.__init__)
    def construct(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if unknown := [name for name in kwargs if name not in own.parameters]:
            near = did_you_mean(unknown[0], [name for name in own.parameters if name not in schedules.NOT_ARGUMENTS])
            raise WrongScheduleError(f"{type(self).__name__} has no argument {unknown[0]!r}.{near}")
        given = own.bind(self, get_torch_optimizer(optimizer), *args, **kwargs)
        kind = given.arguments.get("warmup_type", WARMUP_LOG_RATE)
        if kind not in schedules.WARMUPS:
            logger.warning("Using unknown warmup_type: %s; it is %r, as by default.", kind, WARMUP_LOG_RATE)
            given.arguments["warmup_type"] = WARMUP_LOG_RATE
        curve.__init__(*given.args, **given.kwargs)
        self.describe()

    vars(construct)["__signature__"] = own
    return construct


class LRRangeTest(_Batches, schedules.LRRangeTest):  # pyright: ignore[reportIncompatibleMethodOverride]
    __doc__ = schedules.LRRangeTest.__doc__
    __init__ = _taking(schedules.LRRangeTest)

    def describe(self) -> None:
        self.min_lr = self._of_groups(self.min_lr)

    def interval_fn(self) -> float:
        """Intervals until the next iteration."""
        return self.last_epoch // self.step_size if self.staircase else self.last_epoch / self.step_size


class OneCycle(_Batches, schedules.OneCycle):  # pyright: ignore[reportIncompatibleMethodOverride]
    __doc__ = schedules.OneCycle.__doc__
    __init__ = _taking(schedules.OneCycle)

    def describe(self) -> None:
        first, second = map(float, self.halves)
        self.first_step_size, self.second_step_size = first, second
        self.total_size, self.step_ratio = first + second, first / (first + second)
        self.first_stair_count, self.second_stair_count = self.stairs
        self.min_lrs, self.max_lrs = self._of_groups(self.min_lr), self._of_groups(self.max_lr)
        stays = math.isclose(self.decay_step_size, 0)
        self.skip_lr_decay = stays or math.isclose(self.decay_lr_rate, 0)
        self.skip_mom_decay = stays or (self.cycle_momentum and math.isclose(self.decay_mom_rate, 0))
        if self.cycle_momentum:
            self.min_moms = [(momentum, BETA2) for momentum in self._of_groups(self.min_mom)]
            self.max_moms = [(momentum, BETA2) for momentum in self._of_groups(self.max_mom)]

    def momentum(self, group: int, updates: int) -> float:
        """As of the curve; ``cycle_min_mom`` before the first ``step()``, as in DeepSpeed."""
        return super().momentum(group, updates) if updates else schedules.of_group(self.min_mom, group)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at this iteration of the curve; None without ``cycle_momentum``."""
        if not self.cycle_momentum:
            return None
        return [(super(OneCycle, self).momentum(i, self.last_epoch), BETA2) for i in range(len(self.base_lrs))]

    def _update_lr(self, epoch: int | None = None) -> None:
        # DeepSpeed cycles Adam's betas alone, and sets both of them.
        if self.cycle_momentum and "betas" not in self.optimizer.defaults:
            self.cycle_momentum = False
            logger.warning(
                "OneCycle: cycle_momentum is disabled, as %s has no betas to cycle.", type(self.optimizer).__name__
            )
        super()._update_lr(epoch)
        for group in self.optimizer.param_groups if self.cycle_momentum else ():
            group["betas"] = (group["betas"][0], BETA2)


class WarmupLR(_Iterations, schedules.WarmupLR):  # pyright: ignore[reportIncompatibleMethodOverride]
    __doc__ = schedules.WarmupLR.__doc__
    __init__ = _taking(schedules.WarmupLR)

    def describe(self) -> None:
        self.min_lrs, self.max_lrs = self._of_groups(self.min_lr), self._of_groups(self.max_lr)
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)


class WarmupDecayLR(WarmupLR, schedules.WarmupDecayLR):  # pyright: ignore[reportIncompatibleMethodOverride]
    __doc__ = schedules.WarmupDecayLR.__doc__
    __init__ = _taking(schedules.WarmupDecayLR)


class WarmupCosineLR(_Iterations, schedules.WarmupCosineLR):  # pyright: ignore[reportIncompatibleMethodOverride]
    __doc__ = schedules.WarmupCosineLR.__doc__
    __init__ = _taking(schedules.WarmupCosineLR)

    def describe(self) -> None:
        self.org_lrs = list(self.base_lrs)
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    def rate(self, group: int, updates: int) -> Any:
        """As of the curve; 0 before the first ``step()``, as in DeepSpeed."""
        return super().rate(group, updates) if updates else 0.0

    def get_lr_ratio(self) -> float:
        """What the groups' own rates are multiplied by at this iteration."""
        return self._ratio(self.last_batch_iteration) if self.last_epoch else 0.0


#: Options of a command line: ``{name: (default, help)}``, by the schedules that read them. A False is a flag.
_RANGE = {
    "lr_range_test_min_lr": (0.001, "rate that the range test begins with"),
    "lr_range_test_step_rate": (1.0, "growth of the rate in each interval, as a multiple of the first"),
    "lr_range_test_step_size": (1000, "updates in an interval"),
    "lr_range_test_staircase": (False, "the rate grows at the end of each interval at once"),
}
_CYCLE = {
    "cycle_first_step_size": (1000, "updates of the rising half"),
    "cycle_first_stair_count": (-1, "stairs of the rising half"),
    "cycle_second_step_size": (-1, "updates of the falling half"),
    "cycle_second_stair_count": (-1, "stairs of the falling half"),
    "decay_step_size": (1000, "updates in an interval of the decay behind the cycle"),
    "cycle_min_lr": (0.01, "least rate of the cycle"),
    "cycle_max_lr": (0.1, "largest rate of the cycle"),
    "decay_lr_rate": (0.0, "decay of the rate in each interval"),
}
_MOMENTUM = {
    "cycle_min_mom": (0.8, "least momentum of the cycle"),
    "cycle_max_mom": (0.9, "largest momentum of the cycle"),
    "decay_mom_rate": (0.0, "growth of the momentum in each interval"),
}
_STEPS = {
    "warmup_num_steps": (1000, "updates of the warm-up"),
    "warmup_type": ("log", "how the rate rises: log or linear"),
}
_WARMUP = {
    "warmup_min_lr": (0.0, "rate that the warm-up begins with"),
    "warmup_max_lr": (0.001, "rate that it ends with"),
    **_STEPS,
}
_COSINE = {
    **_STEPS,
    "warmup_min_ratio": (0.01, "share of the rate that the warm-up begins with"),
    "cos_min_ratio": (0.01, "share of the rate that the cosine ends with"),
}
_READ: dict[str, Mapping[str, Any]] = {
    LR_RANGE_TEST: _RANGE,
    ONE_CYCLE: {**_CYCLE, **_MOMENTUM},
    WARMUP_LR: _WARMUP,
    WARMUP_DECAY_LR: _WARMUP,
    WARMUP_COSINE_LR: _COSINE,
}


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds ``--lr_schedule`` and the schedules' options to a command line."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedules")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    flag = {"cycle_momentum": (False, "momentum is cycled too")}
    for name, (default, text) in {**_RANGE, **_CYCLE, **flag, **_MOMENTUM, **_WARMUP, **_COSINE}.items():
        if default is False:
            group.add_argument(f"--{name}", default=False, action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser


def parse_arguments() -> tuple[Namespace, list[str]]:
    """The schedules' options of this command line, and what else is on it."""
    return add_tuning_arguments(ArgumentParser()).parse_known_args()


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """``({"type": ..., "params": {...}}, None)`` of a command line's options, or ``(None, why not)``."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params = {option: getattr(args, option) for option in _READ[name] if getattr(args, option, None) is not None}
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """``(rate, "")`` that a ``scheduler`` section is built around, or ``(None, why not)``."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} scales the optimizer's rate, so its params define no lr"
    return params[{LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(name, "warmup_max_lr")], ""
