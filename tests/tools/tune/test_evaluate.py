"""`shardfold eval`: every figure is what plain transformers gives row by row, on any ranks, packed or not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tools.answering.byte_tokenizer import ByteTokenizer
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.recipes.lm import train
from shardfold.tools.recipes.train_config import TrainConfig
from shardfold.tools.tune._answers import final_number, is_match
from shardfold.tools.tune._likelihoods import scored_bytes
from shardfold.tools.tune._scoring import windows_of
from shardfold.tools.tune.data.rows import Tokens
from shardfold.tools.tune.eval_config import EvalConfig
from shardfold.tools.tune.evaluate import evaluate
from tests.tools.tune.support import chats, model_folder, texts, write_rows

TURNS = ("<user>", "<assistant>")
QUESTIONS = [
    {"question": "one two", "choices": ["red", "blue cat", "dog runs here"], "answer": 1},
    {"question": "cat ", "choices": ["sits", "runs"], "answer": "runs"},
    {"question": [{"role": "user", "content": "dog"}], "choices": ["here", "there"], "answer": 0},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("base") / "model", scale=8.0)


def plain(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def log_probs(model: Any, ids: Sequence[int], start: int) -> tuple[list[float], int]:
    """Of the tokens from `start` on, alone: their log-probabilities, and how many are the likeliest."""
    logits = model(input_ids=torch.tensor([list(ids)])).logits[0, start - 1 : -1].double()
    wanted = torch.tensor(list(ids[start:]))
    found = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return found.tolist(), int((logits.argmax(-1) == wanted).sum())


def by_hand(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Loss, bits per byte and accuracy of texts and conversations, one by one."""
    model, tokenizer = plain(folder)
    values: list[float] = []
    right = num_bytes = 0
    for row in rows:
        if "text" in row:
            ids = [tokenizer.eos_token_id, *tokenizer(row["text"], add_special_tokens=False)["input_ids"]]
            for begin in range(1, len(ids), 128):  # the model reads 128 tokens
                end = min(begin + 128, len(ids))
                found, hits = log_probs(model, ids[max(0, end - 129) : end], min(begin, begin - max(0, end - 129)))
                values, right = values + found, right + hits
            num_bytes += len(row["text"].encode())
            continue
        text, spans = "", list[tuple[int, int]]()
        for turn in row["messages"]:
            said = turn["content"] + ("<eos>" if turn["role"] == "assistant" else "")
            text += f"<{turn['role']}>"
            if turn["role"] == "assistant":
                spans.append((len(text), len(text) + len(said)))
                num_bytes += len(turn["content"].encode())
            text += said
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for place, (begin, end) in enumerate(encoded["offset_mapping"]):
            if any(first <= begin and end <= last for first, last in spans):
                found, hits = log_probs(model, encoded["input_ids"][: place + 1], place)
                values, right = values + found, right + hits
    nats = -math.fsum(values)
    return {
        "tokens": len(values),
        "bytes": num_bytes,
        "loss": nats / len(values),
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "token_accuracy": right / len(values),
    }


def on_ranks(settings: dict[str, Any]) -> dict[str, Any]:
    return evaluate(EvalConfig.load(settings)).plain()


def test_figures_are_those_of_each_row_alone(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    """Loss, bits per byte and accuracy count the assistant's tokens and whole texts, and nothing of prompts; a text
    that is longer than the context is read in windows. The same on two ranks under zero3, and packed."""
    rows = [*chats(5), *texts(4), {"text": "red cat sits here. " * 12}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    expected = by_hand(model, rows)
    settings = {"model": str(model), "data": str(data), "answers": 0, "out": str(tmp_path / "out")}
    for more, count in (({}, 1), ({"pack": True, "batch_tokens": 300}, 1), ({"batch_tokens": 64}, 2)):
        for found in ranks.run(on_ranks, {**settings, **more}, world_size=count):
            assert found["language"] == pytest.approx({**expected, "cut": 0}, rel=2e-6), more
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["language"]["tokens"] == expected["tokens"]


def decoded(settings: dict[str, Any], target: Path) -> Path:
    """The model that a layout with codes computes with, as a folder of transformers."""
    from transformers import AutoModelForCausalLM

    known = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    opened = OpenedModel.open(EvalConfig.load(settings))
    values = {name: value.float() for name, value in opened.engine.state_dict().items()}
    opened.close()
    known.load_state_dict(values, strict=True)
    known.save_pretrained(target)
    for file in Path(settings["model"]).glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    (target / "chat_template.jinja").write_bytes((Path(settings["model"]) / "chat_template.jinja").read_bytes())
    return target


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["adapter", "codes", "tensor", pytest.param("procs", marks=pytest.mark.soak)])
def test_whatever_form_a_model_has_its_figures_are_those_of_the_plain_one(
    what: str, tmp_path: Path, model: Path, ranks: Ranks
) -> None:
    """An adapter beside its base, weights that rest as codes, layers that ranks share, and two processes that the
    command starts: as plain transformers has the merged, the decoded and the same model row by row."""
    rows = [*chats(4), *texts(3)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = {"model": str(model), "data": str(data), "answers": 0, "out": str(tmp_path / "out")}
    plain_folder, world = model, 2
    if what == "adapter":
        pytest.importorskip("peft")
        from shardfold.tools.tune.merge import merge
        from tests.tools.tune.test_merge import _adapter

        _adapter(model, tmp_path / "adapter")
        merge(tmp_path / "adapter", tmp_path / "merged")
        settings["model"], plain_folder = str(tmp_path / "adapter"), tmp_path / "merged"
    if what == "codes":
        settings["bits"] = 4
        plain_folder = decoded(settings, tmp_path / "decoded")
    expected = by_hand(plain_folder, rows)
    if what == "procs":
        command = [sys.executable, "-m", "shardfold", "eval", str(model), "--data", str(data), "--answers", "0"]
        command += ["--out", str(tmp_path / "out"), "--layout", "zero3", "--procs", "2"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(command, capture_output=True, check=False, text=True, env=environment, timeout=300)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("bits per byte") == 1
    else:
        for found in ranks.run(on_ranks, settings | ({"tensor": 2} if what == "tensor" else {}), world_size=world):
            assert found["language"] == pytest.approx({**expected, "cut": 0}, rel=1e-5)
    said = json.loads((tmp_path / "out" / "eval.json").read_text())["language"]
    assert said == pytest.approx({**expected, "cut": 0}, rel=1e-5)
    if what not in ("tensor", "procs"):
        assert abs(expected["loss"] - by_hand(model, rows)["loss"]) > 1e-4


def test_a_choice_is_what_is_likely_behind_its_question(tmp_path: Path, model: Path) -> None:
    """The question's own tokens do not count, however unlikely they are; per byte, long choices are not worse off."""
    known, tokenizer = plain(model)
    likely: list[list[float]] = []
    for row in QUESTIONS:
        of_row: list[float] = []
        for choice in row["choices"]:
            if isinstance(row["question"], str):
                before, behind = row["question"].rstrip(), " " + choice
            else:
                before, behind = f"<user>{row['question'][0]['content']}<assistant>", choice + "<eos>"
            ids = tokenizer(before + behind, add_special_tokens=False)["input_ids"]
            start = len(tokenizer(before, add_special_tokens=False)["input_ids"])
            of_row.append(math.fsum(log_probs(known, ids, start)[0]))
        likely.append(of_row)
    for right in range(2):  # whichever is called right: the figure moves with it
        rows = [{**row, "answer": right} for row in QUESTIONS]
        data = write_rows(tmp_path / f"{right}.jsonl", rows)
        found = evaluate(EvalConfig.load({"model": model, "data": data, "answers": 0, "out": tmp_path / "out"})).choices
        assert found is not None
        expected = [int(np.argmax(each)) == right for each in likely]
        assert found.accuracy == pytest.approx(sum(expected) / 3)
        blanks = (1, 0, 0)  # in front of a choice, where the question does not end with one
        sizes = [
            [len(choice) + blank for choice in row["choices"]] for row, blank in zip(QUESTIONS, blanks, strict=True)
        ]
        per_byte = [int(np.argmax(np.array(a) / b)) == right for a, b in zip(likely, sizes, strict=True)]
        assert found.accuracy_per_byte == pytest.approx(sum(per_byte) / 3)


def test_answers_are_greedy_ones_and_are_held_to_references(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    """Which end by themselves, and which are right, is as transformers' generation has it; on two ranks the same."""
    known, tokenizer = plain(model)
    rows: list[dict[str, Any]] = []
    stopped = 0
    for number, row in enumerate(chats(6, seed=3)):
        asked = row["messages"][:1]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        made = known.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=1)
        tokens = made[0, len(ids) :].tolist()
        stopped += tokens[-1] == 1
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        reference = text if number % 2 and text.strip() else "none of it"
        rows.append({"messages": [*asked, {"role": "assistant", "content": reference}]})
    right = sum(each["messages"][1]["content"] != "none of it" for each in rows)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = {"model": str(model), "data": str(data), "max_tokens": 12, "out": str(tmp_path / "out")}
    for count in (1, 2):
        for found in ranks.run(on_ranks, settings, world_size=count):
            assert found["answers"]["prompts"] == 6
            assert found["answers"]["stopped"] == pytest.approx(stopped / 6)
            assert found["answers"]["exact_match"] == pytest.approx(right / 6)


def test_the_best_of_several_answers(tmp_path: Path, model: Path) -> None:
    """A reward rates each of them; the best one's counts, and means are over all."""
    (tmp_path / "rewards.py").write_text(
        "def rated(answer):\n    return float(sum(answer.tokens) + answer.row['more'])\n"
    )
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "one", "more": 100000}, {"prompt": "two", "more": 0}])
    config = {
        "model": model, "data": data, "max_tokens": 6, "best_of": 4, "reward": f"{tmp_path / 'rewards.py'}:rated",
        "out": tmp_path / "out",
    }  # fmt: skip
    found = evaluate(EvalConfig.load(config)).best_of
    assert found is not None
    written = (tmp_path / "out" / "eval_answers.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in written.split("\n")[:-1]]
    rewards = [[each["reward"] for each in row["answers"] if not each["greedy"]] for row in lines]
    assert [len(each) for each in rewards] == [4, 4] and min(rewards[0]) >= 100000 > max(rewards[1])
    assert found.reward == pytest.approx(sum(map(sum, rewards)) / 8)
    assert found.best_reward == pytest.approx(sum(map(max, rewards)) / 2)
    assert len({each["text"] for each in lines[0]["answers"] if not each["greedy"]}) > 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 2 = 4\n#### 4", "4"),
        ("it costs 3\n#### $1,234.50", "1234.5"),
        ("#### -7 and then 8", "-7"),
        ("so 12.\n#### 10 eggs #### 11", "10"),
        ("####18.", "18"),
        ("the answer is 4", None),
        ("#### four", None),
    ],
)
def test_the_number_of_a_solution_stands_behind_its_mark(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_what_matches_a_reference() -> None:
    assert is_match("2 and 3 are 5 #### 5.0", "#### 5") and not is_match("5", "#### 5")
    assert is_match(" yes\n", "yes") and not is_match("Yes", "yes") and not is_match("#### x", "#### x")


@given(st.lists(st.integers(1, 99), min_size=1, max_size=40), st.integers(1, 9))
def test_windows_read_each_token_once_with_all_that_fits_before_it(ids: list[int], length: int) -> None:
    found = windows_of(ids, 0, length)
    assert [token for window, count in found for token in window[len(window) - count :]] == ids
    whole = [0, *ids]
    assert all(len(window) == min(length + 1, len(whole)) for window, _ in found[1:])
    assert found[0][0] == whole[: length + 1]


def test_bytes_are_those_of_the_scored_text() -> None:
    """A leading blank counts, and a letter of two bytes does as both; what is not scored and stop tokens do not."""
    tokenizer = ByteTokenizer()
    ids = np.array([*"a bé c".encode(), 0], np.int32)
    trained = np.zeros(len(ids), np.bool_)
    trained[[1, 2, 5, 6, 7]] = True
    assert scored_bytes(tokenizer, Tokens(ids, trained)) == 4
    text = "Ā\0 wörld\n \xa0"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())


def test_a_run_of_train_is_evaluated_too(tmp_path: Path) -> None:
    """Its tokens are bytes, so loss and bits per byte are one figure in two units."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sits here and the dog runs there. " * 60)
    run = tmp_path / "run"
    train(TrainConfig.load({"size": "tiny", "data": text, "steps": 2, "procs": 1, "save_every": 1, "out": run}))
    data = write_rows(tmp_path / "rows.jsonl", texts(3))
    found = evaluate(EvalConfig.load({"model": run, "data": data, "answers": 0})).language
    assert found is not None and found.tokens == found.bytes == sum(len(row["text"]) for row in texts(3))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2)) and 1 < found.bits_per_byte < 9
    opened = OpenedModel.open(EvalConfig.load({"model": run, "data": data}))
    ids = [0, *texts(3)[0]["text"].encode()]
    with torch.no_grad():
        logits = opened.engine(torch.tensor([ids])).double()
    expected = -logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    one = write_rows(tmp_path / "one.jsonl", texts(3)[:1])
    opened.close()
    alone = evaluate(EvalConfig.load({"model": run, "data": one, "answers": 0})).language
    assert alone is not None and alone.loss * alone.tokens == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_evaluated_is_said(tmp_path: Path, model: Path) -> None:
    def refused(pattern: str, rows: list[dict[str, Any]], **more: Any) -> None:
        data = write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(ConfigError, match=pattern):
            evaluate(EvalConfig.load({"model": model, "data": data, "answers": 0, **more}))

    refused("no rows", [])
    refused(r"rows.jsonl:1: 'answer' is 3", [{"question": "a", "choices": ["b", "c"], "answer": 3}])
    refused("'choices' is \\['b'\\]", [{"question": "a", "choices": ["b"], "answer": 0}])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"size": "tiny"}')
    refused("--save-every", texts(1), model=run)
    (run / "config.json").write_text('{"recipe": "reward"}')
    refused("reward model", texts(1), model=run)
    with pytest.raises(ConfigError, match="--temperature has no effect"):
        EvalConfig.load({"model": model, "data": "x.jsonl", "temperature": 0.5})
