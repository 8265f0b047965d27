"""What went wrong on this rank while a step updated units, and how all ranks hear of it.

Where states rest in a slower tier, a read or a write may fail on one rank at any time. From then on that rank updates
nothing more in this step, but takes part in all that the step sends; at the end of the step the ranks tell each other,
so all of them raise the same sentence at the same place, and the engine can still be loaded into. Where no state rests
on disk, what fails is rare (there is no memory left): then they do not wait for each other, and raise at their next
pass or call. What follows:

    a FETCH or an UPDATE failed    some weights are of this step and others of the one before, and the state of a unit
                                   may be gone: a checkpoint has to be loaded
    a STORE failed                 nothing is lost, as a tier keeps what it cannot write: the step is done
"""

from __future__ import annotations

import json
from collections.abc import Callable

from shardfold.comm.comm import Comm
from shardfold.comm.launcher_notes import tell_launcher
from shardfold.errors import StepError, by_rank
from shardfold.plan.program import Op

__all__ = ["StepFailure"]

WHAT = "the end of the updates"


class StepFailure:
    """Of one step after the other.

    Args:
        together: all ranks are to hear of it; else what fails raises at once.
        later: not at the end of the step, but before anything else that they do together.

    Attributes:
        begun: whether something was updated in this step, or may be in part.
        unfinished: which rank could not update what, and why, as all ranks have been told; empty: all was updated.
        unwritten: the same of what could not be brought back to its tier.
        cause: what this rank raises its errors from.
    """

    def __init__(self, *, together: bool, later: bool) -> None:
        self.together, self.later = together, together and later
        self._early: list[tuple[Op, Exception]] = []
        self.begin_step()

    def begin_step(self) -> None:
        self.begun = False
        self.unfinished = self.unwritten = ""
        self.cause: Exception | None = None
        self._own = {"unfinished": "", "unwritten": ""}
        for op, error in self._early:
            self._note(op, error)
        self._early.clear()

    def begin(self) -> None:
        """From here on something may be updated."""
        self.begun = True

    def attempt(self, op: Op, do: Callable[[], None]) -> None:
        """Does a FETCH, an UPDATE or a STORE, unless this rank updates nothing more in this step."""
        if self._own["unfinished"]:
            return
        self.begun |= op.verb == "UPDATE"
        try:
            do()
        except Exception as error:
            if not self.together:
                raise
            self._note(op, error)

    def attempt_early(self, op: Op, do: Callable[[], None]) -> None:
        """Does an operation on gradients in a backward: what a disk says there is told with the step that uses them."""
        try:
            do()
        except (OSError, StepError) as error:
            self._early.append((op, error))

    def _note(self, op: Op, error: Exception) -> None:
        kept = op.verb == "STORE" and isinstance(error, OSError)
        which = "unwritten" if kept else "unfinished"
        if not self._own[which]:
            self._own[which] = f"{op}: {str(error) or type(error).__name__}"
            self.cause = error

    @property
    def happened(self) -> bool:
        """Whether anything went wrong on this rank."""
        return any(self._own.values())

    @property
    def lacks(self) -> str:
        """What this rank could not update, and why; empty: it has done its part."""
        return self._own["unfinished"]

    def tell(self, comm: Comm) -> None:
        """Ranks tell each other what went wrong; one small message where nothing did."""
        if self.together and any(comm.anyone([self.happened], WHAT)):
            self.hear(comm)

    def hear(self, comm: Comm) -> None:
        """Something went wrong on some rank, as all know: they tell each other what."""
        said = [json.loads(text) for text in comm.group.exchange(WHAT, json.dumps(self._own))]
        ranks = comm.group.peers.ranks
        self.unfinished, self.unwritten = (
            by_rank({rank: each[which] for rank, each in zip(ranks, said, strict=True)}).rstrip(".")
            for which in ("unfinished", "unwritten")
        )
        if not self.happened:
            tell_launcher(self.unfinished or self.unwritten, follows=True)
