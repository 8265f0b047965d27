"""How the next token is chosen of a row of logits, for many texts at once.

Draws are numbers of a counter, not of a stream: the n-th token of a text is drawn with a hash of (seed, sample, n). So
it depends neither on what else is in the batch nor on how often the text was begun anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.plan.checks import described, is_integer, is_number

__all__ = ["SamplingRule", "choose", "uniform"]

U64 = npt.NDArray[np.uint64]
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingRule:
    """How tokens of one text are drawn: logits are divided by the temperature, then the ``top_k`` likeliest are kept,
    then of these the likeliest whose probabilities sum to ``top_p``, as transformers does it.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: in (0, 1]; 1 keeps all.
        top_k: 0 keeps all.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature, 0, 1e6):
            raise ConfigError(
                f"generate(temperature={described(self.temperature)}): it is a number >= 0; 0 takes the likeliest."
            )
        if not is_number(self.top_p, 0, 1) or not self.top_p:
            raise ConfigError(
                f"generate(top_p={described(self.top_p)}): it is above 0 and at most 1, which keeps all tokens."
            )
        if not is_integer(self.top_k, 0):
            raise ConfigError(f"generate(top_k={described(self.top_k)}): it is a whole number; 0 keeps all tokens.")
        if not is_integer(self.seed, 0, MOST_SEED):
            raise ConfigError(f"generate(seed={described(self.seed)}): it is a whole number from 0 to 2^63 - 1.")


def _mix(x: U64) -> U64:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which mixes all bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: Sequence[int], samples: Sequence[int], numbers: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), one for each text: of its seed, which of its prompt's samples it is, its token's number."""
    with np.errstate(over="ignore"):
        x = _mix(np.asarray(seeds, np.uint64))
        x = _mix(x ^ np.asarray(samples, np.uint64))
        x = _mix(x ^ np.asarray(numbers, np.uint64))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(
    logits: Tensor, rules: Sequence[SamplingRule], samples: Sequence[int], numbers: Sequence[int]
) -> tuple[list[int], list[float]]:
    """The next token of each text and its log-probability.

    The log-probability is of the whole vocabulary at the text's temperature (of ``logits / temperature``; at
    temperature 0 of the logits): what a training forward computes from its logits. ``top_k`` and ``top_p`` do not
    change it.

    Args:
        logits: ``(texts, vocabulary)``.
        rules: of each text.
        samples: which of its prompt's samples each text is.
        numbers: of the token in each text, from 0.
    """
    scores = logits.float()
    greedy = [not rule.temperature for rule in rules]
    if any(rule.temperature not in (0, 1) for rule in rules):
        heat = torch.tensor([rule.temperature or 1.0 for rule in rules], device=scores.device)
        scores = scores / heat[:, None]
    log_probs = scores.log_softmax(-1)
    if all(greedy):
        tokens = scores.argmax(-1, keepdim=True)
    else:
        kept = log_probs
        if any(rule.top_k or rule.top_p < 1 for rule in rules):
            kept = _kept(log_probs, rules)
        draws = uniform([rule.seed for rule in rules], samples, numbers)
        tokens = _drawn(kept, torch.from_numpy(draws).to(scores.device))
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=scores.device)[:, None], scores.argmax(-1, True), tokens)
    chosen = log_probs.gather(-1, tokens)
    return tokens.squeeze(-1).tolist(), chosen.squeeze(-1).tolist()


def _kept(log_probs: Tensor, rules: Sequence[SamplingRule]) -> Tensor:
    """What is not kept is -inf; of equal logits at the border all are kept by ``top_k``."""
    vocabulary = log_probs.shape[-1]
    ranked, order = log_probs.sort(dim=-1, descending=True, stable=True)
    most = torch.tensor([min(rule.top_k or vocabulary, vocabulary) for rule in rules], device=log_probs.device)
    floor = ranked.gather(-1, most[:, None] - 1)
    ranked = ranked.masked_fill(ranked < floor, -torch.inf)
    share = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=log_probs.device)
    probs = ranked.double().softmax(-1)
    before = probs.cumsum(-1) - probs  # the likeliest token is always kept
    ranked = ranked.masked_fill((before >= share[:, None]) & (share < 1)[:, None], -torch.inf)
    return torch.full_like(log_probs, -torch.inf).scatter(-1, order, ranked)


def _drawn(log_probs: Tensor, draws: Tensor) -> Tensor:
    """Inverts the distribution function at each draw, in double: tokens ``(texts, 1)``."""
    sums = log_probs.double().exp().cumsum(-1)
    last = sums[:, -1:]
    target = torch.minimum(draws[:, None] * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(sums, target, right=True).clamp_(max=log_probs.shape[-1] - 1)
