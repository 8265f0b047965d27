"""What the report remarks, and what is so on this machine: a sentence of the one and figures of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn

from shardfold.plan.rewrites import Overlap
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.needs import Needs
from shardfold.tools.recipes.face.row import StudyRow
from shardfold.tools.recipes.face.vit import FaceModel

__all__ = ["Here", "head_share", "here", "remarks"]

MIB = 2**20
ROUNDS = 5
FASTER = 1.3
"""What a backbone is sped up by in the report's example."""
SHARE = 0.39
"""Of the report's ViT in its seconds."""


class Here(NamedTuple):
    """Figures of this machine.

    Attributes:
        images: per rank, that the others are of.
        ahead: bytes of stage 3 with the next unit gathered while one computes.
        alone: the same without.
        full: bytes of stage 2 in fp32.
        half: the same where operations that may be are in bf16.
        head: share of the head in the seconds of forward and backward, of one process.
    """

    images: int
    ahead: int
    alone: int
    full: int
    half: int
    head: float


def here(config: FaceConfig, classes: int, ranks: int, images: int) -> Here:
    """Of this model: bytes by the planner, with the head on every rank, and seconds as they are measured."""
    given = {**config.model_dump(exclude={"out", "resume"}), "head": "replicated"}
    full, half = (
        Needs(FaceConfig.load({**given, "precision": each}), classes, ranks) for each in ("fp32", "bf16-autocast")
    )
    ahead, alone = (full.of("stage 3", Overlap(prefetch=n)).of(images) for n in (1, 0))
    return Here(
        images,
        ahead,
        alone,
        full.of("stage 2").of(images),
        half.of("stage 2").of(images),
        head_share(config, classes, images),
    )


def head_share(config: FaceConfig, classes: int, images: int) -> float:
    """Of the seconds of a forward and backward on one process, in turns with the backbone alone."""
    model = FaceModel(config, classes)
    # One rank measures while the others go on: a layer over the batches of all would wait for them.
    model.neck.norm = nn.BatchNorm1d(config.embedding, affine=False)
    x, labels = torch.randn(images, config.channels, *config.image_size()), torch.randint(classes, (images,))

    def seconds(loss: Callable[[], torch.Tensor]) -> float:
        began = perf_counter()
        loss().backward()
        return perf_counter() - began

    both = [(seconds(lambda: model(x, labels)), seconds(lambda: model(x).square().mean())) for _ in range(1 + ROUNDS)]
    return max(1 - median(alone / whole for whole, alone in both[1:]), 0.0)


def remarks(rows: Sequence[StudyRow], found: Here) -> list[tuple[str, str]]:
    """By the report's number."""
    pairs = {(row.budget, row.setting, row.head): row for row in rows}
    ratios = [
        pairs[budget, name, "sharded"].images_per_s / row.images_per_s
        for (budget, name, head), row in pairs.items()
        if head == "replicated"
    ]
    return [
        (
            "R1",
            "The report found that neither a distributed head nor DeepSpeed's collectives combine with ZeRO. Here the "
            "head is a part of the same engine: its classes are split over the ranks that read other samples, its "
            "states are not split once more, and no gradient of a class is sent. Split, the settings above ran at "
            f"{min(ratios):.2f} to {max(ratios):.2f} times the images/s of a head on every rank.",
        ),
        (
            "R2",
            "In the report stage 2 with the optimizer offloaded was the fastest with matching accuracy, and stage 3 "
            "could turn parameter offload on silently. Here what rests where is one table, which a run prints, and "
            f"offload is on where it is asked for. {_fastest(rows)}",
        ),
        (
            "R3",
            "Overlapped communication costs memory, there and here: with the next unit gathered while one computes, "
            f"stage 3 takes {found.ahead / MIB:.2f} MiB for {found.images} images, without {found.alone / MIB:.2f}, "
            "both by the planner.",
        ),
        (
            "R5",
            "Without fp16 the report gained 50 images/s, and lost under 10 % of rate and memory with it. For this "
            f"model under stage 2 and {found.images} images the planner has {found.full / MIB:.2f} MiB in fp32 and "
            f"{found.half / MIB:.2f} where bf16 is allowed ({found.half / found.full - 1:+.0%}). A CPU without 16-bit "
            "arithmetic gains no speed from it, so this page is in the precision that it names.",
        ),
        (
            "R6",
            "The report's head is over twice its ViT, so that a ViT that is 30 % faster is 10 % overall: Amdahl's law "
            f"with a share of {SHARE}, {_amdahl(SHARE):.2f}. Here the head took {found.head:.0%} of a forward and "
            f"backward of {found.images} images in one process, so a ViT that is 30 % faster would be "
            f"{_amdahl(1 - found.head) - 1:.0%} overall. The strong bars say what splitting the head gives instead.",
        ),
    ]


def _amdahl(share: float) -> float:
    """What all gains where this share of it is faster."""
    return 1 / (1 - share + share / FASTER)


def _fastest(rows: Sequence[StudyRow]) -> str:
    """Of each budget, and its Precision beside the best."""
    said: list[str] = []
    for budget in dict.fromkeys(row.budget for row in rows):
        mine = [row for row in rows if row.budget == budget]
        first = max(mine, key=lambda row: row.images_per_s)
        name = next(iter(first.precision))
        rate = next(iter(first.precision[name]))
        own, best = (100 * each for each in (first.precision[name][rate], max(r.precision[name][rate] for r in mine)))
        head = "classes split" if first.head == "sharded" else "the head on every rank"
        said.append(
            f"under the {budget} budget {first.setting} with {head} ({first.images_per_s:.0f} images/s; "
            f"{own:.2f}@{rate} {name}, the best of all {best:.2f})"
        )
    return f"Fastest here: {'; '.join(said)}."
