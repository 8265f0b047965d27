"""Folders of ``torch.distributed.checkpoint`` (DCP), written and read tensor by tensor in one process.

Its own writer keeps the tensors of a file until the file is complete, so here a file gets a few of them. What it reads
is described in a pickle (``.metadata``): read only folders that you trust.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from shardfold.checkpoint.stored import Later, Stored
from shardfold.errors import CheckpointError

__all__ = ["read_dcp", "write_dcp"]

FILES = 256  # about, in a folder


def write_dcp(stored: Stored, folder: Path, tick: Callable[[int], None]) -> list[str]:
    """Writes a state dict, and gives the names of its files; tied weights under each of their names.

    Args:
        stored: what to write.
        folder: to make.
        tick: called with the bytes done so far.
    """
    laters = stored.tensors | {name: stored.tensors[first] for name, first in stored.also.items()}
    wanted = {name: torch.empty(later.shape, dtype=later.dtype, device="meta") for name, later in laters.items()}
    sizes = [later.nbytes for later in laters.values()]
    writer = _Writer(folder, max(max(sizes, default=0), sum(sizes) // FILES))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(wanted, storage_writer=writer, planner=_Planner(laters, tick), no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error
    return sorted(path.name for path in folder.glob("*.distcp"))


def read_dcp(folder: Path) -> dict[str, Any]:
    """What was given to ``dcp.save``, nested as it was; tensors are :class:`Later`, everything else is read.

    Raises:
        CheckpointError: it can not be read.
    """
    reader = _Reader(folder)
    try:
        metadata = reader.read_metadata()
    except Exception as error:  # whatever a pickle raises
        raise CheckpointError(f"{folder / '.metadata'} can not be read: {error}.") from None
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
    nested: dict[Any, Any] = {}
    for key, said in metadata.state_dict_metadata.items():
        if isinstance(said, TensorStorageMetadata):
            shape, dtype = tuple(said.size), said.properties.dtype
            value: Any = Later(shape, dtype, lambda k=key, s=shape, d=dtype: _read(reader, k, torch.empty(s, dtype=d)))
        else:
            assert isinstance(said, BytesStorageMetadata)
            value = _read(reader, key, None)
        *path, last = paths.get(key, (key,))
        node = nested
        for step in path:
            node = node.setdefault(step, {})
        node[last] = value
    return _with_lists(nested)


def _with_lists(node: Any) -> Any:
    """Dicts of numbers are the lists that they were; other keys are strings."""
    if not isinstance(node, dict):
        return node
    inner = {key: _with_lists(value) for key, value in node.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def _read(reader: _Reader, key: str, target: Tensor | None) -> Any:
    wanted: dict[str, Any] = {key: target}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(wanted, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{reader.path}: {key} can not be read: {_cause(error)}.") from error
    return wanted[key]


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the only rank."""
    return next(iter(error.failures.values()))[0]


class _Reader(FileSystemReader):
    """Reads the folder's description once."""

    _kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept


class _Writer(FileSystemWriter):
    """Writes files of at most so many bytes, unless one tensor has more."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self._file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        groups: list[list[Any]] = [[]]
        size = 0
        for item in plan.items:
            more = item.tensor_storage_size() or 0
            if groups[-1] and size + more > self._file_bytes:
                groups.append([])
                size = 0
            groups[-1].append(item)
            size += more
        written: list[Any] = []
        for number, items in enumerate(groups):
            place = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=place)
            written += super().write_data(part, planner).wait()
        done: Future[list[Any]] = Future()
        done.set_result(written)
        return done


class _Planner(DefaultSavePlanner):
    """Gives the writer a tensor when it asks for one."""

    def __init__(self, laters: dict[str, Later], tick: Callable[[int], None]) -> None:
        super().__init__()
        self._laters, self._tick, self._done = laters, tick, 0

    def resolve_data(self, write_item: Any) -> Tensor:
        later = self._laters[write_item.index.fqn]
        self._tick(self._done)
        self._done += later.nbytes
        return later.read()
