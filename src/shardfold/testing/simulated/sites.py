"""Where the caller stands: the nearest lines that are neither PyTorch's, nor Python's own, nor this package's.

A line is kept as code and number, which costs little; it becomes text when somebody reads it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from shardfold.torch_internals import autograd_node, in_backward

__all__ = ["DEPTH", "Site", "here"]

DEPTH = 3
"""How many lines are named, the nearest first."""

_SHARDFOLD = str(Path(__file__).parents[2]) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_OURS = (
    *(str(Path(__file__).parents[1] / name) for name in ("simulated", "worker.py", "ranks.py")),
    _SHARDFOLD + "torch_internals.py",
)
_TORCH = str(Path(torch.__file__).parent) + os.sep
_left_out: dict[str, bool] = {}  # by file name


class Site(NamedTuple):
    """Attributes:
    lines: code and line number, the innermost first.
    node: the node of autograd's graph that ran there, if it was one of PyTorch's.
    """

    lines: tuple[tuple[CodeType, int], ...]
    node: str = ""

    def __str__(self) -> str:
        lines = [f"{_short(code.co_filename)}:{line}" for code, line in self.lines]
        if not self.node:
            return " < ".join(lines) or "PyTorch"
        return f"backward ({self.node})" + (f" of {' < '.join(lines)}" if lines else "")


def here(backward: Site | None = None) -> Site:
    """The caller's site. Autograd's threads have no lines of Python where a node of PyTorch's runs: then it is
    ``backward``, where the backward was called, with the name of the node."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < DEPTH:
        name = frame.f_code.co_filename
        skip = _left_out.get(name)
        if _is_left_out(name) if skip is None else skip:
            frame = frame.f_back
            continue
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    if found or not in_backward():
        return Site(tuple(found))
    return Site(backward.lines if backward is not None else (), autograd_node() or "autograd")


def _is_left_out(name: str) -> bool:
    python = name.startswith(_PYTHON) and not any(part in name for part in _PACKAGES)
    out = name.startswith((*_OURS, _TORCH, "<frozen", "<string>")) or python
    _left_out[name] = out
    return out


def _short(name: str) -> str:
    """A file's name as short as is clear: inside of the package, below the working directory, or its last part."""
    if name.startswith(_SHARDFOLD):
        return "shardfold/" + name[len(_SHARDFOLD) :]
    folder = os.getcwd() + os.sep
    return name[len(folder) :] if name.startswith(folder) else os.path.basename(name)
