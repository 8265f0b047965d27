"""A reward model: one number for an answer, larger for the better of two (Bradley and Terry 1952; Ouyang et al., arXiv
2203.02155, equation 1)."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.tools.tune.config import RewardConfig
from shardfold.tools.tune.log_probs import by_sample, number_of_samples
from shardfold.tools.tune.run import Loss, Recipe

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch
    from shardfold.tools.tune.run import TuneRun

__all__ = ["RECIPE", "Reward", "last_tokens", "token_scores"]


def token_scores(model: Any, **inputs: Any) -> Tensor:
    """``(B, L)``: the number behind each token. Transformers' own forward gives that of one token of each line."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = getattr(inner, inner.base_model_prefix)(**inputs, use_cache=False).last_hidden_state
    return inner.score(hidden)[..., 0]


def last_tokens(documents: Tensor) -> Tensor:
    """``(B, L)`` bool: whether a token is the last of its sample.

    Args:
        documents: ``(B, L)``, the number of each token's sample; -1 for padding.
    """
    last = torch.ones_like(documents, dtype=torch.bool)
    last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    return last & (documents >= 0)


class Reward(Recipe):
    """Every pair counts alike."""

    figures = ("accuracy", "margin")

    def made(self, run: TuneRun, model: nn.Module) -> None:
        """The model gives numbers for all tokens too."""
        vars(model)["token_scores"] = MethodType(token_scores, model)
        sf.register_forward(model, "token_scores")

    def scores(self, run: TuneRun, batch: Batch) -> Tensor:
        """``(samples,)``: the number behind each sample's last token."""
        last, samples = run.on_rank_of(last_tokens(batch.documents), batch), number_of_samples(batch)
        part = run.on_rank(batch)
        model: Any = run.model if run.part is None else run.part
        found = model.token_scores(**part.inputs).float()
        return by_sample(run, torch.where(last, found, 0.0), part, samples)

    def weight(self, batch: Batch) -> float:
        return float(len(batch.rows))

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """Mean over this rank's pairs."""
        assert isinstance(run.config, RewardConfig)
        better, worse = self.scores(run, batch).view(-1, 2).unbind(-1)
        losses = -F.logsigmoid(better - worse) + run.config.center * (better + worse).square()
        pairs = len(losses)
        with torch.no_grad():
            right = (better > worse).double().sum() / max(pairs, 1)
            margin = (better - worse).sum() / max(pairs, 1)
        return Loss(losses.sum() / max(pairs, 1), pairs, {"accuracy": right, "margin": margin})


RECIPE = Reward
