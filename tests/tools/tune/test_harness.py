"""Likelihoods under an engine are those of lm-evaluation-harness' own model of transformers, where it is installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from shardfold.testing import Ranks
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = [needs("transformers", "lm_eval"), pytest.mark.soak]


def tasks() -> list[Any]:
    """Three of our own: choices behind a question, the last words of a text, and whole texts, some of them longer than
    what the model reads."""
    import random

    from datasets import Dataset

    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choice(support.WORDS) for _ in range(draw.randint(least, most)))

    choices = [
        {"question": words(1, 6), "choices": [words(1, 4) for _ in range(3)], "answer": draw.randrange(3)}
        for _ in range(8)
    ]
    ends = [{"text": words(2, 9), "last": words(1, 2)} for _ in range(8)]
    whole = [{"text": words(3, 80)} for _ in range(8)]

    def task(name: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        found = {"test": Dataset.from_list(rows)}
        return {"task": name, "custom_dataset": lambda **_: found, "test_split": "test", "num_fewshot": 0, **more}

    return [
        task("own_choices", choices, output_type="multiple_choice", doc_to_text="{{question}}",
             doc_to_choice="{{choices}}", doc_to_target="{{answer}}"),
        task("own_ends", ends, output_type="loglikelihood", doc_to_text="{{text}}", doc_to_target=" {{last}}"),
        task("own_texts", whole, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
             metric_list=[{"metric": "bits_per_byte"}]),
    ]  # fmt: skip


def figures(folder: str, ours: bool) -> dict[str, list[Any]]:
    """What each request of each task was answered."""
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    from shardfold.tools.tune.eval_config import EvalConfig
    from shardfold.tools.tune.lm_eval_model import HarnessModel

    warnings.simplefilter("ignore")
    if ours:
        config = {"model": folder, "data": "-", "layout": "zero3", "batch_tokens": 300}
        model: Any = HarnessModel(EvalConfig.load(config))
    else:
        model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    found: Any = lm_eval.simple_evaluate(model=model, tasks=tasks(), log_samples=True, bootstrap_iters=0)
    if ours:
        model.close()
    if found is None:  # the harness gives its results to a host's first rank alone
        return {}
    return {name: [each["resps"] for each in rows] for name, rows in found["samples"].items()}


def test_likelihoods_are_those_of_the_harness(ranks: Ranks, tmp_path: Path) -> None:
    """Of every request of three tasks, on two ranks under zero3: within rounding, and greedy where theirs are."""
    folder = str(support.model_folder(tmp_path / "model", scale=8.0))
    wanted = ranks.run(figures, folder, False, world_size=1, timeout=240)[0]
    found = ranks.run(figures, folder, True, world_size=2, timeout=240)[0]
    assert [len(rows) for rows in wanted.values()] == [8, 8, 8]
    for name, rows in wanted.items():
        for theirs, ours in zip(rows, found[name], strict=True):
            assert _flat(ours) == pytest.approx(_flat(theirs), rel=1e-5, abs=1e-5), name


def _flat(answers: Any) -> list[float]:
    if isinstance(answers, list | tuple):
        return [value for each in answers for value in _flat(each)]
    return [float(answers)]
