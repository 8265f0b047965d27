# Long because it is the one place where the events of a pass meet; what a pass does is in runs, what an operation does
# in actions.
"""Events in, operations out: which pass is running, in which order, and what surrounds it.

A pass (a forward, a backward) is a *run* (see ``runs``): it follows the recorded order of units where there is one and
asks before each unit where there is none. Orders are kept for forward in training, forward in evaluation and backward;
each is made of what all ranks ran in an asked run.

Every pass that issues collectives begins with a meeting, in which ranks find out that they are about to do different
things before they do them. A rank that waits there while others still evaluate helps them: it takes part in the
collectives of their forward and computes nothing.

``[Note: late gradients]`` A gradient may arrive after its unit was reduced: another rank took another branch, or a
second backward follows. It waits in the unit's incoming buffer; at the step all ranks agree (in the same small
reduction that agrees on used parameters) to reduce such units once more. Sums are linear, so nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from threading import get_ident

import torch
from torch import Tensor, nn

from shardfold import passes, program
from shardfold.actions import Actions
from shardfold.agreement import Agreement
from shardfold.buffers import Buffers
from shardfold.errors import OrderError, UsageError
from shardfold.layout import Layout
from shardfold.mesh import DataMesh
from shardfold.optim.guard import Guard
from shardfold.order import Track, contradiction, describe, merge_orders, with_missing
from shardfold.passes import Schedule
from shardfold.program import COLLECTIVES, REDUCTIONS, Op, Program
from shardfold.runs import AskedRun, IdleRun, RecordedRun, Run
from shardfold.shown import part
from shardfold.stores.device import DeviceStore
from shardfold.torch_internals import in_backward, no_subclass_functions
from shardfold.unit import Life, Unit

__all__ = ["Runner"]

SECTIONS = ("train", "eval", "backward", "last", "quiet")
EVERY = "all gradients"
NOT_SUMMED = "which is summed over ranks in the last backward of a step only"
RECORDINGS = 8  # a model that changes its order more often than this is asked at every unit
LOG = getLogger("shardfold")


class Runner:
    """Receives the hooks' events (see ``hooks.Listener``).

    Attributes:
        program: what runs, for display and for counting.
        micro: backwards since the last step.
        attempt: steps, done or skipped, and other ends of gradients so far.
        boundary: whether the last of them reduced everything, so that a step may follow.
        last: whether the next backward is the last before a step; None: each ``accumulate``-th is.
        synchronize: False inside ``no_sync()``.
        scaled: whether the backward under way is that of a loss that the engine scaled.
        hints: whether what stands for a gradient that this rank does not have whole is shown in its place.
        orders: of forward in training (``train``), forward in evaluation (``eval``) and ``backward``; None: not known.
        roots: names of the units that are held through a pass.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: DataMesh,
        units: Sequence[Unit],
        actions: Actions,
        agreement: Agreement,
        store: DeviceStore,
        timing: Schedule,
        accumulate: int,
        *,
        clip: bool,
    ) -> None:
        self.model, self.layout, self.mesh = model, layout, mesh
        self.actions, self.agreement, self.store = actions, agreement, store
        self.timing, self.accumulate, self._clip = timing, accumulate, clip
        self.roots: set[str] = set()
        self._late: set[str] = set()
        self.micro = self.attempt = 0
        self.boundary = self._boundary_before = False
        self.last: bool | None = None
        self.synchronize = True
        self.scaled = False
        self.hints = True
        self._by_hand: list[tuple[int, str, str]] = []  # behind which backward users did what to gradients
        self.buffers = Buffers(model, mesh, agreement)
        agreement.take_part = self._take_part
        self._evaluated = False  # since the last step
        self._delivered = False  # whether this backward gave gradients
        self._asked_backward = False  # whether a backward of this step was an asked run
        self._grad_forward = True
        self._run: Run | None = None  # of the pass under way
        self._section = ""
        self._thread = get_ident()  # that runs forward
        self._full: set[str] = set()  # units that a forward found full: kept for the backward of an earlier one
        self._own: list[str] = []  # what this rank ran in the pass before
        self.forget: Callable[[], None] = lambda: None  # the hooks forget what was under way
        self.inside: Callable[[], bool] = lambda: False  # whether the hooks find this thread inside of a pass
        self.follow: Callable[[], None] = lambda: None  # makes units anew where the model changed
        self._touched: set[str] = set()  # units whose weights this rank's model reads outside of their forward
        self._interrupted = False  # an exception left the model's forward
        self._outer: list[tuple[Run, str]] = []  # forwards that a backward inside of them interrupts
        self.renew(units)
        update = actions.optimizer
        if update is not None:
            update.guard = Guard(update.torch_optimizer, self._optimizer_zero_grad)

    # -- programs

    def renew(self, units: Sequence[Unit]) -> None:
        """These are the units from now on; in which order they run is to be found out."""
        self.units = list(units)
        self.by_name = {unit.name: unit for unit in units}
        self.roots = (self.roots & self.by_name.keys()) | {unit.name for unit in units if unit.spec.root}
        self.orders: dict[str, list[str] | None] = dict.fromkeys(("train", "eval", "backward"))
        self._seen: dict[str, list[list[str]]] = {"train": [], "eval": [], "backward": []}
        self._recordings = dict.fromkeys(self.orders, 0)
        self._late &= self.by_name.keys()
        self._touched &= self.by_name.keys()
        for unit in units:
            unit.on_touch = partial(self.touch, unit)
        self.compile()

    def compile(self) -> None:
        """Lowers the layout for the present orders and binds every operation to its handler."""
        self.agreement.places = 2 * len(self.units) + 1
        specs = [replace(unit.spec, root=unit.name in self.roots) for unit in self.units]
        inner = [unit.name for unit in self.units if unit.name not in self.roots]
        lower = partial(program.lower, self.layout, specs, self.mesh.sizes, clip=self._clip)
        train = self._with_missing(self.orders["train"], inner)
        back = self._with_missing(self.orders["backward"], train[::-1])
        evaluation = self._with_missing(self.orders["eval"], train)
        shape = partial(passes.apply, schedule=self.timing, late=frozenset(self._late))
        self.program: Program = shape(lower(forward=train, backward=back))
        self._lists: dict[str, tuple[Op, ...]] = {  # in definition order, for runs that ask
            name: lower().section("forward" if name in ("train", "eval") else name) for name in SECTIONS
        }
        sections = {name: self.program.section(name) for name in ("backward", "last", "quiet", "step")}
        sections["train"] = self.program.forward
        sections["eval"] = shape(lower(forward=evaluation)).forward
        self.tracks = {
            name: Track(name, ops, partial(self.actions.bind, _kind(name))) for name, ops in sections.items()
        }
        self._collective = {name: any(op.verb in COLLECTIVES for op in ops) for name, ops in sections.items()}

    def forward_order(self) -> list[str]:
        """Roots, then the others as they run in training."""
        inner = [unit.name for unit in self.units if unit.name not in self.roots]
        return [*sorted(self.roots), *self._with_missing(self.orders["train"], inner)]

    def _with_missing(self, order: list[str] | None, known: list[str]) -> list[str]:
        if order is None:
            return list(known)
        inner = [name for name in order if name not in self.roots]
        whole = with_missing(inner, list(dict.fromkeys(known)))
        return [name for i, name in enumerate(whole) if i == 0 or whole[i - 1] != name]

    def _start(self, section: str, *, nested: bool = False) -> Run:
        """A run of that section, which is now the one under way."""
        self._section = section
        verb = "F" if section in ("train", "eval") else "B"
        if not self._collective[section]:
            return IdleRun()
        mode = _mode(section)
        roots = [unit for unit in self.units if unit.name in self.roots]
        if not nested and self.orders[mode] is not None and self._recordings[mode] <= RECORDINGS:
            return RecordedRun(verb, self.tracks[section], roots, self.actions, self._deviate)
        return self._asked(section, nested=nested)

    def _asked(self, section: str, *, own: list[str] | None = None, nested: bool = False) -> AskedRun:
        bind = self.actions.bind
        lists = {n: [(op, bind(_kind(n), op)) for op in self._lists[n]] for n in (section, "train")}
        verb = "F" if section in ("train", "eval") else "B"
        return AskedRun(
            verb, lists[section], self.by_name, set(self.roots), self.agreement, self.actions,
            refill=lists["train"], own=own, nested=nested,
        )  # fmt: skip

    def _deviate(self, unit: Unit) -> None:
        """A unit is needed that the recorded order has passed."""
        assert self._run is not None
        if unit.name not in self.roots:
            self._run.own.pop()
        self._go_on_asking().enter(unit)

    def _go_on_asking(self) -> AskedRun:
        """[Note: more of a pass] The recorded run is finished as by a rank that needs nothing more, so that all ranks
        end it together; what this rank still needs it asks for in a second run, in which the others, who wait at
        their next meeting, take part."""
        run, section = self._run, self._section
        assert isinstance(run, RecordedRun)
        run.finish()
        self.meet(f"more of {_title(section)}", more=SECTIONS.index(section))
        again = self._asked(section, own=run.own)
        self._run, self._section = again, section
        again.begin()
        return again

    def _finish(self) -> None:
        """Ends the run under way on all ranks; what an asked run found becomes the order of the next."""
        run, section = self._run, self._section
        assert run is not None
        run.finish()
        self.actions.wire.settle(self.agreement.wait)
        self._run = None
        self._own = run.own
        if isinstance(run, AskedRun) and not self._outer:
            self._adopt(_mode(section), run)

    def _adopt(self, mode: str, run: AskedRun) -> None:
        """Makes the order of the next passes out of what each rank ran in this one."""
        self._asked_backward |= mode == "backward"
        self._touched |= {unit.name for unit in run.touched}
        if self.timing.order == "any":
            return
        own = [name for name in run.own if name not in self.roots]
        mine = json.dumps([own, sorted(self._touched - self.roots)])
        said = [json.loads(text) for text in self.agreement.exchange(f"order/{self.agreement.sequence}", mine)]
        held = {name for _, touched in said for name in touched}
        if held:
            names = ", ".join(sorted(held))
            LOG.info("held through each pass from now on, because other modules read their weights: %s", names)
            self.roots |= held
        orders = [[name for name in order if name not in self.roots] for order, _ in said]
        if mode != "backward" and (found := contradiction(orders)) is not None:
            raise OrderError(describe(*found))
        self._seen[mode] += [
            order for order in map(list, dict.fromkeys(map(tuple, orders))) if order not in self._seen[mode]
        ]
        known = [unit.name for unit in self.units]
        merged = merge_orders(self._seen[mode], known if mode != "backward" else known[::-1])
        self.orders[mode] = merged if merged is not None else run.record
        self._recordings[mode] += 1
        self.compile()

    # -- meetings

    def meet(
        self, what: str, *, evaluating: bool = False, more: int | None = None, flags: Sequence[bool] = ()
    ) -> Sequence[bool | int]:
        """All ranks are about to do ``what``; ranks that still evaluate, or need more of a pass, are helped first.

        Raises:
            OrderError: they are not.
        """
        if self.mesh.world == 1:
            return flags
        while True:
            evaluated = self._evaluated or evaluating
            met = self.agreement.meet(what, evaluating=evaluating, evaluated=evaluated, more=more, flags=flags)
            if met.together:
                return met.flags
            if met.more is not None:
                self._help_on(SECTIONS[met.more])
            else:
                self._help_evaluate(met.flags)

    def _take_part(self) -> bool:
        """This rank waits in another engine, and a rank needs more of a pass that this one has ended here."""
        if self.under_way:
            return False
        met = self.agreement.meet("another engine's turn", evaluated=self._evaluated)
        if met.more is not None:
            self._help_on(SECTIONS[met.more])
        return True

    def _help_on(self, section: str) -> None:
        """Takes part in what other ranks still need of the pass that this rank has ended."""
        outer, self._run = self._run, self._asked(section, own=self._own)
        before, self._section = self._section, section
        self._run.begin()
        self._finish()
        self._run, self._section = outer, before

    def _help_evaluate(self, flags: Sequence[int]) -> None:
        """Takes part in the forward of ranks that evaluate more batches than this one."""
        self.buffers.synchronize(any(flags[:1]))
        self.actions.meter.begin_forward()
        self.actions.backward_follows = False
        self._full = {unit.name for unit in self.units if unit.life is not Life.RESTING}
        self._run = self._start("eval")
        self._run.begin()
        self._finish()
        self._free_all()

    @property
    def under_way(self) -> bool:
        """Whether a pass runs, or was interrupted and is not settled."""
        return self._run is not None or self._interrupted

    def settle(self, what: str = "this call") -> None:
        """Ends what an exception interrupted, so that all ranks are where a pass begins.

        Raises:
            UsageError: ``what`` was called inside of a pass, which goes on.
        """
        if not self.under_way:
            return
        if self.inside():
            raise UsageError(f"{what} inside of the model's forward or backward: call it between passes.")
        self.reset()

    def interrupt(self) -> None:
        """An exception leaves the model's forward."""
        self._interrupted = True

    def reset(self) -> None:
        """Back to a clean state; gradients since the last step are lost.

        The interrupted pass is finished without computing: other ranks may have been further, or may still be in it.
        """
        self._interrupted = self.scaled = False
        self.forget()
        outer, self._outer = self._outer, []
        for unit in self.units:
            unit.running = 0
        for run, section in [(self._run, self._section), *reversed(outer)]:
            if run is not None:
                if isinstance(run, AskedRun):
                    run.touched.clear()
                self._run, self._section = run, section
                self._finish()
        self.actions.detours.clear()
        for unit in self.units:
            if unit.life is Life.GATHERING:
                unit.end_gather(self.agreement.wait)
            if unit.split and unit.life is Life.GATHERED and not unit.pins:
                unit.release()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        self.micro, self.boundary = 0, False
        self.attempt += 1
        self._by_hand.clear()
        for unit in self.units:
            unit.end_reduce(self.agreement.wait)
            unit.forget_gradients()
            for segment in unit.trainable:
                for parameter in segment.parameters:
                    parameter.grad = None

    # -- gradients that users see

    def show_gradients(self) -> None:
        """Users find what has come since the last step in ``parameter.grad``, as far as this rank has it."""
        over = self.layout.master.over
        pieces = f"which lies in pieces on {self.mesh.parts(over)} ranks" if over else ""
        with no_subclass_functions():
            for unit in self.units:
                here = self.mesh.world == 1 or (unit.reduced and not unit.has_unsent)
                where = pieces or ("" if here else NOT_SUMMED)
                unit.shown.show(where if self.hints or not where else None)

    def hide_gradients(self) -> None:
        """Takes back what is shown, and what users did to it, before gradients come or are used."""
        with no_subclass_functions():
            touched = part(self.units)
            for unit in self.units:
                if touched:
                    self._by_hand += [(self.micro, *change) for change in unit.shown.hide()]
                else:
                    unit.shown.forget()

    def drop_gradients(self, *, zero: bool = False) -> None:
        """Forgets the gradients that have come since the last step, or makes them ``zero``; it stays the same step."""
        if not self.micro:
            return
        self.hide_gradients()
        for unit in self.units:
            unit.drop_gradients(zero=zero)
        self._by_hand.append((self.micro, "zeroed" if zero else "dropped", EVERY))
        self.show_gradients()

    def _optimizer_zero_grad(self, set_to_none: bool) -> None:
        self.settle("optimizer.zero_grad()")
        self.drop_gradients(zero=not set_to_none)

    def before_step(self) -> bool:
        """Takes what users did to gradients since the last step; whether they did anything."""
        whole = not self.layout.master.over
        with no_subclass_functions():
            touched = part(self.units, given=True)
            for unit in self.units:
                if not touched:
                    unit.shown.forget()
                    continue
                for change in unit.shown.take_back(whole=whole):  # one by one: what follows may raise
                    self._by_hand.append((self.micro, *change))
        return bool(self._by_hand)

    def compare_changes(self) -> None:
        """Some rank's user changed gradients; a rank that did not use a parameter had nothing to drop, and follows.

        Raises:
            UsageError: on all ranks: they did not do the same, so that they would go on with different sums.
        """
        used = [name for unit in self.units for name in unit.shown.used()]
        text = json.dumps([self._by_hand, used, self.micro])
        said = [json.loads(text) for text in self.agreement.exchange(f"by hand/{self.agreement.sequence}", text)]
        every = list(dict.fromkeys(tuple(change) for changes, _, _ in said for change in changes))
        for change in every:
            behind, verb, name = change
            for rank, (changes, has, micro) in enumerate(said):
                nothing_here = verb != "set" and behind == micro and name != EVERY and name not in has
                if list(change) not in changes and not nothing_here:
                    who = next(other for other, (done, _, _) in enumerate(said) if list(change) in done)
                    raise UsageError(
                        f"engine.step(): rank {who} {verb} {name if name == EVERY else f'the gradient of {name!r}'} "
                        f"behind backward {behind} of this step, and rank {rank} did not: do the same on every rank, "
                        "e.g. by what engine.agree() says. Nothing was updated; engine.zero_grad() drops all there is."
                    )
        missing = [(verb, name) for behind, verb, name in every if (behind, verb, name) not in self._by_hand]
        for unit in self.units:
            unit.shown.drop_also(missing)

    # -- forward events

    def begin_forward(self) -> None:
        if self.under_way:  # of an interrupted pass: the hooks deliver no forward inside of another
            self.reset()
        self._thread = get_ident()
        self.follow()
        grad = torch.is_grad_enabled()
        section = "train" if grad else "eval"
        local = all(unit.pins or not unit.split for unit in self.units) and any(unit.pins for unit in self.units)
        changed = False
        if self.mesh.world > 1 and not local and (self._collective[section] or self.buffers.due):
            what = f"a forward pass {'in training' if grad else 'in evaluation (without gradients)'}"
            changed = bool(self.meet(what, evaluating=not grad, flags=[self.buffers.changed()])[0])
            self.buffers.synchronize(changed)
        if grad and self.synchronize and not local:
            self.buffers.due = self.buffers.any
        self._evaluated |= not grad
        self.actions.meter.begin_forward()
        self._grad_forward = grad
        # Asked here and not at a unit: a re-entrant checkpoint runs units of a training forward without gradients.
        # The same for a checkpoint around the whole model, which leaves only the training mode to tell.
        self.actions.backward_follows = grad or self.model.training
        self.store.after_compute()
        self._full = {unit.name for unit in self.units if unit.life is not Life.RESTING}
        self._run = IdleRun() if local else self._start(section)
        self._run.begin()

    def end_forward(self) -> None:
        if self._run is not None:
            self._finish()
        if not self._grad_forward:  # nothing will need what a layout keeps for backward
            self._free_all()

    def _free_all(self) -> None:
        for unit in self.units:
            if unit.name not in self._full:
                self.actions.free(unit)
        self.actions.detours.clear()

    def enter_forward(self, unit: Unit) -> None:
        if self._run is None:
            if unit.life is Life.RESTING:
                raise UsageError(
                    f"{unit.name!r} ran outside of its model's forward: call the model itself, make the method that "
                    "runs it a forward too, as in sf.register_forward(model, 'encode'), or wrap the call in "
                    "`with engine.gathered():`."
                )
            unit.running += 1
            return
        self._run.enter(unit)
        unit.running += 1

    def leave_forward(self, unit: Unit, *, interrupted: bool = False, aliased: bool = False) -> None:
        """``interrupted``: by an exception. ``aliased``: what it returned is a view of one of its weights."""
        unit.running -= 1
        if self._run is None or interrupted:
            return
        if aliased and unit.name not in self.roots:
            self.touch(unit)
        else:
            self._run.leave(unit)

    def touch(self, unit: Unit) -> bool:
        """A freed weight is read outside of its unit's forward: gathers it if a pass is under way."""
        if self._run is None or isinstance(self._run, IdleRun) or not self._in_its_thread():
            return False
        if unit.life is Life.GATHERING:
            self.actions.finish_gather(unit)
        if in_backward():
            self._run.enter(unit)
            return True
        if isinstance(self._run, RecordedRun):
            self._go_on_asking()
        assert isinstance(self._run, AskedRun)
        self._run.touch(unit)
        return True

    def _in_its_thread(self) -> bool:
        """Whether the caller is what the pass runs: another thread that reads a weight must issue no collectives."""
        return in_backward() or get_ident() == self._thread

    def hold(self, units: Sequence[Unit]) -> bool:
        """Inside of a pass: gathers the units and keeps them to its end; False outside of one."""
        if self._run is None or self._interrupted or not self._in_its_thread():
            return False
        for unit in units:
            if unit.life is Life.GATHERING:
                self.actions.finish_gather(unit)
            if unit.life is Life.RESTING and not self.touch(unit):
                return False
        return True

    # -- backward events

    def begin_backward(self, *, create_graph: bool = False) -> None:
        if create_graph and any(unit.split and not unit.pins for unit in self.units):
            raise UsageError(
                "gradients of gradients (create_graph=True) need the weights longer than a layout that splits "
                "parameters keeps them: run forward and both backwards inside `with engine.gathered():`, or choose a "
                "layout that keeps parameters whole (ddp, zero1, zero2)."
            )
        if self._interrupted:
            self.reset()
        self._delivered, self._boundary_before = False, self.boundary
        nested = self._run is not None
        last = self.last if self.last is not None else self.micro + 1 >= self.accumulate
        self.boundary = not nested and self.synchronize and last
        section = "quiet" if nested or not self.synchronize else "last" if self.boundary else "backward"
        if self._collective[section]:
            count = f"{self.micro + 1} of {self.accumulate}" if self.last is None else f"{self.micro + 1}"
            kind = "inside a forward" if nested else count + ", the last" * (self.last is True)
            self.meet(f"a backward pass ({kind}{'' if self.synchronize else ', no_sync'})")
        if self._run is not None:  # torch.autograd.grad inside of the model's forward
            self._outer.append((self._run, self._section))
        self.actions.meter.begin_backward(section)
        self.store.after_compute()
        self.hide_gradients()
        for unit in self.units:
            unit.seen.clear()
        self._run = self._start(section, nested=nested)
        self._run.begin()
        if isinstance(self._run, AskedRun):
            for name in sorted(self._touched - self.roots):
                self._run.touch(self.by_name[name])

    def enter_backward(self, unit: Unit) -> None:
        unit.check_current()
        if self._run is not None:
            self._run.enter(unit)

    def remembers(self, unit: Unit | None = None) -> bool:
        """Whether a forward (of a unit, or of the model) marks the weights that it saves.

        All of an asked run do, until it is known which units need that.
        """
        if unit is not None:
            return unit.aside
        return isinstance(self._run, AskedRun) or any(u.aside for u in self.units if u.spec.root)

    def saved(self, unit: Unit) -> None:
        """A weight was saved for backward by a module outside of its unit's forward: it is held like one that was freed
        when it was read."""
        if not unit.running and unit.name not in self.roots and isinstance(self._run, AskedRun):
            self._run.touch(unit)

    def enter_aside(self, unit: Unit) -> None:
        unit.aside = True
        self.enter_backward(unit)

    def gradient(self, unit: Unit, place: tuple[int, int], grad: Tensor) -> None:
        """``place``: number of the trainable segment and of the slot."""
        if not self._delivered:
            self._deliver_first()
        if grad.is_sparse:
            grad = grad.to_dense()
        if torch.is_grad_enabled():  # create_graph=True: otherwise entering no_grad() would cost as much as the rest
            with torch.no_grad():
                self.actions.accept(unit, place, grad)
        else:
            self.actions.accept(unit, place, grad)
        seen = unit.seen
        seen.add(place)
        if len(seen) == unit.num_trainable and self._run is not None and unit.name not in self.roots:
            self._run.complete(unit)

    def gradient_dropped(self) -> None:
        """A gradient came, and a hook of the user's took it away: the backward counts as a micro-batch all the same."""
        if not self._delivered:
            self._deliver_first()

    def _deliver_first(self) -> None:
        """The first gradient of a backward."""
        if not self.scaled and self.actions.lifted != 1.0:
            raise UsageError(
                "loss.backward() under a loss scale gives gradients that are not scaled, of which fp16 loses the small "
                "ones: call engine.backward(loss), which scales the loss."
            )
        self._delivered = True

    def end_backward(self) -> None:
        if self._run is not None:
            self._finish()
        if self._outer:
            self._run, self._section = self._outer.pop()
        else:
            self.scaled = False
        if self._delivered:
            self.micro += 1
        else:  # torch.autograd.grad: no parameter's gradient was asked for, so this was no micro-batch
            self.boundary = self._boundary_before
        for unit in self.units:
            unit.end_reduce(self.agreement.wait)
            unit.flush()
        self.store.forget_spares()
        self.show_gradients()

    # -- the step

    def close_micro_batches(self) -> None:
        """Before a step behind a backward that was not known to be the last: what only that would have reduced."""
        if self.boundary or not self.last:
            return
        self.hide_gradients()
        self.meet("the end of the micro-batches")
        done = {(op.unit, op.verb) for op in self.program.backward}
        for op in self.program.last:
            if op.verb in REDUCTIONS and (op.unit, op.verb) not in done:
                self.actions.reduce(self.by_name[op.unit], op)
        for unit in self.units:
            unit.end_reduce(self.agreement.wait)
        self.boundary = True

    def reduce_late(self, late: Sequence[Unit]) -> None:
        """[Note: late gradients]: one more reduction for these units, now and, from the next step on, at the end."""
        ops = {op for op in self.program.last if op.verb in REDUCTIONS}
        for unit in late:
            for op in sorted(ops, key=lambda op: REDUCTIONS.index(op.verb)):
                if op.unit == unit.name:
                    self.actions.reduce(unit, op)
            unit.end_reduce(self.agreement.wait)
        names = {unit.name for unit in late} - self._late
        if names and not self._asked_backward:
            self._late |= names
            self.compile()

    def end_step(self, *, skipped: bool = False) -> None:
        """The gradients have been used, or overflowed."""
        self.micro, self.boundary = 0, False
        self._by_hand.clear()
        self.attempt += 1
        self._evaluated = self._asked_backward = False
        self.actions.meter.control(self.agreement.control_bytes)
        self.agreement.control_bytes = 0
        self.actions.meter.end_step(skipped=skipped)


def _mode(section: str) -> str:
    """Which order a section follows."""
    return section if section in ("train", "eval") else "backward"


def _title(section: str) -> str:
    forwards = {"train": "a forward pass in training", "eval": "a forward pass in evaluation"}
    return forwards.get(section, "a backward pass")


def _kind(section: str) -> str:
    """The section as handlers know it."""
    return "forward" if section in ("train", "eval") else section
