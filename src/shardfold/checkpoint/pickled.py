"""Files of ``torch.save`` with objects of classes that need not be installed here, read without running any of them.

Tensors, containers and plain values come as they are; every other class or function that the pickle names is a
:class:`Foreign`, which keeps what it was given and does nothing. Tensors stay in the file (it is mapped) until they are
read.

``torch.load(weights_only=True)`` refuses a file for one object of a class that is not installed, or of a class of
containers, and these have both beside what is wanted. Here such an object is data too: no name in the file is looked
up, so nothing that it names can be called.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardfold.checkpoint.folders import check_regular
from shardfold.checkpoint.trust import NumpyKind, numpy_number
from shardfold.errors import CheckpointError
from shardfold.torch_internals import rebuild_tensor

__all__ = ["Foreign", "load_pickled"]


class _Tensor:
    """In place of the function that makes a tensor of a storage. A file may set attributes on what it names: here are
    none to set."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Tensor:
        return rebuild_tensor(*arguments)


class _Values:
    """In place of what makes a parameter of a tensor, and sets attributes on it."""

    __slots__ = ()

    def __call__(self, data: Tensor, *_: Any) -> Tensor:
        return data


class _WithoutAttributes:
    """In place of what makes a tensor of a given class with attributes: makes the tensor."""

    __slots__ = ()

    def __call__(self, function: Callable[..., Any], _: Any, arguments: tuple[Any, ...], __: Any) -> Any:
        return function(*arguments)


class Foreign:
    """An object whose class is not known here.

    Attributes:
        kind: the full name of its class.
        arguments: its constructor was given.
        attributes: by name.
    """

    kind = ""
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def __new__(cls, *arguments: Any, **_: Any) -> Foreign:
        made = super().__new__(cls)
        made.arguments, made.attributes = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.attributes |= part

    def __call__(self, *arguments: Any, **_: Any) -> Foreign:
        return Foreign(*arguments)

    # What classes of containers are filled by.
    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)


class _Bytes:
    """In place of what makes bytes, which files of an old protocol have as text: each letter is one of them."""

    __slots__ = ()

    def __call__(self, text: Any = "", encoding: Any = "latin1") -> Any:
        if isinstance(text, bytes):
            return text
        plain = isinstance(text, str) and encoding in ("latin1", "latin-1")
        return text.encode("latin1") if plain else Foreign(text, encoding)


class _Counts:
    """In place of ``Counter``, which a file could change for the whole program."""

    __slots__ = ()

    def __call__(self, counts: Any = ()) -> Any:
        return dict(counts) if isinstance(counts, dict) else Foreign(counts)


class _Kind:
    """In place of ``numpy.dtype``; of objects and records it is a :class:`Foreign`."""

    __slots__ = ()

    def __call__(self, name: Any, *rest: Any) -> Any:
        try:
            return NumpyKind(name) if isinstance(name, str) else Foreign(name, *rest)
        except (UnpicklingError, TypeError, ValueError):
            return Foreign(name, *rest)


class _Number:
    """In place of what makes NumPy's scalars."""

    __slots__ = ()

    def __call__(self, kind: Any, data: Any = b"") -> Any:
        plain = isinstance(kind, NumpyKind) and isinstance(data, str | bytes)
        return numpy_number(kind, data) if plain and data else Foreign(kind, data)


#: What may be called while a file is read. Storages are torch.load's own affair.
HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): _Counts(),
    ("builtins", "set"): set,
    ("builtins", "bytes"): _Bytes(),
    ("builtins", "bytearray"): _Bytes(),
    ("_codecs", "encode"): _Bytes(),
    ("numpy", "dtype"): _Kind(),
    ("numpy.core.multiarray", "scalar"): _Number(),
    ("numpy._core.multiarray", "scalar"): _Number(),
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _Tensor(),
    ("torch._tensor", "_rebuild_from_type_v2"): _WithoutAttributes(),
    ("torch._utils", "_rebuild_parameter"): _Values(),
    ("torch._utils", "_rebuild_parameter_with_state"): _Values(),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        home = "builtins" if module_name == "__builtin__" else module_name  # as files of an old protocol call it
        known = HARMLESS.get((home, global_name))
        if known is not None:
            return known
        if module_name == "torch" and isinstance(dtype := vars(torch).get(global_name), torch.dtype):
            return dtype
        return type("Foreign", (Foreign,), {"kind": f"{module_name}.{global_name}"})


def _module() -> Any:
    """What torch.load takes for ``pickle``."""
    module: Any = ModuleType("pickled")
    module.Unpickler = _Unpickler
    module.load = lambda file, **options: _Unpickler(file, **options).load()
    module.loads = lambda data, **options: _Unpickler(io.BytesIO(data), **options).load()
    return module


def load_pickled(path: Path) -> dict[str, Any]:
    """The dict that a file holds; its tensors are mapped, on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged or cut short, or holds something else.
    """
    if not path.exists():
        raise CheckpointError(f"{path} is missing.")
    check_regular(path)
    try:
        _refuse_programs(path)
        said = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_module())
    except Exception as error:  # whatever unpickling a damaged file comes to
        why = str(error).partition("\n")[0].rstrip(". ") or type(error).__name__
        raise CheckpointError(f"{path} is damaged, cut short or no file of torch.save ({why}).") from None
    if not isinstance(said, dict):
        raise CheckpointError(f"{path} holds a {type(said).__name__} instead of a dict: it is no such checkpoint.")
    return said


def _refuse_programs(path: Path) -> None:
    """
    Raises:
        ValueError: it is an archive of TorchScript, whose methods ``torch.load`` would run; or no archive.
    """
    with suppress(UnpicklingError):  # of what only PyTorch's own unpickler does not take
        torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
