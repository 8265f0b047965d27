"""What the thread that watches a rank reads of its stack."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from shardfold.comm._watchdog import _user_collective


def test_a_frame_that_is_at_no_line_is_read() -> None:
    """CPython says None of a thread that is between the instructions of two lines; the watch goes on."""
    here = sys._getframe()
    assert _user_collective(here) is None
    between: Any = SimpleNamespace(f_globals=here.f_globals, f_code=here.f_code, f_lineno=None, f_back=None)
    assert _user_collective(between) is None
