"""Distillation: each target learns the whole distribution of a teacher (Hinton et al., arXiv 1503.02531)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.tools.tune._divergences import divergences
from shardfold.tools.tune.adapters import beginning
from shardfold.tools.tune.config import DistillConfig
from shardfold.tools.tune.models import ModelPlace, hollow_model
from shardfold.tools.tune.run import Loss, Recipe

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch
    from shardfold.tools.tune.run import TuneRun

__all__ = ["RECIPE", "Distill"]


class Distill(Recipe):
    """Every target counts alike. The teacher is a second engine under the same layout, which is not trained."""

    _teacher: sf.Engine

    def begin(self, run: TuneRun) -> None:
        """Make the teacher.

        Raises:
            ConfigError: it has other tokens than the student, or ranks share sequences or layers.
        """
        config = run.config
        assert isinstance(config, DistillConfig)
        if config.sequence > 1 or config.tensor > 1 or config.pipeline > 1:
            raise ConfigError("a teacher is not cut along --sequence, --tensor or --pipeline: leave these out.")
        place = ModelPlace.find(config.teacher)
        own, theirs = run.tokenizer.get_vocab(), place.tokenizer().get_vocab()
        if own != theirs:
            raise ConfigError(
                f"the teacher in {str(config.teacher)!r} has another vocabulary ({len(theirs):,} tokens, the student "
                f"{len(own):,}): distillation compares distributions over the same tokens."
            )
        model, tensors = beginning(hollow_model(place.config, "lm"), place, None, "lm", config.seed)
        model.requires_grad_(False)
        self._teacher = sf.Engine(
            model, layout=config.table(), precision=config.precision, init=sf.Init(weights=tensors)
        )
        model.eval()

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """Mean over this rank's targets."""
        config = run.config
        assert isinstance(config, DistillConfig)
        part = run.on_rank(batch)
        targets = part.labels != -100
        with torch.no_grad():
            teacher = self._teacher(**part.inputs, use_cache=False).logits[targets].float()
        student = run.logits(part)[targets].float()
        count = len(student)
        apart = divergences(student, teacher[:, : student.shape[-1]], config).sum() / max(count, 1)
        usual = F.cross_entropy(student, part.labels[targets], reduction="sum") / max(count, 1)
        value = (1 - config.mix) * apart + config.mix * usual
        return Loss(value, count, {"divergence": apart, "cross_entropy": usual})

    def close(self) -> None:
        """The run is over."""
        self._teacher.close()


RECIPE = Distill
