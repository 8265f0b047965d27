"""What a model has learned, in figures: `shardfold eval`.

Likelihoods first (loss, bits per byte, accuracy, choices), then answers (do they end, are they right, how are they
rated). Every figure is over all rows and does not depend on ranks, layout, packing or the sizes of batches.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from shardfold.errors import ConfigError
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.tables import headed, new_table, print_whole
from shardfold.tools.tune._eval_rows import EvalRows, read_rows
from shardfold.tools.tune._generated import (
    AnswerScores,
    AskedPrompt,
    BestOfScores,
    GivenAnswer,
    ask,
    asked_prompts,
    score_answers,
    score_best_of,
)
from shardfold.tools.tune._likelihoods import ChoiceScores, LanguageScores, score_choices, score_language
from shardfold.tools.tune.data.templates import chat_template
from shardfold.tools.tune.eval_config import EvalConfig
from shardfold.tools.tune.rewards import Completion, Reward, rewards_of

__all__ = ["Evaluation", "evaluate", "language_scores"]

RESULT, ANSWERS = "eval.json", "eval_answers.jsonl"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found, as ``eval.json`` has it; the same on every rank.

    Attributes:
        model: the folder.
        data: files and folders.
        rows: how many rows they have.
        language: of texts and conversations; None: there are none.
        choices: of questions with choices; None: there are none.
        answers: of greedy answers to prompts; None: none were asked for.
        best_of: of several answers to each prompt; None: none were asked for.
        seconds: of all of it, loading included.
    """

    model: str
    data: list[str]
    rows: int
    language: LanguageScores | None
    choices: ChoiceScores | None
    answers: AnswerScores | None
    best_of: BestOfScores | None
    seconds: float

    def plain(self) -> dict[str, Any]:
        """As JSON has it; what does not exist is left out."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
            for name, value in found.items()
        }


def evaluate(config: EvalConfig) -> Evaluation:
    """Evaluate on this rank, together with the others if a launcher started several.

    Rank 0 writes ``eval.json`` and ``eval_answers.jsonl`` into `config.out`, or the model's folder, and prints a table.

    Raises:
        ConfigError: there is no such model, or the data have no rows that it can be held to.
    """
    began = time.perf_counter()
    rewards = None if config.reward is None else rewards_of(config.reward)
    model = OpenedModel.open(config)
    try:
        rows = _rows_for(model, config)
        language = score_language(model, rows, config)
        choices = score_choices(model, rows.questions, config)
        prompts = asked_prompts(model, rows.chats, config) if config.answers else []
        greedy = ask(model, prompts, config, greedy=True) if prompts else []
        drawn = ask(model, prompts, config, n=config.best_of, greedy=False) if prompts and config.best_of > 1 else []
        leads = model.engine.rank == 0
    finally:
        model.close()
    if language is None and choices is None and not prompts:
        raise ConfigError("data: nothing is left to evaluate: the rows are empty or longer than what the model reads.")
    greedy_rewards, drawn_rewards = _rated(rewards, prompts, greedy), _rated(rewards, prompts, drawn)
    found = Evaluation(
        model=str(config.model),
        data=[str(each.path) for each in config.data],
        rows=len(rows),
        language=language,
        choices=choices,
        answers=score_answers(prompts, greedy, greedy_rewards) if prompts else None,
        best_of=score_best_of(prompts, drawn, drawn_rewards) if drawn else None,
        seconds=round(time.perf_counter() - began, 3),
    )
    if leads:
        folder = config.out or config.model
        _write(folder, found, prompts, greedy, greedy_rewards, drawn, drawn_rewards)
        _show(found, folder)
    return found


def language_scores(model: OpenedModel, config: EvalConfig) -> LanguageScores | None:
    """How well a model that is opened already predicts the texts and answers of the data; None: there are none."""
    return score_language(model, _rows_for(model, config), config)


def _rows_for(model: OpenedModel, config: EvalConfig) -> EvalRows:
    has_template = not model.is_bytes and chat_template(model.tokenizer, config.template) is not None
    return read_rows(config.data, chat=has_template)


def _rated(
    rewards: Mapping[str, Reward] | None, prompts: Sequence[AskedPrompt], answers: Sequence[Sequence[GivenAnswer]]
) -> list[list[float]] | None:
    """Of all answers, prompt by prompt, the sum of what the functions give."""
    if rewards is None or not answers:
        return None

    def rated(asked: AskedPrompt, given: GivenAnswer) -> float:
        completion = Completion(asked.text, given.text, given.stopped, given.ids, asked.fields)
        return math.fsum(reward(completion) for reward in rewards.values())

    return [[rated(asked, given) for given in row] for asked, row in zip(prompts, answers, strict=True)]


def _write(
    folder: Path,
    found: Evaluation,
    prompts: Sequence[AskedPrompt],
    greedy: Sequence[Sequence[GivenAnswer]],
    greedy_rewards: Sequence[Sequence[float]] | None,
    drawn: Sequence[Sequence[GivenAnswer]],
    drawn_rewards: Sequence[Sequence[float]] | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(found.plain(), indent=2) + "\n", encoding="utf-8")
    with (folder / ANSWERS).open("w", encoding="utf-8") as file:
        for number, asked in enumerate(prompts):
            said: dict[str, Any] = {"prompt": asked.text}
            if asked.reference is not None:
                said["reference"] = asked.reference
            said["answers"] = _rows(greedy[number], greedy_rewards[number] if greedy_rewards else None, greedy=True)
            if drawn:
                said["answers"] += _rows(drawn[number], drawn_rewards[number] if drawn_rewards else None, greedy=False)
            file.write(json.dumps(said, ensure_ascii=False) + "\n")


def _rows(given: Sequence[GivenAnswer], rewards: Sequence[float] | None, *, greedy: bool) -> list[dict[str, Any]]:
    return [
        {
            "greedy": greedy,
            "text": each.text,
            "tokens": len(each.ids),
            "stopped": each.stopped,
            **({"reward": rewards[place]} if rewards is not None else {}),
        }
        for place, each in enumerate(given)
    ]


NAMES = {
    "loss": "loss, nats per token",
    "bits_per_byte": "bits per byte",
    "token_accuracy": "likeliest token right",
    "accuracy": "right choice likeliest",
    "accuracy_per_byte": "the same, per byte",
    "stopped": "ended by themselves",
    "mean_tokens": "tokens of an answer",
    "exact_match": "right answers",
    "reward": "reward",
    "best_reward": "reward of the best",
    "best_exact_match": "the best is right",
    "any_exact_match": "one of them is right",
}
SHARES = (
    "token_accuracy",
    "accuracy",
    "accuracy_per_byte",
    "stopped",
    "exact_match",
    "best_exact_match",
    "any_exact_match",
)


def _show(found: Evaluation, folder: Path) -> None:
    """Print the figures, and where they are."""
    table = new_table()
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right")
    table.add_column("over", style="dim")
    language, choices, answers, best = found.language, found.choices, found.answers, found.best_of
    for part, over in (
        (language, language and f"{language.tokens:,} tokens, {language.bytes:,} bytes"),
        (choices, choices and f"{choices.questions:,} questions"),
        (answers, answers and f"{answers.prompts:,} greedy answers"),
        (best, best and answers and f"{best.samples} drawn answers to each of {answers.prompts:,} prompts"),
    ):
        for name, value in (asdict(part) if part is not None else {}).items():
            if name in NAMES and value is not None:
                table.add_row(NAMES[name], Text(_figure(name, value)), over or "")
    console = lenient_console()
    print_whole(console, headed(f"{found.model}, {found.rows:,} rows", table))
    said = [f"\n{language.cut:,} rows were cut at the model's context."] if language and language.cut else []
    said.append(f"\nWritten to {folder}: {RESULT}{f', {ANSWERS}' if answers else ''}")
    console.print("\n".join(said), highlight=False, markup=False, soft_wrap=True)


def _figure(name: str, value: float) -> str:
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:.1f}" if name == "mean_tokens" else f"{value:.4f}"
