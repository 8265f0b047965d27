"""Loading into an engine of any layout: each rank reads the elements that it keeps, and nothing else.

What several ranks keep (the whole of a parameter under ``zero1``) each of them reads an equal part of, and they give it
to each other over the wire. What does not fit is found before anything is changed, from the index alone. What is found
damaged later is told by all ranks together, and the engine refuses to train on or save what is half of one run and half
of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.bundle import complete
from shardfold.checkpoint.collect import average_state, buffers_of, names_of
from shardfold.checkpoint.names import Rename, renamer
from shardfold.checkpoint.reader import Checkpoint
from shardfold.errors import CheckpointError
from shardfold.layout import DATA_AXES, Axes
from shardfold.loans import refuse_during
from shardfold.rng import set_rng_state
from shardfold.shards import shard_index
from shardfold.unit import Segment

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["LoadReport", "load"]

WHAT = "engine.load()"


@dataclass
class LoadReport:
    """What was loaded, and what was not.

    Attributes:
        path: the checkpoint.
        step: optimizer steps that it had done.
        num_bytes: read by this rank.
        seconds: it took.
        missing: names of the model that the checkpoint does not have; they keep their values.
        unexpected: names of the checkpoint that the model does not have.
        notes: what else is not as it was in the run that wrote it, a sentence each.
        state: what was given as ``state=`` to :meth:`Engine.save`, by name, as plain values.
        rank_state: the same of this rank; None if there were other ranks.
        rank_states: of all ranks that there were.
    """

    path: Path
    step: int
    num_bytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list[str])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    rank_state: dict[str, Any] | None = None
    rank_states: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __str__(self) -> str:
        lines = [
            f"{self.path}: step {self.step}, {self.num_bytes / 2**20:.1f} MiB by this rank in {self.seconds:.2f} s"
        ]
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                lines.append(f"{title}: {', '.join(names)}")
        return "\n".join(lines + self.notes)


def load(
    engine: Engine,
    path: str | Path,
    *,
    weights_only: bool,
    strict: bool,
    rename: Rename | None,
    state: Mapping[str, Any] | None,
    number: int,
) -> LoadReport:
    """See :meth:`Engine.load`; ``number`` counts the loads of an engine."""
    begun = perf_counter()
    refuse_during(engine.loans, WHAT)
    with _open(engine, path, number) as checkpoint:
        plan = _Plan(engine, checkpoint, rename)
        plan.check_names(strict)
        if not weights_only:
            plan.check_optimizer(strict)
            plan.check_state(state or {}, strict)
        engine.zero_grad()
        report = plan.report
        work = _Work(engine, checkpoint, plan.names)
        engine.broken = f"the load of {checkpoint.path} failed half-way"
        work.all(weights_only)
        work.agree(number)
        if not weights_only:
            plan.take_run(state or {})
        else:
            report.notes.append("The optimizer, its schedule, the loss scale and the step count are as they were.")
        engine.broken = ""
        report.num_bytes, report.seconds = checkpoint.num_bytes_read, perf_counter() - begun
        return report


def _open(engine: Engine, path: str | Path, number: int) -> Checkpoint:
    """The same checkpoint on all ranks.

    Raises:
        CheckpointError: on all ranks, if any of them can not read it or they see different ones.
    """
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = Checkpoint(path)
        said = f"+{checkpoint.path.name} {checkpoint.digest}"
    except CheckpointError as error:
        said = f"!{error}"
    except OSError as error:
        said = f"!{path}: {error.strerror}."
    everyone = engine.agreement.exchange(f"load/{number}/open", said)
    if checkpoint is None or any(text != said for text in everyone):
        if checkpoint is not None:
            checkpoint.close()
        texts: dict[str, list[str]] = {}
        for rank, text in enumerate(everyone):
            texts.setdefault(text, []).append(str(rank))
        if len(texts) == 1:
            raise CheckpointError(said[1:])
        told = "; ".join(
            f"rank {', '.join(ranks)}: {text[1:].rstrip('.') if text[0] == '!' else 'finds ' + text[1:].split()[0]}"
            for text, ranks in texts.items()
        )
        raise CheckpointError(f"ranks do not find the same checkpoint at {path}, nothing was changed: {told}.")
    return checkpoint


class _Plan:
    """What of a checkpoint goes where, and whether it fits.

    Attributes:
        names: by the model's name of a parameter or buffer, the checkpoint's.
    """

    def __init__(self, engine: Engine, checkpoint: Checkpoint, rename: Rename | None) -> None:
        self._engine, self._checkpoint = engine, checkpoint
        self.report = LoadReport(checkpoint.path, checkpoint.index.step)
        named = renamer(rename, "engine.load")
        theirs = {
            named(name): p.name
            for p in [*checkpoint.index.parameters, *checkpoint.index.buffers]
            for name in (p.name, *p.also)
        }
        also = names_of(engine)
        self._shapes = {
            slot.name: slot.shape for unit in engine.units for s in unit.segments for slot in s.spec.slots
        } | {name: tuple(buffer.shape) for name, (buffer, _) in buffers_of(engine).items()}
        others = also | {name: names for name, (_, names) in buffers_of(engine).items()}
        self.names: dict[str, str] = {}
        for name in self._shapes:
            for candidate in (name, *others.get(name, ())):
                if candidate in theirs:
                    self.names[name] = theirs[candidate]
                    break
        known = {theirs[name] for names in others.values() for name in names if name in theirs}  # tied ones, kept twice
        self._unexpected = tuple(sorted(set(theirs.values()) - set(self.names.values()) - known))

    def check_names(self, strict: bool) -> None:
        """
        Raises:
            CheckpointError: names or shapes do not fit; all are listed and nothing was changed.
        """
        known = self._checkpoint.parameters | self._checkpoint.buffers
        missing = tuple(sorted(set(self._shapes) - set(self.names)))
        wrong = [
            f"{name} is {_shape(known[old].shape)} in the checkpoint and {_shape(self._shapes[name])} in the model"
            for name, old in self.names.items()
            if known[old].shape != self._shapes[name]
        ]
        said: list[str] = []
        if strict and missing:
            said.append(f"missing: {', '.join(missing)}")
        if strict and self._unexpected:
            said.append(f"unexpected: {', '.join(self._unexpected)}")
        said += wrong
        if said:
            hint = "" if wrong else "; rename= maps names, strict=False loads what fits"
            raise CheckpointError(
                f"{self._checkpoint.path} does not fit the model, nothing was changed: {'; '.join(said)}{hint}."
            )
        self.report.missing, self.report.unexpected = missing, self._unexpected

    def check_optimizer(self, strict: bool) -> None:
        """
        Raises:
            CheckpointError: the optimizer's state is of another kind; nothing was changed.
        """
        engine, checkpoint = self._engine, self._checkpoint
        update = engine._update
        if update is None or engine.optimizer is None:
            return
        if checkpoint.index.optimizer is None:
            raise CheckpointError(
                f"{checkpoint.path} has no state of an optimizer: load it with weights_only=True; nothing was changed."
            )
        kind = checkpoint.index.optimizer["class"].rpartition(".")[2]
        trained = {p.name: p.trainable for p in checkpoint.index.parameters}
        fresh: list[str] = []
        lacking: dict[str, list[str]] = {}
        surplus: set[str] = set()
        for segment in (s for unit in engine.units for s in unit.trainable):
            for number, slot in enumerate(segment.spec.slots):
                old = self.names.get(slot.name)
                if old is None or not slot.numel:
                    continue
                needed = update.needs(segment, number)
                have = {s for s in checkpoint.states(old) if s != "weight" and not s.startswith("average")}
                if not trained.get(old, True):
                    fresh.append(slot.name)
                    continue
                if needed is not None:
                    surplus |= have - needed
                    for state in needed - have:
                        lacking.setdefault(state, []).append(slot.name)
        if (lacking or surplus) and strict:
            mine = type(engine.optimizer).__name__
            what = [
                f"it has no {state!r} of {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
                for state, names in lacking.items()
            ]
            what += [f"{mine} has no use for {s!r}" for s in sorted(surplus)]
            raise CheckpointError(
                f"{checkpoint.path} was written with {kind} and the engine has {mine}: {'; '.join(what)}; load it with "
                "weights_only=True, or what fits with strict=False; nothing was changed."
            )
        if fresh:
            self.report.notes.append(f"Not trained when saved, so with a new optimizer state: {', '.join(fresh)}.")

    def check_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """
        Raises:
            CheckpointError: something was asked for that was not saved.
        """
        there = self._checkpoint.index.run.get("state", {})
        absent = [name for name in state if name not in there]
        if absent and strict:
            raise CheckpointError(
                f"{self._checkpoint.path} has no state of {', '.join(absent)}; it has {', '.join(there) or 'none'}; "
                "nothing was changed."
            )

    def take_run(self, state: Mapping[str, Any]) -> None:
        """Everything of the run that is not a tensor of the model's."""
        engine, checkpoint, notes = self._engine, self._checkpoint, self.report.notes
        run = checkpoint.run()
        engine.steps = checkpoint.index.step
        self._take_groups()
        for name, mine in (("schedule", engine.schedule), ("loss_scale", engine.loss_scale)):
            saved, title = run.get(name), name.replace("_", " ")
            if mine is not None and saved is not None:
                mine.load_state_dict(saved)
            elif saved is not None:
                notes.append(f"The {title} of the checkpoint is not used: the engine has none.")
            elif mine is not None:
                notes.append(f"The {title} begins anew: the checkpoint has none.")
        if engine.loss_scale is not None:
            engine.actions.set_factors()
        averages = run.get("averages", ())
        for average, saved in zip(engine.averages, averages, strict=False):
            average.updates = saved["updates"]
        if len(averages) != len(engine.averages):
            notes.append(
                f"The checkpoint has {len(averages)} averages and the engine {len(engine.averages)}: the others begin "
                "anew or are not used."
            )
        self.report.state = run.get("state", {})
        for name, target in state.items():
            if name in self.report.state and hasattr(target, "load_state_dict"):
                target.load_state_dict(self.report.state[name])
        ranks = len(checkpoint.index.ranks)
        self.report.rank_states = [checkpoint.rank(r)["state"] for r in range(ranks)]
        if ranks == engine.world_size:
            mine = checkpoint.rank(engine.rank)
            self.report.rank_state = mine["state"]
            if mine.get("rng") is not None:
                set_rng_state(mine["rng"])
        elif ranks:
            notes.append(
                f"Random numbers go on as they are: there were {ranks} rank{'s' * (ranks > 1)} and now there "
                f"{'are' if engine.world_size > 1 else 'is'} {engine.world_size}."
            )

    def _take_groups(self) -> None:
        engine = self._engine
        if engine.optimizer is None:
            return
        saved = self._checkpoint.groups()
        home = {name: options for options, members in saved for name in members}
        members: list[list[str]] = [[] for _ in engine.optimizer.param_groups]
        for segment in (s for unit in engine.units for s in unit.trainable):
            members[segment.spec.group] += [slot.name for slot in segment.spec.slots]
        for number, (group, names) in enumerate(zip(engine.optimizer.param_groups, members, strict=True)):
            options = next((home[old] for n in names if (old := self.names.get(n)) in home), None)
            if options is None and number < len(saved) and not saved[number][1] and not names:
                options = saved[number][0]
            if options is not None:
                group.update(options)
            elif names:
                self.report.notes.append(f"Group {number} of the optimizer keeps its options: its parameters had none.")


class _Work:
    """Reads a checkpoint into an engine's shards; after a failure it only keeps in step with the other ranks."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        self._engine, self._checkpoint, self._names = engine, checkpoint, names
        self._problem = ""

    def all(self, weights_only: bool) -> None:
        engine = self._engine
        with torch.no_grad():
            for unit in engine.units:
                for segment in unit.segments:
                    self._weights(segment)
                    if segment.spec.trainable and not weights_only:
                        self._moments(segment)
                torch.autograd.graph.increment_version([parameter for _, parameter in unit.parameters()])
            for name, (buffer, _) in buffers_of(engine).items():
                if name in self._names:
                    self._try(lambda b=buffer, n=name: b.copy_(self._checkpoint.buffer(self._names[n])))

    def agree(self, number: int) -> None:
        """
        Raises:
            CheckpointError: on all ranks, if any could not read its part.
        """
        engine = self._engine
        if not engine.actions.control([float(bool(self._problem))], dist.ReduceOp.MAX)[0]:
            return
        said = engine.agreement.exchange(f"load/{number}/read", self._problem)
        told = "; ".join(f"rank {rank}: {text.rstrip('.')}" for rank, text in enumerate(said) if text)
        raise CheckpointError(f"{told}. The engine now holds a part of it: load another checkpoint before going on.")

    def _try(self, read: Callable[[], Any]) -> None:
        if self._problem:
            return
        try:
            read()
        except (CheckpointError, OSError) as error:
            self._problem = str(error)

    def _weights(self, segment: Segment) -> None:
        """Master, what rests in the compute dtype and what is held, from the one copy that was saved."""
        layout = self._engine.layout
        if segment.master is not None:
            kept, bounds, over = segment.master, segment.master_range, layout.master.over
        else:
            assert segment.rest is not None
            kept, bounds, over = segment.rest, segment.rest_range, layout.rest.over
        self._fill(segment, "weight", kept, bounds, over)
        whole: Tensor | None = None
        if segment.rest is not None and segment.rest is not kept:
            if segment.rest_range == bounds:
                if not segment.master_is_rest:
                    segment.rest.copy_(kept)
            else:
                whole = self._whole(segment, kept, bounds, over)
                if segment.rest is not whole:
                    segment.rest.copy_(whole[slice(*segment.rest_range)])
        if segment.held is not None and segment.held_range is not None:
            whole = self._whole(segment, kept, bounds, over) if whole is None else whole
            segment.held.copy_(whole[slice(*segment.held_range)])

    def _whole(self, segment: Segment, kept: Tensor, bounds: tuple[int, int], over: Axes) -> Tensor:
        """All values of a segment in the compute dtype: in its own flat where that has memory."""
        flat = (
            segment.flat if not segment.split else torch.empty_like(segment.flat, memory_format=torch.contiguous_format)
        )
        if segment.split:
            flat = torch.empty(segment.spec.length, dtype=segment.dtype, device=kept.device)
        if not (segment.master_is_rest and flat is segment.flat):
            flat[slice(*bounds)].copy_(kept)
        complete(self._engine.actions, [flat], over, WHAT)
        return flat

    def _moments(self, segment: Segment) -> None:
        """The optimizer's state and the averages of a segment."""
        engine, checkpoint = self._engine, self._checkpoint
        update = engine._update
        assert update is not None
        bounds, over = segment.master_range, engine.layout.master.over
        slots = [(i, self._names[s.name]) for i, s in enumerate(segment.spec.slots) if s.name in self._names]
        for number, average in enumerate(engine.averages):
            self._fill(segment, average_state(number), average.shard(segment), bounds, over, optional=True)
        wanted: dict[str, list[tuple[int, str]]] = {}
        for slot, old in slots:
            needed = update.needs(segment, slot)
            for state in checkpoint.states(old):
                if state != "weight" and not state.startswith("average") and (needed is None or state in needed):
                    wanted.setdefault(state, []).append((slot, old))
        for state, having in sorted(wanted.items()):
            target = update.moment(segment, state)
            if target is not None:
                self._fill(segment, state, target, bounds, over, optional=True)
                continue
            dtype = checkpoint.dtype(having[0][1], state)
            assert segment.master is not None
            shard = torch.zeros_like(segment.master, dtype=dtype)
            self._fill(segment, state, shard, bounds, over, optional=True)
            for slot, _ in having:
                update.take_piece(segment, slot, state, shard)
        for slot, old in slots:
            for name, value in checkpoint.once(old).items():
                self._try(lambda i=slot, n=name, v=value: update.take_value(segment, i, n, v))

    def _fill(
        self, segment: Segment, state: str, target: Tensor, bounds: tuple[int, int], over: Axes, optional: bool = False
    ) -> None:
        """Reads a state of a segment's range ``bounds`` into ``target`` ``(n,)``; what the checkpoint lacks stays."""
        engine, checkpoint = self._engine, self._checkpoint
        others = tuple(axis for axis in DATA_AXES if axis not in over and engine.mesh.sizes[axis] > 1)
        size = target.numel() // engine.mesh.parts(others)
        low = bounds[0] + size * shard_index(others, engine.mesh.sizes, engine.mesh.coords)
        for slot, a, b in segment.spec.pieces(low, low + size):
            place = segment.spec.slots[slot]
            old = self._names.get(place.name)
            if old is None or (optional and state not in checkpoint.states(old)):
                continue
            out = target[a - bounds[0] : b - bounds[0]]
            self._try(
                lambda o=old, x=a - place.offset, y=b - place.offset, t=out: checkpoint.read(o, state, x, y, out=t)
            )
        complete(engine.actions, [target], others, WHAT)


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
