"""Where a run is in what it reads, by steps: it goes on with the states, from any rank that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["VIRTUAL", "HeldPosition", "Positioned", "StepPosition"]


VIRTUAL = "virtual_ranks"


class Positioned(Protocol):
    """Something read from a position, which is equal on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reading goes on there."""
        ...

    def share_among(self, num_ranks: int) -> None:
        """From now on what is read is cut for so many ranks."""
        ...


class StepPosition:
    """The position in front of the step under way and the one behind it.

    Args:
        of: what is read; its position is behind the step's samples when these were handed out.
        virtual_ranks: for how many ranks it is cut, however many there are; one that is new hears it from the others.
    """

    def __init__(self, of: Positioned, virtual_ranks: int) -> None:
        self._of, self._virtual_ranks = of, virtual_ranks
        self._before, self._turns = of.state_dict(), -1  # when a step began, and behind how many

    def begin(self, turns: int) -> None:
        """A step begins, behind so many, taken or skipped."""
        self._before, self._turns = self._of.state_dict(), turns

    def at(self, turns: int) -> HeldPosition:
        """The position of a run that has had so many: behind the step under way if it was taken or skipped, else in
        front of it."""
        state = self._of.state_dict() if turns > self._turns else self._before
        return HeldPosition(self, {**state, VIRTUAL: self._virtual_ranks})

    def go_on_at(self, state: Mapping[str, Any]) -> None:
        """This is the position of the step that the run goes on from, which may be an earlier one."""
        self._virtual_ranks = state[VIRTUAL]
        self._of.share_among(self._virtual_ranks)
        self._of.load_state_dict(state)
        self._before, self._turns = dict(state), -1

    def told(self, turns: int) -> str:
        """Where the samples of the next step of such a run are, for people."""
        at = self.at(turns).state_dict()
        return ", ".join(f"{name} {at[name]}" for name in ("epoch", "consumed", "group", "done") if name in at)


class HeldPosition:
    """A position in the form in which checkpoints have it."""

    def __init__(self, of: StepPosition, state: Mapping[str, Any]) -> None:
        self._of, self._state = of, dict(state)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of.go_on_at(state)
