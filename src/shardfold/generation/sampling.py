"""How the next token is chosen of a row of logits, for many texts at once.

Draws are numbers of a counter, not of a stream: the n-th token of a text is drawn with a hash of (seed, sample, n). So
it depends neither on what else is in the batch nor on how often the text was begun anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.plan.checks import described, is_integer, is_number

__all__ = ["SamplingRule", "Tops", "choose", "prompt_seed", "uniform"]

U64 = npt.NDArray[np.uint64]
Tops = list[tuple[int, float]]
MOST_SEED = 2**63 - 1
MOST_TOPS = 1000
RANKED = 512
"""Tokens among which ``top_p`` is looked for first: all of a vocabulary are sorted where these are too few."""
BLOCK = 128
"""Probabilities that are summed before one of them is chosen."""
SUMMED = 16
"""Rows of logits that are summed at a time."""
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class SamplingRule:
    """How tokens of one text are drawn, in the order of transformers: logits of tokens that the text has already are
    penalized, all are divided by the temperature, then the ``top_k`` likeliest are kept, then of these the likeliest
    whose probabilities sum to ``top_p``, then those that are at least ``min_p`` times as likely as the likeliest. Of
    equal logits at a border all are kept.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: in (0, 1]; 1 keeps all.
        top_k: 0 keeps all.
        seed: of the draws.
        repetition: logits of tokens in the prompt and the answer so far are divided by it where they are positive, and
            multiplied where they are negative (CTRL, Keskar et al. 2019); 1 changes none.
        min_p: in [0, 1]; 0 keeps all (Nguyen et al. 2024).
        top_log_probs: how many of the likeliest tokens are told beside each token, at most: those that cannot come
            (-inf) are not.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repetition: float = 1.0
    min_p: float = 0.0
    top_log_probs: int = 0

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
        if not is_number(self.repetition, 0, 1e6) or not self.repetition:
            raise ConfigError(
                f"generate(repetition={described(self.repetition)}): it is a number above 0; 1 penalizes nothing."
            )
        if not is_number(self.min_p, 0, 1):
            raise ConfigError(f"generate(min_p={described(self.min_p)}): it is from 0, which keeps all tokens, to 1.")
        if not is_integer(self.top_log_probs, 0, MOST_TOPS):
            raise ConfigError(
                f"generate(top_log_probs={described(self.top_log_probs)}): it is a whole number from 0 to {MOST_TOPS}."
            )

    @property
    def cuts(self) -> bool:
        """Whether it keeps some tokens and not others."""
        return bool(self.temperature and (self.top_k or self.top_p < 1 or self.min_p))


class ChosenTokens(NamedTuple):
    """The next token of each text.

    Attributes:
        tokens: of each.
        log_probs: of that token.
        tops: of each its likeliest tokens with their log-probabilities, as many as its rule asks for.
    """

    tokens: list[int]
    log_probs: list[float]
    tops: list[Tops]


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


def prompt_seed(seed: int, number: int) -> int:
    """Of a prompt by its number, where one seed is given for all: far from those of other seeds."""
    return ((seed * 0x9E3779B97F4A7C15) ^ (number * 0xD1342543DE82EF95)) & MOST_SEED


def choose(
    logits: Tensor,
    rules: Sequence[SamplingRule],
    samples: Sequence[int],
    numbers: Sequence[int],
    texts: Sequence[Sequence[int]],
) -> ChosenTokens:
    """The next token of each text and its log-probability.

    The log-probability is of the whole vocabulary at the text's temperature (of ``logits / temperature``; at
    temperature 0 of the logits): what a training forward computes from its logits. What else a rule says does not
    change it.

    Args:
        logits: ``(texts, vocabulary)``.
        rules: of each text.
        samples: which of its prompt's samples each text is.
        numbers: of the token in each text, from 0.
        texts: the tokens of each so far.
    """
    scores = logits.float()
    if any(rule.temperature not in (0, 1) for rule in rules):
        heat = torch.tensor([rule.temperature or 1.0 for rule in rules], device=scores.device)
        scores = scores / heat[:, None]
    whole = _log_sums(scores)
    chosen_from = scores
    if any(rule.repetition != 1 for rule in rules):
        chosen_from = _penalized(scores, rules, texts)
    tokens = _likeliest(chosen_from)
    if any(rule.temperature for rule in rules):
        kept = chosen_from
        if any(rule.cuts for rule in rules):
            kept = chosen_from.masked_fill(chosen_from < _floors(chosen_from, rules), -torch.inf)
        draws = uniform([rule.seed for rule in rules], samples, numbers)
        drawn = _drawn(kept, chosen_from.gather(-1, tokens), torch.from_numpy(draws).to(scores.device))
        greedy = torch.tensor([not rule.temperature for rule in rules], device=scores.device)
        tokens = torch.where(greedy[:, None], tokens, drawn)
    log_probs = scores.gather(-1, tokens) - whole
    found = torch.cat([tokens.double(), log_probs.double()], -1).tolist()
    return ChosenTokens([int(row[0]) for row in found], [row[1] for row in found], _tops(scores, whole, rules))


def _log_sums(scores: Tensor) -> Tensor:
    """``logsumexp`` of each row, ``(texts, 1)``, some rows at a time: what lies between stays in cache."""
    if scores.device.type != "cpu":
        return scores.logsumexp(-1, keepdim=True)
    highest = scores.amax(-1, keepdim=True)
    highest.masked_fill_(highest.isinf(), 0.0)  # inf - inf is no number
    space = torch.empty_like(scores[:SUMMED])
    sums = [
        torch.sub(rows, most, out=space[: len(rows)]).exp_().sum(-1, keepdim=True)
        for rows, most in zip(scores.split(SUMMED), highest.split(SUMMED), strict=True)
    ]
    return torch.cat(sums).log_().add_(highest)


def _likeliest(scores: Tensor) -> Tensor:
    """The first of the likeliest tokens, ``(texts, 1)``."""
    if scores.device.type != "cpu":
        return scores.argmax(-1, keepdim=True)
    return torch.from_numpy(scores.numpy().argmax(-1))[:, None]  # NumPy's has vectors, PyTorch's has none


def _tops(scores: Tensor, whole: Tensor, rules: Sequence[SamplingRule]) -> list[Tops]:
    most = min(max(rule.top_log_probs for rule in rules), scores.shape[-1])
    if not most:
        return [[] for _ in rules]
    values, places = scores.topk(most)
    rows = zip(rules, places.tolist(), (values - whole).tolist(), strict=True)
    return [
        [each for each in zip(at[: rule.top_log_probs], of, strict=False) if each[1] != -np.inf]
        for rule, at, of in rows
    ]


def _penalized(scores: Tensor, rules: Sequence[SamplingRule], texts: Sequence[Sequence[int]]) -> Tensor:
    said = [np.unique(text) if rule.repetition != 1 else _NONE for rule, text in zip(rules, texts, strict=True)]
    rows = torch.from_numpy(np.repeat(np.arange(len(said)), [len(each) for each in said])).to(scores.device)
    tokens = torch.from_numpy(np.concatenate(said)).to(scores.device)
    rows, tokens = rows[tokens < scores.shape[-1]], tokens[tokens < scores.shape[-1]]
    penalties = torch.tensor([rule.repetition for rule in rules], device=scores.device)[rows]
    before = scores[rows, tokens]
    after = torch.where(before < 0, before * penalties, before / penalties)
    return scores.index_put((rows, tokens), after)


def _floors(scores: Tensor, rules: Sequence[SamplingRule]) -> Tensor:
    """Of each text the least score that is kept, ``(texts, 1)``."""
    vocabulary, device = scores.shape[-1], scores.device
    most_k = max(min(rule.top_k, vocabulary) for rule in rules)
    nucleus = any(rule.top_p < 1 for rule in rules)
    ranked = scores.topk(min(vocabulary, max(most_k, RANKED if nucleus else 1))).values
    floors = torch.full_like(ranked[:, :1], -torch.inf)
    if most_k:
        place = torch.tensor([min(rule.top_k, vocabulary) - 1 for rule in rules], device=device)[:, None]
        floors = torch.where(place >= 0, ranked.gather(-1, place.clamp(min=0)), floors)
    if nucleus:
        floors = torch.maximum(floors, _nucleus(scores, ranked, floors, rules))
    if any(rule.min_p for rule in rules):
        share = torch.tensor([rule.min_p for rule in rules], dtype=torch.float64, device=device).log()
        floors = torch.maximum(floors, (ranked[:, :1].double() + share[:, None]).float())
    return floors


def _nucleus(scores: Tensor, ranked: Tensor, floors: Tensor, rules: Sequence[SamplingRule]) -> Tensor:
    """Of each text the score of the last token that ``top_p`` keeps of those from its floor on."""
    share = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=scores.device)[:, None]
    kept = scores.masked_fill(scores < floors, -torch.inf).double().logsumexp(-1, keepdim=True)
    while True:
        probs = ranked.masked_fill(ranked < floors, -torch.inf).double().sub_(kept).exp_()
        sums = probs.cumsum(-1)
        if ranked.shape[-1] == scores.shape[-1] or bool(((sums[:, -1:] >= share) | (share >= 1)).all()):
            break
        ranked = scores.sort(descending=True).values
    last = (sums - probs < share).sum(-1, keepdim=True) - 1  # the likeliest token is always kept
    return torch.where(share < 1, ranked.gather(-1, last.clamp(min=0)), -torch.inf)


def _drawn(scores: Tensor, highest: Tensor, draws: Tensor) -> Tensor:
    """Inverts the distribution function at each draw, with sums in double: tokens ``(texts, 1)``."""
    texts, vocabulary = scores.shape
    probs = scores.new_zeros(texts, -(-vocabulary // BLOCK) * BLOCK)
    torch.sub(scores, highest, out=probs[:, :vocabulary]).exp_()
    blocks = probs.view(texts, -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = _below(draws[:, None] * sums[:, -1:], sums)
    block = torch.searchsorted(sums, target, right=True).clamp_(max=blocks.shape[1] - 1)  # of sums that are NaN
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(texts, device=scores.device), block[:, 0]].double().cumsum(-1)
    place = torch.searchsorted(inside, _below(target - before, inside), right=True)
    return (block * BLOCK + place).clamp_(max=vocabulary - 1)


def _below(target: Tensor, sums: Tensor) -> Tensor:
    """Less than the last sum, so that there is a token with a probability."""
    last = sums[:, -1:]
    return torch.minimum(target, torch.nextafter(last, torch.zeros_like(last))).clamp_(min=0)
