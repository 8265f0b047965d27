"""Loans: while whole values are lent to the user, some things must not happen to them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardfold.errors import UsageError

__all__ = ["Loan", "refuse_during"]


@dataclass(eq=False)
class Loan:
    """Tensors by name, lent until the end of a ``with`` block; ``what`` names the block in messages.

    ``writes``: at the end of the block rank 0's values become everyone's.
    """

    what: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    versions: dict[str, int] = field(default_factory=dict[str, int])
    writes: bool = False

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """From now on these values are what changes are compared with."""
        self.versions = {name: tensor._version for name, tensor in self.tensors.items()}

    def overlook(self, written: Container[int]) -> None:
        """That the engine has written to these tensors, by ``id``, is no change."""
        self.versions.update({name: t._version for name, t in self.tensors.items() if id(t) in written})

    def changed(self) -> list[str]:
        """Names of the tensors that were written to since; writes by ``.data`` leave no trace."""
        return [name for name, tensor in self.tensors.items() if tensor._version != self.versions[name]]


def refuse_during(loans: Sequence[Loan], call: str) -> None:
    """Raises if anything is lent.

    Raises:
        UsageError: ``call`` would change values that are lent, or be lost when the loan ends.
    """
    if loans:
        raise UsageError(
            f"{call} inside `with {loans[-1].what}:` would change values that are gathered there: call it outside."
        )
