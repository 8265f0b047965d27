"""Rules of the house that a reader relies on: no global state, no import cycles, short files, an exact front door."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
import torch.distributed as dist

import shardfold
from shardfold.plan.checks import GROUPS
from tests.support.sources import nodes, trees

SOURCES = Path(shardfold.__file__).parent
FILES = sorted(SOURCES.rglob("*.py"))
MAX_LINES = 80  # of a function
ROOMS = 17  # packages at the top
FACE = 60  # lines of a package that says what it is, and what each of its modules is

# Values that say what and when: they can be made, checked and printed where there is no process group.
VALUES = [SOURCES / "errors.py", *sorted((SOURCES / "plan").glob("*.py"))]


def _name(path: Path) -> str:
    return path.relative_to(SOURCES).as_posix()


def _public(path: Path) -> bool:
    return not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(SOURCES).parts)


def test_no_global_statements():
    """No function rebinds a module's names."""
    found = [f"{_name(path)}:{node.lineno}" for path in FILES for node in nodes(path)
             if isinstance(node, ast.Global)]  # fmt: skip
    assert not found, f"`global` stands in {found}"


def _examples(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of examples at the end of its docstring."""
    _, found, examples = (ast.get_docstring(function) or "").partition("Examples:\n")
    return examples.count("\n") + 2 if found else 0


def test_functions_are_short():
    """No function has more than 80 lines, without the examples in its docstring."""
    functions = [
        (f"{_name(path)}:{node.lineno} {node.name}", node)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    long = {name: (node.end_lineno or 0) - node.lineno + 1 - _examples(node) for name, node in functions}
    assert not {name: lines for name, lines in long.items() if lines > MAX_LINES}


def test_the_top_of_the_package_is_a_list_of_rooms():
    """At most 17 packages, each of which says what it is; what lies beside them are single words."""
    rooms = [path for path in SOURCES.iterdir() if (path / "__init__.py").exists()]
    assert len(rooms) <= ROOMS, sorted(path.name for path in rooms)
    for room in ("plan", "tiers", "comm", "sharding", "activations", "engine", "tools"):
        face = SOURCES / room / "__init__.py"
        assert ast.get_docstring(trees()[face]) and len(face.read_text(encoding="utf-8").splitlines()) < FACE
    files = {path.name for path in SOURCES.glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "accelerator.py", "data.py", "errors.py", "torch_internals.py"}


def test_nobody_is_handed_the_engine():
    """No room below the engine's names the class, not even in a type: they are given a model, a run, a gate."""
    below = [path for room in ("plan", "tiers", "comm", "sharding", "activations", "numerics", "optim", "checkpoint",
                               "planner")
             for path in (SOURCES / room).rglob("*.py")]  # fmt: skip
    named = [
        _name(path) for path in below for node in nodes(path) if isinstance(node, ast.Name) and node.id == "Engine"
    ]
    assert not named


def test_public_modules_have_a_docstring():
    """Every public module says at its top what it is."""
    assert not [_name(path) for path in FILES if _public(path) and not ast.get_docstring(trees()[path])]


def test_no_import_cycles():
    """The modules can be sorted so that each imports only earlier ones, imports in functions and of types included."""
    graph = grimp.build_graph("shardfold", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


def test_values_know_no_process_group():
    """Layouts, programs and costs are values: their modules do not import `torch.distributed`."""
    for path in VALUES:
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not any(name.startswith("torch.distributed") for name in names), f"{path.name} line {node.lineno}"


def test_ranks_send_each_other_no_objects():
    """What `torch.distributed` calls objects are pickles, which may run code where they arrive: ranks exchange tensors
    and JSON. The compatibility layer has the names for those who ask for them."""
    objects = {name for name in vars(dist) if name.endswith(("_object", "_object_list"))}
    for path in FILES:
        if path != SOURCES / "compat" / "deepspeed" / "comm" / "collectives.py":
            names = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
            assert not names & objects, _name(path)


def test_all_is_exact():
    """`shardfold.__all__` has no name twice, every name in it exists, and no public name is missing from it."""
    names = shardfold.__all__
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(shardfold, name)]
    public: set[str] = set()
    for node in nodes(SOURCES / "__init__.py"):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardfold":
            public |= {alias.asname or alias.name for alias in node.names}
    public |= {name for name, value in vars(shardfold).items() if getattr(value, "__module__", "") == "shardfold"}
    public = {name for name in public if not name.startswith("_")}
    assert not public - set(names)


def test_every_all_names_what_exists():
    """A module's `__all__` names only what the module has."""
    absent: list[str] = []
    for path in FILES:
        parts = path.relative_to(SOURCES).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if _public(path) and any(_is_all(node) for node in trees()[path].body):
            try:
                module = importlib.import_module(".".join(("shardfold", *parts)))
            except ModuleNotFoundError as error:  # a class for a harness that brings its own
                assert error.name == "lm_eval"
                continue
            absent += [f"{_name(path)}: {name}" for name in module.__all__ if not hasattr(module, name)]
    assert not absent


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


GROUPED = [name for _, names in GROUPS.values() for name in names] + ["sample"]
BARE = re.compile(rf"(?<![\w.(])({'|'.join(GROUPED)})=(?!=)")
OTHERS = {("parallel/head.py", "sample"), ("planner/candidate.py", "pipeline")}
"""A layer's own argument, and a line of a plan."""


def _literals(path: Path) -> Iterator[str]:
    """A file's texts but for docstrings; what is put into one is ``?``."""
    left_out = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    left_out |= {id(part) for node in nodes(path) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "?" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def _bare(text: str) -> list[str]:
    """Arguments of values such as ``sf.Parallel`` that are named outside of a call."""
    calls = [match.span() for match in re.finditer(r"\w\((?:[^()]|\([^()]*\))*\)?", text)]
    return [match[1] for match in BARE.finditer(text) if not any(start < match.start() < stop for start, stop in calls)]


def test_messages_name_an_argument_as_it_is_typed():
    """``Parallel(tensor='auto')`` and not ``tensor='auto'``, which no engine takes by itself; of the mesh, which is
    given as ``parallel=`` mostly, that. DeepSpeed's interface and the rooms for tests have calls of their own."""
    assert _bare("tensor= is 3") == ["tensor"] and _bare("a mesh (or stages=?)") == ["stages"]
    assert not _bare("sf.Parallel(mesh={'tensor': 2}, stages=?) is 3") and not _bare("f(g(x), seed=3)")
    found = []
    for path in trees():
        name = path.relative_to(SOURCES).as_posix()
        if name.startswith(("compat/", "testing/")) or name == "plan/checks.py":
            continue
        for text in _literals(path):
            found += [f"{name}: {each}= in {text!r}" for each in _bare(text) if (name, each) not in OTHERS]
    assert not found, "\n".join(found)
