"""A model, questions and answers through SFT, DPO and GRPO on two ranks, and what is written read by plain peft and
transformers: with a small model made here, and with real ones from a folder that an environment variable names."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardfold.testing import Ranks
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers", "peft")

FOLDER = "SHARDFOLD_TEST_DATA"
ADAPTERS: dict[str, dict[str, Any] | None] = {"lora": {"rank": 8}, "whole": None}

Steps = dict[str, dict[str, Any]]


def _tuned(folder: str, name: str, stages: Steps) -> dict[str, dict[str, Any]]:
    """One recipe after the other, each from what the last has written; of each its figures and, on rank 0, by how much
    logits under its engine differ from those of what it wrote."""
    import torch

    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.observe.progress import Progress
    from shardfold.tools.observe.run_folder import Run
    from shardfold.tools.tune._written import write_model
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.run import TuneRun

    here, found = Path(folder), dict[str, dict[str, Any]]()
    model = here / "base"
    for recipe, settings in stages.items():
        common = {"model": model, "cache": here / "cache", "layout": "zero3", "adapter": ADAPTERS[name]}
        run = TuneRun(config_class(recipe).load({**common, **settings}), lenient_console())
        run.recipe.begin(run)
        before = run.evaluate() if run.held_out is not None else {}
        out = here / f"{name}-{recipe}"
        if run.leads:
            out.mkdir()
        with Progress(run.total, enabled=False) as progress:
            run.train(progress, Run(out, steps=run.total))
        after = run.evaluate() if run.held_out is not None else {}
        model = out / write_model(run, out)
        ids = torch.tensor([run.tokenizer("Tom has 3 apples and buys 4.")["input_ids"]])
        run.model.eval()
        with torch.no_grad():
            logits = run.engine(input_ids=ids, use_cache=False).logits
        found[recipe] = {"before": before, "after": after, "steps": [each.figures for each in run.history]}
        if run.leads:
            found[recipe]["apart"] = float((logits - _logits_read(model, ids)).abs().max())
        run.recipe.close()
        run.engine.close()
        run.stop.release()
    return found


def _logits_read(folder: Path, ids: Any) -> Any:
    """Of a folder of transformers, or of an adapter on the base that it names, as plain peft reads it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = folder / "adapter_config.json"
    base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else folder
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter.is_file():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
            model = PeftModel.from_pretrained(model, str(folder))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def _rows(material: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of each recipe from GSM8K's files: questions with answers; right solutions over wrong ones."""
    problems = {name: list(_lines(material / "gsm8k" / f"{name}.jsonl")) for name in ("train", "test")}
    pairs = []
    for row in _lines(material / "gsm8k" / "example_model_solutions.jsonl"):
        solutions = [each for each in row.values() if isinstance(each, dict)]
        good, bad = ([each["solution"] for each in solutions if each["is_correct"] is is_it] for is_it in (True, False))
        prompt = [{"role": "user", "content": row["question"]}]
        for chosen, rejected in zip(good, bad, strict=False):
            pairs.append(
                {
                    "prompt": prompt,
                    "chosen": [{"role": "assistant", "content": chosen.replace("\nA: ", "\n#### ")}],
                    "rejected": [{"role": "assistant", "content": rejected.replace("\nA: ", "\n#### ")}],
                }
            )
    held = max(1, len(pairs) // 10)
    made = {"pairs": pairs[held:], "pairs-held": pairs[:held]}
    for name, rows in problems.items():
        turns = [[{"role": r, "content": row[c]} for r, c in (("user", "question"), ("assistant", "answer"))]
                 for row in rows]  # fmt: skip
        made[f"chats-{name}"] = [{"messages": each} for each in turns]
        made[f"prompts-{name}"] = [
            {"prompt": each[:1], "answer": row["answer"], "contains": "####"}
            for each, row in zip(turns, rows, strict=True)
        ]
    return made


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _stages(folder: Path, sizes: Steps) -> Steps:
    data = {
        "sft": {"data": "chats-train", "eval_data": "chats-test"},
        "dpo": {"data": "pairs", "eval_data": "pairs-held"},
        "grpo": {"data": "prompts-train"},
    }
    found: Steps = {}
    for recipe, names in data.items():
        paths = {key: str(folder / f"{name}.jsonl") for key, name in names.items()}
        reward = {"reward": "contains,ends,gsm8k"} if recipe == "grpo" else {}
        found[recipe] = {**paths, **reward, **sizes[recipe]}
    return found


def _prepared(material: Path, folder: Path, held: int) -> None:
    (folder / "base").symlink_to(material / "stories260K")
    for name, rows in _rows(material).items():
        support.write_rows(folder / f"{name}.jsonl", rows[:held] if name.endswith(("test", "held")) else rows)


def _own_material(folder: Path) -> Path:
    """Of the same form as the real one."""
    support.model_folder(folder / "stories260K", scale=4.0)
    (folder / "gsm8k").mkdir()
    sums = [(a, b) for a in range(1, 5) for b in range(1, 4)]
    question = "Tom has {} apples and buys {}. How many?"
    rows = [{"question": question.format(a, b), "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a, b in sums]
    for name, part in (("train", rows[:8]), ("test", rows[8:])):
        support.write_rows(folder / "gsm8k" / f"{name}.jsonl", part)
    solved = [
        {
            "question": question.format(a, b), "ground_truth": f"{a + b}",
            "one": {"is_correct": True, "solution": f"{a}+{b}={a + b}\nA: {a + b}"},
            "two": {"is_correct": False, "solution": f"{a}+{b}={a}\nA: {a}"},
        }
        for a, b in sums
    ]  # fmt: skip
    support.write_rows(folder / "gsm8k" / "example_model_solutions.jsonl", solved)
    return folder


@pytest.mark.parametrize("name", ["lora", pytest.param("whole", marks=pytest.mark.soak)])
def test_what_three_recipes_write_is_what_they_trained(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Each goes on with what the one before it wrote, also where that is an adapter on a base; plain peft and
    transformers read the last one's logits out of it."""
    (tmp_path / "material").mkdir()
    _prepared(_own_material(tmp_path / "material"), tmp_path, 4)
    common = {"text": {"length": 96}, "lr": 1e-2, "micro_batch": 2, "steps": 2}
    answers = {"n": 2, "max_tokens": 8, "beta": 0.0}
    sizes = {"sft": common, "dpo": common, "grpo": {**common, **answers}}
    found = ranks.run(_tuned, str(tmp_path), name, _stages(tmp_path, sizes), world_size=2)[0]
    for recipe, stage in found.items():
        assert stage["apart"] < 1e-5, recipe
    assert found["sft"]["after"]["loss"] < found["sft"]["before"]["loss"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no folder with stories260K/ and gsm8k/")
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_real_model_on_real_questions(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Held-out loss falls by SFT, DPO begins at its reference (right and wrong solutions are beyond such a model), and
    GRPO's answers are worth more; what each writes is read by plain peft and transformers."""
    _prepared(Path(os.environ[FOLDER]), tmp_path, 32)
    common = {"text": {"length": 320}, "warmup": 5}
    rate = 1e-2 if name == "lora" else 2e-3
    sizes: Steps = {
        "sft": {**common, "lr": rate, "micro_batch": 8, "steps": 60},
        "dpo": {**common, "lr": rate / 20, "micro_batch": 4, "steps": 30},
        "grpo": {**common, "lr": rate / 10, "micro_batch": 4, "steps": 12, "n": 8, "max_tokens": 96},
    }
    found = ranks.run(_tuned, str(tmp_path), name, _stages(tmp_path, sizes), world_size=2, timeout=3000)[0]
    said = {recipe: {key: stage[key] for key in ("before", "after", "apart")} for recipe, stage in found.items()}
    rewards = [{key: value for key, value in each.items() if "reward" in key or key in ("ended", "answer_tokens")}
               for each in found["grpo"]["steps"]]  # fmt: skip
    print(json.dumps({**said, "first": rewards[:3], "last": rewards[-3:]}, indent=1))
    for recipe, stage in found.items():
        assert stage["apart"] < 1e-5, recipe
    assert found["sft"]["after"]["loss"] < found["sft"]["before"]["loss"]
    assert found["dpo"]["before"]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    first, last = (sum(each["reward"] for each in part) / 4 for part in (rewards[:4], rewards[-4:]))
    if name == "whole":  # so few steps of LoRA meet too few answers that are worth something
        assert last > first
