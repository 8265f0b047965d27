"""Weights that the model writes into in its own forward: what trains under DDP trains here, with the same numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardfold as sf
from shardfold.errors import UsageError
from shardfold.testing import Ranks

LAYOUTS = ("ddp", "zero2", "zero3", "fsdp2", "hsdp", "hpz")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
STEPS = 3


class _Clamped(nn.Module):
    """Keeps a weight small in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.2, 0.2)
        return self.last(torch.tanh(self.first(x)))


class _Momentum(_Clamped):
    """A frozen copy of the first layer follows it (the key encoder of MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.keys.parameters(), self.first.parameters(), strict=True):
                key.mul_(0.5).add_(query, alpha=0.5)
        return self.last(torch.tanh(self.first(x)) + self.keys(x))


class _Given(_Momentum):
    """The same by ``parameter.data = x``, also of what is trained."""

    def forward(self, x: Tensor) -> Tensor:
        for key, query in zip(self.keys.parameters(), self.first.parameters(), strict=True):
            key.data = key.data * 0.5 + query.data * 0.5
        self.last.weight.data = self.last.weight.data.clamp(-0.2, 0.2)
        return self.last(torch.tanh(self.first(x)) + self.keys(x))


class _Twice(_Clamped):
    """A block runs twice in a forward, and writes each time."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.no_grad():
                self.first.bias.add_(0.125)
            x = torch.tanh(self.first(x.detach()))
            x = x + self.last(x).sum()
        return x


class _Codebook(_Clamped):
    """A codebook moves behind its use; nothing of it is needed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizer = nn.Module()
        self.quantizer.codes = nn.Parameter(torch.randn(5, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        codes = self.quantizer.codes
        assert isinstance(codes, Tensor)
        nearest = nn.functional.embedding(torch.cdist(z, codes).argmin(1), codes)
        with torch.no_grad():
            codes.mul_(0.9)
            self.last.bias.mul_(0.5)
        return self.last(z + (nearest - z).detach())


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, other: nn.Module, depth: int) -> Tensor:
        with torch.no_grad():
            self.layer.bias.add_(0.125)
        x = torch.tanh(self.layer(x.detach()))
        return x + other(x, self, depth - 1) if depth else x


class _Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, other: nn.Module, depth: int) -> Tensor:
        x = self.layer(x)
        return x + other(x, self, depth)


class _Entered(nn.Module):
    """A block that writes is called again by one that it calls, so it is gathered while it has what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Writes(), _Calls()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x, self.last, 1)


MODELS: dict[str, Any] = {
    "codebook": _Codebook,
    "clamped": _Clamped,
    "momentum": _Momentum,
    "given": _Given,
    "twice": _Twice,
    "entered": _Entered,
}


def _trained(kind: str, layout: str, precision: str = "fp32") -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights; the layout ``torch`` is DDP itself."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    rank = torch.distributed.get_rank()
    data = torch.randn(STEPS, 2, 4, 6, generator=torch.Generator().manual_seed(1))[:, rank]
    losses: list[float] = []
    if layout == "torch":
        wrapped, optimizer = DistributedDataParallel(model), ADAMW(model.parameters())
        for x in data:
            loss = wrapped(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}
    mesh = {"inter": 2, "intra": 1} if layout == "hsdp" else None
    engine = sf.Engine(
        model, optimizer=ADAMW, layout=layout, precision=precision, parallel=mesh, init=sf.Init(units=["first", "last"])
    )
    for x in data:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    state = engine.state_dict()
    engine.close()
    return losses, state


@pytest.mark.sampled(10)
@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_what_forward_writes_into_weights_stays(ranks: Ranks, kind: str, layout: str) -> None:
    """Losses and weights are DDP's."""
    plain = ranks.run(_trained, kind, "torch", world_size=2)
    ours = ranks.run(_trained, kind, layout, world_size=2)
    for (losses, state), (expected, weights) in zip(ours, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def _written_in_16_bit(layout: str) -> list[float]:
    losses, state = _trained("clamped", layout, "bf16")
    _, before = _trained("momentum", layout, "bf16")
    return [*losses, float(state["last.weight"].abs().max()), float(before["keys.weight"].sum())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ("zero3", "hpz"))
def test_a_finer_master_follows(ranks: Ranks, layout: str) -> None:
    """Under bf16, where the master has more digits than what forward writes into, split layouts do as ``ddp`` does."""
    expected = ranks.run(_written_in_16_bit, "ddp", world_size=2)
    for mine, theirs in zip(ranks.run(_written_in_16_bit, layout, world_size=2), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2**-6)  # a few roundings of bf16, which sums in another order


def _saved(folder: str, layout: str) -> tuple[float, float]:
    torch.manual_seed(0)
    model = _Given()
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.0), layout=layout)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()
    engine.save(Path(folder) / layout, wait=True)
    with engine.gathered("keys.weight") as weight:
        seen = float(weight.sum())
    engine.close()
    return seen, float(sf.load_model(Path(folder) / layout, _Given()).keys.weight.sum())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ("ddp", "zero3", "hpz"))
def test_what_forward_gives_to_a_weight_is_saved(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """A checkpoint has what ``parameter.data = x`` put there in forward."""
    for seen, saved in ranks.run(_saved, str(tmp_path), layout, world_size=2):
        assert saved == pytest.approx(seen, rel=1e-6)


def _behind_a_forward(how: str) -> list[float]:
    """A layout that keeps parameters whole from forward to backward: a forward, no backward, and then other values."""
    torch.manual_seed(0)
    layout = sf.PRESETS["fsdp2"].replace(held=sf.Cell(dtype="compute", over=()))
    engine = sf.Engine(
        _Clamped(), optimizer=partial(torch.optim.SGD, lr=0.0), layout=layout, init=sf.Init(units=["first", "last"])
    )
    x = torch.ones(2, 6)
    engine.backward(engine(x).sum())
    engine.step()
    engine(x)  # writes, keeps the units full, and no backward comes
    seen = [float(engine.state_dict()["last.weight"].abs().max())]
    state = {name: torch.full_like(value, 0.125) for name, value in engine.state_dict().items()}
    if how == "load_state_dict":
        engine.load_state_dict(state)
    else:
        average = sf.Average(engine, decay=0.5)
        with average.applied():
            engine(x)
        engine.load_state_dict(state)
    out = engine(x).detach()
    seen += [float(engine.state_dict()["last.weight"][0, 0]), float(out[0, 0])]
    engine.close()
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ("load_state_dict", "average"))
def test_values_given_behind_a_forward_without_backward_are_there(ranks: Ranks, how: str) -> None:
    """Units that stayed full for a backward that did not come have neither the old values nor bring them back."""
    model = _Clamped()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.125)
    expected = float(model(torch.ones(2, 6)).detach()[0, 0])
    for most, value, out in ranks.run(_behind_a_forward, how, world_size=2):
        assert most <= 0.2 + 1e-6 and value == 0.125
        assert out == pytest.approx(expected, rel=1e-5)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Clamped()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum(1, keepdim=True) + x


def _recomputed_block(activations: Any) -> str:
    engine = sf.Engine(
        nn.Sequential(_Block(), _Block()),
        optimizer=ADAMW,
        layout="zero3",
        activations=activations,
        init=sf.Init(units=["0", "1"]),
    )
    try:
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()
    except sf.ShardfoldError as error:
        return str(error)
    finally:
        engine.close()
    return "trained"


@pytest.mark.soak
def test_a_forward_that_writes_is_not_recomputed(ranks: Ranks) -> None:
    """It would write once more in backward: refused, with the mode that works."""
    for mode in ("recompute", "select"):
        for said in ranks.run(_recomputed_block, mode, world_size=2):
            assert said.startswith("'0' writes into its weight 'weight' in forward") and "'0': 'keep'" in said
    for mode in ("keep", "host"):
        assert ranks.run(_recomputed_block, mode, world_size=2) == ["trained"] * 2


def _as_numpy() -> list[float]:
    engine = sf.Engine(
        _Clamped(), optimizer=partial(torch.optim.SGD, lr=0.0), layout="zero3", init=sf.Init(units=["first", "last"])
    )
    with engine.gathered("last.weight") as weight:
        array = weight.detach().numpy()
    kept = array.copy()
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()
    worst = float(abs(engine.state_dict()["last.weight"].clamp(-0.2, 0.2).numpy() - kept.clip(-0.2, 0.2)).max())
    same = float(abs(array - kept).max())
    engine.close()
    return [worst, same]


def test_an_array_of_a_lent_weight_keeps_its_memory(ranks: Ranks) -> None:
    """NumPy shares memory that cannot be given back then: the array stays as it was, and training goes on."""
    assert ranks.run(_as_numpy, world_size=2) == [[0.0, 0.0]] * 2


class _Unseen(_Clamped):
    def forward(self, x: Tensor) -> Tensor:
        self.last.weight.data.mul_(0.5)
        return self.last(self.first(x))


def _debugged() -> str:
    torch.manual_seed(0)
    engine = sf.Engine(
        _Unseen(),
        optimizer=ADAMW,
        layout="zero3",
        runtime=sf.Runtime(debug=True),
        init=sf.Init(units=["first", "last"]),
    )
    try:
        engine(torch.ones(2, 6))
    except sf.ShardfoldError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"


def test_debug_finds_writes_that_leave_no_trace(ranks: Ranks) -> None:
    """``weight.data.mul_()`` changes no version: with ``debug=True`` a rank that has a part of the weight names it."""
    said = ranks.run(_debugged, world_size=2)
    assert any(text.startswith("'last.weight' was written by way of .data inside of the model's") for text in said)
    assert "nothing" not in said


def _state_after_a_write(layout: str, precision: str) -> list[float]:
    engine = sf.Engine(nn.Linear(4, 4), optimizer=ADAMW, layout=layout, precision=precision)
    engine.module.load_state_dict({"weight": torch.full((4, 4), 7.0), "bias": torch.zeros(4)})
    loaded = float(engine.state_dict()["weight"][0, 0])
    with torch.no_grad():
        engine.module.weight.fill_(3.0)  # pyright: ignore
    written = float(engine.state_dict()["weight"][0, 0])
    engine.close()
    return [loaded, written]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("layout", ("ddp", "zero1", "zero2"))
def test_a_state_dict_has_what_was_written_before_it(ranks: Ranks, layout: str, precision: str) -> None:
    """Also beside a finer master, with no forward between."""
    assert ranks.run(_state_after_a_write, layout, precision, world_size=2) == [[7.0, 3.0]] * 2


class _Replaced(_Clamped):
    """Points a trained weight at other memory while ``replaces`` is set."""

    replaces = True

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            with torch.no_grad():
                self.last.weight.set_(self.last.weight.clamp(-0.2, 0.2))
        return self.last(torch.tanh(self.first(x)))


def _replaced(layout: str, precision: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = _Replaced()
    engine = sf.Engine(
        model, optimizer=ADAMW, layout=layout, precision=precision, init=sf.Init(units=["first", "last"])
    )
    data = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).chunk(engine.world_size)[engine.rank]
    engine.backward(engine(data.flatten(0, 1)).float().square().mean())
    with pytest.raises(UsageError, match=r"memory of 'last\.weight' was replaced by Tensor\.set_, .* copy_\(\)"):
        engine.step()
    engine.zero_grad()
    model.replaces = False
    for _ in range(2):  # heard again
        engine.backward(engine(data.flatten(0, 1)).float().square().mean())
        assert engine.step().updated
    state = engine.state_dict()["last.weight"].tolist()
    engine.close()
    return state


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "precision", "size"),
    [("ddp", "fp32", 2), ("zero2", "fp32", 2), ("zero3", "fp32", 2), ("ddp", "bf16", 1)],
)
def test_a_weight_whose_memory_is_replaced_says_so(ranks: Ranks, layout: str, precision: str, size: int) -> None:
    """Autograd gives the gradient of such a weight to nobody but ``.grad``, so that ranks would go on with different
    sums: the step says what happened, and without it the weight trains again."""
    first, *others = ranks.run(_replaced, layout, precision, world_size=size)
    assert all(other == first for other in others)


def test_one_rank_trains_a_weight_whose_memory_is_replaced() -> None:
    """Its ``.grad`` is all there is to sum: weights are plain PyTorch's."""
    torch.manual_seed(0)
    plain = _Replaced()
    torch.manual_seed(0)
    engine = sf.Engine(_Replaced(), optimizer=ADAMW, layout="ddp")
    optimizer = ADAMW(plain.parameters())
    for x in torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
        engine.backward(engine(x).square().mean())
        engine.step()
    state = engine.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)
    engine.close()
