"""A batch through the stages of a pipeline: an order's actions, done one after the other.

A forward of a stage is a forward of the model in which pieces of other stages stand for what they give (see
``pipeline``); a backward begins with the gradients of what that sent. Each is a pass of the engine like any other, so
units are gathered, reduced and freed by the program of this stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.comm.agreement import Agreement
from shardfold.comm.coalesced import as_bytes
from shardfold.comm.launcher_notes import has_followed
from shardfold.engine.announced import Announced
from shardfold.engine.backward import Backward
from shardfold.engine.hooks import UP_TO_32, Hooks, cast_inputs
from shardfold.engine.runner import Runner
from shardfold.errors import CollectiveError, ModelError, OrderError, UsageError
from shardfold.parallel.batch import Sharded
from shardfold.parallel.pipeline.deferred import DeferredWeightGrads, Splits
from shardfold.parallel.pipeline.flow import (
    Constant,
    Made,
    TensorOrigin,
    TracedResult,
    is_plain,
    placeholder,
    signature,
)
from shardfold.parallel.pipeline.micro_batches import default_compute, micro_batches
from shardfold.parallel.pipeline.parts import parts_of
from shardfold.parallel.pipeline.picture import drawn
from shardfold.parallel.pipeline.point_to_point import Parcel, PointToPoint
from shardfold.parallel.pipeline.simulate import most, timeline
from shardfold.parallel.pipeline.stage_order import Action, OrderChoice, forwards, lower, make_order
from shardfold.parallel.pipeline.stages import Borders, StageDone, StageForward, Stages
from shardfold.parallel.pipeline.stash import Stash
from shardfold.parallel.pipeline.underway import StageActivations, UnderWay
from shardfold.parallel.pipeline.watch import PipelineStats, Watch
from shardfold.parallel.sequence import SequenceAxis
from shardfold.plan.rules import Rules
from shardfold.plan.walk import Part
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.partition import main_dtypes, rule_numbers
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.sharding.tree import cast_floats, widened
from shardfold.torch_internals import call_instead, in_backward, tree_flatten, tree_unflatten

__all__ = ["Pipelined", "dress"]

SPAN = 2**32  # of checksums

Compute = Callable[[nn.Module, Any], Tensor]


class Pipelined:
    """Runs batches of one engine.

    Args:
        model: of this rank's stages.
        runner, hooks, backward, announced: of the engine.
        stages: of the model; None: there is one.
        choice: of the order.
        stash: of versions of its weights that this rank keeps; None: no micro-batch outlasts its batch on any rank.
        sequence: over which ranks have parts of a micro-batch; None: they have all of it.

    Attributes:
        watch: what this rank does of its time.
    """

    def __init__(
        self,
        model: ShardedModel,
        runner: Runner,
        hooks: Hooks,
        backward: Backward,
        announced: Announced,
        stages: Stages | None,
        choice: OrderChoice,
        stash: Stash | None,
        sequence: SequenceAxis | None,
    ) -> None:
        self._model, self._runner, self._hooks, self._backward = model, runner, hooks, backward
        self._announced = announced
        self.stages, self.choice, self.sequence = stages, choice, sequence
        mesh = model.comm.mesh
        self._axis = mesh.sizes.stages[0] if stages is not None else ""
        self._here = mesh.coords[self._axis] if stages is not None else 0
        self._ranks = mesh.sizes[self._axis] if stages is not None else 1
        self._wire = PointToPoint(model.comm, self._axis) if stages is not None else None
        self._under = UnderWay(stash)
        self._coming: dict[int, list[Parcel]] = {}  # in the batch under way, by the place that sends it
        if stash is not None:
            model.rows.append(stash.row)
        self._losses: list[tuple[Tensor, float]] = []  # each with its weight
        self._given: list[Any] | None = None  # what the model gives where that is no loss
        self._in_batch = False  # a batch goes through stages, behind its first forward
        self._at: Action | None = None  # what is under way
        self._final: Action | None = None
        self._finals: dict[int, Action] = {}
        self._deferred: dict[tuple[int, int], DeferredWeightGrads] = {}  # of backwards in two parts
        self.watch = Watch()
        self._parts: dict[int, Part] = self._parts_of(stages) if stages is not None and choice.chunks > 1 else {}

    def _parts_of(self, stages: Stages) -> dict[int, Part]:
        units = self._model.units
        roots = [unit.name for unit in units if unit.spec.root]
        return parts_of(stages, {unit.name: unit.modules for unit in units}, roots, str(self.choice))

    @property
    def _job(self) -> Agreement:
        return self._model.comm.job

    def place(self, stage: int) -> int:
        """Where along the axis a stage is."""
        return self.stages.places[stage] if self.stages is not None else 0

    def order(self, count: int) -> list[list[Action]]:
        """Of so many micro-batches, by place along the axis.

        Raises:
            ConfigError: it cannot run that many.
        """
        return make_order(self.choice, self._ranks, count)

    def order_of_forwards(self, count: int) -> list[list[Action]]:
        """The same of an evaluation, which may have any number of micro-batches."""
        return forwards(self.choice, self._ranks, count)

    def actions(self, count: int) -> list[Action]:
        """What this rank does for so many micro-batches."""
        return lower(self.order(count)[self._here], self.stages.places if self.stages is not None else [0])

    def explained(self, count: int) -> list[str]:
        """The stages and the order of so many micro-batches, in lines of text."""
        if self.stages is None:
            return []
        stages, order = self.stages, self.order(count)
        line = timeline(order, stages.count)
        lines = [
            f"pipeline {self.choice}: {stages.count} stages on {self._ranks} ranks of {self._axis!r}, {count} "
            f"micro-batch{'es' * (count > 1)}"
        ]
        for stage in range(stages.count):
            paths = [piece.path for piece, at in zip(stages.pieces, stages.stage_of, strict=True) if at == stage]
            span = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)})"
            lines.append(f"  stage {stage:<3} rank {self.place(stage):<3} {span}{'  <-- here' * (stage in stages.own)}")
        for name, places in stages.shared.items():
            lines.append(f"  {name} is on the ranks {', '.join(map(str, sorted(places)))}, which sum its gradients")
        lines += [f"slots, where a backward takes two: bubble {line.bubble:.1%}", *drawn(line, self._ranks)]
        kept = ", ".join(map(str, line.kept))
        lines.append(f"micro-batches of stages that wait for their backward, at most, by rank: {kept}")
        if (borders := stages.latest) is not None:
            lines += self._bytes(order, borders)
        if (stash := self._under.stash) is not None:
            lines.append(f"weights of steps before, at most, on this rank, bytes: {stash.planned:,}")
        if any(action.verb == "W" for action in order[self._here]):
            lines.append("an I runs the section backward without GRADS and sums, a W only these, or those of last")
        return [*lines, "batch:", *(f"  {action}" for action in self.actions(count))]

    def _bytes(self, order: Sequence[Sequence[Action]], borders: Borders) -> list[str]:
        """What a batch like the last one keeps and sends."""
        stages, lines = self.stages, list[str]()
        assert stages is not None
        for border in range(stages.count - 1):
            there, back = (borders.crossing_bytes(border, back=back) for back in (False, True))
            ranks = self.place(border), self.place(border + 1)
            sent = f"{there:,} bytes, and {back:,} back" if ranks[0] != ranks[1] else "stays on its rank"
            lines.append(f"  a micro-batch from stage {border} to {border + 1}: {sent}")
        kept = [most(actions, lambda stage: borders.saved[stage]) for actions in order]
        lines.append(f"activations of pieces, at most, by rank, bytes: {', '.join(f'{each:,}' for each in kept)}")
        return lines

    def measured(self, count: int) -> PipelineStats | None:
        """See :attr:`Stats.pipeline`."""
        if self.stages is None:
            return None
        planned = timeline(self.order(count), self.stages.count).shares[self._here]
        return self.watch.stats(
            str(self.choice), self.stages.begins, planned, sees=not self._model.comm.mesh.on_streams
        )

    def drop(self) -> None:
        """What is under way from one batch to the next is not: weights get values that no update made."""
        self._under.drop()

    def look(self, batch: Any, compute: Compute | None, count: int) -> None:
        """Finds what crosses borders of such a batch, and what is kept of it; nothing is computed or sent."""
        if self.stages is not None:
            self._borders(micro_batches("engine.explain()", batch, count)[0], compute or default_compute)

    def refuse_call(self, what: str) -> None:
        """
        Raises:
            UsageError: this rank alone cannot run the model.
        """
        if self.stages is not None:
            raise UsageError(
                f"{what}: the model is cut into stages, of which this rank has a part: train with "
                "engine.train_batch(batch), evaluate with engine.eval_batch(batch); inside of torch.no_grad(), "
                "engine(...) gives what the model gives on all ranks, as generation needs it."
            )

    def attach(self) -> Callable[[], None]:
        """Calls of the model outside of a batch go through all stages; returned is what ends that."""
        if self.stages is None:
            return lambda: None
        stages, module = self.stages, self._model.module
        inner: Callable[..., Any] = vars(module).get("_compiled_call_impl") or module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) if stages.runs else self.call(args, kwargs)

        before = call_instead(module, call)

        def end() -> None:
            call_instead(module, before)

        return end

    def call(self, args: Any, kwargs: Any) -> Any:
        """What the model gives, without gradients, on all ranks; they all call it."""
        what = "engine(...)"
        if torch.is_grad_enabled() or in_backward():
            self.refuse_call(what)
        self._given = given = []
        try:
            return self._run(what, [(args, kwargs)], _called, 1, train=False, ends=self._result)
        finally:
            self._given = None
            given.clear()

    def _result(self, borders: Sequence[Borders]) -> Any:
        """What the last stage was given by the model, on all ranks.

        Raises:
            ModelError: it has what cannot be sent.
        """
        assert self.stages is not None and self._given is not None
        result, last = borders[0].trace.result, self.place(self.stages.count - 1)
        assert result is not None
        leaves = tree_flatten(self._given[0])[0] if self._here == last else [None] * len(result.leaves)
        found: list[Any] = []
        for known, value in zip(result.leaves, leaves, strict=True):
            if isinstance(known, Made):
                if value is None:
                    value = torch.empty(known.shape, dtype=known.dtype, device=self._model.device)
                value = value.detach().contiguous()
                self._model.comm.broadcast(as_bytes(value), "what the model gives", last, over=(self._axis,))
                found.append(value)
            elif isinstance(known, Constant):
                found.append(known.value)
        return tree_unflatten(found, result.spec)

    # -- batches

    def train(self, batch: Any, compute: Compute | None) -> Tensor:
        """See :meth:`Engine.train_batch`."""
        return self._run("engine.train_batch()", batch, compute, self._runner.accumulate, train=True)

    def evaluate(self, batch: Any, compute: Compute | None, count: int) -> Tensor:
        """See :meth:`Engine.eval_batch`."""
        with torch.no_grad():
            return self._run("engine.eval_batch()", batch, compute, count, train=False)

    def _run(
        self,
        what: str,
        batch: Any,
        compute: Compute | None,
        count: int,
        *,
        train: bool,
        ends: Callable[[Sequence[Borders]], Any] | None = None,
    ) -> Any:
        """``ends``: gives what is returned, once all has run; None: the mean loss."""
        compute, parts = compute or default_compute, list[Any]()

        def check() -> None:
            parts.extend(micro_batches(what, batch, count))
            _ = self.order(count) if train else self.order_of_forwards(count)
            if ends is not None:
                _check_result(self._borders(parts[0], compute).trace.result)
            if train and not torch.is_grad_enabled():
                raise UsageError(f"{what} inside of torch.no_grad(): it trains; engine.eval_batch() does not.")
            if train and self._model.run.micro_batch:
                raise UsageError(f"{what} behind a backward of the same step: call engine.step() first.")

        self._model.gate.meet(f"{what} of {count} micro-batches", follow=True, check=check)
        with self._told(what):
            if self.stages is None:
                return self._alone(parts, compute, train=train)
            order = self.order(count) if train else self.order_of_forwards(count)
            borders = [self._borders(part, compute) for part in parts]
        self._check_alike(what, borders)
        with self._told(what):
            assert self.stages is not None
            self._losses.clear()
            flows: Mapping[int, Borders] = dict(enumerate(borders))
            if train:
                order, flows = self._under.begin(order, borders), self._under.borders
            self._begin(order, flows)
            with self._model.comm.meter.of_batch(trains=train):
                self.watch.start()
                for action in lower(order[self._here], self.stages.places):
                    self._at = action
                    self.watch.begin(action)
                    self._do(action, parts, flows, compute)
                    self.watch.end(action)
                if train and self._final is None:
                    self._give_nothing()
            self._at = None
            if train:
                self.watch.stop()
            assert self._wire is not None
            self._receive_rest()
            self._wire.finish()
            if train:
                self._under.end(count)
            return self._mean_loss() if ends is None else ends(borders)

    def _check_alike(self, what: str, borders: Sequence[Borders]) -> None:
        """
        Raises:
            UsageError: on all ranks: stages of one model have batches of other shapes, and would wait for each other.
        """
        forms = [[found.trace.made(each) for each in crossing] for found in borders for crossing in found.crossing]
        comm, digest, rows = (
            self._model.comm,
            crc32(repr(forms).encode()),
            self._model.comm.mesh.sizes.rows((self._axis,)),
        )
        mine = next(i for i, row in enumerate(rows) if comm.mesh.rank in row)
        values = [0.0] * (2 * len(rows))
        values[2 * mine : 2 * mine + 2] = float(digest), float(SPAN - digest)
        most = comm.control(values, dist.ReduceOp.MAX)
        for i, row in enumerate(rows):
            if most[2 * i] + most[2 * i + 1] != SPAN:
                raise UsageError(
                    f"{what}: the stages on the ranks {', '.join(map(str, row))} have batches of different shapes, or "
                    "another compute=, or parameters that were frozen or unfrozen since the engine was made, but all "
                    "stages get the same: give the sampler rank=engine.data_rank and num_ranks=engine.data_ranks, and "
                    "make the engine anew where a stage is frozen."
                )

    def _alone(self, parts: Sequence[Any], compute: Compute, *, train: bool) -> Tensor:
        self._losses.clear()
        for part in parts:
            loss = compute(self._model.module, part)
            cut = self._cut()
            self._losses.append((loss.detach(), _weight(cut, 1.0)))
            if train:
                with self._of(cut):
                    self._backward.run(loss, _weight(cut), False)
        return self._mean_loss()

    def _cut(self) -> Sharded | None:
        """What the forward that has run had of its micro-batch; None: all."""
        return self.sequence.taken() if self.sequence is not None else None

    def _of(self, cut: Sharded | None) -> AbstractContextManager[None]:
        return self.sequence.again(cut) if self.sequence is not None else nullcontext()

    def _mean_loss(self) -> Tensor:
        """Of the micro-batches, which the last stage has; of their tokens, where ranks have parts of them."""
        comm, device = self._model.comm, self._model.device
        last = self.place(self.stages.count - 1) if self.stages is not None else 0
        values = torch.zeros(2, dtype=torch.float64, device=device)
        if self._here == last:
            weights = torch.tensor([weight for _, weight in self._losses], dtype=torch.float64, device=device)
            losses = torch.stack([loss.double().reshape(()) for loss, _ in self._losses])
            values = torch.stack([(losses * weights).sum(), weights.sum()])
        if self.stages is not None:
            comm.broadcast(values, "the loss of a batch", last, over=(self._axis,))
        self._losses.clear()
        total, weight = values[0], values[1]
        if self.sequence is not None and self.sequence.group.size > 1:
            for value in (total, weight):
                comm.number(value, (self.sequence.group.axis,), dist.ReduceOp.SUM, "the loss of parts of a batch")
        return total / weight

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What fails on this rank, the others, which wait for it, raise too and say why."""
        try:
            yield
        except BaseException as error:
            self._under.drop()
            self._deferred.clear()
            if self._wire is not None:
                self._wire.forget()
                if not isinstance(error, OrderError):
                    words = str(error).partition("\n")[0]
                    at = f" in {self._at}" if self._at else ""
                    rank = self._job.peers.rank
                    said = f"{what} failed on rank {rank}{at} ({type(error).__name__}: {words})"
                    if not isinstance(error, CollectiveError):
                        said += ", so no rank can go on: close the engine, make it anew and load a checkpoint"
                    self._job.give_up(f"{said}.", follows=isinstance(error, CollectiveError) and has_followed())
            raise
        finally:
            self._in_batch = False
            if self.stages is not None:
                self.stages.around.forget()
            if self._under.stash is not None:
                self._announced.announce(last=None)

    # -- actions

    def _begin(self, order: Sequence[Sequence[Action]], borders: Mapping[int, Borders]) -> None:
        """What will come, in the order in which others send it; and which backward of each stage is its last."""
        assert self._wire is not None and self.stages is not None
        self._finals = {each.stage: each for each in order[self._here] if each.verb in "BW"}
        self._final = next((each for each in reversed(order[self._here]) if each.verb in "BW"), None)
        second = [(stage, batch) for verb, stage, batch in order[self._here] if verb == "W"]
        self._deferred = {each: DeferredWeightGrads() for each in second}
        coming: dict[int, list[Parcel]] = {}
        forms: dict[Parcel, list[Any]] = {}
        for place, steps in enumerate(order):
            for step in steps:
                if not step.sends:
                    continue
                border, kind = (step.stage, "activations") if step.verb == "F" else (step.stage - 1, "gradients")
                target = step.stage + 1 if step.verb == "F" else step.stage - 1
                if not 0 <= border < self.stages.count - 1 or self.place(target) != self._here:
                    continue
                parcel, found = Parcel(kind, border, step.batch), borders[step.batch]
                made = [found.trace.made(origin) for origin in found.crossing[border]]
                forms[parcel] = made if step.verb == "F" else [each for each in made if each.requires_grad]
                if place != self._here:
                    coming.setdefault(place, []).append(parcel)
        self._coming = coming
        self._wire.begin(coming, forms)

    def _receive_rest(self) -> None:
        """What is for a later batch is here before this one is over."""
        assert self._wire is not None
        for place, parcels in self._coming.items() if self._under.stash is not None else ():
            for parcel in parcels:
                if self._wire.expects(parcel):
                    self._under.parcels[parcel] = self._wire.receive(place, parcel)

    def _give_nothing(self) -> None:
        """The backward of a batch in which this rank has none, as the first batches reach the last stages only."""
        before, deferred = self._model.run.micro_batch, DeferredWeightGrads()
        with self._announced.announcing(last=True, deferred=deferred, weights=True):
            self._backward.run_weights(deferred, self._hooks.begin_backward)
        self._runner.count_backward(before, final=True)

    def _do(self, action: Action, parts: Sequence[Any], borders: Mapping[int, Borders], compute: Compute) -> None:
        verb, stage, batch = action
        if verb == "F":
            self._forward(action, parts[batch], borders[batch], compute)
        elif verb in "BIW":
            self._backward_of(action)
        else:
            assert self._wire is not None
            how, _, what = verb.partition("_")
            before = (what == "F") == (how == "RECV")  # it crosses the border in front of the stage, or that behind it
            border, place = (stage - 1, self.place(stage - 1)) if before else (stage, self.place(stage + 1))
            parcel = Parcel("activations" if what == "F" else "gradients", border, batch)
            if how == "SEND":
                self._wire.send(self._under.parcels.pop(parcel), place, parcel)
            elif parcel not in self._under.parcels:  # it may have come behind the batch before
                self._under.parcels[parcel] = self._wire.receive(place, parcel)

    def _borders(self, part: Any, compute: Compute) -> Borders:
        assert self.stages is not None

        training, code = self._model.module.training, getattr(compute, "__code__", None)
        key = signature(part), code
        return self.stages.borders(key, lambda model: compute(model, part), self._flags, training=training)

    def _flags(self) -> dict[str, bool]:
        """Which of this rank's parameters are trained."""
        return {name: p.requires_grad for name, p in self._model.module.named_parameters()}

    def _forward(self, action: Action, part: Any, borders: Borders, compute: Compute) -> None:
        assert self.stages is not None
        _, stage, batch = action
        grad, last = torch.is_grad_enabled(), stage == self.stages.count - 1
        received: dict[TensorOrigin, Tensor] = {}
        if stage:
            came = self._under.parcels.pop(Parcel("activations", stage - 1, batch))
            for origin, tensor in zip(borders.crossing[stage - 1], came, strict=True):
                received[origin] = tensor.requires_grad_(grad and borders.trace.made(origin).requires_grad)
        run, loss = StageForward(stage, borders, received), None
        kind = self._announced.announcing(part=self._parts.get(stage), in_batch=self._in_batch)
        deferred = self._deferred.get((stage, batch))
        splits = nullcontext() if deferred is None else Splits(deferred, self._model.device)
        stash = self._under.stash if grad else None
        version, reads = (None, nullcontext()) if stash is None else stash.reading()
        with kind, self.stages.running(run), splits, reads:
            try:
                loss = compute(self._model.module, part)
            except StageDone:
                if last:
                    raise
        self._in_batch = True
        sent, cut = run.sent(), self._cut()
        if not last:
            self._hooks.end_early([tensor for tensor in sent if tensor.requires_grad])
            self._under.parcels[Parcel("activations", stage, batch)] = [tensor.detach() for tensor in sent]
        elif self._given is not None:
            self._given.append(_checked(loss, borders.trace.result))
        elif not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(f"compute= gave {type(loss).__name__}: it returns the loss, a tensor of one element.")
        else:
            self._losses.append((loss.detach(), _weight(cut, 1.0)))
        if grad:
            self._under.kept[stage, batch] = StageActivations(received, sent, loss if last else None, cut, version)

    def _backward_of(self, action: Action) -> None:
        verb, stage, batch = action
        before, final = self._model.run.micro_batch, action == self._final
        if (part := self._parts.get(stage)) is not None:
            part = part._replace(last=action == self._finals[stage], final=final)
        last = self._announced.context.last if self._under.stash is None else final  # first batches have fewer
        if verb == "W":
            deferred = self._deferred.pop((stage, batch))
            with self._announced.announcing(part=part, last=last, deferred=deferred, weights=True):
                self._backward.run_weights(deferred, self._hooks.begin_backward)
        else:
            deferred = self._deferred[stage, batch] if verb == "I" else None
            with self._announced.announcing(part=part, last=last, deferred=deferred):
                kept = self._under.take(stage, batch)
                self._give(stage, batch, kept)
                self._under.done(kept)
        if verb != "I":
            self._runner.count_backward(before, final=final)

    def _give(self, stage: int, batch: int, kept: StageActivations) -> None:
        """Runs a backward, of which the gradients of inputs go to the stage before."""
        with self._of(kept.cut):
            if kept.loss is not None:
                self._backward.run(kept.loss, _weight(kept.cut), False, counts=self._in_batch)
            else:
                came = self._under.parcels.pop(Parcel("gradients", stage, batch))
                sent = [tensor for tensor in kept.sent if tensor.requires_grad]
                assert self.stages is not None
                first = stage == max(self.stages.own)
                self._backward.run_from(sent, came, _weight(kept.cut), counts=first)
        if stage:
            leaves = [tensor for tensor in kept.received.values() if tensor.requires_grad]
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
            self._under.parcels[Parcel("gradients", stage - 1, batch)] = grads


def _weight(cut: Sharded | None, otherwise: Any = None) -> Any:
    """How many tokens a loss is the mean of."""
    return otherwise if cut is None or cut.valid is None else cut.valid


def _called(model: nn.Module, part: Any) -> Any:
    args, kwargs = part
    return model(*args, **kwargs)


def _check_result(result: TracedResult | None) -> None:
    """
    Raises:
        UsageError: it has what cannot be sent.
    """
    for each in result.leaves if result is not None else ():
        if isinstance(each, Constant) and not is_plain(each.value):
            raise UsageError(
                f"engine(...) gives a {type(each.value).__name__}, which no stage can send: leave it out, as caches of "
                "transformers with use_cache=False."
            )


def _checked(given: Any, expected: TracedResult | None) -> Any:
    """
    Raises:
        ModelError: it is not of the form that other stages know.
    """
    leaves, spec = tree_flatten(given)
    assert expected is not None
    forms = [Made(tuple(x.shape), x.dtype, False) if isinstance(x, Tensor) else x for x in leaves]
    known = [x.value if isinstance(x, Constant) else x for x in expected.leaves]
    if str(spec) != str(expected.spec) or forms != known:
        raise ModelError(
            f"engine(...) gave {forms}, but {known} where pieces computed shapes only: what a model gives on several "
            "stages cannot depend on values."
        )
    return given


def dress(
    module: nn.Module, rules: Rules, narrow: torch.dtype | None, autocast: tuple[torch.dtype, str] | None
) -> None:
    """Gives a skeleton of the model the dtypes in which the model computes, as :class:`Hooks` does for the model.

    Args:
        module: the skeleton.
        rules: of precision.
        narrow: what floating-point inputs are cast to; None leaves them.
        autocast: dtype and type of device of the ``torch.autocast`` that forward runs under.
    """
    main, number = main_dtypes(module, rules), rule_numbers(module, rules)
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is None or parameter.dtype != main.get(rule := number[id(parameter)]):
                continue
            dtype = TORCH_DTYPES[rules.precisions[rule].compute]
            if dtype != parameter.dtype:
                parameter.data = placeholder(Made(tuple(parameter.shape), dtype, False), parameter.device)
            if rules.mixed:
                part.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if narrow is not None:
            args, kwargs = cast_floats(args, narrow, UP_TO_32), cast_floats(kwargs, narrow, UP_TO_32)
        with torch.autocast(autocast[1], autocast[0], cache_enabled=False) if autocast else nullcontext():
            given = inner(*args, **kwargs)
        return widened(given) if rules.widens else given

    module.forward = forward
