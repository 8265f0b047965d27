"""Group relative policy optimization (arXiv 2402.03300): answers to one prompt are compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfold.tools.tune.rollouts import AnswerBatch, RolloutRecipe, mean_of_answers, token_log_probs
from shardfold.tools.tune.run import Loss

if TYPE_CHECKING:
    from shardfold.tools.tune.run import TuneRun

__all__ = ["GRPO", "RECIPE", "group_advantages"]

LEAST = 1e-4
"""Added to the deviation of rewards, as TRL does."""


def group_advantages(rewards: Tensor, scale: str, deviation: float | None = None) -> Tensor:
    """Rewards less the mean of their group, over a deviation.

    Args:
        rewards: (groups, n).
        scale: ``"group"``: over each group's own deviation; ``"batch"``: over ``deviation``; ``"none"``.
        deviation: of all rewards.

    Returns:
        (groups, n).
    """
    found = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return found
    if scale == "group":
        return found / (rewards.std(1, keepdim=True) + LEAST)
    assert deviation is not None
    return found / (deviation + LEAST)


class GRPO(RolloutRecipe):
    """The clipped loss of PPO without a value function; with ``beta`` the KL divergence from the reference in the loss
    (the estimator k3 of http://joschu.net/blog/kl-approx.html)."""

    def answers(self, run: TuneRun) -> int:
        config: Any = run.config
        return config.n

    def weigh(self, run: TuneRun, micros: Sequence[AnswerBatch]) -> None:
        config: Any = run.config
        drawn = [each for micro in micros for each in micro.drawn]
        rewards = torch.tensor([each.reward for each in drawn], dtype=torch.float64).view(-1, config.n)
        deviation = _deviation(run, rewards) if config.scale == "batch" else None
        for each, value in zip(
            drawn, group_advantages(rewards, config.scale, deviation).view(-1).tolist(), strict=True
        ):
            each.advantage = value

    def loss_of(self, run: TuneRun, micro: AnswerBatch) -> Loss:
        config: Any = run.config
        found = token_log_probs(run.logits(micro.batch), micro.batch, config.temperature)
        advantage = found.new_tensor([each.advantage for each in micro.drawn])[micro.sample]
        ratio = (found - micro.old).exp()
        above = config.epsilon if config.epsilon_high is None else config.epsilon_high
        clipped = ratio.clamp(1 - config.epsilon, 1 + above)
        values = -torch.minimum(ratio * advantage, clipped * advantage)
        figures = {"clipped": (clipped != ratio).to(found.dtype), "ratio": ratio.detach()}
        if micro.reference is not None:
            apart = micro.reference - found
            divergence = apart.exp() - apart - 1
            values = values + config.beta * divergence
            figures["kl"] = divergence.detach()
        value, weight = _mean(values, micro, config.loss, config.max_tokens)
        return Loss(
            value,
            weight,
            {
                name: _mean(each, micro, config.loss, config.max_tokens)[0]
                if name != "ratio"
                else each.sum() / max(len(each), 1)
                for name, each in figures.items()
            },
        )


def _mean(values: Tensor, micro: AnswerBatch, loss: str, most: int) -> tuple[Tensor, float]:
    """The mean over tokens or answers, and of how many it is; of none, 0 with a way back to the model."""
    answers = len(micro.drawn)
    if loss == "dapo" or not answers:
        return values.sum() / max(len(values), 1), float(len(values))
    if loss == "grpo":
        return mean_of_answers(values, micro).mean(), float(answers)
    return values.sum() / (answers * most), float(answers)


def _deviation(run: TuneRun, rewards: Tensor) -> float:
    """Of all rewards of all ranks, over one less than their number."""
    engine, count = run.engine, float(rewards.numel())
    mean = engine.mean(float(rewards.sum()) / max(count, 1.0), weight=count)
    spread = engine.mean(float((rewards - mean).square().sum()) / max(count, 1.0), weight=count)
    whole = engine.mean(count) * engine.data_ranks
    return (spread * whole / max(whole - 1, 1)) ** 0.5


RECIPE = GRPO
