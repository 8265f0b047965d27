"""A rank that is planned for, and what its engine would bind for a model: its units, its orders, its program.

No process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import floor, inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardfold.errors import ConfigError, ModelError
from shardfold.optim.parts import PartOptimizer, ShardPlacement
from shardfold.parallel.pipeline.parts import parts_of
from shardfold.parallel.pipeline.stages import Stages
from shardfold.plan import presets
from shardfold.plan.axes import Axis, Mesh
from shardfold.plan.bind import RunOrders, bind
from shardfold.plan.cost import resting_bytes, tier_bytes
from shardfold.plan.layout import ITEMSIZE, Layout, Precision, Tier
from shardfold.plan.lifetimes import CPU, GPU, Behaviour
from shardfold.plan.placement import SegmentSpec, UnitSpec
from shardfold.plan.rewrites import Overlap
from shardfold.plan.rules import Rules
from shardfold.plan.walk import Part
from shardfold.planner._gpu_kernels import gpu_kernels
from shardfold.planner._stage_traces import StageTraces
from shardfold.planner.division import UNDIVIDED, Division
from shardfold.planner.given import check_given, check_trains, hollow, hollow_values
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import MemoryPlan, Setting, plan_memory
from shardfold.planner.moved import MOVED, SMALLEST
from shardfold.planner.repeats import Folded, fold
from shardfold.planner.staged import in_order, stages_of
from shardfold.planner.trace import Lane, Sends, Trace
from shardfold.planner.tracing import MODES, Compute, Moving, loss_of, runs_with_memory, trace_model
from shardfold.sharding.partition import Cut, cut
from shardfold.torch_internals import tree_iter

__all__ = ["PlannedRank", "Subject", "mesh_of"]


_META = torch.device("meta")
LINE = 2, 4
"""Samples of the two micro-batches that others are found by. (Of one sample, some tensors lie otherwise.)"""


def mesh_of(given: Mapping[str, int] | Sequence[Axis]) -> Mesh:
    """Axes as an engine takes them; ``inter`` and ``intra`` are there in any case."""
    if not isinstance(given, Mapping):
        return Mesh(given)
    return Mesh.of({"inter": 1, "intra": 1} | dict(given))


def _for(table: Layout, given: Mapping[str, int] | Sequence[Axis]) -> Mesh:
    """The mesh that an engine with this table has: the groups of one axis may come together now and then only."""
    return Mesh(mesh_of(given).axes, table.rare, meets=bool(table.signs))


def _on_meta(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


@dataclass
class Subject:
    """A model that is planned for, and a micro-batch of it.

    Attributes:
        model: with or without memory; it stays as it is.
        batch: a micro-batch as ``compute`` takes it.
        compute: gives the loss.
        units: as of the engine.
        real: see :func:`~shardfold.planner.tracing.trace_model`.
        division: how ranks share the model, besides its states.
        optimizer: makes that of the model, of which nothing but its groups and what it keeps is asked; None: one of
            moments of each element.
        beside: a model that another engine of the run has under the same table, and does not train.
    """

    model: nn.Module
    batch: Any
    compute: Compute = loss_of
    units: Sequence[str | type[nn.Module]] | None = None
    real: bool | None = None
    division: Division = UNDIVIDED
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    beside: Subject | None = None

    def __post_init__(self) -> None:
        check_given(self.model, self.batch)
        self.hollow: nn.Module = hollow(self.model, _on_meta, {})
        #: Of the ranks that share one model.
        self.mesh: Mesh = self.division.over({"inter": 1, "intra": self.division.ranks})
        self._stages = stages_of(self.hollow, self.division, _META) if self.division.pipeline > 1 else None
        if self.division.axes:
            self.division.cut(self.hollow, self.mesh)
        self._made = self.optimizer(self.hollow) if self.optimizer is not None else None
        self._traces: dict[tuple[Precision, str, int, float], Trace] = {}
        self._smallest: float = SMALLEST  # bytes of the smallest tensor that is moved
        self._cuts: dict[Any, tuple[Rules, list[Cut]]] = {}
        #: Traces of the stages of the rank that is planned for, by number.
        self.stages: dict[int, StageTraces] = {}
        self._alone: dict[tuple[Precision, str, int, Lane], Trace] = {}
        self._parts: dict[int, Part] = {}
        if self._stages is not None:
            self._stages.drop_foreign()
            self._take_stages(self._stages)
        self._folded: Folded | None = None
        self._whole = False  # all blocks are traced
        self._own_kernels = self.real is None and self._has_kernels_of_its_own()
        self._real = True if self._own_kernels else self.real
        leaves = [v for v in tree_iter(self.batch) if isinstance(v, Tensor) and v.dim()]
        #: Samples in ``batch``.
        self.samples = leaves[0].shape[0] if leaves else 1

    @property
    def ranks(self) -> list[Subject]:
        """As each rank has it: itself, or one for each place along the axis of stages."""
        division = self.division
        return [
            self if place == division.stage else replace(self, division=replace(division, stage=place))
            for place in range(division.pipeline)
        ]

    @property
    def staged(self) -> str:
        """The stages of the rank that is planned for, in words; empty: there are none."""
        *most, last = [*map(str, self.stages)] or [""]
        return f"stages {', '.join(most)} and {last}" if most else f"stage {last}" if last else ""

    def _has_kernels_of_its_own(self) -> bool:
        """Whether a CPU computes in kernels whose workspaces only a run with memory shows, as those of an LSTM; large
        models are run without all the same."""
        return (
            not self.division.streams
            and any(isinstance(module, nn.LSTM) for module in self.hollow.modules())
            and runs_with_memory(self.hollow, self.batch)
        )

    def _take_stages(self, stages: Stages) -> None:
        units = self.units
        if len(stages.own) > 1:  # as the rank has them
            _, cuts = self.cuts(presets.ddp, Precision.named("fp32"), self.mesh)
            roots = [c.name for c in cuts if c.spec is not None and c.spec.root]
            self._parts = parts_of(stages, {c.name: c.modules for c in cuts}, roots, self.division.order)
        for number in stages.own:
            if self._parts:
                units = sorted(self._parts[number].units)
            self.stages[number] = StageTraces(
                self.model, self.rows, self.compute, units, self.division, number, self._connect
            )

    def cuts(
        self, table: Layout, precision: Precision, mesh: Mesh, overlap: Overlap | None = None
    ) -> tuple[Rules, list[Cut]]:
        """The units on a mesh, and the rules that they follow; None: each block is a unit, as a trace has them."""
        bucket = overlap.bucket_bytes if overlap is not None else 0
        key = table, precision, mesh.axes, bucket
        if key not in self._cuts:
            rules = Rules(precision, table, mesh)
            groups = {id(p): 0 for p in self.hollow.parameters() if p.requires_grad}
            if self._made is not None:
                every = enumerate(self._made.param_groups)
                groups |= {id(p): number for number, group in every for p in group["params"]}
            self._cuts[key] = rules, cut(self.hollow, self.units, groups, rules, mesh, bucket=bucket)
        return self._cuts[key]

    def resting(
        self, layout: str | Layout, precision: str | Precision, mesh: Mapping[str, int] | Sequence[Axis], moments: int
    ) -> dict[Tier, float]:
        """Bytes at rest on one rank, by tier: states, and the model's buffers on the device."""
        sizes = _for(presets.named(layout), mesh)
        rules, cuts = self.cuts(presets.named(layout), Precision.named(precision), sizes, Overlap())
        specs = [c.spec for c in cuts if c.spec is not None]
        found = tier_bytes(resting_bytes(rules.layouts[-1], specs, sizes, num_moments=moments, padded=True))
        buffers = self._buffer_bytes(Precision.named(precision))
        return {**found, Tier.DEVICE: found.get(Tier.DEVICE, 0.0) + buffers}

    def trace(
        self,
        precision: str | Precision = "fp32",
        mode: str = "keep",
        samples: int | None = None,
        *,
        exact: bool = False,
    ) -> Trace:
        """One micro-batch on one rank, of so many samples; None: as ``batch`` has.

        What forward and backward hold is a number of bytes and as many more for each sample, so of large micro-batches
        it is found on the line through those of 2 and of 4; not where ``exact``, nor in modes that move what is large.
        """
        policy, samples = Precision.named(precision), self.samples if samples is None else samples
        key = policy, mode, samples, self._smallest
        if key not in self._traces:
            on_line = samples > 4 and not exact and self.samples > 1 and mode not in MOVED
            if on_line:
                few, more = (self.trace(policy, mode, n) for n in LINE)
                on_line = [event[:2] for event in few.events] == [event[:2] for event in more.events]
                if on_line:
                    self._traces[key] = few.between(more, (samples - LINE[0]) / (LINE[1] - LINE[0]))
            if not on_line:
                self._traces[key] = self._found(policy, mode, samples)
        return self._traces[key]

    def line(self, precision: str | Precision, mode: str) -> tuple[Trace, Trace]:
        """The traces of as many samples as :data:`LINE` has, through which those of others lie.

        What is moved is what is as large with the most of them, and in the same way large with fewer. With more samples
        something smaller may be moved, too: it counts as kept.
        """
        found: list[Trace] = []
        before = self._smallest
        for samples in LINE:
            self._smallest = before * samples / LINE[1] if mode in MOVED else before
            try:
                found.append(self.trace(precision, mode, samples))
            finally:
                self._smallest = before
        return found[0], found[1]

    @property
    def _moving(self) -> Moving:
        return Moving(self.division.streams, self._smallest)

    def _found(self, policy: Precision, mode: str, samples: int) -> Trace:
        check_trains(self.model)
        if self._stages is not None:
            return self.in_order(policy, mode, samples, self.division.micro_batches)
        with self._kernels():
            return self._few_blocks(policy, mode, samples) or self._all_blocks(policy, mode, samples)

    def _kernels(self) -> AbstractContextManager[Any]:
        """Whatever traces keeps what the kernels of the device keep."""
        return gpu_kernels() if self.division.streams else nullcontext()

    def alone(self, precision: str | Precision, mode: str, samples: int, lane: Lane) -> Trace:
        """A forward and a backward of one micro-batch in a stage of the rank that is planned for; :meth:`trace` has
        those of all micro-batches in their order."""
        if mode not in MODES:
            raise ConfigError(f"activations={mode!r}: a plan follows {', '.join(MODES)}.")
        if mode in MOVED:
            raise ConfigError(
                f"an axis of pipeline does not go with activations={mode!r}: 'keep', 'recompute' and 'select' do."
            )
        policy = Precision.named(precision)
        if (key := (policy, mode, samples, lane)) not in self._alone:
            try:
                with self._kernels():
                    found = self.stages[lane.stage].trace(policy, mode, samples, lane)
            except ModelError:
                if samples != self.samples:  # where it does not train on the user's own either, that one is named
                    _ = self.alone(policy, mode, self.samples, lane)
                raise
            self._alone[key] = replace(found, buffers=self._buffer_bytes(policy))
        return self._alone[key]

    def in_order(self, precision: str | Precision, mode: str, samples: int, micro_batches: int) -> Trace:
        """The trace of so many micro-batches of a step on the rank that is planned for.

        Raises:
            ConfigError: the order has not so many.
        """
        division = replace(self.division, micro_batches=micro_batches)
        return in_order(partial(self.alone, precision, mode, samples), division, self._parts)

    def _buffer_bytes(self, policy: Precision) -> float:
        narrow = ITEMSIZE[policy.compute] if policy.buffers == "compute" else 0
        return float(
            sum(b.numel() * (narrow if narrow and b.is_floating_point() else b.itemsize) for b in self.hollow.buffers())
        )

    def _all_blocks(self, policy: Precision, mode: str, samples: int) -> Trace:
        _, cuts = self.cuts(presets.ddp, policy, self.mesh)
        why = {"zeros": "its layers have workspaces that are seen in no other run"} if self._own_kernels else {}
        try:
            return self._traced(self.hollow, cuts, samples, precision=policy, mode=mode, real=self._real, **why)
        except ModelError:
            if samples != self.samples:  # where it does not train on the user's own either, that one is named
                _ = self._found(policy, mode, self.samples)
            raise

    def _traced(self, model: nn.Module, cuts: Sequence[Cut], samples: int, **how: Any) -> Trace:
        connect = self._connect if self.division.axes else None
        return trace_model(
            model, cuts, self.rows(samples), compute=self.compute, connect=connect, moving=self._moving, **how
        )

    def _connect(self, model: nn.Module, batch: Any, sent: list[Sends]) -> tuple[Any, Callable[[], None]]:
        return self.division.connect(model, self.mesh, batch, sent)

    def _few_blocks(self, policy: Precision, mode: str, samples: int) -> Trace | None:
        """The trace by some of the blocks that are alike; None: there are not so many, or they differ."""
        rules, cuts = self.cuts(presets.ddp, policy, self.mesh)
        units = [c.name for c in cuts if c.spec is not None and not c.spec.root]
        if self._real is not None or self._whole:
            return None
        if self._folded is None:
            self._folded = fold(self.hollow, units)
            self._whole = self._folded is None
        folded = self._folded
        if folded is None:
            return None
        groups = {id(p): 0 for p in folded.model.parameters() if p.requires_grad}
        kept = [name for unit in units if (name := folded.kept(unit)) is not None]
        try:
            cuts = cut(folded.model, kept, groups, rules, self.mesh)
            few = self._traced(folded.model, cuts, samples, precision=policy, mode=mode, real=False)
        except Exception:  # a model that goes by the number of its blocks: all of them are traced
            few = None
        found = few and folded.unfolded(few)
        if found is None:
            self._whole = True
            return None
        return replace(found, buffers=self._buffer_bytes(policy))

    def rows(self, samples: int) -> Any:
        """A micro-batch of so many samples: of tensors whose first dimension is that of ``batch``."""
        if samples == self.samples:
            return self.batch

        def resized(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            shape = tuple(tensor.shape)
            if shape[:1] == (self.samples,):
                shape = (samples, *shape[1:])
            return torch.empty(shape, dtype=dtype, device="meta")

        return hollow_values(self.batch, resized)

    def setting(
        self,
        trace: Trace,
        *,
        layout: str | Layout = "zero3",
        precision: str | Precision = "fp32",
        mesh: Mapping[str, int] | Sequence[Axis] = (),
        overlap: Overlap | None = None,
        micro_batches: int = 1,
        moments: int = 2,
        clip: bool = False,
        behaviour: Behaviour = CPU,
    ) -> Setting:
        """What an engine with these arguments binds; orders of units are those of the trace."""
        sizes = _for(presets.named(layout), mesh or {})
        beside = {} if self.beside is None else self.beside.resting(layout, precision, mesh or {}, 0)
        overlap = overlap or Overlap()
        rules, cuts = self.cuts(presets.named(layout), Precision.named(precision), sizes, overlap)
        layout = rules.layouts[-1]
        trace = trace.joined(c.spec for c in cuts)
        specs = [replace(s, root=s.root or s.name in trace.touched) for c in cuts if (s := c.spec) is not None]
        if overlap.reduces_in_flight is None:
            overlap = replace(overlap, reduces_in_flight=behaviour.reduces_in_flight)
        split = any(segment.comes_and_goes(layout) for s in specs for segment in s.segments)
        back, onward = trace.backward_order(split=split), trace.forward_order if split else None
        orders = RunOrders.of(specs, onward, back, onward)

        bound = bind(
            layout,
            specs,
            sizes,
            overlap=overlap,
            orders=orders,
            num_moments=moments,
            clip=clip,
            unplaced={spec.name for spec in specs} - set(back),
        )
        kept = _kept(self._made, layout, specs, sizes) if isinstance(self._made, PartOptimizer) else None
        return Setting(
            bound=bound, micro_batches=micro_batches, clip=clip, behaviour=behaviour, kept=kept, beside=beside
        )


def _kept(
    optimizer: PartOptimizer, layout: Layout, units: Sequence[UnitSpec], mesh: Mesh
) -> Callable[[SegmentSpec], float]:
    """What an optimizer keeps of a segment."""
    parts: list[tuple[dict[str, Any], int, ShardPlacement]] = []
    segments: list[SegmentSpec] = []
    for segment in (each for unit in units for each in unit.segments if each.trainable):
        size = segment.length // segment.table_or(layout).master.parts(mesh)
        for slot in segment.slots:
            bounds = [(low - slot.offset, low + size - slot.offset) for low in range(0, segment.length, size)]
            shares = [(max(a, 0), min(b, slot.numel)) for a, b in bounds]
            place = ShardPlacement(slot.shape, tuple((a, b) if a < b else (0, 0) for a, b in shares))
            itemsize = ITEMSIZE[segment.dtype_for("moments", layout)]
            parts.append((optimizer.param_groups[segment.group], itemsize, place))
            segments.append(segment)
    kept: dict[SegmentSpec, float] = {}
    for segment, nbytes in zip(segments, optimizer.planned_bytes(parts), strict=True):
        kept[segment] = kept.get(segment, 0.0) + nbytes
    return lambda segment: kept.get(segment, 0.0)


# -- the rank


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """A rank, and what it is to run.

    Attributes:
        mesh: of all ranks, as an engine takes it.
        budget: bytes for the rank's process on the device.
        host: bytes of host memory for it; inf: not known; None: there is one memory, ``budget``.
        precision: of the whole model.
        micro_batches: of a step.
        overlap: as the engine has it.
        moments: that the optimizer keeps of each element.
        clip: the norm of the gradients is taken.
        behaviour: of the device.
        where: devices whose rates are known; None: they are not.

    Raises:
        ConfigError: the devices have no products in fp8, which ``precision`` has; of their emulation nothing is known.
    """

    mesh: Mapping[str, int] | Sequence[Axis] = ()
    budget: float = inf
    host: float | None = inf
    precision: str | Precision = "bf16"
    micro_batches: int = 1
    overlap: Overlap | None = None
    moments: int = 2
    clip: bool = True
    behaviour: Behaviour = GPU
    where: Cluster | None = None

    def __post_init__(self) -> None:
        device, precision = self.where and self.where.device, Precision.named(self.precision)
        if device is not None and device.streams and precision.linear and "fp8" not in device.flops:
            raise ConfigError(
                f"a plan with products in {precision.linear} for {device.name}: it has none, and they are emulated in "
                "fp32 there, which takes time and memory that no plan knows; plan bf16."
            )

    @classmethod
    def on(cls, where: Cluster, division: Division = UNDIVIDED, **what: Any) -> PlannedRank:
        """One of ranks that share a model on some devices; ``what`` it runs, as of this class."""
        device, mesh = where.device, division.over(where.mesh)
        behaviour = GPU if device.streams else CPU
        return cls(mesh=mesh.axes, budget=device.usable, behaviour=behaviour, where=where, **what)

    def plan(
        self, subject: Subject, layout: str | Layout, mode: str, samples: int | None = None
    ) -> tuple[Setting, MemoryPlan]:
        """What it binds for a model, and bytes over a step; ``samples``: as of a trace."""
        return self.walk(subject, layout, subject.trace(self.precision, mode, samples))

    def walk(self, subject: Subject, layout: str | Layout, trace: Trace) -> tuple[Setting, MemoryPlan]:
        """The same by a trace."""
        setting = subject.setting(
            trace,
            layout=layout,
            precision=self.precision,
            mesh=self.mesh,
            overlap=self.overlap,
            micro_batches=self.micro_batches,
            moments=self.moments,
            clip=self.clip,
            behaviour=self.behaviour,
        )
        return setting, plan_memory(setting, trace)

    def largest(self, subject: Subject, plan: MemoryPlan) -> int:
        """The most samples with which no point of a plan has more bytes than there are, nor host memory more: what
        forward and backward hold at each is a line over the number of samples, and what the engine holds does not
        depend on it."""
        mode, held = plan.trace.mode, plan.tiers.get(Tier.HOST, 0.0)
        few, more = subject.line(self.precision, mode)
        most = plan.line(few, more, LINE).largest(self.budget - (held if self.host is None else 0.0))
        room = (inf if self.host is None else self.host) - (held - plan.trace.away.get(Tier.HOST, 0.0))  # beside states
        if room < 0:
            return 0
        if room < inf and 1 <= most < inf and mode in MOVED:
            held = subject.trace(self.precision, mode, floor(most)).away.get(Tier.HOST, 0.0)
            most *= min(1.0, room / held) if held else 1.0  # of fewer samples no larger part is moved
        return 0 if most == inf else floor(most)
