"""Whole values for a while: ``engine.gathered``, for parameters, gradients, master and the optimizer's state.

Parameters are lent as they are: their units are made full and stay so, and programs neither gather nor free them
meanwhile. Everything else is lent as new whole tensors. Either way many tensors come by one collective (see
``comm.coalesced``). What comes back is one rank's, if the user asked to write; a control message first tells every
rank whether all ranks left the block well and who changed what, so that a misuse on one rank raises on all and writes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from logging import getLogger
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.comm.coalesced import complete, spread
from shardfold.errors import (
    CollectiveError,
    ConfigError,
    ModelError,
    OrderError,
    ShardfoldError,
    UsageError,
    did_you_mean,
)
from shardfold.plan.format import dtype_name
from shardfold.plan.layout import Tier
from shardfold.sharding.autograd import outside_inference
from shardfold.sharding.model import Loan, ShardedModel
from shardfold.sharding.segment import TORCH_DTYPES, Segment
from shardfold.sharding.together import on_disk, together
from shardfold.sharding.unit import Life, Unit
from shardfold.sharding.whole_segments import SegmentSlice, gather_slices

__all__ = ["gathered", "listed"]

LOG = getLogger("shardfold")


class Home(NamedTuple):
    """Where a parameter lies; ``name`` is the first that was asked for, of a tied one."""

    name: str
    parameter: nn.Parameter
    unit: Unit
    segment: Segment
    slot: int


class Lent:
    """What is behind one ``with`` block; copies of a state have nothing to keep, restore or close."""

    values: dict[str, Any]  # by every name asked for
    watched: dict[str, Tensor]  # by one name each: what must not change, or, when writing, only on the source
    dropped: bool  # whether a change that is not written back is gone after the block

    def write(self, changed: set[str], source: int) -> None:
        """The values of rank ``source`` are everyone's; ``changed``: those that it is known to have changed."""
        raise NotImplementedError

    def keep(self, changed: Sequence[str]) -> None:
        """What was changed and is not gone after the block becomes the value in every state that mirrors it."""

    def restore(self) -> None:
        """As if nothing had been changed."""

    def close(self) -> None:
        """The block is over."""


@contextmanager
def gathered(
    model: ShardedModel, names: tuple[str, ...], *, write: bool, of: str, source: int = 0, strict: bool = True
) -> Iterator[Any]:
    """See :meth:`Engine.gathered`.

    ``source`` is the rank whose values are written. Without ``strict`` a change that is not to be written is logged
    and, where parameters are split, gone after the block, and what ranks other than ``source`` change does not matter.
    """
    what = _title(names, write, of) + (f" from rank {source}" if source else "")
    if write and any(loan.what.startswith("average.") for loan in model.loans):
        raise UsageError(f"{what} inside `with average.applied():` would be lost when it ends: write outside of it.")
    homes, asked = _find(model, names, of)
    if of == "params" and model.gate.hold(list(dict.fromkeys(home.unit for home in homes))):
        if write:
            raise UsageError(f"{what} inside of a pass: change weights between steps.")
        yield asked[names[0]] if len(names) == 1 else asked
        return
    if write or of != "params" or not all(home.unit.pins for home in homes):  # else nothing is sent
        model.gate.meet(what, settle=of == "params")
    lent: Lent
    with model.comm.agreement.uninterrupted(), outside_inference():
        if of == "params":
            lent = _Parameters(model, homes, asked, what, write)
        else:
            lent = _States(model, homes, asked, what, of)
    loan = Loan(what, lent.watched, writes=write)
    model.loans.append(loan)
    try:
        try:
            yield lent.values[names[0]] if len(names) == 1 else lent.values
        except BaseException as error:
            if write:
                _leave_by_exception(model, lent, homes, error)
            raise
        if write:
            with model.comm.agreement.uninterrupted(), outside_inference():
                _write_back(model, lent, loan, homes, source, strict)
        elif (changed := loan.changed()) and not strict:
            outcome = "that is gone now" if lent.dropped else "it was kept"
            LOG.warning("%s changed inside %s, which only reads: %s.", listed(changed), what, outcome)
            lent.keep(changed)
        elif changed:
            raise UsageError(
                f"{listed(changed)} changed inside {what}, which only reads "
                f"({'the change is dropped' if lent.dropped else 'the change is on this rank only'}): "
                "pass write=True, which makes rank 0's values everyone's."
            )
    finally:
        model.loans.remove(loan)
        lent.close()
        if of == "params":
            model.gate.went_apart()


def _write_back(model: ShardedModel, lent: Lent, loan: Loan, homes: Sequence[Home], source: int, strict: bool) -> None:
    """Writes the source's values, unless some rank left by an exception or changed what it must not."""
    names, changed = [home.name for home in homes], loan.changed()
    if foreign := [name for name in changed if name not in names]:
        error = UsageError(
            f"{listed(foreign)} changed inside {loan.what}, which did not ask for it: name it too; nothing was written."
        )
        _leave_by_exception(model, lent, homes, error)
        raise error
    failed, first, other = _agree(model, homes, changed, source, failed=False)
    stray = [name for name in names if strict and name in other and name not in first]
    if failed or stray:
        lent.restore()
    if failed:
        raise UsageError(
            f"{loan.what}: rank {', '.join(map(str, failed))} left the block with an exception, so nothing was written."
        )
    if stray:
        raise UsageError(
            f"{loan.what}: {listed(stray)} changed on another rank than {source} only, so nothing was written: "
            f"change values on rank {source} (or on all ranks), whose values become everyone's."
        )
    lent.write(first, source)


def _leave_by_exception(model: ShardedModel, lent: Lent, homes: Sequence[Home], error: BaseException) -> None:
    """Nothing is written, and the other ranks, which wait at the end of the block, are told; raises nothing."""
    try:
        lent.restore()
    except RuntimeError as failure:  # of a device that is broken, which is likely what the user's error tells of too
        LOG.error("%s: values could not be put back: %s", model.loans[-1].what, failure)
    if isinstance(error, Exception) and not isinstance(error, (OrderError, CollectiveError)):
        # The others may be gone, or be elsewhere: then they raise that, and what the user's code raised is seen here.
        with suppress(ShardfoldError, RuntimeError):
            _agree(model, homes, [], 0, failed=True)


def _agree(
    model: ShardedModel, homes: Sequence[Home], changed: Sequence[str], source: int, *, failed: bool
) -> tuple[list[int], set[str], set[str]]:
    """Ranks that left by an exception, and what was changed on the source and on any other rank."""
    world, mine = model.world_size, set(changed)
    flags = [0.0] * world
    flags[model.rank] = float(failed)
    for first in (True, False):
        flags += [float(home.name in mine and (model.comm.mesh.data_rank == source) is first) for home in homes]
    model.gate.meet("the end of engine.gathered()")
    said = model.comm.control(flags[:world], dist.ReduceOp.MAX)
    said += model.comm.control(flags[world:], dist.ReduceOp.MAX, program=True)
    first, other = said[world : world + len(homes)], said[world + len(homes) :]
    return (
        [rank for rank in range(world) if said[rank]],
        {home.name for home, flag in zip(homes, first, strict=True) if flag},
        {home.name for home, flag in zip(homes, other, strict=True) if flag},
    )


# -- who ----------------------------------------------------------------------------------------------------------


def _find(model: ShardedModel, names: tuple[str, ...], of: str) -> tuple[list[Home], dict[str, nn.Parameter]]:
    """Each wanted parameter once, in the order of units, and the parameters by every name asked for."""
    known = dict(model.module.named_parameters(remove_duplicate=False))
    for name in names:
        if model.whole is not None and name in model.whole.names and name not in known:
            raise ModelError(f"gathered: another stage of the pipeline has {name!r}: ask on the ranks that have it.")
        if not isinstance(name, str) or name not in known:
            raise ModelError(f"gathered: the model has no parameter {name!r}.{did_you_mean(name, known)}")
    asked = {name: known[name] for name in names} if names else known
    first: dict[int, str] = {}
    for name, parameter in asked.items():
        first.setdefault(id(parameter), name)
    homes = [
        Home(first[id(parameter)], parameter, unit, segment, slot)
        for unit in model.units
        for segment in unit.segments
        for slot, parameter in enumerate(segment.parameters)
        if id(parameter) in first
    ]
    if of == "params":
        return homes, asked
    if model.optimizer is None:
        raise UsageError(f"gathered(of={of!r}) needs an optimizer: pass optimizer= to the Engine.")
    frozen = [home.name for home in homes if not home.segment.spec.trainable]
    if names and frozen:
        raise UsageError(
            f"gathered(of={of!r}): {listed(frozen)} {'is' if len(frozen) == 1 else 'are'} frozen with no gradient, "
            "master copy or optimizer state: ask for trainable parameters only."
        )
    homes = [home for home in homes if home.segment.spec.trainable]
    trainable = {id(home.parameter) for home in homes}
    return homes, {name: parameter for name, parameter in asked.items() if id(parameter) in trainable}


def _title(names: Sequence[str], write: bool, of: str) -> str:
    words = [repr(name) for name in names[:3]] + (["..."] if len(names) > 3 else [])
    words += ([f"of={of!r}"] if of != "params" else []) + (["write=True"] if write else [])
    return f"engine.gathered({', '.join(words)})"


def listed(names: Sequence[str]) -> str:
    """Names in a message, three at most."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


# -- parameters ---------------------------------------------------------------------------------------------------


class _Parameters(Lent):
    """Lends the parameters themselves; the units that own them are full meanwhile."""

    def __init__(
        self, model: ShardedModel, homes: Sequence[Home], asked: Mapping[str, nn.Parameter], what: str, write: bool
    ) -> None:
        self._model, self._homes, self._what = model, homes, what
        self.values: dict[str, Any] = dict(asked)
        self._units = list(dict.fromkeys(home.unit for home in homes))
        stays = {id(unit) for unit in self._units if not unit.split or unit.life is not Life.RESTING}
        self.dropped = not stays
        _pin(model, self._units, what)
        named = {id(home.parameter): home.name for home in homes}
        self.watched: dict[str, Tensor] = {
            named.get(id(parameter), name): parameter for unit in self._units for name, parameter in unit.parameters()
        }
        # What a failed write must be taken back from: memory that is not given back at the end of the block.
        self._before: list[tuple[Tensor, Tensor]] = []
        if write:
            flats = [segment.flat for unit in self._units if id(unit) in stays for segment in unit.segments]
            self._before = [(flat, flat.clone()) for flat in flats]

    def write(self, changed: set[str], source: int) -> None:
        views = [home.segment.views_of(home.segment.flat)[home.slot] for home in self._homes]
        spread(self._model.comm, views, self._what, source)

        def take() -> None:
            for home, view in zip(self._homes, views, strict=True):
                home.segment.take(home.slot, view, exact=home.name in changed)

        with torch.no_grad():
            together(self._model.comm, self._what, take, files=on_disk(self._model.layout))
        _mark_written(self._model, [home.parameter for home in self._homes])

    def keep(self, changed: Sequence[str]) -> None:
        with torch.no_grad():
            for unit in self._units:
                for segment in unit.segments if not unit.split else ():
                    for slot, parameter in enumerate(segment.parameters):
                        if any(self.watched[name] is parameter for name in changed):
                            segment.take(slot, parameter)

    def restore(self) -> None:
        with torch.no_grad():
            for flat, before in self._before:
                flat.copy_(before)

    def close(self) -> None:
        for unit in self._units:
            unit.unpin()


def _pin(model: ShardedModel, units: Sequence[Unit], what: str) -> None:
    """Makes units full until they are unpinned, by one collective if they are small enough."""
    resting: list[Unit] = []
    for unit in units:
        if unit.life is Life.GATHERING:
            unit.end_gather(model.comm.agreement.wait)
        elif unit.life is Life.RESTING:
            resting.append(unit)
    for unit in resting:
        unit.begin_gather()
    split = [segment for unit in resting for segment in unit.segments if segment.split]

    def fill() -> None:
        for unit in resting:
            for segment in unit.segments:
                segment.fill_own_values()

    try:
        with torch.no_grad():
            together(model.comm, what, fill, files=any(s.table.rest.tier is Tier.DISK for s in split))
        for over in dict.fromkeys(segment.table.rest.over for segment in split):
            complete(model.comm, [s.flat for s in split if s.table.rest.over == over], over, what)
    except BaseException:
        for unit in resting:
            unit.end_gather(model.comm.agreement.wait)
            unit.release()
        raise
    for unit in resting:
        unit.end_gather(model.comm.agreement.wait)
    gathered_now = set(resting)
    for unit in units:
        unit.pin(gathered=unit in gathered_now)


def _mark_written(model: ShardedModel, parameters: Sequence[nn.Parameter]) -> None:
    """A backward whose forward came before must raise; blocks around this one must not take it for a change."""
    torch.autograd.graph.increment_version(list(parameters))
    for loan in model.loans:
        loan.overlook(set(map(id, parameters)))


# -- gradients, master, moments -------------------------------------------------------------------------------------


class _States(Lent):
    """Lends whole copies of one state of parameters; None where there is nothing."""

    dropped = True

    def __init__(
        self, model: ShardedModel, homes: Sequence[Home], asked: Mapping[str, nn.Parameter], what: str, of: str
    ) -> None:
        self._model, self._what, self._of = model, what, of
        if of == "grads":
            there, dtype = _used(model, homes), TORCH_DTYPES[model.layout.grads.dtype]
        elif of == "master":
            there, dtype = [True] * len(homes), TORCH_DTYPES[model.layout.master.dtype]
        else:
            there, dtype = _has_state(model, homes, of)
        self._homes = [home for home, is_there in zip(homes, there, strict=True) if is_there]
        files = model.layout.cells().get(of, model.layout.moments).tier is Tier.DISK
        shards = together(model.comm, what, partial(self._shards, dtype), files=files)
        slices = [SegmentSlice(home.segment, home.slot, shards[id(home.segment)]) for home in self._homes]
        with torch.no_grad():
            whole = gather_slices(model.comm, slices, what)
        by_id = {id(home.parameter): value for home, value in zip(self._homes, whole, strict=True)}
        self.values: dict[str, Any] = {name: by_id.get(id(parameter)) for name, parameter in asked.items()}
        self.watched = {home.name: value for home, value in zip(self._homes, whole, strict=True)}

    def _shards(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """This rank's part of the state, by segment.

        Raises:
            OSError: it could not be read from its file.
        """
        segments = {id(home.segment): home.segment for home in self._homes}
        return {name: self._shard(segment, dtype) for name, segment in segments.items()}

    def _shard(self, segment: Segment, dtype: torch.dtype) -> Tensor:
        if self._of == "grads":
            shard = segment.shard("grads")
            assert shard is not None
            grads = segment.master_grads if shard.memory is not None else shard.read()
            return grads if segment.unscale == 1.0 else grads.float() * segment.unscale
        if self._of == "master":
            master = segment.shard("master")
            assert master is not None
            return master.read().detach()
        assert self._model.updater is not None
        apart = segment.spec.own or len(self._model.rules.precisions) > 1
        own = segment.dtypes["master"] if apart and segment.spec.trainable else dtype
        return self._model.updater.state_shard(segment, self._of, own)

    def write(self, changed: set[str], source: int) -> None:
        spread(self._model.comm, list(self.watched.values()), self._what, source)

        def take() -> None:
            for home in self._homes:
                self._take(home, self.watched[home.name].view(-1), home.name in changed)

        with torch.no_grad():
            together(self._model.comm, self._what, take, files=on_disk(self._model.layout))
        if self._of == "master":
            _mark_written(self._model, [home.parameter for home in self._homes])

    def _take(self, home: Home, values: Tensor, changed: bool) -> None:
        if self._of == "master":
            home.segment.take(home.slot, values)
        elif self._of == "grads":
            if home.segment.under_way is not None:
                home.segment.under_way.settle()
            piece, part = home.segment.own_piece(home.slot)
            shard = home.segment.shard("grads")
            assert shard is not None
            shard.part(piece).write(values[part] / home.segment.unscale)
            home.segment.drop_noted()
        else:
            assert self._model.updater is not None
            self._model.updater.take_state(home.segment, home.slot, self._of, values, changed=changed)


def _used(model: ShardedModel, homes: Sequence[Home]) -> list[bool]:
    """Which parameters any rank used since the last step; gradients that came late are reduced first.

    Raises:
        UsageError: there are no gradients, or not all of them are reduced.
    """
    if not model.run.gradients_ready:
        raise UsageError(
            "gathered(of='grads'): gradients are summed over ranks in the last backward before engine.step(), which "
            "has not come yet (accumulate=, no_sync(), or no backward since the last step): ask right before step()."
        )
    used = model.gate.sum_late()
    numbers = {id(segment): i for unit in model.units for i, segment in enumerate(unit.trainable)}
    return [used[home.unit.name][numbers[id(home.segment)]][home.slot] for home in homes]


def _has_state(model: ShardedModel, homes: Sequence[Home], of: str) -> tuple[list[bool], torch.dtype]:
    """Which parameters have that state on any rank, and its dtype; a control message.

    Raises:
        ConfigError: no rank knows a state of that name.
    """
    update = model.updater
    assert update is not None
    known, dtypes = update.state_dtypes(), list(TORCH_DTYPES)
    code = 0.0
    name = str(of)
    if name in known:
        code = 1.0 + dtypes.index(dtype_name(known[name]) or "fp32")
    mine = [float(update.has_state(home.segment, home.slot, name)) for home in homes]
    said = model.comm.control([code, *mine], dist.ReduceOp.MAX, program=True)
    if not said[0]:
        near = did_you_mean(of, {"params", "grads", "master", *known})
        more = "" if known else " The optimizer has no state of its own yet."
        raise ConfigError(f"gathered(of={of!r}): there is no such state.{near}{more}")
    return [bool(flag) for flag in said[1:]], TORCH_DTYPES[dtypes[int(said[0]) - 1]]
