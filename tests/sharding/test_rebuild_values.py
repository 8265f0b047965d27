"""Values given by hand, embeddings that are resized, and changes that cannot be followed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, FreedParameterError, OrderError, UsageError
from shardfold.testing import Ranks
from tests.support import models
from tests.support.changing import (
    OPTIMIZERS,
    WHOLE,
    Growing,
    Pair,
    Wrapped,
    attach,
    half_frozen,
    layouts,
    mesh_for,
    train,
    unfreeze,
    world_for,
)
from tests.support.models import WIDTH

pytestmark = pytest.mark.product

# -- values given by hand -------------------------------------------------------------------------------------------


def _assigned(layout: str, precision: str) -> None:
    """``parameter.data = x``: outside of gathered() where values are whole, else inside."""
    pair = Pair(layout, Growing, "AdamW", precision=precision)
    engine, exact = pair.engine, precision == "fp32"
    if exact:
        pair.train(2)
    new = torch.randn(models.VOCAB, WIDTH, generator=torch.Generator().manual_seed(3))

    def give(model: Any) -> None:
        dtype = model.head.weight.dtype
        model.head.weight.data = new.clone().to(dtype)
        a, b = model.blocks[0].up.weight, model.blocks[1].up.weight
        a.data, b.data = b.data, a.data

    masters = engine.state_dict()
    give(pair.plain)
    if layout in WHOLE:
        give(engine.module)
    else:
        with pytest.raises(FreedParameterError, match="with engine"):
            give(engine.module)
        with engine.gathered():
            give(engine.module)
    if exact:
        pair.train(2)
        pair.check(1e-5)
    else:
        with torch.no_grad():
            engine(*models.batches(1)[0])
        state = engine.state_dict()
        assert torch.equal(state["head.weight"], new.bfloat16().float())
        assert torch.equal(state["blocks.2.up.weight"], masters["blocks.2.up.weight"])  # master is as precise as before
    engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("layout", layouts("ddp", "zero3"))
def test_assigned_data_is_read_into_every_state(ranks: Ranks, layout: str) -> None:
    for precision in ("fp32", "bf16"):
        ranks.run(_assigned, layout, precision, world_size=world_for(layout))


@pytest.mark.parametrize("layout", WHOLE)
def test_data_assigned_between_backward_and_step_is_what_the_step_updates(layout: str) -> None:
    pair = Pair(layout, Growing, "AdamW")
    batch = models.batches(1)[0]
    new = torch.randn(WIDTH)
    for model, run in ((pair.plain, lambda loss: loss.backward()), (pair.engine.module, pair.engine.backward)):
        run(model(*batch))
        model.norm.bias.data = new.clone()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.engine.step()
    pair.check()
    pair.engine.close()


def test_data_of_another_dtype_is_refused_and_the_values_stay() -> None:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout="zero1")
    before = engine.state_dict()
    engine.module.double()
    with pytest.raises(UsageError, match=r"'norm.weight' and \d+ more got .data of another dtype"):
        engine(*models.batches(1)[0])
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    train(engine, 1)
    assert not torch.equal(before["norm.weight"], engine.state_dict()["norm.weight"])
    engine.module.double().float()
    before = engine.state_dict()
    train(engine, 1)
    assert not torch.equal(before["norm.weight"], engine.state_dict()["norm.weight"])
    engine.close()


def _grown(layout: str) -> None:
    """``parameter.data = x`` of another shape and nothing else; its states begin anew."""
    pair = Pair(layout, Growing, "AdamW")
    pair.train(2)
    engine = pair.engine

    def grow(model: Any) -> None:
        old = model.embedding.weight.data
        model.embedding.weight.data = torch.cat([old, old[:7] + torch.rand(7, WIDTH)])

    torch.manual_seed(2)
    grow(pair.plain)
    pair.optimizer.state.pop(pair.plain.embedding.weight)
    batch = [t.chunk(engine.world_size)[engine.rank] for t in models.batches(1)[0]]
    engine.backward(engine(*batch))
    with pytest.raises(UsageError, match="gradients of 1 micro-batch wait"), engine.gathered():
        torch.manual_seed(2 + engine.rank)
        grow(engine.module)
    with pytest.raises(UsageError, match="gradients of 1 micro-batch wait"):  # and is not forgotten
        engine(*batch)
    engine.zero_grad()
    assert tuple(engine.state_dict()["embedding.weight"].shape) == (models.VOCAB + 7, WIDTH)
    pair.train(2)
    pair.check(1e-5)
    engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("layout", layouts("zero1", "zero3"))
def test_data_of_another_shape_is_another_structure(ranks: Ranks, layout: str) -> None:
    ranks.run(_grown, layout, world_size=world_for(layout))


def _part_of_a_flat(layout: str) -> None:
    """A new parameter that is a view of a gathered one outlives the memory it was a view of."""
    pair = Pair(layout, Growing, "AdamW")

    def cut_down(model: Any) -> None:
        head = model.head
        model.head = nn.Linear(WIDTH, models.VOCAB, bias=False)
        model.head.weight = nn.Parameter(head.weight.data[:])
        model.shift = nn.Parameter(model.norm.weight.data[:WIDTH])

    pair.train(2)
    cut_down(pair.plain)
    pair.adopt()
    with pair.engine.gathered():
        cut_down(pair.engine.module)
    pair.plain.norm.weight.data = pair.plain.norm.weight.data.clone()
    pair.train(2)
    pair.check(1e-5)
    pair.engine.close()


@pytest.mark.parametrize("layout", layouts("zero2", "fsdp2"))
def test_a_parameter_made_of_a_part_of_another_has_memory_of_its_own(ranks: Ranks, layout: str) -> None:
    ranks.run(_part_of_a_flat, layout, world_size=world_for(layout))


def _left(layout: str) -> None:
    """What leaves the model is an ordinary tensor with its values, on every rank, and may come back."""
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout=layout, parallel=mesh_for(layout))
    train(engine, 2)
    head, block = engine.module.head, engine.module.blocks[2]  # type: ignore[index]
    state = engine.state_dict()
    engine.module.head = nn.Linear(WIDTH, models.VOCAB)
    del engine.module.blocks[2]  # type: ignore
    train(engine, 1)
    assert torch.equal(head.weight, state["head.weight"])  # type: ignore
    assert torch.equal(block.up.weight, state["blocks.2.up.weight"])  # type: ignore
    assert block(torch.zeros(1, WIDTH)).shape == (1, WIDTH)  # type: ignore
    engine.module.head = head
    after = engine.state_dict()
    assert torch.equal(after["head.weight"], state["head.weight"]) and "blocks.2.up.weight" not in after
    train(engine, 1)
    engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("layout", layouts("ddp", "zero3", "hpz"))
def test_what_leaves_the_model_has_its_values_on_every_rank(ranks: Ranks, layout: str) -> None:
    ranks.run(_left, layout, world_size=world_for(layout))


def test_new_modules_may_have_no_memory_yet_and_bring_buffers() -> None:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout="zero3", init=sf.Init(seed=5))
    with sf.meta_init():
        engine.module.adapter = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    train(engine, 1)
    assert engine.state_dict()["adapter.0.weight"].isfinite().all()
    engine.close()


def _buffers() -> float:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout="zero3")
    engine.module.scale = nn.Module()
    engine.module.scale.register_buffer("value", torch.full((2,), 1.0 + engine.rank))
    value = engine.state_dict()["scale.value"][0].item()
    engine.close()
    return value


def test_new_buffers_get_rank_0s_values(ranks: Ranks) -> None:
    assert ranks.run(_buffers, world_size=2) == [1.0, 1.0]


# -- resized embeddings ---------------------------------------------------------------------------------------------


def _resized(layout: str, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def build() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
            )
        ).double()  # fmt: skip

    plain = build()
    optimizer = OPTIMIZERS["AdamW"](plain.parameters())
    engine = sf.Engine(build(), optimizer=OPTIMIZERS["AdamW"], layout=layout, parallel=mesh_for(layout))

    def train(vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(vocabulary)
        for _ in range(3):
            tokens = torch.randint(vocabulary, (8, 6), generator=generator)
            mine = tokens.chunk(engine.world_size)[engine.rank]
            expected = F.cross_entropy(plain(tokens).logits.flatten(0, 1), tokens.flatten())
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = F.cross_entropy(engine(mine).logits.flatten(0, 1), mine.flatten())
            engine.backward(loss)
            engine.step()
            assert engine.mean(loss.item()) == pytest.approx(expected.item(), rel=1e-10)

    train(40)
    torch.manual_seed(1)
    plain.resize_token_embeddings(47)
    for p in (plain.model.embed_tokens.weight, plain.lm_head.weight):
        optimizer.state.pop(p, None)  # of another shape
    if not tied:
        optimizer.param_groups[0]["params"].append(plain.lm_head.weight)
    if layout not in WHOLE:
        with pytest.raises(FreedParameterError, match="with engine"):
            engine.module.resize_token_embeddings(47)  # type: ignore
    with engine.gathered():
        torch.manual_seed(1 + engine.rank)
        engine.module.resize_token_embeddings(47)  # type: ignore
    train(47)
    state = engine.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-10, atol=1e-10), name
    memory = engine.memory()
    assert all(row.held == pytest.approx(row.table + row.padding, abs=1) for row in memory.rows), memory
    engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", layouts("ddp", "zero3"))
def test_embeddings_are_resized_inside_gathered(ranks: Ranks, layout: str, tied: bool) -> None:
    ranks.run(_resized, layout, tied, world_size=world_for(layout))


# -- what is refused ------------------------------------------------------------------------------------------------


def _while_accumulating(layout: str) -> None:
    pair = Pair(layout, half_frozen, "AdamW", accumulate=2)
    engine = pair.engine
    (batch,) = models.batches(1)

    def parts() -> list[list[Tensor]]:
        count = 2 * engine.world_size
        return [[t.chunk(count)[2 * engine.rank + i] for t in batch] for i in range(2)]

    first, second = parts()
    engine.backward(engine(*first))
    unfreeze(engine.module)
    for use in (lambda: engine(*second), engine.state_dict):
        with pytest.raises(UsageError, match="gradients of 1 micro-batch wait"):
            use()
    for p in engine.module.embedding.parameters():  # type: ignore
        p.requires_grad_(False)
    engine.module.blocks[1].requires_grad_(False)  # type: ignore
    engine.module.blocks[2].up.requires_grad_(False)  # type: ignore
    engine.backward(engine(*second))  # nothing was lost
    assert engine.step().updated
    pair.plain(*batch).backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.check()
    unfreeze(engine.module)  # now it may
    engine.backward(engine(*first))
    attach(engine.module)
    with pytest.raises(UsageError, match="gradients of 1 micro-batch wait"), engine.gathered():
        pass
    engine.zero_grad()
    engine(*second)
    engine.close()


@pytest.mark.parametrize("layout", layouts("ddp", "zero3"))
def test_a_change_between_micro_batches_raises_and_loses_nothing(ranks: Ranks, layout: str) -> None:
    ranks.run(_while_accumulating, layout, world_size=world_for(layout))


def _differently(layout: str) -> str:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout=layout)
    train(engine, 1)
    engine.module.adapter = nn.Linear(WIDTH, WIDTH, bias=engine.rank == 0)
    with pytest.raises(ConfigError) as raised:
        train(engine, 1)
    engine.module.adapter = nn.Linear(WIDTH, WIDTH)  # and it can be mended
    train(engine, 1)
    engine.close()
    return str(raised.value)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_ranks_that_change_their_models_differently_are_told_so(ranks: Ranks, layout: str) -> None:
    for said in ranks.run(_differently, layout, world_size=2):
        assert said.startswith("change 1 of the model's structure of rank 1 differ from rank 0's")


def _same_shape(layout: str) -> str:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout=layout)
    engine.module.shift = nn.Parameter(torch.zeros(WIDTH))
    if engine.rank == 0:
        engine.module.norm.weight = nn.Parameter(torch.ones(WIDTH))
    with pytest.raises(ConfigError) as raised:
        train(engine, 1)
    engine.close()
    return str(raised.value)


def test_a_parameter_replaced_on_one_rank_only_is_noticed_although_its_shape_is_the_same(ranks: Ranks) -> None:
    assert all("differ from rank 0's" in said for said in ranks.run(_same_shape, "zero3", world_size=2))


def _one_rank_only(layout: str) -> str:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout=layout)
    train(engine, 1)
    if engine.rank == 1:
        attach(engine.module)
    with pytest.raises(OrderError) as raised:
        train(engine, 2)
    engine.close()
    return str(raised.value)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_change_on_one_rank_only_raises_on_every_rank(ranks: Ranks, layout: str) -> None:
    for said in ranks.run(_one_rank_only, layout, world_size=2, timeout=60):
        assert "rank 1: a change of the model" in said


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_backward_through_a_forward_before_the_change_is_right_or_raises(ranks: Ranks, layout: str) -> None:
    ranks.run(_old_forward, layout, world_size=2)


def _old_forward(layout: str) -> None:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout=layout)
    train(engine, 1)
    batch = models.batches(1)[0]
    loss = engine(*batch)
    engine.module.blocks[1].up = Wrapped(engine.module.blocks[1].up)  # type: ignore
    other = engine(*batch)
    if layout == "ddp":
        engine.backward(loss)
    else:
        with pytest.raises(RuntimeError, match=r"before the structure of the model changed|inplace operation"):
            engine.backward(loss)
        engine.reset()
    del other
    train(engine, 1)
    assert engine.memory().transient == 0
    engine.close()


# -- watching costs next to nothing, and ends --------------------------------------------------------------------------


def test_a_run_without_changes_walks_nothing_and_a_closed_engine_hears_nothing() -> None:
    from torch.nn.modules import module

    before = len(module._global_parameter_registration_hooks), len(module._global_module_registration_hooks)
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"])
    walked = 0
    look = engine._changes.look

    def count() -> Any:
        nonlocal walked
        walked += 1
        return look()

    engine._changes.look = count  # type: ignore[method-assign]
    train(engine, 2)
    models.Small()  # another model is nobody's business
    with engine.gathered():
        pass
    engine.module.blocks[0].requires_grad_(False)  # type: ignore  # has its states already
    train(engine, 1)
    assert walked == 0
    engine.module.norm.weight = engine.module.norm.weight  # registered again: looked at, and nothing changed
    units = engine.units
    train(engine, 1)
    assert walked == 1 and engine.units is units
    engine.close()
    assert before == (
        len(module._global_parameter_registration_hooks),
        len(module._global_module_registration_hooks),
    )
    assert math.isfinite(sum(p.sum().item() for p in engine.module.parameters()))


# -- what else holds values -------------------------------------------------------------------------------------------


def _averaged(layout: str) -> None:
    """What stays keeps its average, exactly; what is new is averaged from its first value on."""
    engine = sf.Engine(half_frozen(), optimizer=OPTIMIZERS["AdamW"], layout=layout, parallel=mesh_for(layout))
    average = sf.Average(engine, 0.5)
    train(engine, 3)
    before, frozen = average.state_dict(), engine.state_dict()
    unfreeze(engine.module)
    attach(engine.module)
    engine.module.blocks[0].down = Wrapped(engine.module.blocks[0].down)  # type: ignore
    state = average.state_dict()
    assert state["n_averaged"] == 3
    for name, value in before.items():
        assert torch.equal(value, state[name.replace("0.down.", "0.down.base.")]), name
    assert torch.equal(state["module.embedding.weight"], frozen["embedding.weight"])
    fresh = engine.state_dict()["shift"]
    train(engine, 1)
    state, now = average.state_dict(), engine.state_dict()
    assert state.keys() - {"n_averaged"} == {f"module.{name}" for name in now}
    for name, old in (("shift", fresh), ("embedding.weight", frozen["embedding.weight"])):
        assert torch.allclose(state[f"module.{name}"], (old + now[name]) / 2, rtol=1e-6, atol=1e-7)
        assert not torch.equal(old, now[name])
    rows = {row.state: row for row in engine.memory().rows}
    assert rows["average"].held == pytest.approx(rows["average"].table + rows["average"].padding, abs=1)
    with average.applied():
        engine.module.shift = None
        with pytest.raises(UsageError, match=r"changed inside `with average.applied\(\):`"):
            engine(*models.batches(1)[0])
    train(engine, 1)
    assert "module.shift" not in average.state_dict()
    average.close()
    engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("layout", layouts("ddp", "zero3", "hsdp"))
def test_an_average_follows_the_model(ranks: Ranks, layout: str) -> None:
    ranks.run(_averaged, layout, world_size=world_for(layout))


def test_a_parameter_that_becomes_none_leaves() -> None:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout="zero2")
    train(engine, 1)
    engine.module.head.bias = None  # type: ignore
    train(engine, 1)
    assert "head.bias" not in [name for unit in engine.units for name, _ in unit.parameters()]
    engine.close()


def _dtypes_of_what_is_new(precision: str) -> dict[str, tuple[torch.dtype, bool]]:
    engine = sf.Engine(Growing(), optimizer=OPTIMIZERS["AdamW"], layout="zero3", precision=precision)
    train(engine, 1)
    engine.module.a = nn.Linear(WIDTH, WIDTH)
    engine.module.b = nn.Linear(WIDTH, WIDTH, dtype=engine.module.head.weight.dtype)  # type: ignore
    engine.module.c = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    train(engine, 1)
    kinds = {p: (p.dtype, s.spec.own) for u in engine.units for s in u.segments for p in s.parameters}
    found = {name: kinds[p] for name, p in engine.module.named_parameters() if name.endswith("weight")}
    engine.close()
    return found


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_what_is_new_follows_the_precision_unless_its_dtype_is_another(precision: str, dtype: torch.dtype) -> None:
    found = _dtypes_of_what_is_new(precision)
    assert found.pop("c.weight") == (torch.float64, True)
    assert set(found.values()) == {(dtype, False)}


class _Statistics(nn.Module):
    """Keeps a running mean, as a normalization over batches does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.flatten(0, 1).mean(0), 0.1)  # type: ignore[operator]
        return x


def _statistics() -> tuple[list[float], list[float]]:
    """A change between a forward that changed buffers and the one that makes them equal."""
    model = Growing()
    model.adapter = _Statistics()
    engine = sf.Engine(model, optimizer=OPTIMIZERS["AdamW"], layout="zero2")
    train(engine, 1)
    before = model.adapter.mean.tolist()  # type: ignore[union-attr]
    engine.module.shift = nn.Parameter(torch.zeros(WIDTH))
    engine.module.eval()
    with torch.no_grad():
        engine(*models.batches(1)[0])
    after = model.adapter.mean.tolist()  # type: ignore[union-attr]
    engine.close()
    return before, after


def test_buffers_that_ranks_changed_before_a_change_of_the_model_become_rank_0s(ranks: Ranks) -> None:
    (first, after), (other, after_too) = ranks.run(_statistics, world_size=2)
    assert first != other
    assert after == after_too == first
