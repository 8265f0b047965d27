"""Supervised fine-tuning, and pre-training, of which every token is a target: the mean cross-entropy of all targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from shardfold.tools.tune.run import Loss, Recipe

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch
    from shardfold.tools.tune.run import TuneRun

__all__ = ["RECIPE", "SFT"]


class SFT(Recipe):
    """Every target counts alike, whichever sample, micro-batch or rank it is in."""

    figures = ("accuracy",)

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """Mean over this rank's targets; without any it is 0, of weight 0."""
        part = run.on_rank(batch)
        logits = run.logits(part).float()
        count = int((part.labels != -100).sum())
        total = F.cross_entropy(logits.flatten(0, 1), part.labels.flatten(), reduction="sum")
        with torch.no_grad():
            right = ((logits.argmax(-1) == part.labels) & (part.labels != -100)).sum()
        return Loss(total / max(count, 1), count, {"accuracy": right / max(count, 1)})


RECIPE = SFT
