"""Of an error of ours a reader sees where in the script it came, and the sentence."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.comm import _shown_traceback
from shardfold.comm._shown_traceback import prefixed_once, show
from shardfold.errors import LayoutError


def refused(layout: str) -> LayoutError:
    with pytest.raises(LayoutError) as raised:
        sf.Engine(nn.Linear(2, 2), optimizer=lambda p: torch.optim.AdamW(p), layout=layout)
    raised.value.__cause__ = RuntimeError("from inside")
    return raised.value


def test_lines_of_the_library_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the script are, and exceptions of others are shown whole."""
    error = refused("zero4")
    show(sys.__excepthook__, type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert f'File "{__file__}"' in said and "src/shardfold" not in said and "from inside" not in said
    assert said.splitlines()[-1].startswith("shardfold.errors.LayoutError: layout 'zero4' is unknown.")
    assert str(error.__cause__) == "from inside" and len(traceback.extract_tb(error.__traceback__)) > 2  # for debuggers
    other = ValueError("of the script").with_traceback(refused("zero5").__traceback__)
    show(sys.__excepthook__, type(other), other, other.__traceback__)
    assert "src/shardfold" in capsys.readouterr().err


def test_a_rank_is_said_once_in_front_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often groups were started."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(_shown_traceback, "_prefixed", [])
    for rank in (2, 1):
        with prefixed_once():
            monkeypatch.setattr(sys, "excepthook", lambda *_, rank=rank: rank)
    assert sys.excepthook(ValueError, ValueError(), None) == 2
