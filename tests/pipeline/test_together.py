"""Stages beside other axes: any product of data, tensor, sequence and stages trains like one process."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.testing import Ranks, run_ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of, plain
from tests.support.options import grouped

MODEL, STEPS, PARTS = "gpt-tied", 4, 4
CUT: dict[str, Any] = {"tensor": "auto"}


def _compute(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return model(**sf.sequence_shard({"tokens": tokens, "targets": targets}))


def _goes(mesh: dict[str, int], layout: str, options: dict[str, Any], first: int, load: str, save: str) -> None:
    """Two steps from the ``first`` on: losses and norms are plain PyTorch's, and so is an evaluation behind them."""
    model = model_of(MODEL)
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        **grouped(layout=layout, mesh=mesh, clip_norm=0.1, **options),
        accumulate=PARTS // _readers(mesh),
    )
    assert engine.data_ranks == _readers(mesh)
    how = _compute if engine.sequence is not None else compute
    losses, norms, _, _ = plain(MODEL, PARTS, STEPS)
    if load:
        engine.load(load)
    micro = engine.accumulate
    for step, batch in list(enumerate(batches(PARTS, STEPS)))[first : first + 2]:
        mine = tuple(t.chunk(engine.data_ranks)[engine.data_rank] for t in batch)
        here = losses[step][engine.data_rank * micro :][:micro]
        loss = engine.train_batch(mine, how)
        torch.testing.assert_close(loss.item(), sum(here) / micro, rtol=1e-12, atol=0)
        report = engine.step()
        torch.testing.assert_close(report.grad_norm, norms[step], rtol=1e-11, atol=0)
    if first + 2 < STEPS:
        mine = tuple(t.chunk(engine.data_ranks)[engine.data_rank] for t in batches(PARTS, STEPS)[first + 2])
        behind = losses[first + 2][engine.data_rank * micro :][:micro]
        torch.testing.assert_close(engine.eval_batch(mine, how).item(), sum(behind) / micro, rtol=1e-12, atol=0)
    if save:
        engine.save(save, wait=True)
    engine.close()


def _run(ranks: Ranks, mesh: dict[str, int], *args: Any) -> None:
    count = prod(mesh.values())
    if count <= ranks.num_ranks:
        ranks.run(_goes, mesh, *args, world_size=count)
    else:
        run_ranks(_goes, count, mesh, *args)


def _readers(mesh: dict[str, int]) -> int:
    return mesh.get("intra", 1) * mesh.get("inter", 1)


CASES: list[Any] = [
    ({"pipeline": 2, "sequence": 2}, "zero2", {"activations": "recompute"}),
    ({"pipeline": 2, "tensor": 2}, "zero3", CUT),
]
MORE: list[Any] = [
    *(({"pipeline": 2, "intra": 2, "tensor": 2}, layout, CUT) for layout in ("ddp", "zero1", "zero2", "zero3")),
    *(({"pipeline": 2, "intra": 2, "sequence": 2}, layout, {"pipeline": "interleaved:2"}) for layout in
      ("zero1", "zero3")),
    ({"pipeline": 2, "sequence": 2, "tensor": 2}, "zero1", {**CUT, "attention": "ring"}),
    ({"tensor": 2, "sequence": 2, "intra": 2}, "zero2", CUT),
    ({"pipeline": 2, "inter": 2, "intra": 2}, "hsdp", {}),
    ({"pipeline": 2}, "zero1", {"offload": "host"}),
    ({"pipeline": 2, "intra": 2}, "zero2", {"offload": "host"}),
    ({"sequence": 2}, "zero2", {}),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "layout", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE)]
)
def test_trains(ranks: Ranks, mesh: dict[str, int], layout: str, options: dict[str, Any]) -> None:
    """Losses, norms and an evaluation are those of one process to 1e-12."""
    _run(ranks, mesh, layout, options, 0, "", "")


GOES_ON: list[Any] = [  # saved by one, loaded by the other
    (MORE[2], CASES[0]), (CASES[0], MORE[2]), (MORE[6], CASES[1]), (MORE[9], MORE[7]),
    (MORE[7], ({"intra": 1}, "ddp", {})),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(("saved", "loaded"), GOES_ON)
def test_checkpoints_go_on_under_another_product(ranks: Ranks, tmp_path: Path, saved: Any, loaded: Any) -> None:
    """Losses and norms behind a checkpoint are those of a run that never stopped."""
    path = str(tmp_path / "run")
    _run(ranks, *saved, 0, "", path)
    _run(ranks, *loaded, 2, path, "")
