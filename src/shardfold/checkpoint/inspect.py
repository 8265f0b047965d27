"""What is in a checkpoint, read off its index: no torch, and no byte of a tensor unless it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardfold.checkpoint.index import DEPTH, Index, Parameter, Piece
from shardfold.checkpoint.verify import Damage, blocks, by_file, missing_files, read_index
from shardfold.errors import CheckpointError

__all__ = ["Contents", "NotFinite", "inspect", "not_finite"]


@dataclass(frozen=True)
class NotFinite:
    """Values of a state of one parameter or buffer that are not finite; how many."""

    tensor: str
    num_nan: int
    num_inf: int

    def __str__(self) -> str:
        return f"{self.tensor}: {self.num_nan} NaN, {self.num_inf} inf"

    def to_json(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "nan": self.num_nan, "inf": self.num_inf}


@dataclass(frozen=True)
class Tensor:
    """A parameter or a buffer.

    Attributes:
        also: further names of the same tensor.
        states: bytes and dtype (as safetensors names it) of each state; a buffer has one, ``""``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    buffer: bool
    also: tuple[str, ...]
    states: dict[str, tuple[int, str]]

    @property
    def numel(self) -> int:
        return Parameter(self.name, self.shape, self.dtype).numel

    @property
    def weight_bytes(self) -> int:
        return sum(size for state, (size, _) in self.states.items() if state in ("weight", ""))

    @property
    def state_bytes(self) -> int:
        """Of the optimizer and of averages."""
        return sum(size for size, _ in self.states.values()) - self.weight_bytes


@dataclass(frozen=True)
class Row:
    """A line of the tree: a module, or siblings that are alike, or a tensor.

    Attributes:
        depth: 0 for what lies at the top.
        name: the last part of its path; ``0-11`` for siblings that are alike.
        num: of siblings that the row stands for.
        numel, weight_bytes, state_bytes: of all that it stands for.
        tensor: None for a module.
    """

    depth: int
    name: str
    num: int
    numel: int
    weight_bytes: int
    state_bytes: int
    dtypes: tuple[str, ...]
    tensor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        return self.tensor.shape if self.tensor is not None else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known of a tensor beside its size."""
        tensor = self.tensor
        if tensor is None:
            return ()
        kind = "buffer" if tensor.buffer else "" if tensor.trainable else "frozen"
        return tuple(filter(None, (kind, f"also {', '.join(tensor.also)}" if tensor.also else "")))


@dataclass
class Contents:
    """What :func:`inspect` found.

    Attributes:
        path: the checkpoint's folder.
        index: what it says of itself.
        tensors: parameters and then buffers, in the order of the model.
        not_finite: None: was not looked for.
        missing: files that are not there, such as those on other hosts, or not whole.

    Examples:
        >>> from shardfold.checkpoint import inspect
        >>> saved = engine.save(f"{folder}/step-0", wait=True)
        >>> len(inspect.inspect(folder).tensors) > 0
        True
    """

    path: Path
    index: Index
    tensors: list[Tensor]
    not_finite: list[NotFinite] | None = None
    missing: list[Damage] = field(default_factory=list[Damage])

    @property
    def num_bytes(self) -> int:
        return sum(self.index.files.values())

    @property
    def num_elements(self) -> int:
        """Of all parameters, tied ones once."""
        return sum(parameter.numel for parameter in self.index.parameters)

    @property
    def states(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Bytes of each state of all parameters, and its dtypes."""
        found: dict[str, tuple[int, tuple[str, ...]]] = {}
        for tensor in self.tensors:
            for state, (size, dtype) in tensor.states.items():
                before, dtypes = found.get(state or "buffers", (0, ()))
                found[state or "buffers"] = before + size, tuple(sorted({*dtypes, dtype}))
        return found

    @property
    def run(self) -> dict[str, str]:
        """What of the run is kept beside the model, each in a few words."""
        index, said = self.index, dict[str, str]()
        if index.optimizer is not None:
            groups = index.optimizer["groups"]
            rates = ", ".join(f"{group['options'].get('lr', '?')}" for group in groups[:4])
            count = f"{len(groups)} group{'s' * (len(groups) != 1)}"
            said["optimizer"] = f"{index.optimizer['class']}, {count}, lr {rates}{', ...' * (len(groups) > 4)}"
        for name in ("schedule", "loss_scale"):
            if index.run.get(name) is not None:
                said[name.replace("_", " ")] = _keys(index.run[name])
        if isinstance(index.run.get("averages"), list) and index.run["averages"]:
            said["averages"] = str(len(index.run["averages"]))
        if index.run.get("extra"):
            said["extra state"] = ", ".join(map(str, index.run["extra"]))
        if index.run.get("state"):
            said["state"] = _keys(index.run["state"])
        if index.ranks:
            own = [rank.get("state") for rank in index.ranks]
            more = sorted({key for state in own if isinstance(state, dict) for key in state})
            random = "random numbers" if any(rank.get("rng") for rank in index.ranks) else ""
            said["of each rank"] = ", ".join(filter(None, [random, *more])) or "nothing"
        return said

    def rows(self) -> list[Row]:
        """The tree of modules; siblings with the same things inside, as the layers of a model, are one row."""
        return list(_rows(_tree(self.tensors), 0))

    def to_json(self) -> dict[str, Any]:
        index = self.index
        return {
            "path": str(self.path),
            "step": index.step,
            "written": index.written,
            "layout": index.layout,
            "bytes": self.num_bytes,
            "elements": self.num_elements,
            "files": index.files,
            "states": {name: {"bytes": size, "dtypes": dtypes} for name, (size, dtypes) in self.states.items()},
            "run": self.run,
            "tensors": [
                {
                    "name": t.name,
                    "shape": t.shape,
                    "dtype": t.dtype,
                    "buffer": t.buffer,
                    "trainable": t.trainable,
                    "also": t.also,
                    "states": {s: {"bytes": n, "dtype": d} for s, (n, d) in t.states.items()},
                }
                for t in self.tensors
            ],
            "missing": [each.to_json() for each in self.missing],
            "nonfinite_when_written": index.nonfinite,
            "not_finite": [each.to_json() for each in self.not_finite] if self.not_finite is not None else None,
        }


def inspect(
    path: str | Path, *, finite: bool = False, tick: Callable[[int, int], None] = lambda done, total: None
) -> Contents:
    """Looks into a checkpoint.

    Args:
        path: a checkpoint, or a folder of checkpoints, whose latest is taken.
        finite: reads all tensors and counts values that are inf or NaN.
        tick: called with the bytes done so far and those there are, every few MiB that are read.

    Raises:
        CheckpointError: there is none, it is not complete, or its index is damaged.
    """
    folder, index = read_index(path)
    states: dict[tuple[str, bool], dict[str, tuple[int, str]]] = {}
    for piece in index.pieces:
        if piece.kind in ("element", "block", "once", "buffer"):
            kept = states.setdefault((piece.of, piece.kind == "buffer"), {})
            kept[piece.state] = kept.get(piece.state, (0, ""))[0] + piece.nbytes, piece.dtype
    tensors = [
        Tensor(p.name, p.shape, p.dtype, p.trainable, buffer, p.also, states.get((p.name, buffer), {}))
        for buffer, those in ((False, index.parameters), (True, index.buffers))
        for p in those
    ]
    contents = Contents(folder, index, tensors, missing=missing_files(folder, index))
    if finite:
        if damage := contents.missing:
            raise CheckpointError(
                f"{folder} is not complete: {'; '.join(map(str, damage[:8]))}; take another checkpoint."
            )
        contents.not_finite = not_finite(folder, index, tick)
    return contents


def not_finite(folder: Path, index: Index, tick: Callable[[int, int], None]) -> list[NotFinite]:
    """Tensors of a checkpoint that have values which are inf or NaN, by reading them; shares of ranks are one."""
    counts: dict[str, tuple[int, int]] = {}
    total = sum(piece.nbytes for piece in index.pieces)
    done = 0
    for pieces in by_file(index).values():
        for piece, _, data in blocks(folder, pieces):
            done += len(data)
            tick(done, total)
            if (found := _count(data, piece.dtype)) != (0, 0):
                key = _title(piece)
                before = counts.get(key, (0, 0))
                counts[key] = before[0] + found[0], before[1] + found[1]
    return [NotFinite(key, *found) for key, found in sorted(counts.items())]


#: By dtype: the integer of the same size, the bits of the exponent, and those of the mantissa.
_BITS: dict[str, tuple[Any, int, int]] = {
    "F64": (np.uint64, 0x7FF0000000000000, 0x000FFFFFFFFFFFFF),
    "F32": (np.uint32, 0x7F800000, 0x007FFFFF),
    "F16": (np.uint16, 0x7C00, 0x03FF),
    "BF16": (np.uint16, 0x7F80, 0x007F),
    "F8_E5M2": (np.uint8, 0x7C, 0x03),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "C64": (np.uint32, 0x7F800000, 0x007FFFFF),
}


def _count(data: memoryview, dtype: str) -> tuple[int, int]:
    """How many values are NaN, and how many inf. NumPy has no bfloat16: bits are looked at."""
    if dtype not in _BITS:
        return 0, 0
    kind, exponent, mantissa = _BITS[dtype]
    values = np.frombuffer(data[: len(data) // kind().itemsize * kind().itemsize], dtype=kind)
    odd = values[(values & kind(exponent)) == kind(exponent)]
    nan = int(np.count_nonzero(odd & kind(mantissa)))
    return nan, odd.size - nan


def _title(piece: Piece) -> str:
    rank = f" of rank {piece.rank}" if piece.rank is not None else ""
    return f"{piece.state or piece.kind} {piece.of}{rank}"


def _keys(tree: Any) -> str:
    if not isinstance(tree, Mapping):
        return str(tree)
    shown = [
        f"{key} {value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(key)
        for key, value in tree.items()
    ]
    return ", ".join(shown[:8]) + ", ..." * (len(shown) > 8)


# -- the tree ------------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    tensor: Tensor | None = None
    children: dict[str, _Node] = field(default_factory=dict[str, "_Node"])

    def put(self, tensor: Tensor, path: Sequence[str]) -> None:
        """It is at ``path`` below this one."""
        if path:
            self.children.setdefault(path[0], _Node()).put(tensor, path[1:])
        else:
            self.tensor = tensor

    def leaves(self) -> Iterator[Tensor]:
        if self.tensor is not None:
            yield self.tensor
        for child in self.children.values():
            yield from child.leaves()

    def form(self) -> Any:
        """Equal for nodes that hold the same under other names."""
        own = self.tensor
        said = (own.shape, own.trainable, own.buffer, tuple(own.states.items())) if own is not None else None
        return said, tuple((name, child.form()) for name, child in self.children.items())


def _tree(tensors: Sequence[Tensor]) -> _Node:
    root = _Node()
    for tensor in tensors:
        root.put(tensor, tensor.name.split(".", DEPTH))
    return root


def _rows(node: _Node, depth: int) -> Iterator[Row]:
    for names, alike in _groups(node.children):
        leaves = [tensor for child in alike for tensor in child.leaves()]
        dtypes = tuple(sorted({tensor.dtype for tensor in leaves}))
        first, last = names[0], names[-1]
        yield Row(
            depth,
            first if len(names) == 1 else f"{first}-{last}",
            len(names),
            sum(t.numel for t in leaves),
            sum(t.weight_bytes for t in leaves),
            sum(t.state_bytes for t in leaves),
            dtypes,
            alike[0].tensor if not alike[0].children else None,
        )
        yield from _rows(alike[0], depth + 1)


def _groups(children: Mapping[str, _Node]) -> list[tuple[list[str], list[_Node]]]:
    """Consecutive numbered modules that are alike, together."""
    found: list[tuple[list[str], list[_Node]]] = []
    for name, node in children.items():
        before = found[-1][0][-1] if found else ""
        follows = name.isdecimal() and before.isdecimal() and int(before) + 1 == int(name)
        if follows and node.children and found[-1][1][0].form() == node.form():
            found[-1][0].append(name)
            found[-1][1].append(node)
        else:
            found.append(([name], [node]))
    return found
