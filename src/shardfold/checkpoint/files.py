"""safetensors files, written and read in pieces of a few MiB: never a file, or a tensor, as a whole in memory.

Writing goes past the page cache (``O_DIRECT``) where the file system can: measured here 1.4 GB/s against 0.3, and the
memory of what is written stays free for the training. Bytes go through one of two buffers, of which one is filled,
summed and checked while the other is written. Reading goes through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardfold.checkpoint.folders import name_file, open_regular
from shardfold.checkpoint.index import ITEMSIZES, SUM_BYTES, Piece, checksum
from shardfold.errors import CheckpointError
from shardfold.sharding.shard import Shard

if TYPE_CHECKING:
    from shardfold.checkpoint.elsewhere import Elsewhere

__all__ = ["DTYPES", "NAMES", "Reader", "UnwrittenPiece", "check_dense", "divided", "dtype_name", "write_file"]

T = TypeVar("T")

PAGE = 4096
BUFFER = 2 * SUM_BYTES

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_dense(values: Tensor, what: str) -> None:
    """
    Raises:
        CheckpointError: a tensor has not one value in memory for each element; ``what`` says which.
    """
    if values.layout is not torch.strided or values.is_nested:
        kind = "nested" if values.is_nested else "sparse"
        raise CheckpointError(
            f"{what} is a {kind} tensor, which a checkpoint does not take: give it dense, by "
            f"{'torch.nested.to_padded_tensor' if values.is_nested else 'tensor.to_dense()'}."
        )
    if values.is_meta:
        raise CheckpointError(f"{what} is a tensor on the meta device, which has no values: give it some.")


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """
    Raises:
        CheckpointError: files have no such dtype, which ``name`` has.
    """
    if dtype not in NAMES:
        raise CheckpointError(f"{name!r} has dtype {dtype}, which safetensors files do not have: cast it.")
    return NAMES[dtype]


def divided(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Items of files that have at most so many bytes each, unless one item alone has more; in order."""
    files: list[list[T]] = []
    size = 0
    for item in items:
        if not files or size + num_bytes(item) > most:
            files.append([])
            size = 0
        files[-1].append(item)
        size += num_bytes(item)
    return files


class UnwrittenPiece(NamedTuple):
    """What is to be written: a piece that has no place in a file yet, and its values, what makes them, or what rests in
    a file of its own, from which it is copied some MiB at a time."""

    piece: Piece
    values: Tensor | Shard | Callable[[], Tensor]

    @staticmethod
    def whole(kind: str, state: str, name: str, values: Tensor, rank: int | None = None) -> UnwrittenPiece:
        """A tensor that is a piece of its own."""
        return UnwrittenPiece(
            Piece(name, state, kind, dtype_name(values.dtype, name), tuple(values.shape), rank=rank), values
        )


class Written(NamedTuple):
    """What :func:`write_file` did: the bytes of the file, the pieces with their places, which are not finite."""

    num_bytes: int
    pieces: list[Piece]
    nonfinite: list[Piece]


def write_file(path: Path, parts: Sequence[UnwrittenPiece], tick: Callable[[int], None] = lambda done: None) -> Written:
    """Writes a safetensors file and waits until it is on the disk.

    Args:
        path: of the file; its name goes into the pieces.
        parts: with distinct keys; values that are not finite are found in floating ``element`` and ``buffer`` pieces.
        tick: called with the bytes done so far, every few MiB.

    Raises:
        CheckpointError: two parts have one name.
        OSError: of the file system; the half-written file is left to whoever owns the folder.
    """
    ordered = sorted(parts, key=lambda part: -ITEMSIZES[part.piece.dtype])  # so that each is aligned in the file
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for part in ordered:
        piece = part.piece
        if piece.key in header:
            raise CheckpointError(f"{path}: two tensors would have the name {piece.key!r}.")
        header[piece.key] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [offset, offset + piece.nbytes],
        }
        offset += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    begin = 8 + len(text)
    pieces: list[Piece] = []
    nonfinite: list[Piece] = []
    done = 0
    with _Output(path, begin + offset) as out:
        out.reserve()
        out.write(len(text).to_bytes(8, "little") + text)
        for part in ordered:
            sums: list[str] = []
            finite = True
            blocks = _blocks(part)
            while (block := next(blocks, None)) is not None:  # so no tensor is held when the next is read
                sums.append(checksum(out.write(block)))
                done += len(block)
                if part.piece.kind in ("element", "buffer"):
                    finite = finite and _finite(block, part.piece.dtype)
                tick(done)
            at = begin + done - part.piece.nbytes
            pieces.append(replace(part.piece, file=path.name, at=at, sums=tuple(sums)))
            if not finite:
                nonfinite.append(pieces[-1])
    return Written(begin + offset, pieces, nonfinite)


def _blocks(part: UnwrittenPiece) -> Iterator[memoryview]:
    """The bytes of a part, :data:`SUM_BYTES` at a time."""
    given = part.values
    flat = given if isinstance(given, Shard) else _flat(given if isinstance(given, Tensor) else given())
    if flat.numel() != part.piece.numel or flat.dtype != DTYPES[part.piece.dtype]:
        raise CheckpointError(
            f"{part.piece.key} was to be {part.piece.numel} x {part.piece.dtype}, but is {flat.numel()} x {flat.dtype}."
        )
    step = SUM_BYTES // flat.itemsize
    for a in range(0, flat.numel(), step):
        some = flat.part(slice(a, a + step)).read() if isinstance(flat, Shard) else flat[a : a + step]
        yield memoryview(some.cpu().contiguous().view(torch.uint8).numpy())  # pyright: ignore


def _flat(values: Tensor) -> Tensor:
    return values.detach().reshape(-1)


def _finite(block: memoryview, dtype: str) -> bool:
    if dtype not in ("F64", "F32", "F16", "BF16"):
        return True
    values = torch.from_numpy(np.frombuffer(block, dtype=np.uint8)).view(DTYPES[dtype])
    wide = torch.float64 if dtype == "F64" else torch.float32
    if bool(torch.isfinite(values.sum(dtype=wide))):
        return True
    return bool(torch.isfinite(values).all())  # the sum may overflow


class _Output:
    """A file written from its beginning to its known end, in aligned blocks, in the background."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._direct = hasattr(os, "O_DIRECT")
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if self._direct else 0), 0o644)
        except OSError:
            if not self._direct:
                raise
            self._direct = False
            self._fd = os.open(path, flags, 0o644)
        self._buffers = [mmap.mmap(-1, BUFFER) for _ in range(2)]
        self._writes: list[Future[None] | None] = [None, None]
        self._which = self._filled = self._position = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardfold-write")

    def __enter__(self) -> _Output:
        return self

    def reserve(self) -> None:
        """Finds out at once whether the disk has room, where the file system can say so."""
        linux = sys.platform.startswith("linux")
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if linux else None
        if call is None:
            return
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if call(self._fd, 0, 0, self._size) and ctypes.get_errno() in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self._path))

    def write(self, data: bytes | memoryview) -> memoryview:
        """Takes bytes; gives them back as they are in memory, until the next call."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            room = min(len(view) - at, BUFFER - self._filled)
            self._buffers[self._which][self._filled : self._filled + room] = view[at : at + room]
            self._filled += room
            at += room
            if self._filled == BUFFER:
                self._flush()
        return view

    def _flush(self) -> None:
        buffer, which, position, length = self._buffers[self._which], self._which, self._position, self._filled
        if self._direct and length % PAGE:
            length += -length % PAGE  # what is behind the end is cut off
        try:
            self._writes[which] = self._pool.submit(self._write, buffer, position, length)
        except RuntimeError:  # the interpreter is ending, which a save outlives: threads do no more work then
            self._writes[which] = None
            self._write(buffer, position, length)
        self._position += self._filled
        self._which, self._filled = 1 - which, 0
        before = self._writes[1 - which]
        if before is not None:
            before.result()

    def _write(self, buffer: mmap.mmap, position: int, length: int) -> None:
        with memoryview(buffer) as view:
            done = 0
            while done < length:
                try:
                    done += os.pwrite(self._fd, view[done:length], position + done)
                except OSError as error:
                    if not self._direct or error.errno != errno.EINVAL:  # this file system cannot after all
                        name_file(error, self._path)
                        raise
                    self._go_buffered()

    def _go_buffered(self) -> None:
        self._direct = False
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._filled:
                    self._flush()
                for write in self._writes:
                    if write is not None:
                        write.result()
                os.ftruncate(self._fd, self._size)
                os.fsync(self._fd)
        finally:
            self._pool.shutdown(wait=True)
            os.close(self._fd)
            for buffer in self._buffers:
                with suppress(BufferError):  # the traceback of a failure may still hold a part of it
                    buffer.close()


class Reader:
    """Reads parts of the files of a folder; every byte that is used was checked against its checksum.

    Args:
        folder: of the checkpoint.
        verify: False trusts the disk.
        elsewhere: reads the files that are not in the folder.
    """

    def __init__(self, folder: Path, *, verify: bool = True, elsewhere: Elsewhere | None = None) -> None:
        self._folder, self._verify, self._elsewhere = folder, verify, elsewhere
        self._open: dict[str, int] = {}
        #: The last block that was read in parts: rows of a box lie in the same one.
        self._block: tuple[Piece, int, Tensor] | None = None
        self.num_bytes = 0  # read so far

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        self._block = None

    def read(self, piece: Piece, start: int, out: Tensor) -> None:
        """Values ``[start, start + out.numel())`` of a piece into 1-D ``out``, of any dtype and device.

        Raises:
            CheckpointError: the file is missing, is cut short, or is damaged there; says which tensor.
        """
        dtype = DTYPES[piece.dtype]
        size, stop = dtype.itemsize, start + out.numel()
        straight = out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out.detach().view(torch.uint8) if straight and out.numel() else None
        for number in range(start * size // SUM_BYTES, -(-stop * size // SUM_BYTES)):
            low, high = number * SUM_BYTES, min((number + 1) * SUM_BYTES, piece.nbytes)
            a, b = max(low, start * size), min(high, stop * size)
            if target is not None and (a, b) == (low, high):
                self._fetch(piece, number, low, target[a - start * size : b - start * size])
                continue
            if self._verify:
                values = self._checked(piece, number, low, high)[a - low : b - low]
            else:
                values = torch.empty(b - a, dtype=torch.uint8)
                self._fetch(piece, number, a, values)
            out[a // size - start : b // size - start].copy_(values.view(dtype))

    def _checked(self, piece: Piece, number: int, low: int, high: int) -> Tensor:
        """A block that has one checksum, ``(high - low,)`` bytes."""
        if self._block is None or self._block[0] is not piece or self._block[1] != number:
            self._block = None
            block = torch.empty(high - low, dtype=torch.uint8)
            self._fetch(piece, number, low, block)
            self._block = piece, number, block
        return self._block[2]

    def tensor(self, piece: Piece) -> Tensor:
        """All of a piece, in its shape."""
        out = torch.empty(piece.numel, dtype=DTYPES[piece.dtype])
        self.read(piece, 0, out)
        return out.view(piece.shape)

    def _fetch(self, piece: Piece, number: int, low: int, out: Tensor) -> None:
        """Bytes of a piece from its byte ``low`` on; a whole block is compared with its checksum."""
        view = memoryview(out.numpy())  # pyright: ignore
        done = 0
        where: Path | str = self._folder / piece.file
        if self._elsewhere is not None and piece.file in self._elsewhere:
            where = f"{piece.file} on the host of rank {self._elsewhere.holder(piece.file)}"
            self._elsewhere.read(piece.file, piece.at + low, out)
            done = len(view)
        while done < len(view):
            got = os.preadv(self._fd(piece), [view[done:]], piece.at + low + done)
            if not got:
                raise CheckpointError(f"{where} is cut short: it ends inside of {piece.key}; take another checkpoint.")
            done += got
        self.num_bytes += done
        if self._verify and (number >= len(piece.sums) or checksum(view) != piece.sums[number]):
            raise CheckpointError(
                f"{where} is damaged: bytes {piece.at + low} to {piece.at + low + done} of "
                f"{piece.key} differ from their checksum; take another checkpoint."
            )

    def _fd(self, piece: Piece) -> int:
        fd = self._open.get(piece.file)
        if fd is None:
            fd = self._open[piece.file] = open_regular(self._folder, piece.file)
        return fd
