"""What of a program is a pass through one of several stages that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardfold.plan.program import Op

__all__ = ["Part", "of_part"]


class Part(NamedTuple):
    """A pass through one of several stages that a rank has.

    Attributes:
        units: names of the units of that stage.
        common: of those that belong to no stage alone.
        last: whether it is that stage's last backward of the step.
        final: whether it is the rank's.
    """

    units: frozenset[str]
    common: frozenset[str]
    last: bool = False
    final: bool = False


def of_part(section: str, ops: Sequence[Op], backward: Sequence[Op], part: Part | None) -> Sequence[Op]:
    """Operations of the stage's units; sums that only the last backward of a step takes wait, of what several stages
    have, for the rank's last.

    Args:
        section: name of the one that ``ops`` are of.
        ops: operations.
        backward: those of the section of that name.
        part: of the model; None: all of it.
    """
    if part is None:
        return ops
    every = set(backward)
    waits = section in ("last", "last_weights") and not part.final
    return [
        op
        for op in ops
        if not op.unit
        or op.unit in part.units
        or (op.unit in part.common and not (waits and op.is_sum and op not in every))
    ]
