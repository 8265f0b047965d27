"""`shardfold tune demo`: its text, its stages and its page; and the commands of the page on answers in JSON."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from random import Random

import pytest

from shardfold.tools.cli import main
from shardfold.tools.tune._demo_text import KINDS, THINGS, is_happy, rows, story
from shardfold.tools.tune.demo_config import DemoConfig
from shardfold.tools.tune.tune_demo import STAGES, prepare, run_demo
from tests.support.page_tags import PageTags
from tests.tools.tune.support import model_folder

DOCS = Path(__file__).parents[3] / "docs"


def test_rows_are_what_recipes_are_to_learn_from() -> None:
    """The same seed gives the same rows; pairs differ in their ending alone; what is asked for is rarely told."""
    assert list(rows("pairs", 5, 1)) == list(rows("pairs", 5, 1)) != list(rows("pairs", 5, 2))
    for row in rows("pairs", 50, 0):
        good, bad = (row[name][0]["content"] for name in ("chosen", "rejected"))
        assert is_happy(good) is True and is_happy(bad) is False and good.split(".")[0] == bad.split(".")[0]
    assert all(
        len([thing for thing in THINGS if thing in row["text"].lower().split(".")[0]]) == 1
        for row in rows("texts", 50, 0)
    )
    told: dict[bool, list[bool]] = {True: [], False: []}
    for row in rows("chats", 400, 0):
        asked, answer = (turn["content"] for turn in row["messages"])
        obeys = any(thing in asked and thing in answer for thing in THINGS)
        told[asked.startswith("Tell me")].append(obeys)
    assert all(told[True]) and sum(told[False]) < 0.2 * len(told[False])
    assert not any(row["prompt"][0]["content"].startswith("Tell me") for row in rows("prompts", 50, 0))
    assert is_happy("Mia had a") is None and set(KINDS) == {"texts", "chats", "pairs", "prompts"}
    assert len(story(Random(0), "kite", happy=True).split()) < 24


def test_the_demo_runs_and_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of each stage: every stage is a run, and its figures, seconds, curve and command are on the page."""
    folder = tmp_path / "demo"
    folder.mkdir()
    config = DemoConfig.load({"share": 0.01, "procs": 1, "out": folder})
    prepare(config)
    run_demo(config)
    text = (folder / "report.html").read_text(encoding="utf-8")
    facts = json.loads((folder / "demo.json").read_text())
    said = capsys.readouterr().out
    for stage in STAGES:
        assert (folder / stage.recipe / "report.html").is_file() and f"  {stage.recipe}" in said
        assert f"shardfold tune {stage.recipe} --model {stage.model} --data text/{stage.data}.jsonl" in text
        assert facts["seconds"][stage.recipe] > 0
    assert facts["models"] == [stage.recipe for stage in STAGES if stage.generates]
    assert len(facts["samples"]) == 4 and text.count('class="answer"') == 4 * len(facts["models"])
    assert text.count("<svg") == len(STAGES) and 0 <= facts["held_out"]["dpo"]["accuracy"] <= 1
    tags = PageTags()
    tags.feed(text)
    assert "script" not in tags.seen and not tags.open and not re.search(r"(src|href)=|url\(|@import", text)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_the_demo_learns(tmp_path: Path, seed: int) -> None:
    """SFT lowers the held-out loss by a fifth at least, pairs are told apart in nine of ten, and what GRPO and PPO
    are rewarded for goes from less than a fifth of answers to more than four fifths; stories stay stories."""
    with pytest.raises(SystemExit) as end:
        main(["tune", "demo", "--seed", str(seed), "--out", str(tmp_path / "demo")])
    assert end.value.code == 0
    facts = json.loads((tmp_path / "demo" / "demo.json").read_text())
    measures, held_out = facts["measures"], facts["held_out"]
    assert measures["sft"]["loss"] < 0.8 * measures["pt"]["loss"]
    assert held_out["reward"]["accuracy"] >= 0.9 and held_out["dpo"]["accuracy"] >= 0.9
    assert measures["dpo"]["obeys"] < 0.2
    for name in ("grpo", "ppo"):
        assert measures[name]["obeys"] > 0.8, name
        assert measures[name]["happy"] > 0.5 and measures[name]["loss"] < measures["pt"]["loss"]


@pytest.mark.soak
def test_the_commands_of_the_page_on_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code and its commands, in order, on a tiny model."""
    text = (DOCS / "howto" / "answer-in-json.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "base")
    for language, block in re.findall(r"```(\w+)[^\n]*\n(.*?)```", text, re.DOTALL):
        if language == "python":
            exec(compile(block, "answer-in-json.md", "exec"), globals())
            continue
        for line in block.strip().splitlines():
            with pytest.raises(SystemExit) as end:
                main(shlex.split(line)[1:])
            assert end.value.code == 0, line
    assert len(Path("train.jsonl").read_text().splitlines()) == 40
    assert json.loads(Path("runs/json/eval.json").read_text())["answers"]["prompts"] == 8
