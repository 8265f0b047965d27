"""The package's files as syntax trees, parsed once in a process: several tests read all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import shardfold

__all__ = ["trees"]


@cache
def trees() -> dict[Path, ast.Module]:
    """Of every file of the package, sorted by path; nobody changes them."""
    found = sorted(Path(shardfold.__file__).parent.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in found}
