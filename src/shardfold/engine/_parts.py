"""What runs the passes and steps of an engine: parts that are complete when they are made, in the order of their needs.

handlers   what operations do                       runner    which of them an event brings about
hooks      events out of the model, to the runner   stepper   the step
gate       what is done between passes              pipelined batches through stages
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from shardfold.activations.modes import Replacements
from shardfold.checkpoint.collect import FrozenBase
from shardfold.checkpoint.save import Saver
from shardfold.engine._away import Away
from shardfold.engine._gate import PassGate
from shardfold.engine._pipelined import Pipelined, dress
from shardfold.engine._reports import Reports
from shardfold.engine._step import Stepper
from shardfold.engine.announced import Announced
from shardfold.engine.backward import Backward
from shardfold.engine.copying import Copying, copies_of
from shardfold.engine.freeze import Freeze
from shardfold.engine.handlers import Handlers
from shardfold.engine.hooks import Hooks
from shardfold.engine.pace import Pace
from shardfold.engine.replicated import Replicated
from shardfold.engine.rounds import Rounds
from shardfold.engine.runner import Runner
from shardfold.engine.stats import Clock
from shardfold.errors import ConfigError
from shardfold.numerics.alarm import Alarm
from shardfold.numerics.clipping import Clip
from shardfold.numerics.fp8_layers import Fp8Layers
from shardfold.numerics.scaling import Scaler
from shardfold.numerics.token_weights import Shares
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.optim.sign_exchange import SignExchange
from shardfold.parallel.pipeline.open import check_ahead
from shardfold.parallel.pipeline.stage_order import OrderChoice
from shardfold.parallel.pipeline.stages import Stages
from shardfold.parallel.pipeline.stash import Stash
from shardfold.parallel.sequence import SequenceAxis
from shardfold.plan.axes import Role
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import Layout
from shardfold.plan.rewrites import Overlap
from shardfold.sharding.changes import Changes
from shardfold.sharding.checksums import Checksums
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.sharding.unit import Life
from shardfold.tiers.limit import Throttling

__all__ = ["EngineParts", "PartOptions", "make_parts"]


@dataclass(frozen=True)
class PartOptions:
    """What of an engine's arguments its parts go by.

    Attributes:
        table: of the layout, as the user gave it.
        wires: what was found out when formats on the way were chosen, in lines.
        overlap: how far ahead units are gathered.
        accumulate: micro-batches per step.
        clip: of gradients; None: they are not clipped.
        scaler: of the loss; None: it is not scaled.
        is_cut: a plan has cut layers along an axis of tensor.
        order: in which stages run.
        checksums: of states and of what is gathered.
        versions: of its weights, that this rank keeps for micro-batches that outlast their batch; None: on no rank one
            does.
        cores: that this rank may keep busy, a part of one where ranks share it.
    """

    table: Layout
    wires: list[str]
    overlap: Overlap
    accumulate: int
    clip: Clip | None
    scaler: Scaler | None
    is_cut: bool
    order: OrderChoice
    versions: int | None
    checksums: bool = False
    cores: float = 1.0


@dataclass(frozen=True)
class EngineParts:
    """What an engine's calls go to."""

    runner: Runner
    announced: Announced
    hooks: Hooks
    gate: PassGate
    away: Away
    backward: Backward
    replicated: Replicated
    stepper: Stepper | None
    pipelined: Pipelined
    reports: Reports
    alarm: Alarm
    clock: Clock
    saver: Saver
    base: FrozenBase
    copying: Copying | None


def make_parts(
    sharded: ShardedModel,
    updater: ShardedOptimizer | None,
    changes: Changes,
    replaced: Replacements,
    sequence: SequenceAxis | None,
    staged: Stages | None,
    options: PartOptions,
    held: ExitStack,
) -> EngineParts:
    """All parts; ``held`` gives back what they take.

    Raises:
        ConfigError: the order of stages cannot run so many micro-batches, or not with these options.
    """
    shares, scaler, versions = Shares(sharded.run), options.scaler, options.versions
    stash = Stash(lambda: sharded.units, versions) if versions is not None else None
    handlers = Handlers(
        sharded,
        updater,
        options.clip,
        scale=1.0 / (sharded.comm.mesh.data_ranks * options.accumulate),
        loss_scale=scaler,
        shares=shares,
        stash=stash,
    )
    held.callback(handlers.cursor.close)
    agreement = sharded.comm.agreement
    pace = _make_pace(sharded, options.cores)
    agreement.make_room_besides(0 if pace is None else pace.room)
    alarm, clock = Alarm(sharded, scaler, options.clip), Clock(agreement.waited, pace)
    held.callback(alarm.close)
    away, announced = Away(sharded, updater), Announced()
    runner = Runner(
        sharded, handlers, away, options.overlap, options.accumulate, clip=options.clip, stashes=bool(versions)
    )
    hooks = _make_hooks(sharded, runner, announced, replaced)
    held.callback(hooks.remove)
    runner.connect(hooks)
    backward = Backward(sharded, runner, scaler, alarm, shares)
    replicated = Replicated(sharded, always=sharded.tiers.device.debug, losses=options.is_cut)
    checksums = _make_checksums(sharded, updater, held) if options.checksums else None
    stepper = copying = None
    if updater is not None:
        copying = Copying(sharded, updater) if sharded.layout.copied else None
        met = _meet_rarely(sharded, runner, changes)
        own = (scaler, alarm, shares, replaced, replicated, clock)
        stepper = Stepper(sharded, updater, runner, changes, *own, *met, checksums, copying)
    gate = PassGate(runner, hooks, changes, stepper)
    sharded.connect(gate)
    saver, base = Saver(sharded, lambda: copying is not None and copying.lends), FrozenBase(sharded)
    held.callback(saver.close)
    if versions is not None:
        check_ahead(
            str(options.order),
            sharded.units,
            options.overlap,
            scales=scaler is not None,
            sequence=sequence is not None,
        )
    pipelined = Pipelined(sharded, runner, hooks, backward, announced, staged, options.order, stash, sequence)
    _open_stages(sharded, pipelined, options, held)
    reports = Reports(sharded, options.table, updater, runner, replaced, clock, pipelined, options.wires)
    return EngineParts(
        runner=runner,
        announced=announced,
        hooks=hooks,
        gate=gate,
        away=away,
        backward=backward,
        replicated=replicated,
        stepper=stepper,
        pipelined=pipelined,
        reports=reports,
        alarm=alarm,
        clock=clock,
        saver=saver,
        base=base,
        copying=copying,
    )


def _make_pace(sharded: ShardedModel, cores: float) -> Pace | None:
    """Who makes steps longer; None on devices with streams, whose times a host does not have."""
    mesh, peers = sharded.comm.mesh, sharded.comm.agreement.peers
    if mesh.on_streams:
        return None
    links = mesh.per_host is None or mesh.per_host < mesh.world
    how = {"links": links, "crowd": torch.get_num_threads() / cores, "throttled": Throttling().seconds}
    return Pace.among(peers.ranks, peers.rank, **how)


def _make_checksums(sharded: ShardedModel, updater: ShardedOptimizer | None, held: ExitStack) -> Checksums:
    """
    Raises:
        ConfigError: there are no updates, or they go on while the next passes run, so that there is no moment at which
            nobody writes.
    """
    if updater is None:
        raise ConfigError(
            "Runtime(checksums=True) looks in front of updates, and this engine has no optimizer: leave it out."
        )
    if updater.delayed:
        raise ConfigError("Runtime(checksums=True) does not go with delayed updates: leave one of the two out.")
    sizes, table = sharded.comm.mesh.sizes, sharded.layout
    # Along an axis of tensor ranks compute what they have alike each for itself; of formats that round a rank may keep
    # its own part exact.
    compares = not sizes.of_role(Role.TENSOR) and FORMATS[table.gather.format].native is not None
    checksums = Checksums(lambda: sharded.units, updater.regions_of, partial(copies_of, updater), compares=compares)
    checksums.connect()
    held.callback(checksums.close)
    return checksums


def _make_hooks(sharded: ShardedModel, runner: Runner, announced: Announced, replaced: Replacements) -> Hooks:
    precision = sharded.rules.default
    #: Some parameters follow the policy of the model as a whole.
    policy = any(not segment.spec.own and segment.spec.dtype == precision.compute for segment in sharded.segments())
    narrow, autocast = _casts(sharded)
    return Hooks(
        sharded.module,
        sharded.units,
        runner,
        announced,
        cast=narrow if policy else None,
        casts=sharded.rules.mixed,
        autocast=autocast,
        replaced=replaced,
        widens=sharded.rules.widens,
    )


def _casts(sharded: ShardedModel) -> tuple[torch.dtype | None, tuple[torch.dtype, str] | None]:
    """What floating-point inputs are cast to, and dtype and type of device of the autocast; None: not, and none."""
    precision = sharded.rules.default
    narrow = TORCH_DTYPES[precision.input_dtype] if precision.input_dtype else None
    autocast = (TORCH_DTYPES[precision.autocast], sharded.device.type) if precision.autocast else None
    return narrow, autocast


def _meet_rarely(sharded: ShardedModel, runner: Runner, changes: Changes) -> tuple[Rounds | None, Freeze | None]:
    """How groups of ranks come together in rounds, or send signs once the variance is frozen."""
    shared = runner.handlers.rounds
    if isinstance(shared, SignExchange):
        freeze = Freeze(sharded, runner, shared.optimizer, shared.groups, changes)
        freeze.follow()
        return None, freeze
    if shared is None:
        return None, None
    rounds = Rounds(shared.outer, sharded, runner, changes, shared)
    sharded.run.come_together(rounds)
    return rounds, None


def _open_stages(sharded: ShardedModel, pipelined: Pipelined, options: PartOptions, held: ExitStack) -> None:
    """Batches go through the stages of the model from now on, and so do its calls.

    Raises:
        ConfigError: the order cannot run so many micro-batches.
    """
    for unit in sharded.units:  # the root was kept until all ties were made
        if unit.split and unit.life is Life.GATHERED:
            unit.release()
    pipelined.order(options.accumulate)  # which may refuse it
    if (staged := pipelined.stages) is None:
        return
    sharded.comm.job.same({"Parallel(pipeline=...)": options.order.told})
    staged.settle()
    dress(staged.skeleton.module, sharded.rules, *_casts(sharded))
    Fp8Layers(staged.skeleton.module, sharded.rules, sharded.rules.precisions).attach()  # which counts what is saved
    staged.attach()
    held.callback(staged.close)
    held.callback(pipelined.attach())
