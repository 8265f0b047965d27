"""Pieces are measured one at a time, and a model is cut by what all ranks found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError, ModelError
from shardfold.parallel.pipeline.costs import PieceCost, PieceCosts, measure_pieces
from shardfold.parallel.pipeline.pieces import cut_by_cost, find_pieces
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of
from tests.support.options import grouped


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gpt", "t5", "skipping"])
def test_every_piece_is_measured_and_the_model_stays_as_it_is(name: str) -> None:
    """Layers that are alike once; also where the model has no memory."""
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    costs = measure_pieces(model, batches(1)[0], compute, repeats=1)
    assert [piece.path for piece in costs.pieces] == [piece.path for piece in find_pieces(model)]
    assert all(piece.forward > 0 and piece.backward > 0 for piece in costs.pieces if piece.saved), costs
    assert costs.pieces[-1].forward > 0  # the loss, at least
    assert sum(piece.saved for piece in costs.pieces) > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    by_path = {piece.path: piece for piece in costs.pieces}
    assert all(path in str(costs) for path in by_path)
    if name == "gpt":
        first, second = by_path["blocks.0"], by_path["blocks.1"]
        assert (first.forward, first.backward, first.saved) == (second.forward, second.backward, second.saved)
        assert first.saved > by_path["embedding"].saved
        with sf.meta_init():
            hollow = model_of(name)
        again = measure_pieces(hollow, batches(1)[0], compute, repeats=1)
        assert [piece.saved for piece in again.pieces] == [piece.saved for piece in costs.pieces]


def _costs(model: nn.Module, seconds: list[float]) -> PieceCosts:
    pieces = [piece.path for piece in find_pieces(model)]
    return PieceCosts(tuple(PieceCost(path=path, forward=took / 3, backward=took * 2 / 3, saved=0, held=0)
                            for path, took in zip(pieces, seconds, strict=True)))  # fmt: skip


def _cut(by_rank: list[list[float]]) -> tuple[tuple[str, ...], list[str]]:
    model, rank = model_of("gpt"), torch.distributed.get_rank()
    costs, options = _costs(model, by_rank[rank]), {"optimizer": ADAM, "mesh": {"pipeline": 2}, "layout": "zero1"}
    engine = sf.Engine(model, **grouped(stages=costs, **options))
    told = engine.stats().pipeline
    assert told is not None
    engine.train_batch(batches(1)[0], compute)
    engine.step()
    engine.close()
    said: list[str] = []
    other = model_of("sequential")
    wrong: list[Any] = [_costs(other, [1.0] * len(find_pieces(other))), costs if rank else ["blocks.0"]]
    for given in wrong:
        with pytest.raises(ConfigError) as raised:
            sf.Engine(model_of("gpt"), **grouped(stages=given, **options))
        said.append(str(raised.value))
    return told.stages, said


def test_the_cut_is_that_of_the_mean_of_all_ranks(ranks: Ranks) -> None:
    """A head that takes half of the time is a stage of its own; ranks that would cut otherwise alone cut alike."""
    paths = [piece.path for piece in find_pieces(model_of("gpt"))]
    by_rank = [[3.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 9.0]]
    assert len(paths) == len(by_rank[0])
    assert [cut_by_cost(each, 2) for each in by_rank] == [[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    for begins, said in ranks.run(_cut, by_rank, world_size=2):
        assert begins == (paths[-1],)
        assert "costs of another model" in said[0] and "stages=" in said[1]


def test_what_cannot_be_measured_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            if not x.is_meta:
                raise ValueError("only shapes")
            return self.layer(x)

    with pytest.raises(ModelError, match="'0' cannot be measured by itself"):
        measure_pieces(nn.Sequential(Odd(), nn.Linear(4, 1)), torch.ones(2, 4), lambda model, x: model(x).sum())
    with pytest.raises(ConfigError, match="repeats=0"):
        measure_pieces(model_of("gpt"), batches(1)[0], compute, repeats=0)
    with pytest.raises(ConfigError, match="measure_pieces"):
        sf.Engine(model_of("gpt"), optimizer=ADAM, parallel=sf.Parallel(stages=3))  # pyright: ignore[reportArgumentType]
