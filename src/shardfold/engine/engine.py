"""HOW: the interpreter. Events come in, operations go out, a handler per verb acts.

    layout + units --lower--> program --apply(overlap)--> tracks --events move them--> handlers

The engine holds no knowledge of stages: what is gathered, reduced or freed, over which axes and when, is in the
program. What is here is what users call, and the life of a step:

    forward     each unit is full before its F marker and given back behind it              (``runner``)
    backward    gradients are scaled by 1 / (ranks * accumulate) as they arrive and written into their slot; a unit
                whose gradients are all there is reduced; at END the rest is                  (``runner``)
    step        ranks agree which parameters any of them used; norm; update; gather
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from logging import getLogger
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardfold import accelerator
from shardfold.activations.modes import Activations, Replacements, in_table
from shardfold.activations.unit_graphs import UnitGraphs
from shardfold.checkpoint.collect import check_slices
from shardfold.checkpoint.folders import check_place
from shardfold.checkpoint.load import LoadReport, load
from shardfold.checkpoint.names import renamer
from shardfold.checkpoint.optimizer_dtensors import (
    check_given,
    check_optimizer,
    load_optimizer_state,
    optimizer_state,
)
from shardfold.checkpoint.save import Saving, check_options
from shardfold.checkpoint.stored import readable
from shardfold.checkpoint.trees import check_loadable, check_rows, check_states
from shardfold.comm.agreement import Agreement
from shardfold.comm.comm import Comm, joined, program_agreement
from shardfold.comm.cores import share_of_cores
from shardfold.comm.device_mesh import named_sizes
from shardfold.comm.mesh import DataMesh, pick_device, refusals_told
from shardfold.comm.mesh_group import MeshGroup
from shardfold.comm.runtime import Runtime
from shardfold.engine._parts import PartOptions, make_parts
from shardfold.engine._tf32 import hold_tf32
from shardfold.engine._wires import chosen as chosen_wires
from shardfold.engine._wires import chosen_bucket
from shardfold.engine.arguments import (
    check_accumulate,
    check_assigned,
    check_closure,
    check_last,
    check_model,
    check_number,
    check_numbers,
    check_schedule,
    check_settings,
    check_weight,
    given_or,
    make_schedule,
    missing,
)
from shardfold.engine.consistency import given
from shardfold.engine.copying import Copying
from shardfold.engine.fitting import sampled, table_of, warn_of_memory
from shardfold.engine.freeze import Freeze
from shardfold.engine.handlers import check_supported
from shardfold.engine.rounds import Rounds
from shardfold.engine.stats import Stats
from shardfold.errors import ConfigError, UsageError
from shardfold.numerics.clipping import Clip, one_clip
from shardfold.numerics.fp8_layers import Fp8Layers
from shardfold.numerics.scaling import LossScale, make_scaler
from shardfold.optim.copied_shard import CopiedShard
from shardfold.optim.fused import num_moments
from shardfold.optim.requirements import (
    build,
    check_copies,
    check_delayed,
    check_rounding,
    check_speculation,
    check_tier,
)
from shardfold.optim.shard_optimizer import shard_optimizer
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.optim.sign_exchange import SignExchange
from shardfold.parallel.attention import follow, open_sequence
from shardfold.parallel.expert_parallel import connect_routers, rebalance, share_out
from shardfold.parallel.module_group import bind_groups
from shardfold.parallel.parallel import Parallel
from shardfold.parallel.pipeline.open import check_together, open_stages
from shardfold.parallel.pipeline.stage_order import OrderChoice, choose_order
from shardfold.parallel.pipeline.stages import Stages
from shardfold.parallel.plan import split_model
from shardfold.parallel.sequence import SequenceAxis
from shardfold.parallel.split import hear_gradients
from shardfold.plan.auto_wire import AutoWire
from shardfold.plan.axes import Axis, Mesh, Role
from shardfold.plan.checks import check_flags, known_arguments
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.placement import UnitSpec
from shardfold.plan.program import Program
from shardfold.plan.report import MemoryReport, SavedReport, StepReport, TrafficReport
from shardfold.plan.rewrites import Overlap
from shardfold.plan.rules import Rules
from shardfold.planner.auto import Auto
from shardfold.sharding import ownership
from shardfold.sharding.autograd import outside_inference
from shardfold.sharding.changes import Changes
from shardfold.sharding.dtensor_load import check_dtensors, unpack
from shardfold.sharding.dtensors import check_sharded, sharded_state
from shardfold.sharding.gathered import gathered
from shardfold.sharding.init import Init
from shardfold.sharding.materialize import Weights, buffer_dtypes, make_units, move_buffers
from shardfold.sharding.model import ShardedModel, refuse_during
from shardfold.sharding.partitioned import announce
from shardfold.sharding.registry import owner_of
from shardfold.sharding.room import take_room
from shardfold.sharding.run_state import RunState
from shardfold.sharding.shared import share_values
from shardfold.sharding.slices import check_early
from shardfold.sharding.stand_ins import Read
from shardfold.sharding.unit import Unit
from shardfold.sharding.whole_state import check_state, load_state, read_state, state_dict, values_to_read
from shardfold.tiers.device import DeviceTier
from shardfold.tiers.tiers import Tiers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Engine", "engine_of"]

LOG = getLogger("shardfold")
Kind = TypeVar("Kind")


def _refused_everywhere(kind: type[Kind]) -> type[Kind]:
    """Decorates the class: where a rank is refused what it gave, names of arguments included, the others hear of it."""
    made: Any = kind
    made.__init__ = refusals_told()(made.__init__)
    return kind


@_refused_everywhere
@known_arguments
class Engine:
    """Trains ``model`` under a layout.

    Args:
        model: may have been built under :func:`shardfold.meta_init`. Its parameter objects stay the same.
        optimizer: a ``torch.optim`` class with its arguments (``partial(AdamW, lr=3e-4)``), a function that makes an
            optimizer of a list of parameters, or an optimizer that has not stepped; its groups are kept. None: the
            engine only runs forward.
        layout: a preset's name, a :class:`Layout`, or ``"auto"``: the one that sends the least of those whose states
            leave 40 % of the memory to activations; the log says which, and what was assumed (see ``planner.auto``).
            With an :class:`Auto`, which has a micro-batch, the fastest with which a step fits. Ranks along an axis come
            together every so many steps only where the layout has an ``outer``, as in
            ``PRESETS["zero3"].replace(outer=Outer(every=500))``.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"bf16-pure"`` or a :class:`Precision`, for parameters of the
            floating dtype that most elements have; those of others, and of fp64, keep their own dtype in every state.
            Or ordered rules of these, ``{path pattern or class: policy, ..., "*": policy}``, of which the first that
            matches a module holds for it and all inside.
        activations: short for the cell of ``layout``, what happens to what autograd saves in each unit: a mode, an
            :class:`Activations`, or ordered rules of these, as of ``precision``. None: as the layout says, and with an
            :class:`Auto`, as with ``"auto"``, the mode that its plan takes.
        offload: short for the tiers of ``layout``: ``"host"`` lets gradients and the optimizer's states rest in host
            memory, where they are updated, and ``{state: tier}`` says it of ``params``, ``grads`` and ``optimizer``
            each; with ``"host:0.7"`` the optimizer's states of some units stay on the device. ``folder`` beside the
            states, or as in ``"disk,folder=/mnt/a"``, says where files are. None: as the layout says.
        wire: ``"auto"``, or an :class:`AutoWire`: as what parameters and gradients travel is chosen for links that are
            measured when the engine is made, and for this layout; nothing is rounded that is not allowed to be, as by
            ``"auto:0.01"`` or ``"auto:int8,int4"``. None: as the layout says.
        parallel: the mesh and how ranks share the model along its axes, a :class:`Parallel`; a mesh alone, as
            ``{"intra": 8}``, is short for ``Parallel(mesh=...)``. None: a plain mesh of data, ``intra`` being the ranks
            of one node.
        accumulate: micro-batches per optimizer step.
        clip_norm: the largest norm of all gradients, short for ``Clip(norm=...)``, or a :class:`Clip`, by another norm
            or by value; None does not clip.
        loss_scale: a number, or a :class:`LossScale`, which moves; None: ``LossScale()`` where compute or autocast is
            fp16, else none.
        lr_schedule: makes a ``torch.optim.lr_scheduler`` of the optimizer, or is one of it; stepped after each update.
        overlap: how far ahead units are gathered.
        init: where the values come from, and how the model is cut into units, an :class:`Init`; None: ``Init()``.
        runtime: the device, how long ranks wait, and checks, a :class:`Runtime`; None: ``Runtime()``.

    Raises:
        ConfigError, LayoutError, ModelError: the arguments contradict each other or the model.

    Examples:
        >>> trained = sf.Engine(nn.Linear(8, 1), optimizer=adam, layout="zero2", clip_norm=1.0)
        >>> for step in range(3):
        ...     trained.backward(trained(x).square().mean())
        ...     report = trained.step()
        >>> report.step
        3
        >>> trained.close()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Any = None,
        layout: str | Layout | Auto = "zero3",
        precision: str | Precision | Mapping[Any, str | Precision] | Sequence[tuple[Any, str | Precision]] = "fp32",
        activations: str | Activations | Mapping[Any, str | Activations] | Sequence[Any] | None = None,
        offload: str | Mapping[str, Any] | None = None,
        wire: str | AutoWire | None = None,
        parallel: Parallel | Mapping[str, int] | Sequence[Axis] | DeviceMesh | None = None,
        accumulate: int = 1,
        clip_norm: float | Clip | None = None,
        loss_scale: float | LossScale | None = None,
        lr_schedule: Any = None,
        overlap: Overlap | None = None,
        init: Init | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        check_model(model)
        parallel, runtime, init = Parallel.of(parallel), given_or(runtime, Runtime), given_or(init, Init)
        check_settings(parallel, runtime, init, overlap, accumulate)
        choice, auto, mesh = choose_order(parallel.pipeline), AutoWire.named(wire), named_sizes(parallel.mesh)
        check_schedule(lr_schedule, optimizer)
        self.clip, self.overlap = one_clip(clip_norm), overlap or Overlap()
        planned = sampled(
            layout, activations, offload=offload, optimizer=optimizer, precision=precision, wire=wire,
            accumulate=accumulate, clips=self.clip is not None, parallel=parallel, units=init.units,
            overlap=self.overlap, survive=runtime.survive,
        )  # fmt: skip
        place, size, copies = pick_device(runtime.device), self.overlap.bucket_bytes, runtime.survive
        table = planned.first if planned else table_of(layout, offload, model, precision, mesh, place, size, copies)
        table, activations = in_table(table, None if planned else activations)
        graphs = UnitGraphs.named(runtime.compile, place)
        announce(model.parameters(), "an engine of their model")
        waits, self._checksums = (runtime.patience, runtime.timeout), runtime.checksums
        with ExitStack() as held:  # what is made is given back at once if the rest cannot be made
            data_mesh, job = joined(self, mesh, place, *waits, held, table.rare, bool(table.signs),
                                    "given" if planned else "")  # fmt: skip
            agreement = program_agreement(job, data_mesh, *waits, held)
            held.push(self._forget_failed)
            ownership.claim(model, job)
            with job.told("making an engine"):
                sizes, why = data_mesh.sizes, list[str]()
                if planned is not None:
                    table, activations, why = planned.choose(model, data_mesh, job)
                table = runtime.in_table(table)
                staged = open_stages(model, optimizer, data_mesh, parallel.stages, choice, job)
                self._divide(model, parallel.tensor, data_mesh, parallel.sequence_parallel, staged, held)
                rules = self._read_rules(model, precision, table, data_mesh, held)
                tiers = Tiers(DeviceTier(place, debug=runtime.debug))
                held.callback(tiers.close)
                layers = Fp8Layers(model, rules, rules.precisions, native=accelerator.multiplies_fp8(place))
                self._replaced = Replacements(model, activations, tiers, data_mesh.sizes, layers, graphs)
                versions = self._check_stages(choice, sizes, data_mesh, accumulate, parallel.sequence_parallel)
                self.loss_scale = make_scaler(loss_scale, rules.precisions)
                made = self._share(model, optimizer, lr_schedule, rules, data_mesh, agreement, tiers, staged, held)
                #: The axis of sequence, or None.
                self.sequence: SequenceAxis | None = self._connect(
                    model, parallel.attention, parallel.tensor is not None, held
                )
                self._changes = Changes(
                    self.sharded, init.units, init.seed, size, made_here=made is None or made is not optimizer
                )
                held.callback(self._changes.close)
                table, said = self._choose_wires(auto, table, precision, accumulate)
                self._said = [*why, *said]
                self._make_units(init.weights, accumulate, init.seed, staged, held)
                self._updater = self._make_updater(init.seed, held)
                self._make_parts(table, accumulate, staged, choice, versions, held)
                self._changes.renew()
            self._names, self._held = {*vars(self), *dir(Engine)}, held.pop_all()
        accelerator.reset_peak(place)  # what making it took is not what a step takes

    def _forget_failed(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """An engine that could not be made and its parts refer to each other: its memory is not to wait for the garbage
        collector."""
        if kind is not None:
            if (sharded := vars(self).get("sharded")) is not None:
                ownership.mark_closed(sharded)
                vars(sharded).clear()
            vars(self).clear()

    def _divide(
        self, model: nn.Module, tensor: Any, data_mesh: DataMesh, sequence_parallel: bool, staged: Stages | None,
        held: ExitStack,
    ) -> None:  # fmt: skip
        """Leaves of layers that ranks share this rank's part, and of stages this rank's."""
        self._is_cut = tensor is not None
        split_model(model, tensor, data_mesh.sizes, data_mesh.coords, sequence_parallel=sequence_parallel)
        share_out(model, data_mesh.sizes, data_mesh.coords)
        if staged is not None:
            held.callback(staged.drop_foreign())

    def _share(
        self, model: nn.Module, optimizer: Any, schedule: Any, rules: Rules, data_mesh: DataMesh, agreement: Agreement,
        tiers: Tiers, staged: Stages | None, held: ExitStack,
    ) -> Optimizer | None:  # fmt: skip
        """Makes the optimizer, and what all parts of the engine know of the model."""
        comm = Comm.of(data_mesh, agreement, tiers.device)
        held.callback(comm.close)
        made = build(optimizer, model, empty=staged is not None) if optimizer is not None else None
        run = RunState(make_schedule(schedule, made), self.loss_scale)
        whole = staged.whole if staged is not None else None
        self.sharded = ShardedModel(model, rules, rules.layouts[-1], comm, tiers, run, made, whole=whole, owner=self)
        return made

    def _read_rules(
        self, model: nn.Module, precision: Any, table: Layout, data_mesh: DataMesh, held: ExitStack
    ) -> Rules:
        check_early(model, data_mesh.sizes)
        rules = Rules(precision, table, data_mesh.sizes)
        rules.check(model)
        for bound in rules.layouts:
            check_supported(bound, data_mesh.sizes)
        if rules.default.tf32 is not None:
            held.callback(hold_tf32(self, rules.default.tf32))
        return rules

    def _connect(self, model: nn.Module, attention: str | None, is_cut: bool, held: ExitStack) -> SequenceAxis | None:
        """Gives layers their ways to other ranks; the axis of sequence."""
        comm, loans = self.sharded.comm, self.sharded.loans
        held.callback(bind_groups(model, comm, lambda: bool(loans)))
        held.callback(connect_routers(model, comm, lambda: bool(loans)))
        self._replaced.follow_ranks(lambda axis: MeshGroup(axis, comm, lambda: bool(loans)))
        shares = comm.mesh.sizes.parts(comm.mesh.sizes.of_role(Role.TENSOR)) if is_cut else 1
        sequence = open_sequence(model, comm, attention, shares=shares, apart=lambda: bool(loans))
        if sequence is not None:
            held.callback(follow(model, sequence))
        return sequence

    def _choose_wires(
        self, auto: AutoWire | None, table: Layout, precision: Any, accumulate: int
    ) -> tuple[Layout, list[str]]:
        """The table with the wires that are the fastest here, and what it says of them and of how many bytes go
        together; the table itself if they are not to be chosen, or nothing is sent."""
        sharded, changes, said = self.sharded, self._changes, list[str]()
        if sharded.world_size == 1:
            return table, []

        def cut(rules: Rules) -> list[UnitSpec]:
            return [c.spec for c in changes.cut(rules=rules) if c.spec is not None]

        if auto is not None:
            table, said = chosen_wires(auto, table, precision, sharded.comm, self.overlap, accumulate, cut)
            sharded.take_rules(Rules(precision, table, sharded.comm.mesh.sizes))
        if self.overlap.asks_links:
            units = cut(sharded.rules)
            self.overlap, lines = chosen_bucket(sharded.layout, sharded.comm, self.overlap, accumulate, units)
            changes.put_together(self.overlap.bucket_bytes)
            said = [*said, *lines]
        return table, said

    def _make_units(self, weights: Any, accumulate: int, seed: int, staged: Stages | None, held: ExitStack) -> None:
        """Cuts the model, once all ranks are known to have the same, and gives each rank its shards."""
        sharded = self.sharded
        model, comm, agreement = sharded.module, sharded.comm, sharded.comm.agreement
        if staged is not None:
            staged.keep_mine(comm)
        cuts = self._changes.cut()
        if staged is not None:
            self._replaced.share(cuts, comm.anyone)
        self._replaced.check(cuts)
        if sharded.optimizer is not None and sharded.rules.stochastic:
            check_rounding(sharded.optimizer)
        if sharded.optimizer is not None:
            check_tier(sharded.optimizer, sharded.layout, self.device)
        if sharded.optimizer is not None and self.overlap.speculate is not None:
            clamps = self.clip is not None and self.clip.value is not None
            check_speculation(sharded.optimizer, sharded.layout, clamps=clamps)
        alike = given(
            sharded.rules, [c.spec for c in cuts], comm.mesh.sizes, sharded.optimizer,
            sharded.run.lr_schedule, accumulate, self.clip,
            self.loss_scale.rule if self.loss_scale is not None else None, self.overlap,
        )  # fmt: skip
        values = Weights(readable(weights), model, sharded.whole) if weights is not None else None
        (comm.job if comm.mesh.sizes.rare else agreement).same(alike)
        if values is not None:
            values.load_buffers(model)
        specs, moments = [c.spec for c in cuts if c.spec is not None], num_moments(sharded.optimizer)
        warn_of_memory(sharded.layout, specs, comm.mesh.sizes, moments, self.device, sharded.rules.default)
        take_room(sharded, specs, moments)
        move_buffers(dict(model.named_modules()), comm, buffer_dtypes(sharded.rules, model))
        sharded.take_units(make_units(model, cuts, sharded.layout, comm, sharded.tiers, values, seed))
        if staged is not None:
            share_values(sharded, staged.shared_here, comm.mesh.sizes.stages[0])
        held.callback(hear_gradients(model))

    def _make_updater(self, seed: int, held: ExitStack) -> ShardedOptimizer | None:
        sharded, self._cores = self.sharded, 1.0
        if sharded.optimizer is None:
            return None
        stochastic = seed if sharded.rules.stochastic else None
        moments, tiers = sharded.layout.moments, sharded.tiers
        self._cores = share_of_cores(sharded.comm.agreement.exchange)
        threads = max(1, int(self._cores))
        if sharded.layout.copied:
            check_copies(sharded.optimizer, self.overlap)
        copies = partial(CopiedShard, sizes=self.mesh.sizes, coords=self.mesh.coords, tiers=tiers)
        updater = shard_optimizer(
            sharded.optimizer, sharded.units, moments, tiers, copies, self.overlap.block, stochastic, threads,
            self.overlap.compiled_update, self.overlap.delayed_update,
        )  # fmt: skip
        held.callback(updater.close)
        if self.overlap.delayed_update and sharded.layout.outer is not None:
            raise ConfigError(
                "Overlap(delayed_update=True) with an Outer in the layout: an outer step needs the weights that the "
                "last update made; leave one of the two out."
            )
        if self.overlap.delayed_update:
            check_delayed(sharded.optimizer, sharded.layout, sharded.units)
            sharded.rows.append(updater.updated_row)
        if self.overlap.speculate is not None:
            sharded.rows.append(updater.snapshots.row)
        sharded.train_by(updater)
        return updater

    def _check_stages(
        self, choice: OrderChoice, sizes: Mesh, mesh: DataMesh, accumulate: int, sequence_parallel: bool
    ) -> int | None:
        """How many versions of its weights this rank keeps for micro-batches that outlast their batch; None: on no rank
        one does."""
        axes = sizes.stages
        versions = choice.versions(sizes[axes[0]], accumulate) if axes else [0]
        check_together(sizes, self._replaced.modes, self.overlap, sequence_parallel=sequence_parallel,
                       ahead=str(choice) if any(versions) else "")  # fmt: skip
        return versions[mesh.coords[axes[0]]] if any(versions) else None

    def _make_parts(
        self,
        table: Layout,
        accumulate: int,
        staged: Stages | None,
        order: OrderChoice,
        versions: int | None,
        held: ExitStack,
    ) -> None:
        """What runs forward, backward and step, and what tells of them."""
        self.sharded.run.after_step.append(partial(rebalance, self._changes.modules))
        options = PartOptions(
            table=table,
            wires=self._said,
            overlap=self.overlap,
            accumulate=accumulate,
            clip=self.clip,
            scaler=self.loss_scale,
            is_cut=self._is_cut,
            order=order,
            versions=versions,
            checksums=self._checksums,
            cores=self._cores,
        )
        parts = make_parts(
            self.sharded, self._updater, self._changes, self._replaced, self.sequence, staged, options, held
        )
        self._runner, self._hooks, self._announced = parts.runner, parts.hooks, parts.announced
        self._gate, self._away, self._backward = parts.gate, parts.away, parts.backward
        self._replicated, self._stepper, self._pipelined = parts.replicated, parts.stepper, parts.pipelined
        self._reports, self.alarm, self._clock = parts.reports, parts.alarm, parts.clock
        self.saver, self._base, self._loads = parts.saver, parts.base, 0
        #: Keeps the copies that ranks hold of each other's states; None: they hold none.
        self.copying: Copying | None = parts.copying
        if self.rank == 0 and (said := self._replaced.products.described()):
            LOG.info("%s", "\n".join(said))

    # -- what there is

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.sharded.module

    @property
    def optimizer(self) -> Optimizer | None:
        """The user's, whose groups hold this rank's pieces."""
        return self.sharded.optimizer

    @property
    def lr_schedule(self) -> Any:
        """Of the learning rate."""
        return self.sharded.run.lr_schedule

    @property
    def layout(self) -> Layout:
        """The table, bound to the main precision."""
        return self.sharded.layout

    @property
    def precision(self) -> Precision:
        """The main one."""
        return self.sharded.rules.default

    @property
    def device(self) -> torch.device:
        return self.sharded.device

    @property
    def mesh(self) -> DataMesh:
        return self.sharded.comm.mesh

    @property
    def rank(self) -> int:
        return self.sharded.rank

    @property
    def world_size(self) -> int:
        return self.sharded.world_size

    @property
    def data_rank(self) -> int:
        """This rank's number among those that read other samples; :attr:`rank` where all do."""
        return self.mesh.sample_rank

    @property
    def data_ranks(self) -> int:
        """Among how many ranks samples are shared out."""
        return self.mesh.sample_ranks

    @property
    def units(self) -> list[Unit]:
        """In definition order."""
        return self.sharded.units

    @property
    def steps(self) -> int:
        """Updates so far."""
        return self.sharded.run.steps

    @property
    def leaving(self) -> bool:
        """Whether a rank has notice that the run shall end soon, by :meth:`leave` or ``shardfold run --notice``.

        It is the same on all ranks between two steps, as it comes with a message that a step has anyway: all of them
        stop behind the same one, save, and end.
        """
        group = self.sharded.comm.group
        return group.leaving or (group.peers.size == 1 and group.is_noticed)

    def leave(self) -> None:
        """Gives notice that the run shall end soon, on one rank or several: :attr:`leaving` tells all of them. It only
        sets a flag, so a handler of a signal may call it."""
        self.sharded.comm.job.give_notice()

    @property
    def closed(self) -> bool:
        """Whether it is: nothing runs any more."""
        return bool(self.sharded.closed)

    @property
    def close_reason(self) -> str:
        """Why the engine is closed; empty while it is not."""
        return self.sharded.closed

    @property
    def program(self) -> Program:
        """What runs, by section; the order of units is the recorded one."""
        return self._runner.orders.bound.whole

    @property
    def order(self) -> list[str]:
        """Names of the units as their forward in training runs them; definition order until that is known."""
        return self._runner.orders.forward()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an engine cannot be copied or pickled, as it holds process groups and shards: copy or save engine.module "
            "inside `with engine.gathered():`, or save engine.state_dict()."
        )

    if not TYPE_CHECKING:  # which are to find names that are not there

        def __setattr__(self, name: str, value: Any) -> None:
            if "_held" in self.__dict__:  # it is made
                check_assigned(self, name, value, self._names, derived=type(self) is not Engine)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError: again, for what it says
                return object.__getattribute__(self, name)
            sharded = self.__dict__.get("sharded")
            raise missing(self, name, *((sharded.module, sharded.optimizer) if sharded is not None else (None, None)))

    def __repr__(self) -> str:
        return self._reports.described()

    @property
    def _rounds(self) -> Rounds | None:
        return self._stepper.rounds if self._stepper is not None else None

    @property
    def _freeze(self) -> Freeze | None:
        return self._stepper.freeze if self._stepper is not None else None

    # -- the user's side

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward; with stages on several ranks under ``torch.no_grad()`` only, and on all of them."""
        self._gate.refuse_closed("engine(...)")
        try:
            self._replicated.check_inputs((args, kwargs))
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._hooks.left_by(error)
            if self.sequence is not None:
                self.sequence.forget()
            raise

    def backward(self, loss: Tensor, *, weight: float | None = None, retain_graph: bool = False) -> None:
        """Runs backward; without a loss scale the same as ``loss.backward()``, which under one is refused.

        The loss is not divided: gradients are, as they arrive. With a ``weight``, such as the number of tokens that a
        mean was taken over, the step's gradient is the weighted mean over all micro-batches of all ranks. On a mesh
        with an axis of sequence that is the number of labels of this rank that count, unless another is given.
        """
        self._gate.refuse_closed("engine.backward()")
        self._pipelined.refuse_call("engine.backward()")
        self._replicated.note(loss)
        if self.sequence is None:
            self._backward.run(loss, weight, retain_graph)
            return
        weight = self.sequence.weight() if weight is None else weight
        try:
            self._backward.run(loss, weight, retain_graph)
        finally:
            self.sequence.forget()

    def train_batch(self, batch: Any, compute: Callable[[nn.Module, Any], Tensor] | None = None) -> Tensor:
        """Forward and backward of all micro-batches of a step; with an axis of pipeline, through its stages, in the
        order of ``Parallel(pipeline=)``. :meth:`step` follows.

        Args:
            batch: the same on all stages: tensors in a mapping, a tuple or alone, that are cut into ``accumulate``
                equal parts along their first dimension; or a list of as many micro-batches.
            compute: ``compute(model, micro_batch)`` calls the model and returns the loss, a tensor of one element;
                None: the model itself gives it. Every stage runs it, up to its last piece.

        Returns:
            The mean of the losses, fp64, 0-d, on every rank of the stages.

        Raises:
            UsageError: the batch does not divide, or no loss comes.
            OrderError: on the ranks of other stages, where one has failed: the engine is given up.
        """
        return self._pipelined.train(batch, compute)

    def eval_batch(
        self, batch: Any, compute: Callable[[nn.Module, Any], Tensor] | None = None, *, micro_batches: int | None = None
    ) -> Tensor:
        """The mean loss of a batch without gradients, through the stages where there are such; see
        :meth:`train_batch`. ``micro_batches``: how many it is cut into; None: ``accumulate``."""
        return self._pipelined.evaluate(batch, compute, micro_batches or self.accumulate)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a ``backward()`` of your own; the same loss where there is no scale."""
        self._gate.refuse_closed("engine.scale()")
        self._pipelined.refuse_call("engine.scale()")
        return self._backward.scale(loss)

    def step(self, closure: None = None, *, tokens: float | None = None, samples: float | None = None) -> StepReport:
        """The optimizer step, at an accumulation boundary; before it, nothing happens.

        ``tokens`` and ``samples`` are how many this rank has processed since the last call, for :meth:`stats`. A
        ``closure``, as optimizers of torch take one, is refused.

        Raises:
            UsageError: a closure, no optimizer, no backward since the last step, or whole values are lent.
            NonFiniteError: gradients overflow although the loss scale is at its floor (``LossScale.patience``).
        """
        check_closure(closure)
        if self._stepper is None:
            raise UsageError("engine.step() needs an optimizer: pass optimizer= to the Engine.")
        self._gate.refuse_closed("engine.step()")
        runner = self._runner
        runner.settle("engine.step()")
        if self.sequence is not None:
            self.sequence.check_step()
        self._gate.refuse_broken("engine.step()")
        self.saver.tell()
        if self.micro_batch == 0:
            by_hand = any(p.grad is not None for p in self.module.parameters())
            raise UsageError(
                "engine.step() with no backward since the last step: call engine.backward(loss)."
                + " What was put into parameter.grad by hand counts with a backward only." * by_hand
            )
        self._clock.told(tokens, samples)
        if self.last_micro_batch:
            runner.close_micro_batches()
        if not self.gradients_ready:
            return StepReport(self.steps, updated=False, loss_scale=runner.handlers.lifted)
        if self._rounds is not None:
            self._rounds.told(tokens)
        refuse_during(self.sharded.loans, "engine.step()")
        self._gate.secure()
        return self._stepper.step()

    @property
    def accumulate(self) -> int:
        """Micro-batches per step; when it is set, the gradients that come are divided by it, the same on all ranks."""
        return self._runner.accumulate

    @accumulate.setter
    def accumulate(self, accumulate: int) -> None:
        check_accumulate(accumulate)
        self._runner.set_accumulate(accumulate)
        self._runner.handlers.set_scale(1.0 / (self.mesh.data_ranks * accumulate))
        if self._freeze is not None:
            self._freeze.renew()

    @property
    def last_micro_batch(self) -> bool | None:
        """Whether the next backward is the last before a step, on all ranks alike; None: each ``accumulate``-th is. Set
        to True behind a backward that was not, it lets :meth:`step` reduce what that left."""
        return self._announced.context.last

    @last_micro_batch.setter
    def last_micro_batch(self, last: bool | None) -> None:
        check_last(last)
        self._announced.announce(last=last)

    @property
    def micro_batch_weight(self) -> float | None:
        """What :meth:`set_micro_batches` has set."""
        return self._backward.weights.times

    def set_micro_batches(
        self, accumulate: int, weight: float | None = None, *, of: int | None = None, alone: float | None = None
    ) -> None:
        """From now on a step has so many micro-batches, the same on all ranks, and ``weight=`` of backwards is
        multiplied by ``weight``, which also is the weight of those that are given none. A micro-batch of weight 0
        changes nothing, so a rank that has fewer than others can do the same passes; None: weights are as they are
        given. ``of``: by how many gradients are divided as they come, those of all ranks that count; None: by
        ``accumulate`` for each rank. ``alone``: what counts as the ``weight=`` of backwards without one; None: 1.

        Raises:
            ConfigError: ``accumulate`` or ``of`` is no integer above 0, or ``weight`` or ``alone`` no number >= 0.
        """
        weights = self._backward.weights
        if accumulate != self.accumulate or of != weights.divided:
            self.accumulate = accumulate
            if of is not None:
                check_accumulate(of)
                self._runner.handlers.set_scale(1.0 / of)
        weights.multiply(weight, of, alone)

    @property
    def micro_batch(self) -> int:
        """Backwards since the last step; 0 behind one that an exception has left, as what there was is lost."""
        return 0 if self._runner.interrupted else self.sharded.run.micro_batch

    @property
    def attempt(self) -> int:
        """Which step gradients are collected for; skipped steps and those whose gradients were dropped count."""
        return self.sharded.run.attempt

    @property
    def gradients_ready(self) -> bool:
        """Whether the last backward was that before a step: gradients are summed over ranks and micro-batches."""
        return self.sharded.run.gradients_ready and not self._runner.interrupted

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside send nothing; gradients wait, whole, for the next backward outside."""
        self._gate.refuse_closed("engine.no_sync()")
        self._pipelined.refuse_call("engine.no_sync()")
        with self._announced.announcing(synchronize=False):
            yield

    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        self._gate.refuse_closed("engine.zero_grad()")
        self._gate.zero_grad()

    def reset(self) -> None:
        """Back to a clean state after an exception in forward or backward; gradients since the last step are lost.

        Every rank must call it, or do what calls it by itself: the next forward, step or :meth:`gathered`.
        """
        self._gate.refuse_closed("engine.reset()")
        self._runner.reset()
        if self.sequence is not None:
            self.sequence.forget()

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
        self._gate.refuse_closed("engine.gathered()")
        if write and self._freeze is not None and self._freeze.apart:
            raise UsageError(
                "engine.gathered(write=True) where ranks have gone their own ways since they sent signs: call "
                "engine.outer_step() before."
            )
        if not self._runner.under_way:
            self._gate.follow()
            self._gate.secure()  # what users wrote into parameters of 16 bits is in the master too
        with gathered(self.sharded, names, write=write, of=of) as values:
            try:
                yield values
            finally:
                self._gate.secure()
                if write:
                    self._pipelined.drop()
        if not self._runner.under_way:
            self._gate.follow()

    @outside_inference()
    def state_dict(self, *, frozen: str = "keep", sharded: bool = False) -> dict[str, Any]:
        """What the module's own ``state_dict()`` gives of all parameters (in the master's precision) and persistent
        buffers, on the CPU of every rank: hooks, overrides, extra state and ``_metadata`` are as in plain PyTorch.

        Tied names have one tensor. ``frozen="skip"`` leaves out what the optimizer does not have. Buffers that training
        changes, and extra state, are this rank's own, as under DDP; what is saved is rank 0's.

        ``sharded=True`` gives parameters as DTensors, as FSDP2 does, for ``torch.distributed.checkpoint``: on a
        ``DeviceMesh`` of the CPU, over Gloo, whose dimensions are the axes of :attr:`mesh` with more than one rank.
        ``Shard(0)`` where the layout splits parameters, in ``torch.chunk``'s parts; ``Replicate()`` where it does not;
        ``Shard(dim)`` on the axes of slices, as of tensor. A rank's shard ends in the middle of a row, so rows are made
        anew: each rank sends its share of the model once, and needs memory for its share, and while they are made for
        that of a segment or 16 MiB more. Buffers are plain tensors, rank 0's from then on. Each stage of a pipeline has
        its own names. On one rank all are plain tensors. With the engine, collectives of the mesh end.

        Raises:
            ConfigError: ``frozen`` is none of its words.
            ModelError: a hook writes into a parameter, or needs values that are left out or of other stages; with
                ``sharded=True`` on all ranks: slices of a parameter are no chunks along one dimension.
            UsageError: ``sharded=True`` where groups of ranks have weights of their own (:class:`Outer`).
        """

        def check() -> None:
            check_flags("engine.state_dict()", sharded=sharded)
            if sharded:
                check_sharded(self.sharded, frozen, apart=self._apart)

        what = f"engine.state_dict(frozen={frozen!r}{', sharded=True' if sharded else ''})"
        self._gate.meet(what, follow=True, buffers=bool(sharded), check=check)
        self._gate.secure()
        return (sharded_state if sharded else state_dict)(self.sharded, frozen)

    @outside_inference()
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Takes parameters, buffers and extra state from a full state dict that every rank has, as the module's own
        ``load_state_dict()`` does, with its hooks, overrides and versions; the optimizer's state stays.

        Values may be DTensors, of any placements and any mesh, all or some of them; their shapes are the whole
        parameters', of slices too. What is divided over exactly the ranks of the engine (those of the stage, in a
        pipeline) travels part by part, through host memory, to the ranks whose shards have it: at most 64 MiB of
        parameters, or one, at a time. Anything else, and what code of the model's own reads, is made whole.

        Raises:
            ModelError: on all ranks: a value is no tensor, a shape differs, this rank is not in the mesh of a DTensor
                that it needs, or (strict) names are missing or unexpected; all are listed. No parameter or buffer was
                changed.
            ConfigError: on all ranks: they were given different DTensors.
        """
        what = "engine.load_state_dict()"

        def check() -> None:
            check_state(state, self.sharded.loans)
            check_dtensors(self.sharded, state)

        self._gate.meet(what, follow=True, check=check)
        self._gate.secure()
        values, read = values_to_read(self.sharded), list[Read]()
        given = unpack(self.sharded, state, values)
        self._gate.meet(what, check=lambda: read.append(read_state(self.sharded, given.state, values, strict=strict)))
        given.load(self.sharded, read[0])
        load_state(self.sharded, read[0])
        self._pipelined.drop()
        if self._rounds is not None:
            self._rounds.forget()
        elif self._freeze is not None:
            self._freeze.forget()

    @outside_inference()
    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state as ``get_optimizer_state_dict()`` of ``torch.distributed.checkpoint.state_dict`` gives
        it under FSDP2, for ``torch.distributed.checkpoint`` beside :meth:`state_dict` with ``sharded=True``:
        ``{"state": {name: {"exp_avg": DTensor, ..., "step": tensor}}, "param_groups": [...]}``, with names in place of
        parameters. Rows are divided over the ranks that moments are split over; each rank sends its share once.

        Raises:
            UsageError: the optimizer is not AdamW, Adam or SGD (of 8-bit moments, or of whole matrices, there are no
                rows to give), its moments rest on disk, or ranks have stages or weights of their own.
            ModelError: slices of a parameter are no chunks along one dimension.
        """
        what = "engine.optimizer_state_dict()"
        check = partial(check_optimizer, self.sharded, what, apart=self._apart)
        self._gate.meet(what, follow=True, check=check)
        self._gate.refuse_broken(what)
        return optimizer_state(self.sharded)

    @outside_inference()
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`optimizer_state_dict` gives, or ``get_optimizer_state_dict()`` of FSDP2, written on any
        number of ranks: moments, counts of steps, and options of groups. Values may be DTensors of any placements, or
        whole tensors; parameters stay.

        Raises:
            UsageError: as of :meth:`optimizer_state_dict`.
            ModelError: on all ranks: it is not the state of this optimizer: names, states, shapes or groups differ.
                Nothing was changed.
            ConfigError: on all ranks: they were given different DTensors.
        """
        what = "engine.load_optimizer_state_dict()"

        def check() -> None:
            check_optimizer(self.sharded, what, apart=self._apart)
            check_given(self.sharded, state)

        self._gate.meet(what, follow=True, check=check)
        load_optimizer_state(self.sharded, state)

    @property
    def _apart(self) -> bool:
        """Whether groups of ranks have weights of their own."""
        return self._rounds is not None or (self._freeze is not None and self._freeze.apart)

    @outside_inference()
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
            path: the checkpoint's folder. What was there is replaced. The folder around it is this run's from now on:
                where it has checkpoints of another run, which was not loaded, ``keep=`` is refused, and so is a name
                that is there.
            state: more to keep, rank 0's, by name: numbers, strings, lists, dicts, tensors, or objects with
                ``state_dict()``, such as a sampler.
            rank_state: the same of each rank.
            wait: returns when the checkpoint is there; takes no memory for a copy. Where states rest on disk it always
                does: they are copied from file to file, while nothing changes them.
            busy: while an earlier save is under way: ``"wait"`` for it, or ``"skip"`` this one.
            keep: checkpoints of this run that stay in the folder around ``path``, with this one; None removes none.
                The last one that is finite stays in any case.
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
            by ``wait()``, or else by the next call of :meth:`save` or :meth:`close`.

        Raises:
            ConfigError: on all ranks: an argument is of a wrong type or value on one of them.
            CheckpointError: it cannot be written, the folder around ``path`` is another run's, or the save before it
                failed in the background; what was there before is as it was.
            UsageError: between the micro-batches of a step, or while values are lent.
        """

        def check() -> None:
            check_place("engine.save()", path, "a checkpoint")
            check_slices("engine.save()", self.sharded)
            check_states("engine.save()", state=state, rank_state=rank_state)
            check_options(busy, keep, nonfinite, gradients, shared)
            check_flags("engine.save()", wait=wait, latest=latest)

        self._gate.meet(f"engine.save(frozen={frozen!r})", follow=True, check=check)
        self._gate.secure()
        self._gate.refuse_broken("engine.save()")
        if self._rounds is not None:
            self._rounds.hold_still()
        elif isinstance(exchange := self._runner.handlers.rounds, SignExchange):
            if self._freeze is not None:
                self._freeze.together()
            exchange.hold_still()
        return self.saver.save(
            path, state=state or {}, rank_state=rank_state or {}, wait=wait, busy=busy, keep=keep, nonfinite=nonfinite,
            left_out=self._base.left_out(frozen), latest=latest, gradients=gradients, shared=shared,
        )  # fmt: skip

    @outside_inference()
    def load(
        self,
        path: str | Path,
        *,
        weights_only: bool = False,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        state: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[int]] | None = None,
    ) -> LoadReport:
        """Goes on where a checkpoint was written, whatever layout, precision and number of ranks wrote it.

        Args:
            path: a checkpoint, or a folder of checkpoints, whose latest is taken. A save of this engine that is still
                under way is waited for.
            weights_only: parameters and buffers only; the optimizer and the rest of the run stay as they are.
            strict: False loads what fits; names and states that do not are in the report. Shapes have to fit anyway.
            rename: from the checkpoint's names to the model's: regular expressions and what they are replaced with, in
                order, or a function.
            state: objects with ``load_state_dict()``, by the names they were saved under.
            rows: of matrices that have other rows than they had, such as a head after classes came and went, by name:
                for each row of the model's the checkpoint's, or -1 for one that keeps its values, with new optimizer
                states. All ranks give the same.

        Raises:
            ConfigError: on all ranks: an argument is of a wrong type on one of them.
            CheckpointError: on all ranks: there is none, it is not complete or damaged, ranks find different ones, or
                it does not fit: all that is missing, unexpected or of another shape is listed; or the state is of an
                optimizer of another kind, or of other groups; or what was left out has other values here.
        """

        def check() -> None:
            check_place("engine.load()", path, "a checkpoint or of a folder of checkpoints")
            check_slices("engine.load()", self.sharded)
            check_states("engine.load()", state=state)
            check_loadable("engine.load()", state)
            check_rows("engine.load()", rows)
            renamer(rename, "engine.load")
            check_flags("engine.load()", weights_only=weights_only, strict=strict)

        self._gate.meet(f"engine.load(weights_only={weights_only})", follow=True, check=check)
        self._gate.secure()
        self.saver.finish()  # it may be what is asked for
        self._loads += 1
        self._pipelined.drop()
        report = load(
            self.sharded, path, weights_only=weights_only, strict=strict, rename=rename, state=state,
            number=self._loads, rows=rows,
        )  # fmt: skip
        if not weights_only:
            self.saver.lock.adopt(report.path, completes=self.sharded.comm.mesh.rank == 0)
        if self._freeze is not None:
            self._freeze.forget()
            self._freeze.follow()
        return report

    @outside_inference()
    def outer_step(self) -> None:
        """Brings all groups of ranks together now, whatever of a round of outer steps is over: behind it the model is
        the same everywhere, as at the end of a run it is to be. Nothing where the layout has no ``outer``.

        Raises:
            UsageError: between the micro-batches of a step.
        """

        def check() -> None:
            if self.micro_batch:
                raise UsageError("engine.outer_step() between the micro-batches of a step: call it behind step().")

        self._gate.meet("engine.outer_step()", check=check, settle=True)
        if self._rounds is not None:
            self._gate.secure()
            self._rounds.end_now()
        elif self._freeze is not None:
            self._gate.secure()
            self._freeze.together()

    def memory(self) -> MemoryReport:
        """Bytes held on this rank by state and tier, walked from live storages, beside what the table says."""
        return self._reports.memory()

    def reads_ahead(self) -> AbstractContextManager[None]:
        """Inside, forwards without gradients follow each other, as in a generation: when one ends, what the next reads
        first of parameters in files begins to come."""
        self._gate.refuse_closed("engine.reads_ahead()")
        return self._runner.handlers.going_on()

    def count_saved(self) -> AbstractContextManager[SavedReport]:
        """Inside, bytes that autograd saves in each unit are counted; the report is complete at the end."""
        return self._replaced.counted()

    def traffic(self) -> TrafficReport:
        """Bytes this rank sent in the last step, by purpose and axes, beside what the program says."""
        return self._reports.traffic()

    def stats(self, *, peak_flops: float | str | Path | None = None) -> Stats:
        """Times, rates, waiting, bytes sent and held, as data.

        Args:
            peak_flops: what this rank's device could do, for the MFU: FLOP/s, or the file of a profile that ``shardfold
                doctor --measure`` wrote; None: as its maker prints it, of a GPU that ``shardfold plan`` knows by name.

        Raises:
            ConfigError: it is neither.
        """
        return self._reports.stats(peak_flops)

    def explain(self, batch: Any = None, compute: Callable[[nn.Module, Any], Tensor] | None = None) -> str:
        """The table, the units and the program, as text; of a pipeline also what a ``batch`` as of :meth:`train_batch`
        sends and keeps, without running it (None: one like the last)."""
        if batch is not None:
            self._pipelined.look(batch, compute, self.accumulate)
        return self._reports.explained()

    def mean(self, value: float | Tensor, weight: float | Tensor = 1.0) -> float:
        """The mean of a number over all ranks, weighed by a number >= 0 of each, such as its tokens; a control message.
        A value of weight 0 does not count, whatever it is; NaN if all weights are 0.

        Raises:
            ConfigError: on all ranks: one of them is no number, or a weight is less than 0, on one of them.
        """

        def check() -> None:
            check_number("engine.mean()", value)
            check_weight("engine.mean()", weight)

        self._gate.meet("engine.mean()", check=check)
        share = float(weight)
        total, weights = self.sharded.comm.control([float(value) * share if share else 0.0, share], dist.ReduceOp.SUM)
        return total / weights if weights else nan

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The largest of each number over all ranks; a control message.

        Raises:
            ConfigError: on all ranks: it is no list of numbers on one of them.
        """
        count = len(values) if hasattr(values, "__len__") else 0
        self._gate.meet(
            f"engine.max_over_ranks() of {count} numbers",
            check=lambda: check_numbers("engine.max_over_ranks()", values),
        )
        return self.sharded.comm.control([float(value) for value in values], dist.ReduceOp.MAX)

    def close(self) -> None:
        """Waits for a save under way, takes the hooks off the model, gives back what the engine changed in the process.

        Where this rank has all values (on one rank, under layouts that do not split parameters, inside ``gathered()``)
        they stay in the model, in the compute dtype; elsewhere they are gone: see :meth:`release`. Nothing is sent.

        Raises:
            CheckpointError: the last save failed in the background, and no call has raised that; the engine is closed.
        """
        self._end("")
        self.saver.raise_failure()

    @outside_inference()
    def release(self, *, of: str = "params") -> nn.Module:
        """Closes the engine and leaves the model a plain module with whole parameters on every rank, which all call it.

        Plain PyTorch trains it, or another engine. ``of="master"``: trained parameters become the master's values in
        its dtype. Gradients since the last step and the optimizer's state are dropped.

        Raises:
            UsageError: while values are lent.
            CheckpointError: the last save failed in the background; the model is a plain one all the same.
        """
        module = ownership.release(self.sharded, of, self._end)
        self.saver.raise_failure()
        return module

    @outside_inference()
    def close_split(self, reason: str = "") -> None:
        """Closes the engine and leaves what it held in parts as under :func:`shardfold.sharded_init`, for another
        engine to take over; all ranks call it. ``reason``: what calls of this one raise with."""
        ownership.close_split(self.sharded, lambda _: self._end(reason))
        self.saver.raise_failure()

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        self._held.close()
        ownership.mark_closed(self.sharded, reason)


@known_arguments
def engine_of(parameter: nn.Parameter) -> Engine | None:
    """The engine that holds ``parameter`` in one of its units, or None; one that was closed holds nothing.

    Examples:
        >>> sf.engine_of(engine.module[0].weight) is engine
        True
    """
    return owner_of(parameter)
