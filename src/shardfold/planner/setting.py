"""What a rank's engine would bind for a model: its units, its orders, its program; no process group is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError, ShardfoldError
from shardfold.parallel.pipeline.stages import Borders
from shardfold.plan import presets
from shardfold.plan.axes import Axis, Mesh
from shardfold.plan.cost import fetched_bytes, resting_bytes, tier_bytes
from shardfold.plan.layout import ITEMSIZE, Layout, Precision, Tier
from shardfold.plan.passes import Overlap, apply
from shardfold.plan.program import Op, lower
from shardfold.plan.rules import Rules
from shardfold.planner.division import UNDIVIDED, Division
from shardfold.planner.given import check_given, check_trains, not_run
from shardfold.planner.hollow import hollow, hollow_values
from shardfold.planner.kernels import gpu_kernels
from shardfold.planner.memory import CPU, Behaviour, Setting
from shardfold.planner.repeats import Blocks, Folded, fold, fold_stage, renumbered
from shardfold.planner.staged import in_order, stages_of
from shardfold.planner.trace import Sends, Trace, complete_orders
from shardfold.planner.tracing import MODES, Compute, loss_of, runs_with_memory, trace_model, trace_stage
from shardfold.sharding.partition import Cut, cut
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.torch_internals import tree_iter

__all__ = ["Subject", "mesh_of"]

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


def _with_buffers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Code around the pieces of stages computes with buffers."""
    if isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return torch.zeros(tensor.shape, dtype=dtype)


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
    """

    model: nn.Module
    batch: Any
    compute: Compute = loss_of
    units: Sequence[str | type[nn.Module]] | None = None
    real: bool | None = None
    division: Division = UNDIVIDED

    def __post_init__(self) -> None:
        check_given(self.model, self.batch)
        self.hollow: nn.Module = hollow(self.model, _on_meta, {})
        #: Of the ranks that share one model.
        self.mesh: Mesh = self.division.over({"inter": 1, "intra": self.division.ranks})
        self._stages = stages_of(self.hollow, self.division, _META) if self.division.pipeline > 1 else None
        if self.division.axes:
            self.division.cut(self.hollow, self.mesh)
        if self._stages is not None:
            self._stages.drop_foreign()
        self._traces: dict[tuple[Precision, str, int], Trace] = {}
        self._alone: dict[tuple[Precision, str, int], Trace] = {}  # of one micro-batch in a stage
        self._borders: dict[tuple[Precision, int, bool], Borders] = {}
        #: Of other stages of the same model, by whose traces those of this one may be found.
        self.others: Sequence[Subject] = ()
        self._folded: Folded | None = None
        self._whole = False  # all blocks are traced
        self._own_kernels = self.real is None and self._has_kernels_of_its_own()
        self._real = True if self._own_kernels else self.real
        self._cuts: dict[Any, tuple[Rules, list[Cut]]] = {}
        leaves = [v for v in tree_iter(self.batch) if isinstance(v, Tensor) and v.dim()]
        #: Samples in ``batch``.
        self.samples = leaves[0].shape[0] if leaves else 1

    def _has_kernels_of_its_own(self) -> bool:
        """Whether a CPU computes in kernels whose workspaces only a run with memory shows, as those of an LSTM; large
        models are run without all the same."""
        return (
            not self.division.streams
            and any(isinstance(module, nn.LSTM) for module in self.hollow.modules())
            and runs_with_memory(self.hollow, self.batch)
        )

    def cuts(self, table: Layout, precision: Precision, mesh: Mesh) -> tuple[Rules, list[Cut]]:
        """The units on a mesh, and the rules that they follow."""
        key = table, precision, mesh.axes
        if key not in self._cuts:
            rules = Rules(precision, table, mesh)
            groups = {id(p): 0 for p in self.hollow.parameters() if p.requires_grad}
            self._cuts[key] = rules, cut(self.hollow, self.units, groups, rules, mesh)
        return self._cuts[key]

    def resting(
        self, layout: str | Layout, precision: str | Precision, mesh: Mapping[str, int] | Sequence[Axis], moments: int
    ) -> dict[Tier, float]:
        """Bytes at rest on one rank, by tier: states, and the model's buffers on the device."""
        sizes = _for(presets.named(layout), mesh)
        rules, cuts = self.cuts(presets.named(layout), Precision.named(precision), sizes)
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
        it is found on the line through those of 2 and of 4; not where ``exact``.
        """
        policy, samples = Precision.named(precision), self.samples if samples is None else samples
        key = policy, mode, samples
        if key not in self._traces:
            on_line = samples > 4 and not exact and self.samples > 1
            if on_line:
                few, more = (self.trace(policy, mode, n) for n in LINE)
                on_line = [event[:2] for event in few.events] == [event[:2] for event in more.events]
                if on_line:
                    self._traces[key] = few.between(more, (samples - LINE[0]) / (LINE[1] - LINE[0]))
            if not on_line:
                self._traces[key] = self._found(policy, mode, samples)
        return self._traces[key]

    def _found(self, policy: Precision, mode: str, samples: int) -> Trace:
        check_trains(self.model)
        if self._stages is not None:
            return in_order(self.alone(policy, mode, samples), self.division)
        with self._kernels():
            return self._few_blocks(policy, mode, samples) or self._all_blocks(policy, mode, samples)

    def _kernels(self) -> AbstractContextManager[Any]:
        """Whatever traces keeps what the kernels of the device keep."""
        return gpu_kernels() if self.division.streams else nullcontext()

    def alone(self, precision: str | Precision, mode: str, samples: int) -> Trace:
        """A forward and a backward of one micro-batch in the stage of the rank that is planned for; :meth:`trace` has
        those of all micro-batches in their order."""
        policy = Precision.named(precision)
        if mode not in MODES:
            raise ConfigError(f"activations={mode!r}: a plan follows {', '.join(MODES)}.")
        if (key := (policy, mode, samples)) not in self._alone:
            likes = (other.of_another(self, policy, mode, samples) for other in self.others)
            with self._kernels():
                self._alone[key] = (
                    next(filter(None, likes), None)
                    or self._few_of_stage(policy, mode, samples)
                    or self._all_of_stage(policy, mode, samples)
                )
        return self._alone[key]

    def of_another(self, other: Subject, policy: Precision, mode: str, samples: int) -> Trace | None:
        """What :meth:`alone` of the ``other`` gives, a stage in the middle as this one, by what it gives of this one;
        None: they have more than blocks of one list, or not as many, or other tensors cross their borders."""
        mine, its = self._only_blocks(policy), other._only_blocks(policy)
        if mine is None or its is None or (mine[0], mine[1].number) != (its[0], its[1].number):
            return None
        found, borders = self.alone(policy, mode, samples), self._borders.get((policy, samples, False))
        if borders is None or found.touched:
            return None
        made = [[borders.trace.made(origin) for origin in origins] for origins in borders.crossing]
        here, there = self.division.stage, other.division.stage
        if made[here - 1 : here + 1] != made[there - 1 : there + 1]:
            return None
        events = renumbered(found.events, mine[0], its[1].there - mine[1].there)
        return replace(found, events=tuple(events), buffers=other._buffer_bytes(policy))

    def _only_blocks(self, policy: Precision) -> tuple[str, Blocks] | None:
        """The list that all parameters of a stage in the middle are in, and its blocks; None: there are others."""
        if self._whole or not 0 < self.division.stage < self.division.pipeline - 1:
            return None
        _, cuts = self.cuts(presets.ddp, policy, self.mesh)
        lists = self._folded_stage([c.name for c in cuts if c.spec is not None and not c.spec.root])
        if lists is None or len(lists.lists) != 1:
            return None
        ((path, blocks),) = lists.lists.items()
        inside = all(c.name.startswith(f"{path}.") for c in cuts if c.spec is not None)
        return (path, blocks) if inside else None

    def _folded_stage(self, units: Sequence[str]) -> Folded | None:
        if self._folded is None and not self._whole and self._stages is not None:
            whole = hollow(self.model, _on_meta, {})
            self._folded = fold_stage(whole, units, self._stages, self.division.stage)
            self._whole = self._folded is None
        return self._folded

    def _few_of_stage(self, policy: Precision, mode: str, samples: int) -> Trace | None:
        """The same by some of the blocks that are alike; None: there are not so many, or they differ."""
        if self._whole or self._stages is None:
            return None
        rules, cuts = self.cuts(presets.ddp, policy, self.mesh)
        units = [c.name for c in cuts if c.spec is not None and not c.spec.root]
        if (folded := self._folded_stage(units)) is None:
            return None
        kept = [name for unit in units if (name := folded.kept(unit)) is not None]
        own = hollow(folded.model, _on_meta, {})
        stages = stages_of(own, self.division, _META, folded.begins)
        self.division.cut(own, self.mesh)
        stages.drop_foreign()
        groups = {id(p): 0 for p in own.parameters() if p.requires_grad}
        try:
            few = self._run_stage(folded.model, cut(own, kept, groups, rules, self.mesh), folded.begins, policy, mode,
                                  samples)  # fmt: skip
        except Exception:  # a model that goes by the number of its blocks: all of them are traced
            few = None
        found = few and folded.unfolded(few)
        self._whole = found is None
        return replace(found, buffers=self._buffer_bytes(policy)) if found is not None else None

    def _all_of_stage(self, policy: Precision, mode: str, samples: int) -> Trace:
        _, cuts = self.cuts(presets.ddp, policy, self.mesh)
        try:
            return self._run_stage(self.model, cuts, None, policy, mode, samples)
        except ShardfoldError:
            raise
        except Exception as error:
            if samples != self.samples:
                _ = self._all_of_stage(policy, mode, self.samples)
            raise not_run(self.model, self.rows(samples), error) from error

    def _run_stage(
        self, model: nn.Module, cuts: Sequence[Cut], begins: Sequence[str] | None, policy: Precision, mode: str,
        samples: int,
    ) -> Trace:  # fmt: skip
        whole, rules = hollow(model, _on_meta, {}), Rules(policy, presets.ddp, mesh_of({}))
        groups = {id(p): 0 for p in whole.parameters() if p.requires_grad}
        units = self.units if begins is None else [c.name for c in cuts if c.spec is not None and not c.spec.root]
        specs = [c.spec for c in cut(whole, units, groups, rules, mesh_of({})) if c.spec is not None]
        dtypes = {slot.name: TORCH_DTYPES[s.dtype] for spec in specs for s in spec.segments for slot in s.slots}
        if policy.buffers == "compute":
            narrow = TORCH_DTYPES[policy.compute]
            dtypes |= {name: narrow for name, b in whole.named_buffers() if b.is_floating_point()}
        made = hollow(model, _with_buffers, dtypes)
        stages = stages_of(made, self.division, torch.device("cpu"), begins)
        self.division.cut(made, self.mesh)
        stages.drop_foreign()
        stages.settle()
        key = policy, samples, model is self.model
        found, self._borders[key] = trace_stage(
            made, stages, cuts, self.rows(samples), number=self.division.stage, precision=policy, mode=mode,
            compute=self.compute, connect=self._connect, borders=self._borders.get(key),
        )  # fmt: skip
        return found

    def _buffer_bytes(self, policy: Precision) -> float:
        narrow = ITEMSIZE[policy.compute] if policy.buffers == "compute" else 0
        return float(
            sum(b.numel() * (narrow if narrow and b.is_floating_point() else b.itemsize) for b in self.hollow.buffers())
        )

    def _all_blocks(self, policy: Precision, mode: str, samples: int) -> Trace:
        _, cuts = self.cuts(presets.ddp, policy, self.mesh)
        why = {"zeros": "its layers have workspaces that are seen in no other run"} if self._own_kernels else {}
        try:
            return trace_model(
                self.hollow, cuts, self.rows(samples), precision=policy, mode=mode, compute=self.compute,
                real=self._real, connect=self._connect if self.division.axes else None, **why,
            )  # fmt: skip
        except ModelError:
            if samples != self.samples:  # where it does not train on the user's own either, that one is named
                _ = self._found(policy, mode, self.samples)
            raise

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
            few = trace_model(
                folded.model, cut(folded.model, kept, groups, rules, self.mesh), self.rows(samples),
                precision=policy, mode=mode, compute=self.compute, real=False,
                connect=self._connect if self.division.axes else None,
            )  # fmt: skip
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
        rules, cuts = self.cuts(presets.named(layout), Precision.named(precision), sizes)
        layout = rules.layouts[-1]
        specs = [replace(s, root=s.root or s.name in trace.touched) for c in cuts if (s := c.spec) is not None]
        overlap = overlap or Overlap()
        if overlap.reduces_in_flight is None:
            overlap = replace(overlap, reduces_in_flight=int(behaviour.streams))
        by_name = {spec.name: spec for spec in specs}
        inner = [spec.name for spec in specs if not spec.root]
        forward = complete_orders([n for n in trace.forward_order if n in inner], inner)
        back = trace.backward_order(split=any(s.table_or(layout).comes_and_goes for s in specs))
        backward = complete_orders([n for n in back if n in inner], forward[::-1])

        def fetched(op: Op) -> float:
            return fetched_bytes(op, layout, by_name[op.unit], sizes, moments)

        lowered = lower(
            layout, specs, sizes, clip=clip, forward=forward, backward=backward, delayed=overlap.delayed_update
        )
        program = apply(lowered, overlap, fetched=partial(fetched))
        return Setting(
            layout=layout, units=specs, mesh=sizes, program=program, moments=moments, micro_batches=micro_batches,
            clip=clip, behaviour=behaviour,
        )  # fmt: skip
