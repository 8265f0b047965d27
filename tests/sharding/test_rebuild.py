"""A model whose structure changes between steps trains as in plain PyTorch, under every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support import models
from tests.support.changing import (
    CHANGES,
    OPTIMIZERS,
    Growing,
    Pair,
    Wrapped,
    add_low_rank,
    attach,
    half_frozen,
    layouts,
    mesh_for,
    pairs,
    train,
    unfreeze,
    world_for,
)
from tests.support.models import WIDTH

pytestmark = pytest.mark.product

CARRIED = [("fp32", "zero3"), ("bf16", "zero1"), ("bf16", "zero3"), ("bf16-pure", "hpz")]  # the others are long tests


def _changed(layout: str, optimizer: str, what: str) -> None:
    build, changes = CHANGES[what]
    pair = Pair(layout, build, optimizer)
    pair.train(3)
    for change in changes:
        pair.change(change)
        pair.train(3)
    pair.check(1e-5)
    rows = pair.engine.traffic().rows
    assert all(row.sent == row.program for row in rows), rows
    pair.engine.close()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("what", "layout"), pairs(CHANGES, lambda what, layout: layout == "zero3" or what == "one after the other")
)
def test_a_changed_model_trains_on_as_in_plain_pytorch(ranks: Ranks, what: str, layout: str) -> None:
    ranks.run(_changed, layout, "AdamW", what, world_size=world_for(layout))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("optimizer", "layout"), pairs(["SGD", "RMSprop", "Adagrad"], lambda _, layout: layout == "zero3")
)
def test_every_optimizer_keeps_its_state_through_changes(ranks: Ranks, optimizer: str, layout: str) -> None:
    for what in ("unfrozen", "one after the other"):
        ranks.run(_changed, layout, optimizer, what, world_size=world_for(layout))


# -- what is carried over -------------------------------------------------------------------------------------------


def _every_state(engine: sf.Engine) -> dict[tuple[str, str], Any]:
    """Master, and what the optimizer keeps, by names of parameter and state."""
    from shardfold.sharding.model import PerElement
    from shardfold.sharding.rebuild import _agree_on_states, _whole

    update = engine._updater
    assert update is not None
    found: dict[tuple[str, str], Any] = {(name, "master"): value for name, value in engine.state_dict().items()}
    for unit in engine.units:
        for segment in unit.trainable:
            states = _agree_on_states(engine.sharded, update, segment)
            for slot, place in enumerate(segment.spec.slots):
                for name, value in states[slot].items():
                    if isinstance(value, PerElement):
                        shard = update.state_shard(segment, name, value.dtype)
                        flat = _whole(engine.sharded, segment, shard, engine.layout.master.over)
                        value = flat[place.offset : place.offset + place.numel].clone()
                    found[place.name, name] = value
    return found


def _carried(layout: str, optimizer: str, precision: str) -> None:
    """A change that makes every unit anew and that forward does not see."""
    torch.manual_seed(0)
    engine = sf.Engine(
        Growing(), optimizer=OPTIMIZERS[optimizer], layout=layout, precision=precision, parallel=mesh_for(layout)
    )
    for steps in (3, 1):  # the second time some have counted more steps than others
        train(engine, steps)
        before, units = _every_state(engine), engine.units
        for module in [engine.module, engine.module.embedding, engine.module.head, *engine.module.blocks]:  # type: ignore
            module.register_parameter(f"unseen{steps}", nn.Parameter(torch.ones(700)))
            module.register_parameter(f"frozen{steps}", nn.Parameter(torch.ones(3), requires_grad=False))
        after = _every_state(engine)
        assert not {id(unit) for unit in units} & {id(unit) for unit in engine.units}
        assert len(before) > 2 * len(units) and before.keys() < after.keys()
        for key, value in before.items():
            same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
            assert same and getattr(value, "dtype", None) == getattr(after[key], "dtype", None), key
    engine.close()


@pytest.mark.soak
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "layout"),
    pairs(["fp32", "bf16", "bf16-pure"], lambda precision, layout: (precision, layout) in CARRIED),
)
def test_master_moments_and_step_counts_are_carried_bit_for_bit(ranks: Ranks, precision: str, layout: str) -> None:
    for optimizer in OPTIMIZERS:
        ranks.run(_carried, layout, optimizer, precision, world_size=world_for(layout))


def _kept_units(layout: str) -> tuple[set[str], set[str]]:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout=layout, parallel=mesh_for(layout))
    train(engine, 1)
    before = {unit.name: unit for unit in engine.units}
    engine.module.blocks[1].up = Wrapped(engine.module.blocks[1].up)  # type: ignore
    train(engine, 1)
    same = {unit.name for unit in engine.units if before.get(unit.name) is unit}
    again = engine.units
    engine.module.blocks[1].note = "no structure"  # type: ignore
    train(engine, 1)
    assert engine.units is again
    engine.close()
    return same, set(before)


@pytest.mark.parametrize("layout", layouts("ddp", "zero3"))
def test_units_that_did_not_change_keep_their_objects(ranks: Ranks, layout: str) -> None:
    for same, every in ranks.run(_kept_units, layout, world_size=world_for(layout)):
        assert same == every - {"blocks.1"}


def _full_at_a_time(layout: str) -> tuple[int, int]:
    """Bytes that are alive at most while all of eight blocks are wrapped, above what is there before and after."""
    from shardfold.sharding import rebuild

    model = Growing()
    for _ in range(5):
        model.blocks.append(models.Block())
    engine = sf.Engine(model, optimizer=OPTIMIZERS["AdamW"], layout=layout)
    train(engine, 1)
    block = sum(p.numel() for p in model.blocks[0].parameters()) * 4
    rest = engine.memory().held
    add_low_rank(model)
    largest = 0

    def look(*args: Any, make: Any = rebuild._carry_states) -> None:
        nonlocal largest
        make(*args)
        flats = {p.untyped_storage()._cdata: p.untyped_storage().size() for p in _whole_parameters(model)}
        largest = max(largest, sum(flats.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild, "_carry_states", look)
        engine.sharded.gate.follow()
    assert rest > 0
    engine.close()
    return largest, block


def _whole_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that were made ordinary, and are not yet part of a new unit."""
    from shardfold.sharding.freed import FreedParameter

    names = {id(p): name for name, p in model.named_parameters()}
    return [p for p in model.parameters() if not isinstance(p, FreedParameter) and "base" in names[id(p)]]


@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_one_unit_is_whole_at_a_time(ranks: Ranks, layout: str) -> None:
    for largest, block in ranks.run(_full_at_a_time, layout, world_size=2):
        assert largest <= 1.1 * block


# -- who trains what ------------------------------------------------------------------------------------------------


def _own_groups(layout: str, kind: str) -> None:
    """An optimizer of the user's that lists a frozen parameter from the start, and gets a group later."""

    def build() -> tuple[Growing, torch.optim.Optimizer, LambdaLR]:
        torch.manual_seed(0)
        model = half_frozen()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        make = OPTIMIZERS[kind]
        optimizer = make([{"params": matrices, "lr": 5e-3}, {"params": others, "weight_decay": 0.0}])
        return model, optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    pair = Pair.__new__(Pair)
    pair.seed = 0
    pair.plain, pair.optimizer, plain_schedule = build()
    model, optimizer, schedule = build()
    pair.engine = sf.Engine(model, optimizer=optimizer, layout=layout, parallel=mesh_for(layout))
    pair.adopt = lambda: None  # type: ignore[method-assign]  # nothing joins by itself
    groups = list(optimizer.param_groups)

    def train() -> None:
        pair.train(2)
        if len(optimizer.param_groups) == 2:  # a LambdaLR does not follow a group that is added
            for each in (schedule, plain_schedule):
                each.step()

    optimizer._opt_called = True  # type: ignore[attr-defined]  # the engine steps it
    train()
    pair.change(unfreeze)  # listed all along
    train()
    pair.change(attach)  # not listed: as in PyTorch it is not trained
    train()
    for own, whole in ((optimizer, pair.engine.module), (pair.optimizer, pair.plain)):
        own.add_param_group({"params": [*whole.adapter.parameters(), whole.shift], "lr": 2e-2})  # type: ignore
        for p in [*whole.adapter.parameters(), whole.shift]:  # type: ignore
            p.grad = None  # what was gathered while nobody trained them
        own.param_groups[0]["lr"] = 1e-3
    train()
    assert [id(group) for group in optimizer.param_groups[:2]] == [id(group) for group in groups]
    assert len(optimizer.param_groups) == 3 and pair.engine.optimizer is optimizer
    pair.check(1e-5)
    pair.engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "layout"), pairs(["AdamW", "RMSprop"], lambda kind, layout: layout == "zero3"))
def test_a_parameter_trains_in_the_group_that_lists_it(ranks: Ranks, layout: str, kind: str) -> None:
    ranks.run(_own_groups, layout, kind, world_size=world_for(layout))


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:3]}, {"params": every[3:], "lr": 1e-2}])


def test_with_several_groups_a_new_parameter_has_to_be_given_to_one() -> None:
    engine = sf.Engine(Growing(), optimizer=two_groups)
    batch = models.batches(1)[0]
    engine.module.adapter = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ConfigError, match=r"'adapter.weight' is trainable but in none of the optimizer's 2 groups"):
        engine(*batch)
    assert engine.optimizer is not None
    engine.optimizer.add_param_group({"params": list(engine.module.adapter.parameters())})
    before = engine.state_dict()["adapter.weight"]
    train(engine, 1)
    assert not torch.equal(before, engine.state_dict()["adapter.weight"])
    engine.module.head = nn.Linear(WIDTH, models.VOCAB)  # stands where a parameter of a group stood
    before = engine.state_dict()["head.weight"]
    train(engine, 1)
    assert not torch.equal(before, engine.state_dict()["head.weight"])
    engine.close()


def test_a_group_that_can_not_be_taken_in_is_named() -> None:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"])
    assert engine.optimizer is not None
    batch = models.batches(1)[0]
    for group, said in (
        ({"params": [nn.Parameter(torch.zeros(2, 3))]}, r"group 1 of the optimizer holds a tensor of shape \(2, 3\)"),
        ({"params": [], "amsgrad": True}, "options"),
    ):
        engine.optimizer.add_param_group(group)
        with pytest.raises(ConfigError, match=said):
            engine(*batch)
            engine.module.extra = nn.Parameter(torch.zeros(1))
            engine(*batch)
        engine.optimizer.param_groups.pop()
    engine.close()


@pytest.mark.parametrize("form", [list, iter, lambda ps: ps[0], lambda ps: [("name", p) for p in ps]])
def test_a_parameter_that_a_group_has_is_told_when_it_is_added(form: Callable[[Any], Any]) -> None:
    """At the call, and nothing is added; also of a frozen one. An engine that is closed looks at nothing more."""
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"])
    optimizer, weight = engine.optimizer, engine.module.get_parameter("norm.weight")
    assert optimizer is not None
    with pytest.raises(
        ConfigError, match=r"add_param_group\(\) lists 'norm.weight', which is in group 0 of the optimizer"
    ):
        optimizer.add_param_group({"params": form([weight])})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [weight]})  # past it: at the next forward
    with pytest.raises(ConfigError, match=r"group 1 of the optimizer lists 'norm.weight', which is in group 0"):
        engine(*models.batches(1)[0])
    optimizer.param_groups.pop()
    engine.close()
    fresh = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": form([fresh])} if not isinstance(form([fresh]), list) else {"params": [fresh]})
    assert optimizer.param_groups[-1]["params"][0] is fresh
    assert "add_param_group" not in vars(copy.deepcopy(optimizer))


def test_what_a_function_left_out_of_its_optimizer_stays_out() -> None:
    model = Growing()
    head = {id(p) for p in model.head.parameters()}
    engine = sf.Engine(model, optimizer=lambda ps: torch.optim.AdamW([p for p in ps if id(p) not in head], lr=1e-2))
    before = engine.state_dict()
    attach(model)
    fresh = model.shift.detach().clone()  # type: ignore[union-attr]
    train(engine, 1)
    after = engine.state_dict()
    assert torch.equal(before["head.weight"], after["head.weight"]) and not torch.equal(fresh, after["shift"])
    engine.close()
