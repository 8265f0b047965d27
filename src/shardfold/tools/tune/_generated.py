"""Answers that a model gives to the prompts of an evaluation, and what they are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import shardfold as sf
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.observe.working_line import working
from shardfold.tools.tune._answers import is_match
from shardfold.tools.tune.data.encoding import Encoder
from shardfold.tools.tune.data.row_formats import Example
from shardfold.tools.tune.eval_config import EvalConfig

__all__ = [
    "AnswerScores",
    "AskedPrompt",
    "BestOfScores",
    "GivenAnswer",
    "ask",
    "asked_prompts",
    "score_answers",
    "score_best_of",
]

UNUSED = -1.0
RANKS_APART = 1_000_003  # of seeds: no two ranks draw alike


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt to be answered.

    Attributes:
        ids: its tokens.
        text: for people.
        reference: the answer that the data have; None: none.
        fields: the row's columns, for a reward.
    """

    ids: list[int]
    text: str
    reference: str | None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GivenAnswer:
    """An answer to a prompt.

    Attributes:
        text: without the token that ends it.
        ids: its tokens, that one included.
        stopped: whether it ended by itself.
    """

    text: str
    ids: Sequence[int]
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class AnswerScores:
    """Of one greedy answer to each prompt.

    Attributes:
        prompts: how many there are.
        stopped: share of answers that ended by themselves, before ``max_tokens``.
        mean_tokens: tokens of an answer.
        exact_match: share of answers with the reference's result (behind ``####``) or words; None: no references.
        reward: mean of the rewards; None: none was asked for.
    """

    prompts: int
    stopped: float
    mean_tokens: float
    exact_match: float | None = None
    reward: float | None = None


@dataclass(frozen=True, kw_only=True)
class BestOfScores:
    """Of several answers that are drawn for each prompt.

    Attributes:
        samples: answers to each prompt.
        stopped: share of all answers that ended by themselves.
        exact_match: mean over all answers; None: no references.
        reward: mean over all answers; None: none was asked for.
        best_reward: mean over prompts of the best answer's.
        best_exact_match: share of prompts whose best answer, by reward, matches.
        any_exact_match: share of prompts of whose answers at least one matches (pass@n).
    """

    samples: int
    stopped: float
    exact_match: float | None = None
    reward: float | None = None
    best_reward: float | None = None
    best_exact_match: float | None = None
    any_exact_match: float | None = None


def asked_prompts(model: OpenedModel, examples: Sequence[Example], config: EvalConfig) -> list[AskedPrompt]:
    """The first prompts of the data that leave room for an answer."""
    encoder = Encoder(model.tokenizer, "prompt", config.template, "assistant", max(1, model.context - 1))
    found: list[AskedPrompt] = []
    chosen = [each for each in examples if each.prompt][: config.answers]
    for example, encoded in zip(chosen, encoder.encode(list(chosen)), strict=True):
        ids = encoded.sequences[0].ids.tolist()
        if ids:
            text = example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
            found.append(AskedPrompt(ids, text, _reference(example), example.fields))
    return found


def ask(
    model: OpenedModel, prompts: Sequence[AskedPrompt], config: EvalConfig, *, n: int = 1, greedy: bool
) -> list[list[GivenAnswer]]:
    """Answer all prompts, `n` times each. All ranks call it, each answers its part."""
    engine = model.engine
    mine = list(range(engine.data_rank, len(prompts), engine.data_ranks))
    longest = config.max_tokens
    told = [[UNUSED] * (longest + 1) for _ in range(len(prompts) * n)]
    answers = sf.generate(
        engine,
        [prompts[number].ids for number in mine],
        max_tokens=longest,
        temperature=0.0 if greedy else config.temperature,
        top_p=1.0 if greedy else config.top_p,
        seed=config.seed + RANKS_APART * engine.data_rank,  # requests count from 0 on each rank
        stop=model.stops,
        n=n,
    )
    with working("answering", unit="answers") as line:
        for count, answer in enumerate(answers, 1):
            place = mine[answer.request] * n + answer.sample
            told[place] = [float(answer.finish == "stop"), *map(float, answer.tokens)]
            told[place] += [UNUSED] * (longest + 1 - len(told[place]))
            line.amount(count, len(mine) * n)
    flat = engine.max_over_ranks([value for row in told for value in row]) if told else []
    rows = [flat[place : place + longest + 1] for place in range(0, len(flat), longest + 1)]
    given = [_given(model, row) for row in rows]
    return [given[place : place + n] for place in range(0, len(given), n)]


def score_answers(
    prompts: Sequence[AskedPrompt], answers: Sequence[Sequence[GivenAnswer]], rewards: Sequence[Sequence[float]] | None
) -> AnswerScores:
    """Of one answer to each prompt."""
    given = [each[0] for each in answers]
    matches = _matches(prompts, answers)
    return AnswerScores(
        prompts=len(prompts),
        stopped=_mean([each.stopped for each in given]),
        mean_tokens=_mean([len(each.ids) for each in given]),
        exact_match=_mean([each[0] for each in matches]) if matches else None,
        reward=_mean([each[0] for each in rewards]) if rewards is not None else None,
    )


def score_best_of(
    prompts: Sequence[AskedPrompt], answers: Sequence[Sequence[GivenAnswer]], rewards: Sequence[Sequence[float]] | None
) -> BestOfScores:
    """Of several answers to each prompt."""
    matches = _matches(prompts, answers)
    paired = [
        row[values.index(max(values))]
        for row, values, asked in zip(_all_matches(prompts, answers), rewards or [], prompts, strict=False)
        if asked.reference is not None
    ]
    return BestOfScores(
        samples=len(answers[0]),
        stopped=_mean([each.stopped for row in answers for each in row]),
        exact_match=_mean([each for row in matches for each in row]) if matches else None,
        reward=_mean([each for row in rewards for each in row]) if rewards is not None else None,
        best_reward=_mean([max(row) for row in rewards]) if rewards is not None else None,
        best_exact_match=_mean(paired) if paired else None,
        any_exact_match=_mean([any(row) for row in matches]) if matches else None,
    )


def _given(model: OpenedModel, row: Sequence[float]) -> GivenAnswer:
    tokens = [int(value) for value in row[1:] if value != UNUSED]
    shown = tokens[:-1] if tokens and tokens[-1] in model.stops else tokens
    text = model.tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return GivenAnswer(text=text, ids=tokens, stopped=row[0] == 1.0)


def _reference(example: Example) -> str | None:
    if not example.answers or not example.answers[0]:
        return None
    answer = example.answers[0]
    return answer if isinstance(answer, str) else str(answer[-1].get("content", ""))


def _all_matches(prompts: Sequence[AskedPrompt], answers: Sequence[Sequence[GivenAnswer]]) -> list[list[bool]]:
    return [
        [asked.reference is not None and is_match(each.text, asked.reference) for each in row]
        for asked, row in zip(prompts, answers, strict=True)
    ]


def _matches(prompts: Sequence[AskedPrompt], answers: Sequence[Sequence[GivenAnswer]]) -> list[list[bool]]:
    """Of the prompts that have a reference."""
    rows = zip(prompts, _all_matches(prompts, answers), strict=True)
    return [row for asked, row in rows if asked.reference is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
