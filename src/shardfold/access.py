"""Whole models out of shards and back: ``state_dict``, ``load_state_dict``; and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardfold.bundle import named_state, whole_segments
from shardfold.cost import section_traffic, state_bytes
from shardfold.errors import ConfigError, ModelError
from shardfold.explain import explain
from shardfold.layout import PRECISIONS, Axes
from shardfold.loans import refuse_during
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.presets import PRESETS
from shardfold.report import MemoryReport, MemoryRow, TrafficReport
from shardfold.stats import Clock, Stats
from shardfold.torch_internals import storage_key
from shardfold.unit import Segment

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["described", "explained", "load_state", "memory_report", "state_dict", "stats", "traffic_report"]


# -- state dicts ------------------------------------------------------------------------------------------------


def state_dict(engine: Engine, frozen: str) -> dict[str, Tensor]:
    """See :meth:`Engine.state_dict`; 16 MiB, or one segment, are whole at a time.

    Raises:
        ConfigError: ``frozen`` is neither ``"keep"`` nor ``"skip"``.
    """
    if frozen not in ("keep", "skip"):
        raise ConfigError(f"engine.state_dict(frozen={frozen!r}): frozen parameters are kept ('keep') or not ('skip').")
    whole: dict[int, Tensor] = {}
    segments = [s for unit in engine.units for s in unit.segments if frozen == "keep" or s.spec.trainable]
    shards = [_most_precise(engine, segment) for segment in segments]
    for segment, flat in whole_segments(engine.actions, shards, "engine.state_dict()"):
        values = flat.cpu()
        for parameter, view in zip(segment.parameters, segment.views_of(values), strict=True):
            whole[id(parameter)] = view.clone()
    return named_state(engine.module, whole)


def _most_precise(engine: Engine, segment: Segment) -> tuple[Segment, Tensor, Axes]:
    """This rank's shard of a segment's most precise copy, and the axes it is split over."""
    if segment.master is not None:
        return segment, segment.master, engine.layout.master.over
    assert segment.rest is not None
    return segment, segment.rest, engine.layout.rest.over


def load_state(engine: Engine, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """See :meth:`Engine.load_state_dict`; nothing is changed if anything does not fit.

    Raises:
        ModelError: it does not.
    """
    refuse_during(engine.loans, "engine.load_state_dict()")
    if not isinstance(state, Mapping):
        raise ModelError(
            f"engine.load_state_dict(): the state dict is of type {type(state).__name__}: give a dict of tensors by "
            "name."
        )
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    buffers = {
        (f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in engine.module.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    known: dict[str, Tensor] = {**parameters, **buffers}
    missing, unexpected = sorted(set(known) - set(state)), sorted(map(str, set(state) - set(known)))
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
    with torch.no_grad():
        by_id = {id(parameters[name]): state[name] for name in state.keys() & parameters.keys()}
        for unit in engine.units:
            for segment in unit.segments:
                for slot, parameter in enumerate(segment.parameters):
                    if id(parameter) in by_id:
                        segment.take(slot, by_id[id(parameter)])
            torch.autograd.graph.increment_version([parameter for _, parameter in unit.parameters()])
        for name in state.keys() & buffers.keys():
            buffers[name].copy_(state[name])


# -- memory -----------------------------------------------------------------------------------------------------


def memory_report(engine: Engine, update: ShardedOptimizer | None) -> MemoryReport:
    """See :meth:`Engine.memory`."""
    specs = [unit.spec for unit in engine.units]
    moments, kept = (update.num_moments(), update.kept_bytes()) if update is not None else (0, None)
    exact = state_bytes(engine.layout, specs, engine.mesh.sizes, num_moments=moments, kept=kept)
    padded = state_bytes(engine.layout, specs, engine.mesh.sizes, num_moments=moments, padded=True, kept=kept)
    tensors: dict[str, list[Tensor]] = {name: [] for name in ("params", "held", "grads", "master", "moments")}
    transient: list[Tensor] = []
    for unit in engine.units:
        for segment in unit.segments:
            for name, tensor in (("held", segment.held), ("grads", segment.gradient_flat)):
                if tensor is not None:
                    tensors[name].append(tensor)
            if segment.rest is not None:
                tensors["params"].append(segment.rest)
            if segment.master is not None:
                tensors["master"].append(segment.master)
            if segment.split:
                transient.append(segment.flat)
        if unit.incoming is not None:
            transient.extend(unit.incoming.flats)
        transient.extend(grad for _, _, grad in unit.waiting)
    if update is not None:
        tensors["moments"] += update.state_tensors()
    seen: set[int] = set()
    rows = []
    for name, cell in {n: getattr(engine.layout, n) for n in tensors}.items():
        held = _live_bytes(tensors[name], seen)
        if held or padded.get(name):
            tier = str(cell.tier) if cell is not None else "device"
            table = exact.get(name, 0.0)
            rows.append(MemoryRow(name, tier, table, padded.get(name, 0.0) - table, held))
    rows += [row() for row in engine.more_memory]
    return MemoryReport(tuple(rows), _live_bytes(transient, seen), engine._replaced.held())


def traffic_report(engine: Engine, update: ShardedOptimizer | None) -> TrafficReport:
    """See :meth:`Engine.traffic`."""
    specs, ran = [unit.spec for unit in engine.units], engine.actions.meter.last_sections
    predicted = section_traffic(engine.program, engine.layout, specs, engine.mesh.sizes, ran)
    if ran["step"] and update is not None:
        predicted |= update.traffic()
    return engine.actions.meter.report(predicted)


def explained(engine: Engine, update: ShardedOptimizer | None) -> str:
    """See :meth:`Engine.explain`."""
    specs = [unit.spec for unit in engine.units]
    moments, kept = (update.num_moments(), update.kept_bytes()) if update is not None else (0, None)
    held = state_bytes(engine.layout, specs, engine.mesh.sizes, num_moments=moments, padded=True, kept=kept)
    return explain(
        engine.table, engine.layout, engine.program, specs, engine.mesh.sizes, held, engine.accumulate,
        update.traffic() if update is not None else None,
        parts=engine.rules.described(), activations=engine._replaced.explained(),
    )  # fmt: skip


def described(engine: Engine) -> str:
    """What ``print(engine)`` shows, in one line: layout, ranks, precision, units and parameters."""
    state = f", closed at step {engine.steps}" if engine.closed else f", step {engine.steps}"
    segments = [segment for unit in engine.units for segment in unit.segments]
    numel = sum(segment.spec.numel for segment in segments)
    trained = sum(segment.spec.numel for segment in segments if segment.spec.trainable)
    layout = next((n for n, preset in PRESETS.items() if preset.cells() == engine.table.cells()), "a Layout of its own")
    precision = next((n for n, named in PRECISIONS.items() if named == engine.precision), "a Precision of its own")
    ranks, units = engine.world_size, len(engine.units)
    return (
        f"Engine({type(engine.module).__name__}, {layout}, {ranks} rank{'s' * (ranks > 1)} on "
        f"{engine.device.type}, {precision}, {units} unit{'s' * (units != 1)}, {numel:,} parameters"
        f"{'' if trained == numel else f' ({trained:,} trained)'}{state})"
    )


def stats(engine: Engine, clock: Clock, peak_flops: float | None) -> Stats:
    """See :meth:`Engine.stats`."""
    trainable = frozen = 0
    for unit in engine.units:
        for segment in unit.segments:
            if segment.spec.trainable:
                trainable += segment.spec.numel
            else:
                frozen += segment.spec.numel
    mfu, formula = clock.mfu(trainable, frozen, peak_flops)
    memory = engine.memory()
    cuda = engine.device.type == "cuda"
    return Stats(
        steps=engine.steps,
        skipped=clock.skipped,
        step_seconds=clock.step_seconds,
        tokens_per_second=clock.tokens_per_second,
        samples_per_second=clock.samples_per_second,
        mfu=mfu,
        mfu_formula=formula,
        exposed_seconds=None if engine.mesh.backend == "nccl" else clock.exposed_seconds,
        traffic=engine.traffic(),
        memory=memory,
        transient_peak=torch.cuda.max_memory_allocated(engine.device) - memory.held if cuda else None,
    )


def _live_bytes(tensors: list[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind ``tensors`` that were not counted yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() and storage_key(storage) not in seen:
            seen.add(storage_key(storage))
            total += storage.size()
    return total
