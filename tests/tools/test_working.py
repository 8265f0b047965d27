"""What takes long says how far it is: on a terminal in one line, in a file by a line now and then."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardfold.plan import presets
from shardfold.testing import Ranks
from shardfold.tools.observe import working_line
from shardfold.tools.observe.working_line import WorkingLine, working
from shardfold.tools.planning import command
from tests.support.clients import needs
from tests.tools.tune import support


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is said is shown."""
    for name in ("FIRST", "EVERY", "PLAIN_EVERY"):
        monkeypatch.setattr(working_line, name, 0.0)


def said(terminal: bool, do: Callable[[WorkingLine], None], unit: str = "bytes") -> str:
    stream = StringIO()
    with working("merging [b]x", unit=unit, console=Console(file=stream, force_terminal=terminal, width=120)) as line:
        do(line)
    return stream.getvalue()


def counts(line: WorkingLine) -> None:
    line.amount(1024, 8 * 1024)
    line.amount(4 * 1024, 8 * 1024)


@pytest.mark.usefixtures("at_once")
def test_a_terminal_shows_amount_rate_and_time_left_and_in_the_end_nothing() -> None:
    """Names are no markup, and no control codes; the cursor stays."""
    shown = said(True, counts)
    assert "merging [b]x" in shown and re.search(r"4.00 KiB of 8.00 KiB +[\d.]+ \wi?B/s +0:00 left", shown), shown
    assert shown.endswith("\x1b[1A\x1b[2K") and shown.count("\x1b[?25l") < shown.count("\x1b[?25h")
    shown = said(True, lambda line: line.now("zero3\x1b[2J, keep"))
    assert "merging [b]x: zero3·[2J, keep" in shown and "0:00 so far" in shown


@pytest.mark.usefixtures("at_once")
def test_a_file_has_plain_lines() -> None:
    shown = said(False, counts, unit="rows")
    assert "\x1b" not in shown and "merging [b]x  4.1k of 8.19k rows" in shown
    assert all(line.startswith("merging [b]x") for line in shown.splitlines())


def test_what_is_over_soon_says_nothing() -> None:
    assert said(True, counts) == said(False, counts) == ""


@pytest.mark.usefixtures("at_once")
def test_only_the_first_rank_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert said(True, counts) == said(False, counts) == ""


@pytest.mark.usefixtures("at_once")
def test_work_within_other_work_says_nothing() -> None:
    def inner(line: WorkingLine) -> None:
        assert said(True, counts) == ""

    said(True, inner)
    assert "KiB" in said(True, counts)


@pytest.mark.usefixtures("at_once")
def test_work_that_says_nothing_is_shown_and_an_interrupt_leaves_a_clean_terminal() -> None:
    stream = StringIO()
    with pytest.raises(KeyboardInterrupt), working("loading", console=Console(file=stream, force_terminal=True)):
        while "so far" not in stream.getvalue():
            time.sleep(0.001)
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K")
    assert not [each for each in threading.enumerate() if each.name == "working line"]


@pytest.mark.parametrize("micro_batch", [pytest.param(None, marks=pytest.mark.soak), 2])
def test_a_plan_says_what_it_looks_at(
    micro_batch: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error where that is a terminal; the plan itself is the same, without a trace of it."""

    def plan() -> bool:
        return command.print_plan(
            "tiny", "1xL4", memory=None, precision="bf16", micro_batch=micro_batch, accumulate=1, length=None,
            tables={name: presets.named(name) for name in ("zero1", "zero3")}, modes=["keep"],
        )  # fmt: skip

    assert plan()
    out, error = capsys.readouterr()
    assert error == ""
    for name in ("FIRST", "EVERY"):
        monkeypatch.setattr(working_line, name, 0.0)
    said = StringIO()
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=said, force_terminal=True, width=80))
    assert plan() and capsys.readouterr() == (out, "")
    for doing in ("planning tiny: zero1, keep", "planning tiny: zero3, keep"):
        assert doing in said.getvalue()


def _tuned_and_asked(folder: Path) -> str:
    """What a terminal is shown by a tuning, an evaluation and answers to a file, each a rank of its own."""
    from shardfold.tools.answering.answer_config import GenerateConfig
    from shardfold.tools.answering.batch_answers import answer_prompts
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.eval_config import EvalConfig
    from shardfold.tools.tune.evaluate import evaluate
    from shardfold.tools.tune.tuned import tune

    stream, os.environ["RANK"] = StringIO(), "0"
    working_line.FIRST = working_line.EVERY = 0.0
    working_line.lenient_console = lambda _: Console(file=stream, force_terminal=True, width=100)
    base, rows, prompts = support.model_folder(folder / "base"), folder / "rows.jsonl", folder / "prompts.jsonl"
    support.write_rows(rows, support.chats(6))
    prompts.write_text('"one cat"\n"two dogs"\n')
    few = {"cache": folder / "cache", "micro_batch": 2, "out": folder / "run", "save_every": 1}
    tune(config_class("sft").load({"model": base, "data": str(rows), "epochs": 1, **few}))
    evaluate(EvalConfig.load({"model": base, "data": str(rows), "answers": 2, "max_tokens": 2, "out": folder}))
    given = {"model": base, "prompts": prompts, "max_tokens": 2, "out": folder / "answers.jsonl"}
    answer_prompts(GenerateConfig.load(given))
    return stream.getvalue()


@pytest.mark.soak
@needs("transformers", "peft")
def test_loading_tokenizing_scoring_and_answering_are_shown(ranks: Ranks, tmp_path: Path) -> None:
    shown = ranks.run(_tuned_and_asked, tmp_path, world_size=1)[0]
    for words in (
        r"reading: rows",
        r"loading .*of [\d.]+k parameters",
        r"tokenizing .*6 of 6 rows",
        "scoring",
        "saving",
    ):
        assert re.search(words, shown), (words, shown)
    assert re.search(r"answering .*[12] of 2 answers", shown)
    assert shown.endswith("\x1b[1A\x1b[2K")
