"""What an engine is given, checked before anything is made of it."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from shardfold.errors import ConfigError

__all__ = ["check_accumulate", "check_schedule", "make_schedule"]


def check_accumulate(accumulate: Any) -> None:
    """
    Raises:
        ConfigError: it is no number of micro-batches.
    """
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r}: it is the number of micro-batches per step, an integer >= 1.")


def check_schedule(schedule: Any, optimizer: Any) -> None:
    """
    Raises:
        ConfigError: ``schedule`` is no schedule, or was made of another optimizer than the engine's, or there is none.
    """
    if schedule is not None and optimizer is None:
        raise ConfigError("schedule= needs an optimizer: pass optimizer= to the Engine too.")
    if schedule is None or (callable(schedule) and not isinstance(schedule, LRScheduler)):
        return
    kind = type(schedule).__name__
    if not callable(getattr(schedule, "step", None)):
        raise ConfigError(
            f"schedule= was given a {kind}: it is a torch.optim.lr_scheduler, or makes one of the optimizer."
        )
    if getattr(schedule, "optimizer", None) is not optimizer or optimizer is None:
        raise ConfigError(
            f"schedule= was given a {kind} over another optimizer than optimizer=: give both as objects, the schedule "
            f"made of that optimizer, or give what makes one, such as schedule=partial({kind}, ...)."
        )
    _refuse_metric(schedule)


def make_schedule(schedule: Any, optimizer: Any) -> Any:
    """The schedule of an engine: ``schedule`` itself, or what it makes of the optimizer; None without one.

    Raises:
        ConfigError: its ``step()`` asks for a metric.
    """
    if schedule is None or optimizer is None:
        return None
    made = schedule if isinstance(schedule, LRScheduler) or not callable(schedule) else schedule(optimizer)
    _refuse_metric(made)
    return made


def _refuse_metric(schedule: Any) -> None:
    try:
        inspect.signature(schedule.step).bind()
    except ValueError:  # of C, which tells nothing
        return
    except TypeError as error:
        raise ConfigError(
            f"schedule= cannot be a {type(schedule).__name__}, whose step() wants what no engine knows ({error}): "
            "make it yourself of engine.optimizer and call its step(metric) behind engine.step()."
        ) from None
