"""The file that ``torch.save`` makes of a state dict, written tensor by tensor.

It is a zip archive that is not compressed: ``data.pkl``, the pickled state dict in which each tensor refers to a
storage by a number, and a record ``data/NUMBER`` of each storage's bytes. ``torch.save`` needs all of the tensors at
once; here stand-ins are pickled, and a tensor is read when its record is written. ``torch.load`` reads it with
``weights_only=True`` and with ``mmap=True``, for which records begin at multiples of 64 bytes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from shardfold.checkpoint.index import SUM_BYTES
from shardfold.checkpoint.stored import Later, Stored
from shardfold.torch_internals import rebuild_tensor, rebuild_typed_tensor

__all__ = ["write_pt"]

ALIGNMENT = 64
HEADER, ZIP64, FIELD = 30, 20, 4  # bytes of a record's header, of its sizes from 4 GiB on, of the padding's head

#: The classes that stand for dtypes in these files; later dtypes are named themselves.
STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
}


def write_pt(stored: Stored, path: Path, tick: Callable[[int], None]) -> None:
    """Writes a state dict and waits until it is on the disk; tied weights have all of their names and one storage.

    Args:
        stored: what to write.
        path: of the file.
        tick: called with the bytes done so far, every few MiB.
    """
    state: OrderedDict[str, Any] = OrderedDict()
    written: list[Later] = []

    def stand_in(later: Later) -> _StandIn:
        written.append(later)
        return _StandIn(_Storage(str(len(written) - 1), later.dtype, later.nbytes), later.shape)

    for name, later in stored.tensors.items():
        state[name] = stand_in(later)
    state.update((name, state[first]) for name, first in stored.also.items())
    state.update((name, _with_stand_ins(value, stand_in)) for name, value in (stored.extra or {}).items())
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(state)
    done = 0
    with open(path, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            _record(archive, file, "data.pkl", [pickled.getvalue()])
            _record(archive, file, "byteorder", [sys.byteorder.encode()])
            for number, later in enumerate(written):
                _record(archive, file, f"data/{number}", _blocks(later), lambda more, before=done: tick(before + more))
                done += later.nbytes
            _record(archive, file, "version", [b"3\n"])
        file.flush()
        os.fsync(file.fileno())


def _with_stand_ins(value: Any, stand_in: Callable[[Later], _StandIn]) -> Any:
    """A tree whose tensors are stand-ins; arrays become tensors, as ``weights_only=True`` takes no others."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        whole = value.contiguous()
        return stand_in(Later(tuple(whole.shape), whole.dtype, lambda: whole))
    if isinstance(value, dict):
        return {key: _with_stand_ins(inner, stand_in) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_stand_ins(inner, stand_in) for inner in cast("list[Any]", value))
    return value


def _record(
    archive: zipfile.ZipFile,
    file: IO[bytes],
    name: str,
    blocks: Iterable[bytes | memoryview],
    tick: Callable[[int], None] = lambda done: None,
) -> None:
    """Writes a record whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"archive/{name}")  # of 1980, so that equal weights make equal files
    gap = -(file.tell() + HEADER + len(info.filename) + ZIP64 + FIELD) % ALIGNMENT
    info.extra = b"FB" + gap.to_bytes(2, "little") + b"Z" * gap  # as torch pads
    done = 0
    with archive.open(info, "w", force_zip64=True) as record:
        for block in blocks:
            record.write(block)
            done += len(block)
            tick(done)


def _blocks(later: Later) -> Iterator[memoryview]:
    flat = later.read().reshape(-1).view(torch.uint8)
    for a in range(0, flat.numel(), SUM_BYTES):
        yield memoryview(flat[a : a + SUM_BYTES].numpy())  # pyright: ignore


class _Storage(NamedTuple):
    """The bytes of a tensor, by the number of their record."""

    number: str
    dtype: torch.dtype
    nbytes: int


class _StandIn(NamedTuple):
    """Pickled as a contiguous tensor of this shape on this storage."""

    storage: _Storage
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        said = (self.storage, 0, self.shape, strides, False, OrderedDict())
        if self.storage.dtype in STORAGES:
            return rebuild_tensor, said
        return rebuild_typed_tensor, (*said, self.storage.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = STORAGES.get(obj.dtype)
        if kind is None:
            return "storage", torch.UntypedStorage, obj.number, "cpu", obj.nbytes
        return "storage", kind, obj.number, "cpu", obj.nbytes // obj.dtype.itemsize
