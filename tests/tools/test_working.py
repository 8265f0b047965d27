"""What takes long says on a terminal what it does, and in a pipe nothing."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from shardfold.plan import presets
from shardfold.tools.observe.console import working
from shardfold.tools.planning import command


def test_a_line_on_terminals_only() -> None:
    """It is replaced, names are no markup, and in the end it is gone."""
    terminal, pipe = StringIO(), StringIO()
    for stream in (terminal, pipe):
        with working("planning [b]x", Console(file=stream, force_terminal=stream is terminal, width=80)) as tick:
            tick("zero3, keep")
    assert pipe.getvalue() == ""
    assert "planning [b]x: zero3, keep" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")  # one line up, and empty


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
    said = StringIO()
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=said, force_terminal=True, width=80))
    assert plan() and capsys.readouterr() == (out, "")
    for doing in ("making tiny without memory", "planning tiny: zero1, keep", "planning tiny: zero3, keep"):
        assert doing in said.getvalue()
