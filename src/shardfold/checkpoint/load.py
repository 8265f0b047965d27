"""Loading into an engine of any layout: each rank reads the elements that it keeps, and nothing else.

What several ranks keep (the whole of a parameter under ``zero1``) each of them reads an equal part of, and they give it
to each other by one collective. What does not fit is found before anything is changed, from the index alone. What is
found damaged later is told by all ranks together, and the engine refuses to train on or save what is half of one run
and half of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.checkpoint._fit import Fit
from shardfold.checkpoint.collect import (
    LOST,
    average_state,
    group_read,
    is_moment,
    lost_targets,
    other_base,
    shared_targets,
    take_lost,
    with_group,
)
from shardfold.checkpoint.folders import listed, origin
from shardfold.checkpoint.messages import words
from shardfold.checkpoint.names import Rename
from shardfold.checkpoint.opened import open_together
from shardfold.checkpoint.reader import Checkpoint
from shardfold.checkpoint.rng import set_rng_state
from shardfold.comm.coalesced import complete
from shardfold.comm.launcher_notes import tell_launcher
from shardfold.errors import CheckpointError, ShardfoldError, by_rank
from shardfold.optim.schedules import renew_rates
from shardfold.plan.formats import Format
from shardfold.plan.layout import Axes
from shardfold.plan.placement import Slot, shard_index
from shardfold.sharding.model import ShardedModel, refuse_during
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.whole_state import buffers_of, extra_states, most_precise

__all__ = ["LoadReport", "load"]

LOG = getLogger("shardfold")
WHAT = "engine.load()"
WEIGHTS = "with weights_only=True "
MOVES = ("last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter")  # of schedules, from step to step
T = TypeVar("T")


@dataclass
class LoadReport:
    """What was loaded, and what was not.

    Attributes:
        path: the checkpoint.
        step: optimizer steps that it had done.
        num_bytes: read by this rank.
        num_bytes_fetched: of them, from the disks of other hosts.
        seconds: it took.
        missing: names of the model that the checkpoint does not have; they keep their values.
        unexpected: names of the checkpoint that the model does not have.
        notes: what else is not as it was in the run that wrote it, a sentence each.
        state: what was given as ``state=`` to :meth:`Engine.save`, by name, as plain values.
        rank_state: the same of this rank; None if there were other ranks.
        rank_states: of all ranks that there were.

    Examples:
        >>> saved = engine.save(f"{folder}/step-0", wait=True)
        >>> engine.load(folder).missing
        ()
    """

    path: Path
    step: int
    num_bytes: int = 0
    num_bytes_fetched: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list[str])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    rank_state: dict[str, Any] | None = None
    rank_states: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def _take(self, state: dict[str, Any], rank_states: list[dict[str, Any]], rank: int | None = None) -> None:
        """What was given to the save; ``rank``: which of the ranks this one was."""
        self.state, self.rank_states = state, rank_states
        self.rank_state = None if rank is None else rank_states[rank]

    def __str__(self) -> str:
        fetched = f", {self.num_bytes_fetched / 2**20:.1f} of them from other hosts" if self.num_bytes_fetched else ""
        lines = [
            f"{self.path}: step {self.step}, {self.num_bytes / 2**20:.1f} MiB by this rank{fetched} in "
            f"{self.seconds:.2f} s"
        ]
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                lines.append(f"{title}: {', '.join(names)}")
        return "\n".join(lines + self.notes)


def load(
    model: ShardedModel,
    path: str | Path,
    *,
    weights_only: bool,
    strict: bool,
    rename: Rename | None,
    state: Mapping[str, Any] | None,
    number: int,
    rows: Mapping[str, Sequence[int]] | None = None,
) -> LoadReport:
    """See :meth:`Engine.load`; ``number`` counts the loads of an engine."""
    begun = perf_counter()
    refuse_during(model.loans, WHAT)
    with open_together(model, path, f"load/{number}") as checkpoint:
        agreed = _Agreed(model, f"load/{number}", "Nothing was changed.")
        fit = agreed(lambda: _fit(model, checkpoint, rename, rows or {}, state or {}, strict, weights_only))
        report = LoadReport(
            checkpoint.path, checkpoint.index.step, missing=fit.missing, unexpected=fit.unexpected, notes=fit.notes
        )
        _check_base(model, checkpoint, fit, strict)
        model.gate.zero_grad()
        if model.run.outer is not None:
            model.run.outer.begin_anew()
        mends = _mends(model, weights_only, fit)
        model.run.spoil((WEIGHTS if weights_only else "") + f"the load of {checkpoint.path} failed half-way")
        agreed.after = "The engine now holds a part of it: load another checkpoint before going on."
        work = _Work(model, checkpoint, fit)
        work.tensors(weights_only)
        if not weights_only:
            work.attempt(lambda: _take_run(model, checkpoint, fit, report, state or {}))
        agreed(work.outcome)
        if weights_only:
            report.notes.append("The optimizer, its schedule, the loss scale, averages and the step count stay.")
        model.run.mend(mends)
        if words := _narrower(model, checkpoint):
            report.notes.append(words)
            if model.rank == 0:
                LOG.warning("%s", words)
        if words := _nonfinite(checkpoint):
            report.notes.append(words)
            if model.rank == 0:
                LOG.warning("%s", words)
        report.num_bytes, report.num_bytes_fetched = checkpoint.num_bytes_read, checkpoint.num_bytes_fetched
        report.seconds = perf_counter() - begun
        return report


class _Agreed:
    """Something that may go wrong on any rank, and then goes wrong on all: nobody waits for one that has left.

    Attributes:
        after: what follows from it, a sentence.
    """

    def __init__(self, model: ShardedModel, prefix: str, after: str) -> None:
        self._model, self._prefix, self.after = model, prefix, after
        self._number = 0

    def __call__(self, do: Callable[[], T]) -> T:
        """
        Raises:
            CheckpointError: on all ranks, with what went wrong on some.
        """
        model = self._model
        self._number += 1
        error: Exception | None = None
        value: Any = None
        try:
            value = do()
        except Exception as raised:
            error = raised
        if not model.comm.control([float(error is not None)], dist.ReduceOp.MAX)[0]:
            return value
        said = model.comm.job.exchange(f"{self._prefix}/{self._number}", "" if error is None else words(error))
        everywhere = len(set(said)) == 1
        if everywhere and isinstance(error, ShardfoldError) and not isinstance(error, CheckpointError):
            raise error
        told = said[0] if everywhere else by_rank(said)
        if error is None:
            tell_launcher(told, follows=True)
        raise CheckpointError(f"{told.rstrip('.')}. {self.after}") from error


def _fit(
    model: ShardedModel,
    checkpoint: Checkpoint,
    rename: Rename | None,
    rows: Mapping[str, Sequence[int]],
    state: Mapping[str, Any],
    strict: bool,
    weights_only: bool,
) -> Fit:
    fit = Fit(model, checkpoint, rename, rows)
    fit.check_names(strict)
    if not weights_only:
        fit.check_optimizer(strict)
        fit.check_state(state, strict)
    return fit


def _check_base(model: ShardedModel, checkpoint: Checkpoint, fit: Fit, strict: bool) -> None:
    """
    Raises:
        CheckpointError: parameters that the checkpoint left out have other values here; nothing was changed.
    """
    other, unclear = other_base(model, fit.left_out)
    names = ", ".join(other[:4]) + (f" and {len(other) - 4} more" if len(other) > 4 else "")
    if other and strict:
        raise CheckpointError(
            f"{checkpoint.path} was saved without its frozen parameters, and the engine has others: {names} differ; "
            "load the same base first, or take this one with strict=False. Nothing was changed."
        )
    if other:
        fit.notes.append(f"Frozen parameters that were left out have other values here: {names}.")
    if unclear:
        fit.notes.append(
            "Not compared, as they were saved in more digits than they have here, or are not whole on a rank here: "
            f"{', '.join(unclear)}."
        )


def _narrower(model: ShardedModel, checkpoint: Checkpoint) -> str:
    """What is to be known of a run in bf16 that goes on in fp16, whose range is smaller; else nothing."""
    saved = str(checkpoint.index.layout.get("precision", ""))
    here = {model.rules.default.compute, model.rules.default.autocast}
    if "fp16" not in here or not any(f"{name}='bf16'" in saved for name in ("compute", "autocast")):
        return ""
    return (
        f"{checkpoint.path} was trained in bf16 and goes on in fp16: values above 65504, which bf16 has, become inf "
        "there. If the loss scale falls and falls, or outputs are not finite, go on with precision='bf16' or 'fp32'."
    )


def _nonfinite(checkpoint: Checkpoint) -> str:
    """What is to be known of a checkpoint that holds inf or NaN where one beside it holds none; else nothing."""
    if not (names := checkpoint.index.nonfinite):  # what is beside it may be another run's, and be removed meanwhile
        return ""
    sound = [path.name for path in listed(checkpoint.path.parent) if len(origin(path).nonfinite) < len(names)]
    if not sound:
        return ""
    some = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
    found = f"{checkpoint.path} holds inf or NaN in {some}"
    return f"{found}; {sound[-1]}, beside it, is finite in more: load that one to go back."


def _mends(model: ShardedModel, weights_only: bool, fit: Fit) -> str:
    """What is still wrong with an engine after this load, if an earlier one failed half-way."""
    same = not weights_only or model.run.broken.startswith(WEIGHTS)
    return "" if same and not fit.missing else model.run.broken


def _take_run(
    model: ShardedModel, checkpoint: Checkpoint, fit: Fit, report: LoadReport, state: Mapping[str, Any]
) -> None:
    """Everything of the run that is not a tensor of the model's."""
    notes, run, ranks = report.notes, checkpoint.run(), len(checkpoint.index.ranks)
    report._take(run.get("state", {}), [checkpoint.of_rank(rank, "state") for rank in range(ranks)])
    rng = checkpoint.of_rank(model.rank, "rng") if ranks == model.world_size else None
    model.run.go_on_at(checkpoint.index.step)
    fit.take_options()
    for name, mine in (("schedule", model.run.lr_schedule), ("loss_scale", model.run.loss_scale)):
        saved, title = run.get(name), name.replace("_", " ")
        known = mine.state_dict().keys() if mine is not None else set[str]()
        if saved is not None and "lr_lambdas" not in known:  # of functions, which say nothing of the place in the run
            saved = {key: value for key, value in saved.items() if key != "lr_lambdas"}
        if mine is not None and saved is not None and saved.keys() <= known:
            notes += _other_numbers(title, mine.state_dict(), saved)
            mine.load_state_dict(saved)
            renew_rates(mine)
        elif mine is not None:
            what = "none" if saved is None else "one of another kind"
            notes.append(f"The {title} begins anew: the checkpoint has {what}.")
        elif saved is not None:
            notes.append(f"The {title} of the checkpoint is not used: the engine has none.")
    notes += _take_rounds(model, run.get("outer") or {})
    averages = run.get("averages", ())
    for number, average in enumerate(model.run.averages):
        average.go_on_at(averages[number]["updates"] if number < len(averages) else 0)
    if len(averages) != len(model.run.averages):
        notes.append(
            f"The checkpoint has {len(averages)} averages and the engine {len(model.run.averages)}: the others begin "
            "anew or are not used."
        )
    saved_lost = any(LOST in checkpoint.states(old) for old in fit.parameters.values())
    if saved_lost != any(segment.format_state is not None for segment in model.trainable()):
        notes.append(
            "What reductions of the checkpoint's run have lost in rounding is not added here: none of this run's do so."
            if saved_lost
            else "The checkpoint has nothing that reductions have lost in rounding: that begins with 0."
        )
    for name, target in state.items():
        if name in report.state:
            target.load_state_dict(report.state[name])
    if rng is not None:
        report._take(report.state, report.rank_states, rank=model.rank)
        set_rng_state(rng)
    else:
        notes.append(
            f"Random numbers go on as they are: there were {ranks} rank{'s' * (ranks > 1)} and now there "
            f"{'are' if model.world_size > 1 else 'is'} {model.world_size}."
        )


def _other_numbers(title: str, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """What a schedule was given here that the checkpoint's takes the place of."""
    if title != "schedule":
        return []
    plain = {name: value for name, value in saved.items() if name[0] != "_" and isinstance(value, (int, float, str))}
    other = [f"{name}={v!r} (not {mine[name]!r})" for name, v in plain.items() if v != mine[name] and name not in MOVES]
    if not other:
        return []
    return [
        f"The schedule goes on with the checkpoint's {', '.join(other)}: set them behind load() if that is not meant."
    ]


def _take_rounds(model: ShardedModel, said: Mapping[str, Any]) -> list[str]:
    """The rounds of outer steps go on, or begin anew; what is to be known of it."""
    outer, groups = model.run.outer, int(said.get("groups", 1))
    here = model.comm.mesh.sizes.groups
    notes: list[str] = []
    if outer is not None:
        goes_on = outer.goes_on(said)
        steps, version = (int(said.get(name, 0)) if goes_on else 0 for name in ("steps", "version"))
        outer.begin_anew(steps, version)
        if said and not goes_on:
            notes.append("The round of outer steps begins anew: rounds were others in the checkpoint's run.")
    if groups != here:
        notes.append(
            f"There were {groups} group{'s' * (groups > 1)} between outer steps and now there "
            f"{'are' if here > 1 else 'is'} {here}: these go on as the first ones were"
            f"{', in turn' if here > groups else ''}."
        )
    return notes


class _Work:
    """Reads a checkpoint into an engine's shards; after a failure it only keeps in step with the other ranks."""

    def __init__(self, model: ShardedModel, checkpoint: Checkpoint, fit: Fit) -> None:
        self._model, self._checkpoint, self._fit = model, checkpoint, fit
        self._problem: Exception | None = None
        said = checkpoint.run().get("outer") or {}
        self._group, outer = group_read(model, {"outer": said}), model.run.outer
        self._flies = outer is not None and outer.goes_on(said)

    def tensors(self, weights_only: bool) -> None:
        """Parameters, buffers and what the optimizer keeps."""
        model = self._model
        with torch.no_grad():
            model.let_go()
            for unit in model.units:
                for segment in unit.segments:
                    self._weights(segment)
                    if segment.spec.trainable and not weights_only:
                        self._moments(segment)
                    if segment.spec.trainable and model.run.outer is not None:
                        model.run.outer.weights.begin_anew(segment)
                        if not weights_only:
                            self._shared(segment)
                torch.autograd.graph.increment_version([parameter for _, parameter in unit.parameters()])
            for name, (buffer, _) in buffers_of(model.module).items():
                if name in self._fit.buffers:
                    self.attempt(lambda b=buffer, n=name: b.copy_(self._checkpoint.buffer(self._fit.buffers[n])))
            for name, part in extra_states(model.module).items():
                if name in self._fit.extra:
                    self.attempt(lambda p=part, n=name: p.set_extra_state(self._fit.extra_of(n)))

    def attempt(self, do: Callable[[], T]) -> T | None:
        """Does something that sends nothing, unless something went wrong, which then is the outcome."""
        if self._problem is None:
            try:
                return do()
            except Exception as error:
                self._problem = error
        return None

    def outcome(self) -> None:
        """Raises what went wrong."""
        if self._problem is not None:
            raise self._problem

    def _weights(self, segment: Segment) -> None:
        """Master, what rests in the compute dtype and what is held, from the one copy that was saved."""
        if segment.form is not None:
            self._codes(segment, segment.form)
            return
        shard, bounds, over = most_precise(self._model, segment)
        fit, names = self._fit, [slot.name for slot in segment.spec.slots]
        every = all(name in fit.parameters and name not in fit.left_out and name not in fit.rows for name in names)
        with self._opened(shard, replaced=every) as kept:
            self._fill(segment, "weight", kept, bounds, over)
            self._mirror(segment, shard, kept, bounds, over)

    def _codes(self, segment: Segment, form: Format) -> None:
        """What rests as codes: these, where they were saved so, else of one whole parameter after the other."""
        checkpoint, fit = self._checkpoint, self._fit
        for slot, place in enumerate(segment.spec.slots):
            old = fit.parameters.get(place.name)
            if old is None or place.name in fit.left_out:
                continue
            if place.name not in fit.rows and checkpoint.has_codes(old, form.name, place.box):
                for state, _, bounds in segment.copies():
                    self.attempt(partial(self._read_codes, segment, form, place, old, state, bounds))
            else:
                self.attempt(partial(self._code, segment, slot, old))

    def _read_codes(
        self, segment: Segment, form: Format, place: Slot, old: str, state: str, bounds: tuple[int, int]
    ) -> None:
        """This rank's part of a parameter's codes."""
        end = place.offset + -(-place.numel // form.block) * form.block
        a, b = max(place.offset, bounds[0]), min(end, bounds[1])
        if a < b:
            codes = torch.zeros(form.nbytes(b - a), dtype=torch.uint8)
            first, stop = a - place.offset, min(b - place.offset, place.numel)
            self._checkpoint.codes(old, first, stop, out=codes, box=place.box)
            segment.regions[state].write(form.nbytes(a - bounds[0]), codes)

    def _code(self, segment: Segment, slot: int, old: str) -> None:
        place = segment.spec.slots[slot]
        values = torch.empty(place.numel, dtype=self._checkpoint.dtype(old))
        for first, last, box in self._fit.parts(place, 0, place.numel):
            at = 0 if place.name in self._fit.rows else first
            self._checkpoint.read(old, "weight", at, at + last - first, out=values[first:last], box=box)
        segment.take(slot, values)

    def _mirror(self, segment: Segment, shard: Shard, kept: Tensor, bounds: tuple[int, int], over: Axes) -> None:
        """The other copies of the weights, from the values of the one that is kept, which is ``shard``."""
        copies = list(segment.copies())
        others = [(copy, at) for _, copy, at in copies if copy.region is not shard.region or at != bounds]
        if segment.held is None and all(at == bounds for _, _, at in copies):
            for other, _ in others:
                self.attempt(partial(other.write, kept))
            return
        # All values in the compute dtype: in the flat itself, where that has memory.
        whole = segment.flat
        if segment.split:
            whole = torch.empty(segment.spec.length, dtype=segment.dtype, device=segment.flat.device)
        if segment.split or not segment.master_is_rest:
            whole[slice(*bounds)].copy_(kept)
        complete(self._model.comm, [whole], over, WHAT)
        for other, place in others:
            if other.region.resting is not whole:
                self.attempt(partial(other.write, whole[slice(*place)]))

    @contextmanager
    def _opened(self, shard: Shard, *, replaced: bool) -> Iterator[Tensor]:
        """Inside, the values of a shard, to be changed in place. Of one in a file, all of which is to be ``replaced``,
        nothing is read, as that may be lost; what cannot be read is the outcome, and the others wait for this rank all
        the same."""
        values = shard.memory
        if values is None and not replaced:
            values = self.attempt(shard.read)
        if values is None:
            values = torch.zeros(shard.numel(), dtype=shard.dtype)
        yield values
        if shard.memory is None:
            self.attempt(lambda: shard.write(values))

    def _moments(self, segment: Segment) -> None:
        """The optimizer's state, the averages and what its reductions have lost of a segment."""
        for state, at, target in lost_targets(self._model, segment, self._there(segment)):
            self._fill(segment, state, target, at, segment.table.master.over)
        model, checkpoint, fit = self._model, self._checkpoint, self._fit
        update = model.updater
        assert update is not None
        bounds, over = segment.master_range, segment.table.master.over
        here = [(i, fit.parameters[s.name]) for i, s in enumerate(segment.spec.slots) if s.name in fit.parameters]
        for number, average in enumerate(model.run.averages):
            shard, state = average.shard(segment), average_state(number)
            for slot, old in here:
                if state not in checkpoint.states(old):  # it begins with what the parameter is now
                    piece = segment.own_piece(slot)[0]
                    self.attempt(lambda p=piece, s=shard: s[p].copy_(_master(segment).part(p).read()))
            self._fill(segment, state, shard, bounds, over)
        if segment.format_state is not None:
            lost = torch.zeros(segment.shard_numel, dtype=segment.format_state.dtype, device=segment.flat.device)
            self._fill(segment, LOST, lost, bounds, over)
            take_lost(model.comm, segment, lost)
        wanted: dict[str, list[tuple[int, str]]] = {}
        self.attempt(lambda: update.forget(segment, [slot for slot, _ in here]))
        every = len(here) == len(segment.spec.slots)  # then all moments are zeros, which no file is read for
        for slot, old in here:
            needed = update.needs(segment, slot)
            for state in checkpoint.states(old) if segment.spec.slots[slot].name in fit.trained else ():
                if is_moment(state) and (needed is None or state in needed):
                    wanted.setdefault(state, []).append((slot, old))
        for state, having in sorted(wanted.items()):
            region = update.moment(segment, state)
            if region is not None:
                target = self.attempt(region.get) if region.resting is not None or not every else None
                if target is None:  # the others wait for this rank all the same
                    target = torch.zeros(segment.shard_numel, dtype=region.dtype, device=segment.flat.device)
                self._fill(segment, state, target, bounds, over, {slot for slot, _ in having})
                self.attempt(partial(region.store, target))
                continue
            dtype = checkpoint.dtype(having[0][1], state)
            if dtype == checkpoint.dtype(having[0][1]):  # it follows its parameter, which may have another dtype here
                dtype = segment.dtypes["master"]
            shard = torch.zeros(segment.shard_numel, dtype=dtype, device=segment.update_device)
            self._fill(segment, state, shard, bounds, over)
            for slot, _ in having:
                self.attempt(lambda i=slot, n=state, s=shard: update.take_piece(segment, i, n, s))
        for slot, old in here:
            if segment.spec.slots[slot].name in fit.trained:
                self.attempt(lambda i=slot, o=old: self._once(segment, i, o))

    def _shared(self, segment: Segment) -> None:
        """What groups of ranks share of a segment; where the checkpoint has none, they begin with its weights."""
        there = self._there(segment)
        for state, bounds, target in shared_targets(self._model, segment, there, flies=self._flies):
            over = segment.table.master.over
            self._fill(segment, state, target, bounds, over)

    def _there(self, segment: Segment) -> set[str]:
        """States that the checkpoint has of any of its parameters."""
        names = [self._fit.parameters.get(slot.name) for slot in segment.spec.slots]
        return {state for name in names if name is not None for state in self._checkpoint.states(name)}

    def _once(self, segment: Segment, slot: int, old: str) -> None:
        update = self._model.updater
        assert update is not None
        for name, value in self._checkpoint.once(old, update.elsewhere(segment, slot)).items():
            update.take_value(segment, slot, name, value)

    def _fill(
        self,
        segment: Segment,
        state: str,
        target: Tensor,
        bounds: tuple[int, int],
        over: Axes,
        slots: set[int] | None = None,
    ) -> None:
        """Reads a state of a segment's range ``bounds`` into ``target`` ``(n,)``; what the checkpoint lacks stays.

        ``slots``: of these parameters only.
        """
        model, checkpoint = self._model, self._checkpoint
        mesh = model.comm.mesh
        others = tuple(axis for axis in mesh.data if axis not in over and axis not in segment.spec.distinct)
        size = target.numel() // model.comm.mesh.parts(others)
        low = bounds[0] + size * shard_index(others, model.comm.mesh.sizes, model.comm.mesh.coords)
        for slot, a, b in segment.spec.pieces(low, low + size):
            place = segment.spec.slots[slot]
            old = self._fit.parameters.get(place.name)
            if old is None or (slots is not None and slot not in slots):
                continue
            left_out = place.name in self._fit.left_out if state == "weight" else state not in checkpoint.states(old)
            if left_out:
                continue
            x, y = a - place.offset, b - place.offset
            read = with_group(self._group, state)
            read = read if read in checkpoint.states(old) else state
            for first, last, box in self._fit.parts(place, x, y):
                out = target[first + place.offset - bounds[0] : last + place.offset - bounds[0]]
                at = 0 if place.name in self._fit.rows else first
                self.attempt(
                    lambda o=old, s=read, a=at, b=at + last - first, t=out, of=box: checkpoint.read(
                        o, s, a, b, out=t, box=of
                    )
                )
        complete(model.comm, [target], others, WHAT)


def _master(segment: Segment) -> Shard:
    master = segment.shard("master")
    assert master is not None
    return master
