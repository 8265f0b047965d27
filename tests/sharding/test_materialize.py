"""Models without memory become real shard by shard, alike under every layout and number of ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardfold as sf
from shardfold.errors import ModelError, UsageError
from shardfold.testing import Ranks
from tests.support import models

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def _state(layout: str, build: str, weights: object = None) -> dict[str, torch.Tensor]:
    with sf.meta_init():
        model = getattr(models, build)()
    assert all(p.is_meta for p in model.parameters())
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout, init=sf.Init(weights=weights, seed=3))
    assert before == {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for batch in models.batches(2):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", ["small", "tied"])
def test_initial_values_do_not_depend_on_layout_or_ranks(ranks: Ranks, build: str) -> None:
    reference = ranks.run(_state, "ddp", build, world_size=1)[0]
    assert all(value.isfinite().all() for value in reference.values())
    for layout in ("zero2", "zero3", "fsdp2"):
        for state in ranks.run(_state, layout, build, world_size=3):
            worst = max((state[k] - reference[k]).abs().max().item() for k in reference)
            assert worst < 1e-5, layout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["file", "folder", "dict"])
def test_weights_are_read_into_the_shards(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    plain = models.small()
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    source = {"file": tmp_path / "model.safetensors", "folder": tmp_path, "dict": values}[kind]
    for batch in models.batches(2):
        plain(*batch).backward()
    optimizer = ADAMW(plain.parameters())
    plain.zero_grad()
    for batch in models.batches(2):
        plain(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks.run(_state, "zero3", "small", source, world_size=2):
        assert max((state[k] - v).abs().max().item() for k, v in plain.state_dict().items()) < 1e-5


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_parameter_that_nothing_initializes_is_named() -> None:
    with sf.meta_init():
        model = nn.Sequential(Bare(), nn.Linear(3, 3))
    with pytest.raises(ModelError, match=r"nothing initializes 0\.scale"):
        sf.Engine(model)


def test_weights_that_do_not_exist_or_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no safetensors file"):
        sf.Engine(models.small(), init=sf.Init(weights=tmp_path / "nothing.safetensors"))
    with pytest.raises(ModelError, match=r"'head.bias' the shape \(3,\)"):
        sf.Engine(models.small(), init=sf.Init(weights={**models.small().state_dict(), "head.bias": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"missing head\.bias; unexpected hed\.bias"):
        state = models.small().state_dict()
        sf.Engine(
            models.small(),
            init=sf.Init(
                weights={**{k: v for k, v in state.items() if k != "head.bias"}, "hed.bias": state["head.bias"]}
            ),
        )


def test_a_tied_parameter_is_found_under_either_name() -> None:
    state = models.tied().state_dict()
    del state["embedding.weight"]
    with sf.meta_init():
        model = models.tied()
    engine = sf.Engine(model, init=sf.Init(weights=state))
    assert torch.equal(engine.state_dict()["embedding.weight"], state["head.weight"])


def test_buffers_stay_real_and_the_context_ends() -> None:
    with sf.meta_init():
        norm = nn.BatchNorm1d(4)
    assert norm.weight.is_meta and not norm.running_var.is_meta  # type: ignore[union-attr]
    assert not nn.Linear(2, 2).weight.is_meta


class Recurrent(nn.Module):
    """Its module keeps weak references to its weights; a buffer is made from one."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones_like(self.head.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.rnn(x)[0]) * self.scale).mean()


def _recurrent(layout: str) -> tuple[float, float]:
    torch.manual_seed(0)
    plain = Recurrent()
    x = torch.ones(3, 2, 4)
    with sf.meta_init():
        model = Recurrent()
    engine = sf.Engine(
        model, optimizer=ADAMW, layout=layout, init=sf.Init(weights=plain.state_dict(), units=["rnn", "head"])
    )
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return loss.item(), plain(x).item()


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_recurrent_modules_and_buffers_made_from_weights_can_be_built_without_memory(ranks: Ranks, layout: str) -> None:
    for mine, plain in ranks.run(_recurrent, layout, world_size=2):
        assert mine == pytest.approx(plain, rel=1e-6)


def test_a_buffer_that_nothing_gives_values_is_named() -> None:
    with sf.meta_init():
        model = Recurrent()
    with pytest.raises(ModelError, match="the buffer scale"):
        sf.Engine(model, optimizer=ADAMW, layout="ddp")


def one_rank_lacks_them(folder: str, how: str) -> str:
    """An engine whose weights are on one rank's disk only, or are damaged there; and what this rank is told."""
    rank = int(os.environ["RANK"])
    mine = Path(folder, f"host{rank}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if rank == 0 or how == "damaged":
        mine.mkdir()
        values = {name: value.clone() for name, value in model.state_dict().items()}
        if rank:
            values["1.bias"] = torch.zeros(5)  # found when its unit is made, behind the broadcasts of others
        save_file(values, mine / "model.safetensors")
    try:
        sf.Engine(model, init=sf.Init(weights=mine / "model.safetensors", units=["0", "1"]))
    except sf.ShardfoldError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_weights_that_one_rank_lacks_end_all_ranks(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """A file that is missing, or other than elsewhere, on one host is told by every rank, and nobody waits for it."""
    said = ranks.run(one_rank_lacks_them, str(tmp_path), how, world_size=2)
    words = "holds no safetensors file" if how == "missing" else "weights give '1.bias' the shape (5,)"
    assert said[1].startswith("ModelError: ") and words in said[1]
    assert said[0].startswith("OrderError: making an engine failed on rank 1: ") and words in said[0]


class Table(nn.Module):
    """Its constructor replaces a parameter, and writes into another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Embedding(4, 2), nn.Linear(2, 2)
        self.rows.weight = nn.Parameter(torch.ones(4, 2))
        self.linear.weight.data.copy_(torch.zeros(2, 2))


def test_values_that_are_loaded_under_meta_init_are_kept_or_refused() -> None:
    """Assigned parameters keep their values; what would be copied into no memory raises one sentence with the remedy.
    What constructors do takes no memory, as before."""
    given = Table().state_dict()
    with sf.meta_init():
        model = Table()
        assert all(p.is_meta for p in model.parameters())
        with pytest.raises(UsageError, match=r"load_state_dict.*'rows.weight'.*weights=.*sharded_init"):
            model.load_state_dict(given)
        with pytest.raises(UsageError, match=r"copy_.*\(4, 2\).*weights=.*sharded_init"):
            model.rows.weight.data.copy_(given["rows.weight"])
        model.linear.weight = nn.Parameter(torch.full((2, 2), 3.0))
        assert model.rows.weight.is_meta and not model.linear.weight.is_meta
        model.load_state_dict(given | {"rows.weight": torch.full((4, 2), 5.0)}, assign=True)
    assert nn.Module.load_state_dict(Table(), given).missing_keys == []
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1))
    assert torch.equal(engine.state_dict()["rows.weight"], torch.full((4, 2), 5.0))
    engine.close()
