"""The package's files as syntax trees, parsed and walked once in a process: several tests read all of them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import shardfold

__all__ = ["nodes", "trees"]


@cache
def trees() -> dict[Path, ast.Module]:
    """Of every file of the package, sorted by path; nobody changes them.

    They are a million objects that stay: looking for garbage among them takes longer than to make them.
    """
    found = sorted(Path(shardfold.__file__).parent.rglob("*.py"))
    gc.disable()
    try:
        return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in found}
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's, in the order of `ast.walk`: a walk through all files takes a second of a core."""
    return tuple(ast.walk(trees()[path]))
