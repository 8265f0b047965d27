"""The one search behind all that is ``"auto"``: candidates are planned in their order, and the cheapest that fits is
taken.

What a candidate is and how it is planned is up to who searches, as is what a plan costs and when enough is known:

    ``layout="auto"``         layouts; bytes of states; until one fits
    ``sample=``               layouts x modes; bytes and seconds of a step; where rates are not known until one fits
    ``wire="auto"``           wires; seconds over the links that were measured; all
    ``plan.best``, searches   axes x layouts x wires x modes x micro-batches; bytes and samples per second; all
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Costed", "Searched", "search"]

CandidateT = TypeVar("CandidateT")
CostedT = TypeVar("CostedT", bound="Costed")


class Costed(Protocol):
    """A plan of a candidate."""

    @property
    def fits(self) -> bool:
        """Whether it may be taken."""
        ...

    @property
    def cost(self) -> Any:
        """What is to be the least: a number, or several of which the first ones count more."""
        ...


@dataclass(frozen=True)
class Searched(Generic[CostedT]):
    """What a search has seen: ``planned``, plans in their order."""

    planned: Sequence[CostedT]

    @property
    def fitting(self) -> list[CostedT]:
        """Those that fit, the cheapest first, and of equal ones that which was planned first."""
        return sorted((plan for plan in self.planned if plan.fits), key=lambda plan: plan.cost)

    @property
    def others(self) -> list[CostedT]:
        """Those that do not fit."""
        return [plan for plan in self.planned if not plan.fits]


def search(
    space: Iterable[CandidateT],
    objective: Callable[[CandidateT], Iterable[CostedT]],
    stop: Callable[[CostedT], bool] = lambda plan: False,
) -> Searched[CostedT]:
    """Plans candidates until enough is known.

    Args:
        space: candidates; what is to be taken first among equals is before the others.
        objective: gives the plans of one, of which it may have several, as of several micro-batches.
        stop: whether nothing behind a plan has to be looked at.
    """
    planned: list[CostedT] = []
    for plan in (plan for candidate in space for plan in objective(candidate)):
        planned.append(plan)
        if stop(plan):
            break
    return Searched(planned)
