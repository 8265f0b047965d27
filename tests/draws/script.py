"""A draw as a script that repeats it by itself: what it needs of this folder is copied into it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.draws.drawn import TOLERANCE, Draw

SOURCES = ("blocks.py", "model.py", "calls.py")

HEAD = '''"""{what}

Run by `python FILE`; it starts its own ranks. Exit status 0: the engine does what plain PyTorch does.
"""

'''

MAIN = """
DRAW = SimpleNamespace(
    {fields},
)


def main():
    want = expect(DRAW)
    try:
        seen = run_ranks(play, {size}, DRAW, timeout=60, warnings_as_errors=False)
    except RanksFailed as error:
        sys.exit(f"WRONG {{error}}")
    if any(isinstance(each, str) for each in seen):
        sys.exit(f"refused: {{seen}}")
    wrong = 0
    for number, (call, wanted) in enumerate(zip(DRAW.calls, want, strict=True)):
        for rank in range({size}):
            if said := differs(seen[rank][number], wanted[rank], {tolerance}):
                print(f"WRONG rank {{rank}}, call {{number}}, {{call}}: {{said}}")
                wrong = 1
    sys.exit(wrong)


if __name__ == "__main__":
    main()
"""
SIDES = ("self", "side", "plain")
"""Names of variables that hold one."""
IMPORTED = ("import sys", "from types import SimpleNamespace", "from shardfold.testing import RanksFailed, run_ranks")


def script(draw: Draw, what: str) -> str:
    """Its text, with those classes, methods and functions that the draw comes by."""
    fields = {**vars(draw), "delayed": draw.delayed}
    shown = ",\n    ".join(f"{name}={value!r}" for name, value in fields.items())
    main = MAIN.format(fields=shown, size=draw.size, tolerance=TOLERANCE[draw.dtype])
    parts = [part for name in SOURCES for part in _parts(_source(name))]
    needed = set(_names(ast.parse(main))) | set(_strings(vars(draw)))
    kept = list[_Part]()
    while new := [part for part in parts if part not in kept and part.defines & needed]:
        kept += new
        for part in kept:  # a method may be needed only now
            needed |= part.needs(needed)
    while grown := set[str]().union(*(part.needs(needed) for part in kept)) - needed:
        needed |= grown
        kept = [part for part in parts if part.defines & needed]
    texts = [part.text(needed) for part in parts if part in kept]
    used = set(_names(ast.parse("\n\n".join([*texts, main]))))
    imports = sorted({*_imports(used), *IMPORTED})
    head = HEAD.format(what=what) + "from __future__ import annotations\n\n" + "\n".join(imports)
    return "\n\n\n".join([head, *texts]) + "\n" + main


def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


class _Part:
    """A statement of a module; methods of the two sides that nothing names are left out."""

    def __init__(self, source: str, node: ast.stmt) -> None:
        self._lines, self._node = source.splitlines(), node
        self.defines = {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set[str]()
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            self.defines |= {each.id for each in ast.walk(target or ast.Pass()) if isinstance(each, ast.Name)}

    def _shown(self, node: ast.stmt) -> str:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        return "\n".join(self._lines[first - 1 : node.end_lineno])

    def _bodies(self, needed: set[str]) -> list[ast.stmt]:
        node = self._node
        if not isinstance(node, ast.ClassDef) or node.name not in ("Plain", "Sharded"):
            return [node]
        return [
            each
            for each in node.body
            if not isinstance(each, ast.FunctionDef) or each.name == "__init__" or each.name in needed
        ]

    def text(self, needed: set[str]) -> str:
        bodies = self._bodies(needed)
        if bodies == [self._node]:
            return self._shown(self._node)
        name = self._node.name  # pyright: ignore[reportAttributeAccessIssue]
        return f"class {name}:\n" + "\n\n".join(map(self._shown, bodies))

    def needs(self, needed: set[str]) -> set[str]:
        return {name for body in self._bodies(needed) for name in _names(body)}


def _parts(source: str) -> list[_Part]:
    return [
        _Part(source, node)
        for node in ast.parse(source).body
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)
    ]


def _names(tree: ast.AST) -> Iterator[str]:
    """Names, and attributes of ``self``: what a module or a side may define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in SIDES:
            yield node.attr


def _strings(value: Any) -> Iterator[str]:
    """All texts in a draw: names of blocks and calls are among them."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ():
        yield from _strings(each)


def _imports(used: set[str]) -> Iterator[str]:
    """Lines that import what the sources import of other packages, as far as it is used."""
    for name in SOURCES:
        for node in ast.parse(_source(name)).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", "")
                for alias in node.names:
                    known = alias.asname or alias.name.partition(".")[0]
                    if known in used and module != "__future__" and not str(module).startswith("tests."):
                        found = alias.name + (f" as {alias.asname}" if alias.asname else "")
                        yield f"from {module} import {found}" if module else f"import {found}"
