"""What is to be said of operations that do less than their words in a setting: it is done, or nobody needs it.

An operation of a program is for all devices, optimizers and micro-batches. What is known of these when the program is
shown is printed behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardfold.plan.bind import Bound
from shardfold.plan.layout import Layout, Tier
from shardfold.plan.program import Op

__all__ = ["Remarks"]

PASSES = ("backward", "last", "closing", "late")


@dataclass(frozen=True, kw_only=True)
class Remarks:
    """Remarks on the operations of what is bound.

    Attributes:
        bound: what runs.
        streams: whether the device has streams.
        micro_batches: of a step.
        own_step: the optimizer's own ``step()`` updates all units at once.
    """

    bound: Bound
    streams: bool
    micro_batches: int = 1
    own_step: bool = False

    def of(self, section: str, op: Op) -> str:
        """Of one operation of a section; empty: it does what it says."""
        if section == "eval" and op.verb == "END" and self._stays():
            return "and what a backward would read is freed"
        unit = self.bound.by_name.get(op.unit)
        say = _SAID.get(op.verb)
        return say(self, section, op, unit.table_or(self.bound.layout)) if say is not None and unit is not None else ""

    def _stays(self) -> bool:
        """Whether a forward leaves units full for its backward."""
        tables = [unit.table_or(self.bound.layout) for unit in self.bound.units]
        return any(t.held is not None and not t.held.over and t.comes_and_goes and not t.gathers_once for t in tables)

    def _add(self, section: str, op: Op, table: Layout) -> str:
        if section == "late":
            return ""
        return "none in the first micro-batch" if self.micro_batches > 1 else "none in the only micro-batch"

    def _grads(self, section: str, op: Op, table: Layout) -> str:
        once = self.bound.overlap.reduce_once and self.micro_batches > 1 and section in ("backward", "last")
        return "in the first micro-batch of a step" if once else ""

    def _store(self, section: str, op: Op, table: Layout) -> str:
        if op.source != "grads":
            return ""
        if section in PASSES:
            there = not self.streams and table.grads.tier is Tier.HOST and table.grads.over
            return "the reduction has written there" if there else ""
        return "the optimizer's own step() takes them along" if self.own_step else ""

    def _update(self, section: str, op: Op, table: Layout) -> str:
        done = "by the optimizer's own step() at STEP; here the compute-dtype copy, where there is one"
        return done if self.own_step else ""

    def _hold(self, section: str, op: Op, table: Layout) -> str:
        return "where the model is in training mode" if section == "eval" else ""

    def _free(self, section: str, op: Op, table: Layout) -> str:
        return "but what a step keeps" if section == "eval" and table.gathers_once else ""


_SAID: dict[str, Callable[[Remarks, str, Op, Layout], str]] = {
    "ADD": Remarks._add,
    "GRADS": Remarks._grads,
    "STORE": Remarks._store,
    "UPDATE": Remarks._update,
    "HOLD": Remarks._hold,
    "FREE": Remarks._free,
}
