"""WHAT is on the link: how values become the bytes of a payload, and values again.

A transport carries bytes and knows no format; a format knows no rank. The table names one for each journey
(``Layout.gather``, ``Layout.reduce``), the program has it on each collective (``Op.format``), and whoever sends, counts
or aligns reads it from there. Values come as rows, one for each shard, because each rank encodes and decodes its own:

    values   (rows, length)          payload   (rows, nbytes(length)), uint8

A format named after a dtype carries elements of that dtype. Where the tensor has it already, it travels as it lies and
nothing is encoded (:attr:`Format.native`). A new format is one class and one line in :data:`FORMATS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["FORMATS", "TORCH_DTYPES", "Elements", "Format"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""The dtypes of a table, by its names."""


class Format(ABC):
    """What one journey puts on the link.

    Attributes:
        name: as a table and a program have it; ``+`` is not in it, which joins the formats of several segments.
        native: tensors of that dtype travel as they lie; None: of none do.
        block: so many elements are encoded together, so no rank boundary cuts them.
        state: the dtype of what each rank keeps from one reduction to the next for every element that it encodes, such
            as an error; None: nothing.
    """

    native: torch.dtype | None = None
    block: int = 1
    state: torch.dtype | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def carries(self, dtype: torch.dtype) -> bool:
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
        self._dtype = self.native = TORCH_DTYPES[name]

    def carries(self, dtype: torch.dtype) -> bool:
        narrower = self._dtype.is_floating_point and dtype.is_floating_point and self._dtype.itemsize < dtype.itemsize
        return narrower or dtype == self._dtype

    def nbytes(self, length: int) -> int:
        return length * self._dtype.itemsize

    def encode(self, values: Tensor, payload: Tensor, state: Tensor | None = None) -> None:
        payload.view(self._dtype).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(self._dtype))


FORMATS: dict[str, Format] = {each.name: each for each in map(Elements, TORCH_DTYPES)}
"""All formats, by name. A name that is not here is refused where a table is made."""
