"""Which token is drawn: transformers' rules, and draws that follow from a counter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardfold.generation.sampling import SamplingRule, _kept, choose, uniform

LOGITS = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (0, 0.7), (9, 0.5), (1, 1.0), (0, 0.01), (999, 0.9)])
def test_what_is_kept_is_what_transformers_keeps(top_k: int, top_p: float) -> None:
    from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

    warpers: Any = LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else [])
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.empty(64, 0, dtype=torch.int64), LOGITS.clone())
    kept = _kept(LOGITS.log_softmax(-1), [SamplingRule(1.0, top_p, top_k)] * 64)
    assert torch.equal(kept.isfinite(), expected.isfinite())


def test_frequencies_are_probabilities() -> None:
    """Of 40,000 draws of one row: within five standard deviations each."""
    count = 40_000
    rule = SamplingRule(temperature=2.0, top_k=6)
    scores = LOGITS[:1] / 2
    tokens, log_probs = choose(LOGITS[:1].expand(count, -1), [rule] * count, [0] * count, list(range(count)))
    found = torch.bincount(torch.tensor(tokens), minlength=50) / count
    top = scores[0].topk(6).indices
    expected = torch.zeros(50).index_copy(0, top, scores[0, top].softmax(-1))
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()
    # Of the whole vocabulary at the temperature, whatever top_k kept.
    assert log_probs[:9] == pytest.approx([scores.log_softmax(-1)[0, token].item() for token in tokens[:9]])


def test_rules_of_their_own_in_one_batch() -> None:
    rules = [
        SamplingRule(0.0),
        SamplingRule(0.5, seed=7),
        SamplingRule(1.0, top_k=1),
        SamplingRule(1.0, 0.3, 4, 9),
    ] * 16
    samples, numbers = [0] * 64, list(range(64))
    together = choose(LOGITS, rules, samples, numbers)
    for row in range(64):
        tokens, log_probs = choose(LOGITS[row : row + 1], rules[row : row + 1], [0], [row])
        assert tokens == [together[0][row]] and log_probs == pytest.approx([together[1][row]])


def test_draws_are_uniform_and_all_their_own() -> None:
    """Neighbouring seeds, samples and numbers have nothing in common."""
    grid = np.stack(np.meshgrid(range(20), range(20), range(50)), -1).reshape(-1, 3)
    draws = uniform(grid[:, 0].tolist(), grid[:, 1].tolist(), grid[:, 2].tolist())
    assert len(set(draws.tolist())) == len(draws) and draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi squared, 19 degrees of freedom: 1 in 10,000
    assert np.abs(np.corrcoef(draws.reshape(20, 20, 50).reshape(20, -1)) - np.eye(20)).max() < 0.15
