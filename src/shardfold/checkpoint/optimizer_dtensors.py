"""The optimizer's state as DTensors, in the form of PyTorch's ``get_optimizer_state_dict``, and out of it.

    {"state": {name: {"exp_avg": DTensor, "exp_avg_sq": DTensor, "step": tensor}},
     "param_groups": [{"params": [names], "lr": ...}]}

Rows are divided over the ranks that the master is split over, in ``torch.chunk``'s parts, as FSDP2 does; they are made
of the shards as those of parameters are (see ``sharding/dtensors``), and read as those are (``sharding/dtensor_load``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from shardfold.checkpoint._fit import MEANS
from shardfold.comm.device_mesh import is_dtensor
from shardfold.errors import ModelError, UsageError
from shardfold.optim.fused import fused_moments, why_not_fused
from shardfold.plan.layout import Tier
from shardfold.sharding.dtensor_load import (
    BlockRead,
    ParameterHome,
    as_read,
    check_dtensors,
    described,
    take_blocks,
)
from shardfold.sharding.dtensors import Placing, RowSource, own_rows
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.shard import Shard

__all__ = ["check_given", "check_optimizer", "load_optimizer_state", "optimizer_state"]

GIVE, LOAD = "engine.optimizer_state_dict()", "engine.load_optimizer_state_dict()"
SHOWN = 3
"""Names that a message lists."""


def check_optimizer(model: ShardedModel, what: str, *, apart: bool) -> None:
    """``what``: the call. ``apart``: groups of ranks have weights of their own.

    Raises:
        UsageError: this engine's optimizer has no state of that form.
        ModelError: a parameter's parts are no chunks.
    """
    optimizer, instead = model.optimizer, "use engine.save() and engine.load()"
    if optimizer is None or model.updater is None:
        raise UsageError(f"{what}: the engine has no optimizer.")
    if why := why_not_fused(optimizer):
        raise UsageError(f"{what} works for AdamW, Adam and SGD, but {why}, or {instead}.")
    if any(table.moments.tier is Tier.DISK for table in (s.table for s in model.trainable())):
        raise UsageError(f"{what}: moments rest on disk, from which they come for their update: {instead}.")
    if model.comm.mesh.sizes.stages:
        raise UsageError(f"{what}: ranks have groups of other stages' parameters, which are one list there: {instead}.")
    if apart:
        raise UsageError(f"{what}: groups of ranks have weights, and states, of their own: {instead}.")
    Placing(model).check([segment for segment in model.trainable()])


def optimizer_state(model: ShardedModel) -> dict[str, Any]:
    """See :meth:`Engine.optimizer_state_dict`. All ranks of the job call it."""
    updater, optimizer = model.updater, model.optimizer
    assert updater is not None and optimizer is not None
    homes, placing = _trained(model), Placing(model)
    state: dict[str, dict[str, Any]] = {name: {} for name in homes}
    at = {(id(home.segment), home.slot): name for name, home in homes.items()}
    sources: list[RowSource] = []
    for segment in model.trainable():
        over = segment.table.master.over
        for moment in fused_moments(optimizer) or ():
            region = updater.moment(segment, moment)
            assert region is not None
            sources.append(RowSource(segment, Shard(region, 0, segment.shard_numel), over, over, moment))
    with torch.no_grad():
        for source, slot, local in own_rows(model.comm, sources, GIVE):
            value = placing.dtensor(source.segment, slot, local, source.rows)
            state[at[id(source.segment), slot]][source.name] = value
    if not _is_sgd(optimizer):
        for name, home in homes.items():
            step = updater.kept_once(*home)["step"]
            state[name] = {"step": torch.tensor(float(step)), **state[name]}
    return {"state": {name: kept for name, kept in state.items() if kept}, "param_groups": _groups(optimizer, homes)}


def check_given(model: ShardedModel, state: Any) -> None:
    """
    Raises:
        ModelError: what was given is not the state of this engine's optimizer; what differs is listed.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise ModelError(
            f"{LOAD} takes what engine.optimizer_state_dict(), or get_optimizer_state_dict() of "
            'torch.distributed.checkpoint.state_dict, gives: a dict of "state" and "param_groups", with names.'
        )
    assert model.optimizer is not None
    homes, given = _trained(model), state["state"]
    moments = fused_moments(model.optimizer) or ()
    wrong = [f"it has {name!r}, which is not trained here" for name in given if name not in homes]
    wrong += [f"it has nothing of {name!r}" for name in homes if moments and name not in given]
    for name, kept in given.items():
        lacks = sorted({*moments} - {*kept}) + (["step"] if not _is_sgd(model.optimizer) and "step" not in kept else [])
        more = sorted({*kept} - {*moments, "step"} - {n for n, value in kept.items() if value is None})
        wrong += [f"of {name!r} it has no {each!r}" for each in lacks]
        wrong += [f"of {name!r} it has {each!r}, which {type(model.optimizer).__name__} does not keep" for each in more]
        whole = homes[name].segment.spec.slots[homes[name].slot].whole if name in homes else ()
        wrong += [
            f"{each!r} of {name!r} is of the shape {tuple(value.shape)} and the parameter of {whole}"
            for each, value in kept.items()
            if name in homes and each in moments and value is not None and tuple(value.shape) != whole
        ]
    for number, group in enumerate(state["param_groups"]):
        if len({homes[name].segment.spec.group for name in group["params"] if name in homes}) > 1:
            wrong.append(f"its group {number} has parameters of several groups here")
    if wrong:
        listed = "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise ModelError(f"{LOAD}: the state is not of this engine's optimizer: {listed}.")
    parts = _dtensors(state)
    check_dtensors(model, parts, parts)


def load_optimizer_state(model: ShardedModel, state: Mapping[str, Any]) -> None:
    """See :meth:`Engine.load_optimizer_state_dict`; the state was checked. All ranks of the job call it.

    Raises:
        ConfigError: on all ranks: they have different DTensors.
    """
    updater, optimizer = model.updater, model.optimizer
    assert updater is not None and optimizer is not None
    model.comm.agreement.same({"the optimizer's DTensors": json.dumps(described(model, _dtensors(state)))})
    homes, placing, jobs = _trained(model), Placing(model), list[BlockRead]()
    with torch.no_grad():
        for name, home in homes.items():
            kept = state["state"].get(name, {})
            updater.forget(home.segment, [home.slot])
            for moment in fused_moments(optimizer) or ():
                if kept.get(moment) is None:  # of an SGD that has not stepped
                    continue
                read = as_read(model, home, kept[moment], placing, moment)
                if isinstance(read, BlockRead):
                    jobs.append(read)
                else:
                    updater.take_state(home.segment, home.slot, moment, read.reshape(-1))
                if _is_sgd(optimizer):  # a first step would overwrite the momentum
                    updater.take_value(home.segment, home.slot, "step", 1)
            if not _is_sgd(optimizer):
                updater.take_value(home.segment, home.slot, "step", int(kept["step"]))

    def take(job: BlockRead, part: Tensor) -> None:
        segment, slot = job.home
        region = updater.moment(segment, job.state)
        assert region is not None
        Shard(region, 0, segment.shard_numel).part(segment.own_piece(slot)[0]).write(part)

    take_blocks(model, jobs, take)
    by_number = {number: group for group in state["param_groups"] for number in _numbers(group, homes)}
    for number, group in by_number.items():
        mine = optimizer.param_groups[number]
        mine |= {n: value for n, value in group.items() if n not in ("params", "param_names", *MEANS)}


def _is_sgd(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "same_as", type(optimizer)) is SGD


def _trained(model: ShardedModel) -> dict[str, ParameterHome]:
    """Where parameters that are trained lie, by their first names, in the model's order."""
    by_id = {id(p): ParameterHome(s, slot) for s in model.trainable() for slot, p in enumerate(s.parameters)}
    return {name: by_id[id(p)] for name, p in model.module.named_parameters() if id(p) in by_id}


def _groups(optimizer: Optimizer, homes: Mapping[str, ParameterHome]) -> list[dict[str, Any]]:
    """The optimizer's groups, with names in place of parameters."""
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "param_names") and not callable(value)}
        for group in optimizer.param_groups
    ]
    members: list[list[str]] = [[] for _ in groups]
    for name, home in homes.items():
        members[home.segment.spec.group].append(name)
    return [{**group, "params": names} for group, names in zip(groups, members, strict=True)]


def _numbers(group: Mapping[str, Any], homes: Mapping[str, ParameterHome]) -> set[int]:
    """Which of this engine's groups have parameters of that one."""
    return {homes[name].segment.spec.group for name in group["params"] if name in homes}


def _dtensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Its DTensors by the parameter and the state."""
    return {f"{name}.{each}": value for name, each, value in _values(state) if is_dtensor(value)}


def _values(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    return ((name, each, value) for name, kept in state["state"].items() for each, value in kept.items())
