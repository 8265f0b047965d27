"""Follows a model whose structure changed between optimizer steps: parameters unfrozen, added, replaced, removed.

What ``changes`` found is cut anew. Units whose cut stayed the same keep their objects; every other one goes through
three states, one unit at a time:

    old unit    --gather-->    ordinary parameters, whole    --make_units-->    new unit    <--re-cut--    old states

``old states`` are master, the optimizer's and averages: each is gathered, read into this rank's new range and given
back before the next. So what is full at a time is one old unit and the new one. New parameters take rank 0's values,
as in DDP.

    what changed                                         what follows
    a frozen parameter is unfrozen, one is added         states are made; its first step counts as 1
    a trainable parameter is frozen                      nothing: no gradient comes, and its states wait
    a parameter leaves the model                         it is an ordinary tensor again, its states are dropped
    ``parameter.data = x``, same shape                   x is read into every state that mirrors the values
    ``parameter.data = x``, another shape                as one parameter that leaves and one that is added
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from shardfold.comm.agreement import Claim
from shardfold.comm.coalesced import complete
from shardfold.errors import ConfigError, UsageError, by_rank
from shardfold.plan.layout import Axes
from shardfold.sharding.changes import Changes, UnitChange
from shardfold.sharding.compared import SLICES, parts, slices
from shardfold.sharding.freed import unseal
from shardfold.sharding.materialize import buffer_dtypes, make_units, move_buffers
from shardfold.sharding.model import PerElement, ShardedModel, Updater
from shardfold.sharding.partition import Cut
from shardfold.sharding.plain import StrangeValue, from_text, to_text
from shardfold.sharding.room import take_room
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.unit import Life, Unit
from shardfold.sharding.whole_segments import whole_segments
from shardfold.tiers.pages import trim

__all__ = ["apply", "forget"]


def apply(changes: Changes) -> None:
    """Makes the units that :meth:`Changes.needed` found; every rank calls it.

    Raises:
        UsageError: gradients wait for a step; nothing has been changed.
        OrderError: other ranks go on without a change of their models.
        ConfigError: ranks changed their models in different ways, or there is no room on disk for what is new; nothing
            has been changed.
    """
    model, plan = changes.model, changes.plan
    micro = model.run.micro_batch
    assert plan is not None
    if model.loans:
        raise UsageError(
            f"the model's structure changed inside `with {model.loans[-1].what}:`, whose values are gathered: change "
            "it outside."
        )
    if micro:
        changed = [c.name for c in plan.cuts if c.name not in plan.kept] or ["a part of it"]
        raise UsageError(
            f"the model's structure changed (in {changed[0]!r}) while gradients of {micro} "
            f"micro-batch{'es' if micro > 1 else ''} wait for engine.step(): change it after the step, or call "
            "engine.zero_grad() first."
        )
    model.gate.meet("a change of the model")
    what = f"change {model.followed + 1} of the model's structure"
    homes = Homes(model, plan)
    buffers = [(tuple(b.shape), b.dtype) for module in plan.new_modules.values() for b in module.buffers(recurse=False)]
    specs = [c.spec for c in plan.cuts]
    alike = Claim([*parts(specs), *map(str, homes.described(plan)), *map(str, buffers)])
    model.comm.agreement.same({SLICES: slices(specs, model.comm.mesh.sizes), what: alike})
    new = [c.spec for c in plan.cuts if c.name not in plan.kept]
    moments = model.updater.num_moments() if model.updater is not None else 0
    take_room(model, new, moments, [unit.spec for unit in homes.gone])
    dtypes = buffer_dtypes(model.rules, model.module)
    move_buffers(plan.new_modules, model.comm, dtypes)
    with torch.no_grad(), model.comm.agreement.told("a change of the model"):  # a disk may fail
        units = _make(changes, plan, homes)
    model.follow(units)
    model.gate.take(units)
    if model.updater is not None:
        model.updater.point_groups(units)
    changes.renew(plan.group_of)
    trim()


class Homes:
    """Where the values of parameters are before a change: the units that go, and each parameter's place in them.

    Attributes:
        gone: the units that go.
        owner: the unit of each of their parameters, by ``id``.
        place: ``(unit, segment, slot)`` of those that have values there, by ``id``.
    """

    def __init__(self, model: ShardedModel, plan: UnitChange) -> None:
        self.gone = [unit for unit in model.units if plan.kept.get(unit.name) is not unit]
        self.owner: dict[int, Unit] = {}
        self.place: dict[int, tuple[Unit, Segment, int]] = {}
        for unit in self.gone:
            for segment in unit.segments:
                for i, (slot, p) in enumerate(zip(segment.spec.slots, segment.parameters, strict=True)):
                    self.owner[id(p)] = unit
                    if tuple(p.shape) == slot.shape:
                        self.place[id(p)] = (unit, segment, i)

    def sources(self, c: Cut) -> list[Unit]:
        """The old units that the parameters of a new one come from."""
        found = {id(unit): unit for p in c.parameters.values() if (unit := self.owner.get(id(p))) is not None}
        return list(found.values())

    def described(self, plan: UnitChange) -> list[tuple[str, str | None, bool]]:
        """Of every parameter of the units to be made: where its values come from. Ranks have to say the same."""
        said: list[tuple[str, str | None, bool]] = []
        for c in plan.cuts:
            if c.name not in plan.kept:
                for name, p in c.parameters.items():
                    _, segment, slot = self.place.get(id(p), (None, None, 0))
                    said.append((name, segment.spec.slots[slot].name if segment is not None else None, p.is_meta))
        return said


def _make(changes: Changes, plan: UnitChange, homes: Homes) -> list[Unit]:
    """The units of a plan, in order."""
    model = changes.model
    update = model.updater
    for unit in homes.gone:
        unit.shown.forget()
        if unit.split and unit.life is Life.GATHERED:
            unit.release()
    staying = {id(p) for c in plan.cuts for p in c.parameters.values()}
    sources = {c.name: homes.sources(c) for c in plan.cuts if c.name not in plan.kept}
    waiting = Counter(id(old) for olds in sources.values() for old in olds)
    dissolved: set[int] = set()
    units: list[Unit] = []
    for c in plan.cuts:
        if c.name in plan.kept:
            plan.kept[c.name].use(c.modules)
            units.append(plan.kept[c.name])
            continue
        for old in sources[c.name]:
            if id(old) not in dissolved:
                dissolved.add(id(old))
                _dissolve(model, old, homes, staying)
        for parameter in c.parameters.values():  # what autograd left there while nobody trained it: not of this step
            parameter.grad = None
        unit = make_units(model.module, [c], model.layout, model.comm, model.tiers, None, changes.seed)[0]
        if unit.split and unit.life is Life.GATHERED:
            unit.release()
        _carry_codes(model, unit, homes)
        if update is not None:
            update.add(unit)
            for average in model.run.averages:
                average.add(unit)
            _carry_states(model, update, unit, homes)
        units.append(unit)
        for old in sources[c.name]:
            waiting[id(old)] -= 1
            if not waiting[id(old)]:
                forget(model, old)
    for old in homes.gone:
        if id(old) not in dissolved:  # all of it leaves the model
            _dissolve(model, old, homes, staying)
            forget(model, old)
    return units


def _carry_codes(model: ShardedModel, unit: Unit, homes: Homes) -> None:
    """What rests as codes keeps them: made of the values that they stand for they could be others in their last
    digit."""
    whole: dict[int, Tensor] = {}
    for new in unit.segments:
        for slot, p in zip(new.spec.slots, new.parameters, strict=True):
            _, old, number = homes.place.get(id(p), (None, None, 0))
            form = new.form
            if old is None or form is None or old.form is not form:
                continue
            if id(old) not in whole:
                codes = whole[id(old)] = torch.zeros(
                    form.nbytes(old.spec.length), dtype=torch.uint8, device=model.device
                )
                start, stop = (form.nbytes(end) for end in old.rest_range)
                codes[start:stop] = old.regions["params"].values()
                complete(model.comm, [codes], old.table.rest.over, "a change of the model")
            length = -(-slot.numel // form.block) * form.block
            was = old.spec.slots[number].offset
            for state, _, (low, high) in new.copies():
                a, b = max(slot.offset, low), min(slot.offset + length, high)
                if a < b:
                    first, last = (form.nbytes(was + end - slot.offset) for end in (a, b))
                    new.regions[state].write(form.nbytes(a - low), whole[id(old)][first:last])


def _dissolve(model: ShardedModel, unit: Unit, homes: Homes, staying: set[int]) -> None:
    """Makes ordinary parameters, with all their values, of those of an old unit."""
    for segment in unit.segments:
        if not any(id(p) in homes.place for p in segment.parameters):
            for p in segment.parameters:  # all were given values of another shape, which they hold themselves
                unseal(p)
            continue
        flat = segment.flat
        if segment.split:
            source = segment.shard("params") or segment.shard("master")
            assert source is not None
            flat = _whole(model, segment, source.read().to(segment.dtype), segment.table.rest.over)
        for p, view in zip(segment.parameters, segment.views_of(flat), strict=True):
            unseal(p)
            if id(p) in homes.place:
                # What leaves gets memory of its own, or the user's reference to it would keep all of the flat.
                p.data = view if id(p) in staying else view.clone()


def forget(model: ShardedModel, unit: Unit) -> None:
    """Gives back everything an old unit holds; references to it may live on in graphs of earlier forwards."""
    if model.updater is not None:
        model.updater.drop(unit)
    for average in model.run.averages:
        average.drop(unit)
    unit.give_up()
    trim()  # states were allocated once and for good, so malloc would keep their memory for requests of their size


def _carry_states(model: ShardedModel, update: Updater, unit: Unit, homes: Homes) -> None:
    """Cuts master and the optimizer's state of parameters that had them anew, for the unit they are in now."""
    moves: dict[int, list[tuple[int, Segment, int]]] = {}  # by old segment: old slot, new segment, new slot
    olds: dict[int, Segment] = {}
    for segment in unit.trainable:
        for i, p in enumerate(segment.parameters):
            _, old, slot = homes.place.get(id(p), (None, None, 0))
            if old is not None and old.spec.trainable:
                olds[id(old)] = old
                moves.setdefault(id(old), []).append((slot, segment, i))
    for key, old in olds.items():
        for slot, new, i in moves[key]:
            if old.format_state is not None and new.format_state is not None:  # of each rank's own, all of it
                was, now = old.spec.slots[slot], new.spec.slots[i]
                values = old.format_state[was.offset : was.offset + was.numel]
                new.format_state[now.offset : now.offset + now.numel] = values

        def carry(
            shard: Tensor, take: Callable[[Segment, int, Tensor], None], slots: Collection[int], old: Segment = old
        ) -> None:
            values = _whole(model, old, shard, old.table.master.over)
            for slot, new, i in moves[id(old)]:
                if slot in slots:
                    place = old.spec.slots[slot]
                    take(new, i, values[place.offset : place.offset + place.numel])

        master, every = old.shard("master"), range(len(old.spec.slots))
        assert master is not None
        if master.dtype != old.dtype:  # else the values that the unit was made of are the master's
            carry(master.read(), lambda new, i, values: _write_part(new, new.shard("master"), i, values), every)
        for average in model.run.averages:
            carry(
                average.shard(old), lambda new, i, values, of=average: _write_part(new, of.shard(new), i, values), every
            )
        states = _agree_on_states(model, update, old)
        kinds = {(n, v.dtype) for state in states.values() for n, v in state.items() if isinstance(v, PerElement)}
        for name, dtype in sorted(kinds, key=str):
            have = [slot for slot, state in states.items() if state.get(name) == PerElement(dtype)]
            shard = update.state_shard(old, name, dtype)
            carry(shard, lambda new, i, values, name=name: update.take_state(new, i, name, values), have)
        for slot, new, i in moves[key]:
            for name, value in states.get(slot, {}).items():
                if not isinstance(value, PerElement):
                    update.take_value(new, i, name, value)


def _whole(model: ShardedModel, segment: Segment, shard: Tensor, over: Axes) -> Tensor:
    """All of one state of a segment, ``(length,)``."""
    ((_, flat),) = whole_segments(model.comm, [(segment, shard, over)], "a change of the model")
    return flat


def _write_part(segment: Segment, shard: Tensor | Shard | None, slot: int, values: Tensor) -> None:
    """Writes this rank's part of a parameter's ``values`` ``(numel,)`` into a shard of the master range."""
    assert shard is not None
    piece, part = segment.own_piece(slot)
    if isinstance(shard, Shard):
        shard.part(piece).write(values[part])
    else:
        shard[piece].copy_(values[part])


def _agree_on_states(model: ShardedModel, update: Updater, segment: Segment) -> dict[int, dict[str, Any]]:
    """What the optimizer keeps for each slot, as the rank says that has the largest piece of it.

    Raises:
        ConfigError: on all ranks: an optimizer of the user's keeps what is none of numbers, strings, tensors, and lists
            and dicts of these.
    """
    said: list[dict[int, tuple[int, dict[str, Any]]]] = [update.describe(segment)]
    if model.world_size > 1 and not update.fused:  # the fused update's is the same everywhere
        said = _exchanged(model, said[0])
    best: dict[int, tuple[int, dict[str, Any]]] = {}
    for slots in said:
        for slot, (numel, state) in slots.items():
            if slot not in best or numel > best[slot][0]:
                best[slot] = (numel, state)
    return {slot: state for slot, (_, state) in best.items()}


def _exchanged(model: ShardedModel, mine: Any) -> list[Any]:
    """What every rank says of what its optimizer keeps, as ``Updater.describe`` gives it."""
    plain = {
        slot: (numel, {n: (True, v.dtype) if isinstance(v, PerElement) else (False, v) for n, v in state.items()})
        for slot, (numel, state) in mine.items()
    }
    try:
        words = {"said": to_text(plain)}
    except StrangeValue as strange:
        words = {"problem": f"it keeps a {strange} beside its tensors"}
    said = [json.loads(text) for text in model.comm.agreement.exchange("what the optimizer keeps", json.dumps(words))]
    if any("problem" in each for each in said):
        problems = [each.get("problem", "") for each in said]
        told = by_rank(dict(zip(model.comm.agreement.peers.ranks, problems, strict=True)))
        raise ConfigError(
            f"the state of {type(model.optimizer).__name__} cannot follow a change of the model ({told}): let it keep "
            "numbers, strings, tensors, and lists or dicts of these."
        )
    return [
        {
            slot: (numel, {n: PerElement(value) if each else value for n, (each, value) in state.items()})
            for slot, (numel, state) in from_text(words["said"]).items()
        }
        for words in said
    ]
