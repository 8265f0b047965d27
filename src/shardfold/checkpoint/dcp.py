"""Folders of ``torch.distributed.checkpoint`` (DCP), written and read tensor by tensor in one process.

Its own writer keeps the tensors of a file until the file is complete, so here a file gets a few of them. What it reads
is described in a pickle (``.metadata``), and what is no tensor is one. Here only what describes a folder is taken from
the first, and nothing that may run code from the second, but inside of ``shardfold.checkpoint.trusted()``.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from shardfold.checkpoint.files import divided
from shardfold.checkpoint.folders import check_regular, inside
from shardfold.checkpoint.stored import Later, Stored
from shardfold.checkpoint.trust import is_trusted, load_object
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
        CheckpointError: it cannot be read.
    """
    reader = _Reader(folder)
    check_regular(folder / ".metadata")
    try:
        metadata = reader.read_metadata()
        paths: dict[str, tuple[str | int, ...]] = dict(metadata.planner_data or {})
        described = list(metadata.state_dict_metadata.items())
        files = {place.relative_path for place in metadata.storage_data.values()}
    except CheckpointError:
        raise
    except Exception as error:  # whatever a pickle raises
        raise CheckpointError(f"{folder / '.metadata'} cannot be read: {error}.") from None
    for name in files:
        inside(folder, name)
    nested: dict[Any, Any] = {}
    for key, said in described:
        if isinstance(said, TensorStorageMetadata):
            shape, dtype = tuple(said.size), said.properties.dtype
            stored = sum(math.prod(chunk.sizes) for chunk in said.chunks)
            if not isinstance(dtype, torch.dtype) or stored < math.prod(shape):
                raise CheckpointError(f"{folder / '.metadata'} is damaged: {key} is not described as a tensor is.")
            value: Any = Later(shape, dtype, lambda k=key, s=shape, d=dtype: _read(reader, k, torch.empty(s, dtype=d)))
        else:
            value = _read(reader, key, None)
        *path, last = paths.get(key, (key,))
        node = nested
        for step in path:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{folder / '.metadata'} is damaged: {key} is where another value is.")
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
            load(wanted, storage_reader=reader, planner=_Loading(reader.path), no_dist=True)
    except CheckpointException as error:
        if isinstance(cause := _cause(error), CheckpointError):
            raise cause from error
        raise CheckpointError(f"{reader.path}: {key} cannot be read: {_cause(error)}.") from error
    return wanted[key]


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the only rank."""
    return next(iter(error.failures.values()))[0]


class _Reader(FileSystemReader):
    """Reads the folder's description once."""

    _kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None and is_trusted():
            self._kept = super().read_metadata(*args, **kwargs)
        elif self._kept is None:
            with open(Path(self.path) / ".metadata", "rb") as file:
                self._kept = _Description(file).load()
            if not isinstance(self._kept, Metadata):
                raise ValueError("it describes no checkpoint")
            self._kept.storage_meta = StorageMeta(load_id=self.load_id)
        return self._kept


#: What a folder's description is made of. None of it does more than keep what it is given.
_DESCRIBING = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Description(pickle.Unpickler):
    """Reads ``.metadata``, and calls nothing but what such a file needs."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _DESCRIBING:
            return super().find_class(module_name.replace("pathlib._local", "pathlib"), global_name)
        if module_name == "torch" and isinstance(dtype := vars(torch).get(global_name), torch.dtype):
            return dtype
        raise CheckpointError(
            f"the description of a folder of torch.distributed.checkpoint names {module_name}.{global_name}, and "
            "reading that may run code: if you trust whoever wrote it, import it inside of `with "
            "shardfold.checkpoint.trusted():`, or by `shardfold ckpt import --trust`."
        )


class _Loading(DefaultLoadPlanner):
    """What is no tensor is read as all objects are."""

    def __init__(self, folder: Any) -> None:
        super().__init__(flatten_state_dict=False)
        self._folder = folder

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.original_state_dict[key] = load_object(value.getvalue(), f"{key!r} of {self._folder}")


class _Writer(FileSystemWriter):
    """Writes files of at most so many bytes, unless one tensor has more."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self._file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        written: list[Any] = []
        groups = divided(plan.items, lambda item: item.tensor_storage_size() or 0, self._file_bytes) or [[]]
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
