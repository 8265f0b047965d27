"""Tensors by name that are read when they are asked for: the weights of a checkpoint, or of safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardfold.checkpoint.files import DTYPES
from shardfold.checkpoint.folders import INDEX, LATEST, check_regular, deepspeed_folder, is_plain_name, read_name
from shardfold.checkpoint.reader import Checkpoint
from shardfold.errors import CheckpointError

__all__ = [
    "HF_INDEX",
    "Later",
    "Stored",
    "Values",
    "form_of",
    "of_safetensors",
    "open_weights",
    "readable",
    "weights_of",
]

T = TypeVar("T")
HF_INDEX = "model.safetensors.index.json"


class Later(NamedTuple):
    """A tensor that is somewhere else until it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> Later:
        """The same in another dtype if it is floating, as ``module.to(dtype)`` does; None: as it is."""
        if dtype is None or dtype == self.dtype or not self.dtype.is_floating_point:
            return self
        return Later(self.shape, dtype, lambda: self.read().to(dtype))


@dataclass
class Stored:
    """The weights of a model.

    Attributes:
        tensors: parameters and persistent buffers in the order of the model, tied ones by their first name.
        also: further names, and the first name of each.
        buffers: which of the tensors are buffers, where that is known.
        extra: extra state of modules, by its names in a state dict; None: it is not known of.
    """

    tensors: dict[str, Later] = field(default_factory=dict[str, Later])
    also: dict[str, str] = field(default_factory=dict[str, str])
    buffers: set[str] = field(default_factory=set[str])
    extra: dict[str, Any] | None = None

    def cast(self, dtype: torch.dtype | None) -> Stored:
        """The same in another dtype, see :meth:`Later.cast`."""
        return replace(self, tensors={name: later.cast(dtype) for name, later in self.tensors.items()})

    def renamed(self, rename: Callable[[str], str], where: str) -> Stored:
        """The same under other names.

        Raises:
            CheckpointError: two become one.
        """
        tensors: dict[str, Later] = {}
        for name, later in self.tensors.items():
            if rename(name) in tensors:
                raise CheckpointError(f"{where}: rename= gives two tensors the name {rename(name)!r}.")
            tensors[rename(name)] = later
        also = {rename(name): rename(first) for name, first in self.also.items()}
        also = {name: first for name, first in also.items() if name not in tensors}
        extra = None if self.extra is None else {rename(name): value for name, value in self.extra.items()}
        return Stored(tensors, also, {rename(name) for name in self.buffers}, extra)


class Values(Mapping[str, Tensor]):
    """Stored weights as a state dict that reads what it is asked for; tied ones under all of their names."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.tensors[self._stored.also.get(name, name)].read()

    def __iter__(self) -> Iterator[str]:
        yield from self._stored.tensors
        yield from self._stored.also

    def __len__(self) -> int:
        return len(self._stored.tensors) + len(self._stored.also)


def form_of(path: str | Path) -> str:
    """Whose files these are: ``"shardfold"``, ``"hf"``, ``"torch"``, ``"dcp"`` or ``"deepspeed"``; empty if they are of
    none of them."""
    path = Path(path)
    if path.is_file():
        return "hf" if path.suffix == ".safetensors" else "torch"
    if not path.is_dir():
        return ""
    if (path / INDEX).is_file():
        return "shardfold"
    if (path / LATEST).is_file() and (name := read_name(path / LATEST)) and (path / name / INDEX).is_file():
        return "shardfold"
    if (path / ".metadata").is_file():
        return "dcp"
    if deepspeed_folder(path) is not None:
        return "deepspeed"
    return "hf" if (path / HF_INDEX).is_file() or _safetensors(path) or any(path.glob("pytorch_model*.bin")) else ""


def readable(weights: Any) -> Any:
    """The path of a checkpoint as a mapping that reads it; everything else as it is."""
    if isinstance(weights, str | Path) and form_of(weights) == "shardfold":
        return Values(weights_of(Checkpoint(weights)))
    return weights


def open_weights(path: str | Path) -> Stored:
    """The weights of a checkpoint or of safetensors files, whichever it is.

    Raises:
        CheckpointError: it is neither, or not complete.
    """
    path = Path(path)
    if form_of(path) == "hf":
        return of_safetensors(path)
    return weights_of(Checkpoint(path))


def weights_of(checkpoint: Checkpoint, state: str = "weight") -> Stored:
    """Parameters and persistent buffers of a checkpoint.

    Args:
        checkpoint: it is opened for each tensor, so it needs no closing.
        state: ``"average"`` takes averaged weights where there are some.

    Raises:
        CheckpointError: no parameter has such a state.
    """

    def reader(read: Callable[[], T]) -> Callable[[], T]:
        def once() -> T:
            try:
                return read()
            finally:
                checkpoint.close()

        return once

    stored = Stored()
    found = False
    for name, parameter in checkpoint.parameters.items():
        has = state != "weight" and state in checkpoint.states(name)
        which, found = state if has else "weight", found or has
        read = reader(lambda n=name, s=which, p=parameter: checkpoint.read(n, s).view(p.shape))
        stored.tensors[name] = Later(parameter.shape, checkpoint.dtype(name, which), read)
        stored.also |= dict.fromkeys(parameter.also, name)
    if state != "weight" and not found:
        has_states = sorted({s for name in checkpoint.parameters for s in checkpoint.states(name)})
        raise CheckpointError(f"{checkpoint.path} has no state {state!r}; it has {', '.join(has_states)}.")
    for name, buffer in checkpoint.buffers.items():
        stored.tensors[name] = Later(buffer.shape, DTYPES[buffer.dtype], reader(lambda n=name: checkpoint.buffer(n)))
        stored.also |= dict.fromkeys(buffer.also, name)
        stored.buffers.add(name)
    if checkpoint.extra_names() is not None:
        stored.extra = reader(checkpoint.extra)()
    return stored


def of_safetensors(path: Path) -> Stored:
    """The tensors of one safetensors file, or of a folder of them, with an index or without.

    Raises:
        CheckpointError: there is none, a file that the index names is missing, or one is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        files, homes = _files(path)
        stored = Stored()
        for file in files:
            check_regular(file)
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if homes and homes.get(name) != file:
                        continue
                    part = opened.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), DTYPES[part.get_dtype()]
                    stored.tensors[name] = Later(shape, dtype, lambda f=file, n=name: _read(f, n))
    except KeyError as error:
        raise CheckpointError(f"{path} has tensors of dtype {error}, which PyTorch does not have.") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None
    if absent := sorted(set(homes) - set(stored.tensors)):
        raise CheckpointError(f"{path}: its index names tensors that no file has: {', '.join(absent)}.")
    return stored


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files, and which one has each tensor where an index says so."""
    if path.is_file():
        return [path], {}
    if (path / HF_INDEX).is_file():
        homes = _homes(path, path / HF_INDEX)
        return sorted(set(homes.values())), homes
    if not (found := _safetensors(path)):
        raise CheckpointError(f"{path} has no safetensors files.")
    return found, {}


def _homes(folder: Path, index: Path) -> dict[str, Path]:
    """The file of each tensor, as an index says. Links are followed: caches of downloaded models consist of them.

    Raises:
        CheckpointError: it is damaged, or names what is no file of the folder.
    """
    try:
        said = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        homes = {str(name): (folder / file, file) for name, file in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f'{index} is damaged: it has no "weight_map" with the file of each tensor ({type(error).__name__}).'
        ) from None
    for file in {file for _, file in homes.values()}:
        if not is_plain_name(file):
            raise CheckpointError(f"{index} names {file!r}, which is not the name of a file beside it.")
    return {name: path for name, (path, _) in homes.items()}


def _safetensors(folder: Path) -> list[Path]:
    """The safetensors files of a folder, but for those of a checkpoint of ours that was not completed."""
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("rank-", "part-")))


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)
