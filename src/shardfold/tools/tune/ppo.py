"""Proximal policy optimization (arXiv 1707.06347): a second model tells what an answer is going to be worth.

The value model is of the same kind with one number in place of logits, in an engine of its own under the same layout.
The divergence from the reference is a part of each token's reward, the answer's reward stands at its last token (arXiv
1909.08593), advantages are those of GAE (arXiv 1506.02438), brought to mean 0 and variance 1 over all ranks' tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import shardfold as sf
from shardfold.tools.tune.adapters import beginning
from shardfold.tools.tune.models import ModelPlace, hollow_model
from shardfold.tools.tune.reward import token_scores
from shardfold.tools.tune.rollouts import AnswerBatch, RolloutRecipe, token_log_probs, values_at
from shardfold.tools.tune.run import Loss

if TYPE_CHECKING:
    from shardfold.tools.tune.run import TuneRun

__all__ = ["PPO", "RECIPE", "advantages_of", "whitened"]


@dataclass(eq=False)
class Judged:
    """What PPO knows of the answers of one micro-batch; all of them (targets,).

    Attributes:
        values: what the value model expected in front of each token.
        advantages: of each token, whitened.
        returns: what it should have expected.
    """

    values: Tensor
    advantages: Tensor
    returns: Tensor


def advantages_of(rewards: Tensor, values: Tensor, lengths: Sequence[int], gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimation (arXiv 1506.02438), by answer from its last token on.

    Args:
        rewards, values: (targets,), of answers behind each other.
        lengths: of the answers.

    Returns:
        (targets,).
    """
    found = torch.zeros_like(rewards)
    start = 0
    for length in lengths:
        behind = expected = 0.0
        for at in range(start + length - 1, start - 1, -1):
            delta = float(rewards[at]) + gamma * expected - float(values[at])
            behind = delta + gamma * lam * behind
            expected = float(values[at])
            found[at] = behind
        start += length
    return found


def whitened(parts: Sequence[Tensor], engine: sf.Engine) -> list[Tensor]:
    """Less the mean of all values of all ranks, over their deviation (over one less than their number)."""
    mine = torch.cat([*parts, torch.zeros(0)]).double().cpu()
    count = float(len(mine))
    mean = engine.mean(float(mine.mean()) if count else 0.0, weight=count)
    spread = engine.mean(float((mine - mean).square().mean()) if count else 0.0, weight=count)
    whole = engine.mean(count) * engine.data_ranks
    deviation = (spread * whole / max(whole - 1, 1) + 1e-8) ** 0.5
    return [(part - mean) / deviation for part in parts]


AHEAD = 2  # checkpoints of the value model that the policy may not have yet


class PPO(RolloutRecipe):
    """Policy and value model are trained on the same answers, each by its engine."""

    _loaded: Path | None = None

    def __init__(self) -> None:
        self._judged: dict[int, Judged] = {}

    def begin(self, run: TuneRun) -> None:
        super().begin(run)
        config: Any = run.config
        place = ModelPlace.find(config.value) if config.value is not None else run.place
        settings = copy.deepcopy(run.model_config if config.value is None else place.config)
        model, tensors = beginning(hollow_model(settings, "score"), place, config.adapter, "score", config.seed)
        vars(model)["token_scores"] = MethodType(token_scores, model)
        sf.register_forward(model, "token_scores")
        self._model: Any = model
        self._engine = run.engine_of(model, tensors, run.total * self.updates, config.value_lr)
        if self._loaded is not None:
            self._engine.load(self._loaded)
        model.train()

    def close(self) -> None:
        super().close()
        self._engine.close()

    def saving(self, run: TuneRun, path: Path) -> None:
        """The value model's checkpoints lie beside the policy's, in ``value/``: before the policy's are begun, and two
        more of them are kept, as the policy's last one may still be written, and the one before it the latest."""
        self._engine.save(
            path.parents[1] / "value" / path.name,
            keep=run.config.keep + AHEAD,
            wait=True,
            frozen="keep" if run.trains_base else "skip",
        )

    def resumed(self, run: TuneRun, path: Path) -> None:
        self._loaded = path.parents[1] / "value" / path.name

    def answers(self, run: TuneRun) -> int:
        config: Any = run.config
        return config.n

    def _expected(self, micro: AnswerBatch) -> Tensor:
        """(targets,) of the value model, one number in front of each token of an answer."""
        return values_at(self._model.token_scores(**micro.batch.inputs), micro.batch).float()

    def weigh(self, run: TuneRun, micros: Sequence[AnswerBatch]) -> None:
        config: Any = run.config
        raw, kept = [], []
        self._model.eval()
        for micro in micros:
            with torch.no_grad():
                values = self._expected(micro)
            rewards = torch.zeros_like(values)
            if micro.reference is not None:
                rewards -= config.beta * (micro.old - micro.reference)
            lengths = micro.lengths.tolist()
            if lengths:
                last = micro.lengths.cumsum(0) - 1
                rewards[last] += rewards.new_tensor([each.reward for each in micro.drawn])
            raw.append(advantages_of(rewards, values, lengths, config.gamma, config.lam))
            kept.append(values)
        self._model.train()
        self._judged = {
            id(micro): Judged(values, white, plain + values)
            for micro, values, plain, white in zip(micros, kept, raw, whitened(raw, run.engine), strict=True)
        }

    def loss_of(self, run: TuneRun, micro: AnswerBatch) -> Loss:
        config: Any = run.config
        judged = self._judged[id(micro)]
        found = token_log_probs(run.logits(micro.batch), micro.batch, config.temperature)
        ratio = (found - micro.old).exp()
        clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon)
        values = -torch.minimum(ratio * judged.advantages, clipped * judged.advantages)
        count = max(len(values), 1)
        figures = {"ratio": ratio.detach().sum() / count, "clipped": (clipped != ratio).float().sum() / count}
        if micro.reference is not None:
            figures["kl"] = (micro.old - micro.reference).sum() / count
        expected = self._expected(micro)
        near = judged.values + (expected - judged.values).clamp(-config.value_clip, config.value_clip)
        errors = torch.maximum((expected - judged.returns).square(), (near - judged.returns).square())
        value_loss = 0.5 * errors.sum() / count
        self._engine.backward(value_loss, weight=float(len(values)))
        self._engine.step()
        figures["value_loss"] = value_loss.detach()
        return Loss(values.sum() / count, float(len(values)), figures)


RECIPE = PPO
