"""Checkpoints go from any mesh to any other; fp32 on each is fp32 on one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.parallel.models import ADAM, batches, loss_of, loss_on, make, part
from tests.support.options import grouped

HEADS, STEPS, SAVED = 6, 4, 2
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"layout": "ddp"}),
    "zero3": (2, {"layout": "zero3"}),
    "zero3-tensor": (4, {"layout": "zero3", "mesh": {"tensor": 2}, "tensor": "auto"}),
    "hsdp-tensor": (4, {"layout": "hsdp", "mesh": {"inter": 2, "tensor": 2}, "tensor": "auto"}),
    "zero1-stream": (3, {"layout": "zero1", "mesh": {"tensor": 3}, "tensor": "auto", "sequence_parallel": True}),
    "zero2-ulysses": (4, {"layout": "zero2", "mesh": {"sequence": 2}, "attention": "ulysses"}),
    "ddp-ring": (3, {"layout": "ddp", "mesh": {"sequence": 3}, "attention": "ring"}),
    "zero1-both": (
        4, {"layout": "zero1", "mesh": {"sequence": 2, "tensor": 2}, "tensor": "auto", "attention": "ring"},
    ),
}  # fmt: skip


def _plain(name: str, dtype: torch.dtype) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, losses, norms = make(name, HEADS).to(dtype), [], []
    optimizer = ADAM(model.parameters())
    for batch in batches(STEPS):
        loss = loss_of(model, *batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def _trains(name: str, mesh: str, begin: str | None, folder: str, dtype: torch.dtype, near: float) -> None:
    """From the checkpoint of another mesh, or from the beginning, writing one on the way."""
    losses, norms, whole = _plain(name, dtype)
    engine = sf.Engine(make(name, HEADS).to(dtype), optimizer=ADAM, **grouped(clip_norm=0.1, **MESHES[mesh][1]))
    if begin is not None:
        engine.load(f"{folder}/{begin}")
        assert engine.steps == SAVED
    for step, batch in list(enumerate(batches(STEPS)))[engine.steps :]:
        loss = loss_on(engine, *batch)
        engine.backward(loss)
        assert engine.step().grad_norm == pytest.approx(norms[step], rel=near)
        assert engine.mean(loss.item()) == pytest.approx(losses[step], rel=near)
        if begin is None and step + 1 == SAVED:
            engine.save(f"{folder}/{mesh}", wait=True)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, part(engine, key, whole[key]), rtol=near, atol=near)
    engine.close()


def _goes_on(ranks: Ranks, name: str, folder: Any, pairs: list[tuple[str, str]]) -> None:
    go = partial(ranks.run, _trains, name)
    for begin in dict.fromkeys(begin for begin, _ in pairs):
        go(begin, None, str(folder), torch.float64, 1e-12, world_size=MESHES[begin][0])
    for begin, end in pairs:
        go(end, begin, str(folder), torch.float64, 1e-12, world_size=MESHES[end][0])


@pytest.mark.soak
def test_checkpoints_go_from_mesh_to_mesh(ranks: Ranks, tmp_path: Any) -> None:
    """Losses, norms and weights behind a checkpoint of another mesh are those of plain PyTorch that never stopped."""
    _goes_on(ranks, "gpt-tied", tmp_path, [("zero3-tensor", "zero1-both"), ("zero1-both", "zero2-ulysses")])


@pytest.mark.soak
@pytest.mark.parametrize("begin", MESHES)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_checkpoints_go_from_any_mesh_to_any_other(ranks: Ranks, tmp_path: Any, name: str, begin: str) -> None:
    _goes_on(ranks, name, tmp_path, [(begin, end) for end in MESHES])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "zero3-tensor"),
        *(pytest.param(n, m, marks=pytest.mark.soak) for n in ("gpt", "llama", "qwen3") for m in MESHES),
    ],
)
def test_fp32_is_that_of_one_process(ranks: Ranks, tmp_path: Any, name: str, mesh: str) -> None:
    """To 1e-6: sums of parts round in another order."""
    ranks.run(_trains, name, mesh, None, str(tmp_path), torch.float32, 1e-6, world_size=MESHES[mesh][0])
