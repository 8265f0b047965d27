"""Events in, operations out: which pass is running, in which order, and what surrounds it.

A pass (a forward, a backward; see ``passes``) follows the recorded order of units where there is one and asks before
each unit where there is none. Orders are kept for forward in training, forward in evaluation and backward (``orders``).

Every pass that issues collectives begins with a meeting, in which ranks find out that they are about to do different
things before they do them. Where passes and steps follow each other as they did before, ranks tell behind each what
they expect next, and begin that without a meeting (see ``comm/_expected``). A rank that waits in one while others still
evaluate helps them: it takes part in the collectives of their forward and computes nothing.

``[Note: late gradients]`` A gradient may arrive after its unit was reduced: another rank took another branch, the units
ran in another order, or a second backward follows. It waits in the unit's buffer ``local``; at the step all ranks agree
(in the same small reduction that agrees on used parameters) to reduce such units once more. Sums are linear, so nothing
is lost. Where ranks show whole sums behind the last backward (``ddp``) no unit is reduced before its gradients are
there, so that these sums are complete; only a re-entrant checkpoint still brings some later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from shardfold.comm.agreement import CAUGHT, Meeting
from shardfold.comm.expected import Expectation, Place
from shardfold.engine._away import Away
from shardfold.engine._orders import Orders, mode_of
from shardfold.engine._pass_stack import PassStack
from shardfold.engine._visible import VisibleGradients
from shardfold.engine.handlers import Handlers
from shardfold.engine.hooks import Hooks
from shardfold.engine.pass_context import PassContext
from shardfold.engine.passes import LocalPass, NegotiatedPass, Pass, ReplayedPass
from shardfold.engine.track import Section, Track
from shardfold.errors import UsageError
from shardfold.numerics.clipping import Clip
from shardfold.parallel.pipeline.deferred import DeferredWeightGrads
from shardfold.plan.bind import PASSES
from shardfold.plan.rewrites import Overlap
from shardfold.plan.walk import Part
from shardfold.sharding.buffers import Buffers
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.unit import Life, Unit
from shardfold.torch_internals import in_backward

__all__ = ["STEP", "Runner"]

STEP = "the optimizer step"

P = ParamSpec("P")
R = TypeVar("R")


def _uninterrupted(method: Callable[Concatenate[Runner, P], R]) -> Callable[Concatenate[Runner, P], R]:
    """Nothing of the user's runs inside, and how far it came is not known behind an interruption."""

    @wraps(method)
    def inside(self: Runner, *args: P.args, **kwargs: P.kwargs) -> R:
        try:  # as `with self.agreement.uninterrupted()`, which would cost as much as what most events do
            return method(self, *args, **kwargs)
        except BaseException as error:
            self.agreement.interrupted(error)
            raise

    return inside


class Runner:
    """Receives the hooks' events (see ``hooks.Listener``).

    Args:
        model: whose run counts backwards and steps.
        handlers: that operations are bound to.
        away: states that a user lets rest elsewhere.
        overlap: how far ahead units are gathered.
        accumulate: micro-batches per step.
        clip: what the program does to gradients before the step; None: nothing.
        stashes: see :class:`Orders`.

    Attributes:
        orders: in which units run, and the programs.
        visible: gradients as users see them.
        interrupted: an exception has left the model's forward or backward, which is not settled yet.
        lost: how often :meth:`reset` has forgotten gradients of earlier backwards.
        outside: seconds between a backward or a step and the next forward.
    """

    def __init__(
        self,
        model: ShardedModel,
        handlers: Handlers,
        away: Away,
        overlap: Overlap,
        accumulate: int,
        *,
        clip: Clip | None,
        stashes: bool = False,
    ) -> None:
        self.model, self.handlers, self.away, self.accumulate = model, handlers, away, accumulate
        self.comm, self.agreement = model.comm, model.comm.agreement
        self.orders = Orders(model.layout, model.comm, handlers, overlap, clip=clip, stashes=stashes)
        self.visible = VisibleGradients(model)
        self.buffers = Buffers(model.module, model.comm, always=model.tiers.device.debug)
        self._state = model.run
        self.outside = 0.0
        self._left = 0.0  # when that began; 0: it has not
        self._boundary_before = False
        self._scaled = False  # whether the backward under way is that of a loss that the engine scaled
        self.interrupted = False
        # An exception has left a pass, or this rank was reset, and the others were not asked about that yet.
        self._caught = False
        self.lost = 0
        self.agreement.connect(self._take_part, self._where)
        self._step: Callable[[], tuple[Expectation, Sequence[bool]]] = lambda: (Expectation(STEP), (True,))
        self._met = False  # whether all ranks have met for the pass under way
        self._evaluated = False  # since the last step
        self._delivered = False  # whether this backward gave gradients
        self._asked_backward = False  # whether a backward of this step was a negotiated pass
        self._grad_forward = True
        self._passes = PassStack()
        self._ran: Part | None = None  # what of the model the pass under way, or else the one before, goes through
        self._between: Section | None = None  # of the program, that runs between passes
        self._thread = get_ident()  # that runs forward
        self._full: set[str] = set()  # units that a forward found full: of two forwards before one backward
        self._own: list[str] = []  # what this rank ran in the pass before
        self._forwards = 0  # in training since the last step, those that were dropped too
        self._shared = False  # gradients of what several stages have are summed over them
        self.renew(model.units)
        if handlers.optimizer is not None:
            handlers.optimizer.guard_by(self._optimizer_zero_grad)

    def connect(self, hooks: Hooks) -> None:
        """These deliver events, and know where the threads that run the model are."""
        self._hooks = hooks

    def set_accumulate(self, accumulate: int) -> None:
        """So many micro-batches are a step from now on."""
        self.accumulate = accumulate

    def renew(self, units: Sequence[Unit]) -> None:
        """These are the units from now on."""
        self.units = list(units)
        self.by_name = {unit.name: unit for unit in units}
        for unit in units:
            unit.connect(partial(self.touch, unit), partial(self.comm.transport.fence, self.agreement.wait))
        self.orders.renew(units)

    @property
    def roots(self) -> set[str]:
        """Names of the units that are held through a pass."""
        return self.orders.roots

    def _start(self, section: str, *, nested: bool = False) -> Pass:
        """A pass of that section, which does not run yet."""
        verb = "B" if mode_of(section) == "backward" else "F"
        if not self.orders.moves(section):
            return LocalPass()
        part, weights = self._passes.context.part, self._passes.context.weights
        self._ran = part
        held = self._of_pass(self.roots) if not weights else ()  # gradients of weights need no values of these
        roots = [unit for unit in self.units if unit.name in held]
        if not nested and (self.orders.known(section, part) or weights):
            return ReplayedPass(verb, self.orders.track(section, part), roots, self.handlers, self._deviate)
        return self._asked(section, nested=nested)

    def _of_pass(self, names: set[str]) -> set[str]:
        """Those of the units that the pass under way goes through. A pass through one of several stages has no
        operation that frees what is of another, so it must not gather that either: behind an update that would still
        have the old values."""
        return set(names) if self._ran is None else names & (self._ran.units | self._ran.common)

    def _asked(self, section: str, *, own: list[str] | None = None, nested: bool = False) -> NegotiatedPass:
        verb = "B" if mode_of(section) == "backward" else "F"
        gathers = "first" if self.orders.bound.program.first else "forward"
        return NegotiatedPass(
            verb,
            self.orders.unordered(section, self._ran),
            self.by_name,
            self._of_pass(self.roots),
            self.agreement,
            self.handlers,
            refill=self.orders.unordered(gathers),
            own=own,
            nested=nested,
        )

    def _deviate(self, unit: Unit) -> None:
        """A unit is needed that the recorded order has passed."""
        assert self._passes.run is not None
        if unit.name not in self.roots:
            self._passes.run.own.pop()
        self._go_on_asking().enter(unit)

    def _go_on_asking(self) -> NegotiatedPass:
        """[Note: more of a pass] The replayed pass is finished as by a rank that needs nothing more, so that all ranks
        end it together; what this rank still needs it asks for in a second pass, in which the others, who wait at
        their next meeting, take part."""
        run, section = self._passes.run, self._passes.section
        assert isinstance(run, ReplayedPass)
        run.finish()
        self.meet(f"more of {_title(section)}", more=PASSES.index(section))
        again = self._asked(section, own=run.own)
        self._passes.begin(section, again)
        return again

    @_uninterrupted
    def _finish(self, *, whole: bool = True) -> None:
        """Ends the pass under way on all ranks; what a negotiated pass found becomes the order of the next, if it is
        ``whole`` on all of them."""
        run, section = self._passes.run, self._passes.section
        assert run is not None
        run.finish()
        self.comm.transport.fence(self.agreement.wait)
        self.comm.memory.settle()
        self._passes.end()
        self._own = run.own
        if isinstance(run, NegotiatedPass) and not self._passes.nested:
            self._asked_backward |= mode_of(section) == "backward"
            self.orders.adopt(mode_of(section), run, self._ran, whole=whole)

    # -- meetings

    def meet(self, what: str, *, flags: Sequence[bool] = (), **how: Any) -> Meeting:
        """All ranks are about to do ``what``; ranks that still evaluate, or need more of a pass, are helped first.

        Args:
            what: as of :meth:`Agreement.meet`.
            flags: the same.
            how: the others of its arguments.

        Raises:
            OrderError: they are not.
        """
        if self.agreement.peers.size == 1:
            return Meeting(True, [*map(int, flags)], bits=how.get("bits", ()))
        while True:
            evaluated = self._evaluated or how.get("evaluating", False)
            met = self.agreement.meet(what, flags=flags, evaluated=evaluated, **how)
            if met.together:
                return met
            if met.more is not None:
                self._help_on(PASSES[met.more])
            else:
                self._help_evaluate(met.flags)

    def meet_all(self, what: str, *, flags: Sequence[bool] = ()) -> Sequence[bool | int]:
        """As :meth:`meet`, of all ranks, those of other stages included: the flags alone.

        Raises:
            OrderError: they are about to do different things.
        """
        said, job = self.meet(what, flags=flags).flags[: len(flags)], self.comm.job
        return said if job is self.agreement else job.meet(what, flags=[bool(flag) for flag in said]).flags

    def _meet_or_refuse(self, what: str, refusal: UsageError | None, *, expected: bool = False) -> None:
        """As :meth:`meet`, where this rank may refuse what its user did to gradients, which are shown again.

        Raises:
            UsageError: the ``refusal``.
            ConfigError: that of another rank.
            OrderError: on all ranks: one has dropped a micro-batch that others have not.
        """
        flags = [False, False, self._caught, refusal is not None]  # the first: of buffers
        said = self.meet(what, flags=flags, expected=expected, place=self._place()).flags
        if said[CAUGHT]:
            self.agreement.compare(what, self._place())
        self._caught = False
        if said[3]:
            if refusal is None:
                self.visible.show()
            self.agreement.refuse(what, refusal)

    def _place(self) -> Place:
        """Where in a step this rank is, for the others to compare where some rank has dropped what it did."""
        return Place(self._forwards, self._state.micro_batch, self._caught)

    def _announce(self, what: str, refusal: UsageError | None, *, expected: bool) -> None:
        """[Note: when the answer of a meeting is needed] All ranks are about to do ``what``, which is found out while
        this rank does it: before its first collective. Where parameters are split a pass begins with one, and a rank
        may have to help others first (that still evaluate, or need more of a pass): that cannot wait, but it may be
        ``expected``. So it is with buffers, which a forward makes equal."""
        if refusal is not None or self.buffers.any or any(unit.split for unit in self.units):
            self._meet_or_refuse(what, refusal, expected=expected)
        else:
            self.agreement.announce(what, self._place())
            self._caught = False

    def expect_steps(self, expectation: Callable[[], tuple[Expectation, Sequence[bool]]]) -> None:
        """What this rank tells of a step before it takes it; the method's object is not kept alive."""
        method = WeakMethod(expectation)
        self._step = lambda: alive() if (alive := method()) is not None else (Expectation(STEP), (True,))

    def foresee(self, *, failed: bool | None = None) -> None:
        """Between passes, all ranks at the same place: the others hear what this rank expects to do next, and where a
        step has just been taken in whose updates something may fail, whether this rank's have ``failed``."""
        if self._passes.run is not None or self._passes.nested or self.agreement.peers.size == 1:
            return
        what = self.agreement.next
        if what is not None or failed is not None:
            mine, flags = self._step() if what == STEP else (Expectation(what or "whatever follows a step"), ())
            self.agreement.expect(mine, flags, evaluated=self._evaluated, failed=bool(failed))

    def _take_part(self) -> bool:
        """This rank waits in another engine, and a rank needs more of a pass that this one has ended here."""
        if self.under_way:
            return False
        met = self.agreement.meet("another engine's turn", evaluated=self._evaluated)
        if met.more is not None:
            self._help_on(PASSES[met.more])
        return True

    @_uninterrupted
    def _help_on(self, section: str) -> None:
        """Takes part in what other ranks still need of the pass that this rank has ended."""
        before = self._passes.section, self._passes.run
        self._passes.begin(section, self._asked(section, own=self._own))
        self._finish()
        self._passes.resume(*before)

    @_uninterrupted
    def _help_evaluate(self, flags: Sequence[int]) -> None:
        """Takes part in the forward of ranks that evaluate more batches than this one."""
        self.buffers.synchronize(any(flags[:1]))
        self.comm.meter.begin_forward("alone")
        self.handlers.expect_backward(False)
        self._full = {unit.name for unit in self.units if unit.life is not Life.RESTING}
        self._passes.begin("eval", self._start("eval"))
        self._finish()
        self._free_all()
        self.comm.meter.end_evaluation()

    @property
    def under_way(self) -> bool:
        """Whether a pass runs, or was interrupted and is not settled."""
        return self._passes.run is not None or self.interrupted

    def settle(self, what: str = "this call") -> None:
        """Ends what an exception interrupted, so that all ranks are where a pass begins.

        Raises:
            UsageError: ``what`` was called inside of a pass, which goes on.
        """
        if not self.under_way:
            return
        if self._hooks.inside():
            raise UsageError(f"{what} inside of the model's forward or backward: call it between passes.")
        self.reset()

    @property
    def losses(self) -> int:
        """:attr:`lost`, with what is not settled yet."""
        return self.lost + (self.interrupted and self._state.micro_batch > 0)

    def interrupt(self) -> None:
        """An exception leaves the model's forward or backward."""
        self.interrupted = True

    def note_caught(self) -> None:
        """An exception leaves a backward of this rank, which the user may catch: the others are to be asked."""
        self._caught = True

    def drop_interrupted(self) -> None:
        """Before a backward: what an exception left is ended, as by :meth:`settle`."""
        if self.interrupted:
            self.reset()

    @_uninterrupted
    def reset(self) -> None:
        """Back to a clean state; gradients since the last step are lost.

        The interrupted pass is finished without computing: other ranks may have been further, or may still be in it.
        What ran of it on this rank is not the order of the next.
        """
        self.interrupted = self._scaled = False
        self._caught = True
        self.lost += self._state.micro_batch > 0
        self._hooks.forget()
        for unit in self.units:
            unit.forget_running()
        going = True
        while going:
            if isinstance(self._passes.run, NegotiatedPass):
                self._passes.run.touched.clear()
            if self._passes.run is not None:
                self._finish(whole=False)
            going = self._passes.go_on()
        self.handlers.detours.clear()
        for unit in self.units:
            if unit.life is Life.GATHERING:
                unit.end_gather(self.agreement.wait)
            if unit.split and unit.life is Life.GATHERED and not unit.pins:
                unit.release()
        self.zero_grad()

    @_uninterrupted
    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        self._shared = False
        self.handlers.withdraw()
        self._state.end_attempt()
        self.visible.forget()
        for unit in self.units:
            unit.gradients.end_pass(self.agreement.wait)
            unit.forget_gradients()
            for segment in unit.trainable:
                for parameter in segment.parameters:
                    parameter.grad = None

    def _optimizer_zero_grad(self, set_to_none: bool) -> None:
        self.settle("optimizer.zero_grad()")
        self.handlers.withdraw()
        self.visible.drop(zero=not set_to_none)
        self.handlers.shares.forget()

    # -- forward events

    @_uninterrupted
    def begin_forward(self, context: PassContext) -> None:
        if self.under_way:  # of an interrupted pass: the hooks deliver no forward inside of another
            self.reset()
        self.outside += perf_counter() - self._left if self._left else 0.0
        self._left = 0.0
        self._passes.prepare(context)
        self._scaled = False
        self._thread = get_ident()
        self.model.gate.follow()
        grad = torch.is_grad_enabled()
        section = "forward" if grad else "eval"
        local = all(unit.pins or not unit.split for unit in self.units) and any(unit.pins for unit in self.units)
        changed, first = False, grad and self._first()
        follows = not context.in_batch  # a forward whose backward is still to come reads buffers as they were
        if (
            self.agreement.peers.size > 1
            and not local
            and (self.orders.moves(section) or self.orders.bound.program.first or (self.buffers.asks and follows))
        ):
            what = f"a forward pass {'in training' if grad else 'in evaluation (without gradients)'}"
            flags = [follows and self.buffers.changed(), first]
            # What a flag brings about comes before the forward.
            expected = not (self.buffers.any or self.orders.bound.program.first) and self._follows(section, context)
            said = self.meet(what, evaluating=not grad, flags=flags, expected=grad and expected).flags
            changed, first = bool(said[0]), bool(said[1])
            self._met = True
            if follows:
                self.buffers.synchronize(changed)
        if first:
            section = "first"
        if grad and context.synchronize:
            self.buffers.trained(alone=local)
        self._forwards += grad and not local
        self._evaluated |= not grad
        self.comm.meter.begin_forward("alone" if not grad else "first" if first else "forward", context.part)
        self._grad_forward = grad
        # Asked here and not at a unit: a re-entrant checkpoint runs units of a training forward without gradients.
        # The same for a checkpoint around the whole model, which leaves only the training mode to tell.
        self.handlers.expect_backward(grad or self.model.module.training)
        self.away.come_back("params")
        self.comm.memory.after_compute()  # updates and users wrote the shards that gathers read on the side stream
        self._full = {unit.name for unit in self.units if unit.life is not Life.RESTING}
        self._passes.begin(section, LocalPass() if local else self._start(section))

    def _follows(self, section: str, context: PassContext) -> bool:
        """Whether a pass through all of the model follows a recorded order, so that it sends no messages."""
        return context.part is None and not context.in_batch and self.orders.known(section)

    def _first(self) -> bool:
        """Whether a forward has to gather what stays gathered until the step."""
        if not self.orders.bound.program.first:
            return False
        names = self._passes.context.units
        return any(u.split and not u.kept for u in self.units if u.keeps and (names is None or u.name in names))

    @_uninterrupted
    def end_forward(self) -> None:
        if self._passes.run is not None:
            self._finish()
        self._passes.prepare(PassContext())
        if not self._grad_forward:  # nothing will need what a layout keeps for backward
            self._free_all()
            if not self.handlers.backward_follows:
                self.comm.meter.end_evaluation()
            if self.handlers.goes_on and self.orders.known("eval"):
                self.handlers.read_ahead(self.orders.first_reads)
        elif self._met:
            self.foresee()
        self._met = False

    def _free_all(self) -> None:
        for unit in self.units:
            if unit.name not in self._full:
                self.handlers.free(unit)
        self.handlers.detours.clear()

    @_uninterrupted
    def enter_forward(self, unit: Unit) -> None:
        if self._passes.run is None:
            if unit.life is Life.RESTING:
                raise UsageError(
                    f"{unit.name!r} ran outside of its model's forward: call the model itself, make the method that "
                    "runs it a forward too, as in sf.register_forward(model, 'encode'), or wrap the call in "
                    "`with engine.gathered():`."
                )
            unit.enter()
            return
        self._passes.run.enter(unit)
        unit.enter()

    @_uninterrupted
    def leave_forward(self, unit: Unit, *, interrupted: bool = False, aliased: bool = False) -> None:
        """``interrupted``: by an exception. ``aliased``: what it returned is a view of one of its weights."""
        unit.leave()
        if self._passes.run is None or interrupted:
            return
        if aliased and unit.name not in self.roots:
            self.touch(unit)
        else:
            self._passes.run.leave(unit)

    @_uninterrupted
    def touch(self, unit: Unit) -> bool:
        """A freed weight is read outside of its unit's forward: gathers it if a pass is under way."""
        run = self._passes.run
        if run is None or self.interrupted or isinstance(run, LocalPass) or not self._in_its_thread():
            return False
        if unit.life is Life.GATHERING:
            self.handlers.finish_gather(unit)
        if isinstance(self._passes.run, ReplayedPass):
            self._go_on_asking()
        assert isinstance(self._passes.run, NegotiatedPass)
        self._passes.run.touch(unit)
        return True

    def _in_its_thread(self) -> bool:
        """Whether the caller is what the pass runs: another thread that reads a weight must issue no collectives."""
        return in_backward() or get_ident() == self._thread

    @_uninterrupted
    def hold(self, units: Sequence[Unit]) -> bool:
        """Inside of a pass: gathers the units and keeps them to its end; False outside of one."""
        if self._passes.run is None or self.interrupted or not self._in_its_thread():
            return False
        for unit in units:
            if unit.life is Life.GATHERING:
                self.handlers.finish_gather(unit)
            if unit.life is Life.RESTING and not self.touch(unit):
                return False
        return True

    # -- backward events

    def begin_scaled(self) -> None:
        """A backward begins whose loss the engine has scaled; none is under way but one that an exception has left."""
        self.drop_interrupted()
        self._scaled = True

    @contextmanager
    def of_scaled_loss(self) -> Iterator[None]:
        """The backward inside is that of a loss that the engine has scaled."""
        self._scaled = True
        try:
            yield
        finally:
            self._scaled = False

    @_uninterrupted
    def begin_backward(self, context: PassContext, *, create_graph: bool = False) -> None:
        if create_graph and any(unit.split and not unit.pins for unit in self.units):
            raise UsageError(
                "gradients of gradients (create_graph=True) need the weights longer than a layout that splits "
                "parameters keeps them: run forward and both backwards inside `with engine.gathered():`, or choose a "
                "layout that keeps parameters whole (ddp, zero1, zero2)."
            )
        self.drop_interrupted()
        self.away.come_back()
        self.handlers.withdraw()  # of a step that this backward adds to
        self._delivered, self._boundary_before = False, self._state.gradients_ready
        nested = self._passes.run is not None
        ready = context.sums(self._state.micro_batch, self.accumulate, nested=nested)
        section = context.section(sums=ready, nested=nested)
        refusal = self.visible.try_hide()
        # Inside of `gathered()` a forward is this rank's own, and so is what it takes gradients of in itself.
        alone = nested and isinstance(self._passes.run, LocalPass) and all(u.pins or not u.split for u in self.units)
        if self.orders.moves(section) and not alone:
            title = context.title(self._state.micro_batch, self.accumulate, nested=nested)
            self._announce(title, refusal, expected=not nested and self._follows(section, context))
            self._met = True
        elif refusal is not None:
            raise refusal
        self._state.sum_for_step(ready and (context.part is None or context.part.final))
        self._passes.prepare(context)
        self.comm.meter.begin_backward(section, context.part)
        self.comm.memory.after_compute()  # as before a forward: users may have written to shards since then
        for unit in self.units:
            unit.gradients.seen.clear()
        self._passes.begin(section, LocalPass() if alone else self._start(section, nested=nested))
        if isinstance(self._passes.run, NegotiatedPass):
            for name in sorted(self._of_pass(self.orders.touched - self.roots)):
                self._passes.run.touch(self.by_name[name])

    @_uninterrupted
    def enter_backward(self, unit: Unit) -> None:
        unit.check_current()
        if self._passes.run is not None:
            self._passes.run.enter(unit)

    def remembers(self, unit: Unit | None = None) -> bool:
        """Whether a forward (of a unit, or of the model) marks the weights that it saves.

        All of a negotiated pass do, until it is known which units need that.
        """
        if unit is not None:
            return unit.aside
        return isinstance(self._passes.run, NegotiatedPass) or any(u.aside for u in self.units if u.spec.root)

    def saved(self, unit: Unit) -> None:
        """A weight was saved for backward by a module outside of its unit's forward: it is held like one that was freed
        when it was read."""
        if not unit.running and unit.name not in self.roots and isinstance(self._passes.run, NegotiatedPass):
            self._passes.run.touch(unit)

    def enter_aside(self, unit: Unit) -> None:
        unit.mark_aside()
        self.enter_backward(unit)

    def gradient(self, unit: Unit, place: tuple[int, int], grad: Tensor) -> None:
        """``place``: number of the trainable segment and of the slot."""
        if not self._delivered:
            self._deliver_first()
        if grad.is_sparse:
            grad = grad.to_dense()
        if (deferred := self._passes.context.deferred) is not None:
            if not self._passes.context.weights:
                deferred.kept.append((unit, place, grad))
                return
            self._take_kept(deferred, unit)
        self._accept(unit, place, grad)

    def _take_kept(self, deferred: DeferredWeightGrads, unit: Unit | None) -> None:
        """Gradients of a unit, or all, that the first part of this backward gave, each of which is given back then;
        with its next the unit may be complete."""
        kept = deferred.take_kept()
        while kept:
            other, place, grad = kept.popleft()
            if unit is None or other is unit:
                self._accept(other, place, grad, deferred)
            else:
                deferred.kept.append((other, place, grad))

    def _accept(
        self, unit: Unit, place: tuple[int, int], grad: Tensor, kept: DeferredWeightGrads | None = None
    ) -> None:
        """``kept``: it is one of those that were kept there."""
        gradients = unit.gradients
        if torch.is_grad_enabled():  # create_graph=True: otherwise entering no_grad() would cost as much as the rest
            with torch.no_grad():
                gradients.accept(place, grad)
        else:
            gradients.accept(place, grad)
        if kept is not None and id(unit.trainable[place[0]].parameters[place[1]]) in kept.coming:
            return
        gradients.seen.add(place)
        if (
            kept is None
            and len(gradients.seen) == gradients.count
            and self._passes.run is not None
            and unit.name not in self.roots
        ):
            with self.agreement.uninterrupted():
                self._passes.run.complete(unit)

    def gradient_dropped(self) -> None:
        """A gradient came, and a hook of the user's took it away: the backward counts as a micro-batch all the same."""
        if not self._delivered:
            self._deliver_first()

    def _deliver_first(self) -> None:
        """The first gradient of a backward."""
        if not self._scaled and self.handlers.lifted != 1.0:
            raise UsageError(
                "loss.backward() under a loss scale gives gradients that are not scaled, of which fp16 loses the small "
                "ones: call engine.backward(loss), which scales the loss."
            )
        self._delivered = True

    @_uninterrupted
    def end_backward(self) -> None:
        if (deferred := self._passes.context.deferred) is not None:
            if self._passes.context.weights and deferred.kept:
                self._take_kept(deferred, None)
            self._delivered = self._passes.context.weights  # both parts are one micro-batch
        if self._passes.run is not None:
            self._finish()
        if not self._passes.go_on():
            self._scaled = False
        if self._delivered:
            self._state.count_micro_batch()
            self.handlers.shares.counted()
        else:  # torch.autograd.grad: no parameter's gradient was asked for, so this was no micro-batch
            self._state.sum_for_step(self._boundary_before)
        for unit in self.units:
            unit.gradients.end_pass(self.agreement.wait)
        self.comm.memory.forget_spares()
        self.visible.show()
        if self._met and self._passes.run is None:
            self._met = False
            self.foresee()
        self.leave()

    def leave(self) -> None:
        """A backward or a step is over."""
        self._left = perf_counter()

    def count_backward(self, before: int, *, final: bool) -> None:
        """A backward of a stage is over, of which there were so many ``before``; it counts, whatever gradients came.
        ``final``: it is the last of this rank's before the step."""
        if self._state.micro_batch == before:
            self._state.count_micro_batch()
        self._state.sum_for_step(final)

    # -- the step

    @contextmanager
    def between(self, track: Track) -> Iterator[Track]:
        """Inside, a section of the program runs that is none of a pass."""
        track.restart()
        self._between = track
        try:
            yield track
        finally:
            self._between = None

    def _where(self, doing: object) -> str:
        """Where in the program this rank is, which waits for ``doing``; empty where none of it runs."""
        section = self._between or (self._passes.run.section if self._passes.run is not None else None)
        return section.where(doing) if section is not None else ""

    @_uninterrupted
    def close_micro_batches(self) -> None:
        """Before a step behind a backward that was not known to be the last: what only that would have reduced."""
        if self._state.gradients_ready:
            return
        self._meet_or_refuse("the end of the micro-batches", self.visible.try_hide())
        with self.between(self.orders.tracks["closing"]) as track:
            track.finish()
        self._state.sum_for_step(True)

    @_uninterrupted
    def sum_shared(self) -> None:
        """Gradients of what several stages have are summed over these, once in a step."""
        if self._shared or not self.orders.tracks["shared"].ops:
            return
        with self.between(self.orders.tracks["shared"]) as track:
            track.finish()
        self._shared = True

    @_uninterrupted
    def reduce_late(self, late: Sequence[Unit]) -> None:
        """[Note: late gradients]: one more reduction for these units, now and, from the next step on, at the end.

        Raises:
            UsageError: on all ranks: sums are to be in the order of ranks.
        """
        if late and self.model.layout.reduce.ordered:
            raise UsageError(
                f"engine.step(): gradients of {late[0].name} came when those of its micro-batch had been summed, as "
                "from a re-entrant checkpoint or units that ran in another order, and by Runtime(exact=True) each "
                "micro-batch is added at once: leave exact out, or choose Init(units=...) so that it comes at once."
            )
        if late:
            self.handlers.withdraw(late)
            with self.between(self.orders.late_track(late)) as track:
                track.finish()
        if not self._asked_backward:
            self.orders.add_late(late)

    def end_step(self, *, skipped: bool = False) -> None:
        """The gradients have been used, or overflowed."""
        self._shared = False
        self._state.end_attempt()
        self._forwards = 0
        self.visible.forget()
        if skipped:  # what was lost of gradients that no update has seen
            for unit in self.units:
                unit.gradients.forget_lost()
        self._evaluated = self._asked_backward = False
        self.comm.meter.control(self.agreement.take_control_bytes())
        self.comm.meter.end_step(skipped=skipped)


def _title(section: str) -> str:
    forwards = {"forward": "a forward pass in training", "eval": "a forward pass in evaluation"}
    return forwards.get("forward" if section == "first" else section, "a backward pass")
