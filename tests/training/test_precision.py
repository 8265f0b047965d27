"""docs/precision.md says which dtype each state has: the table is read and compared with live tensors."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.layout import PRECISIONS
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.testing import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def table() -> dict[str, dict[str, str]]:
    """The first table of the page: policy -> column -> word."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    head, _, *body = rows
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("table", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen["activations"] = x.dtype
        return x


def live(layout: str, precision: str, loaded: torch.dtype) -> dict[str, set[torch.dtype]]:
    torch.manual_seed(0)
    model = Net().to(loaded)
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout, precision=precision)
    found: dict[str, set[torch.dtype]] = {}
    seen: set[torch.dtype] = set()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.add(grad.dtype))
    sent: set[torch.dtype] = set()
    for unit in engine.units:
        make = unit.gradients.make

        def record(make: Any = make) -> Any:
            buffer = make()
            sent.update(flat.dtype for flat in buffer.flats)
            return buffer

        unit.gradients.make = record  # type: ignore[method-assign]
        sent.update(flat.dtype for flat in unit.shown.resting_flats())
    out = engine(torch.ones(2, 16))
    engine.backward(out.square().mean())
    engine.step()
    segments = [segment for unit in engine.units for segment in unit.trainable]
    found["parameters"] = {parameter.dtype for parameter in model.parameters()}
    found["activations"], found["outputs"] = {model.seen["activations"]}, {out.dtype}
    found["autograd's gradients"] = seen
    found["gradients sent"] = sent
    found["gradients accumulated"] = {segment.master_grads.dtype for segment in segments}
    found["master"] = {segment.master.dtype for segment in segments if segment.master is not None}
    found["moments"] = {moment.dtype for moment in engine._updater.regions()}  # type: ignore[union-attr]
    found["buffers"] = {model.table.dtype}
    assert model.count.dtype == torch.int64
    engine.close()
    return found


def every_row(layout: str) -> None:
    for precision, row in table().items():
        for loaded in (torch.float32, torch.bfloat16):
            for column, dtypes in live(layout, precision, loaded).items():
                expected = loaded if row[column] == "own" else TORCH_DTYPES[row[column]]
                assert dtypes == {expected}, (layout, precision, loaded, column, dtypes)


def test_the_table_has_every_policy() -> None:
    assert set(table()) == set(PRECISIONS)


@pytest.mark.soak
@pytest.mark.product
@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_the_table_is_true(ranks: Ranks, layout: str) -> None:
    ranks.run(every_row, layout, world_size=2)


def test_buffers_follow_compute_if_asked() -> None:
    model = Net().double().float()
    model.register_buffer("exact", torch.ones(2, dtype=torch.float64))
    engine = sf.Engine(model, precision=sf.Precision(compute="bf16", buffers="compute"))
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        "table": torch.bfloat16, "count": torch.int64, "exact": torch.float64
    }  # fmt: skip
    engine.close()


def fp16_backbone_with_an_fp32_head() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64).half(), nn.Linear(64, 8).half(), Widen(), nn.Linear(8, 1))
    engine = sf.Engine(model, optimizer=ADAMW, layout="zero2", precision="fp16")
    assert [p.dtype for p in model.parameters()] == [torch.float16] * 4 + [torch.float32] * 2
    first = None
    for _ in range(30):
        loss = (engine(torch.ones(4, 8)) - 3.0).square().mean()
        first = first or loss.item()
        engine.backward(loss)
        engine.step()
    assert loss.item() < 0.95 * first
    assert all(s.master.dtype == torch.float32 for u in engine.units for s in u.trainable if s.master is not None)
    engine.close()


class Widen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_an_fp16_backbone_with_an_fp32_head_trains_in_one_engine(ranks: Ranks) -> None:
    ranks.run(fp16_backbone_with_an_fp32_head, world_size=2)


class Normalized(nn.Module):
    """Its running variance grows far beyond 65504, the largest number of fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x * 1000.0)).float()


def evaluates_alike() -> None:
    outputs = []
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 8, generator=draw) for _ in range(20)]
    for precision in ("fp16-autocast", "fp32"):
        torch.manual_seed(0)
        engine = sf.Engine(Normalized(), optimizer=ADAMW, layout="zero3", precision=precision)
        for x in batches:
            engine.backward((engine(x) - 1.0).square().mean())
            engine.step()
        saved = engine.state_dict()
        assert saved["norm.running_var"].dtype == torch.float32
        assert saved["norm.running_var"].min() > 65504 and saved["norm.running_var"].isfinite().all()
        engine.close()
        loaded = sf.Engine(Normalized(), layout="zero1", precision=precision)
        loaded.load_state_dict(saved)
        loaded.module.eval()
        with torch.no_grad():
            outputs.append(loaded(batches[0]))
        loaded.close()
    assert torch.allclose(*outputs, atol=2e-2), (outputs[0] - outputs[1]).abs().max()


@pytest.mark.soak
def test_a_running_variance_beyond_fp16_is_kept_saved_and_evaluated(ranks: Ranks) -> None:
    ranks.run(evaluates_alike, world_size=2)


def switches() -> list[object]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    newer = [cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]  # type: ignore[attr-defined]
    return [*newer, cuda.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()]


@pytest.mark.soak
def test_tf32_is_switched_while_an_engine_lives_that_says_so() -> None:
    before = switches()
    for allow in (True, False):
        engine = sf.Engine(nn.Linear(4, 4), precision=sf.Precision(tf32=allow))
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is allow  # type: ignore[attr-defined]
        assert switches()[3:5] == [allow, allow]  # the older names can be read as well
        other = sf.Engine(nn.Linear(4, 4), precision=sf.Precision(compute="bf16", tf32=allow))
        with pytest.raises(ConfigError, match=rf"tf32 is {not allow}, but another engine of this process has {allow}"):
            sf.Engine(nn.Linear(4, 4), precision=sf.Precision(tf32=not allow))
        engine.close()
        engine.close()
        assert switches() != before
        del other
        gc.collect()
        assert switches() == before
    sf.Engine(nn.Linear(4, 4)).close()
    assert switches() == before
    with pytest.raises(LayoutError, match=r"Precision.tf32 is 'on': it is True, False, or None"):
        sf.Precision(tf32="on")  # type: ignore[arg-type]


def starts_exactly(layout: str) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # rank 0's values are everyone's
    model = Net()
    given = {name: value.clone() for name, value in model.state_dict().items()}
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout, precision="bf16")
    state = engine.state_dict()
    rounded = {name: p.dtype for name, p in model.named_parameters()}
    engine.close()
    with sf.meta_init():
        empty = Net()
    engine = sf.Engine(empty, optimizer=ADAMW, layout=layout, precision="bf16", init=sf.Init(weights=state))
    again = engine.state_dict()
    engine.close()
    for name, dtype in rounded.items():
        assert dtype == torch.bfloat16 and state[name].dtype == torch.float32
        assert rank or torch.equal(state[name], given[name])
        assert torch.equal(state[name], again[name]) and not torch.equal(again[name], again[name].bfloat16().float())


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3", "fsdp2"])
def test_the_master_starts_from_the_values_that_were_loaded(ranks: Ranks, layout: str) -> None:
    ranks.run(starts_exactly, layout, world_size=2)


class Fine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def parts(world: int) -> list[list[Tensor]]:
    """Four micro-batches for each rank."""
    draw = torch.Generator().manual_seed(0)
    return [[torch.randn(4, 96, generator=draw) for _ in range(4)] for _ in range(world)]


def plain_sums(world: int, dtype: torch.dtype) -> list[Tensor]:
    """The mean of all micro-batches' bf16 gradients, summed by PyTorch in ``dtype`` on each of ``world`` ranks."""
    torch.manual_seed(0)
    model = Fine().bfloat16()
    totals = [torch.zeros(p.shape) for p in model.parameters()]
    for mine in parts(world):
        sums = [torch.zeros(p.shape, dtype=dtype) for p in model.parameters()]
        for x in mine:
            model.zero_grad()
            model(x.bfloat16()).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad
        for total, part in zip(totals, sums, strict=True):
            total += part.float() / (4 * world)
    return totals


def accumulated(layout: str, grads: str) -> tuple[float, float]:
    """How far gradients summed over 4 micro-batches are from PyTorch's in fp32 and bf16, relative to the largest."""
    torch.manual_seed(0)
    precision = sf.Precision(compute="bf16", reduce=grads, grads=grads)
    engine = sf.Engine(Fine(), optimizer=ADAMW, layout=layout, precision=precision, accumulate=4)
    for x in parts(engine.world_size)[engine.rank]:
        engine.backward(engine(x))
    found = [0.0, 0.0]
    with engine.gathered(of="grads") as mine:
        for i, dtype in enumerate((torch.float32, torch.bfloat16)):
            for a, b in zip(mine.values(), plain_sums(engine.world_size, dtype), strict=True):
                assert a.dtype == TORCH_DTYPES[grads]
                found[i] = max(found[i], ((a.float() - b).abs().max() / b.abs().max()).item())
    engine.close()
    return found[0], found[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_gradients_accumulate_in_the_dtype_that_grads_says(ranks: Ranks, layout: str, world: int) -> None:
    for from_fp32, from_bf16 in ranks.run(accumulated, layout, "fp32", world_size=world):
        assert from_fp32 <= (0.0 if world == 1 else 1e-6) and from_bf16 > 1e-4
    for from_fp32, from_bf16 in ranks.run(accumulated, layout, "bf16", world_size=world):
        assert from_bf16 <= (0.0 if world == 1 else 3 * 2.0**-8) and from_fp32 > 1e-4


PURE = {role: "bf16" for role in ("compute", "grads", "reduce", "master", "moments")}


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40_000))

    def forward(self) -> Tensor:
        return self.weight.float().sum()


def moved(layout: str, rounding: str) -> Tensor:
    """The weights after 32 steps of 1/8192 each, which is 1/32 of their last digit below 1."""
    engine = sf.Engine(
        Weight(), optimizer=partial(torch.optim.SGD, lr=2.0**-13), layout=layout,
        precision=sf.Precision(**PURE, rounding=rounding),
    )  # fmt: skip
    for _ in range(32):
        engine.backward(engine())
        engine.step()
    weight = engine.state_dict()["weight"].float()
    same = engine.max_over_ranks([weight.double().sum().item(), -weight.double().sum().item()])
    assert same[0] == -same[1]  # on all ranks, also where each rounds all of it
    engine.close()
    return weight


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_stochastic_rounding_keeps_updates_too_small_for_bf16(ranks: Ranks, layout: str) -> None:
    assert torch.equal(ranks.run(moved, layout, "nearest", world_size=2)[0], torch.ones(40_000))
    weight = ranks.run(moved, layout, "stochastic", world_size=2)[0]
    error = weight.double().mean() - (1 - 32 * 2.0**-13)
    assert abs(error) < 6 * 2.0**-8 / 40_000**0.5  # six standard deviations of the mean
    assert weight.unique().numel() > 1


def test_stochastic_rounding_is_refused_where_it_is_not_done() -> None:
    pure = sf.Precision(**PURE, rounding="stochastic")
    with pytest.raises(ConfigError, match=r"but Adagrad has an update and a state of its own"):
        sf.Engine(nn.Linear(4, 4), optimizer=torch.optim.Adagrad, precision=pure)
    with pytest.raises(LayoutError, match=r"'stochastic' with master='bf16'"):
        sf.Precision(rounding="stochastic")
