"""A handler per verb: what the operations of a program do to units, wires and stores.

An operation is bound to its handler once, when a program is compiled; a running step only calls what is bound.
Handlers know how to do a thing and never when: the program says that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.agreement import Agreement
from shardfold.errors import ConfigError, NonFiniteError
from shardfold.gradients import Gradients
from shardfold.layout import DATA_AXES, Layout, Tier
from shardfold.mesh import DataMesh
from shardfold.meter import Meter
from shardfold.numerics.clipping import Clip, clip_coefficient, norm_of, norm_part
from shardfold.numerics.scaling import Scaler, all_finite
from shardfold.optim.link import RankLink
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.passes import Schedule
from shardfold.program import MARKERS, Op
from shardfold.segment import Segment
from shardfold.stores.device import DeviceStore
from shardfold.unit import Life, Unit
from shardfold.wires.choice import data_wire
from shardfold.wires.plain import Pending, drain

__all__ = ["Actions", "check_supported"]


class Actions:
    """The handlers of one engine.

    Attributes:
        detours: names of units to be freed at the end of the pass or of their forward: gathered out of order, or
            needed longer than the program thought.
        backward_follows: whether the forward under way is one of training.
        grad_norm: 0-d tensor, the last NORM's result; None if the program takes none.
        scale: 1 / (ranks * micro-batches), which gradients are multiplied by as they arrive.
        coefficient: 0-d tensor that this step's gradients are multiplied by; None: they are not.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: DataMesh,
        units: Sequence[Unit],
        store: DeviceStore,
        agreement: Agreement,
        optimizer: ShardedOptimizer | None,
        clip: Clip | None,
        scale: float,
        timing: Schedule,
        loss_scale: Scaler | None = None,
    ) -> None:
        self.layout, self.mesh, self.store, self.agreement = layout, mesh, store, agreement
        self.units = {unit.name: unit for unit in units}
        self.optimizer = optimizer
        self.clip = clip
        self.wire = data_wire(
            mesh.backend, store.device, mesh.groups(), mesh.rank, empty=store.empty, recycle=store.recycle,
            exchange=agreement.exchange, waiter=agreement.wait,
        )  # fmt: skip
        self.meter = Meter(mesh)
        if optimizer is not None:
            optimizer.connect(RankLink(mesh, layout.master.over, agreement, self.wire, self.meter))
        self.detours: set[str] = set()
        self.backward_follows = True
        self.grad_norm: Tensor | None = None
        self.coefficient: Tensor | None = None
        self.scale, self.loss_scale = scale, loss_scale
        self.lifted = 1.0  # the loss scale that gradients have until they are unscaled
        self._part: Tensor | None = None  # of the norm, where looking for overflows has summed it already
        self._overlap = (
            (store.device.type == "cuda") if timing.reduces_in_flight is None else timing.reduces_in_flight > 0
        )
        self._sending: Gradients | None = None  # of the unit whose gradients are on their way
        self.set_factors()

    def renew(self, units: Sequence[Unit]) -> None:
        """These are the units from now on."""
        self.units = {unit.name: unit for unit in units}
        self.wire.forget()
        self.detours.clear()
        self._sending = None
        self.set_factors()

    def set_factors(self, share: float = 1.0) -> None:
        """[Note: where gradients are unscaled] As they arrive they are cast to what they travel in and multiplied by
        1 / (ranks * micro-batches * loss scale): everything that reads them later sees true values. Only where they
        travel or accumulate in fp16, which could not hold those, do they stay scaled until the update. ``share``
        multiplies those that have arrived."""
        self._part = None  # sums of another factor
        self.lifted = scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        for unit in self.units.values():
            for segment in unit.trainable:
                late = torch.float16 in (segment.dtypes["reduce"], segment.dtypes["grads"])
                segment.factor = self.scale if late else self.scale / scale
                segment.unscale = share / scale if late else share

    def bind(self, section: str, op: Op) -> Callable[[], None] | None:
        if op.verb in MARKERS:
            return None
        if op.verb == "NORM":
            return self.norm
        unit = self.units[op.unit]
        if op.verb == "ALL_GATHER":
            if section == "step":
                return partial(self.gather_updated, unit, op)
            held = self.layout.held is not None and section != "forward"
            return partial(self.gather, unit, op, held)
        handlers: dict[str, Callable[..., None]] = {
            "CAST": self.cast,
            "FREE": self.free,
            "HOLD": self.hold,
            "UPDATE": self.update,
        }
        if op.verb in handlers:
            return partial(handlers[op.verb], unit)
        return partial(self.reduce, unit, op)

    # -- parameters

    def finish_gather(self, unit: Unit) -> None:
        unit.end_gather(self.agreement.wait)

    def cast(self, unit: Unit) -> None:
        if unit.pins or unit.life is not Life.RESTING:
            return
        unit.begin_gather()
        with self.store.side(), torch.no_grad():
            for segment in unit.segments:
                segment.fill_own_range()

    def gather(self, unit: Unit, op: Op, held: bool) -> None:
        if unit.pins:
            return
        again = unit.life is Life.GATHERED
        if unit.life is Life.RESTING:
            unit.begin_gather()
            with self.store.side(), torch.no_grad():
                for segment in unit.segments:
                    if held and segment.held is not None and segment.held_range is not None:
                        segment.flat[segment.held_range[0] : segment.held_range[1]].copy_(segment.held)
                    else:
                        segment.fill_own_range()
        for segment in unit.segments:
            lasting = segment.rest if not held and segment.split else None
            self._collective(op, segment.flat, pending=unit.filling, lasting=lasting)
        if again:
            drain(unit.filling, self.agreement.wait)

    def hold(self, unit: Unit) -> None:
        if not self.backward_follows:
            return
        if unit.life is Life.GATHERING:
            self.finish_gather(unit)
        with torch.no_grad():
            for segment in unit.segments:
                if segment.held is not None and segment.held_range is not None:
                    segment.held.copy_(segment.flat[segment.held_range[0] : segment.held_range[1]])

    def free(self, unit: Unit) -> None:
        if unit.life is Life.GATHERING:
            self.finish_gather(unit)
        if unit.pins or unit.running:  # held by gathered(), or called from inside another unit: freed later
            self.detours.add(unit.name)
        elif unit.life is Life.GATHERED and unit.split:
            unit.release()

    def release_detours(self) -> None:
        """At the end of a pass: what was kept longer than the program thought is given back."""
        for name in sorted(self.detours):
            self.free(self.units[name])
        self.detours.clear()

    def accept(self, unit: Unit, place: tuple[int, int], grad: Tensor) -> None:
        """Takes a gradient."""
        unit.gradients.accept(place, grad, self._sending, self.agreement.wait)

    def reduce(self, unit: Unit, op: Op) -> None:
        """Sends a unit's gradients; an all-reduce behind a reduce-scatter goes on with what that gave."""
        gradients = unit.gradients
        if self._sending is not gradients and self._sending is not None:  # those of one unit at a time
            self._sending.arrive(self.agreement.wait)
        self._sending = gradients
        collective = partial(self._collective, op, pending=gradients.sending)
        if op.verb == "ALL_REDUCE" and self.layout.master.over:
            gradients.send_scattered(collective, self.agreement.wait)
            return
        gradients.send(collective if op.verb == "REDUCE_SCATTER" else None, collective)
        if not self._overlap:
            gradients.arrive(self.agreement.wait)

    def _collective(
        self,
        op: Op,
        flat: Tensor,
        *,
        pending: list[Pending],
        out: Tensor | None = None,
        add: bool = False,
        lasting: Tensor | None = None,
    ) -> None:
        """Hands one flat to the wire and counts what this rank sends."""
        self.agreement.issue(op)
        group = self.mesh.group(op.axes)
        if op.verb != "ALL_GATHER":
            self.store.after_compute()
        with self.store.side():
            if op.verb == "ALL_GATHER":
                pending.append(self.wire.all_gather(flat, group, lasting=lasting))
            elif op.verb == "REDUCE_SCATTER":
                assert out is not None
                pending.append(self.wire.reduce_scatter(flat, out, group, add=add))
            else:
                pending.append(self.wire.all_reduce(flat, group))
        self.meter.count(op, flat)

    def overflowed(self) -> bool:
        """Whether a gradient of this rank's shards is inf or NaN; where a norm is taken, out of the norm's own sums."""
        if self.clip is not None and self.clip.norm is not None:
            self._part = self._norm_part(self.clip.p)
            if bool(torch.isfinite(self._part)):
                return False
        return not all_finite([segment.master_grads for segment in self._trainable()])

    def _trainable(self) -> Iterator[Segment]:
        return (segment for unit in self.units.values() for segment in unit.trainable)

    def _norm_part(self, p: float) -> Tensor:
        by_unscale: dict[float, list[Tensor]] = {}
        for segment in self._trainable():
            by_unscale.setdefault(segment.unscale, []).append(segment.master_grads)
        total = torch.zeros((), dtype=torch.float64, device=self.store.device)
        for unscale, flats in by_unscale.items():
            part = norm_part(flats, p, self.store.device)
            total = torch.maximum(total, part * unscale) if p == inf else total + part * unscale**p
        return total

    def norm(self) -> None:
        """Raises:
        NonFiniteError: the norm is inf or NaN and ``Clip.error_if_nonfinite`` is set.
        """
        clip = self.clip
        assert clip is not None and clip.norm is not None
        total = self._part if self._part is not None else self._norm_part(clip.p)
        self._part = None
        axes = self.layout.master.over
        if axes:
            self.agreement.issue("the sum of norms")
            how = dist.ReduceOp.MAX if clip.p == inf else dist.ReduceOp.SUM
            self.agreement.wait(dist.all_reduce(total, how, group=self.mesh.group(axes), async_op=True))
            self.meter.control(total.nbytes)
        self.grad_norm = norm_of(total, clip.p)
        if clip.error_if_nonfinite and not bool(torch.isfinite(self.grad_norm)):
            raise NonFiniteError(
                f"the norm of all gradients is {float(self.grad_norm)} and Clip(error_if_nonfinite=True): nothing was "
                "updated; engine.zero_grad() drops these gradients."
            )
        self.coefficient = clip_coefficient(self.grad_norm, clip.norm) if clip.norm < inf else None

    def clip_values(self) -> None:
        """Cuts every element of this rank's gradients to the range of ``Clip.value``."""
        assert self.clip is not None and self.clip.value is not None
        for segment in self._trainable():
            limit = self.clip.value / segment.unscale
            segment.master_grads.clamp_(-limit, limit)

    def update(self, unit: Unit) -> None:
        assert self.optimizer is not None
        with torch.no_grad():
            self.optimizer.update(unit)

    def gather_updated(self, unit: Unit, op: Op) -> None:
        self.store.after_compute()
        for segment in unit.trainable:
            assert segment.rest is not None
            self._collective(op, segment.rest, pending=unit.filling)

    # -- agreement

    def agree_on_use(self, *flags: bool) -> tuple[dict[str, list[list[bool]]], list[Unit], list[bool]]:
        """Which parameters any rank used in this step, which units have late gradients on any rank, and which of the
        ``flags`` any set."""
        mine = [flag for unit in self.units.values() for flags in unit.gradients.used for flag in flags]
        mine += [unit.gradients.unsent for unit in self.units.values()]
        mine += flags
        if self.mesh.world > 1:
            bits = torch.tensor(mine, dtype=torch.uint8)
            self.agreement.issue("the agreement on used parameters")
            work = dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.mesh.control, async_op=True)
            self.agreement.wait(work, control=True)
            self.meter.control(bits.nbytes)
            mine = [bool(bit) for bit in bits.tolist()]
        bit = iter(mine)
        rows = {unit.name: unit.gradients.used for unit in self.units.values()}
        used = {name: [list(itertools.islice(bit, len(row))) for row in of] for name, of in rows.items()}
        late = [unit for unit in self.units.values() if next(bit)]
        return used, late, list(bit)

    def control(self, values: list[float], op: Any) -> list[float]:
        """A few numbers reduced over all ranks, on the host."""
        if self.mesh.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        self.agreement.issue("a control message")
        work = dist.all_reduce(tensor, op, group=self.mesh.control, async_op=True)
        self.agreement.wait(work, control=True)
        self.meter.control(tensor.nbytes)
        return tensor.tolist()


def check_supported(layout: Layout) -> None:
    """Refuses bound tables that can be planned with but that this version does not run.

    Raises:
        ConfigError: with one sentence.
    """
    for name, cell in layout.cells().items():
        if len(cell.over) > 1 and cell.over != tuple(axis for axis in DATA_AXES if axis in cell.over):
            raise ConfigError(
                f"{name} is split over {'+'.join(cell.over)}; this version splits over {'+'.join(DATA_AXES)} in that "
                "order only."
            )
        if cell.tier is not Tier.DEVICE:
            raise ConfigError(
                f"{name} rests in the {cell.tier} tier, which this version's engine does not have; use device."
            )
    if layout.moments.dtype != layout.master.dtype:
        raise ConfigError(
            f"moments are {layout.moments.dtype} but master is {layout.master.dtype}: "
            "this version updates both in one dtype; make them equal."
        )
