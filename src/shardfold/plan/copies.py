"""Copies of what the optimizer has, in the memory of another rank: what a rank had goes on when it dies.

The rank that is next along an axis holds the *copy* of a rank's ``master`` and ``moments``. It is not sent anew in
each step: the *log* is, which is the rank's part of the summed gradients, and the holder updates the copy with it as
the rank updates the original. Both then are the same to the bit, as the same pass does the same to the same numbers.

    LOG      the log goes to the holder                                  grads bytes x parameters / ranks
    VOTE     all ranks have what an update needs, or nobody updates      one small message
    UPDATE   each rank updates what it owns
    MIRROR   each rank updates the copy that it holds                    as an UPDATE

Before the vote a step is undone by dropping its gradients: nothing has changed. Behind it whoever lives has all that it
takes to end the step by itself.

A copy rests in the tier of ``moments``, or in another one that is named, and is updated where the original is: from
that tier it comes for its MIRROR, and goes back behind it. Frozen parameters that are split have copies too, which no
step changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan.axes import DATA_AXES, Axes
from shardfold.plan.checks import described, known_arguments

__all__ = ["WORDS", "Copies"]

WORDS = ("rank", "host")


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Copies:
    """Who holds the copy of a rank's master and moments.

    Attributes:
        to: the axis along which the next rank does; ``"rank"``: the nearest, ``"host"``: one on the next host, or the
            nearest where there is one host. With a word there are copies only where other ranks, or hosts, do not have
            the same anyway.
        tier: where copies rest, ``"device"``, ``"host"`` or ``"disk"``; None: where moments do, and those of frozen
            parameters where these do.

    Raises:
        LayoutError: there is no such axis.

    Examples:
        >>> sf.PRESETS["zero3"].replace(copies="host").copies
        Copies(to='host', tier=None)
    """

    to: str = "rank"
    tier: str | None = None

    def __post_init__(self) -> None:
        known = (*WORDS, *DATA_AXES)
        if self.to not in known:
            raise LayoutError(
                f"copies to {described(self.to)}: they go to 'rank' or 'host', or along an axis of data, "
                f"{' or '.join(map(repr, DATA_AXES))}.{did_you_mean(str(self.to), known)}"
            )

    @staticmethod
    def named(given: Any) -> Any:
        """The value itself, or that of a word."""
        return Copies(to=given) if isinstance(given, str) else given

    def bound(self, over: Axes, sizes: Mapping[str, int]) -> Copies | None:
        """Along which of the axes that ``master`` is split over on such a mesh; None: along none, as others have the
        same."""
        if self.to not in WORDS:
            return self if self.to in over else None
        alike = [axis for axis in DATA_AXES if sizes.get(axis, 1) > 1 and axis not in over]
        if not over or (alike if self.to == "rank" else "inter" in alike):
            return None
        return replace(self, to=over[-1] if self.to == "rank" else over[0])

    def held_at(self, coords: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
        """The coordinates of the rank whose copy the one at ``coords`` holds."""
        return {**coords, self.to: (coords[self.to] - 1) % sizes[self.to]}

    def __str__(self) -> str:
        words = {"rank": "on the nearest rank", "host": "on a rank of the next host"}
        where = f", in the {self.tier} tier" if self.tier is not None else ""
        return "of master and moments " + words.get(self.to, f"on the next rank along {self.to}") + where
