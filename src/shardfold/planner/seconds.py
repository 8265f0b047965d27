"""Seconds of a step: a roofline for what is computed, links for what is sent, and the program for what goes on beside.

The walk that gives bytes over time gives the operations in the order in which they begin. Three clocks follow it: that
of the computation, that of the links, and that of the copies between the device and slower tiers. A collective begins
when it is issued and the link is free; the computation waits for a unit's gather at its marker and for its sums at
their WAIT. Where the device has no streams, all of it is one clock.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from shardfold.plan.cost import fetched_bytes, op_bytes
from shardfold.plan.layout import ITEMSIZE, Tier
from shardfold.plan.placement import UnitSpec
from shardfold.plan.program import COLLECTIVES, MOVES, REDUCTIONS, Op
from shardfold.planner.hardware import Device, Link
from shardfold.planner.memory import MemoryPlan, Point, Setting
from shardfold.planner.trace import Work

__all__ = ["Seconds", "plan_seconds"]

HOST_UPDATE = 2e9
"""Parameters that a host updates per second, where it was not measured: 16 bytes each at 32 GB/s."""


class Seconds(NamedTuple):
    """Of a step on one rank.

    Attributes:
        step: all of it.
        compute: of forward and backward.
        exposed: that the computation waits for links and copies.
        update: of the optimizer.
        flops: of a step.
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
        """Part of ``rate`` that the model's operations reach, with attention's or without."""
        return (self.flops - (0.0 if attention else self.attention)) / self.step / rate


def plan_seconds(setting: Setting, plan: MemoryPlan, device: Device) -> Seconds:
    """Seconds of a step on such devices."""
    parts: dict[str, _Clocks] = {}
    for point in plan.points:
        clocks = parts.setdefault(point.part, _Clocks(setting, plan, device))
        clocks.follow(point)
    times = {"backward": setting.micro_batches - 1, "last": 1, "step": 1}
    ends = {part: clocks.end() for part, clocks in parts.items()}
    step = sum(times[part] * seconds for part, seconds in ends.items())
    compute = sum(times[part] * parts[part].computed for part in parts if part != "step")
    update = ends.get("step", 0.0)
    events = plan.trace.events
    return Seconds(
        step, compute, step - compute - update, update,
        setting.micro_batches * plan.trace.flops,
        setting.micro_batches * sum(event.work.attention for event in events),
        setting.micro_batches * plan.trace.tokens,
    )  # fmt: skip


def work_seconds(work: Work, device: Device) -> float:
    """A roofline: products at the rate of their dtype or of the memory, all else at that of the memory; no operation is
    shorter than its launch."""
    products = max(
        sum(flops / (device.rate(dtype) * device.reached) for dtype, flops in work.products),
        work.product_bytes / device.bandwidth,
    )
    return max(products + work.other_bytes / device.bandwidth, work.calls * device.launch)


class _Clocks:
    """The clocks of one rank in one part of a step."""

    def __init__(self, setting: Setting, plan: MemoryPlan, device: Device) -> None:
        self._setting, self._plan, self._device = setting, plan, device
        self._now = self._link = self._copy = 0.0
        self.computed = 0.0
        self._done: dict[tuple[str, str], float] = {}

    def follow(self, point: Point) -> None:
        """What happens at a point."""
        if point.op is not None:
            self._operation(point.op)
        elif not point.at and point.event >= 0:
            seconds = work_seconds(self._plan.trace.events[point.event].work, self._device)
            self._now += seconds
            self.computed += seconds

    def end(self) -> float:
        """When all clocks have stopped."""
        return max(self._now, self._link, self._copy)

    def _operation(self, op: Op) -> None:
        unit = self._setting.by_name.get(op.unit)
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
        elif op.verb == "UPDATE":
            for state in ("master", "moments", "grads"):
                self._wait(op.unit, state)
            self._now += self._update(op, unit)

    def _wait(self, unit: str, tensor: str) -> None:
        self._now = max(self._now, self._done.pop((unit, tensor), 0.0))

    def _send(self, op: Op, unit: UnitSpec) -> None:
        setting = self._setting
        ranks = prod(setting.mesh[axis] for axis in op.axes)
        link = self._device.far if setting.mesh.get("inter", 1) > 1 and "inter" in op.axes else self._device.near
        seconds = _sending(op_bytes(op, setting.layout, unit, setting.mesh), ranks, link, len(op.moves(unit)))
        what = "flat" if op.target == "flat" else "grads" if op.verb in REDUCTIONS else op.target
        if not self._device.streams:
            self._now += seconds
            return
        begun = max(self._link, self._now if op.target != "flat" else self._link, self._copies_of(op))
        self._link = begun + seconds
        self._done[op.unit, what] = self._link

    def _copies_of(self, op: Op) -> float:
        """When what a gather sends has come from a slower tier."""
        return self._done.get((op.unit, "flat"), 0.0) if op.target == "flat" else 0.0

    def _move(self, op: Op, unit: UnitSpec) -> None:
        setting, device = self._setting, self._device
        rate = device.disk if op.tier == Tier.DISK else device.host
        seconds = fetched_bytes(op, setting.layout, unit, setting.mesh, setting.moments) / rate
        if not device.streams:
            self._now += seconds
            return
        self._copy = max(self._copy, self._now if op.verb == "STORE" else 0.0) + seconds
        self._done[op.unit, op.target or op.source] = self._copy

    def _update(self, op: Op, unit: UnitSpec) -> float:
        setting, most = self._setting, 0.0
        for segment in unit.segments:
            if segment.trainable:
                shard = segment.length / segment.table_or(setting.layout).master.parts(setting.mesh)
                if op.tier:
                    most += shard / HOST_UPDATE
                else:
                    size = ITEMSIZE[segment.dtype_for("master", setting.layout)] * 2 * (1 + setting.moments)
                    most += (
                        shard * (size + ITEMSIZE[segment.dtype_for("grads", setting.layout)]) / self._device.bandwidth
                    )
        return most


def _sending(num_bytes: float, ranks: int, link: Link, calls: int) -> float:
    """Alpha and beta: a ring of so many ranks sends ``num_bytes`` in as many messages."""
    return num_bytes / link.rate + calls * (ranks - 1) * link.latency if num_bytes else 0.0
