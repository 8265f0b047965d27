"""Whether a checkpoint is what was written: every byte of every file, and that its index accounts for each of them.

Needs no torch and no more memory than one block of :data:`~shardfold.checkpoint.index.SUM_BYTES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from shardfold.checkpoint.draft import whose
from shardfold.checkpoint.folders import INDEX, check_regular, inside, open_regular, resolve
from shardfold.checkpoint.index import (
    ITEMSIZES,
    KINDS,
    SUM_BYTES,
    Index,
    Parameter,
    Piece,
    checksum,
    once_each,
    overlaps,
)
from shardfold.errors import CheckpointError
from shardfold.plan.placement import Box

__all__ = [
    "Damage",
    "Verification",
    "blocks",
    "by_file",
    "gaps",
    "index_bytes",
    "missing_files",
    "read_index",
    "verify",
]

METADATA = {"format": "pt"}  # of every file's header
INDEX_BYTES = 4 * 2**30  # at most: some 10 million pieces
ROWS = 100_000  # of boxes that do not fit, at most, are looked at to say where
HEADER_BYTES = 100_000_000  # at most: safetensors' own limit


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it should be.

    Attributes:
        what: it is, for people.
        file: in the folder; empty: of none in particular.
        tensor: its name in the file, or in the index; empty: of none in particular.
        range: bytes of the file, ``[first, behind the last)``; None: of none in particular.

    Examples:
        >>> sf.checkpoint.Damage("its checksum differs", file="rank-0.safetensors").file
        'rank-0.safetensors'
    """

    what: str
    file: str = ""
    tensor: str = ""
    range: tuple[int, int] | None = None

    def __str__(self) -> str:
        where = [self.file, self.tensor, f"bytes {self.range[0]} to {self.range[1]}" if self.range else ""]
        return ": ".join([*(part for part in where if part), self.what])

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "file": self.file, "tensor": self.tensor, "range": self.range}


@dataclass
class Verification:
    """What :func:`verify` found.

    Attributes:
        path: the checkpoint's folder.
        step: optimizer steps that it had done.
        num_files: it has.
        num_tensors: in its files.
        num_bytes: that were read.
        damage: what is wrong; empty: nothing.

    Examples:
        >>> from shardfold.checkpoint import verify
        >>> saved = engine.save(f"{folder}/step-0", wait=True)
        >>> verify.verify(folder).damage
        []
    """

    path: Path
    step: int
    num_files: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    damage: list[Damage] = field(default_factory=list[Damage])

    @property
    def ok(self) -> bool:
        return not self.damage

    def _check_file(self, name: str, pieces: Sequence[Piece], size: int, tick: Callable[[int], None]) -> None:
        """Of a file its header, that tensors are all that is in it, and every byte of them."""
        begin, damage = _header(self.path / name, pieces)
        self.damage += [*damage, *_tiling(name, pieces, begin, size)]
        for piece, number, data in blocks(self.path, pieces):
            low, wanted = piece.at + number * SUM_BYTES, min(SUM_BYTES, piece.nbytes - number * SUM_BYTES)
            if len(data) < wanted:
                _add(self.damage, Damage("the file ends before", name, piece.key, (low + len(data), low + wanted)))
            elif number >= len(piece.sums) or checksum(data) != piece.sums[number]:
                _add(self.damage, Damage("differs from its checksum", name, piece.key, (low, low + wanted)))
            self.num_bytes += len(data)
            tick(self.num_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "step": self.step,
            "ok": self.ok,
            "files": self.num_files,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "damage": [each.to_json() for each in self.damage],
        }


def read_index(path: str | Path) -> tuple[Path, Index]:
    """The folder of a checkpoint, or of the latest in a folder of them, and its index.

    Raises:
        CheckpointError: there is none, it is not complete, or its index is damaged.
    """
    folder = resolve(path)
    return folder, Index.from_bytes(index_bytes(folder), str(folder / INDEX))


def index_bytes(folder: Path) -> bytes:
    """The text of a checkpoint's index.

    Raises:
        CheckpointError: it is no file, cannot be read, or is larger than any index.
    """
    path = folder / INDEX
    check_regular(path)
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > INDEX_BYTES:
                raise CheckpointError(f"{path} is not an index of a checkpoint: it has more than {INDEX_BYTES} bytes.")
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def verify(path: str | Path, tick: Callable[[int, int], None] = lambda done, total: None) -> Verification:
    """Reads all of a checkpoint and compares it with its index.

    Checksums; sizes of files; that headers of the safetensors files say what the index says and that safetensors' own
    reader opens them; that no byte of a file belongs to no tensor or to two; that each element of each state is there
    exactly once; that what the run's own state refers to is there.

    Args:
        path: a checkpoint, or a folder of checkpoints, whose latest is taken.
        tick: called with the bytes done so far and those there are, every few MiB.

    Raises:
        CheckpointError: there is no checkpoint, or its index is damaged.
    """
    folder, index = read_index(path)
    found = Verification(folder, index.step, len(index.files), len(index.pieces))
    sizes, missing = _sizes(folder, index)
    found.damage += gaps(index) + missing
    absent = set(index.files) - set(sizes)
    total = sum(piece.nbytes for piece in index.pieces if piece.file not in absent)
    for name, pieces in by_file(index).items():
        if name in absent:
            continue
        try:
            found._check_file(name, pieces, index.files[name], lambda done: tick(done, total))
        except OSError as error:
            found.damage.append(Damage(f"cannot be read ({error.strerror})", name))
    return found


def blocks(folder: Path, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, memoryview]]:
    """``(piece, number of its block, its bytes)`` of pieces of one file; bytes are valid until the next, and fewer than
    they should be where the file ends early."""
    buffer = memoryview(bytearray(SUM_BYTES))
    if not pieces:
        return
    fd = open_regular(folder, pieces[0].file)
    try:
        for piece in pieces:
            for number, low in enumerate(range(0, piece.nbytes, SUM_BYTES)):
                length, done = min(SUM_BYTES, piece.nbytes - low), 0
                while done < length and (got := os.preadv(fd, [buffer[done:length]], piece.at + low + done)):
                    done += got
                yield piece, number, buffer[:done]
    finally:
        os.close(fd)


def by_file(index: Index) -> dict[str, list[Piece]]:
    """The pieces of each file that an index lists, in the order in which they lie."""
    found: dict[str, list[Piece]] = {name: [] for name in index.files}
    for piece in sorted(index.pieces, key=lambda piece: (piece.at, piece.nbytes)):
        if piece.file in found:
            found[piece.file].append(piece)
    return found


def missing_files(folder: Path, index: Index, names: Iterable[str] | None = None) -> list[Damage]:
    """Files that are not there, or not of the size that they were written with, or no files of the folder; ``names``:
    of these only."""
    return _sizes(folder, index, names)[1]


def _sizes(folder: Path, index: Index, names: Iterable[str] | None = None) -> tuple[dict[str, int], list[Damage]]:
    """Bytes of the files that are there, by name, and what is wrong with any."""
    sizes: dict[str, int] = {}
    found: list[Damage] = []
    for name in index.files if names is None else names:
        size = index.files[name]
        try:
            sizes[name] = inside(folder, name).stat().st_size
        except CheckpointError as error:
            found.append(Damage(str(error).removeprefix(f"{folder / name} ").rstrip("."), name))
        except OSError as error:
            found.append(Damage(f"is missing ({whose(index, name) or error.strerror})", name))
        else:
            if sizes[name] != size:
                found.append(Damage(f"has {sizes[name]} bytes instead of {size}", name))
    return sizes, found


def gaps(index: Index) -> list[Damage]:
    """What an index does not have, or has twice: elements of states, tensors that its trees refer to."""
    found: list[Damage] = []
    known = {p.name: p for p in index.parameters}
    by_state: dict[tuple[str, str], list[Piece]] = {
        (p.name, "weight"): [] for p in index.parameters if p.numel and p.digest is None
    }  # each must have one
    keys: dict[tuple[str, str], int] = {}
    for piece in index.pieces:
        keys[piece.file, piece.key] = keys.get((piece.file, piece.key), 0) + 1
        found += [Damage(what, piece.file, piece.key) for what in _malformed(piece, known, index)]
        if piece.kind in ("element", "block") and piece.of in known:
            by_state.setdefault((piece.of, piece.state), []).append(piece)
    found += [Damage(f"is there {count} times", file, key) for (file, key), count in keys.items() if count > 1]
    for (name, state), pieces in by_state.items():
        found += [Damage(what, tensor=f"{state}/{name}") for what in _uncovered(known[name], pieces)]
        if len(dtypes := sorted({piece.dtype for piece in pieces})) > 1:
            found.append(Damage(f"has parts of {' and '.join(dtypes)}", tensor=f"{state}/{name}"))
    buffers = [piece.of for piece in index.pieces if piece.kind == "buffer"]
    for buffer in index.buffers:
        if buffers.count(buffer.name) != 1:
            found.append(Damage(f"is there {buffers.count(buffer.name)} times", tensor=f"buffer/{buffer.name}"))
    return [*found, *_unreferenced(index)]


def _malformed(piece: Piece, known: Mapping[str, Parameter], index: Index) -> Iterator[str]:
    """What in a piece contradicts itself."""
    if piece.kind not in KINDS or piece.dtype not in ITEMSIZES:
        yield f"is of unknown kind or dtype ({piece.kind}, {piece.dtype})"
        return
    if piece.file not in index.files:
        yield "is in a file that the index does not list"
    if len(piece.sums) != -(-piece.nbytes // SUM_BYTES):
        yield f"has {len(piece.sums)} checksums"
    if piece.kind in ("element", "block", "once") and piece.of not in known:
        yield "is of no parameter of the index"
    elif piece.kind in ("element", "block"):
        values = -(-(piece.stop - piece.start) // piece.block) * piece.width
        inside = piece.box.numel if piece.box is not None else known[piece.of].numel
        if not 0 <= piece.start <= piece.stop <= inside or piece.numel != values or piece.start % piece.block:
            yield f"has {piece.numel} values for the elements {piece.start} to {piece.stop} of {inside}"


def _uncovered(parameter: Parameter, pieces: Sequence[Piece]) -> Iterator[str]:
    """Ranges of elements that no piece has, or that two have."""
    if _tiled(parameter, pieces):
        return
    whole = parameter.numel
    found = (run for piece in pieces for run in overlaps(piece, parameter.shape, 0, whole))
    runs = sorted(islice(found, ROWS + 1))
    if len(runs) > ROWS:
        yield f"has boxes that do not have each of its {whole} elements once"
        return
    at = 0
    for first, _, numel in runs:
        if first > at:
            yield f"has no elements {at} to {first} of {whole}"
        elif first < at:
            yield f"has the elements {first} to {min(at, first + numel)} twice"
        at = max(at, first + numel)
    if at < whole:
        yield f"has no elements {at} to {whole} of {whole}"


def _tiled(parameter: Parameter, pieces: Sequence[Piece]) -> bool:
    """Whether pieces cover their boxes and these the parameter, each once: without a look at every row of a box."""
    by_box: dict[Box, list[tuple[int, int]]] = {}
    for piece in pieces:
        by_box.setdefault(piece.box or Box.of(parameter.shape), []).append((piece.start, piece.stop))
    for box, ranges in by_box.items():
        ranges.sort()
        ends = [0, *(stop for _, stop in ranges)]
        if ends[-1] != box.numel or any(start != end for (start, _), end in zip(ranges, ends, strict=False)):
            return False
    apart = not any(one.meets(other) for one, other in combinations(by_box, 2))
    return apart and sum(box.numel for box in by_box) == parameter.numel


def _unreferenced(index: Index) -> Iterator[Damage]:
    """Tensors of the run's own state that are named and not there, or there and not named."""
    options = [group["options"] for group in index.optimizer["groups"]] if index.optimizer is not None else []
    named = {("run", name, None) for name in _names([index.run, options])}
    for rank, tree in enumerate(index.ranks):
        named |= {("rank", name, rank) for name in _names(tree)}
    there = {(p.kind, p.of, p.rank) for p in index.pieces if p.kind in ("run", "rank")}
    for kind, name, rank in sorted(named ^ there, key=str):
        what = "is referred to, but not there" if (kind, name, rank) in named else "is there, but nothing refers to it"
        yield Damage(what, tensor=f"{kind}/{name}" + (f"/{rank}" if rank is not None else ""))


def _names(tree: Any) -> Iterator[str]:
    """Tensors that a tree refers to."""
    if isinstance(tree, list):
        for each in tree:
            yield from _names(each)
    elif isinstance(tree, dict):
        if isinstance(tree.get("$tensor"), str):
            yield tree["$tensor"]
        for each in tree.values():
            yield from _names(each)


def _header(path: Path, pieces: Sequence[Piece]) -> tuple[int, list[Damage]]:
    """Where the data of a safetensors file begins, and what of its header is not what the index says."""
    begin = 0
    try:
        with open(path, "rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            if begin > path.stat().st_size or begin > HEADER_BYTES:
                raise ValueError(f"it is said to have {begin - 8} bytes")
            said = json.loads(file.read(begin - 8), object_pairs_hook=once_each)
        if said.pop("__metadata__", None) != METADATA:
            raise ValueError("its metadata is not what was written")
        tensors = {name: (t["dtype"], tuple(t["shape"]), tuple(t["data_offsets"])) for name, t in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _begin(pieces), [Damage(f"its header is damaged ({error})", path.name, range=(0, _begin(pieces)))]
    wanted = {p.key: (p.dtype, p.shape, (p.at - begin, p.at - begin + p.nbytes)) for p in pieces}
    damage = [
        Damage("is not in the header of the file as the index has it", path.name, name)
        for name in sorted({key for key in wanted.keys() | tensors.keys() if wanted.get(key) != tensors.get(key)})
    ]
    return begin, damage or _opened(path, set(wanted))


def _opened(path: Path, names: set[str]) -> list[Damage]:
    """What safetensors' own reader has to say of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            differ = sorted(set(file.keys()) ^ names)
    except (SafetensorError, OSError) as error:
        return [Damage(f"safetensors cannot open it ({error})", path.name)]
    return [Damage("safetensors does not find it", path.name, name) for name in differ]


def _begin(pieces: Sequence[Piece]) -> int:
    return min((piece.at for piece in pieces), default=0)


def _tiling(name: str, pieces: Sequence[Piece], begin: int, size: int) -> Iterator[Damage]:
    """Bytes of a file that are of no tensor or of two."""
    at = begin
    for piece in pieces:
        if piece.at != at and piece.nbytes:
            yield Damage(
                "between two tensors" if piece.at > at else "are of two tensors",
                name,
                piece.key,
                (min(at, piece.at), max(at, piece.at)),
            )
        at = max(at, piece.at + piece.nbytes)
    if at != size:
        yield Damage(f"its tensors end at byte {at} and the file at {size}", name)


def _add(damage: list[Damage], more: Damage) -> None:
    """Adjacent ranges of one tensor are one."""
    last = damage[-1] if damage else more
    if last.range and more.range and last.range[1] == more.range[0] and replace(last, range=more.range) == more:
        damage[-1] = replace(more, range=(last.range[0], more.range[1]))
    else:
        damage.append(more)
