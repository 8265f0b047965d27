"""Orders in which backwards are of batches before: what is trained is a plain loop of delayed gradients."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.parallel.pipeline._order_text import render
from shardfold.parallel.pipeline.ahead import AHEAD
from shardfold.parallel.pipeline.picture import drawn
from shardfold.parallel.pipeline.simulate import check, timeline
from shardfold.parallel.pipeline.stage_order import choose_order, make_order
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of
from tests.support.options import grouped

PIECES = ["embedding", "blocks.0", "blocks.1", "norm", "head"]
CUTS = {2: ["blocks.1"], 3: ["blocks.1", "head"], 4: ["blocks.0", "blocks.1", "head"]}
STEPS, RESTART = 7, 4


def _delayed(order: str, count: int, micro: int, data: int, restart: int = STEPS) -> tuple[list[Any], list[float], Any]:
    """Losses, norms and weights of plain PyTorch whose gradients are late by so many micro-batches as the stage says.
    ``restart``: from that step on those of earlier ones are forgotten."""
    model, losses, norms, late = model_of("gpt"), list[Any](), list[float](), dict[int, list[Any]]()
    optimizer, named = ADAM(model.parameters()), dict(model.named_parameters())
    begins = [0, *(PIECES.index(name) for name in CUTS[count])]
    for step, batch in enumerate(batches(micro * data, STEPS)):
        late = {} if step == restart else late
        parts = list(zip(*(t.chunk(micro * data) for t in batch), strict=True))
        losses.append([compute(model, part) for part in parts])
        for i in range(micro):  # of all ranks of data
            total = sum(losses[-1][d * micro + i] for d in range(data)) / (micro * data)
            late[step * micro + i] = torch.autograd.grad(total, list(named.values()), retain_graph=True)
        for number, (name, p) in enumerate(named.items()):
            piece = next(i for i, each in enumerate(PIECES) if name.startswith(each))
            stage = sum(begin <= piece for begin in begins) - 1
            lag = micro if order == "2bw" else count - 1 - stage
            wanted = [step * micro + i - lag for i in range(micro)]
            found = [late[n][number] for n in wanted if n in late]
            p.grad = sum(found) if found else None
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    return [[loss.item() for loss in some] for some in losses], norms, model.state_dict()


def _trains(order: str, count: int, micro: int, data: int, layout: str, restarts: bool) -> tuple[int, float, str]:
    engine = sf.Engine(
        model_of("gpt"),
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh={"pipeline": count, "intra": data}, pipeline=order, stages=CUTS[count]),
        accumulate=micro,
        clip_norm=0.1,
        runtime=sf.Runtime(debug=True),
    )
    losses, norms, whole = _delayed(order, count, micro, data, RESTART if restarts else STEPS)
    steps = batches(micro * data, STEPS)
    for step, batch in enumerate(steps):
        if restarts and step == RESTART:
            engine.load_state_dict(engine.state_dict())
        mine = tuple(t.chunk(data)[engine.data_rank] for t in batch)
        here = sum(losses[step][engine.data_rank * micro :][:micro]) / micro
        if step == 3:  # an evaluation leaves what is under way alone
            torch.testing.assert_close(engine.eval_batch(mine, compute).item(), here, rtol=1e-12, atol=0)
        torch.testing.assert_close(engine.train_batch(mine, compute).item(), here, rtol=1e-12, atol=0)
        report = engine.step()
        assert report.updated
        torch.testing.assert_close(report.grad_norm, norms[step], rtol=1e-12, atol=1e-300)
    for key, value in engine.state_dict().items():
        torch.testing.assert_close(value, whole[key], rtol=1e-12, atol=1e-12, msg=key)
    row = next(row for row in engine.memory().rows if row.state == "stash")
    own = sum(p.nbytes for p in engine.module.parameters())
    place = engine.mesh.coords["pipeline"]
    versions = 1 if order == "2bw" else -(-(count - 1 - place) // micro)
    assert row.table >= versions * own and row.held == row.table
    assert (versions > 0) == ("STASH" in str(engine.program)) and f"bytes: {int(row.table):,}" in engine.explain()
    engine.close()
    return versions, row.table, order


@pytest.mark.parametrize(
    ("order", "count", "micro", "data", "layout", "restarts"),
    [("pipedream", 3, 1, 1, "zero1", False), ("2bw", 2, 3, 2, "zero2", True),
     *(pytest.param(*case, marks=pytest.mark.soak) for case in (
         ("pipedream", 4, 1, 1, "zero2", True), ("pipedream", 3, 2, 1, "ddp", False),
         ("pipedream", 2, 4, 2, "zero1", True), ("2bw", 4, 5, 1, "ddp", False), ("2bw", 3, 1, 1, "zero1", False)))],
)  # fmt: skip
def test_trains_like_a_loop_of_delayed_gradients(
    ranks: Ranks, order: str, count: int, micro: int, data: int, layout: str, restarts: bool
) -> None:
    """Losses, norms and weights to 1e-12, an evaluation between, and again from nothing behind new weights; copies of
    weights take the memory that is said."""
    found = ranks.run(_trains, order, count, micro, data, layout, restarts, world_size=count * data)
    assert [versions for versions, _, _ in found][-1] == (1 if order == "2bw" else 0)


@pytest.mark.parametrize("name", AHEAD)
def test_ranks_hardly_wait(name: str) -> None:
    """Less than in one batch after the other; every order is complete, ends, and is an order of one's own as text."""
    for ranks in range(1, 7):
        for micro in range(1, 13):
            order = make_order(choose_order(name), ranks, micro)
            assert check(order, ranks, micro) == list(range(ranks))
            line, flushed = timeline(order, ranks), timeline(make_order(choose_order("1f1b"), ranks, micro), ranks)
            assert line.end <= flushed.end and (name != "2bw" or line.end <= 3 * micro + 2 * ranks)
            if micro > 1 or name == "pipedream":
                own = choose_order(render(order)) if ranks > 1 else choose_order(render(order) + "\n")
                assert own.versions(ranks, micro) == choose_order(name).versions(ranks, micro)
                assert prod(len(row) for row in order) == (2 * micro) ** ranks
    lines = drawn(timeline(make_order(choose_order("pipedream"), 3, 2), 3), 3)
    assert lines[0].startswith("   0 | 0=0=0") and "=" not in lines[2]


def test_what_does_not_go_with_weights_of_steps_before_is_refused() -> None:
    with pytest.raises(ConfigError, match="0F-1, a forward of a batch before"):
        choose_order("0F-1 0B0\n1F0 1B0\n")
    with pytest.raises(ConfigError, match="0I-1, a part of a backward of a batch before"):
        choose_order("0F0 0I-1 0W-1\n1F0 1B0\n")


def _refused() -> list[str]:
    said = []
    for options in (
        {"layout": "zero3"}, {"activations": "recompute"}, {"loss_scale": 8.0}, {"model": "gpt-tied"},
    ):  # fmt: skip
        more: Any = {"layout": "zero1", **options}
        with pytest.raises(ConfigError) as raised:
            sf.Engine(
                model_of(more.pop("model", "gpt")),
                optimizer=ADAM,
                **grouped(mesh={"pipeline": 2, "intra": 2}, pipeline="2bw", **more),
            )
        said.append(str(raised.value))
    return said


@pytest.mark.soak
def test_layouts_and_options_that_need_one_set_of_weights_are_refused(ranks: Ranks) -> None:
    words = ("choose ddp, zero1 or zero2", "would be recomputed with others", "a loss scale", "untie it")
    for said in ranks.run(_refused, world_size=4):
        assert all(word in text for word, text in zip(words, said, strict=True))
