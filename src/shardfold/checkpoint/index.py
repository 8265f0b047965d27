"""What a checkpoint's index says: values and index arithmetic, no files and no torch.distributed.

A checkpoint is a folder of safetensors files and an ``index.json`` (byte by byte in docs/checkpoint-format.md). The
index lists *pieces*: of which parameter, of which state, which elements, in which file and where. Elements are named by
a *box* of the parameter (the block of it that a rank has; the whole, mostly) and a flat range in the box's row-major
order, so a shard of any layout is one piece, and a reader needs to know nothing of who wrote it. A checksum tells of
accidents; whoever means harm makes it anew, so every value is looked at, its type and its bounds, before it is used.

    kind      a piece holds
    element   one value for each element of its range: weights, moments
    block     one value for each ``block`` elements of its range, counted from the box's first: 8-bit scales
    once      a tensor that the parameter has once: factored moments, step counts
    buffer    a buffer of a module
    run       a tensor of the run's own state, named by the tree that refers to it
    rank      the same, of one rank: its random numbers
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import xxhash

from shardfold.checkpoint.folders import is_plain_name
from shardfold.errors import CheckpointError
from shardfold.plan.placement import Box, Extent, shared

__all__ = [
    "DEPTH",
    "ITEMSIZES",
    "KINDS",
    "SUM_BYTES",
    "VERSION",
    "Index",
    "Parameter",
    "Piece",
    "check_index",
    "checksum",
    "is_deep",
    "no_constant",
    "once_each",
    "overlaps",
]


FORMAT, VERSION = "shardfold checkpoint", 1
KINDS = ("element", "block", "once", "buffer", "run", "rank")
SUM_BYTES = 4 * 1024 * 1024
"""Bytes of a piece, from its first on, that one checksum covers: a reader of a part of it can check what it reads."""

#: safetensors' names of dtypes, and bytes per element.
ITEMSIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
}


def checksum(data: Any) -> str:
    """XXH3 of bytes, 64 bits, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class Piece:
    """A tensor of one of the files.

    Attributes:
        of: name of the parameter or buffer; of ``run`` and ``rank`` pieces the name that the tree refers to.
        state: ``weight``, ``exp_avg``, ...; empty for ``run``, ``rank`` and ``buffer``.
        kind: one of :data:`KINDS`.
        dtype: as safetensors names it.
        shape: of the tensor in the file; 1-D for ``element`` and ``block``.
        start: the first element of the box that it holds, in row-major order.
        stop: the element behind its last; both count elements, also of a ``block`` piece.
        box: of the parameter; None: the whole.
        block: elements per value.
        width: of codes, bytes per block of a :attr:`Parameter.codes`, each of which then is a value.
        file: in the folder.
        at: where its bytes begin in the file.
        sums: checksums of each :data:`SUM_BYTES` of it.
        rank: of a ``rank`` piece.
    """

    of: str
    state: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0
    box: Box | None = None
    block: int = 1
    file: str = ""
    at: int = 0
    sums: tuple[str, ...] = ()
    rank: int | None = None
    width: int = 1

    @property
    def numel(self) -> int:
        """Values it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        path = "/".join(part for part in (self.state or self.kind, self.of) if part)
        if self.kind == "rank":
            path += f"/{self.rank}"
        if self.box is not None:  # two boxes of a parameter may lie in one file
            return f"{path}/{','.join(map(str, self.box.starts))}/{self.start}"
        return path + (f"/{self.start}" if self.start else "")

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"of": self.of, "state": self.state, "kind": self.kind, "dtype": self.dtype}
        said |= {"shape": list(self.shape), "file": self.file, "at": self.at, "sums": list(self.sums)}
        if self.kind in ("element", "block"):
            said["range"] = [self.start, self.stop]
        if self.kind == "block":
            said["block"] = self.block
            if self.width != 1:
                said["width"] = self.width
        if self.box is not None:
            stacked = [list(self.box.stacked)] if self.box.stacked else []
            said["box"] = [list(self.box.starts), list(self.box.sizes), *stacked]
        if self.rank is not None:
            said["rank"] = self.rank
        return said

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> Piece:
        start, stop = said.get("range", (0, 0))
        box = Box(*map(tuple, said["box"])) if "box" in said else None
        of, place = (said["of"], said["state"], said["kind"], said["dtype"]), (said["file"], said["at"])
        shape, sums, block = tuple(said["shape"]), tuple(said["sums"]), said.get("block", 1)
        return Piece(*of, shape, start, stop, box, block, *place, sums, said.get("rank"), said.get("width", 1))


@dataclass(frozen=True)
class Parameter:
    """A parameter or a buffer.

    Attributes:
        shape: of the whole, whatever box of it a rank had.
        also: further names of the same tensor (tied weights).
        dtype: of the ``weight`` state, as safetensors names it.
        trainable: whether the optimizer had it.
        digest: checksum of its values, where these were left out; None: they are there.
        codes: the format of which its ``weight`` are codes; None: they are values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    also: tuple[str, ...] = ()
    trainable: bool = True
    digest: str | None = None
    codes: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        if self.also:
            said["also"] = list(self.also)
        if not self.trainable:
            said["trainable"] = False
        if self.digest is not None:
            said["digest"] = self.digest
        if self.codes is not None:
            said["codes"] = self.codes
        return said

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> Parameter:
        also, trainable = tuple(said.get("also", ())), said.get("trainable", True)
        digest, codes = said.get("digest"), said.get("codes")
        return Parameter(said["name"], tuple(said["shape"]), said["dtype"], also, trainable, digest, codes)


LISTED: dict[str, type[Parameter | Piece]] = {"parameters": Parameter, "buffers": Parameter, "pieces": Piece}
"""What an index has lists of."""


@dataclass
class Index:
    """All that a checkpoint says of itself.

    Attributes:
        step: optimizer steps done.
        written: ``{"shardfold": version, "torch": version, "time": ISO 8601}``.
        layout: ``{"table", "precision", "mesh", "ranks"}`` it was written under; nothing that a reader needs.
        files: bytes of each file, by name.
        parameters: in the order of the model.
        buffers: persistent buffers of modules.
        pieces: of all files.
        once: numbers that the optimizer keeps of a parameter once, ``{parameter: {name: number}}``.
        optimizer: ``{"class", "groups"}``; groups are their options with the names of their parameters; or None.
        run: what all ranks share: the schedule, the loss scale, the user's own (a tree, see ``trees``).
        ranks: the same of each rank: random numbers, the user's own.
        nonfinite: names of weights and buffers that have inf or NaN.
    """

    step: int = 0
    written: dict[str, Any] = field(default_factory=dict[str, Any])
    layout: dict[str, Any] = field(default_factory=dict[str, Any])
    files: dict[str, int] = field(default_factory=dict[str, int])
    parameters: list[Parameter] = field(default_factory=list[Parameter])
    buffers: list[Parameter] = field(default_factory=list[Parameter])
    pieces: list[Piece] = field(default_factory=list[Piece])
    once: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    optimizer: dict[str, Any] | None = None
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    ranks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    nonfinite: list[str] = field(default_factory=list[str])

    def add_file(self, name: str, num_bytes: int, pieces: Sequence[Piece], nonfinite: Sequence[Piece]) -> None:
        """A file with these pieces was written; ``nonfinite``: those that have inf or NaN."""
        self.pieces += pieces
        self.files[name] = num_bytes
        bad = dict.fromkeys(p.of for p in nonfinite if p.kind == "buffer" or p.state == "weight")
        self.nonfinite += [each for each in bad if each not in self.nonfinite]

    def join(self, part: Index) -> None:
        """What the next rank has written; the first ranks of stages come in the model's order."""
        self.pieces += part.pieces
        self.files |= part.files
        self.once |= part.once
        self.ranks += part.ranks
        self.nonfinite = sorted({*self.nonfinite, *part.nonfinite})
        self.parameters += part.parameters
        self.buffers += part.buffers
        if "extra" in part.run:
            self.run["extra"] = part.run["extra"] | self.run.get("extra", {})
        if part.optimizer is not None and self.optimizer is not None:
            for mine, theirs in zip(self.optimizer["groups"], part.optimizer["groups"], strict=True):
                mine["parameters"] += theirs["parameters"]

    def to_bytes(self) -> bytes:
        """The text of ``index.json``: the index and, beside it, the checksum of its compact form."""
        said = vars(self) | {name: [each.to_json() for each in getattr(self, name)] for name in LISTED}
        head = {"format": FORMAT, "version": VERSION, "checksum": checksum(_compact(said))}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        for name, value in said.items():
            if isinstance(value, list) and value:
                inner = ",\n".join(f"  {json.dumps(item)}" for item in value)
                lines.append(f"{json.dumps(name)}: [\n{inner}\n]")
            else:
                lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Index:
        """Reads what :meth:`to_bytes` wrote; ``where`` names it in messages.

        Raises:
            CheckpointError: it is not such a text, is of a later version, was changed since, or says what cannot be.
        """
        try:
            said = json.loads(data, object_pairs_hook=once_each, parse_constant=no_constant)
            if not isinstance(said, dict):
                raise ValueError("it is not an object")
            form, version, digest = said.pop("format"), said.pop("version"), said.pop("checksum")
            if is_deep(said):
                raise ValueError(f"it is nested more than {DEPTH} levels deep")
        except RecursionError:
            raise CheckpointError(f"{where} is not an index of a checkpoint: it is nested too deeply.") from None
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{where} is not an index of a checkpoint, or is damaged ({error}).") from None
        if form != FORMAT or version not in range(1, VERSION + 1) or isinstance(version, bool):
            raise CheckpointError(
                f"{where} says {form!r} version {version!r}; this Shardfold reads {FORMAT!r} up to version {VERSION}: "
                "read it with the release that wrote it, or a later one."
            )
        if checksum(_compact(said)) != digest:
            raise CheckpointError(
                f"{where} is damaged: its checksum differs from what it says; take another checkpoint."
            )
        try:
            check_index(said, ITEMSIZES, KINDS)
        except ValueError as error:
            raise CheckpointError(f"{where} is damaged: {error}; take another checkpoint.") from None
        known: dict[str, Any] = {each.name: said.get(each.name) for each in fields(Index)}
        known |= {name: [kind.from_json(each) for each in said[name]] for name, kind in LISTED.items()}
        return Index(**known)


def _compact(said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":"), sort_keys=True).encode()


def overlaps(piece: Piece, shape: Sequence[int], start: int, stop: int, box: Box | None = None) -> Iterator[Extent]:
    """Where a piece has elements ``[start, stop)`` of a ``box`` of its parameter, in rising order.

    Args:
        piece: of kind ``element``.
        shape: of the whole parameter.
        start, stop: elements of ``box``.
        box: of the parameter; None: the whole.
    """
    if box == piece.box:
        a, b = max(start, piece.start), min(stop, piece.stop)
        if a < b:
            yield Extent(a, a - piece.start, b - a)
        return
    whole = Box.of(shape)
    for run in shared(box or whole, (start, stop), piece.box or whole, (piece.start, piece.stop)):
        yield run._replace(other=run.other - piece.start)


# -- what its text may say


DEPTH = 200
"""Levels of a tree, at most; code that walks over trees calls itself for each."""

DIMS = 64
"""Of a tensor, at most: PyTorch's own limit."""

ELEMENTS = 2**50
"""Of a tensor, at most: no machine holds more."""

BYTES = 2**63 - 1


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads(object_pairs_hook=...)``: each key of an object once.

    Raises:
        ValueError: one is there twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def no_constant(name: str) -> Any:
    """For ``json.loads(parse_constant=...)``: JSON has no NaN and no infinity."""
    raise ValueError(f"{name} is not JSON")


def is_deep(tree: Any, limit: int = DEPTH) -> bool:
    """Whether a tree of lists and dicts has more levels than that."""
    level: list[Any] = [tree]
    for _ in range(limit + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (list, dict))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def check_index(said: Mapping[str, Any], itemsizes: Mapping[str, int], kinds: Sequence[str]) -> None:
    """What an index says beside its head, in the form that it has in the file.

    Args:
        said: the JSON object, of at most :data:`DEPTH` levels.
        itemsizes: bytes of an element, by the dtypes that there are.
        kinds: of pieces that there are.

    Raises:
        ValueError: what is not as it should be, and where.
    """
    _whole(said, "step")
    for name in ("written", "layout", "files", "once", "run"):
        _typed(said, name, dict, "an object")
    for name in ("parameters", "buffers", "pieces", "ranks", "nonfinite"):
        _typed(said, name, list, "a list")
    files: dict[str, Any] = said["files"]
    for name in files:
        if not is_plain_name(name):
            raise ValueError(f"files: {name!r} is not the name of a file beside it")
        _whole(files, name, "files: ")
    for place in ("parameters", "buffers"):
        for number, one in enumerate(said[place]):
            _parameter(one, f"{place}[{number}]", itemsizes)
        _named_once(said[place], place)
    shapes: dict[str, list[int]] = {one["name"]: one["shape"] for one in [*said["buffers"], *said["parameters"]]}
    for number, one in enumerate(said["pieces"]):
        _piece(one, f"pieces[{number}]", files, itemsizes, kinds)
        if "box" in one and one["of"] in shapes:
            _fits(one["box"], shapes[one["of"]], f"pieces[{number}] ({one['of']}): ")
    for name, one in [*said["once"].items(), *((str(rank), one) for rank, one in enumerate(said["ranks"]))]:
        if not isinstance(one, dict):
            raise ValueError(f"what it keeps of {name!r} is not an object")
    _texts(said, "nonfinite")
    _optimizer(said.get("optimizer"))


def _optimizer(said: Any) -> None:
    if said is None:
        return
    if not isinstance(said, dict):
        raise ValueError("optimizer is not an object")
    _typed(said, "class", str, "a name", "optimizer: ")
    _typed(said, "groups", list, "a list", "optimizer: ")
    for number, group in enumerate(said["groups"]):
        where = f"optimizer: groups[{number}]: "
        if not isinstance(group, dict):
            raise ValueError(f"{where}it is not an object")
        _typed(group, "options", dict, "an object", where)
        _texts(group, "parameters", where)


def _parameter(said: Any, where: str, itemsizes: Mapping[str, int]) -> None:
    if not isinstance(said, dict):
        raise ValueError(f"{where} is not an object")
    _typed(said, "name", str, "a name", f"{where}: ")
    where = f"{where} ({said['name']}): "
    _shape(said, where)
    _one_of(said, "dtype", itemsizes, where)
    if "also" in said:
        _texts(said, "also", where)
    if not isinstance(said.get("trainable", True), bool):
        raise ValueError(f"{where}trainable is neither true nor false")
    if not isinstance(said.get("digest", ""), str):
        raise ValueError(f"{where}digest is not a checksum")
    if not isinstance(said.get("codes", ""), str):
        raise ValueError(f"{where}codes is not the name of a format")


def _named_once(said: Sequence[Mapping[str, Any]], place: str) -> None:
    seen: set[str] = set()
    for one in said:
        for name in (one["name"], *one.get("also", ())):
            if name in seen:
                raise ValueError(f"{place}: {name!r} is there twice")
            seen.add(name)


def _fits(box: Sequence[Sequence[int]], shape: Sequence[int], where: str) -> None:
    starts, sizes, *stacked = box
    if stacked:
        dim, count, length = stacked[0]
        if dim >= len(shape) or shape[dim] != count * length:
            raise ValueError(f"{where}its box is stacked as {stacked[0]!r}, which its shape is not")
        shape = (*shape[:dim], count, length, *shape[dim + 1 :])
    if len(starts) != len(shape) or any(a + n > all_ for a, n, all_ in zip(starts, sizes, shape, strict=True)):
        raise ValueError(f"{where}its box is not within its shape")


def _piece(said: Any, where: str, files: Mapping[str, int], itemsizes: Mapping[str, int], kinds: Sequence[str]) -> None:
    if not isinstance(said, dict):
        raise ValueError(f"{where} is not an object")
    for name in ("of", "state", "file"):
        _typed(said, name, str, "a name", f"{where}: ")
    where = f"{where} ({said['of']}): "
    _one_of(said, "kind", kinds, where)
    _one_of(said, "dtype", itemsizes, where)
    numel = _shape(said, where)
    _whole(said, "at", where)
    _texts(said, "sums", where)
    size = files.get(said["file"])
    if size is None:
        raise ValueError(f"{where}it is in {said['file']!r}, which is none of its files")
    if said["at"] + numel * itemsizes[said["dtype"]] > size:
        raise ValueError(f"{where}it ends behind the {size} bytes of {said['file']}")
    if said.get("rank") is not None:
        _whole(said, "rank", where)
    start, stop = _range(said, where)
    block = said.get("block", 1)
    if type(block) is not int or block < 1:
        raise ValueError(f"{where}block is {block!r}, which is not a number of elements")
    width = said.get("width", 1)
    if type(width) is not int or width < 1:
        raise ValueError(f"{where}width is {width!r}, which is not a number of bytes")
    if said["kind"] in ("element", "block") and numel != -(-(stop - start) // block) * width:
        raise ValueError(f"{where}it has {numel} values for the elements {start} to {stop}")
    if "box" in said:
        _box(said["box"], stop, where)


def _range(said: Mapping[str, Any], where: str) -> tuple[int, int]:
    found = said.get("range", [0, 0])
    if not isinstance(found, list) or len(found) != 2 or any(type(each) is not int for each in found):
        raise ValueError(f"{where}range is {found!r}, which is not the first element and the one behind the last")
    if not 0 <= found[0] <= found[1] <= ELEMENTS:
        raise ValueError(f"{where}range is {found!r}, which no tensor has")
    return found[0], found[1]


def _box(said: Any, stop: int, where: str) -> None:
    sides: list[Any] = said if isinstance(said, list) else []
    if len(sides) not in (2, 3) or not all(isinstance(side, list) for side in sides) or len(sides[0]) != len(sides[1]):
        raise ValueError(f"{where}box is not [starts, sizes]")
    if len(sides) == 3 and len(sides[2]) != 3:
        raise ValueError(f"{where}box is stacked as {sides[2]!r}, which is not [dim, count, length]")
    if any(type(each) is not int or not 0 <= each <= ELEMENTS for side in sides for each in side):
        raise ValueError(f"{where}box is {said!r}, which no tensor has")
    if stop > math.prod(sides[1]):
        raise ValueError(f"{where}its elements end after its box")


def _shape(said: Mapping[str, Any], where: str) -> int:
    """How many elements it has."""
    shape = said.get("shape")
    if not isinstance(shape, list) or len(shape) > DIMS or any(type(each) is not int for each in shape):
        raise ValueError(f"{where}shape is {_short(shape)}, which is not a list of up to {DIMS} numbers")
    if any(each < 0 for each in shape) or math.prod(shape) > ELEMENTS:
        raise ValueError(f"{where}shape is {_short(shape)}, which no tensor has")
    return math.prod(shape)


def _whole(said: Mapping[str, Any], name: str, where: str = "") -> None:
    if type(said.get(name)) is not int or not 0 <= said[name] <= BYTES:
        raise ValueError(f"{where}{name} is {_short(said.get(name))}, which is not a whole number from 0 on")


def _typed(said: Mapping[str, Any], name: str, kind: type, words: str, where: str = "") -> None:
    if not isinstance(said.get(name), kind):
        raise ValueError(f"{where}{name} is {'not ' + words if name in said else 'missing'}")


def _texts(said: Mapping[str, Any], name: str, where: str = "") -> None:
    found = said.get(name)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{where}{name} is not a list of texts")


def _one_of(said: Mapping[str, Any], name: str, known: Mapping[str, Any] | Sequence[str], where: str) -> None:
    if not isinstance(said.get(name), str) or said[name] not in known:
        raise ValueError(f"{where}{name} is {_short(said.get(name))}, which is none of {', '.join(known)}")


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of many digits"
    return text if len(text) <= 60 else f"{text[:60]}..."
