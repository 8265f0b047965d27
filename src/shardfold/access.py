"""Whole values out of shards and back: ``gathered``, ``state_dict``, ``load_state_dict``; and what is held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.cost import state_bytes
from shardfold.errors import ModelError, did_you_mean
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.program import Op
from shardfold.report import MemoryReport, MemoryRow
from shardfold.unit import Life, Segment, Unit
from shardfold.wires.plain import Pending

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["gathered_units", "load_state", "memory_report", "state_dict"]


@contextmanager
def gathered_units(engine: Engine, names: tuple[str, ...], *, write: bool) -> Iterator[Any]:
    """See :meth:`Engine.gathered`."""
    units, values = _find(engine, names)
    if engine.hold_in_pass(units):
        yield values[names[0]] if len(names) == 1 else values
        return
    engine._meet(f"gathered({', '.join(names)})" + " for writing" * write)
    for unit in units:
        _pin(engine, unit)
    try:
        yield values[names[0]] if len(names) == 1 else values
    finally:
        for unit in units:
            if write:
                _write_back(engine, unit)
            unit.pins -= 1
            if not unit.pins and unit.pinned_here:
                unit.pinned_here = False
                unit.release()


def _find(engine: Engine, names: tuple[str, ...]) -> tuple[list[Unit], dict[str, nn.Parameter]]:
    """The units of the named parameters and their parameters by name; every name of a tied parameter is known."""
    known = dict(engine.module.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in known:
            raise ModelError(f"gathered: the model has no parameter {name!r}.{did_you_mean(name, known)}")
    values = {name: known[name] for name in names} if names else known
    wanted = {id(parameter) for parameter in values.values()}
    units = [unit for unit in engine.units if any(id(p) in wanted for _, p in unit.parameters())]
    return units, values


def _pin(engine: Engine, unit: Unit) -> None:
    """Makes the unit full until it is unpinned; programs neither gather nor free it meanwhile."""
    if unit.life is Life.GATHERING:
        unit.end_gather(engine.agreement.wait)
    if unit.life is Life.RESTING:
        unit.begin_gather()
        op = Op("ALL_GATHER", unit.name, engine.layout.rest.over)
        with torch.no_grad():
            for segment in unit.segments:
                segment.fill_own_range()
                engine.agreement.issue(f"{op} for gathered()")
                unit.filling.append(engine.actions.wire.all_gather(segment.flat, engine.mesh.group(op.axes)))
                engine.actions.meter.count(op, segment.flat, asked=True)
        unit.end_gather(engine.agreement.wait)
        unit.pinned_here = True
    unit.pins += 1


def _write_back(engine: Engine, unit: Unit) -> None:
    with torch.no_grad():
        for segment in unit.segments:
            if engine.world_size > 1:
                engine.agreement.issue(f"the values of {unit.name!r} written in gathered()")
                engine.agreement.wait(
                    dist.broadcast(segment.flat, group_src=0, group=engine.mesh.everyone, async_op=True)
                )
            segment.write_back()
    torch.autograd.graph.increment_version([parameter for _, parameter in unit.parameters()])


# -- state dicts ------------------------------------------------------------------------------------------------


def state_dict(engine: Engine) -> dict[str, Tensor]:
    """See :meth:`Engine.state_dict`; one unit is whole at a time."""
    whole: dict[int, Tensor] = {}
    for unit in engine.units:
        for segment in unit.segments:
            flat = _whole_master(engine, unit, segment).cpu()
            for parameter, view in zip(segment.parameters, segment.views_of(flat), strict=True):
                whole[id(parameter)] = view.clone()
    state: dict[str, Tensor] = {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                state[dot + name] = whole[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                state[dot + name] = buffer.detach().cpu().clone()
    return state


def _whole_master(engine: Engine, unit: Unit, segment: Segment) -> Tensor:
    """All values of a segment in its most precise copy, on this rank's device; ``(length,)``."""
    source, (start, stop) = segment.master, segment.master_range
    over = engine.layout.master.over
    if source is None:
        assert segment.rest is not None
        source, (start, stop), over = segment.rest, segment.rest_range, engine.layout.rest.over
    if source.numel() == segment.spec.length:
        return source.detach()
    whole = torch.empty(segment.spec.length, dtype=source.dtype, device=source.device)
    whole[start:stop].copy_(source)
    op = Op("ALL_GATHER", unit.name, over)
    engine.agreement.issue(f"{op} for state_dict()")
    pending: Pending = engine.actions.wire.all_gather(whole, engine.mesh.group(over))
    engine.actions.meter.count(op, whole, asked=True)
    pending.wait(engine.agreement.wait)
    return whole


def load_state(engine: Engine, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """See :meth:`Engine.load_state_dict`; nothing is changed if anything does not fit."""
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    buffers = {
        (f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in engine.module.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    known: dict[str, Tensor] = {**parameters, **buffers}
    missing, unexpected = sorted(set(known) - set(state)), sorted(set(state) - set(known))
    if strict and (missing or unexpected):
        raise ModelError(
            f"the state dict does not fit the model: missing {', '.join(missing) or 'nothing'}; unexpected "
            f"{', '.join(unexpected) or 'nothing'}; pass strict=False to load what fits."
        )
    for name in state.keys() & known.keys():
        if state[name].shape != known[name].shape:
            raise ModelError(
                f"the state dict gives {name!r} the shape {tuple(state[name].shape)}, "
                f"but the model's is {tuple(known[name].shape)}."
            )
    with torch.no_grad():
        by_id = {id(parameters[name]): state[name] for name in state.keys() & parameters.keys()}
        for unit in engine.units:
            for segment in unit.segments:
                _load_segment(segment, by_id)
            torch.autograd.graph.increment_version([parameter for _, parameter in unit.parameters()])
        for name in state.keys() & buffers.keys():
            buffers[name].copy_(state[name])


def _load_segment(segment: Segment, values: Mapping[int, Tensor]) -> None:
    """Writes this rank's pieces of the given values into every state that mirrors them; nothing is sent."""
    targets = [(segment.rest, segment.rest_range), (segment.held, segment.held_range)]
    if not segment.master_is_rest:
        targets.append((segment.master, segment.master_range))
    for target, bounds in targets:
        if target is None or bounds is None:
            continue
        for slot, start, stop in segment.spec.pieces(*bounds):
            value = values.get(id(segment.parameters[slot]))
            if value is not None:
                offset = segment.spec.slots[slot].offset
                target[start - bounds[0] : stop - bounds[0]].copy_(value.reshape(-1)[start - offset : stop - offset])


# -- memory -----------------------------------------------------------------------------------------------------


def memory_report(engine: Engine, update: ShardedOptimizer | None) -> MemoryReport:
    """See :meth:`Engine.memory`."""
    specs = [unit.spec for unit in engine.units]
    moments = update.num_moments() if update is not None else 0
    exact = state_bytes(engine.layout, specs, engine.mesh.sizes, num_moments=moments)
    padded = state_bytes(engine.layout, specs, engine.mesh.sizes, num_moments=moments, padded=True)
    tensors: dict[str, list[Tensor]] = {name: [] for name in ("params", "held", "grads", "master", "moments")}
    transient: list[Tensor] = []
    for unit in engine.units:
        for segment in unit.segments:
            for name, tensor in (("held", segment.held), ("grads", segment.grads)):
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
    return MemoryReport(tuple(rows), _live_bytes(transient, seen))


def _live_bytes(tensors: list[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind ``tensors`` that were not counted yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() and storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.size()
    return total
