"""Values beside tensors as JSON, of which all comes back as it was: no pickle, so that reading them runs no code.

A tree is ``None``, booleans, numbers, strings, dtypes, lists, tuples and dicts of trees, and tensors or arrays in any
place.
Tensors of several elements are kept apart and the tree names them; others are written where they stand.

    {"$tuple": [...]}                                 a tuple
    {"$dict": [[key, value], ...]}                    a dict with keys that are no strings, or begin with "$"
    {"$float": "nan" | "inf" | "-inf"}                what JSON has no number for
    {"$scalar": {"dtype", "shape", "values"}}         a tensor of up to 8 numbers
    {"$tensor": name, "numpy": true}                  a tensor (an array) that is kept apart
    {"$bytes": "00ff"}                                bytes
    {"$dtype": "bfloat16"}                            a dtype
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

__all__ = ["StrangeValue", "decode", "encode", "from_text", "to_text"]

INLINE = 8
DTYPES: dict[str, torch.dtype] = {
    str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}


class StrangeValue(Exception):
    """Something that is no tree; its type's name is the message."""


def to_text(value: Any) -> str:
    """A tree with all its tensors as one text.

    Raises:
        StrangeValue: something of another kind is in it.
    """
    tensors: dict[str, Tensor] = {}
    tree = encode(value, "", tensors)
    return json.dumps([tree, {name: _dense_text(tensor) for name, tensor in tensors.items()}])


def from_text(text: str) -> Any:
    """The tree that :func:`to_text` was given; its tensors are on the CPU."""
    tree, texts = json.loads(text)
    return decode(tree, lambda name: _dense(*texts[name]))


def _dense_text(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), b64encode(flat.numpy().tobytes()).decode()]


def _dense(dtype: str, shape: list[int], text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=DTYPES[dtype]).view(shape)


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A tree as JSON; its larger tensors are put into ``tensors`` by the names that the JSON has, which begin with
    ``where``.

    Raises:
        StrangeValue: something of another kind is in it.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):  # also NumPy's float64, which is a float
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": repr(float(value))}
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # as a long double's is
        return encode(value.item(), where, tensors)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        return {**_tensor(_of_array(value), where, tensors), "numpy": True}
    if isinstance(value, Tensor):
        return _tensor(value.detach(), where, tensors)
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(cast("tuple[Any, ...]", value))]}
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        items = list(cast("Mapping[Any, Any]", value).items())
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return {k: encode(v, f"{where}.{k}", tensors) for k, v in items}
        pairs = [[encode(k, f"a key of {where}", tensors), encode(v, f"{where}[{k!r}]", tensors)] for k, v in items]
        return {"$dict": pairs}
    raise StrangeValue(type(value).__name__)


def _of_array(array: Any) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError):  # of strings, of objects, of dates, in the other order of bytes
        raise StrangeValue(f"array of dtype {array.dtype}") from None


def _tensor(tensor: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:  # not one value for each element
        raise StrangeValue(type(tensor).__name__)
    if tensor.numel() <= INLINE and not tensor.is_complex():
        name, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        numbers = [encode(v, where, tensors) for v in tensor.reshape(-1).tolist()]
        return {"$scalar": {"dtype": name, "shape": shape, "values": numbers}}
    tensors[where] = tensor
    return {"$tensor": where}


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """The tree that :func:`encode` was given; ``read`` gives the tensor of a name."""
    if isinstance(value, list):
        return [decode(v, read) for v in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    said = cast("dict[str, Any]", value)
    if "$tuple" in said:
        return tuple(decode(v, read) for v in said["$tuple"])
    if "$dict" in said:
        return {decode(k, read): decode(v, read) for k, v in said["$dict"]}
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
            numbers = [decode(v, read) for v in inner["values"]]
            tensor = torch.tensor(numbers, dtype=DTYPES[inner["dtype"]]).view(inner["shape"])
        return tensor.numpy() if said.get("numpy") else tensor
    return {k: decode(v, read) for k, v in said.items()}
