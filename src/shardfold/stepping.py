"""The optimizer step: all ranks agree what was used and whether it is finite, then each updates what it owns.

agree     which parameters any rank used, whether gradients overflowed on any, in one small message
reduce    what came too late for backward
follow    the program's section ``step``: NORM, then UPDATE and ALL_GATHER of each unit
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from shardfold.errors import ConfigError, NonFiniteError
from shardfold.numerics.forensics import examine
from shardfold.report import StepReport
from shardfold.wires.plain import drain

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["check_accumulate", "check_schedule", "make_schedule", "take_step"]


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


def take_step(engine: Engine) -> StepReport:
    """See :meth:`Engine.step`; at the boundary, with gradients."""
    assert engine.optimizer is not None
    lr = float(engine.optimizer.param_groups[0]["lr"]) if engine.optimizer.param_groups else None
    by_hand = engine._runner.before_step()
    said = engine._runner.meet(
        "the optimizer step", flags=[False, engine._replaced.waits, by_hand]
    )  # the first: of buffers
    if said[1]:
        engine._replaced.agree(partial(engine.actions.control, op=dist.ReduceOp.MAX))
    if said[2]:
        engine._runner.compare_changes()
    scale = engine.actions.lifted
    updated = _update(engine)
    findings = engine.alarm.report.findings if engine.alarm.report is not None else ()
    if engine.loss_scale is not None:
        engine.loss_scale.update(not updated)
        engine.alarm.settle()
    if not updated:  # neither weights, moments, counts nor the schedule have moved
        engine._clock.end_step(engine.agreement.waited, skipped=True)
        if engine.loss_scale is not None and engine.loss_scale.exhausted:
            raise engine.alarm.failure()
        return StepReport(engine.steps, updated=False, skipped=True, lr=lr, loss_scale=scale, findings=findings)
    engine.steps += 1
    engine.optimizer._opt_called = True  # pyright: ignore  # torch warns of a schedule that runs ahead
    if engine.schedule is not None:
        engine.schedule.step()
    for call in engine.after_step:
        call()
    engine._clock.end_step(engine.agreement.waited)
    norm = engine.actions.grad_norm
    return StepReport(engine.steps, updated=True, lr=lr, loss_scale=scale, norm=norm, findings=findings)


def _update(engine: Engine) -> bool:
    """The update; False if gradients overflowed on any rank, in which case no rank has changed anything."""
    assert engine._update is not None
    actions, scaler = engine.actions, engine.loss_scale
    actions.meter.begin_step()
    for unit in engine.units:
        unit.gradients.complete()  # one rank: nothing was sent, so nothing is complete
    used, late, (overflowed, raised, weighed) = actions.agree_on_use(
        scaler is not None and actions.overflowed(), engine.alarm.raised(), engine.shares.any
    )
    engine._runner.reduce_late(late)
    if scaler is not None and late and not overflowed:  # what came late was not among what was looked at
        overflowed = bool(actions.control([float(actions.overflowed())], dist.ReduceOp.MAX)[0])
    engine.alarm.look(overflowed=overflowed, raised=raised)
    if overflowed:
        for unit in engine.units:
            unit.forget_gradients()
        engine._runner.end_step(skipped=True)
        return False
    if weighed:
        sums = actions.control(engine.shares.sums(), dist.ReduceOp.SUM)
        actions.set_factors(engine.shares.factor(sums, engine.world_size * engine.accumulate))
    actions.grad_norm = actions.coefficient = None
    track = engine._runner.tracks["step"]
    track.restart()
    if engine.clip is not None and engine.clip.value is not None:
        actions.clip_values()
    while track.position < len(track.ops) and track.ops[track.position].verb == "NORM":
        try:
            track.follow(("NORM",))
        except NonFiniteError as error:  # on every rank
            raise NonFiniteError(f"{error}\n{examine(engine)}") from None
    coefficient = engine.actions.coefficient
    if coefficient is not None and engine.device.type == "cpu" and float(coefficient) >= 1.0:
        coefficient = None
    sharded = engine._update

    def update() -> None:
        with torch.no_grad():
            sharded.begin(engine.units, used, coefficient)
        track.finish()

    sharded.around(update)
    for unit in engine.units:
        drain(unit.filling, engine.agreement.wait)
        unit.forget_gradients()
        torch.autograd.graph.increment_version([p for s in unit.trainable for p in s.parameters])
    engine._changes.updated()
    if weighed:
        actions.set_factors()
    engine._runner.end_step()
    return True
