"""Whether a checkpoint fits an engine: names, shapes, the optimizer's state and its groups; from the index alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from shardfold.checkpoint.collect import is_moment
from shardfold.checkpoint.files import DTYPES
from shardfold.checkpoint.index import Parameter
from shardfold.checkpoint.names import Rename, renamer
from shardfold.checkpoint.reader import Checkpoint
from shardfold.errors import CheckpointError, did_you_mean
from shardfold.plan.placement import Box, Slot
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.stand_ins import EXTRA, takes_extra
from shardfold.sharding.whole_state import buffers_of, extra_states, most_precise, names_of

__all__ = ["Fit"]

#: Options of which it depends what states torch's optimizers keep.
STRUCTURE = ("amsgrad", "centered", "momentum")
#: Options that say how an update is computed, not what it is: the engine's own stay.
MEANS = ("foreach", "fused", "capturable", "differentiable")


class _Names(NamedTuple):
    missing: set[str]
    unexpected: set[str]


class Fit:
    """What of a checkpoint goes where in an engine.

    Args:
        model: that loads.
        checkpoint: what is loaded.
        rename, rows: see :meth:`Engine.load`.

    Attributes:
        rows: by the engine's name of a parameter, for each of its rows the checkpoint's, or -1.
        parameters: by the engine's name of a parameter, the checkpoint's.
        buffers: the same of buffers.
        extra: the same of extra state of modules, by its names in a state dict.
        missing: names of the model that the checkpoint does not have.
        unexpected: the other way round.
        trained: by the engine's name, the checkpoint's, of parameters whose optimizer state is loaded.
        options: options of the optimizer's groups that are loaded, by number.
        notes: what is not as it was, a sentence each.

    Raises:
        ConfigError: a rule of ``rename`` is no pattern.
        CheckpointError: ``rename`` gives two parameters one name.
    """

    def __init__(
        self,
        model: ShardedModel,
        checkpoint: Checkpoint,
        rename: Rename | None,
        rows: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._model, self._checkpoint, self.rows = model, checkpoint, dict(rows or {})
        self.notes: list[str] = []
        self.trained: dict[str, str] = {}
        self.options: dict[int, dict[str, Any]] = {}
        segments = [segment for unit in model.units for segment in unit.segments]
        buffers = buffers_of(model.module)
        self._mine = {slot.name: (slot.whole, segment) for segment in segments for slot in segment.spec.slots}
        self._buffers = {name: buffer for name, (buffer, _) in buffers.items()}
        #: Of parameters and buffers: what was made of others' files does not say which is one.
        self._theirs = checkpoint.parameters | checkpoint.buffers
        known = _known(self._theirs, renamer(rename, "engine.load"))
        also = names_of(model.module) | {name: names for name, (_, names) in buffers.items()}
        self.parameters = _matched(self._mine, also, known)
        self.buffers = _matched(self._buffers, also, known)
        mine = self.parameters | self.buffers
        twice = {known[name] for names in also.values() for name in names if name in known}  # tied ones, kept twice
        elsewhere = model.whole.names if model.whole is not None else frozenset[str]()
        of_others = {known[name] for name in elsewhere if name in known}
        self.extra = dict[str, str]()
        extra = self._fit_extra(renamer(rename, "engine.load"))
        unexpected = self._theirs.keys() - set(mine.values()) - twice - of_others - set(self.extra.values())
        self.unexpected = tuple(sorted(unexpected | extra.unexpected))
        self.missing = tuple(sorted(((self._mine.keys() | self._buffers.keys()) - mine.keys()) | extra.missing))

    def _fit_extra(self, named: Callable[[str], str]) -> _Names:
        """Finds the extra state of modules; what of it is not there, and what no module takes."""
        model, kept = self._model, self._checkpoint.extra_names()
        hollow = model.whole.hollow if model.whole is not None else frozenset[str]()
        here = extra_states(model.module, hollow)
        takes = {name for name, part in here.items() if takes_extra(part)}
        tensors = {name for name in self._theirs if name.rpartition(".")[2] == EXTRA}  # of others' files
        theirs = {named(old): old for old in (kept or set()) | tensors}
        self.extra = {name: theirs[name] for name in takes if name in theirs}
        missing = takes - theirs.keys()
        if kept is None and missing:
            self.notes.append(f"The checkpoint has no extra state of modules: {', '.join(sorted(missing))} stay.")
            missing = set[str]()
        known = extra_states(model.module)
        return _Names(missing, {old for new, old in theirs.items() if new not in known})

    def extra_of(self, name: str) -> Any:
        """The extra state of a module, by its name in the engine."""
        old = self.extra[name]
        return self._checkpoint.buffer(old) if old in self._theirs else self._kept_extra[old]

    @cached_property
    def _kept_extra(self) -> dict[str, Any]:
        return self._checkpoint.extra()

    @property
    def left_out(self) -> dict[str, Parameter]:
        """Parameters of which the checkpoint has a checksum only, by the engine's names."""
        theirs = {name: self._theirs[old] for name, old in self.parameters.items()}
        return {name: parameter for name, parameter in theirs.items() if parameter.digest is not None}

    def check_names(self, strict: bool) -> None:
        """
        Raises:
            CheckpointError: names, shapes or kinds of values do not fit; all are listed.
        """
        wrong: list[str] = []
        for name, old in self.parameters.items():
            shape, segment = self._mine[name]
            theirs, dtype = self._theirs[old], most_precise(self._model, segment)[0].dtype
            if theirs.shape != shape and (name not in self.rows or theirs.shape[1:] != shape[1:]):
                wrong.append(f"{name} is {_shape(theirs.shape)} in the checkpoint and {_shape(shape)} in the model")
            elif DTYPES[theirs.dtype].is_floating_point != dtype.is_floating_point:
                wrong.append(f"{name} is {DTYPES[theirs.dtype]} in the checkpoint and {dtype} in the model")
        for name, old in self.buffers.items():
            shape, theirs = tuple(self._buffers[name].shape), self._theirs[old]
            if theirs.shape != shape:
                wrong.append(f"{name} is {_shape(theirs.shape)} in the checkpoint and {_shape(shape)} in the model")
        self._check_rows()
        said: list[str] = []
        if strict and self.missing:
            said.append(f"missing: {', '.join(self.missing)}")
        if strict and self.unexpected:
            said.append(f"unexpected: {', '.join(self.unexpected)}")
        if said or wrong:
            hint = "" if wrong else "; rename= maps names, strict=False loads what fits"
            raise CheckpointError(f"{self._checkpoint.path} does not fit the model: {'; '.join(said + wrong)}{hint}.")

    def _check_rows(self) -> None:
        """
        Raises:
            CheckpointError: rows are asked for of a parameter that is not there, or that are none of it.
        """
        for name, rows in self.rows.items():
            if name not in self.parameters:
                raise CheckpointError(
                    f"engine.load(rows=...) names {name!r}, which the checkpoint or the model does not have."
                    f"{did_you_mean(name, self.parameters)}"
                )
            there, here = self._theirs[self.parameters[name]].shape, self._mine[name][0]
            if not here or len(rows) != here[0] or not all(-1 <= row < there[0] for row in rows):
                raise CheckpointError(
                    f"engine.load(rows=...) has {len(rows)} rows for {name!r}, which is {_shape(here)} in the "
                    f"model and {_shape(there)} in the checkpoint: give for each row its number in the checkpoint, or "
                    "-1."
                )

    def parts(self, slot: Slot, start: int, stop: int) -> Iterator[tuple[int, int, Box | None]]:
        """Of elements ``[start, stop)`` of what lies in a slot those that the checkpoint has, as few runs as there are:
        ``(first, last)``, and the box of the checkpoint's parameter that has them; where rows are not moved, that which
        the slot is, whose elements first and last count."""
        rows = self.rows.get(slot.name)
        if rows is None:
            yield start, stop, slot.box
            return
        each, offset = prod(slot.shape[1:]), slot.starts[0] if slot.starts else 0
        at = start
        while at < stop:
            row = at // each
            source, last = rows[offset + row], min((row + 1) * each, stop)
            within = at - row * each
            if not within:  # whole rows that follow each other there too are read at once
                while (
                    source >= 0 and last + each <= stop and rows[offset + last // each] == source + last // each - row
                ):
                    last += each
            number = -(-(last - at) // each)
            if source >= 0 and not within and last - at == number * each:
                yield at, last, Box((source, *[0] * (len(slot.shape) - 1)), (number, *slot.shape[1:]))
            elif source >= 0:  # a part of a row; parameters of one row have two dimensions
                yield at, last, Box((source, within), (1, last - at))
            at = last

    # -- the optimizer

    def check_optimizer(self, strict: bool) -> None:
        """Finds whose state is loaded, and which options.

        Raises:
            CheckpointError: the state is of an optimizer of another kind, or was kept in other groups.
        """
        model, checkpoint = self._model, self._checkpoint
        if model.updater is None or model.optimizer is None:
            return
        if checkpoint.index.optimizer is None:
            raise CheckpointError(f"{checkpoint.path} has no state of an optimizer: load it with weights_only=True.")
        self._check_groups(strict)
        self._check_states(strict)

    def _check_groups(self, strict: bool) -> None:
        model = self._model
        assert model.optimizer is not None
        saved = self._checkpoint.groups()
        home = {name: number for number, (_, names) in enumerate(saved) for name in names}
        members: list[list[str]] = [[] for _ in model.optimizer.param_groups]
        for segment in (s for unit in model.units for s in unit.trainable):
            members[segment.spec.group] += [slot.name for slot in segment.spec.slots]
        sources = [{home[old] for n in names if (old := self.parameters.get(n)) in home} for names in members]
        split = {number for number in range(len(saved)) if sum(number in source for source in sources) > 1}
        mixed = [number for number, source in enumerate(sources) if len(source) > 1 or source & split]
        if mixed and strict:
            inside = ", ".join(
                f"group {number} of the engine has parameters of {_list('group', sorted(sources[number]))} there"
                for number in mixed
            )
            raise CheckpointError(
                f"{self._checkpoint.path} was written with the optimizer's parameters in other groups ({inside}): make "
                "the same groups, or keep the engine's options with strict=False."
            )
        for number, (names, source) in enumerate(zip(members, sources, strict=True)):
            if number not in mixed and source:
                self.options[number] = saved[next(iter(source))][0]
            elif not names and number < len(saved) and (model.whole is not None or not saved[number][1]):
                self.options[number] = saved[number][0]
            elif names:
                what = "its parameters were in other groups" if number in mixed else "its parameters had none"
                self.notes.append(f"Group {number} of the optimizer keeps its options: {what}.")

    def _check_states(self, strict: bool) -> None:
        model, checkpoint = self._model, self._checkpoint
        assert model.updater is not None and model.optimizer is not None and checkpoint.index.optimizer is not None
        theirs, mine = checkpoint.index.optimizer["class"].rpartition(".")[2], type(model.optimizer).__name__
        written, here = theirs, mine  # as messages name them
        fresh: list[str] = []
        lacking: dict[str, list[str]] = {}
        surplus: set[str] = set()
        for segment in (s for unit in model.units for s in unit.trainable):
            group = model.optimizer.param_groups[segment.spec.group]
            saved = self.options.get(segment.spec.group, {})
            other = _other_kind(group, saved) if theirs == mine else ""
            for number, slot in enumerate(segment.spec.slots):
                old = self.parameters.get(slot.name)
                if old is None:
                    continue
                if not self._theirs[old].trainable:
                    fresh.append(slot.name)
                    continue
                needed = model.updater.needs(segment, number)
                have = {s for s in checkpoint.states(old) if is_moment(s)}
                if not slot.numel or (not have and theirs == mine):  # never used, so it has no state yet
                    self.trained[slot.name] = old
                    continue
                if needed is not None:
                    surplus |= have - needed
                    wrong = {repr(state) for state in needed - have}
                elif theirs != mine:  # a class of torch's: nobody says what its state is called
                    wrong = {f"state of {mine}"}
                else:
                    wrong = {f"state for {other}={group.get(other)!r}"} if other else set[str]()
                if other:
                    written, here = f"{theirs}({other}={saved[other]!r})", f"{mine}({other}={group.get(other)!r})"
                for state in wrong:
                    lacking.setdefault(state, []).append(slot.name)
                if not wrong:
                    self.trained[slot.name] = old
        if lacking or surplus:
            what = [
                f"it has no {state} of {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
                for state, names in sorted(lacking.items())
            ]
            what += [f"{mine} has no use for {s!r}" for s in sorted(surplus)]
            if strict:
                raise CheckpointError(
                    f"{checkpoint.path} was written with {written} and the engine has {here}: {'; '.join(what)}; load "
                    "it with weights_only=True, or what fits with strict=False."
                )
            self.notes.append(f"Of the state of {theirs} {mine} has taken what it knows: {'; '.join(what)}.")
        if fresh:
            self.notes.append(f"Not trained when saved, so with a new optimizer state: {', '.join(fresh)}.")
        had = {old for _, names in checkpoint.groups() for old in names}
        frozen = [n for n, old in self.parameters.items() if old in had and not self._mine[n][1].spec.trainable]
        if frozen:
            self.notes.append(
                f"Trained when saved and frozen here, so without its optimizer state: {', '.join(sorted(frozen))}; "
                "to go on training, unfreeze before loading."
            )

    def take_options(self) -> None:
        """Gives the optimizer's groups the options that they had; of an optimizer of another class its numbers."""
        model, checkpoint = self._model, self._checkpoint
        if model.optimizer is None or checkpoint.index.optimizer is None:
            return
        theirs, mine = checkpoint.index.optimizer["class"].rpartition(".")[2], type(model.optimizer).__name__
        same, taken = theirs == mine, set[str]()
        for number, options in self.options.items():
            group = model.optimizer.param_groups[number]
            for name, value in options.items():
                if name in MEANS or (name in STRUCTURE and bool(value) != bool(group.get(name))):
                    continue
                if same or name == "initial_lr" or (name in group and not isinstance(value, bool)):
                    taken |= {name} if name not in group or group[name] != value else set()
                    group[name] = value
        if taken and not same and theirs != "optimizer":  # of a folder of DeepSpeed's, which does not say which it was
            self.notes.append(
                f"Options of {theirs} that {mine} has too were taken over: {', '.join(sorted(taken))}; set them again "
                "in engine.optimizer.param_groups if they are not meant."
            )

    # -- what was given as ``state=``

    def check_state(self, state: Iterable[str], strict: bool) -> None:
        """
        Raises:
            CheckpointError: something was asked for that was not saved.
        """
        there = self._checkpoint.index.run.get("state", {})
        absent = [name for name in state if name not in there]
        if absent and strict:
            raise CheckpointError(
                f"{self._checkpoint.path} has no state of {', '.join(absent)}; it has {', '.join(there) or 'none'}."
            )


def _known(theirs: Mapping[str, Parameter], named: Callable[[str], str]) -> dict[str, str]:
    """The checkpoint's name by the new one, tied names too.

    Raises:
        CheckpointError: two get one name.
    """
    known: dict[str, str] = {}
    for parameter in theirs.values():
        for name in (parameter.name, *parameter.also):
            new = named(name)
            if known.setdefault(new, parameter.name) != parameter.name:
                raise CheckpointError(
                    f"engine.load(rename=...) gives {known[new]!r} and {parameter.name!r} the same name {new!r}: "
                    "make the rules tell them apart."
                )
    return known


def _matched(mine: Iterable[str], also: Mapping[str, Sequence[str]], known: Mapping[str, str]) -> dict[str, str]:
    """The checkpoint's name for each of the engine's that it has."""
    found: dict[str, str] = {}
    for name in mine:
        hit = next((known[candidate] for candidate in (name, *also.get(name, ())) if candidate in known), None)
        if hit is not None:
            found[name] = hit
    return found


def _other_kind(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """An option by which one optimizer of a class keeps other states than another, if there is one."""
    differs = [name for name in STRUCTURE if name in saved and bool(saved[name]) != bool(mine.get(name))]
    return differs[0] if differs else ""


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _list(word: str, numbers: Sequence[int]) -> str:
    return f"{word}{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"
