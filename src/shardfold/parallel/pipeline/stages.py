"""Which stage has which pieces, and what crosses the borders between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.comm.comm import Comm
from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.parallel.pipeline._around import Around
from shardfold.parallel.pipeline.costs import PieceCosts
from shardfold.parallel.pipeline.flow import (
    Constant,
    Made,
    Passed,
    PieceTrace,
    Skeleton,
    TensorOrigin,
    placeholder,
    replace_forward,
)
from shardfold.parallel.pipeline.pieces import cost_of, cut_by_cost, cut_by_names, find_pieces
from shardfold.sharding.model import StagedNames
from shardfold.sharding.partitioned import early_shard, keep_mine
from shardfold.sharding.slices import mark_shared
from shardfold.sharding.whole_state import every_buffer, names_of
from shardfold.torch_internals import call_instead, in_backward, tree_flatten, tree_unflatten

__all__ = ["Borders", "StageDone", "StageForward", "Stages", "check_stages"]

TRACES = 64  # signatures of inputs that are kept in mind


class StageDone(Exception):
    """Ends a forward behind the last piece of a stage; nothing but the engine sees it."""


@dataclass
class Borders:
    """What a trace comes to for stages.

    Attributes:
        trace: of one signature of inputs.
        crossing: by border, that between the stages i and i + 1 at i: the tensors that cross it, in order.
        last: by stage the number of its last call; -1: it has none.
        saved: by stage the bytes that its pieces keep of a micro-batch for their backward.
    """

    trace: PieceTrace
    crossing: list[list[TensorOrigin]]
    last: list[int]
    saved: list[int]

    def crossing_bytes(self, border: int, *, back: bool = False) -> int:
        """What crosses a border of one micro-batch; ``back``: its gradients."""
        made = [self.trace.made(origin) for origin in self.crossing[border]]
        return sum(prod(each.shape) * each.dtype.itemsize for each in made if each.requires_grad or not back)


@dataclass
class StageForward:
    """One forward of one stage on one micro-batch.

    Attributes:
        stage: its number.
        borders: of its inputs.
        received: what came over the border before it.
        made: what its pieces gave.
        at: calls so far.
    """

    stage: int
    borders: Borders
    received: Mapping[TensorOrigin, Tensor]
    made: dict[TensorOrigin, Tensor] = field(default_factory=dict[TensorOrigin, Tensor])
    at: int = 0

    def next_call(self) -> int:
        """The number of the call that is made now."""
        self.at += 1
        return self.at - 1

    def sent(self) -> list[Tensor]:
        """What crosses the border behind it."""
        crossing = self.borders.crossing[self.stage] if self.stage < len(self.borders.crossing) else []
        return [self.made[origin] if origin in self.made else self.received[origin] for origin in crossing]


class Stages:
    """The stages of one model on one rank.

    Args:
        model: with all of its parameters.
        count: how many stages there are.
        own: those of this rank.
        given: the first piece of each stage but the first; None: cut such that the dearest is as cheap as can be.
        device: of what flows between them.
        places: of the stages along the axis; None: each is on a rank of its own.

    Attributes:
        pieces: of the model.
        stage_of: that of each piece.
        names: of parameters and buffers, all that each has, by stage.
        places: where along the axis each stage is.
        shared: the places along the axis of each parameter that several have, by its first name, which is its first
            on the first of these places.
        mine: the parameters of this rank.
        whole: the names of all of the model.
        skeleton: of it.
        latest: what crosses borders of the inputs that were asked about last.
        shared_here: those of ``shared``, in that order; None for one that this rank does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        own: Sequence[int],
        given: Sequence[str] | None,
        device: torch.device,
        places: Sequence[int] | None = None,
    ) -> None:
        self.pieces = find_pieces(model)
        self.count, self.own, self._device = count, tuple(own), device
        self.stage_of = (
            cut_by_cost([cost_of(piece) for piece in self.pieces], count, len(set(places or ())))
            if given is None
            else cut_by_names(self.pieces, given, count)
        )
        by_stage = self._by_stage(model)
        parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
        self.names = [{*names, *self._buffers_of(stage)} for stage, names in enumerate(by_stage)]
        self.places = list(range(count) if places is None else places)
        names = frozenset([*parameters, *every_buffer(model)])
        self.whole = StagedNames(names, names_of(model), self._untold(model), self._hollow(model))
        self.shared = self._shared(model, by_stage)
        parameters = {name: p for names in by_stage for name, p in names.items()}
        self.mine = {id(p): p for stage in self.own for p in by_stage[stage].values()}
        self.shared_here = [self.mine.get(id(parameters[name])) for name in self.shared]
        for number, (name, stages) in enumerate(self.shared.items()):
            mark_shared(parameters[name], stages, number)
        self.skeleton = Skeleton(model, self.pieces, device)
        self._traces: dict[Any, Borders] = {}
        self.latest: Borders | None = None
        self._run: StageForward | None = None
        self.around = Around(model, self.own)
        self._closers: list[Callable[[], object]] = []
        self._dropped: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = []
        self._ids = {stage: {id(p) for p in by_stage[stage].values()} for stage in self.own}
        self._tied: list[tuple[nn.Module, str, Tensor]] = []  # of dropped ones those that a stage of this rank has, too
        self._read: dict[int, list[tuple[nn.Module, str, Tensor]]] = {}
        self._early = [p for p in model.parameters() if early_shard(p) is not None]

    def _by_stage(self, model: nn.Module) -> list[dict[str, nn.Parameter]]:
        """The parameters of each stage, by all of their names."""
        holders: dict[int, set[int]] = {}
        for piece, stage in zip(self.pieces, self.stage_of, strict=True):
            for parameter in piece.module.parameters():
                holders.setdefault(id(parameter), set()).add(stage)
        named = list(model.named_parameters(remove_duplicate=False))
        return [{name: p for name, p in named if stage in holders[id(p)]} for stage in range(self.count)]

    def _shared(self, model: nn.Module, by_stage: Sequence[Mapping[str, nn.Parameter]]) -> dict[str, list[int]]:
        homes: dict[int, int] = {}  # of modules
        for piece, stage in zip(self.pieces, self.stage_of, strict=True):
            for module in piece.module.modules():
                homes.setdefault(id(module), stage)
        found: dict[str, list[int]] = {}
        for name, p in model.named_parameters():
            stages = (stage for stage, names in enumerate(by_stage) if name in names and names[name] is p)
            home = self.places[homes[id(model.get_submodule(name.rpartition(".")[0]))]]
            others = {self.places[stage] for stage in stages} - {home}
            if others:
                found[name] = [home, *sorted(others)]
        return found

    def _untold(self, model: nn.Module) -> frozenset[str]:
        last: dict[int, int] = {}  # by module, of pieces; every stage has those around them
        for piece, stage in zip(self.pieces, self.stage_of, strict=True):
            last.update(dict.fromkeys(map(id, piece.module.modules()), stage))
        here, found = self.places[self.own[0]], set[str]()
        for name in every_buffer(model):
            stage = last.get(id(model.get_submodule(name.rpartition(".")[0])), self.count - 1)
            if self.places[stage] != here:
                found.add(name)
        return frozenset(found)

    def _hollow(self, model: nn.Module) -> frozenset[str]:
        here, away = set[int](), set[int]()
        for piece, stage in zip(self.pieces, self.stage_of, strict=True):
            (here if stage in self.own else away).update(map(id, piece.module.modules()))
        away -= here
        named = model.named_modules(remove_duplicate=False)
        return frozenset(path for path, module in named if path and all(id(m) in away for m in module.modules()))

    def _buffers_of(self, stage: int) -> list[str]:
        mine = (piece for piece, at in zip(self.pieces, self.stage_of, strict=True) if at == stage)
        return [f"{piece.path}.{name}" for piece in mine for name, _ in piece.module.named_buffers()]

    @property
    def begins(self) -> list[str]:
        """The first piece of each stage but the first, as ``stages=`` takes them."""
        firsts = (self.stage_of.index(stage) for stage in range(1, self.count))
        return [self.pieces[i].path for i in firsts]

    # -- only what is this rank's

    def drop_foreign(self) -> Callable[[], None]:
        """Takes parameters and buffers of pieces that other ranks have out of the model, of which units are made then,
        until :meth:`settle` or what is returned, :meth:`put_back`."""
        mine = [piece for piece, stage in zip(self.pieces, self.stage_of, strict=True) if stage in self.own]
        kept = {id(module) for piece in mine for module in piece.module.modules()}
        for piece, stage in zip(self.pieces, self.stage_of, strict=True):
            if stage in self.own:
                continue
            for module in piece.module.modules():
                if id(module) in kept:
                    continue
                for held in (module._parameters, module._buffers):
                    for name, tensor in held.items():
                        if tensor is not None:  # code around the pieces may ask for a shape or a dtype
                            vars(module)[name] = placeholder(_made(tensor), self._device)
                            held[name] = None
                            self._dropped.append((module, held, name, tensor))
                            if id(tensor) in self.mine:
                                self._tied.append((module, name, tensor))
        return self.put_back

    def keep_mine(self, comm: Comm) -> None:
        """Of parameters that were built under ``sharded_init()`` the ranks of their stage keep slices, and no others;
        all ranks call it."""
        keep_mine(self._early, self.mine, comm)
        self._early.clear()

    def settle(self) -> None:
        """What other ranks have is gone."""
        self._dropped.clear()

    def put_back(self) -> None:
        """The engine is not made: the model is as it was."""
        for module, held, name, tensor in self._dropped:
            del vars(module)[name]
            held[name] = tensor
        self._dropped.clear()
        self._tied.clear()

    def attach(self) -> None:
        """From now on pieces are watched, and those of other ranks stand for what they give."""
        if len(self.own) > 1 and self.skeleton.around:
            self._closers.append(self.around.attach())
        for number, (piece, stage) in enumerate(zip(self.pieces, self.stage_of, strict=True)):
            if stage in self.own:
                handle = piece.module.register_forward_hook(partial(self._after, number), prepend=True)
                self._closers.append(handle.remove)
            else:
                replace_forward(piece.module, partial(self._stand_in, number))
                self._closers.append(partial(vars(piece.module).pop, "forward", None))

    def close(self) -> None:
        """Nothing is watched any more. Pieces of other ranks are hollow for ever."""
        for close in self._closers:
            close()
        self._closers.clear()

    # -- what flows

    def borders(
        self, key: Any, call: Callable[[nn.Module], Any], flags: Callable[[], Mapping[str, bool]], *, training: bool
    ) -> Borders:
        """For inputs of the signature ``key``; ``flags``: whether parameters of this rank are trained, by name.

        Raises:
            ModelError: a piece needs what a piece of a later stage gives.
        """
        key = key, training, tuple(p.requires_grad for p in self.mine.values())
        if key not in self._traces:
            self.skeleton.take_flags(flags())
            self._traces[key] = self._cut(self.skeleton.run(call, training=training))
            if len(self._traces) > TRACES:  # as where each text is longer by a word than the one before
                del self._traces[next(iter(self._traces))]
        self.latest = self._traces[key]
        return self.latest

    def _cut(self, trace: PieceTrace) -> Borders:
        stages = [self.stage_of[call.piece] for call in trace.calls]
        reach: dict[TensorOrigin, int] = {}  # the last stage that needs it
        for call, stage in zip(trace.calls, stages, strict=True):
            for origin in self._not_parameters(call.reads, stage):
                if stages[origin.call] > stage:
                    raise ModelError(
                        f"the piece {self.pieces[call.piece].path!r} of stage {stage} needs what "
                        f"{self.pieces[trace.calls[origin.call].piece].path!r} of stage {stages[origin.call]} gives: "
                        "stages have pieces in the order in which the model defines them, so define them as they are "
                        "called, or give the model a method pipeline_pieces() that returns their paths in that order."
                    )
                reach[origin] = max(reach.get(origin, 0), stage)
        for origin in self._not_parameters(trace.end, self.count - 1):
            reach[origin] = self.count - 1
        crossing = [
            sorted(origin for origin, end in reach.items() if stages[origin.call] <= border < end)
            for border in range(self.count - 1)
        ]
        last = [max((i for i, stage in enumerate(stages) if stage == each), default=-1) for each in range(self.count)]
        saved = [0] * self.count
        for call, stage in zip(trace.calls, stages, strict=True):
            saved[stage] += call.saved
        return Borders(trace, crossing, last, saved)

    def _not_parameters(self, origins: Iterable[TensorOrigin], stage: int) -> Iterator[TensorOrigin]:
        """Those that are what pieces give.

        Raises:
            ModelError: one of the others is a parameter that the stage does not have.
        """
        for origin in origins:
            if origin.call >= 0:
                yield origin
            elif (name := self.skeleton.names[origin.leaf]) not in self.names[stage]:
                has = next(i for i, names in enumerate(self.names) if name in names)
                raise ModelError(
                    f"stage {stage} reads {name!r} outside of the module that it belongs to, which stage {has} has: "
                    "give the model a module that is called there and has the same parameter, as a tied head is."
                )

    @property
    def runs(self) -> bool:
        """Whether a forward of a stage is under way."""
        return self._run is not None

    @contextmanager
    def running(self, run: StageForward) -> Any:
        """Inside, a forward of the model is that of one stage; pieces of other stages of this rank stand in, too, and
        code around the pieces reads of all others what :meth:`_read_in` says."""
        idle = [
            (number, piece.module)
            for number, (piece, stage) in enumerate(zip(self.pieces, self.stage_of, strict=True))
            if stage in self.own and stage != run.stage
        ]
        self._run = run
        before = [call_instead(module, partial(self._stand_in, number)) for number, module in idle]
        read = [(vars(module), name, tensor) for module, name, tensor in self._read_in(run.stage)]
        held = [names.get(name) for names, name, _ in read]
        for names, name, tensor in read:
            names[name] = tensor
        try:
            with self.around.of(run.stage, run.borders.trace.written):
                yield
        finally:
            self._run = None
            for (names, name, _), tensor in zip(read, held, strict=True):
                if tensor is None:
                    del names[name]
                else:
                    names[name] = tensor
            for (_, module), own in zip(idle, before, strict=True):
                call_instead(module, own)

    def _read_in(self, stage: int) -> list[tuple[nn.Module, str, Tensor]]:
        """What parameters of pieces of other stages are in a forward of this one. Of what it has itself, under a tied
        name, the parameter; of what another stage of this rank has a placeholder, as of what another rank has: its
        values may not be gathered, and nothing that this stage gives can depend on them."""
        if stage not in self._read:
            mine = [piece.module for piece, at in zip(self.pieces, self.stage_of, strict=True) if at == stage]
            seen = {id(module) for piece in mine for module in piece.modules()}
            found = [entry for entry in self._tied if id(entry[2]) in self._ids[stage]]
            for piece, at in zip(self.pieces, self.stage_of, strict=True):
                for module in piece.module.modules() if at in self.own and at != stage else ():
                    if id(module) in seen:
                        continue
                    seen.add(id(module))
                    found += [
                        (module, name, placeholder(_made(p), self._device))
                        for name, p in module._parameters.items()
                        if p is not None and id(p) not in self._ids[stage]
                    ]
            self._read[stage] = found
        return self._read[stage]

    def _next(self, number: int) -> tuple[StageForward, int]:
        """The run under way, and the number of this call of a piece.

        Raises:
            UsageError: there is none.
            ModelError: it is another call than that of the run that found what flows.
        """
        run = self._run
        if run is None and in_backward():
            raise ModelError(
                f"{self.pieces[number].path!r} is run again in a backward, but it is a part of the pipeline's stage "
                f"{self.stage_of[number]}, which other ranks have: torch.utils.checkpoint goes inside of pieces, not "
                'around several; or give the engine activations="recompute".'
            )
        if run is None:
            raise UsageError(
                f"{self.pieces[number].path!r} is a part of the pipeline's stage {self.stage_of[number]}, which other "
                "ranks have: train with engine.train_batch(batch), evaluate with engine.eval_batch(batch)."
            )
        calls, at = run.borders.trace.calls, run.at
        if at >= len(calls) or calls[at].piece != number:
            before = self.pieces[calls[at].piece].path if at < len(calls) else "nothing more"
            raise ModelError(
                f"the model ran {self.pieces[number].path!r} where it ran {before!r} on inputs of the same shapes "
                "before: what its pieces are called with cannot depend on values."
            )
        return run, run.next_call()

    def _after(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        """A piece of this rank's has run."""
        if self._run is None:  # as where a checkpoint runs it again
            return
        run, at = self._next(number)
        if run.stage == self.count - 1:
            return
        self._take(run, number, at, output)
        if at == run.borders.last[run.stage]:
            raise StageDone

    def _take(self, run: StageForward, number: int, at: int, output: Any) -> None:
        """What crosses the border of what a piece gave.

        Raises:
            ModelError: it is not of the form that other stages expect.
        """
        wanted = [origin for origin in run.borders.crossing[run.stage] if origin.call == at]
        if not wanted:
            return
        leaves = tree_flatten(output)[0]
        for origin in wanted:
            made, value = run.borders.trace.made(origin), leaves[origin.leaf]
            same = (tuple(value.shape), value.dtype) == (made.shape, made.dtype)
            if not same or value.requires_grad != made.requires_grad:
                raise ModelError(
                    f"{self.pieces[number].path!r} gave {_form(value)}, but {_form(made)} where it computed shapes "
                    "only: stages send what is known before."
                )
            run.made[origin] = value

    def _stand_in(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """In the place of the forward of a piece that another rank has."""
        run, at = self._next(number)
        if run.stage < self.count - 1 and at > run.borders.last[run.stage]:
            raise StageDone
        call, given = run.borders.trace.calls[at], tree_flatten((args, kwargs))[0]
        writes, leaves = run.borders.trace.writes, []
        for leaf, known in enumerate(call.leaves):
            if isinstance(known, Passed):
                leaves.append(given[known.number])
            elif isinstance(known, Constant):
                leaves.append(known.value)
            elif (came := run.received.get(TensorOrigin(at, leaf))) is not None:
                leaves.append(came.clone() if writes else came)
            else:
                assert isinstance(known, Made)
                leaves.append(placeholder(known, self._device, writes=writes))
        return tree_unflatten(leaves, call.spec)


def _made(tensor: Tensor) -> Made:
    return Made(tuple(tensor.shape), tensor.dtype, False)


def _form(value: Tensor | Made) -> str:
    return f"shape {tuple(value.shape)} in {value.dtype} {'with' if value.requires_grad else 'without'} gradient"


def check_stages(given: Any) -> None:
    """
    Raises:
        ConfigError: ``stages=`` is neither None, nor a list of names, nor what pieces cost.
    """
    names = isinstance(given, (list, tuple)) and all(isinstance(x, str) for x in given)
    if given is not None and not names and not isinstance(given, PieceCosts):
        raise ConfigError(
            "Parallel(stages=...) is the paths of the pieces at which stages begin, as in ['layers.4'], what "
            "measure_pieces() gives, or None."
        )
