"""The specification: every layout trains as plain PyTorch does, on the same global batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.testing import Ranks, same_training
from tests.support import models

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
LAYOUTS = list(sf.PRESETS)
HARD = ["tied", "checkpointed", "checkpointed_reentrant", "frozen", "backwards", "twice"]


def meshes(layout: str, world: int) -> list[dict[str, int] | None]:
    """Layouts that tell nodes apart are also tried with two of them."""
    two = layout in ("hsdp", "hpz") and world % 2 == 0
    return [None, {"inter": 2, "intra": world // 2}] if two else [None]


def check(ranks: Ranks, layout: str, world: int, accumulate: int, clip: float | None, steps: int = 30) -> None:
    """By AdamW where norms are clipped, and so compared; else by SGD, as AdamW trains nearly the same by gradients that
    are all wrong by a factor."""
    optimizer = SGD if clip is None else ADAMW
    for mesh in meshes(layout, world):
        same_training(
            models.small, models.batches(steps), layout=layout, world_size=world, accumulate=accumulate,
            clip_norm=clip, optimizer=optimizer, steps=steps, parallel=mesh, ranks=ranks, tol=1e-6,
        )  # fmt: skip


# Each pair of values of two of the four factors occurs at least once; every second by default.
PAIRWISE = [
    pytest.param(layout, world, accumulate, clip, marks=() if (i + j // 2) % 2 == 0 else pytest.mark.soak)
    for i, layout in enumerate(LAYOUTS)
    for j, world in enumerate((1, 2, 3, 4))
    for accumulate, clip in [((1, 2)[(i + j) % 2], (None, 0.5)[(i + j // 2) % 2])]
]


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("layout", "world", "accumulate", "clip"), PAIRWISE)
def test_losses_of_30_steps_equal_plain_pytorch(
    ranks: Ranks, layout: str, world: int, accumulate: int, clip: float | None
) -> None:
    check(ranks, layout, world, accumulate, clip)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("build", "layout"),
    [
        pytest.param(build, layout, marks=() if (i + j) % 9 == 0 or layout == "zero3" else pytest.mark.soak)
        for i, build in enumerate(HARD)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_hard_models_train_as_in_plain_pytorch(ranks: Ranks, build: str, layout: str) -> None:
    for mesh in meshes(layout, 4):
        same_training(
            getattr(models, build), models.batches(5), layout=layout, world_size=4, accumulate=2, clip_norm=0.5,
            optimizer=ADAMW, steps=5, parallel=mesh, ranks=ranks, parameter_tol=1e-3,
        )  # fmt: skip


OVERLAPS = [
    sf.Overlap(prefetch=0), sf.Overlap(prefetch=3), sf.Overlap(block=1000), sf.Overlap(reduces_in_flight=1),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_schedule_moves_work_in_time_and_changes_nothing(ranks: Ranks, overlap: Any) -> None:
    same_training(
        models.small, models.batches(5), layout="zero3", world_size=2, optimizer=ADAMW, steps=5, ranks=ranks,
        overlap=overlap,
    )  # fmt: skip


def _on_their_way(layout: str, in_flight: int) -> list[int]:
    """At each block's output in a backward: how many units' gradients are on their way."""
    engine = sf.Engine(
        models.small(), optimizer=ADAMW, layout=layout, init=sf.Init(units=["blocks.*"]),
        overlap=sf.Overlap(reduces_in_flight=in_flight),
    )  # fmt: skip
    seen: list[int] = []

    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: seen.append(sum(bool(unit.gradients.sending) for unit in engine.units)))

    for block in engine.module.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(look)
    for batch in models.batches(3):
        seen.clear()
        engine.backward(engine(*batch))
        engine.step()
    engine.close()
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_reductions_go_on_beside_the_next_units_backward_if_asked(ranks: Ranks, layout: str) -> None:
    """With ``reduces_in_flight=1``, as on a GPU, a unit's gradients are on their way while the unit before it computes;
    with 0, as on the CPU, they have arrived by then."""
    assert ranks.run(_on_their_way, layout, 1, world_size=2) == [[0, 1, 1]] * 2
    assert ranks.run(_on_their_way, layout, 0, world_size=2) == [[0, 0, 0]] * 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("units", [["blocks.*"], ["blocks.0", "head"], [torch.nn.Linear], [models.Block]])
def test_units_named_by_the_user(ranks: Ranks, units: Any) -> None:
    same_training(
        models.small, models.batches(4), layout="zero3", world_size=2, optimizer=ADAMW, steps=4, ranks=ranks,
        init=sf.Init(units=units),
    )  # fmt: skip
