"""How the package is built, as numbers: what a reader has to hold in mind. Only trips import the package.

python benchmarks/structure.py                    every figure, as text
python benchmarks/structure.py --json             the same as JSON
python benchmarks/structure.py rooms [FILE.png]   floors of rooms, by imports; a picture too (docs/pictures/rooms.png)
python benchmarks/structure.py trips [--json]     files that one act crosses, counted by a trace of calls on two ranks

What is counted:

    foreign writes   targets of assignments, of any kind, that are attributes of something other than the names ``self``
                     and ``cls``, in the core rooms. An object that the same function has made counts as its own: a
                     name that is bound to a call of a class (it begins with an upper-case letter) or of ``cls``.
    class names      that two or more classes have, nested ones, protocols and private ones too; without ``compat``,
                     which has the names of DeepSpeed's classes
    file names       that two files of neighbouring rooms have: of one room, or of two of which one imports the other;
                     without ``__init__``, ``__main__`` and ``compat``
    single modules   modules that one other module of the package imports, which is in the same folder, and that no
                     leading underscore marks as private; without ``compat``
    skipped          comments that keep the formatter away
    arguments        those of ``Engine.__init__`` besides ``self``
    code             lines that are neither blank, nor a comment only, nor part of a docstring
    trips            files in which a function is called, from the begin of an act to its end, on the thread that acts;
                     the model is this script's own, as layers are none of what an act does to them
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "shardfold"
CORE = {"engine", "sharding", "comm", "tiers", "plan", "planner", "optim", "checkpoint"}
CORE |= {"activations", "numerics", "nn", "parallel"}
SKIP = re.compile(r"#\s*fmt:\s*skip\b[^\"\n]*$", re.MULTILINE)
LEFT_OUT = {"__init__", "__main__", "testing"}  # the door's lazy names, the command, and what may import anything
LOW = {"errors", "torch_internals", "data"}  # files beside the rooms


class Size(NamedTuple):
    files: int
    lines: int
    code: int


class Package:
    """The files of a package as syntax trees, and what follows from them.

    Args:
        folder: of the package.
        trees: of its files, where somebody has parsed them.
    """

    def __init__(self, folder: Path = SOURCES, trees: dict[Path, ast.Module] | None = None) -> None:
        self.folder = folder
        self.files = sorted(folder.rglob("*.py"))
        self.text: Callable[[Path], str] = cache(partial(Path.read_text, encoding="utf-8"))
        self.trees = trees or {path: ast.parse(self.text(path), str(path)) for path in self.files}

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def room(self, path: Path) -> str:
        """The first folder below the package, or the file beside these."""
        return path.relative_to(self.folder).parts[0].removesuffix(".py")

    def module(self, path: Path) -> str:
        parts = path.relative_to(self.folder.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def statements(self) -> dict[Path, list[ast.stmt]]:
        """Of each file all of them, those inside of others too."""
        return {path: list(_statements(tree)) for path, tree in self.trees.items()}

    @cached_property
    def imports(self) -> dict[Path, set[Path]]:
        """Of each file those of the package that it imports, in functions and for types too."""
        modules = {self.module(path): path for path in self.files}
        return {
            path: {modules[name] for name in _imported(nodes, self._package_of(path), modules)} - {path}
            for path, nodes in self.statements.items()
        }

    def _package_of(self, path: Path) -> str:
        name = self.module(path)
        return name if path.name == "__init__.py" else name.rpartition(".")[0]

    # -- figures

    def foreign_writes(self) -> list[str]:
        """Places in the core rooms where an attribute of another object is assigned."""
        return [
            f"{self.name(path)}:{target.lineno} {ast.unparse(target)}"
            for path, tree in self.trees.items()
            if self.room(path) in CORE
            for target in _foreign(tree)
        ]

    def class_names(self) -> dict[str, list[str]]:
        """Of each name that two or more classes have, where they are."""
        found: dict[str, list[str]] = defaultdict(list)
        for path in self._own():
            for node in self.statements[path]:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{self.name(path)}:{node.lineno}")
        return {name: places for name, places in sorted(found.items()) if len(places) > 1}

    def file_names(self) -> dict[str, list[str]]:
        """Of each name that files of neighbouring rooms have, these files."""
        down = self.rooms()[0]
        same: dict[str, list[Path]] = defaultdict(list)
        for path in self._own():
            if path.stem not in ("__init__", "__main__"):
                same[path.stem].append(path)
        found: dict[str, list[str]] = {}
        for name, paths in sorted(same.items()):
            near = [path for path in paths if any(other != path and self._near(path, other, down) for other in paths)]
            if near:
                found[name] = [self.name(path) for path in near]
        return found

    def _near(self, path: Path, other: Path, down: dict[str, set[str]]) -> bool:
        a, b = self.room(path), self.room(other)
        return a == b or b in down.get(a, ()) or a in down.get(b, ())

    def single_modules(self) -> list[str]:
        """Modules with one importer, in their own folder, that are not marked private."""
        importers: dict[Path, set[Path]] = defaultdict(set)
        for path, others in self.imports.items():
            for other in others:
                importers[other].add(path)
        return [
            f"{self.name(path)} ({self.name(importer)})"
            for path in self._own()
            if not path.stem.startswith("_") and len(importers[path]) == 1
            for importer in importers[path]
            if importer.parent == path.parent
        ]

    def skipped(self) -> Counter[str]:
        """Comments that keep the formatter away, by room."""
        found: Counter[str] = Counter()
        for path in self.files:
            found[self.room(path)] += len(SKIP.findall(self.text(path)))
        return +found

    def arguments(self) -> int:
        """Of ``Engine.__init__``."""
        for node in self.trees[self.folder / "engine" / "engine.py"].body:
            if isinstance(node, ast.ClassDef) and node.name == "Engine":
                [made] = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
                given = made.args
                return len(given.posonlyargs + given.args + given.kwonlyargs) - 1
        raise LookupError("engine/engine.py has no class Engine")

    def sizes(self) -> dict[str, Size]:
        """Of each room; files beside the rooms are together in ``(top)``."""
        found: dict[str, Size] = {}
        for path in self.files:
            room = self.room(path) if path.parent != self.folder else "(top)"
            lines = self.text(path).splitlines()
            old = found.get(room, Size(0, 0, 0))
            found[room] = Size(
                old.files + 1,
                old.lines + len(lines),
                old.code + _code_lines(lines, [self.trees[path], *self.statements[path]]),
            )
        return dict(sorted(found.items(), key=lambda each: -each[1].lines))

    def _own(self) -> list[Path]:
        return [path for path in self.files if self.room(path) != "compat"]

    # -- rooms

    def rooms(self) -> tuple[dict[str, set[str]], Counter[str]]:
        """Which rooms each imports, and how many modules each has."""
        down: dict[str, set[str]] = defaultdict(set)
        sizes: Counter[str] = Counter()
        for path, others in self.imports.items():
            room = self.room(path)
            if room not in LEFT_OUT:
                sizes[room] += 1
                down[room] |= {self.room(other) for other in others} - {room} - LEFT_OUT
        return dict(down), sizes

    def figures(self) -> dict[str, Any]:
        """Everything, as JSON takes it; lists have the places."""
        writes = self.foreign_writes()
        return {
            "foreign_writes": {"all": len(writes), "by_room": Counter(place.split("/")[0] for place in writes)},
            "class_names": self.class_names(),
            "file_names": self.file_names(),
            "single_modules": self.single_modules(),
            "skipped": {"all": self.skipped().total(), "by_room": dict(self.skipped().most_common())},
            "arguments": self.arguments(),
            "sizes": {room: size._asdict() for room, size in self.sizes().items()},
        }


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in _children(node):
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


def _imported(nodes: list[ast.stmt], package: str, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of ``modules`` that are named; ``from a import b`` names ``a.b`` where this is one, else ``a``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                yield from [name for name in (f"{base}.{alias.name}", base) if name in modules][:1]


def _foreign(node: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[ast.Attribute]:
    """Targets inside of ``node``; ``own``: names of objects that the function around it has made."""
    for child in _children(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _foreign(child, frozenset(_made(child)))
            continue
        for target in _targets(child):
            for each in ast.walk(target):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    of = each.value
                    if not (isinstance(of, ast.Name) and of.id in {"self", "cls", *own}):
                        yield each
        yield from _foreign(child, own)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Statements right inside of one, and what holds such: handlers of errors, cases."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        found = getattr(node, part, ())
        yield from found if isinstance(found, list) else ()


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        return [node.target]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [item.optional_vars for item in node.items if item.optional_vars is not None]
    return []


def _made(function: ast.AST) -> Iterator[str]:
    """Names that are bound in it to a call of a class or of ``cls``."""
    for node in _statements(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name.lstrip("_")[:1].isupper() or name in ("cls", "__new__"):
                yield from (target.id for target in _targets(node) if isinstance(target, ast.Name))


def _code_lines(lines: list[str], nodes: list[ast.AST]) -> int:
    documented: set[int] = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in documented
        for number, line in enumerate(lines, start=1)
    )


# -- floors


def floors(down: dict[str, set[str]]) -> list[list[str]]:
    """Rooms from the lowest floor up; two doors that know each other share one."""
    mutual = {frozenset((a, b)) for a in down for b in down[a] if a in down.get(b, ())}
    apart = {a: {b for b in down[a] if frozenset((a, b)) not in mutual} for a in down}
    height: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(apart).static_order():
        height[room] = 1 + max((height[below] for below in apart[room]), default=-1)
    for pair in mutual:
        for room in pair:
            height[room] = max(height[each] for each in pair)
    return [sorted(room for room in height if height[room] == floor) for floor in range(max(height.values()) + 1)]


def reduced(down: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others; doors that know each other are none of these."""
    one_way = {a: {b for b in under if a not in down.get(b, ())} for a, under in down.items()}

    def below(room: str, seen: set[str]) -> set[str]:
        for other in one_way.get(room, set()) - seen:
            seen.add(other)
            below(other, seen)
        return seen

    return {
        room: {b for b in under if not any(b in below(other, {room}) - {room} for other in under - {b})}
        for room, under in down.items()
    }


def draw(path: Path, down: dict[str, set[str]], sizes: Counter[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch

    levels = floors({room: below - LOW for room, below in down.items() if room not in LOW})
    shown = reduced({room: below - LOW for room, below in down.items() if room not in LOW})
    figure, axes = pyplot.subplots(figsize=(7, 7))
    at: dict[str, tuple[float, float]] = {}
    for floor, level in enumerate(levels):
        places = {1: (0.5,), 2: (0.38, 0.74), 3: (0.1, 0.5, 0.9)}.get(len(level), range(len(level)))
        at |= {room: (x, float(floor)) for room, x in zip(level, places, strict=True)}
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(levels) - 0.4)
    axes.axis("off")
    axes.set_title("Imports only go down; arrows that follow from others are left out", fontsize=10)
    boxes: dict[str, Any] = {}
    for room, (x, y) in at.items():
        modules = f"{sizes[room]} module{'s' * (sizes[room] > 1)}"
        style = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "0.2"}
        boxes[room] = axes.text(x, y, f"{room}\n{modules}", ha="center", va="center", fontsize=10, bbox=style)
    figure.tight_layout()
    figure.canvas.draw()  # boxes have their sizes behind it, and arrows end at them
    for room, (x, y) in at.items():
        for below in shown[room] & at.keys():
            u, v = at[below]
            look = {"arrowstyle": "-|>", "mutation_scale": 9, "lw": 1.0, "color": "0.4", "zorder": 1}
            ends = {"patchA": boxes[room].get_bbox_patch(), "patchB": boxes[below].get_bbox_patch()}
            bend = 0.0 if y - v <= 1 or u != x else 0.2
            axes.add_patch(FancyArrowPatch((x, y), (u, v), connectionstyle=f"arc3,rad={bend}", **look, **ends))
    figure.savefig(path, dpi=130)


# -- trips


class Trip:
    """Files of the package in which functions are called on this thread while it is on.

    Bodies of modules and of classes do not count: what is imported then was only not imported before.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(str(SOURCES)):  # CO_OPTIMIZED
            self.files.add(Path(code.co_filename).relative_to(SOURCES).as_posix())


def _marked(trip: Trip) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions of one tensor that are the identity, and at which backward starts and stops the trip."""
    import torch

    def at(act: Callable[[], None]) -> Callable[..., Any]:
        class Mark(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                act()
                return grads[0]

        return Mark.apply

    return at(trip.start), at(trip.stop)


def _rank_trips(folder: str) -> dict[str, list[str]]:
    """On each of two ranks; orders of units are recorded, and all is imported, before anything is traced."""
    from functools import partial

    import torch
    from torch import nn

    import shardfold as sf

    gather, reduce, save = Trip(), Trip(), Trip()
    traced: set[str] = set()
    at_sum, behind_sum = _marked(reduce)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            gather.stop()
            return self.linear(x).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Any) -> Any:
            for k, layer in enumerate(self.layers):
                if k == 2 and "gather" in traced:
                    gather.start()  # between the call of a unit and its forward: its gather, and the wait for it
                x = layer(x)
                if "reduce" in traced and k in (0, 2):  # backward comes by 2 first; units 2 and 1 are in between
                    x = (at_sum if k == 2 else behind_sum)(x)
            return x

    for layout in ("zero3", "zero2"):  # zero2 gathers nothing in backward, where only sums are looked for
        torch.manual_seed(0)
        engine = sf.Engine(
            Model(), optimizer=partial(torch.optim.AdamW, lr=1e-3), layout=layout, init=sf.Init(units=[Layer])
        )
        for step in range(4):
            traced.clear()
            if step == 3:
                traced.add("gather" if layout == "zero3" else "reduce")
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
        if layout == "zero3":
            engine.save(f"{folder}/first", wait=True)
            save.start()
            engine.save(f"{folder}/second", wait=True)
            save.stop()
        engine.close()
    names = {"gather of a unit (zero3)": gather, "gradient to reduced (zero2)": reduce, "save": save}
    return {name: sorted(trip.files) for name, trip in names.items()}


def _planned() -> tuple[Any, Any]:
    """A model of blocks that are alike, and a micro-batch, as ``shardfold plan --model module:function`` takes them."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            return x + self.linear(x).tanh()

    return nn.Sequential(*(Block() for _ in range(8))), torch.ones(2, 64)


def trips() -> dict[str, list[str]]:
    """Of each act the files that it crosses on rank 0."""
    import io
    import tempfile
    from contextlib import redirect_stdout

    from shardfold.testing import run_ranks
    from shardfold.tools import cli

    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(_rank_trips, 2, folder)[0]
    plan = Trip()
    for turn in range(2):
        with redirect_stdout(io.StringIO()):
            if turn:
                plan.start()
            try:
                cli.app(
                    ["plan", "--model", f"{__name__}:_planned", "--gpus", "2xA100-40G", "--layout", "zero3"]
                    + ["--micro-batch", "4"],
                    standalone_mode=False,
                )
            finally:
                plan.stop()
    return {**found, "shardfold plan": sorted(plan.files)}


# -- the command


def _said(figures: dict[str, Any]) -> Iterator[str]:
    def rooms(counts: dict[str, int]) -> str:
        return ", ".join(f"{room} {count}" for room, count in sorted(counts.items(), key=lambda each: -each[1]))

    writes, skipped = figures["foreign_writes"], figures["skipped"]
    yield f"foreign writes in the core: {writes['all']} ({rooms(writes['by_room'])})"
    yield f"arguments of Engine.__init__: {figures['arguments']}"
    yield f"# fmt: skip: {skipped['all']} ({rooms(skipped['by_room'])})"
    for title, key in (
        ("class names twice or more", "class_names"),
        ("file names twice among neighbours", "file_names"),
    ):
        yield f"{title}: {len(figures[key])}"
        yield from (f"    {name:<16} {' '.join(places)}" for name, places in figures[key].items())
    yield f"modules with one importer, in their own folder, not marked private: {len(figures['single_modules'])}"
    yield from (f"    {module}" for module in figures["single_modules"])
    yield f"{'room':<14}{'files':>6}{'lines':>9}{'code':>9}"
    sizes = [(room, *size.values()) for room, size in figures["sizes"].items()]
    for room, *counts in [*sizes, ("all", *(sum(column) for column in list(zip(*sizes, strict=True))[1:]))]:
        yield f"{room:<14}{counts[0]:>6}{counts[1]:>9,}{counts[2]:>9,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["figures", "rooms", "trips"], default="figures")
    parser.add_argument("picture", nargs="?", type=Path, help="of rooms: a file to draw into")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.what == "rooms":
        down, sizes = Package().rooms()
        for floor, level in reversed(list(enumerate(floors(down)))):
            print(f"{floor:>3}  {'  '.join(f'{room} ({sizes[room]})' for room in level)}")
        print(
            f"{sum(map(len, down.values()))} arrows between {len(down)} rooms and files on {len(floors(down))} floors"
        )
        if asked.picture:
            draw(asked.picture, down, sizes)
        return
    found: dict[str, Any] = Package().figures() if asked.what == "figures" else trips()
    if asked.json:
        print(json.dumps(found, indent=1))
    elif asked.what == "figures":
        print("\n".join(_said(found)))
    else:
        for name, files in found.items():
            print(f"{name}: {len(files)} files\n    {' '.join(files)}")


if __name__ == "__main__":
    main()
