"""What an operation's schema says of it: what it reads, what it writes, what its results are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

__all__ = ["Signature", "signature"]

READ_BY_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
NUMBERS = {"bool", "int", "float", "number", "Scalar"}


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Attributes:
    name: as in ``aten::add_``.
    names: of the arguments.
    written: by argument, whether it is written to.
    aliased: by result, the argument that it is; None: a tensor of its own.
    view: whether all it does is to make a view.
    stops_host: whether the host needs values of the device to give the result.
    random: whether it draws random numbers.
    out: whether it may give what it writes to another size.
    """

    name: str
    names: tuple[str, ...]
    written: tuple[bool, ...]
    aliased: tuple[int | None, ...]
    view: bool
    stops_host: bool
    random: bool
    out: bool

    @property
    def fresh(self) -> list[int]:
        """The results that are tensors of their own."""
        return [k for k, argument in enumerate(self.aliased) if argument is None]

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """A value for each argument of the schema; None where none is given."""
        return [*args, *(kwargs.get(name) for name in self.names[len(args) :])]


@cache
def signature(op: Any) -> Signature:
    """Of one overload."""
    schema = op._schema
    written = tuple(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    aliased = tuple(_argument_of(result, schema.arguments) for result in schema.returns)
    views = bool(schema.returns) and any(a.alias_info is not None for a in schema.arguments)
    return Signature(
        name=schema.name,
        names=tuple(a.name for a in schema.arguments),
        written=written,
        aliased=aliased,
        view=views and not any(written),
        stops_host=bool(READ_BY_THE_HOST & set(op.tags)) or any(str(r.type) in NUMBERS for r in schema.returns),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        out=any(a.kwarg_only and w for a, w in zip(schema.arguments, written, strict=True)),
    )


def _argument_of(result: Any, arguments: Sequence[Any]) -> int | None:
    names = result.alias_info.before_set if result.alias_info is not None else set()
    for i, argument in enumerate(arguments):
        if argument.alias_info is not None and names & argument.alias_info.before_set:
            return i
    return None
