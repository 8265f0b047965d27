"""WHAT is on the link: how values become the bytes of a payload, and values again.

A transport carries bytes and knows no format; a format knows no rank. The table names one for each transfer
(``Layout.gather``, ``Layout.reduce``), the program has it on each collective (``Op.format``), and whoever sends, counts
or aligns reads it from there. Values come as rows, one for each shard, because each rank encodes and decodes its own:

    values   (rows, length)          payload   (rows, nbytes(length)), uint8

A format named after a dtype carries elements of that dtype. Where the tensor has it already, it travels as it lies and
nothing is encoded (:attr:`Format.native`). Names of formats in blocks have parameters:

    int8                       blocks of 256 codes of 8 bits
    int8/128                   blocks of 128
    int4/64:zero,stochastic    with a zero point, rounded stochastically
    int8+error                 what is lost is added to what is sent next

The block's length follows ``/``, options follow ``:`` or ``+``, with ``,`` or ``+`` between them. Programs print one
form, in which the length stands always and options in the order of the family: ``int8/256:error``. Tables print
``int8/256+error``, as in a program ``+`` joins the formats of several segments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

import re
from collections.abc import Sequence
from typing import Any, Protocol

from shardfold.errors import LayoutError, did_you_mean

__all__ = [
    "BLOCK",
    "FLOATS",
    "ITEMSIZE",
    "Elements",
    "Family",
    "Format",
    "canonical",
    "dtype_name",
    "made",
    "torch_dtype",
    "typed",
]


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
        only_rests: nothing is encoded to travel so; parameters that rest so do (see ``Layout.base``).
    """

    native: str | None = None
    block: int = 1
    state: str | None = None
    gathers: bool = True
    only_rests: bool = False

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

    def encode_tensor(self, values: Tensor, payload: Tensor) -> None:
        """Writes a tensor ``(n,)``, behind it zeros to the end of its last block, into ``payload``, uint8 of
        ``nbytes`` of that length."""
        from torch.nn.functional import pad

        whole = values.numel() // self.block * self.block
        self.encode(values[:whole].view(1, -1), payload[: self.nbytes(whole)].view(1, -1))
        if whole < values.numel():
            last = pad(values[whole:], (0, self.block - values.numel() + whole))
            self.encode(last.view(1, -1), payload[self.nbytes(whole) :].view(1, -1))

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


def dtype_name(dtype: torch.dtype) -> str | None:
    """A table's name of a dtype of PyTorch's, or None if it has none."""
    return next((name for name in ITEMSIZE if torch_dtype(name) == dtype), None)


# -- names that have parameters


BLOCK = 256
"""Elements of a block, where a name does not say it."""
BLOCKS: Mapping[str, int] = {"nf4": 64, "int2": 32}
"""The same of families whose blocks are shorter by default."""
SMALLEST, LARGEST = 16, 65536
_NAME = re.compile(r"(?P<base>[a-z]+\d*)(/(?P<block>\d+))?(?P<options>([:+,][a-z]+)*)")


class Family(Protocol):
    """Formats of one kind.

    Attributes:
        OPTIONS: words that a name may have behind ``:``, in the order in which it is printed.
    """

    OPTIONS: tuple[str, ...]

    def __call__(self, base: str, block: int, options: Sequence[str]) -> Format: ...


def canonical(text: Any, families: Mapping[str, Family]) -> Any:
    """The one form of a name that has parameters; all else as it is.

    Raises:
        LayoutError: its parameters are none that the family has.
    """
    found = _NAME.fullmatch(text) if isinstance(text, str) else None
    if found is None or found["base"] not in families:
        return text
    base, block, given = (
        found["base"],
        int(found["block"] or BLOCKS.get(found["base"], BLOCK)),
        re.findall(r"[a-z]+", found["options"]),
    )
    known = families[base].OPTIONS
    for word in given:
        if word not in known:
            raise LayoutError(
                f"the format {text!r} has the option {word!r}, which is unknown.{did_you_mean(word, known)}"
            )
    if not SMALLEST <= block <= LARGEST or block % SMALLEST:
        raise LayoutError(
            f"the format {text!r} has blocks of {block} elements: they have a multiple of {SMALLEST}, up to {LARGEST}."
        )
    options = ",".join(word for word in known if word in given)
    return f"{base}/{block}" + (f":{options}" if options else "")


def typed(name: str) -> str:
    """A name of a program as users type it, and tables print it."""
    return name.replace(":", "+").replace(",", "+")


def made(name: str, families: Mapping[str, Family]) -> Format | None:
    """The format of a name in its one form; None: it is none of these."""
    found = _NAME.fullmatch(name)
    if found is None or found["base"] not in families or not found["block"] or canonical(name, families) != name:
        return None
    options = re.findall(r"[a-z]+", found["options"])
    return families[found["base"]](found["base"], int(found["block"]), options)
