# Long because what users call is explained here, where they look for it; what the calls do is in other files.
"""HOW: the interpreter. Events come in, operations go out, a handler per verb acts.

    layout + units --lower--> program --apply(schedule)--> runs --events move them--> handlers

The engine holds no knowledge of stages: what is gathered, reduced or freed, over which axes and when, is in the
program. What is here is what users call, and the life of a step:

    forward     each unit is full before its F marker and given back behind it              (``runner``)
    backward    gradients are scaled by 1 / (ranks * accumulate) as they arrive and written into their slot; a unit
                whose gradients are all there is reduced; at END the rest is                  (``runner``)
    step        ranks agree which parameters any of them used; norm; update; gather
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold import presets, rebuild
from shardfold.access import described, explained, load_state, memory_report, state_dict, stats, traffic_report
from shardfold.actions import Actions, check_supported
from shardfold.activations import Activations, Replacements, in_table
from shardfold.agreement import Agreement
from shardfold.alike import given
from shardfold.changes import Changes
from shardfold.checkpoint.base import Base
from shardfold.checkpoint.given import check_loadable, check_place, check_states
from shardfold.checkpoint.job import Saving
from shardfold.checkpoint.load import LoadReport, load
from shardfold.checkpoint.names import renamer
from shardfold.checkpoint.save import Saver, check_options
from shardfold.checkpoint.stored import readable
from shardfold.early import announce
from shardfold.errors import ShardfoldError, UsageError
from shardfold.gathered import gathered
from shardfold.hooks import Hooks
from shardfold.layout import Layout, Precision
from shardfold.loans import Loan, refuse_during
from shardfold.losses import lift, run_backward
from shardfold.materialize import Weights, buffer_dtypes, make_units, move_buffers
from shardfold.mesh import DataMesh, pick_device
from shardfold.numerics.alarm import Alarm
from shardfold.numerics.clipping import Clip, one_clip
from shardfold.numerics.forensics import Watch
from shardfold.numerics.scaling import LossScale, make_scaler
from shardfold.numerics.shares import Shares
from shardfold.optim.average import Average
from shardfold.optim.sharded import ShardedOptimizer, build
from shardfold.ownership import claim, close, look_after, release
from shardfold.passes import Schedule
from shardfold.program import Program
from shardfold.report import MemoryReport, MemoryRow, SavedReport, StepReport, TrafficReport
from shardfold.rules import Rules
from shardfold.runner import Runner
from shardfold.stats import Clock, Stats
from shardfold.stepping import check_accumulate, check_schedule, make_schedule, take_step
from shardfold.stores.device import DeviceStore
from shardfold.tf32 import hold_tf32
from shardfold.unit import TORCH_DTYPES, Life, Unit

__all__ = ["Engine"]


class Engine:
    """Trains ``model`` under a layout.

    Args:
        model: may have been built under :func:`shardfold.meta_init`. Its parameter objects stay the same.
        optimizer: a ``torch.optim`` class with its arguments (``partial(AdamW, lr=3e-4)``), a function that makes an
            optimizer of a list of parameters, or an optimizer that has not stepped; its groups are kept. None: the
            engine only runs forward.
        layout: a preset's name or a :class:`Layout`.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"bf16-pure"`` or a :class:`Precision`, for parameters of the
            floating dtype that most elements have; those of others, and of fp64, keep their own dtype in every state.
            Or ordered rules of these, ``{path pattern or class: policy, ..., "*": policy}``, of which the first that
            matches a module holds for it and all inside.
        activations: short for the cell of ``layout``, what happens to what autograd saves in each unit: a mode, an
            :class:`Activations`, or ordered rules of these, as of ``precision``. None: as the layout says.
        accumulate: micro-batches per optimizer step.
        clip_norm: the largest norm of all gradients, short for ``clip=Clip(norm=...)``; None does not clip.
        clip: by another norm, or by value; see :class:`Clip`.
        loss_scale: a number, or a :class:`LossScale`, which moves; None: ``LossScale()`` where compute or autocast is
            fp16, else none.
        schedule: makes a ``torch.optim.lr_scheduler`` of the optimizer, or is one of it; stepped after each update.
        mesh: sizes of ``inter`` and ``intra``, e.g. ``{"intra": 8}``; None: ``intra`` is the ranks of one node.
        units: which modules are units, by path pattern or class; None finds them.
        weights: a state dict, safetensors (a file or a folder) or a checkpoint, read into the shards tensor by tensor.
        timing: how far ahead units are gathered.
        device: None: this local rank's GPU if there is one, else the CPU.
        seed: of the initial values of a model built under ``meta_init``.
        patience: seconds until ranks that run parts of the model in contradicting orders raise.
        limit: seconds until a collective that does not finish raises.
        debug: freed memory is filled with NaN instead, so that stale aliases show.

    Raises:
        ConfigError, LayoutError, ModelError: the arguments contradict each other or the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Any = None,
        layout: str | Layout = "zero3",
        precision: str | Precision | Mapping[Any, str | Precision] | Sequence[tuple[Any, str | Precision]] = "fp32",
        activations: str | Activations | Mapping[Any, str | Activations] | Sequence[Any] | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip: Clip | None = None,
        loss_scale: float | LossScale | None = None,
        schedule: Any = None,
        mesh: Mapping[str, int] | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        weights: Any = None,
        timing: Schedule | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
        patience: float = 10.0,
        limit: float = 1800.0,
        debug: bool = False,
    ) -> None:
        check_accumulate(accumulate)
        check_schedule(schedule, optimizer)
        self.module, self.closed = model, ""  # why the engine is closed
        self.table, activations = in_table(presets.named(layout), activations)
        self.device = pick_device(device)
        announce(model.parameters(), "an engine of their model")
        self.mesh = DataMesh(mesh, self.device, timedelta(seconds=limit))
        self.rank, self.world_size = self.mesh.rank, self.mesh.world
        self.clip = one_clip(clip_norm, clip)
        self.timing = timing or Schedule()
        self.rules = Rules(precision, self.table, self.mesh.sizes)
        self.rules.check(model)
        self._replaced = Replacements(model, activations, self.device)
        self.precision, self.layout = self.rules.default, self.rules.layouts[-1]
        for bound in self.rules.layouts:
            check_supported(bound)
        self._tf32 = hold_tf32(self, self.precision.tf32) if self.precision.tf32 is not None else None
        self.loss_scale = make_scaler(loss_scale, self.rules.precisions)
        self.agreement = Agreement(self.mesh, patience, limit)
        self._finalizer = look_after(self, self.mesh, self.agreement)
        claim(model, self.agreement)
        self.store = DeviceStore(self.device, debug=debug)
        self.optimizer = build(optimizer, model) if optimizer is not None else None
        self.schedule = make_schedule(schedule, self.optimizer)
        self._changes = Changes(self, units, seed, made_here=not isinstance(optimizer, torch.optim.Optimizer))
        cuts = self._changes.cut()
        alike = given(
            self.layout, [c.spec for c in cuts], self.optimizer, self.schedule, accumulate, self.clip,
            self.loss_scale.rule if self.loss_scale is not None else None,
        )  # fmt: skip
        with self.agreement.told("making an engine"):
            values = Weights(readable(weights), model) if weights is not None else None
            self.agreement.same(alike)
            if values is not None:
                values.load_buffers(model)
            dtypes = buffer_dtypes(self.rules, model)
            move_buffers(dict(model.named_modules()), self.device, self.mesh, self.agreement, dtypes)
            self.units = make_units(model, cuts, self.layout, self.mesh, self.agreement, self.store, values, seed)
        self._update: ShardedOptimizer | None = None
        if self.optimizer is not None:
            stochastic = seed if any(p.rounding == "stochastic" for p in self.rules.precisions) else None
            self._update = ShardedOptimizer(
                self.optimizer, self.units, self.layout.moments.dtype, self.timing.block, stochastic
            )
        self.actions = Actions(
            self.layout, self.mesh, self.units, self.store, self.agreement, self._update, self.clip,
            scale=1.0 / (self.world_size * accumulate), timing=self.timing, loss_scale=self.loss_scale,
        )  # fmt: skip
        self.after_step: list[Callable[[], None]] = []  # called after each update
        self.more_memory: list[Callable[[], MemoryRow]] = []  # rows of memory() that the table does not have
        self.averages: list[Average] = []
        self.watch: Watch | None = None  # of the outputs of modules
        self.alarm, self.shares = Alarm(self), Shares()  # of the micro-batches since the last step
        self.loans: list[Loan] = []  # whole values that are lent: no update meanwhile
        self._clock = Clock(self.agreement.waited)
        self._runner = Runner(
            model, self.layout, self.mesh, self.units, self.actions, self.agreement, self.store, self.timing,
            accumulate, clip=self.clip is not None and self.clip.norm is not None,
        )  # fmt: skip
        #: Some parameters follow the policy of the model as a whole.
        policy = any(not s.spec.own and s.spec.table is None for unit in self.units for s in unit.segments)
        narrow = TORCH_DTYPES[self.precision.compute] if policy and self.precision.compute in ("bf16", "fp16") else None
        autocast = (TORCH_DTYPES[self.precision.autocast], self.device.type) if self.precision.autocast else None
        self._hooks = Hooks(
            model, self.units, self._runner, cast=narrow, casts=self.rules.mixed, autocast=autocast,
            replaced=self._replaced,
        )  # fmt: skip
        self._runner.forget, self._runner.inside = self._hooks.forget, self._hooks.inside
        self._runner.follow = self._follow_model
        self.saver, self._base = Saver(self), Base(self)
        self.steps, self._loads, self.broken = 0, 0, ""  # broken: why the values are of no run
        for unit in self.units:  # the root was kept until all ties were made
            if unit.split and unit.life is Life.GATHERED:
                unit.release()
        self._changes.renew()

    @property
    def program(self) -> Program:
        """What runs, by section; the order of units is the recorded one."""
        return self._runner.program

    @property
    def order(self) -> list[str]:
        """Names of the units as their forward in training runs them; definition order until that is known."""
        return self._runner.forward_order()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an engine cannot be copied or pickled, as it holds process groups and shards: copy or save engine.module "
            "inside `with engine.gathered():`, or save engine.state_dict()."
        )

    def __repr__(self) -> str:
        return described(self)

    # -- the user's side

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward."""
        self._refuse_closed("engine(...)")
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, *, weight: float | None = None, retain_graph: bool = False) -> None:
        """Runs backward; without a loss scale the same as ``loss.backward()``, which under one is refused.

        The loss is not divided: gradients are, as they arrive. With a ``weight``, such as the number of tokens that a
        mean was taken over, the step's gradient is the weighted mean over all micro-batches of all ranks.
        """
        self._refuse_closed("engine.backward()")
        run_backward(self, loss, weight, retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a ``backward()`` of your own; the same loss where there is no scale."""
        self._refuse_closed("engine.scale()")
        return lift(self, loss)

    def step(self, *, tokens: float | None = None, samples: float | None = None) -> StepReport:
        """The optimizer step, at an accumulation boundary; before it, nothing happens.

        ``tokens`` and ``samples`` are how many this rank has processed since the last call, for :meth:`stats`.

        Raises:
            UsageError: no optimizer, no backward since the last step, or whole values are lent.
            NonFiniteError: gradients overflow although the loss scale is at its floor (``LossScale.patience``).
        """
        if self.optimizer is None or self._update is None:
            raise UsageError("engine.step() needs an optimizer: pass optimizer= to the Engine.")
        self._refuse_closed("engine.step()")
        runner = self._runner
        runner.settle("engine.step()")
        self._refuse_broken("engine.step()")
        self.saver.tell()
        if runner.micro == 0:
            by_hand = any(p.grad is not None for p in self.module.parameters())
            raise UsageError(
                "engine.step() with no backward since the last step: call engine.backward(loss)."
                + " What was put into parameter.grad by hand counts with a backward only." * by_hand
            )
        self._clock.told(tokens, samples)
        runner.close_micro_batches()
        if not runner.boundary:
            return StepReport(self.steps, updated=False, loss_scale=self.actions.lifted)
        refuse_during(self.loans, "engine.step()")
        rebuild.secure(self)
        return take_step(self)

    @property
    def accumulate(self) -> int:
        """Micro-batches per step; when it is set, the gradients that come are divided by it, the same on all ranks."""
        return self._runner.accumulate

    @accumulate.setter
    def accumulate(self, accumulate: int) -> None:
        check_accumulate(accumulate)
        self._runner.accumulate, self.actions.scale = accumulate, 1.0 / (self.world_size * accumulate)
        self.actions.set_factors()

    @property
    def last_micro_batch(self) -> bool | None:
        """Whether the next backward is the last before a step, on all ranks alike; None: each ``accumulate``-th is. Set
        to True behind a backward that was not, it lets :meth:`step` reduce what that left."""
        return self._runner.last

    @last_micro_batch.setter
    def last_micro_batch(self, last: bool | None) -> None:
        self._runner.last = last

    @property
    def micro_batch(self) -> int:
        """Backwards since the last step."""
        return self._runner.micro

    @property
    def attempt(self) -> int:
        """Which step gradients are collected for; skipped steps and those whose gradients were dropped count."""
        return self._runner.attempt

    @property
    def gradients_ready(self) -> bool:
        """Whether the last backward was that before a step: gradients are summed over ranks and micro-batches."""
        return self._runner.boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside send nothing; gradients wait, whole, for the next backward outside."""
        self._refuse_closed("engine.no_sync()")
        before, self._runner.synchronize = self._runner.synchronize, False
        try:
            yield
        finally:
            self._runner.synchronize = before

    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        self._refuse_closed("engine.zero_grad()")
        self._runner.settle("engine.zero_grad()")
        self._runner.zero_grad()

    def reset(self) -> None:
        """Back to a clean state after an exception in forward or backward; gradients since the last step are lost.

        Every rank must call it, or do what calls it by itself: the next forward, step or :meth:`gathered`.
        """
        self._refuse_closed("engine.reset()")
        self._runner.reset()

    @contextmanager
    def gathered(self, *names: str, write: bool = False, of: str = "params") -> Iterator[Any]:
        """Whole values of the named parameters (all, if none is named), on every rank; gathered at once.

        Yields the value for one name, else a dict by name. They are the parameters themselves: inside, the model runs
        with no communication at all and ranks may do different things. ``of="grads"`` (as DDP has them before
        ``step()``, not clipped), ``"master"`` or a state of the optimizer (``"exp_avg"``) gives copies in their own
        dtype instead; None where there is nothing. With ``write=True`` rank 0's values are everyone's at the end.

        Raises:
            ModelError, ConfigError: a name, or ``of``, is unknown; the message suggests the nearest.
            UsageError: frozen, or gradients not summed yet; at the end: changed without ``write=True`` or on another
                rank than 0 only, or another rank left by an exception: then nothing is written.
        """
        self._refuse_closed("engine.gathered()")
        if not self._runner.under_way:
            self._follow_model()
        with gathered(self, names, write=write, of=of) as values:
            try:
                yield values
            finally:
                rebuild.secure(self)
        if not self._runner.under_way:
            self._follow_model()

    def state_dict(self, *, frozen: str = "keep") -> dict[str, Tensor]:
        """All parameters (in the master's precision) and persistent buffers, on the CPU of every rank.

        Tied names have one tensor. ``frozen="skip"`` leaves out what the optimizer does not have.
        """
        self._meet(f"engine.state_dict(frozen={frozen!r})", follow=True)
        return state_dict(self, frozen)

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Takes parameters and buffers from a full state dict that every rank has; the optimizer's state stays.

        Raises:
            ModelError: a value is no tensor, a shape differs, or (strict) names are missing or unexpected; all are
                listed. Nothing was changed.
        """
        self._refuse_closed("engine.load_state_dict()")
        self._runner.settle("engine.load_state_dict()")
        self._follow_model()
        load_state(self, state, strict=strict)

    def save(
        self,
        path: str | Path,
        *,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        wait: bool = False,
        busy: str = "wait",
        keep: int | None = None,
        nonfinite: str = "warn",
        frozen: str = "keep",
        latest: bool = True,
        gradients: str = "refuse",
        shared: bool | None = None,
    ) -> Saving | None:
        """Writes a checkpoint of the whole run that any layout, precision and number of ranks can load.

        Every rank calls it, and writes its own part. Training goes on as soon as that is copied to host memory; the
        checkpoint is there, and ``latest`` beside it names it, when all parts are on the disk, or never.

        Args:
            path: the checkpoint's folder. What was there is replaced.
            state: more to keep, rank 0's, by name: numbers, strings, lists, dicts, tensors, or objects with
                ``state_dict()``, such as a sampler.
            rank_state: the same of each rank.
            wait: returns when the checkpoint is there; takes no memory for a copy.
            busy: while an earlier save is under way: ``"wait"`` for it, or ``"skip"`` this one.
            keep: checkpoints that stay in the folder around ``path``, with this one; None removes none.
            nonfinite: weights or buffers that are inf or NaN are logged and written (``"warn"``), or the save fails
                (``"raise"``).
            frozen: ``"skip"`` leaves out parameters that the optimizer does not have, such as the base of an adapter,
                and keeps a checksum of each, with which :meth:`load` compares the base that it finds.
            latest: False leaves the file ``latest`` as it is.
            gradients: between the micro-batches of a step: ``"refuse"`` to save, or ``"leave"`` out what has come.
            shared: whether all hosts see the same folder. True: else the save fails. False: each keeps its own part,
                perhaps below another folder. None: whichever is so, with a warning where they do not.

        Returns:
            The save, to ask or to wait for; None if it was skipped. A failure in the background is logged, and raised
            by ``wait()``.

        Raises:
            ConfigError: on all ranks: an argument is of a wrong type or value on one of them.
            CheckpointError: it cannot be written; what was there before is as it was.
            UsageError: between the micro-batches of a step, or while values are lent.
        """

        def check() -> None:
            check_place("engine.save()", path, "a checkpoint")
            check_states("engine.save()", state=state, rank_state=rank_state)
            check_options(busy, keep, nonfinite, gradients, shared)

        self._meet(f"engine.save(frozen={frozen!r})", follow=True, check=check)
        rebuild.secure(self)
        self._refuse_broken("engine.save()")
        return self.saver.save(
            path, state=state or {}, rank_state=rank_state or {}, wait=wait, busy=busy, keep=keep, nonfinite=nonfinite,
            left_out=self._base.left_out(frozen), latest=latest, gradients=gradients, shared=shared,
        )  # fmt: skip

    def load(
        self,
        path: str | Path,
        *,
        weights_only: bool = False,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> LoadReport:
        """Goes on where a checkpoint was written, whatever layout, precision and number of ranks wrote it.

        Args:
            path: a checkpoint, or a folder of checkpoints, whose latest is taken.
            weights_only: parameters and buffers only; the optimizer and the rest of the run stay as they are.
            strict: False loads what fits; names and states that do not are in the report. Shapes have to fit anyway.
            rename: from the checkpoint's names to the model's: regular expressions and what they are replaced with, in
                order, or a function.
            state: objects with ``load_state_dict()``, by the names they were saved under.

        Raises:
            ConfigError: on all ranks: an argument is of a wrong type on one of them.
            CheckpointError: on all ranks: there is none, it is not complete or damaged, ranks find different ones, or
                it does not fit: all that is missing, unexpected or of another shape is listed; or the state is of an
                optimizer of another kind, or of other groups; or what was left out has other values here.
        """

        def check() -> None:
            check_place("engine.load()", path, "a checkpoint or of a folder of checkpoints")
            check_states("engine.load()", state=state)
            check_loadable("engine.load()", state)
            renamer(rename, "engine.load")

        self._meet(f"engine.load(weights_only={weights_only})", follow=True, check=check)
        rebuild.secure(self)
        self._loads += 1
        return load(
            self, path, weights_only=weights_only, strict=strict, rename=rename, state=state, number=self._loads
        )

    def _refuse_broken(self, call: str) -> None:
        if self.broken:
            raise UsageError(f"{call}: {self.broken}: load another checkpoint before going on.")

    def memory(self) -> MemoryReport:
        """Bytes held on this rank by state and tier, walked from live storages, beside what the table says."""
        return memory_report(self, self._update)

    def activations(self) -> AbstractContextManager[SavedReport]:
        """Inside, bytes that autograd saves in each unit are counted; the report is complete at the end."""
        return self._replaced.counted()

    def traffic(self) -> TrafficReport:
        """Bytes this rank sent in the last step, by journey and axes, beside what the program says."""
        return traffic_report(self, self._update)

    def stats(self, *, peak_flops: float | None = None) -> Stats:
        """Times, rates, waiting, bytes sent and held, as data; ``peak_flops`` of this rank's device is for the MFU."""
        return stats(self, self._clock, peak_flops)

    def explain(self) -> str:
        """The table, the units and the program, as text."""
        return explained(self, self._update)

    def mean(self, value: float | Tensor) -> float:
        """The mean of a number over all ranks; a control message."""
        self._meet("engine.mean()")
        return self.actions.control([float(value)], dist.ReduceOp.SUM)[0] / self.world_size

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of each number over all ranks; a control message."""
        self._meet("engine.agree()")
        return self.actions.control(list(values), dist.ReduceOp.MAX)

    def close(self) -> None:
        """Waits for a save under way, takes the hooks off the model, gives back what the engine changed in the process.

        Where this rank has all values (on one rank, under layouts that do not split parameters, inside ``gathered()``)
        they stay in the model, in the compute dtype; elsewhere they are gone: see :meth:`release`. Nothing is sent.
        """
        close(self)

    def release(self, *, of: str = "params") -> nn.Module:
        """Closes the engine and leaves the model a plain module with whole parameters on every rank, which all call it.

        Plain PyTorch trains it, or another engine. ``of="master"``: trained parameters become the master's values in
        its dtype. Gradients since the last step and the optimizer's state are dropped.

        Raises:
            UsageError: while values are lent.
        """
        return release(self, of)

    def hold_in_pass(self, units: Sequence[Unit]) -> bool:
        """Inside of a pass: gathers the units and keeps them to its end; False outside of one."""
        return self._runner.hold(units)

    def _follow_model(self) -> None:
        """Makes units anew where the structure of the model changed since they were made."""
        if rebuild.needed(self):
            rebuild.apply(self)

    def _refuse_closed(self, call: str) -> None:
        if self.closed:
            raise UsageError(f"{call}: {self.closed}.")

    def _meet(self, what: str, *, follow: bool = False, check: Callable[[], None] | None = None) -> None:
        """All ranks are about to do ``what``, or all raise, also where ``check`` raises on one only: it sends nothing.
        ``follow`` the model first if it changed."""
        self._refuse_closed(what)
        self._runner.settle(what)
        if follow:
            self._follow_model()
        error: ShardfoldError | None = None
        try:
            if check is not None:
                check()
        except ShardfoldError as raised:
            error = raised
        if self._runner.meet(what, flags=[error is not None])[0]:
            self.agreement.refuse(what, error)
