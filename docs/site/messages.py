"""Every sentence that the sources can raise: its class, its file, its text with names for what varies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parents[2] / "src" / "shardfold"


class Message(NamedTuple):
    error: str
    text: str
    file: str


def classes() -> dict[str, str]:
    """The classes of shardfold.errors and what each is for."""
    tree = ast.parse((SOURCES / "errors.py").read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}


def messages() -> list[Message]:
    """All that is raised, or made to be raised, with a text of its own, in the order of classes and files."""
    known = list(classes())
    found: set[Message] = set()
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(SOURCES.parent).as_posix()
        found |= {Message(error, text, file) for error, text in _raised(tree, known)}
    return sorted(found, key=lambda each: (known.index(each.error), each.file, each.text))


def _raised(tree: ast.AST, known: list[str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and (name := _name(node.func)) in known:
            text = " ".join(_text(node.args[0]).split())
            if any(letter.isalpha() for letter in _fixed(node.args[0])):
                yield name, text


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str:
    """The text with `<name>` for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return f"<{_last(value)}>"


def _fixed(node: ast.expr) -> str:
    """What of the text does not vary."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_fixed(part) for part in node.values)
    return _fixed(node.left) + _fixed(node.right) if isinstance(node, ast.BinOp) else ""


def _last(node: ast.expr) -> str:
    """A word for a value: the last name in how it is made."""
    nodes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute | ast.Name)]
    names = [each.attr if isinstance(each, ast.Attribute) else each.id for each in nodes]
    return names[0].strip("_") if names else "..."


def page() -> str:
    lines = [
        "# Every message",
        "",
        "All sentences that Shardfold raises, read off its sources. What stands in `<...>` varies. Search for a few "
        "words of yours; [troubleshooting](../troubleshooting.md) explains the frequent ones. A message says itself "
        "how to mend what caused it.",
        "",
    ]
    kinds, found = classes(), messages()
    for error, meaning in kinds.items():
        rows = [each for each in found if each.error == error]
        if not rows:
            continue
        lines += [f"## {error}", "", meaning, ""]
        for file in dict.fromkeys(each.file for each in rows):
            lines += [f"`{file}`", ""]
            lines += [f"- `{each.text.replace('`', chr(39))}`" for each in rows if each.file == file] + [""]
    return "\n".join(lines)
