"""Products of linear layers in fp8: rounded as the formats are defined, right in forward and backward, and the same
under every layout; what is compared with is written here, in fp32 and fp64 arithmetic on numbers."""

from __future__ import annotations

import copy
import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.activations.modes import MODES
from shardfold.errors import ConfigError, LayoutError, ModelError
from shardfold.numerics._fp8_products import E4M3, E5M2, fp8_linear, rounded
from shardfold.numerics.fp8_layers import Fp8Layers
from shardfold.plan.layout import Precision
from shardfold.plan.rules import Patterns
from shardfold.planner.hardware import DEVICES, Cluster
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.testing import Ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig

SGD = partial(torch.optim.SGD, lr=0.5)
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}  # bits behind the point, least exponent, largest number
RECIPES = {"fp8": False, "fp8-rowwise": True}
NARROW = sf.Precision(linear="fp8")  # all but products of linear layers is in fp32, so that little else rounds


# -- the definition


def on_grid(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 values rounded to the nearest number of a format, ties to even; beyond the largest none comes here."""
    bits, least, _ = FORMATS[dtype]
    _, exponent = torch.frexp(values)  # values = m x 2^exponent, 0.5 <= m < 1
    step = torch.ldexp(torch.ones_like(values), (exponent - 1).clamp(min=least) - bits)
    return torch.round(values / step) * step


def least_scale(most: float, dtype: torch.dtype) -> float:
    """The least power of two, from 2^-126 on, by which ``most`` becomes a number of the format."""
    scale = 2.0**-126
    while most / scale > FORMATS[dtype][2]:
        scale *= 2.0
    return scale


def defined(values: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """What codes and scales stand for, in fp64."""
    wide = values.double()
    if dim is not None:
        return torch.stack([defined(each, dtype) for each in wide.unbind(1 - dim)], 1 - dim)
    scale = least_scale(wide.abs().max().item(), dtype)
    return on_grid(wide / scale, dtype) * scale


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers over 20 octaves, so that some are less than the least step of a format."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * torch.exp2(torch.randint(-18, 3, shape, generator=draw))).to(dtype)


@pytest.mark.parametrize("size", [1.0, 448.0, 1e-30, 1e-38, 2.9e38])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("format_", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_as_the_formats_are_defined(
    dtype: torch.dtype, format_: torch.dtype, dim: int | None, size: float
) -> None:
    """Bit for bit, of small and large numbers, and the scale is the least power of two with which all fit."""
    values = some(8, 24)
    values = (values / values.abs().max() * size).to(dtype)
    if not bool(values.isfinite().all()):
        pytest.skip("fp16 has no such numbers")
    codes, scale = rounded(values, format_, dim)
    assert codes.dtype == format_ and scale.dtype == torch.float32 and codes.is_contiguous()
    assert torch.equal(codes.double() * scale.double(), defined(values, format_, dim))
    tops = values.double().abs().amax() if dim is None else values.double().abs().amax(dim, keepdim=True)
    assert scale.shape == tops.shape
    assert scale.flatten().tolist() == [least_scale(top, format_) for top in tops.flatten().tolist()]


def test_zeros_stay_zeros() -> None:
    codes, scale = rounded(torch.zeros(2, 16), E4M3)
    assert codes.float().eq(0).all() and scale.item() == 2.0**-126


def test_what_a_number_becomes_does_not_depend_on_the_others() -> None:
    """A power of two changes no digits: alone, in a row, in a whole tensor."""
    values = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).abs() + 0.01
    whole, by_row = (codes.float() * scale for codes, scale in (rounded(values, E4M3), rounded(values, E4M3, 1)))
    assert torch.equal(whole, by_row)
    codes, scale = rounded(values[:4, :4] * 2.0**10, E4M3)
    assert torch.equal(codes.float() * scale * 2.0**-10, whole[:4, :4])


# -- forward and backward


class Reference(torch.autograd.Function):
    """The three products, of defined factors, in fp64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rowwise: bool) -> Tensor:
        dim = 1 if rowwise else None
        given = defined(x, E4M3, dim)
        ctx.save_for_backward(given, w)
        ctx.rowwise = rowwise
        return (given @ defined(w, E4M3, dim).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (given, w) = grads, ctx.saved_tensors
        rows, columns = (1, 0) if ctx.rowwise else (None, None)
        of_x = defined(g, E5M2, rows) @ defined(w, E4M3, columns)
        of_w = defined(g, E5M2, columns).t() @ (defined(given, E4M3, columns) if ctx.rowwise else given)
        return of_x.to(g.dtype), of_w.to(w.dtype), None


def three(product: Any, x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
    """An output, and gradients of both factors."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = product(x, w)
    y.backward(g)
    return [y.detach(), x.grad, w.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [1, 24, 32])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_rounded_factors(dtype: torch.dtype, recipe: str, native: bool, rows: int) -> None:
    """To the rounding of fp32 sums, and of the dtype of what is given; sums over rows that are no multiple of 16 too;
    by PyTorch's kernel and by the emulation."""
    rowwise = RECIPES[recipe]
    x, w, g = (
        some(rows, 32, seed=1, dtype=dtype),
        some(48, 32, seed=2, dtype=dtype),
        some(rows, 48, seed=3, dtype=dtype),
    )
    found = three(lambda x, w: fp8_linear(x, w, None, rowwise=rowwise, native=native), x, w, g)
    wide = three(lambda x, w: Reference.apply(x, w, rowwise), x, w, g)
    sums = [
        x.abs().double() @ w.abs().double().t(),
        g.abs().double() @ w.abs().double(),
        g.abs().double().t() @ x.abs().double(),
    ]
    for mine, other, terms in zip(found, wide, sums, strict=True):
        assert mine.dtype == dtype and mine.shape == other.shape
        of_sum = 1.2 * terms * 2.0**-21  # of a sum of 48 terms, each rounded by 1/16 at most
        assert bool(((mine.double() - other.double()).abs() <= of_sum + torch.finfo(dtype).eps * other.abs()).all())


def test_a_bias_is_added_and_leading_dimensions_stay() -> None:
    x, w, b = some(2, 3, 16), some(32, 16), torch.randn(32)
    y = fp8_linear(x, w, b, rowwise=False, native=True)
    assert torch.equal(y, fp8_linear(x.view(6, 16), w, None, rowwise=False, native=True).view(2, 3, 32) + b)


def test_no_tokens_are_no_error() -> None:
    """As those of an expert that none is sent to."""
    x, w = torch.zeros(0, 16, requires_grad=True), torch.ones(32, 16, requires_grad=True)
    fp8_linear(x, w, None, rowwise=False, native=True).sum().backward()
    assert w.grad is not None and not w.grad.any()


def test_under_autocast_outputs_have_its_dtype_and_sums_do_not() -> None:
    """The emulation multiplies in fp32 there as well: of codes of 256, sums are beyond fp16."""
    x, w = torch.ones(8, 64), torch.ones(16, 64)
    with torch.autocast("cpu", torch.float16):
        found = [fp8_linear(x, w, None, rowwise=False, native=native) for native in (True, False)]
    assert all(torch.equal(each, torch.full((8, 16), 64.0).half()) for each in found)


def log_uniform(*shape: int, seed: int) -> Tensor:
    """Signed numbers whose digits are spread as those of measured ones, over 4 octaves."""
    draw = torch.Generator().manual_seed(seed)
    return torch.exp2(4 * torch.rand(shape, generator=draw)) * (torch.randint(0, 2, shape, generator=draw) * 2 - 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_error_is_that_of_the_formats(recipe: str) -> None:
    """A number m x 2^e with 1 <= m < 2 is off by up to half of 2^(e - bits), evenly: of e4m3 2^-3 / sqrt(12) against
    sqrt(3 / (2 ln 2)) for m, 2.45 %; of e5m2 twice that. Errors of factors add up as squares: 3.47 % of y, 5.49 % of
    dx and dw."""
    e4m3 = 2.0**-3 / math.sqrt(12) / math.sqrt(3 / (2 * math.log(2)))
    x, w, g = (log_uniform(256, 256, seed=seed) for seed in range(3))
    found = three(lambda x, w: fp8_linear(x, w, None, rowwise=RECIPES[recipe], native=True), x, w, g)
    exact = three(F.linear, x, w, g)
    for mine, other, squares in zip(found, exact, (1 + 1, 4 + 1, 4 + 1), strict=True):
        off = ((mine - other).norm() / other.norm()).item()
        assert off == pytest.approx(e4m3 * math.sqrt(squares), rel=0.05)


# -- inf and NaN


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_never_hidden(recipe: str, native: bool, where: str, value: float) -> None:
    """All of the tensor (rowwise: of the row or column) is NaN, and so is what is multiplied by it."""
    x, w, g = (torch.ones(n, m, dtype=torch.bfloat16) for n, m in ((16, 32), (48, 32), (16, 48)))
    {"input": x, "weight": w, "gradient": g}[where][3, 5] = value
    y, of_x, of_w = three(lambda x, w: fp8_linear(x, w, None, rowwise=RECIPES[recipe], native=native), x, w, g)
    if where != "gradient":
        assert y.isnan().all() if recipe == "fp8" else (y[3] if where == "input" else y[:, 3]).isnan().all()
    if where != "input":
        assert of_x.isnan().any()
    if where != "weight":
        assert of_w.isnan().any()


def test_a_step_that_is_not_finite_is_skipped() -> None:
    """Under fp16 with products in fp8 the loss scale falls, weights stay, and the next step goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4))
    engine = sf.Engine(model, optimizer=SGD, precision=sf.Precision(compute="fp16", linear="fp8"))
    for bad, x in ((True, torch.full((4, 16), torch.inf)), (False, torch.ones(4, 16))):
        before = engine.state_dict()
        engine.backward(engine(x).square().mean())
        report = engine.step()
        same = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        assert (report.skipped, same) == (bad, bad)
    engine.close()


# -- training


class Layer(nn.Module):
    def __init__(self, product: Any = None) -> None:
        super().__init__()
        self.inner, self.product = nn.Linear(32, 32), product

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        y = inner(x) if self.product is None else self.product(x, inner.weight, False) + inner.bias
        return x + F.silu(y)


class Net(nn.Module):
    """Its layers but the last are in fp8."""

    def __init__(self, product: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(product) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(16, 32, generator=draw), torch.randn(16, 8, generator=draw)


def plain(ranks: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The reference's training: each rank rounds its own part of a batch."""
    torch.manual_seed(0)
    model = Net(Reference.apply)
    optimizer, losses = SGD(model.parameters()), []
    for step in range(steps):
        parts = list(zip(*(each.chunk(ranks) for each in batch(step)), strict=True))
        every = [(model(x) - y).square().mean() / ranks for x, y in parts]
        sum(every).backward()  # type: ignore[union-attr]
        losses.append(sum(loss.item() for loss in every))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def trained(
    layout: str, precision: Any = NARROW, accumulate: int = 1, mesh: Any = None, activations: Any = None
) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = sf.Engine(
        Net(), optimizer=SGD, layout=layout, precision=precision, accumulate=accumulate, parallel=mesh,
        activations=activations,
    )  # fmt: skip
    losses = []
    for step in range(3):
        x, y = (each.chunk(engine.data_ranks)[engine.data_rank] for each in batch(step))
        total = 0.0
        for part, target in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = (engine(part) - target).square().mean()
            engine.backward(loss)
            total += loss.item() / accumulate
        engine.step()
        losses.append(engine.mean(total))
    found = {"losses": losses, "state": engine.state_dict()}
    engine.close()
    found["own"] = all("forward" not in vars(module) for module in engine.module.modules())
    return found


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_two_ranks_train_as_the_reference(ranks: Ranks, layout: str) -> None:
    """Losses and weights, to fp32 rounding; each rank's scales are those of what it has of a batch."""
    losses, state = plain(2, 3)
    for found in ranks.run(trained, layout, world_size=2):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert all(torch.allclose(found["state"][name], value, atol=1e-5) for name, value in state.items())
        assert found["own"]


@pytest.mark.product
@pytest.mark.parametrize("layout", list(sf.PRESETS))
@pytest.mark.parametrize("precision", list(RECIPES))
def test_all_layouts_train_alike(ranks: Ranks, precision: str, layout: str) -> None:
    """Bit for bit, with micro-batches."""
    mesh = {"inter": 2, "intra": 1} if layout in ("hsdp", "hpz") else None
    given = ranks.run(trained, "ddp", precision, 2, world_size=2)[0]
    found = ranks.run(trained, layout, precision, 2, mesh, world_size=2)[0]
    assert found["losses"] == given["losses"]
    assert all(torch.equal(found["state"][name], value) for name, value in given["state"].items())


def modes(layout: str) -> None:
    """Of blocks, and of a layer whose own forward stands in place of another already."""
    kept = trained(layout, "fp8")
    for where, mode in (*(("blocks", mode) for mode in MODES if mode != "int8"), ("*.inner", "host")):
        found = trained(layout, "fp8", activations={where: sf.Activations(mode=mode, smallest=0), "*": "keep"})
        assert found["losses"] == kept["losses"], mode
        assert all(torch.equal(found["state"][name], value) for name, value in kept["state"].items()), mode
        assert found["own"], mode


def test_backward_recomputes_and_moves_the_same_codes(ranks: Ranks) -> None:
    ranks.run(modes, "zero3", world_size=2)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=64, d_model=64, layers=2, heads=2, context=16))


class Pair(nn.Module):
    """Two layers that ranks share, by columns and by rows; and a bias, which is added once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.silu(self.up(x))))


def pair_losses(precision: Any, tensor: Any, mesh: dict[str, int]) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine = sf.Engine(
        Pair(), optimizer=SGD, layout="ddp", precision=precision, parallel=sf.Parallel(mesh=mesh, tensor=tensor)
    )
    losses = []
    for step in range(3):
        x, y = batch(step)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    said = engine.explain()
    engine.close()
    return losses, said


@pytest.mark.parametrize("layer", ["up", "down"])
def test_ranks_that_share_layers_multiply_their_parts_in_fp8(ranks: Ranks, layer: str) -> None:
    """As one rank does, also where the scale of a part is another than that of the whole; the others in fp32."""
    precision, plan = {layer: NARROW, "*": "fp32"}, {"up": "column", "down": "row"}
    alone, _ = pair_losses(precision, None, {"intra": 1})
    wide, _ = pair_losses("fp32", None, {"intra": 1})
    assert abs(alone[0] - wide[0]) > 1e-5 * wide[0]
    for losses, said in ranks.run(pair_losses, precision, plan, {"intra": 1, "tensor": 2}, world_size=2):
        assert losses == pytest.approx(alone, rel=2e-6)
        assert f"products in fp8 (torch._scaled_mm): {layer};" in said


def staged(order: str) -> list[float]:
    engine = sf.Engine(
        gpt(), optimizer=SGD, layout="ddp", precision="fp8", accumulate=4,
        parallel=sf.Parallel(mesh={"pipeline": 2}, pipeline=order),
    )  # fmt: skip
    losses, draw = [], torch.Generator().manual_seed(0)
    for _ in range(2):
        tokens = torch.randint(0, 64, (8, 16), generator=draw)
        losses.append(engine.train_batch((tokens, tokens)).item())
        engine.step()
    assert "products in fp8" in engine.explain()
    engine.close()
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", ["1f1b", "zb-h1"])
def test_stages_train_as_one_rank(ranks: Ranks, order: str) -> None:
    engine = sf.Engine(gpt(), optimizer=SGD, precision="fp8", accumulate=4)
    losses, draw = [], torch.Generator().manual_seed(0)
    for _ in range(2):
        tokens = torch.randint(0, 64, (8, 16), generator=draw)
        every = []
        for part in tokens.chunk(4):
            every.append(engine(part, part).mean())
            engine.backward(every[-1])
        engine.step()
        losses.append(sum(loss.item() for loss in every) / 4)
    engine.close()
    assert ranks.run(staged, order, world_size=2) == [pytest.approx(losses, rel=1e-6)] * 2


# -- the model and its state


def test_names_and_dtypes_are_those_of_bf16_and_copies_are_plain() -> None:
    made = {}
    for precision in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = Net()
        engine = sf.Engine(model, optimizer=SGD, precision=precision)
        engine.backward(engine(batch(0)[0]).square().mean())
        state = engine.state_dict()
        made[precision] = (
            [(n, v.dtype, v.shape) for n, v in state.items()],
            [p.dtype for p in engine.module.parameters()],
        )
        twin = copy.deepcopy(model)
        assert all("forward" not in vars(module) for module in twin.modules())
        assert type(twin.get_submodule("blocks.0.inner")) is nn.Linear
        engine.close()
    assert made["bf16"] == made["fp8"]


def test_copies_under_two_forwards_are_plain() -> None:
    """A mode of activations stands around a product in fp8; the module itself has neither once the engine is closed."""
    model, inner = Net(), "blocks.0.inner"
    engine = sf.Engine(model, optimizer=SGD, precision="fp8", activations={"*.inner": "host", "*": "keep"})
    assert "forward" in vars(model.get_submodule(inner))
    assert "forward" not in vars(copy.deepcopy(model).get_submodule(inner))
    engine.close()
    assert "forward" not in vars(model.get_submodule(inner))


def test_an_evaluation_multiplies_as_training_does() -> None:
    engine = sf.Engine(gpt(), optimizer=SGD, precision="fp8")
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    trains = engine(tokens)
    engine.module.eval()
    with torch.no_grad():
        assert torch.equal(engine(tokens), trains)
    engine.close()


def test_layers_that_are_added_later_multiply_in_fp8_too() -> None:
    model = Net()
    engine = sf.Engine(model, optimizer=SGD, precision="fp8")
    model.blocks.append(Layer())
    engine.backward(engine(batch(0)[0]).square().mean())
    engine.step()
    assert "blocks.*.inner x 4;" in engine.explain()
    engine.close()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_traces_it_whole() -> None:
    """Without a break of the graph, and with the numbers of the eager run."""
    torch.manual_seed(0)
    model = Net().bfloat16()
    layers = Fp8Layers(model, Patterns(["*"], "precision"), [Precision.named("fp8")])
    layers.attach()
    x = batch(0)[0].bfloat16()
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        y = run(x)
        found.append((y, *torch.autograd.grad(y.float().square().mean(), [*model.parameters()])))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_codes_are_what_is_kept_for_backward() -> None:
    """1 byte for each element of an input and 4 for its scale, where bf16 keeps 2 for an element."""
    kept = {}
    for precision in ("bf16", "fp8"):
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32))
        engine = sf.Engine(model, optimizer=SGD, precision=precision)
        with engine.count_saved() as report:
            engine.backward(engine(torch.randn(24, 32, requires_grad=True)).square().sum())
        kept[precision] = report.device
        engine.close()
    assert kept["bf16"] - kept["fp8"] == 24 * (32 + 64) - 2 * 4


# -- what does not multiply in fp8


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.gate, self.up, self.odd = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 10)
        self.other, self.normed, self.tied = Doubling(16, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.head = nn.Linear(16, 16)
        self.tied.weight = self.embedding.weight
        nn.utils.parametrizations.weight_norm(self.normed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.normed(self.other(self.gate(x)))
        return self.head(self.tied(x)[..., :16]).sum() + self.odd(self.up(x)).sum()


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_is_not_in_fp8_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Once in the log, on rank 0, and by explain()."""
    with caplog.at_level(logging.INFO, logger="shardfold"):
        engine = sf.Engine(Mixed(), optimizer=SGD, precision="fp8")
    said = engine.explain()
    engine.backward(engine(torch.zeros(2, 4, dtype=torch.int64)))
    engine.step()
    engine.close()
    for line in (
        "products in fp8 (torch._scaled_mm): up; inputs and weights e4m3, gradients e5m2",
        "  not in fp8 (a router): gate",
        "  not in fp8 (sides are no multiples of 16): odd",
        "  not in fp8 (computes in its own way): other",
        "  not in fp8 (its weight is computed): normed",
        "  not in fp8 (an embedding's weight): tied",
        "  not in fp8 (the last linear layer): head",
        "  not in fp8: what is no nn.Linear",
    ):
        assert line in said.splitlines() and caplog.text.count(line) == 1


def test_rules_say_which_layers_and_how() -> None:
    """A rule that names the last layer or a router has its way; one of bf16 leaves blocks out."""
    rules = {"head": "fp8", "gate": "fp8-rowwise", "up": "bf16", "*": "fp8"}
    engine = sf.Engine(Mixed(), optimizer=SGD, precision=rules)
    said = engine.explain().splitlines()
    engine.close()
    assert "products in fp8 (torch._scaled_mm): head; inputs and weights e4m3, gradients e5m2" in said
    assert "products in fp8-rowwise (torch._scaled_mm): gate; inputs and weights e4m3, gradients e5m2" in said
    assert not any("up" in line for line in said if "in fp8" in line)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"Precision.linear is 'fp9', which is no recipe. Did you mean 'fp8'\?"):
        sf.Precision(linear="fp9")
    with pytest.raises(LayoutError, match=r"Precision.linear is 'fp8' with compute 'fp64'"):
        sf.Precision(compute="fp64", master="fp64", linear="fp8")
    with pytest.raises(ModelError, match=r"no linear layer of Sequential can have them \(0: sides are no multiples"):
        sf.Engine(nn.Sequential(nn.Linear(8, 8)), precision="fp8")
    with pytest.raises(ModelError, match=r"no linear layer of Linear can have them \(Linear: sides are no multiples"):
        sf.Engine(nn.Linear(8, 8), precision="fp8")
    with pytest.raises(ConfigError, match="a plan with products in fp8 for A100-80G: it has none"):
        PlannedRank.on(Cluster(DEVICES["A100-80G"]), precision="fp8")


def test_ranks_with_other_recipes_are_told(ranks: Ranks) -> None:
    ranks.run(_unlike, world_size=2)


def _unlike() -> None:
    with pytest.raises(ConfigError, match=r"precision.linear=fp8"):
        sf.Engine(Net(), optimizer=SGD, precision="fp8" if dist.get_rank() else "bf16")


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, w = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16, requires_grad=True)
    y = fp8_linear(x, w, None, rowwise=False, native=True)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# -- plans


def test_a_plan_knows_the_rate_of_fp8() -> None:
    """Operations of linear layers but the head's are counted as fp8, at the rate that the maker prints."""
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    found = Subject(gpt(), (tokens, tokens)).trace("fp8").works.products
    fp8 = sum(p.numel() for name, p in gpt().named_parameters() if p.dim() == 2 and "blocks" in name)
    assert found["fp8"].sum() == 6 * fp8 * tokens.numel()
    assert DEVICES["H100"].rate("fp8") == 1979e12
    assert DEVICES["A100-80G"].rate("fp8") == DEVICES["A100-80G"].rate("fp32")


# -- long


def curve(precision: str, seed: int, steps: int = 150) -> list[float]:
    """Mean losses of every 30 steps, each on new letters of a text that repeats words with gaps, while the rate falls
    to 0."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab=32, d_model=64, layers=2, heads=2, context=32))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    falls = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, steps)
    engine = sf.Engine(model, optimizer=adam, layout="zero2", precision=precision, clip_norm=1.0, lr_schedule=falls)
    draw = torch.Generator().manual_seed(1000 * seed + engine.rank)
    words = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(7))
    losses = []
    for _ in range(steps):
        text = words[torch.randint(0, 16, (8, 5), generator=draw)].flatten(1)[:, :33]
        noise = torch.rand(text.shape, generator=draw) < 0.05
        text = torch.where(noise, torch.randint(0, 32, text.shape, generator=draw), text)
        loss = engine(text[:, :-1], text[:, 1:]).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    means = [engine.mean(sum(losses[i : i + 30]) / 30) for i in range(0, steps, 30)]
    engine.close()
    return means


@pytest.mark.soak
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_losses_are_within_half_a_percent_of_those_of_bf16(ranks: Ranks, recipe: str) -> None:
    """The means over three seeds, at each part of the curve."""
    seeds = (0, 1, 2)
    every = {
        precision: torch.tensor(
            [ranks.run(curve, precision, seed, world_size=2, timeout=900)[0] for seed in seeds]
        ).mean(0)
        for precision in ("bf16", recipe)
    }
    off = (every[recipe] / every["bf16"] - 1).abs()
    assert off.max() <= 0.005, every
