"""In which order units run, as far as it is known, and the programs and tracks that are made of it.

Orders are kept for forward in training, forward in evaluation and backward; each is made of what all ranks ran in a
pass that asked before each unit (see ``passes``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from logging import getLogger
from typing import Any

from shardfold import accelerator
from shardfold.comm.comm import Comm
from shardfold.engine.handlers import Handlers
from shardfold.engine.passes import NegotiatedPass
from shardfold.engine.track import Section, Track
from shardfold.errors import OrderError
from shardfold.numerics.clipping import Clip
from shardfold.plan.bind import RunOrders, bind
from shardfold.plan.cost import room_for, snapshot_bytes
from shardfold.plan.layout import Layout
from shardfold.plan.lifetimes import Behaviour
from shardfold.plan.order import contradiction, describe, merge_orders
from shardfold.plan.placement import UnitSpec
from shardfold.plan.program import BESIDE, MARKERS, Op, Program
from shardfold.plan.rewrites import Overlap
from shardfold.plan.walk import Part, of_part
from shardfold.sharding.unit import Unit

__all__ = ["Orders", "mode_of"]


FLAGS = 3  # besides what is told of each unit in a step
RECORDINGS = 8  # a model that changes its order more often than this is asked at every unit
LOG = getLogger("shardfold")


def mode_of(section: str) -> str:
    """Which order a section follows."""
    return "forward" if section in ("first", "forward") else "eval" if section == "eval" else "backward"


def _title(section: str) -> str:
    """The section as messages call it."""
    return {
        "first": "first forward",
        "eval": "forward in evaluation",
        "quiet": "backward in no_sync",
        "last_weights": "weights, last",
    }.get(section, section)


def _key(mode: str, part: Part | None) -> tuple[str, frozenset[str] | None]:
    return mode, None if part is None else part.units


def _repeated(order: Sequence[str]) -> set[str]:
    return {name for name, count in Counter(order).items() if count > 1}


class Orders:
    """The orders of one engine's units.

    Args:
        layout: bound.
        comm: over which ranks tell what they ran.
        handlers: that operations are bound to.
        overlap: how far ahead units are gathered.
        clip: what the program does to gradients before the step; None: nothing.
        stashes: whether weights that are updated are kept for micro-batches that are under way.

    Attributes:
        units: in definition order.
        roots: names of those that are held through a pass.
        late: names of those that are reduced at the end of backward, as gradients came behind their reduction.
        touched: names of those whose weights this rank's model reads outside of their forward.
        found: of ``forward`` in training, forward in evaluation (``eval``) and ``backward``; None: not known.
        meets: how the ranks along an axis of signs meet in a step: ``dense``, ``signs`` or ``local``.
        bound: what runs.
        stepped: the program of the last step, where the next one's is another; None: that of ``bound``.
        tracks: the program's sections, ready to run.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Comm,
        handlers: Handlers,
        overlap: Overlap,
        *,
        clip: Clip | None,
        stashes: bool = False,
    ) -> None:
        self._layout, self._comm, self._handlers = layout, comm, handlers
        self._options = {
            "clip": clip is not None and clip.norm is not None,
            "clamp": clip is not None and clip.value is not None,
            "stashes": stashes,
        }
        in_flight = overlap.reduces_in_flight
        if in_flight is None:
            streams = accelerator.has_streams(comm.memory.device)
            in_flight = Behaviour(streams, comm.transport.kind).reduces_in_flight
        self._overlap = replace(overlap, reduces_in_flight=in_flight)
        self.units: list[Unit] = []
        self.roots: set[str] = set()
        self.late: set[str] = set()
        self.meets, self._apart = "dense", False
        self.stepped: Program | None = None
        self.touched: set[str] = set()

    def renew(self, units: Sequence[Unit]) -> None:
        """These are the units from now on; in which order they run is to be found out."""
        self.units = list(units)
        names = {unit.name for unit in units}
        self.roots = (self.roots & names) | {unit.name for unit in units if unit.spec.root}
        self.found: dict[str, list[str] | None] = dict.fromkeys(("forward", "eval", "backward"))
        self._seen: dict[str, list[list[str]]] = {"forward": [], "eval": [], "backward": []}
        self._recordings: Counter[tuple[str, frozenset[str] | None]] = Counter()
        self.late &= names
        self.touched &= names
        self.compile()

    def part_ways(self) -> None:
        """The ranks along an axis of signs may go their own ways, and be brought together outside of a step."""
        self._apart = True
        self.compile()

    def meet(self, how: str) -> None:
        """The ranks along an axis of signs meet so in the next step."""
        if how != self.meets:
            self.meets = how
            self.compile()

    def keep_stepped(self) -> None:
        """A step is done, and the next one's program may be another."""
        self.stepped = self.bound.program

    def compile(self) -> None:
        """Binds the layout in the present orders, and every operation to its handler."""
        flags = sum(len(row) for unit in self.units for row in unit.gradients.used)
        # Of a round of asking, and of what is told in a step (see ``Handlers.told``).
        self._comm.agreement.make_room(max(2 * len(self.units) + 1, flags + len(self.units) + FLAGS))
        specs = [replace(unit.spec, root=unit.name in self.roots) for unit in self.units]
        orders = RunOrders.of(specs, self.found["forward"], self.found["backward"], self.found["eval"])
        optimizer = self._handlers.optimizer
        options: dict[str, Any] = {
            **self._options,
            "meets": self.meets,
            "apart": self._apart,
            "speculated": self._speculated(orders.backward, specs),
            "num_moments": optimizer.num_moments() if optimizer is not None else 0,
        }
        self.bound = bind(
            self._layout,
            specs,
            self._comm.mesh.sizes,
            overlap=self._overlap,
            orders=orders,
            late=self.late,
            unplaced=self._unplaced(),
            **options,
        )
        self._handlers.gather_again({name for order in orders for name in _repeated(order)})
        self.tracks = {name: self._track(name, ops) for name, ops in self.bound.sections.items()}
        self._part_tracks: dict[tuple[str, Part], Track] = {}
        self._moving = {name: any(op.verb in BESIDE for op in ops) for name, ops in self.bound.sections.items()}

    def _track(self, section: str, ops: Sequence[Op]) -> Track:
        handlers = self._handlers
        bind_op = handlers.bind_behind if section == "behind" else handlers.bind
        return Track(_title(section), ops, bind_op, waits=self.bound.waits)

    def _speculated(self, backward: Sequence[str], specs: Sequence[UnitSpec]) -> set[str]:
        """Names of the units that are updated before their step; their snapshots get memory, those of the units that
        backward is done with first, as far as there is room."""
        optimizer, mesh, room = self._handlers.optimizer, self._comm.mesh.sizes, self._overlap.snapshot_bytes
        if optimizer is None or not room:
            return set()
        by_name = {spec.name: spec for spec in specs}
        order = [by_name[name] for name in (*dict.fromkeys(backward), *sorted(self.roots))]
        moments = optimizer.num_moments()
        sizes = room_for({spec.name: snapshot_bytes(self._layout, spec, mesh, moments) for spec in order}, room)
        optimizer.snapshots.place(sizes)
        return set(sizes)

    def _unplaced(self) -> set[str]:
        """Units that no recorded backward had all gradients of."""
        found = self.found["backward"]
        return {unit.name for unit in self.units} - set(found) if found is not None else set()

    def moves(self, section: str) -> bool:
        """Whether the section sends something, or moves it between tiers."""
        return self._moving[section]

    @property
    def first_reads(self) -> Iterator[Op]:
        """What an evaluation reads from files before any module runs."""
        ops = self.tracks["eval"].ops
        return (op for op in takewhile(lambda op: op.verb not in MARKERS, ops) if op.verb == "READ")

    def unordered(self, section: str, part: Part | None = None) -> Section:
        """The section in definition order, for a pass that asks."""
        asked = self.bound.asked
        ops = of_part(section, asked[section], asked["backward"], part)
        return Section(_title(section), ops, self._handlers.bind)

    def track(self, section: str, part: Part | None = None) -> Track:
        """The section, or what of it is a pass through one stage of several."""
        if part is None:
            return self.tracks[section]
        key = section, part
        if key not in self._part_tracks:
            ops = of_part(section, self.tracks[section].ops, self.tracks["backward"].ops, part)
            self._part_tracks[key] = self._track(section, ops)
        return self._part_tracks[key]

    def stages_of(self, ran: Mapping[Hashable, Counter[str]]) -> Iterator[tuple[Program, Counter[str]]]:
        """What of the program is for each of several stages, and how often each of its sections ran, of what ran for
        parts of the model."""
        times: dict[frozenset[str], Counter[str]] = {}
        parts: dict[frozenset[str], Part] = {}
        for part, counts in ran.items():
            assert isinstance(part, Part)
            times.setdefault(part.units, Counter()).update(counts)
            if part.last or part.units not in parts:
                parts[part.units] = part
        for units, part in parts.items():
            sections = {
                name: tuple(of_part(name, self.bound.program.section(name), self.bound.program.backward, part))
                for name in ("first", "forward", "backward", "last")
            }
            yield replace(self.bound.program, **sections), times[units]

    def late_track(self, units: Sequence[Unit]) -> Track:
        """One more reduction of these units."""
        return Track("late gradients", self.bound.late({unit.name for unit in units}), self._handlers.bind)

    @property
    def numbers(self) -> dict[int, int]:
        """By the ``id`` of a parameter, the number of its unit in the order of backward; roots come last."""
        order = [op.unit for op in self.bound.program.backward if op.verb == "B" and op.unit not in self.roots]
        at = {name: i for i, name in enumerate(order)}
        return {id(p): at.get(unit.name, len(at)) for unit in self.units for _, p in unit.parameters()}

    def known(self, section: str, part: Part | None = None) -> bool:
        """Whether the section has an order that is worth following. Of each stage of a rank a pass is asked for: which
        weights its other modules read is found only there."""
        mode = mode_of(section)
        return self.found[mode] is not None and 0 < self._recordings[_key(mode, part)] <= RECORDINGS

    def forward(self) -> list[str]:
        """Roots, then the others as they run in training."""
        return [*sorted(self.roots), *self.bound.orders.forward]

    def add_late(self, units: Sequence[Unit]) -> None:
        """From the next step on these are reduced at the end of backward."""
        names = {unit.name for unit in units} - self.late
        if names:
            self.late |= names
            self.compile()

    def adopt(self, mode: str, run: NegotiatedPass, part: Part | None = None, *, whole: bool = True) -> None:
        """Makes the order of the next passes out of what each rank ran in this one, which was through that part, unless
        on some rank an exception has left it, so that it is not the ``whole`` of it.

        Raises:
            OrderError: on all ranks: two of them contradict each other.
        """
        self.touched |= {unit.name for unit in run.touched}
        if self._overlap.order == "any":
            return
        agreement = self._comm.agreement
        own = [name for name in run.own if name not in self.roots]
        mine = json.dumps([own, sorted(self.touched - self.roots), whole])
        said = [json.loads(text) for text in agreement.exchange(f"order/{agreement.sequence}", mine)]
        if not all(ended for _, _, ended in said):
            return
        held = {name for _, touched, _ in said for name in touched}
        if held:
            names = ", ".join(sorted(held))
            LOG.info("whole through each pass from now on, because other modules read their weights: %s", names)
            self.roots |= held
        orders = [[name for name in order if name not in self.roots] for order, _, _ in said]
        if mode != "backward" and (found := contradiction(orders)) is not None:
            raise OrderError(describe(*found))
        self._seen[mode] += [
            order for order in map(list, dict.fromkeys(map(tuple, orders))) if order not in self._seen[mode]
        ]
        known = [unit.name for unit in self.units]
        merged = merge_orders(self._seen[mode], known if mode != "backward" else known[::-1])
        self.found[mode] = merged if merged is not None else run.record
        self._recordings[_key(mode, part)] += 1
        self.compile()
