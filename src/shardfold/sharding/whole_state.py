"""A model's whole values out of shards, and back: state dicts, and the names of what is in them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError
from shardfold.plan.layout import Axes
from shardfold.sharding.model import Loan, ShardedModel, StagedNames, refuse_during
from shardfold.sharding.plain import StrangeValue, from_text, to_text
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.stand_ins import EXTRA, Read, metadata_of, own_state, reads_values, with_metadata
from shardfold.sharding.together import on_disk, together
from shardfold.sharding.whole_segments import whole_parameters

__all__ = [
    "buffers_of",
    "check_state",
    "chosen",
    "every_buffer",
    "extra_states",
    "load_state",
    "most_precise",
    "named_state",
    "names_of",
    "read_state",
    "state_dict",
    "values_to_read",
]


def state_dict(model: ShardedModel, frozen: str) -> OrderedDict[str, Any]:
    """See :meth:`Engine.state_dict`; 16 MiB, or one segment, are whole at a time.

    Raises:
        ConfigError: ``frozen`` is neither ``"keep"`` nor ``"skip"``.
        ModelError: a hook of the state dict cannot run here.
    """
    whole = _whole_values(model, chosen(model, frozen), "engine.state_dict()")
    if model.whole is None:
        return own_state(model.module, whole)
    return _of_all_stages(model, model.whole, whole)


def chosen(model: ShardedModel, frozen: str) -> list[Segment]:
    """The segments that a state dict has.

    Raises:
        ConfigError: ``frozen`` is neither ``"keep"`` nor ``"skip"``.
    """
    if frozen not in ("keep", "skip"):
        raise ConfigError(f"engine.state_dict(frozen={frozen!r}): frozen parameters are kept ('keep') or not ('skip').")
    return [s for unit in model.units for s in unit.segments if frozen == "keep" or s.spec.trainable]


def _whole_values(model: ShardedModel, segments: Sequence[Segment], what: str) -> dict[int, Tensor]:
    """Parameters' values in the master's precision, by ``id``, on the CPU."""
    copies = [(segment, most_precise(model, segment)) for segment in segments]
    shards = [(segment, kept, over) for segment, (kept, _, over) in copies]
    return whole_parameters(model.comm, shards, what)


def _of_all_stages(model: ShardedModel, whole: StagedNames, values: Mapping[int, Tensor]) -> OrderedDict[str, Any]:
    """The state dicts of all stages in one, on every rank.

    Raises:
        ModelError: on all ranks: a hook of one of them cannot run, or gives what stages cannot send.
    """
    comm, axes = model.comm, model.comm.mesh.sizes.stages
    mine: dict[str, Any] = {}
    told: dict[str, Any] = {}
    refused = ""
    try:
        state = own_state(model.module, values, whole.hollow)
        told = {name: value for name, value in state.items() if name not in whole.untold}
        for name, value in told.items():
            if isinstance(value, Tensor):
                mine[name] = [list(value.shape), str(value.dtype).removeprefix("torch.")]
            else:
                mine[name] = to_text(value)
    except StrangeValue as error:
        refused = (
            f"the model's state dict has a {error} on rank {model.rank}, which stages cannot send to each other: give "
            "numbers, strings, bytes, lists, dicts or tensors as extra state."
        )
    except ModelError as error:
        refused = str(error)
    said = [json.loads(text) for text in comm.job.exchange("the state of a stage", json.dumps([refused, mine]))]
    if problem := next((text for text, _ in said if text), ""):
        raise ModelError(problem)
    row = next(row for row in comm.mesh.sizes.rows(axes) if model.rank in row)
    found: OrderedDict[str, Any] = OrderedDict()
    for place, rank in enumerate(row):
        for name, form in said[rank][1].items():
            if isinstance(form, str):
                found.setdefault(name, told[name] if rank == model.rank else from_text(form))
                continue
            shape, dtype = form
            here = rank == model.rank
            value = told[name] if here else torch.empty(shape, dtype=getattr(torch, dtype))
            sent = value.to(model.device).contiguous()
            comm.broadcast(sent.view(-1), "the state of a stage", place, over=axes, detail=name)
            found.setdefault(name, value if here else sent.cpu())
    for first, names in whole.also.items():
        if first in found:
            found.update(dict.fromkeys(names, found[first]))
    return with_metadata(found, metadata_of(model.module))


def check_state(state: Any, loans: Sequence[Loan]) -> None:
    """
    Raises:
        ModelError: it is no state dict.
        UsageError: values are lent.
    """
    refuse_during(loans, "engine.load_state_dict()")
    if not isinstance(state, Mapping):
        raise ModelError(
            f"engine.load_state_dict(): the state dict is of type {type(state).__name__}: give a dict of tensors by "
            "name."
        )


def values_to_read(model: ShardedModel) -> dict[int, Tensor]:
    """What the model's own code may read of its parameters while it loads a state dict, by ``id``; all ranks call
    it."""
    asked = reads_values(model.module)
    segments = [s for unit in model.units for s in unit.segments if any(id(p) in asked for p in s.parameters)]
    whole = _whole_values(model, segments, "engine.load_state_dict()")
    return {number: value for number, value in whole.items() if number in asked}


def read_state(model: ShardedModel, state: Mapping[str, Any], values: Mapping[int, Tensor], *, strict: bool) -> Read:
    """What the model makes of a state dict; parameters and buffers are not changed yet.

    Raises:
        ModelError: it does not fit.
    """
    whole = model.whole
    read = Read(model.module, state, values, whole.hollow if whole is not None else ())
    elsewhere = whole.names if whole is not None else frozenset[str]()
    unexpected = [name for name in read.unexpected if name not in elsewhere]
    if strict and (read.missing or unexpected):
        raise ModelError(
            f"the state dict does not fit the model: missing {', '.join(read.missing) or 'nothing'}; unexpected "
            f"{', '.join(unexpected) or 'nothing'}; pass strict=False to load what fits."
        )
    return read


def load_state(model: ShardedModel, read: Read) -> None:
    """See :meth:`Engine.load_state_dict`; the state has been looked at."""

    def take() -> None:
        model.let_go()
        for unit in model.units:
            for segment in unit.segments:
                for slot, parameter in enumerate(segment.parameters):
                    if id(parameter) in read.parameters:
                        segment.take(slot, read.parameters[id(parameter)])
            torch.autograd.graph.increment_version([parameter for _, parameter in unit.parameters()])

    with torch.no_grad():
        together(model.comm, "engine.load_state_dict()", take, files=on_disk(model.layout))
        for buffer, value in read.buffers:
            buffer.copy_(value)


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


def extra_states(module: nn.Module, hollow: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Modules with extra state, by its name in a state dict, each once."""
    away = set(hollow)
    return {
        f"{path}.{EXTRA}" if path else EXTRA: part
        for path, part in module.named_modules()
        if path not in away and type(part).get_extra_state is not nn.Module.get_extra_state
    }
