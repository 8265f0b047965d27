"""A handler per verb: what the operations of a program do to units, transports and memory.

An operation is bound to its handler once, when a program is compiled; a running step only calls what is bound.
Handlers know how to do a thing and never when: the program says that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from shardfold.comm.meter import Meter, TierTraffic
from shardfold.comm.transport import Pending, drain
from shardfold.engine._norms import Norms
from shardfold.engine.cursor import Cursor
from shardfold.engine.damage import StepFailure
from shardfold.errors import ConfigError
from shardfold.numerics.clipping import Clip
from shardfold.numerics.scaling import Scaler
from shardfold.numerics.token_weights import Shares
from shardfold.optim.global_weights import GlobalWeights
from shardfold.optim.master_ranks import MasterRanks
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.optim.sign_exchange import SignExchange, sign_exchange
from shardfold.parallel.pipeline.stash import Stash
from shardfold.plan.axes import DATA_AXES, Mesh, Role
from shardfold.plan.cost import fetched_bytes
from shardfold.plan.layout import Layout, Tier
from shardfold.plan.program import MARKERS, Op
from shardfold.plan.report import TierSeconds
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.slices import shared_number
from shardfold.sharding.sums import Sums
from shardfold.sharding.unit import Life, Unit
from shardfold.tiers.host import HostTier
from shardfold.tiers.waits import Waits

__all__ = ["HANDLERS", "Handlers", "check_supported"]

Call = Callable[[], object]
CPU = torch.device("cpu")
RUN = (Role.DATA, Role.SEQUENCE, Role.EXPERT, Role.TENSOR, Role.PIPELINE)
"""Roles of axes."""


class Handlers:
    """The handlers of one engine.

    Args:
        model: whose units they work on.
        optimizer: that updates these; None: nothing is trained.
        clip: of gradients; None: they are not clipped.
        scale: 1 / (ranks * micro-batches).
        loss_scale: of the loss; None: it is not scaled.
        shares: weights of the micro-batches.
        stash: versions of weights that micro-batches under way have read; None: there are none.

    Attributes:
        detours: names of units gathered on demand (no operation of the program frees them), or that were still in use
            where the program frees them: freed at the end of the pass or of their forward.
        repeated: names of units that a pass gathers more than once: what their forward wrote into them is in their
            shards before the pass is over.
        backward_follows: whether the forward under way is one of training.
        goes_on: whether a forward without gradients is followed by another, whose first units are read meanwhile into
            memory that waits for them.
        norms: of the gradients.
        cursor: the second one.
        rounds: what outer steps change, or signs are sent of; None: there are none.
        stash: versions of weights that micro-batches under way have read; None: there are none.
        updates: how long the host has updated.
        damage: what went wrong with updates.
        used: by unit, which parameters any rank used in this step, as soon as ranks have agreed.
        shares: weights of the micro-batches.
        scale: 1 / (ranks * micro-batches), which gradients are multiplied by as they arrive.
        lifted: the loss scale that gradients have until they are unscaled.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: ShardedOptimizer | None,
        clip: Clip | None,
        scale: float,
        loss_scale: Scaler | None,
        shares: Shares,
        stash: Stash | None,
    ) -> None:
        comm, layout = model.comm, model.layout
        self.comm, self.layout, self.tiers = comm, layout, model.tiers
        self.units = {unit.name: unit for unit in model.units}
        self.optimizer = optimizer
        if optimizer is not None:
            optimizer.connect(MasterRanks(layout.master.over, comm), comm.mesh.sizes.of_role(Role.TENSOR))
        exact = layout.reduce.ordered
        self.norms = Norms(clip, comm, self.trainable, looks=loss_scale is not None, exact=exact)
        self.stash = stash
        self.used: dict[str, list[list[bool]]] = {}
        self.cursor = Cursor(comm.memory.device)
        self.updates = Waits()
        in_memory = all(cell.tier is not Tier.DISK for cell in layout.cells().values())
        later = in_memory and comm.group is comm.agreement and comm.agreement.peers.size > 1
        self.damage = StepFailure(together=layout.moments.tier is not Tier.DEVICE, later=later)
        self.detours: set[str] = set()
        self.repeated: set[str] = set()
        self.backward_follows, self.goes_on = True, False
        self.scale, self.loss_scale, self.shares = scale, loss_scale, shares
        self.lifted = 1.0
        self.set_factors()
        outer = layout.outer
        weights = GlobalWeights(outer, model) if outer is not None else None
        self._logs: dict[str, list[Pending]] = {}  # by unit: what comes of another rank's gradients
        self.rounds = weights or sign_exchange(model, self.norms.coefficient, lambda: self.used)

    @property
    def host(self) -> HostTier:
        """Memory for what comes from files; made when it is first needed."""
        return self.tiers.host

    def renew(self, units: Sequence[Unit]) -> None:
        """These are the units from now on."""
        self.units = {unit.name: unit for unit in units}
        self.detours.clear()
        self.set_factors()

    def trainable(self) -> Iterator[Segment]:
        """The segments that are updated."""
        return (segment for unit in self.units.values() for segment in unit.trainable)

    def gather_again(self, names: set[str]) -> None:
        """These are :attr:`repeated` from now on."""
        self.repeated = names

    def expect_backward(self, follows: bool) -> None:
        """A forward begins; see :attr:`backward_follows`."""
        self.backward_follows = follows

    def take_used(self, used: dict[str, list[list[bool]]]) -> None:
        """Ranks have agreed; see :attr:`used`."""
        self.used = used

    def set_scale(self, scale: float) -> None:
        """Gradients are multiplied by this one from now on as they arrive."""
        self.scale = scale
        self.set_factors()

    def set_factors(self, share: float = 1.0) -> None:
        """[Note: where gradients are unscaled] As they arrive they are cast to what they travel in and multiplied by
        1 / (ranks * micro-batches * loss scale): everything that reads them later sees true values. Only where they
        travel or accumulate in fp16, which could not hold those, do they stay scaled until the update. ``share``
        multiplies those that have arrived."""
        self.norms.forget_part()
        self.lifted = scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        for segment in self.trainable():
            late = torch.float16 in (segment.dtypes["reduce"], segment.dtypes["grads"])
            factor = self.scale if late else self.scale / scale
            segment.set_factors(factor, unscale=share / scale if late else share)

    def bind(self, op: Op) -> Call | None:
        """What the operation does; None for a marker.

        Raises:
            ValueError: there is no handler for it.
        """
        if op.verb in MARKERS:
            return None
        if op.verb not in HANDLERS:
            raise ValueError(f"the program has {op.verb!r}, which no handler does.")
        return HANDLERS[op.verb](self, op)

    def bind_behind(self, op: Op) -> Call | None:
        """The same of an operation behind the step, on the second cursor: what it moves is apart until it arrives."""
        moves = op.verb in ("FETCH", "STORE")
        return self.bind_move(op, self.comm.meter.behind) if moves else self.bind(op)

    # -- parameters

    def finish_gather(self, unit: Unit) -> None:
        unit.end_gather(self.comm.agreement.wait)

    def cast(self, unit: Unit) -> None:
        if unit.pins or unit.life is not Life.RESTING:
            return
        unit.begin_gather()
        with self.comm.memory.side(), torch.no_grad():
            for segment in unit.segments:
                segment.fill_own_range("master")

    def bind_fill(self, op: Op) -> Call:
        unit = self.units[op.unit]
        num_bytes = self._moved_bytes(op)
        if op.target == "flat":
            fill = partial(self.fill, unit, op, num_bytes)
            rest = unit.spec.table_or(self.layout).rest
            return partial(self._tell, op, fill) if rest.tier is Tier.DISK else fill
        return partial(self.damage.attempt, op, partial(self.fill_updated, unit, op, num_bytes))

    def _moved_bytes(self, op: Op) -> int:
        return int(fetched_bytes(op, self.layout, self.units[op.unit].spec, self.comm.mesh.sizes))

    def bind_read(self, op: Op) -> Call:
        return partial(self.read, self.units[op.unit], op, self._moved_bytes(op))

    def read(self, unit: Unit, op: Op, num_bytes: int) -> None:
        """This rank's shard begins to come from a file, to be filled in."""
        if unit.pins or unit.life is not Life.RESTING:
            return
        self.comm.meter.move(op, num_bytes)
        for segment in unit.segments:
            segment.fetch(op.source, self.host.empty)

    def read_ahead(self, ops: Iterable[Op]) -> None:
        """What these read from files begins to come before their pass; it is counted there."""
        for op in ops:
            unit = self.units[op.unit]
            if not unit.pins and unit.life is Life.RESTING:
                for segment in unit.segments:
                    segment.fetch(op.source, self.host.empty)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, a forward without gradients is followed by another; see :attr:`goes_on`."""
        self.goes_on = True
        try:
            yield
        finally:
            self.goes_on = False
            for segment in (segment for unit in self.units.values() for segment in unit.segments):
                segment.forget_fetched()
            if self.layout.rest.tier is Tier.DISK:
                self.host.forget_spares()

    def _tell(self, op: Op, do: Call) -> None:
        """Where a file cannot be read, ranks that wait for what is filled from it hear so."""
        with self.comm.agreement.told(str(op)):
            do()

    def fill(self, unit: Unit, op: Op, num_bytes: int) -> None:
        """This rank's shard comes into its place of the flats, from a slower tier."""
        if unit.pins or unit.life is not Life.RESTING:
            return
        unit.begin_gather()
        self.comm.meter.move(op, num_bytes)
        with self.comm.memory.side(), torch.no_grad():
            for segment in unit.segments:
                read = segment.fill_own_range(op.source)
                if read is not None and self.goes_on:
                    self.host.recycle(read)
        unit.filling.append(Pending([], self.comm.memory.mark()))  # on one rank nothing else comes that is waited for

    def fill_updated(self, unit: Unit, op: Op, num_bytes: int) -> None:
        """What an update on the host made of ``params`` comes to the device."""
        if not any(map(any, self.used[unit.name])):  # in the step whose update this was
            self.comm.meter.leave_out(op)
            return
        self.comm.meter.move(op, num_bytes)
        for segment in unit.trainable:
            if (updated := segment.pop_updated()) is not None:
                assert segment.compute_range is not None
                segment.compute_range.copy_(updated, non_blocking=True)

    def bind_gather(self, op: Op) -> Call:
        unit = self.units[op.unit]
        each = op.each(len(op.moves(unit.spec)))
        if op.target == "params":
            return partial(self.gather_updated, unit, each)
        if op.source == "node":
            return partial(self.gather_within, unit, each)
        return partial(self.gather, unit, op.source, each)

    def gather(self, unit: Unit, source: str, ops: Sequence[Op]) -> None:
        """Fills the flats of a unit; ``ops``: for each of its segments."""
        if unit.pins:
            return
        again = unit.life is Life.GATHERED
        if again:  # other ranks need it, and the computation may still read what is filled here once more
            self.comm.memory.after_compute()
        if unit.life is Life.RESTING:
            unit.begin_gather()
            with self.comm.memory.side(), torch.no_grad():
                for segment in unit.segments:
                    segment.fill_own_range(source)
        for segment, op in zip(unit.segments, ops, strict=True):
            with self.comm.memory.side():  # as what is filled
                codes = segment.take_codes(source)
            if op.target == "node":
                segment.hold_payload(self.comm.relay(op, segment.flat, None, pending=unit.filling, codes=codes))
                continue
            resident = None if unit.name in self.repeated or codes is not None else segment.own_copy(source)
            self.comm.collective(op, segment.flat, pending=unit.filling, resident=resident, codes=codes)
        if again:
            drain(unit.filling, self.comm.agreement.wait)

    def decode(self, unit: Unit, source: str) -> None:
        """Fills the flats of a unit that rest as codes, all of them here, when it is waited for."""
        if unit.pins or unit.life is Life.GATHERED:
            return
        if unit.life is Life.RESTING:
            unit.begin_gather()
            unit.filling.append(Pending([], self.comm.memory.mark()))  # where the flats have their memory from
        for segment in unit.segments:
            with self.comm.memory.side():  # beside which codes come
                codes = segment.take_codes(source)
            if codes is not None:
                unit.filling.append(Pending([], partial(self._decode, segment, codes)))

    def _decode(self, segment: Segment, codes: torch.Tensor) -> None:
        with torch.no_grad():
            segment.decode(codes)

    def gather_within(self, unit: Unit, ops: Sequence[Op]) -> None:
        """The second of two hops: fills the flats of a unit with what has come from other nodes, and this one."""
        if unit.pins:
            return
        drain(unit.filling, self.comm.agreement.wait)
        for segment, op in zip(unit.segments, ops, strict=True):
            self.comm.relay(op, segment.flat, segment.take_payload(), pending=unit.filling)
        if unit.life is Life.GATHERED:
            drain(unit.filling, self.comm.agreement.wait)

    def hold(self, unit: Unit) -> None:
        if not self.backward_follows:
            return
        if unit.life is Life.GATHERING:
            self.finish_gather(unit)
        with torch.no_grad():
            for segment in unit.segments:
                if segment.held is not None and segment.held_range is not None:
                    segment.held.copy_(segment.flat[segment.held_range[0] : segment.held_range[1]])

    def keep(self, unit: Unit) -> None:
        """What is gathered stays until the step."""
        if unit.life is Life.GATHERING:
            self.finish_gather(unit)
        unit.keep()

    def free(self, unit: Unit) -> None:
        if unit.kept:  # by an evaluation between micro-batches
            return
        if unit.life is Life.GATHERING:
            self.finish_gather(unit)
        if unit.pins or unit.running:  # held by gathered(), or called from inside another unit: freed later
            self.detours.add(unit.name)
        elif unit.life is Life.GATHERED and unit.split:
            unit.release()

    def release_detours(self) -> None:
        """At the end of a pass: what was kept longer than the program thought is given back."""
        for name in sorted(self.detours):
            self.free(self.units[name])
        self.detours.clear()

    def bind_reduce(self, op: Op) -> Call:
        """Sends a unit's gradients: as they came on this rank, or what a reduction has scattered of them already."""
        gradients = self.units[op.unit].gradients
        sends = [partial(self.comm.collective, each) for each in op.each(len(gradients.segments))]
        if op.verb == "SPREAD":
            return partial(gradients.spread, sends)
        if op.source == "grads":
            return partial(gradients.send_scattered, sends)
        if op.verb == "REDUCE_WITHIN":
            return partial(gradients.send_within, sends, self.comm.mesh.parts(op.axes))
        if op.verb == "REDUCE_BETWEEN":
            return partial(gradients.send_between, sends, self.comm.agreement.wait)
        return partial(gradients.send, sends, scatter=op.verb == "REDUCE_SCATTER")

    def bind_log(self, op: Op) -> Call:
        """Sends what this rank updates with to the rank that holds a copy of its states."""
        unit, updater = self.units[op.unit], self.optimizer
        assert updater is not None
        ops, pending = op.each(len(unit.trainable)), self._logs.setdefault(op.unit, [])
        device = self.comm.memory.device

        def send() -> None:
            drain(pending, self.comm.agreement.wait)  # of a step that went no further
            for segment, each in zip(unit.trainable, ops, strict=True):
                grads = segment.master_grads.to(device)  # sums may rest in host memory
                self.comm.collective(each, grads, pending=pending, out=updater.log_of(segment, device))

        return send

    def vote(self) -> None:
        """Behind it all ranks have come to it, with all that their updates need."""
        comm = self.comm
        if not comm.mesh.on_streams:
            comm.anyone([True], "VOTE")
            return
        axes = tuple(axis for axis, size in comm.mesh.sizes.items() if size > 1)  # the device waits, and no host
        comm.number(torch.ones((), device=comm.memory.device), axes, dist.ReduceOp.SUM, "VOTE")

    def bind_mirror(self, op: Op) -> Call:
        unit, updater, host = self.units[op.unit], self.optimizer, bool(op.tier)
        device = CPU if host else self.comm.memory.device
        assert updater is not None

        def update() -> None:
            with torch.no_grad(), self.updating() if host else nullcontext():
                updater.mirror(unit, self.used[unit.name], self.norms.coefficient(device))

        return partial(self.damage.attempt, op, update)

    def bind_share(self, op: Op) -> Call:
        segments = [segment for _, _, segment in _shared(op.among(self.units))]

        def share() -> None:
            for segment in segments:
                self.comm.sum_among(segment.master_grads, segment.spec.places, str(op))
            self.norms.forget_part()

        return share

    def _agree_on_shared(self) -> None:
        """What any stage has used of what several have, all of them have; where no gradient came they are zero."""
        for unit, number, segment in _shared(self.units.values()):
            mine = torch.tensor(unit.gradients.used[number], dtype=torch.uint8)
            self.comm.sum_among(mine, segment.spec.places, f"the agreement on {unit.name}")
            unit.gradients.used[number] = [bool(flag) for flag in mine.tolist()]

    def bind_wait(self, op: Op) -> Call:
        units, waiter = op.among(self.units), self.comm.agreement.wait
        unit = units[0]
        if op.target == "outer":
            return partial(self._rounds.arrive, units)
        if op.target == "log":
            return lambda: drain(self._logs[unit.name], waiter)
        if op.target == "grads":
            return partial(unit.gradients.arrive, waiter)
        return lambda: drain(unit.filling, waiter)

    @property
    def _rounds(self) -> GlobalWeights | SignExchange:
        assert self.rounds is not None
        return self.rounds

    def bind_outer(self, op: Op) -> Call:
        """Sends what outer steps have made of a unit, or signs of several."""
        send = self._rounds.push if op.verb == "PUSH" else self._rounds.pull
        return partial(send, op.among(self.units), op)

    def bind_stash(self, op: Op) -> Call:
        unit = self.units[op.unit]

        def keep() -> None:
            if self.stash is not None:
                self.stash.keep(unit)

        return keep

    def bind_update(self, op: Op) -> Call:
        return partial(self.damage.attempt, op, partial(self._update, self.units[op.unit]))

    def _update(self, unit: Unit) -> None:
        assert self.optimizer is not None
        host = unit.spec.table_or(self.layout).updates_on is Tier.HOST
        device = CPU if host else self.comm.memory.device
        try:
            for segment in unit.trainable:
                segment.bring("master")
                if (grads := segment.bring("grads")) is not None:
                    self.norms.clip_fetched(segment, grads)
            with torch.no_grad(), self.updating() if host else nullcontext():
                self.optimizer.update(unit, self.used[unit.name], self.norms.coefficient(device))
        except BaseException:
            for segment in unit.trainable:
                segment.forget_fetched()
            raise
        for segment in unit.trainable:
            if (grads := segment.here.pop("grads", None)) is not None:
                self.host.recycle(grads)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The host updates: seconds, without those in which it waits for values."""
        before = self._waited()
        with self.updates.timed():
            yield
        self.updates.leave_out(self._waited() - before)

    def _waited(self) -> float:
        return self.tiers.waited("host") + self.tiers.waited("disk")

    @property
    def tier_seconds(self) -> TierSeconds:
        """What slower tiers have taken so far."""
        return TierSeconds(self.tiers.waited("host"), self.tiers.waited("disk"), self.updates.seconds)

    def bind_speculate(self, op: Op) -> Call:
        """Begins to update a unit before its step; not where the weights of micro-batches, which are added up in the
        step, will multiply its gradients."""
        assert self.optimizer is not None
        unit, shares = self.units[op.unit], self.shares
        begin = partial(self.optimizer.speculate, unit, str(op))
        return lambda: None if shares.any else begin()

    def withdraw(self, units: Iterable[Unit] | None = None) -> None:
        """Updates before their step are undone (see :meth:`ShardedOptimizer.withdraw`)."""
        if self.optimizer is not None:
            self.optimizer.withdraw(units)

    def bind_move(self, op: Op, meter: Meter | TierTraffic | None = None) -> Call:
        """Brings a unit's state to where it is updated, or to where it rests; nothing moves of a unit that no rank
        used. ``meter``: counts it, in place of that of the step under way."""
        meter = meter or self.comm.meter
        unit, optimizer = self.units[op.unit], self.optimizer
        num_bytes = partial(self._moved_bytes, op)
        rests = unit.spec.table_or(self.layout).grads.tier
        if op.source == "grads" and op.verb == "STORE" and rests is not Tier.DEVICE:
            return partial(self.damage.attempt_early, op, partial(self._store_sums, unit, op, num_bytes()))
        assert optimizer is not None
        if op.source == "copies":
            move = partial(optimizer.fetch_copies if op.verb == "FETCH" else optimizer.store_copies, unit)
            num_bytes = partial(optimizer.copied_bytes, unit)
        elif op.source == "log":
            move = partial(optimizer.store_log, unit)
        elif op.source == "moments":
            move = partial(optimizer.fetch if op.verb == "FETCH" else optimizer.store, unit)
            num_bytes = partial(optimizer.moved_bytes, unit)  # a class may come to have more of them
        elif op.verb == "FETCH":
            move = partial(self._fetch, unit, op.source)
        elif op.source == "grads":
            move = partial(self._send_grads, unit, op.tier)
        else:
            move = partial(self._store, unit, op.source)

        def call() -> None:
            if any(map(any, self.used[unit.name])):
                meter.move(op, num_bytes())
                move()
            else:
                meter.leave_out(op)

        return partial(self.damage.attempt, op, call)

    def _fetch(self, unit: Unit, state: str) -> None:
        for segment in unit.trainable:
            segment.fetch(state, self.host.empty)

    def _store(self, unit: Unit, state: str) -> None:
        """What was updated of a state goes to its file.

        Raises:
            OSError: what was stored earlier is not there; all of this unit's is taken (see ``Region.store``).
        """
        problem: OSError | None = None
        for segment in unit.trainable:
            if segment.updated is not None if state == "params" else state in segment.here:
                region, values = segment.leave(state)
                try:
                    region.store(values)
                except OSError as error:
                    problem = problem or error
                self.host.recycle(values)
        if problem is not None:
            raise problem

    def _send_grads(self, unit: Unit, tier: str) -> None:
        """The gradients of a step go to their update; the own step of an optimizer has taken them along."""
        assert self.optimizer is not None
        for segment in unit.trainable if self.optimizer.fused else ():
            segment.send_grads(self.tiers.named(tier).allocate((segment.shard_numel,), segment.dtypes["grads"]))

    def _store_sums(self, unit: Unit, op: Op, num_bytes: int) -> None:
        """The sums of a backward go to a slower tier to rest there."""
        self.comm.meter.move(op, num_bytes)
        with torch.no_grad():
            unit.gradients.store(self.norms.note)

    def bind_add(self, op: Op) -> Call:
        unit, num_bytes = self.units[op.unit], self._moved_bytes(op)

        def add() -> None:
            if unit.gradients.sums is not Sums.OWN:
                self.comm.meter.move(op, num_bytes)
                self._fetch(unit, "grads")

        return add

    def gather_updated(self, unit: Unit, ops: Sequence[Op]) -> None:
        """Fills what of ``params`` rests on this rank with what other ranks have updated."""
        self.comm.memory.after_compute()  # which has updated this rank's part
        for segment, op in zip(unit.trainable, ops, strict=True):
            assert segment.rest is not None
            self.comm.collective(op, segment.rest, pending=unit.filling)

    # -- agreement

    def agree_on_use(self, *flags: bool) -> tuple[dict[str, list[list[bool]]], list[Unit], list[bool]]:
        """Which parameters any rank used in this step, which units have late gradients on any rank, which of the
        ``flags`` any set, and behind them whether any unit of any stage has late gradients."""
        self._agree_on_shared()
        what = "the agreement on used parameters"
        used, late, said = self.heard(self.comm.any_rank(self.told(*flags), what))
        return used, late, said if self.comm.group is self.comm.agreement else self.comm.anyone(said, what)

    def told(self, *flags: bool) -> list[bool]:
        """What of :meth:`agree_on_use` this rank says."""
        units = self.units.values()
        used = [flag for unit in units for row in unit.gradients.used for flag in row]
        return [*used, *(unit.gradients.unsent for unit in units), *flags]

    def heard(self, said: Iterable[bool | int]) -> tuple[dict[str, list[list[bool]]], list[Unit], list[bool]]:
        """The same of what any rank said."""
        units, bit = list(self.units.values()), map(bool, said)
        used = {u.name: [list(itertools.islice(bit, len(row))) for row in u.gradients.used] for u in units}
        late = [unit for unit in units if next(bit)]
        return used, late, [*bit, bool(late)]


def _shared(units: Iterable[Unit]) -> list[tuple[Unit, int, Segment]]:
    """What several stages have of these units and is trained, each with its number in its unit, in the order in which
    all of these stages have it."""
    found = [(unit, i, s) for unit in units for i, s in enumerate(unit.trainable) if s.spec.places]
    return sorted(found, key=lambda entry: shared_number(entry[2].parameters[0]))


HANDLERS: Mapping[str, Callable[[Handlers, Op], Call]] = {
    "CAST": lambda do, op: partial(do.cast, do.units[op.unit]),
    "ALL_GATHER": Handlers.bind_gather,
    "DECODE": lambda do, op: partial(do.decode, do.units[op.unit], op.source),
    "FILL": Handlers.bind_fill,
    "HOLD": lambda do, op: partial(do.hold, do.units[op.unit]),
    "FREE": lambda do, op: partial(do.free, do.units[op.unit]),
    "KEEP": lambda do, op: partial(do.keep, do.units[op.unit]),
    "RELEASE": lambda do, op: do.units[op.unit].let_go,
    "GRADS": lambda do, op: do.units[op.unit].gradients.make,
    "REDUCE_SCATTER": Handlers.bind_reduce,
    "REDUCE_WITHIN": Handlers.bind_reduce,
    "REDUCE_BETWEEN": Handlers.bind_reduce,
    "ALL_REDUCE": Handlers.bind_reduce,
    "SPREAD": Handlers.bind_reduce,
    "WAIT": Handlers.bind_wait,
    "DROP": lambda do, op: do.units[op.unit].gradients.give_back,
    "SHARE": Handlers.bind_share,
    "CLAMP": lambda do, op: do.norms.clip_values,
    "NORM": lambda do, op: do.norms.take,
    "READ": Handlers.bind_read,
    "FETCH": Handlers.bind_move,
    "ADD": Handlers.bind_add,
    "STASH": Handlers.bind_stash,
    "LOG": Handlers.bind_log,
    "VOTE": lambda do, op: do.vote,
    "MIRROR": Handlers.bind_mirror,
    "UPDATE": Handlers.bind_update,
    "STORE": Handlers.bind_move,
    "JOIN": lambda do, op: partial(do.cursor.join, op.unit),
    "SPECULATE": Handlers.bind_speculate,
    "DIFF": lambda do, op: partial(do._rounds.diff, do.units[op.unit]),
    "PUSH": Handlers.bind_outer,
    "OUTER": lambda do, op: partial(do._rounds.step, do.units[op.unit]),
    "PULL": Handlers.bind_outer,
    "MIX": lambda do, op: partial(do._rounds.mix, do.units[op.unit]),
    "BLEND": lambda do, op: partial(do._rounds.diff, do.units[op.unit]),
    "SERVE": lambda do, op: partial(do._rounds.step, do.units[op.unit]),
    "GIVE": lambda do, op: partial(do._rounds.mix, do.units[op.unit]),
}
"""What binds an operation, by verb; all that are no markers."""


def check_supported(layout: Layout, mesh: Mesh) -> None:
    """Refuses bound tables and axes that can be planned with but that this version does not run.

    Raises:
        ConfigError: with one sentence.
    """
    for axis in mesh.axes:
        if axis.size > 1 and axis.role not in RUN:
            raise ConfigError(
                f"parallel= has {axis.size} ranks on {axis.name!r}, an axis of role {axis.role}, which this version's "
                f"engine does not run; use axes of {', '.join(map(str, RUN))}."
            )
    for name, cell in layout.cells().items():
        known = (*DATA_AXES, *mesh.of_role(Role.EXPERT))
        if len(cell.over) > 1 and cell.over != tuple(axis for axis in known if axis in cell.over):
            raise ConfigError(
                f"{name} is split over {'+'.join(cell.over)}; this version splits over {'+'.join(DATA_AXES)} in that "
                "order only."
            )
    if layout.outer is not None and mesh.stages:
        raise ConfigError(
            "an Outer in the layout on a mesh with an axis of pipeline: this version takes outer steps without one; "
            "leave one of the two out."
        )
    if layout.moments.dtype != layout.master.dtype:
        raise ConfigError(
            f"moments are {layout.moments.dtype} but master is {layout.master.dtype}: "
            "this version updates both in one dtype; make them equal."
        )
