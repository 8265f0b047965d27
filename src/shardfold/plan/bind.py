"""The one compiler: a table, the units of a model and a mesh, bound to the program that runs.

The engine, ``explain``, plans, ``layout="auto"``, the choice of wires and the check at start all take what :func:`bind`
gives. Nothing else lowers a table or applies passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from shardfold.errors import ConfigError
from shardfold.plan import rewrites
from shardfold.plan.axes import Mesh
from shardfold.plan.cost import fetched_bytes
from shardfold.plan.layout import Layout, Sizes
from shardfold.plan.order import backwards, with_missing
from shardfold.plan.placement import UnitSpec, enclosing
from shardfold.plan.program import ROUND, Op, Program, lower
from shardfold.plan.rewrites import Overlap

__all__ = ["PASSES", "Bound", "RunOrders", "bind"]

PASSES = ("first", "forward", "eval", "backward", "last", "quiet", "weights", "last_weights")
"""Sections that are passes through the model."""


class RunOrders(NamedTuple):
    """Names of the inner units in the order in which each pass runs them, a unit that runs several times as often.

    Attributes:
        forward: in training.
        backward: of that.
        evaluation: of a forward in evaluation.
    """

    forward: Sequence[str]
    backward: Sequence[str]
    evaluation: Sequence[str]

    @classmethod
    def of(
        cls,
        units: Sequence[UnitSpec],
        forward: Sequence[str] | None = None,
        backward: Sequence[str] | None = None,
        evaluation: Sequence[str] | None = None,
    ) -> RunOrders:
        """All units in the orders that are known; one that an order lacks comes behind its predecessor in definition
        order, or in the order of the pass before."""
        inner = [unit.name for unit in units if not unit.root]
        onward = _completed(forward, inner)
        back = _completed(backward, backwards(onward, enclosing(units)))
        return cls(onward, back, _completed(evaluation, onward))


def _completed(order: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    if order is None:
        return list(known)
    names = set(known)
    whole = with_missing([name for name in order if name in names], list(dict.fromkeys(known)))
    return [name for i, name in enumerate(whole) if i == 0 or whole[i - 1] != name]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What one rank binds.

    Attributes:
        layout: bound to a precision and a mesh (see :meth:`Layout.bind`).
        units: laid out on the mesh, in definition order.
        mesh: of all ranks.
        overlap: what the passes have moved.
        num_moments: that the optimizer keeps of each element.
        orders: in which units run.
        program: behind its passes.
    """

    layout: Layout
    units: Sequence[UnitSpec]
    mesh: Mesh
    overlap: Overlap
    num_moments: int
    orders: RunOrders
    program: Program
    _in_evaluation: Callable[[], Program] = field(repr=False, compare=False)
    _unmoved: Callable[[], Program] = field(repr=False, compare=False)

    @cached_property
    def by_name(self) -> Mapping[str, UnitSpec]:
        """The units by their names, in definition order."""
        return {unit.name: unit for unit in self.units}

    @property
    def waits(self) -> bool:
        """Whether a backward ends with all sums, as every rank has them whole and shows them in ``.grad``: no unit is
        reduced before its gradients are complete."""
        return _waits(self.layout, self.units)

    @cached_property
    def sections(self) -> Mapping[str, tuple[Op, ...]]:
        """All that runs, by section: those of the program, and those that are made of them."""
        names = [name for name in PASSES if name != "eval"]
        names += ["step", "beside", "behind", "arrive", "shared", "together"]
        outer = self.layout.outer
        names += [f"{name}.{i}" for name in ROUND for i in range(outer.fragments if outer is not None else 0)]
        found = {name: self.program.section(name) for name in names}
        evaluation = self._in_evaluation().alone
        return {**found, "eval": evaluation, "closing": rewrites.closing(self.program, self.overlap)}

    @cached_property
    def whole(self) -> Program:
        """The program with all sections that can run: what is printed. Of :attr:`Program.late` a step runs what is of
        the units that are late."""
        runs = {name: self.sections[name] for name in ("eval", "closing")}
        also = ("quiet", "weights", "last_weights") if self.mesh.stages else ("quiet",)
        return replace(self.program, **runs, late=self.late([*self.by_name]), also=also)

    @cached_property
    def asked(self) -> Mapping[str, tuple[Op, ...]]:
        """The passes in definition order, nothing ahead or later: for ranks that ask each other before each unit."""
        unmoved = self._unmoved()
        return {name: unmoved.section("alone" if name == "eval" else name) for name in PASSES}

    def late(self, units: Collection[str]) -> tuple[Op, ...]:
        """A section before the step that reduces these units once more."""
        return rewrites.late(self.program, frozenset(units))


def bind(
    layout: Layout,
    units: Sequence[UnitSpec],
    mesh: Sizes,
    *,
    overlap: Overlap | None = None,
    orders: RunOrders | None = None,
    late: Collection[str] = (),
    unplaced: Collection[str] = (),
    speculated: Collection[str] = (),
    num_moments: int = 2,
    clip: bool = False,
    clamp: bool = False,
    meets: str = "dense",
    apart: bool = False,
    stashes: bool = False,
) -> Bound:
    """The table lowered for these units, behind the passes that ``overlap`` asks for.

    Args:
        layout: bound to a precision and a mesh.
        units: laid out on the mesh, in definition order.
        mesh: sizes of axes.
        overlap: what is done ahead, or later; None: as by default, without reductions in flight.
        orders: in which units run; None: in definition order.
        late: names of units that are reduced at the end of backward.
        unplaced: names of units that no backward so far had all gradients of. Where each unit is reduced in its turn
            (see :attr:`Bound.waits`) these are late too: those behind them would wait for gradients that never come.
        speculated: names of units that are updated before the norm is known.
        num_moments: that the optimizer keeps of each element.
        clip: whether the step takes the norm of the gradients.
        clamp: whether the step cuts their elements.
        meets: how ranks that send signs meet: ``dense``, ``signs`` or ``local``.
        apart: those ranks may go their own ways.
        stashes: what is updated is kept for micro-batches that are under way.

    Raises:
        ConfigError: gradients are to be summed once in a step, and each micro-batch by itself.
    """
    overlap, mesh, orders = overlap or Overlap(), Mesh.of(mesh), orders or RunOrders.of(units)
    _check_sums(layout, overlap)
    by_name = {unit.name: unit for unit in units}
    at_end = set(late)
    if _waits(layout, units):
        at_end |= {unit.name for unit in units if not unit.root} & set(unplaced)
    lowered = partial(
        lower,
        layout,
        units,
        mesh,
        clip=clip,
        clamp=clamp,
        stashes=stashes,
        meets=meets,
        apart=apart,
        speculated=speculated,
        delayed=overlap.delayed_update,
    )

    def fetched(op: Op) -> float:
        return fetched_bytes(op, layout, by_name[op.unit], mesh, num_moments)

    def moved(program: Program) -> Program:
        return rewrites.apply(program, overlap, late=frozenset(at_end), fetched=fetched)

    def unmoved() -> Program:
        return rewrites.reduced_once(lowered()) if overlap.reduce_once else lowered()

    return Bound(
        layout=layout,
        units=units,
        mesh=mesh,
        overlap=overlap,
        num_moments=num_moments,
        orders=orders,
        program=moved(lowered(forward=orders.forward, backward=orders.backward)),
        _in_evaluation=lambda: moved(lowered(forward=orders.evaluation)),
        _unmoved=unmoved,
    )


def _check_sums(layout: Layout, overlap: Overlap) -> None:
    """
    Raises:
        ConfigError: gradients are to be summed once in a step, and each micro-batch by itself.
    """
    if overlap.reduce_once and layout.reduce.ordered:
        raise ConfigError(
            f"Overlap(reduce_once=True) adds gradients up on each rank, and by Runtime(exact=True) they travel as "
            f"{layout.reduce}, each micro-batch by itself: leave one of the two out."
        )


def _waits(layout: Layout, units: Sequence[UnitSpec]) -> bool:
    """See :attr:`Bound.waits`. Units whose gradients rest in a slower tier show none."""
    return not layout.master.over and any(not unit.table_or(layout).buffered for unit in units)
