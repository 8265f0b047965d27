"""How the package is built: figures of ``benchmarks/structure.py`` that only shrink, and true maps of rooms."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardfold
from tests.support.sources import trees

SOURCES = Path(shardfold.__file__).parent
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "structure.py"

CEILINGS = {
    "foreign_writes": 86,
    "class_names": 0,
    "file_names": 0,
    "single_modules": 16,
    "skipped": 18,
    "arguments": 15,
}
"""What the script counts at most. Who makes one of them smaller writes the new number here; nobody makes one larger."""

ROOMS = [
    path.parent
    for path in sorted(SOURCES.rglob("__init__.py"))
    if path.parent != SOURCES and SOURCES / "compat" / "deepspeed" not in path.parents
]
LISTED = re.compile(r"^(?: {4})?(\w+)  +\S", re.MULTILINE)

ENGINE = """from tiny.engine.part import Part


class Engine:
    def __init__(self, model, *, layout=None):
        self.part = Part()
        self.part.done = 1
        own = Part()
        own.done, other = 2, 3
"""
PART = '''"""Says what it is."""

# a remark
import tiny.plan.part


def put(part, x):
    part.done += 1
    for part.done in x:
        part.done.deep[0] = [1,  2]  # fmt: skip


class Part:
    class Engine:
        pass
'''


@cache
def structure() -> Any:
    spec = importlib.util.spec_from_file_location("structure", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def figures() -> dict[str, Any]:
    return structure().Package(SOURCES, trees()).figures()


@pytest.mark.parametrize("figure", CEILINGS)
def test_figures_only_shrink(figure: str) -> None:
    found = figures()[figure]
    count = found if isinstance(found, int) else found.get("all", len(found)) if isinstance(found, dict) else len(found)
    assert count <= CEILINGS[figure], f"python {SCRIPT.name} lists them: {found}"


def _public_first(name: str) -> tuple[bool, str]:
    return name.startswith("_"), name


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.relative_to(SOURCES).as_posix())
def test_a_room_lists_its_modules(room: Path) -> None:
    """The docstring of each package has one line for each of its modules and packages, private ones last."""
    there = [path.stem for path in room.glob("*.py") if path.stem not in ("__init__", "__main__")]
    there += [path.parent.name for path in room.glob("*/__init__.py")]
    listed = LISTED.findall(ast.get_docstring(trees()[room / "__init__.py"], clean=False) or "")
    assert listed == sorted(there, key=_public_first)


def test_what_counts(tmp_path: Path) -> None:
    """Of a package of three files each figure, by hand."""
    files = {
        "engine/__init__.py": "",
        "engine/engine.py": ENGINE,
        "engine/part.py": PART,
        "plan/part.py": "",
    }
    for name, text in files.items():
        (tmp_path / "tiny" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tiny" / name).write_text(text)
    found = structure().Package(tmp_path / "tiny").figures()
    assert found["foreign_writes"] == {"all": 3, "by_room": {"engine": 3}}
    assert found["class_names"] == {"Engine": ["engine/engine.py:4", "engine/part.py:14"]}
    assert found["file_names"] == {"part": ["engine/part.py", "plan/part.py"]}
    assert found["single_modules"] == ["engine/part.py (engine/engine.py)"]
    assert found["skipped"] == {"all": 1, "by_room": {"engine": 1}} and found["arguments"] == 2
    assert found["sizes"]["engine"] == {"files": 3, "lines": 24, "code": 15}
