"""The average over shards is the average of the whole model, and takes the model's place and gives it back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardfold as sf
from shardfold.errors import ConfigError, ModelError, ShardfoldError, UsageError
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

pytestmark = pytest.mark.product

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)  # large steps: the average must be far from the last values
LAYOUTS = list(sf.PRESETS)
DECAY = 0.8


class Counting(models.Small):
    """With a buffer that each forward changes, which is no business of an average."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("calls", torch.zeros(()))
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(tokens, targets)


def make(layout: str, build: Callable[[], nn.Module] = Counting, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world % 2 == 0 else None
    return sf.Engine(build(), **grouped(layout=layout, mesh=mesh, **{"optimizer": SGD, **options}))


def world_of(layout: str) -> int:
    return 4 if layout in ("hsdp", "hpz") else 2


def step(engine: sf.Engine, number: int) -> None:
    tokens, targets = models.batches(number + 1)[number]
    engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
    engine.step()


def shards(engine: sf.Engine) -> list[Tensor]:
    """Every shard this rank holds, copied."""
    segments = [segment for unit in engine.units for segment in unit.segments]
    return [t.clone() for s in segments for t in (s.rest, s.held, s.master) if t is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def evaluate(forward: Any, module: nn.Module) -> float:
    module.eval()
    with torch.no_grad():
        loss = forward(*models.batches(1, seed=9)[0]).item()
    module.train()
    return loss


def _follows(layout: str) -> dict[str, float]:
    engine = make(layout)
    average = sf.Average(engine, DECAY)
    torch.manual_seed(0)
    model = Counting()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    worst = {"state": 0.0, "loss": 0.0, "as loaded": 0.0}
    for number in range(6):
        step(engine, number)
        model(*models.batches(number + 1)[number]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.update_parameters(model)
        assert average.updates == int(reference.n_averaged) == number + 1
        assert engine.sharded.comm.meter.asked == (0, 0)  # an average is updated behind the step, and gathers nothing
        model.calls.fill_(number + 1), reference.module.calls.fill_(0)  # type: ignore[operator,union-attr]
        state = average.state_dict()
        assert state["module.calls"] == number + 1  # buffers are the model's own
        expected = reference.state_dict()
        worst["state"] = max(worst["state"], largest_difference({**state, "module.calls": torch.zeros(())}, expected))
        held = shards(engine)
        with average.applied():
            worst["loss"] = max(worst["loss"], abs(evaluate(engine, engine.module) - evaluate(reference, reference)))
            inside = engine.state_dict()
            with engine.gathered("head.weight") as weight:
                assert torch.equal(weight.detach(), state["module.head.weight"])
        assert all(torch.equal(value, state[f"module.{name}"]) for name, value in inside.items())
        assert same(held, shards(engine)), "the weights did not come back"
        assert engine.memory().transient == 0
    loaded = AveragedModel(Counting(), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    loaded.load_state_dict(average.state_dict())  # strict
    worst["as loaded"] = abs(evaluate(loaded, loaded) - evaluate(reference, reference))
    assert worst["loss"] < 0.2 * abs(evaluate(model, model) - evaluate(reference, reference))  # it is another model
    engine.close()
    return worst


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_average_is_that_of_the_whole_model_and_is_put_in_and_taken_out(ranks: Ranks, layout: str) -> None:
    for worst in ranks.run(_follows, layout, world_size=world_of(layout)):
        assert max(worst.values()) < 1e-5, worst
        assert worst["state"] < 2e-6, worst


def _in_bf16(layout: str) -> float:
    """In 16 bits it averages the fp32 master, which is saved after each step for the reference."""
    engine = make(layout, precision="bf16")
    average = sf.Average(engine, DECAY)
    expected: dict[str, Tensor] = {}
    for number in range(4):
        step(engine, number)
        state = engine.state_dict()
        for name, value in state.items():
            expected[name] = expected[name].lerp_(value, 1 - DECAY) if number else value.clone()
    held = shards(engine)
    with average.applied():
        with engine.gathered() as values:
            rounded = all(torch.equal(v.float(), expected[k].bfloat16().float()) for k, v in values.items())
        inside = engine.state_dict()
    assert rounded and same(held, shards(engine))
    del inside["calls"], expected["calls"]
    engine.close()
    return largest_difference(inside, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_16_bits_the_fp32_master_is_averaged(ranks: Ranks, layout: str) -> None:
    assert max(ranks.run(_in_bf16, layout, world_size=world_of(layout))) < 1e-7


def _continues(first: str, second: str) -> float:
    """Averages of one layout go on under another one."""
    one = make(first)
    average = sf.Average(one, DECAY, warmup=True)
    for number in range(3):
        step(one, number)
    two = make(second)
    two.load_state_dict(one.state_dict())
    other = sf.Average(two, DECAY, warmup=True)
    other.load_state_dict(average.state_dict())
    three, third = make(second), None
    three.load_state_dict(one.state_dict())
    third = sf.Average(three, DECAY, warmup=True)
    for engine in (one, two, three):
        engine.optimizer.param_groups[0]["momentum"] = 0.0  # its state is not what is carried over here
        step(engine, 3)
    a, b, c = average.state_dict(), other.state_dict(), third.state_dict()
    assert a["n_averaged"] == b["n_averaged"] == 4 and c["n_averaged"] == 1
    calls = [state.pop("module.calls") for state in (a, b, c)]
    assert len(calls) == 3
    for state in (a, b, c):
        del state["n_averaged"]
    assert largest_difference(a, c) > 1e-3  # one that started anew is another
    one.close(), two.close(), three.close()
    return largest_difference(a, b)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first, second", [("zero3", "ddp"), ("ddp", "zero1"), ("zero2", "fsdp2"), ("hpz", "hsdp")])
def test_an_average_is_saved_and_goes_on_under_another_layout(ranks: Ranks, first: str, second: str) -> None:
    assert max(ranks.run(_continues, first, second, world_size=4)) < 1e-6


def _warmup() -> float:
    engine = make("zero3")
    average = sf.Average(engine, 0.95, warmup=True)
    expected: dict[str, Tensor] = {}
    for number in range(5):
        step(engine, number)
        decay = min(0.95, (1 + number) / (10 + number))
        for name, value in engine.state_dict().items():
            expected[name] = expected[name].lerp(value, 1 - decay) if number else value
    state = {name.removeprefix("module."): value for name, value in average.state_dict().items()}
    for one in (state, expected):
        one.pop("calls")
    del state["n_averaged"]
    engine.close()
    return largest_difference(state, expected)


def test_warmup_lets_early_values_fade(ranks: Ranks) -> None:
    assert max(ranks.run(_warmup, world_size=2)) < 1e-6


def _memory(layout: str) -> tuple[float, float, int]:
    engine = make(layout)
    rows = len(engine.memory().rows)
    average = sf.Average(engine)
    (row,) = (row for row in engine.memory().rows if row.state == "average")
    assert row.held == row.table + row.padding and "average" in str(engine.memory())
    trainable = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    parts = engine.mesh.parts(engine.layout.master.over)
    average.close()
    assert len(engine.memory().rows) == rows
    step(engine, 0)
    assert average.updates == 0
    with pytest.raises(UsageError, match="was closed"), average.applied():
        pass
    engine.close()
    return row.table, 4 * trainable / parts, row.held


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_reports_the_average_and_closing_gives_it_back(ranks: Ranks, layout: str) -> None:
    for table, expected, held in ranks.run(_memory, layout, world_size=world_of(layout)):
        assert table == expected and held >= expected


def _misuse() -> dict[str, str]:
    engine = make("zero3")
    average = sf.Average(engine, DECAY)
    step(engine, 0)
    held, said = shards(engine), {}

    def refuse(what: str, kind: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            call()
        said[what] = str(caught.value)

    def write() -> None:
        with engine.gathered("head.weight", write=True):
            pass

    def enter() -> None:
        with average.applied():
            pass

    with average.applied():
        refuse("step", UsageError, lambda: step(engine, 1))
        refuse("write", UsageError, write)
        refuse("twice", UsageError, enter)
    with engine.gathered():
        refuse("lent", UsageError, enter)
    engine.zero_grad()
    with pytest.raises(ValueError, match="the user's own"), average.applied():
        raise ValueError("the user's own")
    assert same(held, shards(engine))
    state = average.state_dict()
    refuse("shape", ModelError, lambda: average.load_state_dict({**state, "module.norm.weight": torch.zeros(1)}))
    del state["module.norm.bias"]
    refuse("missing", ModelError, lambda: average.load_state_dict(state))
    refuse("decay", ConfigError, lambda: sf.Average(engine, 1.0))
    tokens, targets = (t.chunk(2)[engine.rank] for t in models.batches(1)[0])
    loss = engine(tokens, targets)
    with average.applied():
        pass
    refuse("between", RuntimeError, lambda: engine.backward(loss))
    engine.reset()
    step(engine, 1)
    engine.close()
    return said


def test_misuse_of_an_average_gets_one_sentence_and_changes_nothing(ranks: Ranks) -> None:
    for said in ranks.run(_misuse, world_size=2):
        assert "engine.step() inside `with average.applied():`" in said["step"]
        assert "would be lost" in said["write"]
        assert "average.applied() inside `with average.applied():`" in said["twice"]
        assert "average.applied() inside `with engine.gathered():`" in said["lent"]
        assert "'module.norm.weight' is of shape (1,)" in said["shape"]
        assert "'module.norm.bias' is missing" in said["missing"]
        assert "decay=1.0" in said["decay"]
        assert "modified by an inplace operation" in said["between"]


def test_an_engine_without_an_optimizer_has_nothing_to_average() -> None:
    with pytest.raises(ConfigError, match="with an optimizer"):
        sf.Average(sf.Engine(models.small()))


def _averaged() -> str:
    engine = sf.Engine(models.small(), optimizer=partial(torch.optim.SGD, lr=0.1), layout="zero3")
    try:
        AveragedModel(engine.module)
    except ShardfoldError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing was raised"


def test_pytorchs_average_of_split_parameters_names_ours(ranks: Ranks) -> None:
    """AveragedModel copies the model, which cannot be where its parameters are split: the error names sf.Average."""
    assert all("sf.Average" in said for said in ranks.run(_averaged, world_size=2))
