"""Gathered units may be kept over the micro-batches of a step: a cell of the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.errors import LayoutError
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of

PARTS = 4
KEPT = sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute", until="step"))


def _trains(layout: sf.Layout, stages: int, order: str, overlap: sf.Overlap) -> tuple[dict[str, Tensor], float, float]:
    """Weights, and bytes of gathers in the last step as the program has them and as they were sent."""
    mesh = {"pipeline": stages, "intra": 2} if stages > 1 else {"intra": 2}
    engine = sf.Engine(
        model_of("gpt"),
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh=mesh, pipeline=order),
        accumulate=PARTS,
        clip_norm=0.1,
        overlap=overlap,
    )
    for batch in batches(2 * PARTS, 4):
        mine = tuple(t.chunk(2)[engine.data_rank] for t in batch)
        engine.train_batch(mine, compute)
        engine.step()
        engine.eval_batch(mine, compute)
    rows = [row for row in engine.traffic().rows if row.purpose == "gather"]
    state = {key: value.clone() for key, value in engine.state_dict().items()}
    engine.close()
    return state, sum(row.program for row in rows), sum(row.sent for row in rows)


@pytest.mark.parametrize(
    ("stages", "order", "overlap"),
    [(2, "1f1b", sf.Overlap()),
     pytest.param(2, "zb-h1", sf.Overlap(reduce_once=True), marks=pytest.mark.soak),
     pytest.param(2, "interleaved:2", sf.Overlap(prefetch=0), marks=pytest.mark.soak),
     pytest.param(2, "gpipe", sf.Overlap(order="any"), marks=pytest.mark.soak),
     pytest.param(1, "1f1b", sf.Overlap(prefetch=2), marks=pytest.mark.soak)],
)  # fmt: skip
def test_units_are_gathered_in_the_first_micro_batch_only(
    ranks: Ranks, stages: int, order: str, overlap: sf.Overlap
) -> None:
    """Weights are those of a gather in every pass; a part of the bytes is sent, as the program says."""
    each = ranks.run(_trains, sf.PRESETS["zero3"], stages, order, overlap, world_size=2 * stages)
    once = ranks.run(_trains, KEPT, stages, order, overlap, world_size=2 * stages)
    for (state, program, sent), (other, few, kept) in zip(each, once, strict=True):
        for key, value in state.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=0, msg=key)
        assert program == sent and few == kept
        # What two stages of a rank share is kept once for both.
        assert 2 * PARTS * few == program or (":" in order and 2 * PARTS * few < program)


def _goes_on() -> list[tuple[bool, bool, list[bool]]]:
    """What is kept after an evaluation between micro-batches, a write and a load, and after steps; whether losses are
    those of a gather in every pass."""
    found: list[tuple[bool, bool, list[bool]]] = []
    losses: list[list[float]] = []
    for layout in (sf.PRESETS["zero3"], KEPT):
        model = model_of("gpt")
        engine = sf.Engine(model, optimizer=ADAM, layout=layout, accumulate=3)
        units = engine.sharded.units
        said: list[float] = []
        full: list[bool] = []
        for step, batch in enumerate(batches(4, 6)):
            tokens = batch[0].chunk(2)[engine.data_rank]
            loss = compute(engine, (tokens, tokens))
            engine.backward(loss)
            said.append(loss.item())
            if step == 1:
                with torch.no_grad():
                    said.append(compute(engine, (tokens, tokens)).item())
                full.append(all(unit.kept for unit in units))
                with engine.gathered(write=True), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
                full.append(all(unit.kept for unit in units))
                engine.load_state_dict(engine.state_dict())
                full.append(any(unit.kept for unit in units))
            if step % 3 == 2:
                engine.step()
                full.append(any(unit.kept for unit in units))
        losses.append(said)
        found.append((losses[0] == said, engine.steps == 2, full))
        engine.close()
    return found


def test_what_is_kept_ends_with_the_step_and_with_a_load(ranks: Ranks) -> None:
    for plain, kept in ranks.run(_goes_on, world_size=2):
        assert plain == (True, True, [False, False, False, False, False])
        assert kept == (True, True, [True, True, False, False, False])


def test_only_what_is_held_whole_is_kept() -> None:
    with pytest.raises(LayoutError, match=r"params is split over intra .* give it to held"):
        sf.PRESETS["zero3"].edit("params", until="step", over=("intra",))
    with pytest.raises(LayoutError, match=r"until='batch': it is 'backward' or 'step'"):
        sf.Cell(dtype="compute", until="batch") and sf.PRESETS["zero3"].replace(
            held=sf.Cell(dtype="compute", until="batch")
        )
