"""One module knows the devices; the rest of the library does not ask PyTorch for one by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shardfold
from tests.support.sources import nodes

SOURCES = Path(shardfold.__file__).parent
SEAM, TABLE = SOURCES / "accelerator.py", SOURCES / "torch_internals.py"
# The compatibility layer has DeepSpeed's own interface for devices, and torch_internals a private name for it; the
# simulated device is one.
APART = {SOURCES / "compat", SOURCES / "testing" / "simulated", SEAM, TABLE}
FILES = [path for path in sorted(SOURCES.rglob("*.py")) if not {path, *path.parents} & APART]
MODULES = ("cuda", "accelerator", "xpu", "mps", "mtia", "get_device_module")
COMPARED = ("cuda", "nccl")


def _findings(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in MODULES:
                yield f"line {node.lineno}: torch.{node.attr}"
            if node.attr in ("is_cuda", "is_xpu"):
                yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (f"line {node.lineno}: {name}" for name in names if name in [f"torch.{m}" for m in MODULES])
        elif isinstance(node, ast.Import):
            yield from (
                f"line {node.lineno}: {alias.name}"
                for alias in node.names
                if alias.name.split(".")[:2] in [["torch", module] for module in MODULES]
            )
        elif isinstance(node, ast.Compare):
            for each in (node.left, *node.comparators):
                constants = [part.value for part in ast.walk(each) if isinstance(part, ast.Constant)]
                yield from (f"line {node.lineno}: compares with {c!r}" for c in constants if c in COMPARED)


def test_devices_are_asked_for_in_one_place() -> None:
    """No file but ``accelerator.py`` uses ``torch.cuda`` or its like, or compares with the name of one type: what runs
    on one accelerator runs on each that offers the same."""
    found = [f"{path.relative_to(SOURCES)}: {said}" for path in FILES for said in _findings(path)]
    assert not found
