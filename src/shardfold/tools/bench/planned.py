"""Peaks as planned beside peaks as measured: live storages of real steps, on real ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfold.activations.saved_tensors import Movers
from shardfold.engine import hooks
from shardfold.engine.engine import Engine
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.lifetimes import CPU
from shardfold.planner.division import Division
from shardfold.planner.live import LiveBytes
from shardfold.planner.memory import MemoryPlan
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.planner.trace import SMALL
from shardfold.planner.tracing import Compute, loss_of
from shardfold.torch_internals import no_subclass_functions, storage_key, tree_iter

__all__ = ["Comparison", "WatchedBytes", "compare", "inside_hooks", "measured_peak"]


class Comparison(NamedTuple):
    """Bytes of one rank at the peak of a step, with what rests in host memory, which on the CPU is the same.

    Attributes:
        planned: by the program and the trace.
        measured: of live storages.
        plan: that planned.
    """

    planned: float
    measured: float
    plan: MemoryPlan

    @property
    def error(self) -> float:
        """How much more was planned, as a part of what was measured."""
        return self.planned / self.measured - 1


class WatchedBytes(LiveBytes):
    """With what lives between steps, and flats, whose memory comes and goes; ``apart``: tensors that do not count;
    ``others``: engines whose states count too."""

    def __init__(
        self, engine: Engine, batch: Any, apart: Iterable[Tensor] = (), *, others: Iterable[Engine] = ()
    ) -> None:
        engines = [engine, *others]
        segments = [s for each in engines for unit in each.units for s in unit.segments]
        self._flats = {storage_key(s.flat.untyped_storage()): s.flat for s in segments if s.split}
        resting = [tensor for each in engines for tensor in _resting(each)]
        buffers = [buffer for each in engines for buffer in each.module.buffers()]
        self._still = _unique([*resting, *buffers, *tree_iter(batch)], self._flats)
        self._rest = sum(self._still.values()) - sum(map(_vacated, engines))
        with no_subclass_functions():
            parameters = [parameter for each in engines for parameter in each.module.parameters()]
            beside = [*apart, *resting, *self._flats.values(), *buffers, *parameters]
            super().__init__([*beside, *(v for v in tree_iter(batch) if isinstance(v, Tensor))])
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_subclass_functions():  # a parameter that is freed would refuse
            for value in tree_iter((args, kwargs)):
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    self._meet(value.untyped_storage())
            out = super().__torch_dispatch__(func, types, args, kwargs)
        flats = sum(flat.untyped_storage().nbytes() for flat in self._flats.values())
        self.most = max(self.most, self._rest + flats + self.mark())
        return out


def _resting(engine: Engine) -> list[Tensor]:
    """What of its states rests in memory of its own."""
    found = [r.resting for s in engine.sharded.segments() for r in s.regions.values() if r.resting is not None]
    if isinstance(engine.sharded.updater, ShardedOptimizer):
        found += [r.resting for r in engine.sharded.updater.regions() if r.resting is not None]
    room: Tensor | None = getattr(engine.sharded.comm.transport, "room", None)
    if room is not None:  # a thread of the transport's may have made it, whose operations are not seen
        found.append(room)
    return found


def _unique(values: Iterable[Any], without: Mapping[int, Tensor]) -> dict[int, int]:
    storages = [v.untyped_storage() for v in values if isinstance(v, Tensor) and v.layout is torch.strided]
    return {storage_key(s): s.nbytes() for s in storages if storage_key(s) not in without}


def _vacated(engine: Engine) -> int:
    """Bytes of gradients at rest that have no pages, as the tensors that autograd made are used in their place."""
    if engine.mesh.world > 1 or engine.accumulate > 1:
        return 0
    return sum(
        slot.numel * s.gradient_flat.itemsize
        for unit in engine.units
        for s in unit.trainable
        if s.gradient_flat is not None and s.gradient_flat.dtype == s.dtype and not s.table.buffered
        for slot in s.spec.slots
        if slot.numel * s.gradient_flat.itemsize > SMALL
    )


@contextmanager
def inside_hooks() -> Iterator[None]:
    """Modes see what the engine does in its hooks, too, which it hides from those of users."""
    own, moved = hooks.without_user_modes, Movers.apart
    hooks.without_user_modes, Movers.apart = nullcontext, lambda self: nullcontext()
    try:
        yield
    finally:
        hooks.without_user_modes, Movers.apart = own, moved


def measured_peak(engine: Engine, batch: Any, compute: Compute, steps: int = 3) -> int:
    """The most bytes of live storages in a step of this rank."""

    staged = bool(engine.mesh.sizes.stages)

    def step() -> None:
        if staged:
            engine.train_batch([batch] * engine.accumulate, compute)
        for _ in range(0 if staged else engine.accumulate):
            loss = compute(engine, batch)  # type: ignore[arg-type]
            engine.backward(loss)
            del loss
        engine.step()

    for _ in range(3):  # orders are found, and what is made once is made
        step()
    gc.collect()
    watched = WatchedBytes(engine, batch)
    peaks: list[int] = []
    with watched, inside_hooks():
        for _ in range(steps):
            step()
            peaks.append(watched.most)
            watched.most = 0
    return max(peaks[1:])


def compare(
    build: Callable[[], nn.Module],
    batch: Any,
    *,
    layout: str | Layout,
    precision: str | Precision,
    mode: str = "keep",
    compute: Compute = loss_of,
    accumulate: int = 1,
    clip_norm: float | None = None,
    real: bool | None = None,
    division: Division | None = None,
    subject: Callable[[Division], Subject] | None = None,
    **more: Any,
) -> Comparison:
    """On every rank: plans the model, then trains it for some steps.

    ``division``: how ranks share the model, as ``more`` says it to the engine. ``subject``: gives that of a division,
    whose traces other comparisons use, too.
    """
    model = build()
    engine = Engine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        layout=layout,
        precision=precision,
        activations=mode,
        accumulate=accumulate,
        clip_norm=clip_norm,
        **more,
    )
    try:
        measured = measured_peak(engine, batch, compute)
        mesh, coords = engine.mesh.sizes, engine.mesh.coords
    finally:
        engine.close()
    division = division or Division()
    division = replace(division, stage=sum(coords[axis] for axis in mesh.stages))
    planned = subject(division) if subject else Subject(build(), batch, compute, real=real, division=division)
    clip = clip_norm is not None
    rank = PlannedRank(mesh=mesh.axes, precision=precision, micro_batches=accumulate, clip=clip, behaviour=CPU)
    _, plan = rank.plan(planned, layout, mode)
    return Comparison(plan.peak + plan.tiers.get(Tier.HOST, 0.0), measured, plan)
