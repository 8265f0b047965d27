"""Objects in files: those whose reading runs no code are read, all others for those who say that they trust the file.

A pickle names functions and calls them, so whoever wrote it decides what runs where it is read. Here every pickle is
read by ``torch.load(weights_only=True)``, which calls nothing but what is known to do no harm.
"""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardfold.checkpoint.trees import strangers
from shardfold.errors import CheckpointError
from shardfold.plan.checks import known_arguments

__all__ = ["NumpyKind", "dump_object", "is_trusted", "load_object", "numpy_number", "trusted"]

_TRUSTED: ContextVar[bool] = ContextVar("shardfold-trusted", default=False)
UNKNOWN = re.compile(r"(?:GLOBAL (\S+) was not an allowed|unsupported GLOBAL (\S+) whose module)")


@known_arguments
@contextmanager
def trusted() -> Iterator[None]:
    """Inside of it, checkpoints may run code: objects in them are unpickled, whatever they are, and saved.

    Only for files whose every writer you would let run a program here. In other places such an object is refused, when
    it is saved and when it is read, and nothing of its file runs::

        with shardfold.checkpoint.trusted():
            engine.load_checkpoint(folder)

    Examples:
        >>> with sf.checkpoint.trusted():  # only for files that you made yourself
        ...     pass
    """
    token = _TRUSTED.set(True)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def is_trusted() -> bool:
    """Whether this is inside of :func:`trusted`."""
    return _TRUSTED.get()


def dump_object(value: Any, what: str) -> bytes:
    """The bytes of ``torch.save``, which :func:`load_object` takes back.

    Args:
        value: the object.
        what: it is, for messages: ``"client_state['x']"``.

    Raises:
        CheckpointError: it cannot be pickled; or :func:`load_object` would refuse it, and this is not inside of
            :func:`trusted`. What in it is to blame is named by its keys.
    """
    try:
        data = _dumped(value)
        if not is_trusted():
            _load(data, safe=True)
    except Exception as error:  # what pickling runs is the objects' own
        name, each, words = _blamed(value, what, error)
        raise CheckpointError(
            f"{name} is a {type(each).__name__}, which a checkpoint does not take ({words}): give numbers, strings, "
            "lists, dicts or tensors, such as what its state_dict() or get_state() gives. Objects that can be pickled "
            "are saved and read inside of `with shardfold.checkpoint.trusted():`."
        ) from error
    return data


def _blamed(value: Any, what: str, error: Exception) -> tuple[str, Any, str]:
    """The first part of an object that cannot be saved by itself, by its keys, and why; else the object."""
    for name, each in strangers(value, what):
        try:
            data = _dumped(each)
            if not is_trusted():
                _load(data, safe=True)
        except Exception as its:
            return name, each, _why(its)
    return what, value, _why(error)


def _why(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):
        found = UNKNOWN.search(str(error))
        return f"reading a {found[1] or found[2]} may run code" if found else "reading it may run code"
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_object(data: Path | bytes, what: str, *, mmap: bool = False) -> Any:
    """What ``torch.save`` was given; tensors are on the CPU.

    Args:
        data: a file, or its bytes.
        what: the object is, for messages: ``"client_state['x'] of ck/a"``.
        mmap: tensors stay in the file until they are read.

    Raises:
        CheckpointError: it holds an object whose class is not known to do no harm and this is not inside of
            :func:`trusted`; or it is no such file.
    """
    safe = not is_trusted()
    try:
        return _load(data, safe=safe, mmap=mmap)
    except pickle.UnpicklingError as error:
        found = UNKNOWN.search(str(error))
        if found is None or not safe:
            raise CheckpointError(
                f"{what} is not a file of torch.save, or holds more than tensors and values."
            ) from None
        raise CheckpointError(
            f"{what} holds a {found[1] or found[2]}, and reading that may run code: if you trust whoever wrote it, "
            "read it inside of `with shardfold.checkpoint.trusted():` (`shardfold ckpt import --trust`); a class of "
            "your own that does no harm is named by torch.serialization.add_safe_globals."
        ) from None


def _load(data: Path | bytes, *, safe: bool, mmap: bool = False) -> Any:
    file: Any = io.BytesIO(data) if isinstance(data, bytes) else data
    known = set(torch.serialization.get_safe_globals())  # stay so behind this
    with torch.serialization.safe_globals([each for each in _harmless() if each not in known]):
        return torch.load(file, map_location="cpu", mmap=mmap or None, weights_only=safe)


# -- what does no harm beside what PyTorch takes


class NumpyKind:
    """In place of ``numpy.dtype``: of numbers, strings and bytes, and of nothing that points into memory."""

    def __init__(self, name: str, *_: Any) -> None:
        self.found = np.dtype(name)
        if self.found.hasobject or self.found.fields is not None or self.found.subdtype is not None:
            raise pickle.UnpicklingError(f"a NumPy scalar of dtype {name} is not read")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order in ("<", ">", "="):
            self.found = self.found.newbyteorder(order)


def numpy_number(kind: NumpyKind, data: bytes | str) -> Any:
    """In place of what makes NumPy's scalars."""
    raw = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(raw, dtype=kind.found, count=1)[0]


def _harmless() -> list[Any]:
    """Classes of values without code of their own, with the names that files of any Python and NumPy have for them."""
    paths = [
        (pathlib.Path, f"{home}.{kind}")
        for home in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    ]
    times = [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone]
    numbers = [(numpy_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [argparse.Namespace, (frozenset, "builtins.frozenset"), *paths, *times, *numbers, (NumpyKind, "numpy.dtype")]
