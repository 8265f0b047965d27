"""Traces of one stage of a model: of some of its blocks, or found by those of another stage that is like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ShardfoldError
from shardfold.parallel.pipeline.stages import Borders
from shardfold.plan import presets
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import Precision
from shardfold.plan.rules import Rules
from shardfold.planner.division import Division
from shardfold.planner.given import hollow, not_run
from shardfold.planner.repeats import Folded, TracedBlocks, fold_stage, renumbered
from shardfold.planner.staged import stages_of
from shardfold.planner.trace import Lane, Trace
from shardfold.planner.tracing import Compute, Connect, trace_stage
from shardfold.sharding.partition import Cut, cut
from shardfold.sharding.segment import TORCH_DTYPES

__all__ = ["StageTraces"]

META = torch.device("meta")
ALONE = Mesh.of({"inter": 1, "intra": 1})


def _on_meta(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _with_buffers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Code around the pieces of stages computes with buffers."""
    if isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return torch.zeros(tensor.shape, dtype=dtype)


class StageTraces:
    """A forward and a backward of one micro-batch in one stage, as if it had a rank of its own.

    Args:
        model: with or without memory; it stays as it is.
        rows: a micro-batch of so many samples.
        compute: gives the loss.
        units: as of the engine.
        division: how ranks share the model.
        number: of the stage.
        connect: see :data:`~shardfold.planner.tracing.Connect`.

    Attributes:
        others: of the same model, by whose traces those of this one may be found.
        borders: what crosses borders, by policy, samples and the stage of a model of a few blocks; -1: of all blocks,
            where it is the same for all stages, which share it then.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Callable[[int], Any],
        compute: Compute,
        units: Sequence[str | type[nn.Module]] | None,
        division: Division,
        number: int,
        connect: Connect,
    ) -> None:
        self._model, self._rows, self._compute, self._units = model, rows, compute, units
        self._division, self.number, self._connect = division, number, connect
        self._mesh = division.over({"inter": 1, "intra": division.ranks})
        self._hollow: nn.Module = hollow(model, _on_meta, {})
        self._stages = stages_of(self._hollow, division, META, own=[number])
        division.cut(self._hollow, self._mesh)
        self._stages.drop_foreign()
        self.others: Sequence[StageTraces] = ()
        self._traces: dict[tuple[Precision, str, int, Lane], Trace] = {}
        self.borders: dict[tuple[Precision, int, int], Borders] = {}
        self._cuts: dict[Precision, tuple[Rules, list[Cut]]] = {}
        self._folded: Folded | None = None
        self._whole = False  # all blocks are traced

    def trace(self, policy: Precision, mode: str, samples: int, lane: Lane) -> Trace:
        """One micro-batch in a lane of this stage."""
        if (key := (policy, mode, samples, lane)) not in self._traces:
            likes = (other.of_another(self, policy, mode, samples, lane) for other in self.others)
            self._traces[key] = (
                next(filter(None, likes), None)
                or self._few_blocks(policy, mode, samples, lane)
                or self._all_blocks(policy, mode, samples, lane)
            )
        return self._traces[key]

    def of_another(self, other: StageTraces, policy: Precision, mode: str, samples: int, lane: Lane) -> Trace | None:
        """What :meth:`trace` of the ``other`` gives, a stage in the middle as this one, by what it gives of this one;
        None: they have more than blocks of one list, or not as many, or other tensors cross their borders, or come
        from other ranks."""
        mine, its = self._only_blocks(policy), other._only_blocks(policy)
        if mine is None or its is None or (mine[0], mine[1].number) != (its[0], its[1].number):
            return None
        if self.handed != other.handed:
            return None
        found = self.trace(policy, mode, samples, lane._replace(stage=self.number))
        borders = self.borders.get((policy, samples, self.number))
        if borders is None or found.touched:
            return None
        made = [[borders.trace.made(origin) for origin in origins] for origins in borders.crossing]
        if made[self.number - 1 : self.number + 1] != made[other.number - 1 : other.number + 1]:
            return None
        return replace(found, events=tuple(renumbered(found.events, mine[0], its[1].there - mine[1].there)))

    @property
    def handed(self) -> bool:
        """Whether what it receives is of a stage on the same rank, which keeps it."""
        places = self._stages.places
        return self.number > 0 and places[self.number - 1] == places[self.number]

    def _own_cuts(self, policy: Precision) -> tuple[Rules, list[Cut]]:
        if policy not in self._cuts:
            rules = Rules(policy, presets.ddp, self._mesh)
            groups = {id(p): 0 for p in self._hollow.parameters() if p.requires_grad}
            self._cuts[policy] = rules, cut(self._hollow, self._units, groups, rules, self._mesh)
        return self._cuts[policy]

    def _only_blocks(self, policy: Precision) -> tuple[str, TracedBlocks] | None:
        """The list that all parameters of a stage in the middle are in, and its blocks; None: there are others."""
        if self._whole or not 0 < self.number < self._stages.count - 1:
            return None
        _, cuts = self._own_cuts(policy)
        lists = self._folded_stage(_inner(cuts))
        if lists is None or len(lists.lists) != 1:
            return None
        ((path, blocks),) = lists.lists.items()
        inside = all(c.name.startswith(f"{path}.") for c in cuts if c.spec is not None)
        return (path, blocks) if inside else None

    def _folded_stage(self, units: Sequence[str]) -> Folded | None:
        if self._folded is None and not self._whole:
            self._folded = fold_stage(hollow(self._model, _on_meta, {}), units, self._stages, self.number)
            self._whole = self._folded is None
        return self._folded

    def _few_blocks(self, policy: Precision, mode: str, samples: int, lane: Lane) -> Trace | None:
        """The trace by some of the blocks that are alike; None: there are not so many, or they differ."""
        if self._whole:
            return None
        rules, cuts = self._own_cuts(policy)
        units = _inner(cuts)
        if (folded := self._folded_stage(units)) is None:
            return None
        kept = [name for unit in units if (name := folded.kept(unit)) is not None]
        own = hollow(folded.model, _on_meta, {})
        stages = stages_of(own, self._division, META, folded.begins, [self.number])
        self._division.cut(own, self._mesh)
        stages.drop_foreign()
        groups = {id(p): 0 for p in own.parameters() if p.requires_grad}
        try:
            cuts = cut(own, kept, groups, rules, self._mesh)
            few = self._run(folded.model, cuts, folded.begins, policy, mode, samples, lane)
        except Exception:  # a model that goes by the number of its blocks: all of them are traced
            few = None
        found = few and folded.unfolded(few)
        self._whole = found is None
        return found

    def _all_blocks(self, policy: Precision, mode: str, samples: int, lane: Lane) -> Trace:
        _, cuts = self._own_cuts(policy)
        try:
            return self._run(self._model, cuts, None, policy, mode, samples, lane)
        except ShardfoldError:
            raise
        except Exception as error:
            raise not_run(self._model, self._rows(samples), error) from error

    def _run(
        self,
        model: nn.Module,
        cuts: Sequence[Cut],
        begins: Sequence[str] | None,
        policy: Precision,
        mode: str,
        samples: int,
        lane: Lane,
    ) -> Trace:
        whole, rules = hollow(model, _on_meta, {}), Rules(policy, presets.ddp, ALONE)
        groups = {id(p): 0 for p in whole.parameters() if p.requires_grad}
        units = self._units if begins is None else _inner(cuts)
        specs = [c.spec for c in cut(whole, units, groups, rules, ALONE) if c.spec is not None]
        dtypes: Mapping[str, torch.dtype] = {
            slot.name: TORCH_DTYPES[s.dtype] for spec in specs for s in spec.segments for slot in s.slots
        }
        if policy.buffers == "compute":
            narrow = TORCH_DTYPES[policy.compute]
            dtypes = {**dtypes, **{name: narrow for name, b in whole.named_buffers() if b.is_floating_point()}}
        made = hollow(model, _with_buffers, dtypes)
        stages = stages_of(made, self._division, torch.device("cpu"), begins, [self.number])
        self._division.cut(made, self._mesh)
        stages.drop_foreign()
        stages.settle()
        key = policy, samples, -1 if begins is None else self.number
        found, self.borders[key] = trace_stage(
            made,
            stages,
            cuts,
            self._rows(samples),
            lane=lane,
            precision=policy,
            mode=mode,
            compute=self._compute,
            connect=self._connect,
            borders=self.borders.get(key),
        )
        return found


def _inner(cuts: Sequence[Cut]) -> list[str]:
    """Names of the units that are no root."""
    return [c.name for c in cuts if c.spec is not None and not c.spec.root]
