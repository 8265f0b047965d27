"""WHAT is on the link: how values become the bytes of a payload, and values again.

A transport carries bytes and knows no format; a format knows no rank. The table names one for each transfer
(``Layout.gather``, ``Layout.reduce``), the program has it on each collective (``Op.format``), and whoever sends, counts
or aligns reads it from there. Values come as rows, one for each shard, because each rank encodes and decodes its own:

    values   (rows, length)          payload   (rows, nbytes(length)), uint8

A format named after a dtype carries elements of that dtype. Where the tensor has it already, it travels as it lies and
nothing is encoded (:attr:`Format.native`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["FLOATS", "ITEMSIZE", "Elements", "Format", "torch_dtype"]

ITEMSIZE: Mapping[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of every dtype name that a table, a program or a segment may use."""

FLOATS = ("fp64", "fp32", "bf16", "fp16")


class Format(ABC):
    """What one transfer puts on the link.

    Attributes:
        name: as a table and a program have it; ``+`` is not in it, which joins the formats of several segments.
        native: tensors of the dtype of that name travel as they lie; None: of none do.
        block: so many elements are encoded together, so no rank boundary cuts them.
        state: the name of the dtype of what each rank keeps from one reduction to the next for every element that it
            encodes, such as an error; None: nothing.
        gathers: whether parameters may travel so.
    """

    native: str | None = None
    block: int = 1
    state: str | None = None
    gathers: bool = True

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def carries(self, dtype: str) -> bool:
        """Whether it takes values of that dtype and gives such."""

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Bytes of the payload of ``length`` elements; of blocks, as many times those of one."""

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor, state: Tensor | None = None) -> None:
        """Writes ``values`` into ``payload``; ``state``, of their shape, is read and written."""

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Writes what ``payload`` stands for into ``values``; the same on every rank."""


class Elements(Format):
    """Elements of one dtype: values of a wider one are rounded to the nearest."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.native = name

    def carries(self, dtype: str) -> bool:
        narrower = self.name in FLOATS and dtype in FLOATS and ITEMSIZE[self.name] < ITEMSIZE[dtype]
        return narrower or dtype == self.name

    def nbytes(self, length: int) -> int:
        return length * ITEMSIZE[self.name]

    def encode(self, values: Tensor, payload: Tensor, state: Tensor | None = None) -> None:
        payload.view(torch_dtype(self.name)).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch_dtype(self.name)))


@cache
def torch_dtype(name: str) -> torch.dtype:
    import torch  # not with the module: tables and programs are read without it

    words = {"fp": "float", "bf": "bfloat", "int": "int", "uint": "uint"}
    kind = name.rstrip("0123456789")
    return getattr(torch, words[kind] + name.removeprefix(kind))
