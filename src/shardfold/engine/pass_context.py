"""What kind of pass runs, as a value: who causes a pass says it, and the pass keeps it to its end."""

from __future__ import annotations

from dataclasses import dataclass

from shardfold.parallel.pipeline.deferred import DeferredWeightGrads
from shardfold.plan.walk import Part

__all__ = ["PassContext"]


@dataclass(frozen=True)
class PassContext:
    """What a pass is, besides a forward or a backward.

    Attributes:
        part: of the model that it runs, where a rank has several stages; None: all that the rank has.
        last: whether a backward is the last before a step; None: each ``accumulate``-th is.
        synchronize: False inside ``no_sync()``.
        in_batch: whether a batch goes through stages, behind its first forward.
        deferred: where a backward is one of two parts: what the first leaves to the second.
        weights: whether it is the second.
    """

    part: Part | None = None
    last: bool | None = None
    synchronize: bool = True
    in_batch: bool = False
    deferred: DeferredWeightGrads | None = None
    weights: bool = False

    @property
    def units(self) -> frozenset[str] | None:
        """Names of the units that it goes through; None: all."""
        return None if self.part is None else self.part.units | self.part.common

    def sums(self, behind: int, accumulate: int, *, nested: bool) -> bool:
        """Whether a backward leaves gradients that are summed for a step of so many micro-batches.

        Args:
            behind: how many backwards of the step came before.
            accumulate: micro-batches per step.
            nested: it runs inside of a forward.
        """
        last = self.last if self.last is not None else behind + 1 >= accumulate
        if self.part is not None:
            last = self.part.last
        return not nested and self.synchronize and last and (self.deferred is None or self.weights)

    def section(self, *, sums: bool, nested: bool) -> str:
        """Of the program, that a backward runs."""
        if self.deferred is not None:
            return "quiet" if not self.weights else "last_weights" if sums else "weights"
        return "quiet" if nested or not self.synchronize else "last" if sums else "backward"

    def title(self, behind: int, accumulate: int, *, nested: bool) -> str:
        """A backward as messages call it, such that ranks that call it alike are about to do the same."""
        count = f"{behind + 1} of {accumulate}" if self.last is None else f"{behind + 1}"
        kind = "inside a forward" if nested else count + ", the last" * (self.last is True)
        return f"a backward pass ({kind}{'' if self.synchronize else ', no_sync'})"
