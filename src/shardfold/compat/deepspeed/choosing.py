"""Which optimizer and schedule ``initialize`` uses: what it was given, or what the config says."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardfold.compat.deepspeed.config import Settings
from shardfold.compat.deepspeed.optimizer import EngineOptimizer
from shardfold.compat.deepspeed.optimizers import check_schedule_arguments, make_optimizer, make_scheduler
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = ["check_scheduler", "chosen_optimizer", "chosen_scheduler"]


def chosen_optimizer(given: Any, settings: Settings, model: nn.Module, model_parameters: Any) -> Optimizer | None:
    """The optimizer that ``initialize`` was given, or makes; None for an engine that only runs forward.

    Args:
        given: an optimizer, a callable that makes one of ``model_parameters``, or None.
        settings: with type and arguments of the config's optimizer, if it has one and none is given.
        model: whose parameters are the default.
        model_parameters: parameters or groups of them, in any iterable; None: all of the model's.

    Raises:
        WrongArgument: one of another kind is given; or there is nothing to optimize.
    """
    section = settings.optimizer
    if given is None and section is None:
        return None
    if isinstance(given, Optimizer):
        optimizer = given
    else:
        parameters = list(model.parameters() if model_parameters is None else model_parameters)
        if not parameters:
            raise WrongArgument(
                "initialize(model_parameters=...) is empty, so there is nothing to optimize: give parameters or groups "
                "of them, or leave it out for all of the model's."
            )
        if section is not None:
            optimizer = make_optimizer(*section, parameters, model=model)
        elif callable(given):
            optimizer = given(parameters)
        else:
            raise WrongArgument(
                f"initialize(optimizer=...) was given a {type(given).__name__}: give a torch.optim.Optimizer, or a "
                "function that makes one of parameters."
            )
    if not isinstance(optimizer, Optimizer):
        raise WrongArgument(
            f"the function given as initialize(optimizer=...) made a {type(optimizer).__name__}: it has to return a "
            "torch.optim.Optimizer."
        )
    # DeepSpeed takes away groups that have no parameters. One that a schedule was made with stays: schedules go through
    # groups by their numbers, and write initial_lr into each.
    groups = optimizer.param_groups
    groups[:] = [group for group in groups if group["params"] or "initial_lr" in group]
    return optimizer


def check_scheduler(given: Any, settings: Settings, optimizer: Optimizer) -> None:
    """What can be known of the schedule before the engine is made: see :func:`chosen_scheduler`.

    Raises:
        WrongArgument: it is a schedule of another optimizer.
        DeepSpeedConfigError: the config's lacks an argument, or has an unknown one.
    """
    if given is None and settings.scheduler is not None:
        check_schedule_arguments(*settings.scheduler)
    its = getattr(given, "optimizer", None)
    known = {id(group) for group in optimizer.param_groups}
    if isinstance(its, Optimizer) and not any(id(group) in known for group in its.param_groups):
        raise WrongArgument(
            f"initialize(lr_scheduler=...) was given a {type(given).__name__} of another optimizer than the one that "
            "is used: make it of that one, or give a function that makes it of an optimizer."
        )


def chosen_scheduler(given: Any, settings: Settings, optimizer: EngineOptimizer) -> Any:
    """The schedule that ``initialize`` was given, or makes; None if there is none.

    Args:
        given: a schedule, a callable that makes one of the inner optimizer, or None.
        settings: with type and arguments of the config's scheduler, if it has one.
        optimizer: the one that ``initialize`` returns.
    """
    if given is not None:
        return given(optimizer.optimizer) if callable(given) else given
    if settings.scheduler is None:
        return None
    return make_scheduler(*settings.scheduler, optimizer.optimizer)
