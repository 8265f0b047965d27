"""Every sentence that the sources can raise: its class, its file, its text with names for what varies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parents[2] / "src" / "shardfold"
DEEP = 6  # so many names and functions are followed to the text that they stand for
WORDS = 3  # a text of fewer is a part of a sentence


class Message(NamedTuple):
    error: str
    text: str
    file: str


def classes() -> dict[str, str]:
    """The classes of shardfold.errors and what each is for."""
    tree = ast.parse((SOURCES / "errors.py").read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}


def messages(package: Package) -> list[Message]:
    """All that is raised, or made to be raised, in the order of classes and files."""
    known = list(classes())
    found = {
        Message(error, text, file)
        for error in known
        for node, file in package.calls(error)
        if node.args
        for text in package.texts(node.args[0])
    }
    return sorted(found, key=lambda each: (known.index(each.error), each.file, each.text))


class Package:
    """The sources, and what the names in them stand for."""

    def __init__(self, trees: dict[Path, ast.Module] | None = None) -> None:
        if trees is None:
            trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}
        self._outer: dict[ast.AST, ast.AST] = {}
        self._functions: dict[str, list[ast.FunctionDef]] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._given: dict[ast.AST, dict[str, list[ast.expr]]] = {}
        self._home: dict[ast.AST, ast.Module] = {}
        self._inside: dict[ast.FunctionDef, dict[str, list[ast.expr]]] = {}
        self.files = {tree: path.relative_to(SOURCES.parent).as_posix() for path, tree in trees.items()}
        for tree in trees.values():
            self._read(tree)

    def texts(self, node: ast.expr) -> list[str]:
        """The texts that an expression gives: its own words, else those of what it is made of."""
        return list(dict.fromkeys(" ".join(text.split()) for text in self._texts(node, DEEP)))

    def _read(self, tree: ast.Module) -> None:
        given = self._given.setdefault(tree, {})
        nodes: list[ast.AST] = [tree]
        for node in nodes:
            self._home[node] = tree
            if isinstance(node, ast.Name | ast.Constant):  # more than half of all, and there is nothing in them
                continue
            inner = [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr_context)]
            self._outer |= dict.fromkeys(inner, node)
            nodes += inner
            if isinstance(node, ast.FunctionDef):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Call):
                self._calls.setdefault(called(node.func), []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.AugAssign | ast.For):
                for target, value in assigned(node):
                    given.setdefault(target, []).append(value)

    def calls(self, name: str) -> list[tuple[ast.Call, str]]:
        """Calls of that name, and the files that they are in."""
        return [(node, self.files[self._home[node]]) for node in self._calls.get(name, ())]

    def _texts(self, node: ast.expr, depth: int) -> Iterator[str]:
        if any(letter.isalpha() for letter in fixed(node)):
            if depth == DEEP or len(fixed(node).split()) >= WORDS:
                yield text_of(node)
        elif depth:
            for each in self._stands_for(node):
                yield from self._texts(each, depth - 1)

    def _stands_for(self, node: ast.expr) -> Iterator[ast.expr]:
        match node:
            case ast.Name(id=name):
                yield from self._named(node, name)
            case ast.Attribute(attr=name):
                yield from self._given[self._home[node]].get(name, ())
            case ast.Call():
                functions = self._functions.get(called(node.func), [])
                near = [each for each in functions if self._home[each] is self._home[node]]
                for function in near or functions:
                    yield from (each.value for each in ast.walk(function)
                                if isinstance(each, ast.Return | ast.Yield) and each.value is not None)  # fmt: skip
                yield from node.args
                if isinstance(node.func, ast.Attribute):
                    yield node.func.value
            case ast.Constant():
                return
            case _:
                yield from (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))

    def _named(self, node: ast.AST, name: str) -> Iterator[ast.expr]:
        """What the name is given in its function, or by callers where it is an argument; else in the module."""
        scope = node
        while scope := self._outer.get(scope):
            if isinstance(scope, ast.FunctionDef):
                inner = self._assigned_in(scope).get(name, ())
                yield from inner
                arguments = [each.arg for each in scope.args.args if each.arg not in ("self", "cls")]
                if name in arguments:
                    at, tree = arguments.index(name), self._home[scope]
                    calls = [each for each in self._calls.get(scope.name, ()) if self._home[each] is tree]
                    yield from (each.args[at] for each in calls if len(each.args) > at)
                if inner or name in arguments:
                    return
        yield from self._given[self._home[node]].get(name, ())

    def _assigned_in(self, function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
        """What names are given in a function, in the order in which a walk comes to it."""
        if function not in self._inside:
            found = self._inside[function] = {}
            for each in ast.walk(function):
                for target, value in assigned(each):
                    found.setdefault(target, []).append(value)
        return self._inside[function]


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and attributes that a statement gives a value, and the value."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For):
        pairs = [(node.target, node.iter)]
    else:
        return
    for target, value in pairs:
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if name := called(each):
                yield name, value


def called(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def text_of(node: ast.expr) -> str:
    """The text with `<name>` for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    return f"<{_last(value)}>"


def fixed(node: ast.expr) -> str:
    """What of the text does not vary."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(fixed(part) for part in node.values)
    return fixed(node.left) + fixed(node.right) if isinstance(node, ast.BinOp) else ""


def _last(node: ast.expr) -> str:
    """A word for a value: the last name in how it is made."""
    nodes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute | ast.Name)]
    names = [each.attr if isinstance(each, ast.Attribute) else each.id for each in nodes]
    return names[0].strip("_") if names else "..."


def page(package: Package | None = None) -> str:
    lines = [
        "---\nhide: [toc]\n---",
        "# Every message",
        "",
        "All error messages of Shardfold, read from its sources, by class. `<...>` stands for what varies. Search for "
        "a few words of yours; [troubleshooting](../troubleshooting.md) explains the frequent ones. The end of a "
        "message says how to correct what caused it.",
        "",
    ]
    kinds, found = classes(), messages(package or Package())
    for error, meaning in kinds.items():
        rows = [each for each in found if each.error == error]
        if not rows:
            continue
        lines += [f"## {error}", "", meaning.partition("Examples:")[0].strip(), ""]
        for file in dict.fromkeys(each.file for each in rows):
            lines += [f"### {error} in `{file}`", ""]  # a part of its own in the search
            lines += [f"- `{each.text.replace('`', chr(39))}`" for each in rows if each.file == file] + [""]
    return "\n".join(lines)
