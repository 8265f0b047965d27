"""What a run is made of beside its tensors, as JSON: no pickle, so that reading a checkpoint runs no code of its own.

A tree is ``None``, booleans, numbers, strings, dtypes, lists, tuples and dicts of trees, and tensors or arrays in any
place.
Tensors of several elements go to the files and the tree names them; others are written where they stand.

    {"$tuple": [...]}                                 a tuple
    {"$dict": [[key, value], ...]}                    a dict with keys that are no strings, or begin with "$"
    {"$float": "nan" | "inf" | "-inf"}                what JSON has no number for
    {"$scalar": {"dtype", "shape", "values"}}         a tensor of up to 8 numbers
    {"$tensor": name, "numpy": true}                  a tensor (an array) of the files
    {"$bytes": "00ff"}                                bytes
    {"$dtype": "bfloat16"}                            a dtype
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shardfold.checkpoint.checked import DEPTH, is_deep
from shardfold.checkpoint.files import check_dense
from shardfold.errors import CheckpointError

__all__ = ["decode", "encode", "strangers"]

INLINE = 8
ABOVE = 8  # levels of an index that a tree lies in, at most
DTYPES: dict[str, torch.dtype] = {
    str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}
#: What is raised by reading a tree that :func:`encode` did not make.
WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def encode(value: Any, where: str, tensors: dict[str, Tensor], called: str = "") -> Any:
    """A tree as JSON; its larger tensors are put into ``tensors`` by the names that the JSON has.

    Args:
        value: the tree.
        where: begins these names.
        tensors: is added to.
        called: what users call the tree, for messages; as ``where``, if not given.

    Raises:
        CheckpointError: something of another kind is in it, which is named by its keys (``state['o'][1]``), or it is
            nested too deeply to be read again.
    """
    said: Any = None
    try:
        said = _encode(value, where, tensors)
        deep = is_deep(said, DEPTH - ABOVE)
    except _Strange:
        name, each = next(strangers(value, called or where))
        if isinstance(each, Tensor):
            check_dense(each, name)
        if isinstance(each, torch.Generator):
            raise CheckpointError(
                f"{name} is a torch.Generator, which a checkpoint does not take as it is: give its get_state(), a "
                "tensor that set_state() takes when it is loaded."
            ) from None
        raise CheckpointError(
            f"{name} is a {type(each).__name__}, which a checkpoint does not take (it has no pickled objects): give "
            "None, numbers, strings, bytes, lists, tuples, dicts, tensors or arrays; a value of state= or rank_state= "
            "itself may also be an object with state_dict() and load_state_dict()."
        ) from None
    except RecursionError:
        deep = True
    if deep:
        raise CheckpointError(
            f"{called or where} is nested too deeply, or holds itself: a checkpoint takes {DEPTH} levels of JSON."
        )
    return said


class _Strange(Exception):
    """Something that is no tree."""


def strangers(value: Any, called: str) -> Iterator[tuple[str, Any]]:
    """What in a tree a checkpoint does not take, with its place: ``state['o'][1]``."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            yield from strangers(key, f"the key {key!r} of {called}")
            yield from strangers(inner, f"{called}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(cast("Sequence[Any]", value)):
            yield from strangers(inner, f"{called}[{i}]")
    else:
        try:
            _encode(value, called, {})
        except _Strange:
            yield called, value


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):  # also NumPy's float64, which is a float
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": repr(float(value))}
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, np.generic):
        return _encode(value.item(), where, tensors)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        return {**_tensor(torch.from_numpy(np.array(value, order="C")), where, tensors), "numpy": True}
    if isinstance(value, Tensor):
        return _tensor(value.detach(), where, tensors)
    if isinstance(value, tuple):
        return {"$tuple": [_encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(cast("tuple[Any, ...]", value))]}
    if isinstance(value, list):
        return [_encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        items = list(cast("Mapping[Any, Any]", value).items())
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return {k: _encode(v, f"{where}.{k}", tensors) for k, v in items}
        pairs = [[_encode(k, f"a key of {where}", tensors), _encode(v, f"{where}[{k!r}]", tensors)] for k, v in items]
        return {"$dict": pairs}
    raise _Strange


def _tensor(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        check_dense(tensor, where)
    except CheckpointError:
        raise _Strange from None
    if tensor.numel() <= INLINE and not tensor.is_complex():
        name, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        numbers = [_encode(v, where, tensors) for v in tensor.reshape(-1).tolist()]
        return {"$scalar": {"dtype": name, "shape": shape, "values": numbers}}
    tensors[where] = tensor
    return {"$tensor": where}


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """The tree that :func:`encode` was given; ``read`` gives the tensor of a name.

    Raises:
        CheckpointError: it is no such tree.
    """
    try:
        return _decode(value, read)
    except CheckpointError:
        raise
    except WRONG as error:
        words = str(error).partition("\n")[0][:100]
        raise CheckpointError(
            f"the index of a checkpoint is damaged: one of its trees cannot be read ({type(error).__name__}: {words})."
        ) from None


def _decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, read) for v in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    said = cast("dict[str, Any]", value)
    if "$tuple" in said:
        return tuple(_decode(v, read) for v in said["$tuple"])
    if "$dict" in said:
        return {_decode(k, read): _decode(v, read) for k, v in said["$dict"]}
    if "$float" in said:
        return float(said["$float"])
    if "$dtype" in said:
        return DTYPES[said["$dtype"]]
    if "$bytes" in said:
        return bytes.fromhex(said["$bytes"])
    if "$scalar" in said or "$tensor" in said:
        if "$tensor" in said:
            tensor = read(said["$tensor"])
        else:
            inner = said["$scalar"]
            numbers = [_decode(v, read) for v in inner["values"]]
            tensor = torch.tensor(numbers, dtype=DTYPES[inner["dtype"]]).view(inner["shape"])
        return tensor.numpy() if said.get("numpy") else tensor
    return {k: _decode(v, read) for k, v in said.items()}
