"""Optimizers whose update of an element reads others of its parameter, for parameters that are cut along tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.parallel.models import batches, loss_of, make, part

STEPS = 4


def muon(model: nn.Module) -> Any:
    return sf.optim.Muon(
        # eps: see ADAM in models.py
        sf.optim.muon_groups(model, lr=0.02, adamw_lr=0.01, others=["*head*", "*embed*"], adamw_eps=1e-3),
        ns_dtype=torch.float64,
    )


def galore(model: nn.Module) -> Any:
    groups = sf.optim.galore_groups(
        model, rank=3, update_proj_gap=2, scale=0.5, others=["*head*", "*embed*"], lr=0.01, eps=1e-3
    )
    return sf.optim.GaLore(groups, lr=0.02, eps=1e-3)


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "muon": muon,
    "galore": galore,
    "lamb": lambda model: sf.optim.LAMB(model.parameters(), lr=0.02),
    "adafactor": lambda model: sf.optim.Adafactor(model.parameters(), lr=0.02),
}


def _plain(name: str, kind: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = make(name), []
    optimizer = MAKE[kind](model)
    for batch in batches(steps):
        loss = loss_of(model, *batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def _engine(name: str, kind: str, layout: str, size: int) -> sf.Engine:
    model = make(name)
    return sf.Engine(
        model, optimizer=MAKE[kind](model), layout=layout, parallel=sf.Parallel(mesh={"tensor": size}, tensor="auto")
    )


def _step(engine: sf.Engine, batch: Any) -> float:
    tokens, targets = (each.chunk(engine.data_ranks)[engine.data_rank] for each in batch)
    loss = loss_of(engine, tokens, targets)
    engine.backward(loss)
    engine.step()
    return engine.mean(loss.item())


def _trains(name: str, cases: list[tuple[str, str]], size: int, folder: str) -> None:
    for kind, layout in cases:
        losses, whole = _plain(name, kind, STEPS)
        engine = _engine(name, kind, layout, size)
        for step, batch in enumerate(batches(STEPS)):
            assert _step(engine, batch) == pytest.approx(losses[step], rel=1e-12), (kind, layout, step)
            if step == 1:
                engine.save(f"{folder}/{kind}-{layout}", latest=False)
        moved = {row.purpose: (row.sent, row.program) for row in engine.traffic().rows if row.purpose == "update"}
        assert bool(moved) == (kind in ("muon", "galore"))
        assert all(sent == program for sent, program in moved.values()), moved
        with engine.gathered():
            for key, value in engine.module.named_parameters():
                torch.testing.assert_close(
                    value.detach(), part(engine, key, whole[key].detach()), rtol=1e-12, atol=1e-12,
                    msg=lambda text, key=key, case=(kind, layout): f"{case} {key}: {text}",
                )  # fmt: skip
        assert sf.numerics.replicas(engine) == []
        engine.close()


def _goes_on(name: str, kind: str, layout: str, size: int, folder: str) -> None:
    losses, _ = _plain(name, kind, STEPS)
    engine = _engine(name, kind, "zero1", size)
    engine.load(f"{folder}/{kind}-{layout}")
    for step, batch in enumerate(batches(STEPS)):
        if step >= 2:
            assert _step(engine, batch) == pytest.approx(losses[step], rel=1e-12), (kind, step)
    engine.close()


CASES = [("muon", "zero3"), ("galore", "zero2"), ("lamb", "zero1"), ("adafactor", "zero2")]


def test_the_update_is_that_of_whole_matrices(ranks: Ranks, tmp_path: Any) -> None:
    """Two ranks along tensor beside two of data train as one process does with the whole of every matrix, queries, keys
    and values in one among them, and send what is said; what was saved goes on without the axis."""
    ranks.run(_trains, "gpt", CASES, 2, str(tmp_path), world_size=4)
    for kind, layout in CASES:
        ranks.run(_goes_on, "gpt", kind, layout, 1, str(tmp_path), world_size=2)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpt-tied", "llama-1kv", "gpt2", "bert", "mixtral"])
@pytest.mark.parametrize(("size", "world"), [(2, 2), (2, 4), (4, 4)])
def test_every_model(ranks: Ranks, tmp_path: Any, name: str, size: int, world: int) -> None:
    """The same of other models and sizes, under every layout of data."""
    layouts = ("ddp",) if size == world else ("zero1", "zero2", "zero3")
    # A bias of keys has gradients of rounding errors alone, which Adafactor's steps bring to the size of all others.
    left_out = {("gpt2", "adafactor"), ("bert", "adafactor")}
    kinds = [kind for kind in MAKE if (name, kind) not in left_out]
    ranks.run(_trains, name, [(k, layout) for k in kinds for layout in layouts], size, str(tmp_path), world_size=world)
