"""Which token is drawn: transformers' rules, and draws that follow from a counter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardfold.generation.sampling import SamplingRule, _log_sums, choose, uniform
from tests.generation.models import made

LOGITS = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3


RULES = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_k": 9, "top_p": 0.5},
    {"top_k": 1},
    {"top_p": 0.01},
    {"top_k": 999, "top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "temperature": 1.7},
    {"repetition": 1.8},
    {"repetition": 0.6, "top_k": 12, "top_p": 0.8, "temperature": 0.7},
]
SAID = torch.randint(0, 50, (64, 30), generator=torch.Generator().manual_seed(1))


def _theirs(rule: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """Scores as transformers' processors give them in ``generate``."""
    from transformers import GenerationConfig

    named = {"repetition_penalty" if name == "repetition" else name: value for name, value in rule.items()}
    config = GenerationConfig(**{"do_sample": True, "top_k": 0, "top_p": 1.0, **named})
    processors = made()._get_logits_processor(config, input_ids_seq_length=30, encoder_input_ids=SAID)
    assert len(processors) == len(rule)
    return processors(SAID, logits.clone())


@pytest.mark.parametrize("vocabulary", [50, 3000])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_drawn_from_what_transformers_keeps(rule: dict[str, Any], vocabulary: int) -> None:
    """One for each of 25 draws inverts the distribution function that their scores have."""
    logits = LOGITS if vocabulary == 50 else torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(2))
    sums = _theirs(rule, logits).double().softmax(-1).cumsum(-1)
    ours = SamplingRule(seed=3, **rule)
    for number in range(25):
        tokens, _, _ = choose(logits, [ours] * 64, range(64), [number] * 64, SAID.tolist())
        draws = torch.from_numpy(uniform([3] * 64, range(64), [number] * 64))[:, None]
        place = torch.tensor(tokens)[:, None]
        # Rounding in fp32, which theirs have: 1e-5 of the sum on either side.
        assert (sums.gather(-1, place) > draws - 1e-5).all()
        before = torch.where(place > 0, sums.gather(-1, (place - 1).clamp(min=0)), 0.0)
        assert (before <= draws + 1e-5).all()


def test_a_penalty_turns_the_likeliest_and_not_its_log_probability() -> None:
    """Greedily, as transformers; the log-probabilities and tops are those of the logits."""
    rule: dict[str, Any] = {"repetition": 3.0}
    tokens, log_probs, tops = choose(
        LOGITS, [SamplingRule(0.0, top_log_probs=4, **rule)] * 64, [0] * 64, [0] * 64, SAID.tolist()
    )
    assert tokens == _theirs(rule, LOGITS).argmax(-1).tolist() != LOGITS.argmax(-1).tolist()
    plain = LOGITS.log_softmax(-1)
    assert log_probs == pytest.approx([plain[row, token].item() for row, token in enumerate(tokens)], abs=1e-5)
    values, places = plain.topk(4)
    assert [[token for token, _ in row] for row in tops] == places.tolist()
    assert [each for row in tops for _, each in row] == pytest.approx(values.flatten().tolist(), abs=1e-5)


def test_the_sum_of_a_row_is_that_of_pytorch_where_it_is_infinite() -> None:
    """Rows of which all or some tokens cannot come, and one that is beyond fp32: none is NaN."""
    scores = LOGITS.clone()
    scores[3], scores[7, 5:], scores[9, 2], scores[60] = -torch.inf, -torch.inf, torch.inf, 3.4e38
    torch.testing.assert_close(_log_sums(scores), scores.logsumexp(-1, keepdim=True))
    tokens, log_probs, _ = choose(scores[7:8], [SamplingRule(0.0)], [0], [0], [()])
    assert log_probs == pytest.approx([scores[7].log_softmax(-1)[tokens[0]].item()])


def test_tokens_that_cannot_come_are_not_among_the_likeliest() -> None:
    """Of a vocabulary of which all but five are masked the likeliest nine are five, and none is -inf, which JSON has no
    word for."""
    scores = LOGITS[:2].clone()
    scores[1, 5:] = -torch.inf
    _, _, tops = choose(scores, [SamplingRule(0.0, top_log_probs=9)] * 2, [0] * 2, [0] * 2, [(), ()])
    assert [len(each) for each in tops] == [9, 5]
    assert {token: log_prob for token, log_prob in tops[1]} == pytest.approx(
        dict(enumerate(scores[1].log_softmax(-1)[:5].tolist()))
    )


def test_frequencies_are_probabilities() -> None:
    """Of 40,000 draws of one row: within five standard deviations each."""
    count = 40_000
    rule = SamplingRule(temperature=2.0, top_k=6)
    scores = LOGITS[:1] / 2
    nothing = [()] * count
    tokens, log_probs, _ = choose(LOGITS[:1].expand(count, -1), [rule] * count, [0] * count, range(count), nothing)
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
        SamplingRule(1.0, repetition=2.0, top_log_probs=3),
        SamplingRule(1.0, min_p=0.2, top_log_probs=1),
        SamplingRule(0.0, repetition=0.5),
        SamplingRule(2.0, top_p=0.9),
    ] * 8
    samples, numbers, said = [0] * 64, list(range(64)), SAID.tolist()
    together = choose(LOGITS, rules, samples, numbers, said)
    for row in range(64):
        tokens, log_probs, tops = choose(LOGITS[row : row + 1], rules[row : row + 1], [0], [row], said[row : row + 1])
        assert tokens == [together.tokens[row]] and log_probs == pytest.approx([together.log_probs[row]])
        assert [token for token, _ in tops[0]] == [token for token, _ in together.tops[row]]
        assert len(tops[0]) == rules[row].top_log_probs


def test_draws_are_uniform_and_all_their_own() -> None:
    """Neighbouring seeds, samples and numbers have nothing in common."""
    grid = np.stack(np.meshgrid(range(20), range(20), range(50)), -1).reshape(-1, 3)
    draws = uniform(grid[:, 0].tolist(), grid[:, 1].tolist(), grid[:, 2].tolist())
    assert len(set(draws.tolist())) == len(draws) and draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi squared, 19 degrees of freedom: 1 in 10,000
    assert np.abs(np.corrcoef(draws.reshape(20, 20, 50).reshape(20, -1)) - np.eye(20)).max() < 0.15
