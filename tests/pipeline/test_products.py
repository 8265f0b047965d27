"""Checkpoints of products of axes: each is loaded by each other, and by one process."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.testing import Ranks, run_ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.parallel.models import ADAM, VOCAB
from tests.pipeline.training import batches
from tests.support.options import grouped

PARTS, STEPS, LIMIT = 4, 4, 0.1
THREE = {"pipeline": 2, "tensor": 2, "intra": 2}
WAYS: dict[str, tuple[dict[str, int], str]] = {
    "dp2 tp2 pp2 zero1": (THREE, "zero1"),
    "dp2 tp2 pp2 zero2": (THREE, "zero2"),
    "dp2 tp2 pp2 zero3": (THREE, "zero3"),
    "dp2 ep2 pp2": ({"pipeline": 2, "expert": 2, "intra": 2}, "zero2"),
    "tp2 sequence2 dp2": ({"tensor": 2, "sequence": 2, "intra": 2}, "zero3"),
    "pp4": ({"pipeline": 4}, "zero1"),
    "one": ({"intra": 1}, "ddp"),
}


def _model() -> GPT:
    """With experts in its blocks. Without a loss of their balance, which is of what is computed at once."""
    torch.manual_seed(0)
    config = GPTConfig(layers=2, d_model=16, heads=4, d_ff=24, context=12, vocab=VOCAB, experts=4, balance=0.0)
    model = GPT(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.05)
    return model


def _plain() -> tuple[list[float], list[float]]:
    """Losses and norms of one process."""
    model, losses, norms = _model(), list[float](), list[float]()
    optimizer = ADAM(model.parameters())
    for batch in batches(PARTS, STEPS):
        loss = model(*batch)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _compute(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return model(**sf.sequence_shard({"tokens": tokens, "targets": targets}))


def _trains(engine: sf.Engine, first: int) -> None:
    """Two steps, as plain PyTorch does them."""
    losses, norms = _plain()
    for step, batch in list(enumerate(batches(PARTS, STEPS)))[first : first + 2]:
        mine = tuple(t.chunk(engine.data_ranks)[engine.data_rank] for t in batch)
        loss = engine.train_batch(mine, _compute if engine.sequence is not None else None)
        report = engine.step()
        torch.testing.assert_close(engine.mean(loss.item()), losses[step], rtol=1e-12, atol=0)
        torch.testing.assert_close(report.grad_norm, norms[step], rtol=1e-11, atol=0)


def _goes(ways: list[str], path: str, *, load: bool) -> list[tuple[str, str]]:
    """Each of ``ways`` saves behind two steps; or loads what each way has saved, and goes on."""
    done: list[tuple[str, str]] = []
    for way in ways:
        mesh, layout = WAYS[way]
        readers = mesh.get("intra", 1) * mesh.get("expert", 1)
        options: dict[str, Any] = {"tensor": "auto"} if "tensor" in mesh else {}
        engine = sf.Engine(
            _model(),
            optimizer=ADAM,
            **grouped(layout=layout, mesh=mesh, clip_norm=LIMIT, **options),
            accumulate=PARTS // readers,
        )
        if not load:
            _trains(engine, 0)
            engine.save(f"{path}/{way}", wait=True, latest=False)
        for saved in WAYS if load else ():
            report = engine.load(f"{path}/{saved}")
            assert engine.steps == 2 and not report.missing and not report.unexpected, (way, saved)
            _trains(engine, 2)
            done.append((saved, way))
        engine.close()
    return done


@pytest.mark.soak
def test_each_is_loaded_by_each_other(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and norms behind it are those of a run that never stopped, to 1e-11: 49 pairs."""
    sizes: dict[int, list[str]] = {}
    for way, (mesh, _) in WAYS.items():
        sizes.setdefault(prod(mesh.values()), []).append(way)
    done: list[tuple[str, str]] = []
    for load in (False, True):
        for size, ways in sizes.items():
            if size > ranks.num_ranks:
                found = run_ranks(_goes, size, ways, str(tmp_path), load=load, timeout=900)
            else:
                found = ranks.run(_goes, ways, str(tmp_path), load=load, world_size=size)
            done += found[0]
    assert len(done) == len(set(done)) == len(WAYS) ** 2
