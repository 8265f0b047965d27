"""Models that are cut into stages train like whole ones."""

from __future__ import annotations

from collections import UserDict
from itertools import product
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.errors import ModelError
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, model_of, run

CASES = [  # model, stages, ranks of data, layout, order, micro-batches
    ("gpt-tied", 2, 2, "zero2", "1f1b", 3),
    ("llama", 3, 1, "ddp", "gpipe", 1),
    ("t5", 3, 1, "zero3", "1f1b", 2),
    ("skipping", 4, 1, "zero1", "1f1b", 6),
    ("sequential", 2, 2, "zero3", "gpipe", 2),
    ("skipping", 2, 2, "ddp", "1f1b", 3),
    ("gpt-tied", 2, 2, "zero1", "interleaved:2", 4),
    ("skipping", 3, 1, "ddp", "looped-bfs:2", 2),
    ("gpt-tied", 2, 2, "zero2", "zb-h1", 3),
    ("gpt2", 3, 1, "ddp", "zb-h1", 5),
    ("gpt-tied", 2, 2, "zero3", "zbv", 2),
    ("skipping", 3, 1, "zero1", "v-half", 4),
]
MORE = [
    *(("gpt-tied", count, 1, "zero1", order, micro) for count, order, micro in
      product((2, 3, 4), ("gpipe", "1f1b"), range(1, 13))),
    *(("gpt", 2, 2, layout, order, micro) for layout, order, micro in
      product(("ddp", "zero1", "zero2", "zero3"), ("gpipe", "1f1b"), (1, 2, 5))),
    *(("skipping", count, data, layout, order, 4 if count == 2 else 3) for count, data, layout, order in
      product((2, 3), (1, 2), ("ddp", "zero1", "zero2", "zero3"), ("interleaved:2", "interleaved:3", "looped-bfs:2"))
      if (data == 1 or count == 2) and not (count == 3 and order == "interleaved:3")),
    *(("gpt-tied", count, 1, "zero2", "zb-h1", micro) for count, micro in product((2, 3, 4), range(1, 13))),
    *(("skipping", count, 1, "zero1", order, micro) for count, order, micro in
      product((2, 3), ("zbv", "v-half", "v-min", "dualpipev", "interleaved-zb:2"), (2, 3, 5, 8))),
    *(("gpt-tied", 2, 1, "zero1", order, 1) for order in ("zbv", "v-half", "v-min", "dualpipev", "interleaved-zb:2")),
    *(("gpt-tied", 2, 2, layout, order, micro) for layout, order, micro in
      product(("ddp", "zero1", "zero2", "zero3"), ("zb-h1", "zbv", "v-half", "dualpipev", "interleaved-zb:2"), (2, 5))),
    *((name, count, 1, "zero3", "zb-h1", 3) for name, count in
      product(("gpt", "llama", "qwen3", "gpt2", "bert", "gemma2", "t5", "vit", "sequential", "skipping"), (2, 3, 4))),
    *((name, count, 1, "zero3", "1f1b", 3) for name, count in
      product(("gpt", "llama", "qwen3", "gpt2", "bert", "gemma2", "t5", "vit", "sequential", "skipping"), (2, 3, 4))),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "count", "data", "layout", "order", "micro"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE if case not in CASES)],
)
def test_trains(ranks: Ranks, name: str, count: int, data: int, layout: str, order: str, micro: int) -> None:
    """Loss, every gradient, the norm before clipping and parameters after 5 steps are plain PyTorch's to 1e-12."""
    run(ranks, name, count, data, layout, order, micro)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "order", "activations"),
    [("zero3", "zb-h1", "recompute"),
     *(pytest.param(layout, order, activations, marks=pytest.mark.soak) for layout, order, activations in
       (("zero1", "zbv", "recompute"), ("zero2", "zb-h1", "select"), ("ddp", "v-half", "recompute")))],
)  # fmt: skip
def test_what_is_recomputed_trains_with_backwards_in_two_parts(
    ranks: Ranks, layout: str, order: str, activations: str
) -> None:
    run(ranks, "gpt-tied", 2, 1, layout, order, 3, activations=activations)


def _nothing_to_recompute() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    with pytest.raises(ModelError, match="activations='recompute' applies to no unit of this model"):
        sf.Engine(layers, optimizer=ADAM, layout="zero1", parallel={"pipeline": 2}, activations="recompute")


@pytest.mark.soak
def test_a_mode_that_no_stage_has_a_place_for_is_refused(ranks: Ranks) -> None:
    ranks.run(_nothing_to_recompute, world_size=2)


def _frozen() -> None:
    whole: Any = model_of("gpt")
    model: Any = model_of("gpt")
    for each in (model, whole):
        each.embedding.requires_grad_(False)
        each.blocks[0].requires_grad_(False)
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        layout="zero2",
        parallel=sf.Parallel(mesh={"pipeline": 2}, stages=["blocks.1"]),
        accumulate=2,
    )
    optimizer = ADAM([p for p in whole.parameters() if p.requires_grad])
    for tokens, targets in batches(2, 3):
        loss = engine.train_batch(UserDict(tokens=tokens, targets=targets))  # as a tokenizer of transformers gives it
        engine.step()
        expected = whole(tokens, targets)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.item(), expected.item(), rtol=1e-12, atol=0)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], value, rtol=1e-12, atol=1e-12, msg=name)
    engine.close()


def test_a_stage_may_be_frozen(ranks: Ranks) -> None:
    """Its rank has nothing to train, and gets no gradients."""
    ranks.run(_frozen, world_size=2)
