"""Direct preference optimization (Rafailov et al., arXiv 2305.18290): of two answers the better one gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.tools.tune.config import DPOConfig
from shardfold.tools.tune.log_probs import sample_log_probs
from shardfold.tools.tune.reference import Reference
from shardfold.tools.tune.run import Loss, Recipe

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch, Window
    from shardfold.tools.tune.run import TuneRun

__all__ = ["DPO", "RECIPE", "pair_losses"]


def pair_losses(margins: Tensor, config: DPOConfig) -> Tensor:
    """The loss of each pair.

    Args:
        margins: ``(pairs,)``: by how much more than the reference the policy prefers the better answer, in nats; of
            ``ipo`` per token.
    """
    if config.loss == "hinge":
        return F.relu(1 - config.beta * margins)
    if config.loss == "ipo":
        return (margins - 1 / (2 * config.beta)).square()
    smooth = config.label_smoothing
    return -(1 - smooth) * F.logsigmoid(config.beta * margins) - smooth * F.logsigmoid(-config.beta * margins)


class DPO(Recipe):
    """Every pair counts alike."""

    figures = ("accuracy", "margin", "reward_chosen")

    def __init__(self) -> None:
        self._reference = Reference(2, lambda run, batch: sample_log_probs(run, batch)[0].view(-1, 2))
        self._before: dict[int, Tensor] = {}  # of each batch of the window, by its id

    def begin(self, run: TuneRun) -> None:
        """Compute the reference, where it cannot be had later."""
        self._reference.begin(run)

    def window(self, run: TuneRun, window: Window) -> None:
        """What the reference says of the pairs."""
        self._before = {id(batch): self._reference.of(run, batch) for batch in window.batches}

    def weight(self, batch: Batch) -> float:
        return float(len(batch.rows))

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """Mean over this rank's pairs."""
        assert isinstance(run.config, DPOConfig)
        before = self._before[id(batch)]
        sums, counts = sample_log_probs(run, batch)
        ratios = sums.view(-1, 2) - before
        scores = ratios / counts.view(-1, 2).clamp(min=1) if run.config.loss == "ipo" else ratios
        losses = pair_losses(scores[:, 0] - scores[:, 1], run.config)
        rewards = run.config.beta * ratios.detach()
        pairs = len(losses)
        return Loss(
            losses.sum() / max(pairs, 1),
            pairs,
            {
                "accuracy": (rewards[:, 0] > rewards[:, 1]).double().sum() / max(pairs, 1),
                "margin": (rewards[:, 0] - rewards[:, 1]).sum() / max(pairs, 1),
                "reward_chosen": torch.sum(rewards[:, 0]) / max(pairs, 1),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return self._reference.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference.load_state_dict(state)


RECIPE = DPO
