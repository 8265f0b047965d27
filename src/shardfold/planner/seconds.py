"""Seconds of a step: a roofline for what is computed, links for what is sent, and the program for what goes on beside.

The walk that gives bytes over time gives the operations in the order in which they begin. Four clocks follow it: that
of the computation, that of the links, and those of the copies to slower tiers and back. A collective begins
when it is issued and the link is free; the computation waits for a unit's gather at its marker and for its sums at
their WAIT. Where the device has no streams, all of it is one clock.

The clocks are rows of numbers, one for each size of a micro-batch, so that all sizes are timed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardfold.plan.axes import Mesh
from shardfold.plan.cost import Codec, coding_seconds, fetched_bytes, op_bytes, update_bytes
from shardfold.plan.layout import ITEMSIZE, Tier
from shardfold.plan.placement import UnitSpec
from shardfold.plan.program import COLLECTIVES, MOVES, REDUCTIONS, Op
from shardfold.planner.hardware import Cluster, Device, Interconnect
from shardfold.planner.memory import MemoryPlan, Point, Setting
from shardfold.planner.trace import Trace

__all__ = [
    "MEETS",
    "Rows",
    "Schedule",
    "Seconds",
    "Way",
    "Work",
    "part_seconds",
    "plan_seconds",
    "schedule_of",
    "ways_of",
]

HOST_UPDATE = 18e9
"""Bytes of states, gradients and copies that a host goes through per second in an update, where it was not measured.
Beside an H200, with sixteen cores, steps of 102M parameters took 157 and 177 ms longer with their states in host
memory: 30 bytes of each, at 19.4 and 17.3 GB/s."""


MEETS = ("END", "VOTE", "STEP")
"""Verbs at which ranks ask each other whether all of them go on."""


class Seconds(NamedTuple):
    """Of a step on one rank.

    Attributes:
        step: all of it.
        compute: of forward and backward.
        exposed: that the computation waits for links and copies.
        update: of the optimizer.
        flops: of a step; what is recomputed counts once.
        attention: those of ``flops`` that attention does between tokens.
        tokens: of a step on one rank; 0: not known.
    """

    step: float
    compute: float
    exposed: float
    update: float
    flops: float
    attention: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.step if self.step else 0.0

    def mfu(self, rate: float, *, attention: bool = True) -> float:
        """Part of ``rate`` that the model's operations reach, with attention's or without; what is recomputed is not
        counted (PaLM, arXiv 2204.02311, appendix B)."""
        return (self.flops - (0.0 if attention else self.attention)) / self.step / rate


class Way(NamedTuple):
    """To the ranks along an axis.

    Attributes:
        link: between them.
        ranks: how many there are.
    """

    link: Interconnect
    ranks: int


class Rows(NamedTuple):
    """Seconds as :class:`Seconds` has them, for each size of a micro-batch."""

    step: np.ndarray
    compute: np.ndarray
    update: np.ndarray


Schedule = dict[str, tuple[list[tuple[int, Op]], int]]
"""By part of a step: each operation behind how many events it begins, and how many there are."""


class Work:
    """Seconds of what forward and backward compute on a device, event by event, for each size of a micro-batch.

    A roofline: products at the rate of their dtype or of the memory, all else at that of the memory. The host takes its
    time for each operation: a device with streams computes what was begun meanwhile, and waits where there is nothing;
    on one without, it comes on top.

    Args:
        device: that computes.
        few: a trace.
        more: another with more samples; None: there is one size, that of ``few``.
        at: of each size, where it is on the line from ``few``, at 0, to ``more``, at 1.
        ways: links of the axes along which layers are shared; what layers send is waited for.
    """

    def __init__(
        self,
        device: Device,
        few: Trace,
        more: Trace | None = None,
        at: np.ndarray | None = None,
        ways: Mapping[str, Way] | None = None,
    ) -> None:
        self.sizes = 1 if at is None else len(at)

        def rows(a: np.ndarray, b: np.ndarray | None) -> np.ndarray:
            if b is None or at is None:
                return a[..., None]
            return a[..., None] + (b - a)[..., None] * at

        less, other = few.works, more.works if more is not None else None
        products: Any = 0.0
        for dtype, flops in less.products.items():
            within = less.attention[dtype]
            more_flops = None if other is None else other.products.get(dtype, flops)
            more_within = None if other is None else other.attention.get(dtype, within)
            attention, rate = rows(within, more_within), device.rate(dtype) * device.reached
            products = products + (rows(flops, more_flops) - attention) / rate + attention / device.attending(dtype)
            products = products + less.product_calls[dtype][:, None] * device.call.get(dtype, 0.0)
        more_products, more_others = (None, None) if other is None else (other.product_bytes, other.other_bytes)
        products = np.maximum(products, rows(less.product_bytes, more_products) / device.bandwidth)
        products = products + rows(less.other_bytes, more_others) / (device.others or device.bandwidth)
        launches = less.calls[:, None] * device.launch
        each = products if device.streams else products + launches
        for axis, (num_bytes, calls) in less.sent.items():
            way = (ways or {}).get(axis, Way(device.near, 2))
            sent = rows(num_bytes, None if other is None else other.sent.get(axis, (num_bytes, calls))[0])
            each = each + sent / way.link.rate + calls[:, None] * (way.ranks - 1) * way.link.latency
        #: Seconds of them in which copies of activations are waited for.
        self.waits: np.ndarray = np.zeros(self.sizes)
        if less.moves is not None:
            moves = rows(less.moves, None if other is None else other.moves)
            longer = _copying(each, moves, device, device.disk if few.mode == Tier.DISK else device.host)
            each, self.waits = each + longer, longer.sum(axis=0)
        #: Up to each event, the first of which has nothing before it.
        self.until = np.concatenate((np.zeros((1, each.shape[1])), each.cumsum(axis=0)))
        if device.streams:  # an event ends when the device has done what was before it, and not before the host has
            begun = np.concatenate((np.zeros((1, 1)), launches.cumsum(axis=0)))
            self.until = self.until + np.maximum.accumulate(np.maximum(begun - self.until, 0.0), axis=0)


def _copying(each: np.ndarray, moves: np.ndarray, device: Device, rate: float) -> np.ndarray:
    """Seconds that each event takes longer, as activations are moved to another tier and back.

    Copies go one behind the other, beside the computation where there are streams. One out begins behind what made it,
    and nobody waits for it; one back begins before the event that asks for it, and is waited for where its values are
    used, which is one unit later, but for the first.

    Args:
        each: seconds of each event, by sizes ``(events, sizes)``.
        moves: bytes out, back, and that may still be under way, ``(3, events, sizes)``.
        device: that computes.
        rate: bytes per second of the tier.
    """
    out, back, lag = moves
    if not device.streams:
        return (out + back) / rate
    longer, now, copied, came = np.zeros_like(each), *np.zeros((3, each.shape[1]))
    begun: list[tuple[float, np.ndarray, np.ndarray]] = []  # bytes before, of the first size and of all; and when
    for number, seconds in enumerate(each):
        if back[number].any():
            start = np.maximum(copied, now)
            begun.append((float(came[0]), came, start))
            came, copied = came + back[number], start + back[number] / rate
        if lag[number, 0] >= 0 and begun:
            due = came - lag[number]
            _, before, start = next((one for one in reversed(begun) if one[0] < due[0]), begun[0])
            longer[number] = np.maximum(start + np.maximum(due - before, 0.0) / rate - now, 0.0)
        now = now + longer[number] + seconds
        if out[number].any():
            copied = np.maximum(copied, now) + out[number] / rate
    return longer


def ways_of(where: Cluster, mesh: Mesh, axes: Mapping[str, int]) -> dict[str, Way]:
    """Links of axes of a mesh of these devices, by name; ``axes``: their sizes."""
    return {axis: Way(where.link(mesh, axis), size) for axis, size in axes.items()}


def schedule_of(points: Iterable[Point]) -> Schedule:
    """When operations begin, by the points of a walk."""
    found: Schedule = {}
    for point in points:
        ops, done = found.get(point.part, ([], 0))
        if point.op is not None:
            ops.append((done, point.op))
        elif not point.at and point.event >= 0:
            done += 1
        found[point.part] = ops, done
    return found


def plan_seconds(setting: Setting, plan: MemoryPlan, device: Device, ways: Mapping[str, Way] | None = None) -> Seconds:
    """Seconds of a step on such devices; ``ways``: see :class:`Work`."""
    trace = plan.trace
    rows = row_seconds(
        setting, schedule_of(plan.points), device, Work(device, trace, ways=ways), np.array([setting.micro_batches])
    )
    step, compute, update = (float(each[0]) for each in rows)
    return Seconds(
        step,
        compute,
        step - compute - update,
        update,
        setting.micro_batches * trace.flops,
        setting.micro_batches * trace.attention,
        setting.micro_batches * trace.tokens,
    )


def row_seconds(setting: Setting, schedule: Schedule, device: Device, work: Work, micro_batches: np.ndarray) -> Rows:
    """Seconds of steps of so many micro-batches each."""
    ends: dict[str, np.ndarray] = {}
    known: dict[Op, float] = {}
    for part, (ops, done) in schedule.items():
        ends[part] = part_seconds(setting, ops, 0, done, device, work, known)
        if not device.streams:
            ends[part] = ends[part] + sum(_hosting(device, op) for op in _passed(setting, part, [op for _, op in ops]))
    update = ends.get("step", np.zeros(work.sizes))
    last = ends.get("last", np.zeros(work.sizes))
    step = (micro_batches - 1) * ends.get("backward", last) + last + update
    if (outer := setting.bound.layout.outer) is not None:  # the part of a step in a round
        step = step + ends.get("round", np.zeros(work.sizes)) / outer.every
    return Rows(step, micro_batches * (work.until[-1] - work.waits), update)


def _hosting(device: Device, op: Op) -> float:
    """What an operation takes the host."""
    more = device.collective if op.verb in COLLECTIVES else device.meeting if op.verb in MEETS else 0.0
    return device.operation + more


def _passed(setting: Setting, part: str, ops: Sequence[Op]) -> list[Op]:
    """Operations of a part that a walk goes past, as in their section nothing is sent or moved."""
    walked = {op.verb for op in ops}
    names = [name for verb, name in (("F", "forward"), ("B", part)) if verb not in walked]
    return [op for name in names if part in ("backward", "last") for op in setting.bound.program.section(name)]


def part_seconds(
    setting: Setting,
    ops: Iterable[tuple[int, Op]],
    start: int,
    stop: int,
    device: Device,
    work: Work,
    known: dict[Op, float],
) -> np.ndarray:
    """Seconds of a part of a step.

    Args:
        setting: of the rank.
        ops: each behind how many events it begins.
        start: the first event of the part.
        stop: the one behind the last.
        device: that computes.
        work: of the trace.
        known: gets seconds of operations that send.
    """
    clocks = _Clocks(setting, device, work, known, start)
    for events, op in ops:
        clocks.reach(events)
        clocks.do(op)
    clocks.reach(stop)
    return clocks.end()


class _Clocks:
    """The clocks of one rank in one part of a step."""

    def __init__(self, setting: Setting, device: Device, work: Work, known: dict[Op, float], start: int) -> None:
        self._setting, self._device, self._until = setting, device, work.until
        self._known = known  # seconds of what is sent
        self._now = np.zeros(work.sizes)
        self._link, self._down, self._up = self._now, self._now, self._now
        self._reached = start
        self._done: dict[tuple[str, str], np.ndarray] = {}

    def reach(self, events: int) -> None:
        """What is computed before so many events."""
        if events != self._reached:
            self._now = self._now + (self._until[events] - self._until[self._reached])
            self._reached = events

    def end(self) -> np.ndarray:
        """When all clocks have stopped."""
        return np.maximum(np.maximum(self._now, self._link), np.maximum(self._down, self._up))

    def do(self, op: Op) -> None:
        """An operation of the program."""
        unit = self._setting.bound.by_name.get(op.unit)
        if not self._device.streams:
            self._now = self._now + _hosting(self._device, op)
        if op.verb in ("F", "B"):
            self._wait(op.unit, "flat")
        elif op.verb == "WAIT":
            self._wait(op.unit, op.target)
        elif unit is None:
            return
        elif op.verb in COLLECTIVES:
            self._send(op, unit)
        elif op.verb in MOVES:
            self._move(op, unit)
        elif op.verb in ("UPDATE", "MIRROR"):
            for state in ("master", "moments", "grads") if op.verb == "UPDATE" else ():
                self._wait(op.unit, state)
            self._now = self._now + self._update(op, unit)

    def _wait(self, unit: str, tensor: str) -> None:
        if (done := self._done.pop((unit, tensor), None)) is not None:
            self._now = np.maximum(self._now, done)

    def _send(self, op: Op, unit: UnitSpec) -> None:
        setting = self._setting
        ranks = prod(setting.bound.mesh[axis] for axis in op.axes)
        link = self._device.far if setting.bound.mesh.get("inter", 1) > 1 and "inter" in op.axes else self._device.near
        seconds = self._known.get(op)
        if seconds is None:
            num_bytes = op_bytes(op, setting.bound.layout, unit, setting.bound.mesh)
            seconds = _sending(num_bytes, 2 if op.verb == "LOG" else ranks, link, len(op.moves(unit)))
            seconds = self._known[op] = seconds + self._coding(op, unit)
        what = "flat" if op.target == "flat" else "grads" if op.verb in REDUCTIONS else op.target
        if not self._device.streams:
            self._now = self._now + seconds
            return
        begun = self._link
        if op.target != "flat":
            begun = np.maximum(begun, self._now)
        elif (copied := self._done.get((op.unit, "flat"))) is not None:  # has come from a slower tier
            begun = np.maximum(begun, copied)
        self._link = begun + seconds
        self._done[op.unit, what] = self._link

    def _coding(self, op: Op, unit: UnitSpec) -> float:
        """What the formats of a collective take to encode and decode; of those that were not measured nothing."""
        measured = {name: Codec(*figures) for name, figures in self._device.codecs.items()}
        return coding_seconds(op, self._setting.bound.layout, unit, self._setting.bound.mesh, measured)

    def _move(self, op: Op, unit: UnitSpec) -> None:
        setting, device = self._setting, self._device
        rate = device.disk if op.tier == Tier.DISK else device.host
        seconds = fetched_bytes(op, setting.bound.layout, unit, setting.bound.mesh, setting.bound.num_moments) / rate
        if not device.streams:
            self._now = self._now + seconds
            return
        if op.verb == "STORE":
            self._down = done = np.maximum(self._down, self._now) + seconds
        else:  # what was updated there comes behind its update, anything else as soon as it is asked for
            self._up = done = (np.maximum(self._up, self._now) if op.source == "master" else self._up) + seconds
        self._done[op.unit, op.target or op.source] = done

    def _update(self, op: Op, unit: UnitSpec) -> float:
        setting, most = self._setting, 0.0
        layout, overlap = setting.bound.layout, setting.bound.overlap
        hosted = bool(op.tier) or not self._device.streams
        for segment in unit.segments:
            if segment.trainable:
                table = segment.table_or(layout)
                shard = segment.length / table.master.parts(setting.bound.mesh)
                master, grads = (ITEMSIZE[segment.dtype_for(name, layout)] for name in ("master", "grads"))
                copies = op.verb == "UPDATE" and table.params is not None
                copies = copies and "master" not in table.aliases(own=segment.own)
                copy = ITEMSIZE[segment.dtype] if copies else 0
                one_pass = hosted or (copies and overlap.compiled_update)
                most += shard * update_bytes(
                    master, grads, copy, setting.bound.num_moments, one_pass=one_pass, scaled=setting.clip
                )
        if hosted:  # by the host's processors
            return most / (self._device.update or (HOST_UPDATE if self._device.streams else self._device.bandwidth))
        return most / self._device.bandwidth


def _sending(num_bytes: float, ranks: int, link: Interconnect, calls: int) -> float:
    """Alpha and beta: a ring of so many ranks sends ``num_bytes`` in as many messages."""
    return num_bytes / link.rate + calls * (ranks - 1) * link.latency if num_bytes else 0.0
