"""Rules of the house that a reader relies on: no global state, no import cycles, short files, an exact front door."""

from __future__ import annotations

import ast
import graphlib
import importlib
from pathlib import Path

import grimp
import pytest

import shardfold

SOURCES = Path(shardfold.__file__).parent
FILES = sorted(SOURCES.rglob("*.py"))
MAX_LINES = 500
REASON = "# Long because"  # within the first lines of a file that is longer

# Values that say what and when: they can be made, checked and printed where there is no process group.
VALUE_ROOMS = ("errors", "layout", "presets", "explain", "shards", "program", "passes", "cost")


def _name(path: Path) -> str:
    return path.relative_to(SOURCES).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _public(path: Path) -> bool:
    return not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(SOURCES).parts)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_global_statements(path: Path):
    """No function rebinds a module's names."""
    lines = [node.lineno for node in ast.walk(_tree(path)) if isinstance(node, ast.Global)]
    assert not lines, f"{_name(path)} has `global` in line {lines}"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_are_short_or_say_why(path: Path):
    """A file over 500 lines says at its top, in a line `# Long because ...`, why it is not two."""
    lines = path.read_text(encoding="utf-8").splitlines()
    explained = any(line.startswith(REASON) for line in lines[:10])
    assert len(lines) <= MAX_LINES or explained, f"{_name(path)} has {len(lines)} lines and no line `{REASON} ...`"


@pytest.mark.parametrize("path", [path for path in FILES if _public(path)], ids=_name)
def test_public_modules_have_a_docstring(path: Path):
    """Every public module says at its top what it is."""
    assert ast.get_docstring(_tree(path)), f"{_name(path)} has no docstring"


def test_no_import_cycles():
    """The modules can be sorted so that each imports only earlier ones, imports inside functions included."""
    graph = grimp.build_graph("shardfold", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("room", VALUE_ROOMS)
def test_value_rooms_know_no_process_group(room: str):
    """Layouts, programs and costs are values: their modules do not import `torch.distributed`."""
    path = SOURCES / f"{room}.py"
    for node in ast.walk(_tree(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        assert not any(name.startswith("torch.distributed") for name in names), f"{room}.py line {node.lineno}"


def test_all_is_exact():
    """`shardfold.__all__` has no name twice, every name in it exists, and no public name is missing from it."""
    names = shardfold.__all__
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(shardfold, name)]
    public: set[str] = set()
    for node in ast.walk(_tree(SOURCES / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardfold":
            public |= {alias.asname or alias.name for alias in node.names}
    public |= {name for name, value in vars(shardfold).items() if getattr(value, "__module__", "") == "shardfold"}
    public = {name for name in public if not name.startswith("_")}
    assert not public - set(names)


@pytest.mark.parametrize("path", [path for path in FILES if _public(path)], ids=_name)
def test_every_all_names_what_exists(path: Path):
    """A module's `__all__` names only what the module has."""
    parts = path.relative_to(SOURCES).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    declared = [
        node
        for node in _tree(path).body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    if declared:
        module = importlib.import_module(".".join(("shardfold", *parts)))
        assert not [name for name in module.__all__ if not hasattr(module, name)]
