"""What is shown of an error of ours by which a rank ends: the lines of the user's script, and the sentence.

What is inside of this library and of PyTorch says nothing to who reads it, and hides on each rank what does. Exceptions
of others, and all of them under ``python -X dev``, are shown whole; so is what debuggers find in ``sys.last_value``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardfold import errors
from shardfold.comm.launcher_notes import note_exception
from shardfold.errors import ShardfoldError

__all__ = ["prefixed_once", "shorten_tracebacks", "show"]

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
INSIDE = (*(f"{Path(each.__file__ or '').parent}/" for each in (errors, torch)), contextlib.__file__)
"""Where the files are whose lines are left out."""

_prefixed: list[bool] = []  # whether PyTorch's hook says the rank in front of each line
_shortened: list[bool] = []


def shorten_tracebacks() -> None:
    """From now on, in this process."""
    if not _shortened:
        _shortened.append(True)
        if getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d":
            _prefixed.append(True)
        _put(partial(show, sys.excepthook))


@contextmanager
def prefixed_once() -> Iterator[None]:
    """Inside, process groups are started, to which PyTorch adds its hook each time: the first one stays alone, with the
    number by which launchers name this process in all epochs."""
    shorten_tracebacks()
    before = sys.excepthook
    yield
    if _prefixed:
        _put(before)
    _prefixed.append(True)


def _put(hook: Hook) -> None:
    setattr(sys, "excepthook", hook)  # noqa: B010  # of the interpreter, and of no object of ours


def show(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """By the hook that was there ``before``; the launcher learns of it first, as it may end this process meanwhile."""
    note_exception()
    short = _outside(trace)
    if short is None or sys.flags.dev_mode or not isinstance(error, ShardfoldError):
        before(kind, error, trace)
        return
    with error.alone(short):
        before(kind, error, short)


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """The frames that are the user's."""
    frames, short = list[TracebackType](), None
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(INSIDE):
            frames.append(trace)
        trace = trace.tb_next
    for each in reversed(frames):
        short = TracebackType(short, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return short
