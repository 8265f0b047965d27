"""Kahneman-Tversky optimization (Ethayarajh et al., arXiv 2402.01306): answers are good or bad, each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.tools.tune.config import KTOConfig
from shardfold.tools.tune.log_probs import sample_log_probs
from shardfold.tools.tune.reference import Reference
from shardfold.tools.tune.run import Loss, Recipe

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch, Window
    from shardfold.tools.tune.data.rows import Tokens
    from shardfold.tools.tune.run import TuneRun

__all__ = ["KTO", "RECIPE", "mismatched"]


def mismatched(run: TuneRun, batch: Batch) -> Batch:
    """Each prompt of a batch with the answer of the row before it in the data: what the policy's distance from the
    reference is estimated by (section 4.1 of the paper)."""
    from shardfold.tools.tune.data.batches import collate
    from shardfold.tools.tune.data.rows import Labelled, Tokens

    rows = run.rows if run.split == "train" else run.held_out
    assert rows is not None

    def of(row: int) -> Tokens:
        found = rows[row % len(rows)]
        assert isinstance(found, Labelled)
        return found.tokens

    bins: list[list[tuple[int, list[Tokens]]]] = []
    for row in batch.rows:
        own, other = of(row), of(row - 1)
        prompt, answer = int(own.trained.argmax()), int(other.trained.argmax())
        length = run.config.text.length
        ids = np.concatenate([own.ids[:prompt], other.ids[answer:]])[:length]
        trained = np.concatenate([own.trained[:prompt], other.trained[answer:]])[:length]
        bins.append([(row, [Tokens(ids, trained)])])
    return collate(bins, padded=not run.config.text.pack, pad=run.tokenizer.pad_token_id or 0)


def _values(run: TuneRun, batch: Batch) -> Tensor:
    """Of each row its answer's log-probability, and its neighbour's behind its prompt."""
    own = sample_log_probs(run, batch)[0]
    return torch.stack([own, sample_log_probs(run, mismatched(run, batch))[0]], -1)


class KTO(Recipe):
    """Every answer counts alike, times the weight of its kind."""

    figures = ("accuracy", "distance")

    def __init__(self) -> None:
        self._reference = Reference(2, _values)
        self._distance = torch.zeros(())
        self._before: dict[int, Tensor] = {}  # of each batch of the window, by its id

    def begin(self, run: TuneRun) -> None:
        """Compute the reference, where it cannot be had later.

        Raises:
            ConfigError: there is one row, and no other answer for its prompt.
        """
        if len(run.rows) < 2:
            raise ConfigError("kto needs two rows at least: it puts answers behind prompts of other rows.")
        self._reference.begin(run)

    def window(self, run: TuneRun, window: Window) -> None:
        """Estimate the distance from the reference by all rows of the window, of all ranks."""
        self._before = {id(batch): self._reference.of(run, batch) for batch in window.batches}
        self._distance = self._distance_of(run, window.batches)

    def weight(self, batch: Batch) -> float:
        return float(len(batch.rows))

    def _distance_of(self, run: TuneRun, batches: list[Batch]) -> Tensor:
        total, rows = 0.0, 0
        for batch in batches:  # also those without rows: other ranks gather the model with this one
            with torch.no_grad():
                policy = sample_log_probs(run, mismatched(run, batch))[0]
            total += float((policy - self._before[id(batch)][:, 1]).sum())
            rows += len(batch.rows)
        mean = run.engine.mean(total / max(rows, 1), weight=float(rows))
        return torch.tensor(max(mean, 0.0), device=run.engine.device)

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """Mean over this rank's answers."""
        config = run.config
        assert isinstance(config, KTOConfig) and batch.good is not None
        ratios = sample_log_probs(run, batch)[0] - self._before[id(batch)][:, 0]
        good = batch.good.to(ratios.device)
        value = torch.where(good, 1.0, -1.0) * config.beta * (ratios - self._distance)
        weight = torch.where(good, config.desirable, config.undesirable)
        losses = weight * (1 - value.sigmoid())
        rows = len(losses)
        with torch.no_grad():
            right = ((ratios > self._distance) == good).double().sum() / max(rows, 1)
        figures = {"accuracy": right, "distance": self._distance.detach()}
        return Loss(losses.sum() / max(rows, 1), rows, figures)

    def state_dict(self) -> dict[str, Any]:
        return self._reference.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference.load_state_dict(state)


RECIPE = KTO
