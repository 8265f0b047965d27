"""Odds-ratio preference optimization (Hong et al., arXiv 2403.07691): the better answer is learned, and its odds grow
over those of the worse one. There is no reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.tools.tune.config import ORPOConfig
from shardfold.tools.tune.log_probs import IGNORED, by_sample, number_of_samples, token_log_probs
from shardfold.tools.tune.run import Loss, Recipe

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch, Window
    from shardfold.tools.tune.run import TuneRun

__all__ = ["ORPO", "RECIPE", "log_odds"]


def log_odds(mean_log_probs: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of ``p = exp(mean_log_probs)``, the equations 3 and 4 of the paper."""
    return mean_log_probs - torch.log(-torch.expm1(mean_log_probs))


def every_token(batch: Batch) -> Tensor:
    """Labels that are each next token of its sample, the prompt's too, of the better answers; -100 elsewhere."""
    ids, documents = batch.inputs["input_ids"], batch.documents
    follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, :-1] >= 0) & (documents[:, :-1] % 2 == 0)
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = torch.where(follows, ids[:, 1:], IGNORED)
    return labels


class ORPO(Recipe):
    """Pairs count alike, and so do the tokens of better answers, whose prompts are learned too, as its authors do."""

    figures = ("learned", "log_odds", "accuracy")

    _tokens_per_pair = 1.0

    def window(self, run: TuneRun, window: Window) -> None:
        """Count tokens and pairs of all ranks: the two means of the loss are over different things."""
        tokens = sum(int((every_token(batch) != IGNORED).sum()) for batch in window.batches)
        pairs = sum(number_of_samples(batch) // 2 for batch in window.batches)
        self._tokens_per_pair = run.engine.mean(float(tokens)) / max(run.engine.mean(float(pairs)), 1e-9)

    def weight(self, batch: Batch) -> float:
        return float(len(batch.rows))

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """Mean over this rank's pairs, of which the learned tokens are divided by those of a pair on average."""
        assert isinstance(run.config, ORPOConfig)
        wanted, samples = run.on_rank_of(every_token(batch), batch), number_of_samples(batch)
        part = run.on_rank(batch)
        logits = run.logits(part)
        own = by_sample(run, token_log_probs(logits, part.labels), part, samples)
        with torch.no_grad():
            counts = by_sample(run, (part.labels != IGNORED).float(), part, samples)
        odds = log_odds(own / counts.clamp(min=1)).view(-1, 2)
        pairs = len(odds)
        learned = -run.summed(token_log_probs(logits, wanted).sum()) / self._tokens_per_pair / max(pairs, 1)
        ratio = F.logsigmoid(odds[:, 0] - odds[:, 1]).sum() / max(pairs, 1)
        with torch.no_grad():
            right = (odds[:, 0] > odds[:, 1]).double().sum() / max(pairs, 1)
        return Loss(
            learned - run.config.beta * ratio, pairs, {"learned": learned, "log_odds": ratio, "accuracy": right}
        )


RECIPE = ORPO
