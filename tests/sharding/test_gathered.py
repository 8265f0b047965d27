"""Whole values for a while: parameters, gradients, master and moments, read and written, under every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.comm import coalesced as bundle
from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

pytestmark = pytest.mark.product

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1)
RMSPROP = partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, eps=1e-2)  # not so small that it divides rounding by it
LAYOUTS = list(sf.PRESETS)
NAMES = ("blocks.1.up.weight", "embedding.weight", "head.bias", "norm.weight")


def make(layout: str, build: Callable[[], nn.Module] = models.small, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world % 2 == 0 else None
    return sf.Engine(build(), **grouped(layout=layout, mesh=mesh, **{"optimizer": ADAMW, **options}))


def world_of(layout: str) -> int:
    return 4 if layout in ("hsdp", "hpz") else 2


def backward(engine: sf.Engine, step: int = 0) -> None:
    tokens, targets = models.batches(step + 1)[step]
    engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))


def plain(build: Callable[[], nn.Module] = models.small) -> nn.Module:
    torch.manual_seed(0)
    return build()


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12)).item()


def resting(engine: sf.Engine) -> list[Tensor]:
    """Every shard this rank holds, copied."""
    states = [
        tensor
        for unit in engine.units
        for segment in unit.segments
        for tensor in (segment.rest, segment.held, segment.master)
        if tensor is not None
    ]
    return [tensor.clone() for tensor in states]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- one collective ----------------------------------------------------------------------------------------------


def _calls(layout: str) -> dict[str, tuple[int, int]]:
    engine = make(layout)
    backward(engine)
    asked = {}

    def count(what: str) -> None:
        asked[what] = tuple(now - before for now, before in zip(engine.sharded.comm.meter.asked, seen, strict=True))

    for what in ("params", "grads", "master", "exp_avg"):
        seen = engine.sharded.comm.meter.asked
        with engine.gathered(of=what) as values:
            assert set(values) == {name for name, _ in engine.module.named_parameters()}
        count(what)
    seen = engine.sharded.comm.meter.asked
    engine.state_dict()
    count("state_dict")
    engine.step()
    assert engine.traffic().asked_calls == sum(calls for calls, _ in asked.values())
    assert engine.traffic().asked == sum(sent for _, sent in asked.values())
    engine.close()
    return asked


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_tensors_of_a_state_come_by_one_collective(ranks: Ranks, layout: str) -> None:
    bound = sf.PRESETS[layout]
    for asked in ranks.run(_calls, layout, world_size=world_of(layout)):
        assert asked["params"][0] == bool(bound.rest.over)
        for what in ("grads", "master", "exp_avg", "state_dict"):
            assert asked[what][0] == bool(bound.master.over), what


def _in_batches(batch: int, large: int) -> tuple[bool, int]:
    before = bundle.BATCH, bundle.LARGE
    bundle.BATCH, bundle.LARGE = batch, large
    try:
        engine = make("zero3")
        backward(engine)
        with engine.gathered() as params, engine.gathered(of="grads") as grads, engine.gathered(of="master") as master:
            equal = all(torch.equal(params[name], master[name]) for name in params)
            copies = {name: grad.clone() for name, grad in grads.items()}
        with engine.gathered(write=True) as params, torch.no_grad():
            for number, value in enumerate(params.values()):
                value.copy_(torch.arange(value.numel()).view_as(value) + number + engine.rank)
        state = engine.state_dict()
        for number, value in enumerate(state.values()):
            equal &= torch.equal(value, torch.arange(value.numel()).view_as(value).float() + number)
        calls, _ = engine.sharded.comm.meter.asked
        engine.close()
    finally:
        bundle.BATCH, bundle.LARGE = before
    torch.manual_seed(0)
    model = plain()
    model(*models.batches(1)[0]).backward()
    equal &= all(difference(copies[name], p.grad) < 1e-5 for name, p in model.named_parameters() if p.grad is not None)
    return equal, calls


@pytest.mark.soak
def test_what_is_larger_than_the_bounds_travels_in_several_collectives(ranks: Ranks) -> None:
    few = ranks.run(_in_batches, bundle.BATCH, bundle.LARGE, world_size=2)
    many = ranks.run(_in_batches, 10_001, bundle.LARGE, world_size=2)  # no multiple of any element's size
    in_place = ranks.run(_in_batches, 10_001, 6_000, world_size=2)  # blocks do, biases and norms do not
    assert all(equal for equal, _ in [*few, *many, *in_place])
    assert few[0][1] < in_place[0][1] and 3 * few[0][1] < many[0][1]


# -- reading -----------------------------------------------------------------------------------------------------


def _read_states(layout: str, optimizer: Any, states: list[str], accumulate: int) -> dict[str, float]:
    engine = make(layout, optimizer=optimizer, accumulate=accumulate)
    model = plain()
    reference = optimizer(model.parameters())
    worst = dict.fromkeys(["grads", "master", *states], 0.0)
    for step in range(3):
        tokens, targets = models.batches(step + 1)[step]
        model(tokens, targets).backward()
        for i in range(accumulate):
            part = engine.rank * accumulate + i
            count = engine.world_size * accumulate
            engine.backward(engine(tokens.chunk(count)[part], targets.chunk(count)[part]))
            if i < accumulate - 1:
                engine.step()
        with engine.gathered(of="grads") as grads:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                worst["grads"] = max(worst["grads"], difference(grads[name], parameter.grad))
        engine.step()
        reference.step()
        reference.zero_grad()
        for of in ("master", *states):
            with engine.gathered(*NAMES, of=of) as values:
                assert tuple(values) == NAMES
                for name in NAMES:
                    parameter = model.get_parameter(name)
                    want = parameter.detach() if of == "master" else reference.state[parameter][of]
                    worst[of] = max(worst[of], difference(values[name], want))
    with engine.gathered("head.weight", of=states[0]) as one:
        assert one.shape == engine.module.get_parameter("head.weight").shape and one.dtype == torch.float32
    engine.close()
    return worst


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_master_and_moments_are_those_of_plain_pytorch(ranks: Ranks, layout: str, accumulate: int) -> None:
    states = ["exp_avg", "exp_avg_sq"]
    for worst in ranks.run(_read_states, layout, ADAMW, states, accumulate, world_size=world_of(layout)):
        assert max(worst.values()) < 1e-4, worst


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", "zero3", "hpz"])
def test_an_odd_number_of_ranks_reads_the_same(ranks: Ranks, layout: str) -> None:
    for worst in ranks.run(_read_states, layout, ADAMW, ["exp_avg"], 2, world_size=3):
        assert max(worst.values()) < 1e-4, worst


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "optimizer, states", [(SGD, ["momentum_buffer"]), (RMSPROP, ["square_avg", "momentum_buffer"])]
)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3", "hsdp"])
def test_states_of_other_optimizers_are_read_by_their_name(
    ranks: Ranks, layout: str, optimizer: Any, states: list[str]
) -> None:
    for worst in ranks.run(_read_states, layout, optimizer, states, 1, world_size=world_of(layout)):
        assert max(worst.values()) < 1e-4, worst


def _late(layout: str) -> float:
    """In the first step units run in another order than the program's, so gradients come after their unit was sent."""
    engine = make(layout, models.backwards)
    model = plain(models.backwards)
    worst = 0.0
    for step in range(2):
        backward(engine, step)
        model(*models.batches(step + 1)[step]).backward()
        with engine.gathered(of="grads") as grads:
            for name, parameter in model.named_parameters():
                assert (grads[name] is None) == (parameter.grad is None), name
                if parameter.grad is not None:
                    worst = max(worst, difference(grads[name], parameter.grad))
    engine.step()
    engine.close()
    return worst


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_came_late_or_in_two_backwards_are_complete(ranks: Ranks, layout: str) -> None:
    assert max(ranks.run(_late, layout, world_size=world_of(layout))) < 1e-5


class Experts(models.Small):
    """Rank 0 uses the first block, the others the second; the last one is used by nobody."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks[min(dist.get_rank(), 1)](self.embedding(tokens))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _unused(layout: str, optimizer: Any) -> tuple[list[str], list[str], bool]:
    fused = optimizer.func is torch.optim.AdamW
    engine = make(layout, Experts, optimizer=optimizer)
    backward(engine)
    with engine.gathered(of="grads") as grads:
        none = [name for name, value in grads.items() if value is None]
        mine = grads["blocks.0.up.weight"].clone()
    engine.step()
    torch.manual_seed(0)
    model = models.small()
    losses = []
    for rank in range(engine.world_size):
        tokens, targets = (t.chunk(engine.world_size)[rank] for t in models.batches(1)[0])
        x = model.blocks[min(rank, 1)](model.embedding(tokens))  # type: ignore[operator,index,union-attr]
        logits = model.head(model.norm(x)).flatten(0, 1)  # type: ignore[operator,union-attr]
        losses.append(nn.functional.cross_entropy(logits, targets.flatten()))
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
    right = difference(mine, model.get_parameter("blocks.0.up.weight").grad) < 1e-5  # type: ignore[arg-type]
    with engine.gathered(of="exp_avg" if fused else "square_avg") as moments:
        absent = [name for name, value in moments.items() if value is None]
        if fused:
            right &= not moments["blocks.2.up.weight"].any() and bool(moments["blocks.1.up.weight"].any())
    engine.close()
    return none, absent, right


@pytest.mark.parametrize("optimizer", [ADAMW, RMSPROP], ids=["fused", "the user's"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_no_rank_used_has_no_gradient_and_what_one_rank_used_has(
    ranks: Ranks, layout: str, optimizer: Any
) -> None:
    unused = [f"blocks.2.{name}" for name, _ in models.Block().named_parameters()]
    for none, absent, right in ranks.run(_unused, layout, optimizer, world_size=world_of(layout)):
        assert none == unused and right
        assert absent == ([] if optimizer is ADAMW else unused)


def _refusals(layout: str) -> dict[str, str]:
    engine = make(layout, models.frozen, accumulate=2)
    said = {}

    def refuse(what: str, kind: type[Exception], *names: str, of: str) -> None:
        with pytest.raises(kind) as caught, engine.gathered(*names, of=of):
            pass
        said[what] = str(caught.value)

    refuse("no backward", UsageError, of="grads")
    backward(engine)
    refuse("not the last", UsageError, of="grads")
    engine.step()
    with engine.no_sync():
        backward(engine)
    refuse("no_sync", UsageError, of="grads")
    refuse("frozen", UsageError, "embedding.weight", of="master")
    refuse("unknown state", ConfigError, of="exp_av")
    refuse("unknown name", ModelError, "head.wieght", of="master")
    with engine.gathered(of="master") as values:
        said["names"] = ",".join(values)
    buffers = [unit.gradients.local for unit in engine.units]
    assert engine.memory().transient == sum(f.nbytes for buffer in buffers if buffer for f in buffer.flats)
    engine.close()
    with pytest.raises(UsageError) as caught, make(layout, optimizer=None).gathered(of="master"):
        pass
    said["no optimizer"] = str(caught.value)
    return said


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3", "hsdp"])
def test_what_is_not_there_is_refused_in_one_sentence(ranks: Ranks, layout: str) -> None:
    for said in ranks.run(_refusals, layout, world_size=world_of(layout)):
        for what in ("no backward", "not the last", "no_sync"):
            assert "ask right before step()" in said[what]
        assert "'embedding.weight' is frozen" in said["frozen"]
        assert "Did you mean 'exp_avg'?" in said["unknown state"]
        assert "Did you mean 'head.weight'?" in said["unknown name"]
        assert "needs an optimizer" in said["no optimizer"]
        assert "blocks.0.up.weight" in said["names"] and "embedding" not in said["names"]


# -- writing -----------------------------------------------------------------------------------------------------


def _write_states(layout: str, precision: str, optimizer: Any, moment: str) -> tuple[float, list[str]]:
    """Gradients are clipped by value, master and a moment are scaled, on rank 0; plain PyTorch does the same."""
    engine = make(layout, precision=precision, optimizer=optimizer)
    model = plain()
    reference = optimizer(model.parameters())
    wrong: list[str] = []
    for step in range(3):
        backward(engine, step)
        model(*models.batches(step + 1)[step]).backward()
        with engine.gathered(*NAMES, write=True, of="grads") as grads:
            if engine.rank == 0:
                for grad in grads.values():
                    grad.clamp_(-1e-3, 1e-3)
        for name in NAMES:
            model.get_parameter(name).grad.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]
        engine.step()
        reference.step()
        reference.zero_grad()
        with engine.gathered("blocks.1.up.weight", write=True, of="master") as master:
            master.mul_(1.0 + 0.1 * (engine.rank == 0))
        with engine.gathered("blocks.1.up.weight", "head.weight", write=True, of=moment) as moments:
            for value in moments.values():
                value.mul_(0.5 if engine.rank == 0 else 7.0)
        with torch.no_grad():
            model.get_parameter("blocks.1.up.weight").mul_(1.1)
            for name in ("blocks.1.up.weight", "head.weight"):
                reference.state[model.get_parameter(name)][moment].mul_(0.5)
        with engine.gathered() as params:
            state = engine.state_dict()
            wrong += [name for name in params if not torch.equal(params[name], state[name].to(params[name].dtype))]
    state = engine.state_dict()
    worst = max(difference(state[name], value.detach()) for name, value in model.named_parameters())
    engine.close()
    return worst, wrong


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_gradients_master_and_moments_train_on_as_in_plain_pytorch(ranks: Ranks, layout: str) -> None:
    world = world_of(layout)
    for optimizer, moment in ((ADAMW, "exp_avg"), (SGD, "momentum_buffer"), (RMSPROP, "square_avg")):
        for worst, wrong in ranks.run(_write_states, layout, "fp32", optimizer, moment, world_size=world):
            assert worst < 1e-4 and not wrong, (optimizer, worst, wrong)
    for _, wrong in ranks.run(_write_states, layout, "bf16", ADAMW, "exp_avg", world_size=world):
        assert not wrong  # what forward reads is the rounded master


def _momentum_before_the_first_step() -> float:
    engine = make("zero3", optimizer=SGD)
    model = plain()
    reference = SGD(model.parameters())
    with engine.gathered("head.weight", write=True, of="momentum_buffer") as momentum:
        assert not momentum.any()
        momentum.fill_(0.25)
    weight = model.get_parameter("head.weight")
    reference.state[weight]["momentum_buffer"] = torch.full_like(weight, 0.25)
    backward(engine)
    model(*models.batches(1)[0]).backward()
    engine.step(), reference.step()
    state = engine.state_dict()
    engine.close()
    return max(difference(state[name], value.detach()) for name, value in model.named_parameters())


def test_momentum_written_before_the_first_step_counts(ranks: Ranks) -> None:
    assert max(ranks.run(_momentum_before_the_first_step, world_size=2)) < 1e-5


def _neighbours(layout: str) -> list[str]:
    """Writing one bias must not round the fp32 master of anything else to bf16."""
    engine = make(layout, precision="bf16")
    backward(engine)
    engine.step()
    before = engine.state_dict()
    with engine.gathered("blocks.1.up.bias", "blocks.1.up.weight", write=True) as values, torch.no_grad():
        values["blocks.1.up.bias"].fill_(0.5)
        if engine.rank == 0:
            values["blocks.1.up.weight"].data[0].fill_(2.0)  # as initializers do: leaves no trace in the version
    after = engine.state_dict()
    expected = {**before, "blocks.1.up.bias": torch.full((96,), 0.5)}
    expected["blocks.1.up.weight"][0] = 2.0
    engine.close()
    return [name for name in after if not torch.equal(after[name], expected[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_leaves_the_precision_of_everything_else_alone(ranks: Ranks, layout: str) -> None:
    assert ranks.run(_neighbours, layout, world_size=world_of(layout)) == [[]] * world_of(layout)


# -- misuse ------------------------------------------------------------------------------------------------------


def _misuse(layout: str) -> dict[str, str]:
    engine = make(layout)
    backward(engine)
    engine.step()
    before, said = resting(engine), {}

    def change(what: str, rank: int | None, *names: str, write: bool, victim: str = "head.weight", of: str = "params"):
        said[what] = "nothing was raised"
        try:
            with engine.gathered(*names, write=write, of=of) as values, torch.no_grad():
                if rank in (None, engine.rank):
                    (values if len(names) == 1 and of != "params" else engine.module.get_parameter(victim)).add_(1)
        except UsageError as error:
            said[what] = str(error)

    change("read", None, "head.weight", write=False)
    if engine.layout.rest.over:
        assert same(resting(engine), before)
    else:  # what is not split is the parameter itself
        engine.load_state_dict(plain_state := engine.state_dict())
        with torch.no_grad():
            engine.module.get_parameter("head.weight").sub_(1)
        engine.load_state_dict(plain_state)
    before = resting(engine)
    change("off rank", 1, "head.weight", "head.bias", write=True)
    change("off rank, master", 1, "head.weight", write=True, of="master")
    change("not named", 1, "head.bias", write=True)
    change("read master", None, "head.weight", write=False, of="master")
    assert same(resting(engine), before), "something was written"
    assert engine.memory().transient == 0
    with engine.gathered():
        for what, call in (("step", engine.step), ("load", lambda: engine.load_state_dict({}, strict=False))):
            if what == "step":
                backward(engine, 1)
            with pytest.raises(UsageError) as caught:
                call()
            said[what] = str(caught.value)
    engine.step()
    engine.close()
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_where_none_may_be_raises_and_writes_nothing(ranks: Ranks, layout: str) -> None:
    answers = ranks.run(_misuse, layout, world_size=world_of(layout))
    for rank, said in enumerate(answers):
        assert "'head.weight' changed inside engine.gathered('head.weight'), which only reads" in said["read"]
        assert "only reads" in said["read master"]
        for what in ("off rank", "off rank, master"):  # on every rank
            assert "'head.weight' changed on another rank than 0 only" in said[what]
        if rank == 1:
            assert (
                "'head.weight' changed inside engine.gathered('head.bias', write=True), which did" in said["not named"]
            )
        else:
            assert "rank 1 left the block with an exception" in said["not named"]
        assert "inside `with engine.gathered():`" in said["step"] and "inside `with engine" in said["load"]


def _exceptions(layout: str, write: bool, failing: int | None) -> list[str]:
    """Ranks' exceptions inside the block: each rank sees its own; afterwards everything is as before."""
    engine = make(layout)
    fresh = make(layout)
    for one in (engine, fresh):
        backward(one)
        one.step()
    before, said = resting(engine), []
    for names in ((), ("head.weight",), ("embedding.weight", "blocks.0.down.bias")):
        try:
            with engine.gathered(*names, write=write), torch.no_grad():
                if write:
                    engine.module.get_parameter(names[0] if names else "norm.weight").add_(3)
                if failing in (None, engine.rank):
                    raise ValueError("the user's own")
        except (ValueError, UsageError) as error:
            said.append(str(error))
    assert same(resting(engine), before), "something was written"
    assert engine.memory().transient == 0 and not any(unit.pins for unit in engine.units)
    for one in (engine, fresh):
        backward(one, 1)
        one.step()
    assert same(resting(engine), resting(fresh))
    engine.close(), fresh.close()
    return said


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exception_inside_is_not_masked_and_writes_nothing(ranks: Ranks, layout: str) -> None:
    world = world_of(layout)
    assert ranks.run(_exceptions, layout, False, None, world_size=world) == [["the user's own"] * 3] * world
    assert ranks.run(_exceptions, layout, True, None, world_size=world) == [["the user's own"] * 3] * world
    for rank, said in enumerate(ranks.run(_exceptions, layout, True, 1, world_size=world)):
        assert len(said) == 3
        for line in said:
            assert line == "the user's own" if rank == 1 else "rank 1 left the block with an exception" in line


def _nested() -> bool:
    engine = make("zero3", models.tied)
    with engine.gathered("embedding.weight", "blocks.0.up.weight") as outer:
        with engine.gathered("head.weight", write=True) as weight, torch.no_grad():  # the embedding's other name
            weight.fill_(0.25 + engine.rank)
        good = bool((outer["embedding.weight"] == 0.25).all())
        if engine.rank == 0:  # nothing has to be sent, so one rank may do it alone
            with engine.gathered("blocks.0.up.weight") as again:
                good &= again is outer["blocks.0.up.weight"]
    good &= engine.memory().transient == 0 and bool((engine.state_dict()["head.weight"] == 0.25).all())
    engine.close()
    return good


def test_blocks_nest(ranks: Ranks) -> None:
    assert ranks.run(_nested, world_size=2) == [True, True]


def test_one_process_alone_reads_and_writes_the_same_way() -> None:
    engine = make("zero3")
    backward(engine)
    with engine.gathered("head.weight", of="grads", write=True) as grad:
        grad.zero_()
    engine.step()
    with engine.gathered("head.weight", of="exp_avg") as moment:
        assert not moment.any()
    with engine.gathered("head.weight", write=True) as weight, torch.no_grad():
        weight.fill_(1.0)
    assert (engine.state_dict()["head.weight"] == 1).all() and engine.sharded.comm.meter.asked[0] == 0


# -- generation ----------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, max_position_embeddings=64, eos_token_id=None, pad_token_id=0, **sizes, **heads)
    return LlamaForCausalLM(config)


def generate(model: Any, rank: int) -> list[int]:
    """A prompt and a length of this rank's own."""
    prompt = torch.arange(1, 4 + rank).unsqueeze(0)
    with torch.no_grad():
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=3 + 5 * rank, do_sample=False)
    return out[0].tolist()


def _language_step(forward: Any, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(forward(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())


def _generate(layout: str) -> tuple[list[str], int]:
    engine = make(layout, llama)
    model = plain(llama)
    reference = ADAMW(model.parameters())
    wrong: list[str] = []
    for step in range(3):
        batch = torch.randint(1, 97, (8, 10), generator=torch.Generator().manual_seed(step))
        before = resting(engine)
        calls, _ = engine.sharded.comm.meter.asked
        model.eval(), engine.module.eval()
        with engine.gathered():
            written = generate(engine.module, engine.rank)
        calls = engine.sharded.comm.meter.asked[0] - calls
        expected = generate(model, engine.rank)
        model.train(), engine.module.train()
        if written != expected:
            wrong.append(f"step {step}: {written} instead of {expected}")
        if len(written) != 6 + 6 * engine.rank:
            wrong.append(f"{len(written)} tokens")
        if not same(resting(engine), before):
            wrong.append("shards changed")
        memory = engine.memory()
        if memory.transient or any(row.held != row.table + row.padding for row in memory.rows):
            wrong.append(str(memory))
        loss = _language_step(engine, batch.chunk(engine.world_size)[engine.rank])
        engine.backward(loss)
        engine.step()
        whole = _language_step(model, batch)
        whole.backward()
        reference.step()
        reference.zero_grad()
        if abs(engine.mean(loss.item()) - whole.item()) > 1e-5:
            wrong.append(f"loss {engine.mean(loss.item())} instead of {whole.item()}")
    engine.close()
    return wrong, calls


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_generate_unequal_lengths_after_one_gather_and_train_on(ranks: Ranks, layout: str) -> None:
    for wrong, calls in ranks.run(_generate, layout, world_size=world_of(layout)):
        assert not wrong
        assert calls == bool(sf.PRESETS[layout].rest.over)


class TakesAGradient(nn.Module):
    """In its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(torch.tanh(self.linear(inner)).sum(), inner)
        return x + self.linear(x) + 0.1 * grad


def on_one_rank_alone(layout: str, unit: type[nn.Module]) -> list[float]:
    torch.manual_seed(0)
    plain = nn.Sequential(TakesAGradient(), TakesAGradient()).double()
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = sf.Engine(
        copy.deepcopy(plain),
        optimizer=sgd,
        layout=layout,
        init=sf.Init(units=[unit]),
        runtime=sf.Runtime(patience=3),
    )
    update, off, x = sgd(plain.parameters()), [0.0], torch.ones(2, 6, dtype=torch.float64)
    for _ in range(2):
        plain(x).square().mean().backward()
        update.step()
        update.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
        with engine.gathered(), torch.no_grad():
            for _ in range(2 if engine.rank == 0 else 0):
                off.append(float((engine(x) - plain(x)).abs().max()))
        assert engine.mean(1.0) == 1.0  # where the others are by then
    engine.close()
    return off


@pytest.mark.parametrize("unit", [TakesAGradient, nn.Linear])
@pytest.mark.parametrize("layout", ["fsdp2", "zero3"])
def test_inside_a_rank_alone_runs_a_forward_that_takes_gradients_itself(
    ranks: Ranks, layout: str, unit: type[nn.Module]
) -> None:
    for off in ranks.run(on_one_rank_alone, layout, unit, world_size=2):
        assert max(off) < 1e-12
