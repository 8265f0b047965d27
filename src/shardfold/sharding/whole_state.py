"""A model's whole values out of shards, and back: state dicts, and the names of what is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError
from shardfold.plan.layout import Axes
from shardfold.sharding.loans import refuse_during
from shardfold.sharding.model import ShardedModel, Whole
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.together import on_disk, together
from shardfold.sharding.whole_segments import whole_segments

__all__ = [
    "buffers_of",
    "check_state",
    "every_buffer",
    "load_state",
    "most_precise",
    "named_state",
    "names_of",
    "state_dict",
]


def state_dict(model: ShardedModel, frozen: str) -> dict[str, Tensor]:
    """See :meth:`Engine.state_dict`; 16 MiB, or one segment, are whole at a time.

    Raises:
        ConfigError: ``frozen`` is neither ``"keep"`` nor ``"skip"``.
    """
    if frozen not in ("keep", "skip"):
        raise ConfigError(f"engine.state_dict(frozen={frozen!r}): frozen parameters are kept ('keep') or not ('skip').")
    whole: dict[int, Tensor] = {}
    segments = [s for unit in model.units for s in unit.segments if frozen == "keep" or s.spec.trainable]
    copies = [(segment, most_precise(model, segment)) for segment in segments]
    shards = [(segment, kept, over) for segment, (kept, _, over) in copies]
    for segment, flat in whole_segments(model.comm, shards, "engine.state_dict()"):
        values = flat.cpu()
        for parameter, view in zip(segment.parameters, segment.views_of(values), strict=True):
            whole[id(parameter)] = view.clone()
    state = named_state(model.module, whole)
    return state if model.whole is None else _of_all_stages(model, model.whole, state)


def _of_all_stages(model: ShardedModel, whole: Whole, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dicts of all stages in one, on every rank."""
    comm, axes = model.comm, model.comm.mesh.sizes.stages
    told = {name: value for name, value in state.items() if name not in whole.untold}
    mine = {name: [list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in told.items()}
    said = [json.loads(text) for text in comm.job.exchange("the state of a stage", json.dumps(mine))]
    row = next(row for row in comm.mesh.sizes.rows(axes) if model.rank in row)
    found: dict[str, Tensor] = {}
    for place, rank in enumerate(row):
        for name, (shape, dtype) in said[rank].items():
            here = rank == model.rank
            value = state[name] if here else torch.empty(shape, dtype=getattr(torch, dtype))
            sent = value.to(model.device).contiguous()
            comm.broadcast(sent.view(-1), "the state of a stage", place, over=axes, detail=name)
            found.setdefault(name, value if here else sent.cpu())
    for first, names in whole.also.items():
        if first in found:
            found.update(dict.fromkeys(names, found[first]))
    return found


def check_state(model: ShardedModel, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Looks at a state dict; nothing is changed.

    Raises:
        ModelError: it does not.
    """
    refuse_during(model.loans, "engine.load_state_dict()")
    if not isinstance(state, Mapping):
        raise ModelError(
            f"engine.load_state_dict(): the state dict is of type {type(state).__name__}: give a dict of tensors by "
            "name."
        )
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    buffers = every_buffer(model.module)
    known: dict[str, Tensor] = {**parameters, **buffers}
    elsewhere = model.whole.names if model.whole is not None else frozenset[str]()
    missing, unexpected = sorted(set(known) - set(state)), sorted(map(str, set(state) - set(known) - elsewhere))
    if strict and (missing or unexpected):
        raise ModelError(
            f"the state dict does not fit the model: missing {', '.join(missing) or 'nothing'}; unexpected "
            f"{', '.join(unexpected) or 'nothing'}; pass strict=False to load what fits."
        )
    for name in state.keys() & known.keys():
        value = state[name]
        if not isinstance(value, Tensor):
            raise ModelError(f"the state dict has {name!r} of type {type(value).__name__}: give a tensor.")
        if value.shape != known[name].shape:
            raise ModelError(
                f"the state dict gives {name!r} the shape {tuple(value.shape)}, but the model's is "
                f"{tuple(known[name].shape)}."
            )


def load_state(model: ShardedModel, state: Mapping[str, Tensor]) -> None:
    """See :meth:`Engine.load_state_dict`; the state has been looked at."""
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    buffers = every_buffer(model.module)
    by_id = {id(parameters[name]): state[name] for name in state.keys() & parameters.keys()}

    def take() -> None:
        model.let_go()
        for unit in model.units:
            for segment in unit.segments:
                for slot, parameter in enumerate(segment.parameters):
                    if id(parameter) in by_id:
                        segment.take(slot, by_id[id(parameter)])
            torch.autograd.graph.increment_version([parameter for _, parameter in unit.parameters()])

    with torch.no_grad():
        together(model.comm, "engine.load_state_dict()", take, files=on_disk(model.layout))
        for name in state.keys() & buffers.keys():
            buffers[name].copy_(state[name])


def most_precise(model: ShardedModel, segment: Segment) -> tuple[Shard, tuple[int, int], Axes]:
    """The copy of the weights that is kept, its range of the segment, and the axes that it is split over."""
    if (master := segment.shard("master")) is not None:
        return master, segment.master_range, segment.table.master.over
    rest = segment.shard("params")
    assert rest is not None
    return rest, segment.rest_range, segment.table.rest.over


# -- names


def names_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of parameters, by the first."""
    first: dict[int, str] = {}
    also: dict[str, tuple[str, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = first.setdefault(id(parameter), name)
        if home != name:
            also[home] = (*also.get(home, ()), name)
    return also


def buffers_of(module: nn.Module) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Persistent buffers, each with its further names, by the first."""
    first: dict[int, str] = {}
    found: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set:
                continue
            full = f"{path}.{name}" if path else name
            home = first.setdefault(id(buffer), full)
            if home == full:
                found[full] = (buffer, ())
            elif full not in found[home][1]:
                found[home] = (buffer, (*found[home][1], full))
    return found


def every_buffer(module: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers, by all of their names."""
    return {name: buffer for first, (buffer, also) in buffers_of(module).items() for name in (first, *also)}


def named_state(module: nn.Module, whole: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """A state dict of ``module``: parameters that are in ``whole`` by ``id``, persistent buffers as they are, on the
    CPU."""
    state: dict[str, Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in whole:
                state[dot + name] = whole[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                state[dot + name] = buffer.detach().cpu().clone()
    return state
