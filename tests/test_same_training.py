"""The specification: every layout trains as plain PyTorch does, on the same global batches."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

import models
import shardfold as sf
from shardfold.testing import Ranks, same_training

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
LAYOUTS = list(sf.PRESETS)
HARD = ["tied", "checkpointed", "checkpointed_reentrant", "frozen", "backwards", "twice"]


def meshes(layout: str, world: int) -> list[dict[str, int] | None]:
    """Layouts that tell nodes apart are also tried with two of them."""
    two = layout in ("hsdp", "hpz") and world % 2 == 0
    return [None, {"inter": 2, "intra": world // 2}] if two else [None]


def check(ranks: Ranks, layout: str, world: int, accumulate: int, clip: float | None, steps: int = 30) -> None:
    for mesh in meshes(layout, world):
        same_training(
            models.small, models.batches(steps), layout=layout, world_size=world, accumulate=accumulate,
            clip_norm=clip, optimizer=ADAMW, steps=steps, mesh=mesh, ranks=ranks, tol=1e-6,
        )  # fmt: skip


EVERY = list(itertools.product(LAYOUTS, (1, 2, 3, 4), (1, 4), (None, 0.5)))
# Each pair of values of two of the four factors occurs at least once.
PAIRWISE = [
    (layout, world, accumulate, clip)
    for i, layout in enumerate(LAYOUTS)
    for j, world in enumerate((1, 2, 3, 4))
    for accumulate, clip in [((1, 4)[(i + j) % 2], (None, 0.5)[(i + j // 2) % 2])]
]


@pytest.mark.parametrize(("layout", "world", "accumulate", "clip"), PAIRWISE)
def test_losses_of_30_steps_equal_plain_pytorch(
    ranks: Ranks, layout: str, world: int, accumulate: int, clip: float | None
) -> None:
    check(ranks, layout, world, accumulate, clip)


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "world", "accumulate", "clip"), EVERY)
def test_losses_of_30_steps_equal_plain_pytorch_in_every_combination(
    ranks: Ranks, layout: str, world: int, accumulate: int, clip: float | None
) -> None:
    check(ranks, layout, world, accumulate, clip)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", HARD)
def test_hard_models_train_as_in_plain_pytorch(ranks: Ranks, build: str, layout: str) -> None:
    for mesh in meshes(layout, 4):
        same_training(
            getattr(models, build), models.batches(5), layout=layout, world_size=4, accumulate=2, clip_norm=0.5,
            optimizer=ADAMW, steps=5, mesh=mesh, ranks=ranks, parameter_tol=1e-3,
        )  # fmt: skip


@pytest.mark.parametrize("timing", [sf.Schedule(prefetch=0), sf.Schedule(prefetch=3), sf.Schedule(block=1000)])
def test_the_schedule_moves_work_in_time_and_changes_nothing(ranks: Ranks, timing: Any) -> None:
    same_training(
        models.small, models.batches(5), layout="zero3", world_size=2, optimizer=ADAMW, steps=5, ranks=ranks,
        timing=timing,
    )  # fmt: skip


@pytest.mark.parametrize("units", [["blocks.*"], ["blocks.0", "head"], [torch.nn.Linear], [models.Block]])
def test_units_named_by_the_user(ranks: Ranks, units: Any) -> None:
    same_training(
        models.small, models.batches(4), layout="zero3", world_size=2, optimizer=ADAMW, steps=4, ranks=ranks,
        units=units,
    )  # fmt: skip
