"""Whole gradients may be kept over the micro-batches of a step and reduced once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of

PARTS = 3


def _trains(layout: str, stages: int, *, once: bool) -> tuple[dict[str, Tensor], tuple[int, float, float], str]:
    mesh = {"pipeline": stages, "intra": 2} if stages > 1 else {"intra": 2}
    engine = sf.Engine(
        model_of("gpt"),
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh=mesh, pipeline="zb-h1"),
        accumulate=PARTS,
        overlap=sf.Overlap(reduce_once=once),
        clip_norm=0.1,
    )
    for batch in batches(2 * PARTS, 4):
        engine.train_batch(tuple(t.chunk(2)[engine.data_rank] for t in batch), compute)
        engine.step()
    rows = [row for row in engine.traffic().rows if row.op == "REDUCE_SCATTER"]
    sums = sum(row.calls for row in rows), sum(row.program for row in rows), sum(row.sent for row in rows)
    told, state = engine.explain(), {key: value.clone() for key, value in engine.state_dict().items()}
    engine.close()
    return state, sums, told


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "stages"),
    [("zero2", 2), pytest.param("zero3", 2, marks=pytest.mark.soak), pytest.param("zero3", 1, marks=pytest.mark.soak),
     pytest.param("zero2", 1, marks=pytest.mark.soak)],
)  # fmt: skip
def test_gradients_are_reduced_in_the_last_micro_batch_only(ranks: Ranks, layout: str, stages: int) -> None:
    """Weights are those of a reduction in each; a part of the bytes is sent, as the program says."""
    each = ranks.run(_trains, layout, stages, once=False, world_size=2 * stages)
    once = ranks.run(_trains, layout, stages, once=True, world_size=2 * stages)
    for (state, sums, _), (other, few, told) in zip(each, once, strict=True):
        for key, value in state.items():
            torch.testing.assert_close(other[key], value, rtol=1e-12, atol=1e-12, msg=key)
        assert (PARTS * few[0], PARTS * few[1]) == sums[:2] and few[1] == few[2] and sums[1] == sums[2]
        backward = told[told.index("backward:") : told.index("last:")]
        assert "GRADS" in backward and "REDUCE_SCATTER" not in backward and "DROP" not in backward
