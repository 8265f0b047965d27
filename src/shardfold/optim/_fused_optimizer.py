"""AdamW, Adam and SGD on shards: their state is kept in shards of the master range, and the fused pass updates them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from shardfold.optim.compiled import compiled_adam
from shardfold.optim.copied_shard import CopiedShard
from shardfold.optim.fused import FusedShard, options_of, terms_of
from shardfold.optim.requirements import check_compiled
from shardfold.optim.sharded import ShardedOptimizer, factor_of
from shardfold.optim.speculation import Speculation
from shardfold.optim.threads import UpdateThreads
from shardfold.plan.layout import Tier
from shardfold.plan.report import MemoryRow
from shardfold.sharding.model import HeldCopy, PerElement
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.unit import Unit
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers

__all__ = ["FusedOptimizer"]


class _DelayedUpdate(NamedTuple):
    """What an update behind its step is made with: options of its group, which parameters some rank used, what
    gradients are multiplied by, and memory of the host for the compute-dtype copy, ``(n,)``."""

    options: Mapping[str, Any]
    used: Sequence[bool]
    factor: Tensor | None
    aside: Tensor | None


class FusedOptimizer(ShardedOptimizer):
    """See :func:`~shardfold.optim.shard_optimizer.shard_optimizer` for arguments; ``names``: of the moments, whose
    dtype is ``dtype`` by the table; ``copies``: makes the copy of another rank's states that this one holds.

    Raises:
        ConfigError: by :meth:`add`: it cannot be compiled.
    """

    fused = True

    def __init__(
        self,
        optimizer: Optimizer,
        tiers: Tiers,
        names: tuple[str, ...],
        dtype: torch.dtype,
        block: int,
        stochastic: int | None,
        threads: int,
        *,
        compiles: bool,
        delayed: bool,
        copies: Callable[[Segment], CopiedShard],
    ) -> None:
        super().__init__(optimizer, tiers, delayed=delayed)
        self._names, self._dtype, self._block = names, dtype, block
        self._stochastic, self._threads, self._compiles = stochastic, UpdateThreads(threads), compiles
        self._fused: dict[int, FusedShard] = {}  # by segment
        self._copies, self._copied = copies, dict[int, Any]()  # by this rank's segment: the FusedShard of a CopiedShard
        self._held: dict[int, _DelayedUpdate] = {}  # by segment

    @property
    def compiled(self) -> bool:
        return any(shard.compiled for shard in self._fused.values())

    def close(self) -> None:
        super().close()
        self._threads.close()

    # -- segments come and go

    def _begin(self, segment: Segment) -> None:
        seed = self._seed(segment, segment.master_range)
        self._fused[id(segment)] = FusedShard(
            segment,
            type(self.torch_optimizer),
            self._no_moments(segment),
            stochastic=seed,
            threads=self._threads,
            empty=self._host_memory,
            compiled=self._pass_for(segment) if self._compiles else None,
        )

        if segment.table.copied:
            self._hold_copy(segment)

    def _seed(self, segment: Segment, bounds: tuple[int, int]) -> int | None:
        """Of stochastic rounding in that range."""
        if self._stochastic is None:
            return None
        return crc32(f"{self._stochastic}/{segment.spec.slots[0].name}/{bounds[0]}".encode())

    def _hold_copy(self, segment: Segment) -> None:
        copied = self._copies(segment)
        self._copied[id(segment)] = FusedShard(
            cast(Segment, copied),  # which is one to its update
            type(self.torch_optimizer),
            self._no_copied_moments(segment, copied),
            stochastic=self._seed(segment, copied.master_range),
            threads=self._threads,
            empty=self._host_memory,
        )

    def _pass_for(self, segment: Segment) -> Any:
        """The compiled pass for a segment, or None where nothing is cast."""
        check_compiled(self.torch_optimizer, self._stochastic)
        if not segment.keeps_copy:
            return None
        group = self._group(segment)
        kind = getattr(self.torch_optimizer, "same_as", type(self.torch_optimizer))
        decoupled = kind is AdamW or group.get("decoupled_weight_decay", False)
        dtypes = segment.dtypes
        own = dtypes["master"], dtypes["moments"], dtypes["grads"], segment.dtype
        return compiled_adam(decoupled, *own, segment.update_device)

    def _end(self, segment: Segment) -> None:
        if (shard := self._fused.pop(id(segment), None)) is not None:
            for moment in shard.moments.values():
                moment.drop()
        if (copy := self._copied.pop(id(segment), None)) is not None:
            for region in (*copy.moments.values(), *copy.segment.regions.values()):
                region.drop()

    def _adapt(self, names: tuple[str, ...]) -> None:
        if names != self._names:  # momentum, in a group of an SGD that had none
            self._names = names
            for key, shard in self._fused.items():
                shard.keep_in(self._no_moments(shard.segment))
                if (copy := self._copied.get(key)) is not None:
                    copy.keep_in(self._no_copied_moments(shard.segment, copy.segment))
            self.written += 1

    def _no_moments(self, segment: Segment) -> dict[str, Region]:
        tier = self._tiers.named(self._tier_of(segment), segment.table.moments.folder)
        dtype, shape = segment.dtypes["moments"], (segment.shard_numel,)
        return {name: tier.allocate(shape, dtype, zero=True, rests=True) for name in self._names}

    def _no_copied_moments(self, segment: Segment, copied: CopiedShard) -> dict[str, Region]:
        tier, dtype = self._tiers.named(*copied.rests), segment.dtypes["moments"]
        return {name: tier.allocate((copied.shard_numel,), dtype, zero=True, rests=True) for name in self._names}

    def _move(self, before: Tier, tier: Tier) -> None:
        for shard in self._fused.values():
            if shard.segment.table.moments.tier is Tier.DEVICE:
                shard.keep_in({name: self._tiers.moved(region, tier) for name, region in shard.moments.items()})

    # -- the update

    def around(self, update: Callable[[], None]) -> None:
        def step(optimizer: Optimizer) -> None:
            update()

        if self.has_pre_hooks():  # which see the pieces, and may change them
            self.withdraw()
        Optimizer.profile_hook_step(step)(self.torch_optimizer)

    def _update(self, segment: Segment, used: Sequence[bool], coefficient: Tensor | None) -> None:
        shard = self._fused[id(segment)]
        if self.delayed:
            held = self._held[id(segment)]
            shard.update(held.options, held.used, held.factor, self._block, held.aside)
        else:
            shard.update(self._group(segment), used, factor_of(segment, coefficient), self._block)

    # -- copies of other ranks' states

    def copied(self, segment: Segment) -> HeldCopy | None:
        return self._copied.get(id(segment))

    def mirror(self, unit: Unit, used: Sequence[Sequence[bool]], coefficient: Tensor | None) -> None:
        if not any(map(any, used)):  # nothing came for it, and nothing will be stored
            return
        for segment, flags in zip(unit.trainable, used, strict=True):
            if (copy := self._copied.get(id(segment))) is not None:
                copy.segment.take_back()
                copy.segment.bring()
                copy.update(self._group(segment), flags, factor_of(segment, coefficient), self._block)

    def log_of(self, segment: Segment, device: torch.device) -> Tensor:
        return self._copied[id(segment)].segment.receives(device)

    def store_log(self, unit: Unit) -> None:
        for segment in unit.trainable:
            self._copied[id(segment)].segment.store_log()

    def fetch_copies(self, unit: Unit) -> None:
        for segment in unit.trainable:
            copy = self._copied[id(segment)]
            empty = self._empty(segment)
            copy.segment.fetch(empty)
            copy.fetch(empty)

    def store_copies(self, unit: Unit) -> None:
        copies = [(segment, self._copied[id(segment)]) for segment in unit.trainable]
        self._give_back([(segment, [copy.segment.leave(), *copy.leave()]) for segment, copy in copies])

    def copied_bytes(self, unit: Unit) -> int:
        copies = [self._copied[id(segment)] for segment in unit.trainable]
        return sum(copy.nbytes + copy.segment.regions["copies"].nbytes for copy in copies)

    def take_back_copies(self) -> None:
        for copy in self._copied.values():
            copy.segment.take_back()

    def count_copy(self, segment: Segment) -> None:
        self._copied[id(segment)].count_as(self._fused[id(segment)])

    def copied_regions(self) -> dict[str, list[Region]]:
        held = self._copied.values()
        moments = [region for copy in held for region in copy.moments.values()]
        found = {name: [copy.segment.regions[name] for copy in held] for name in ("copies", "log")}
        return {**found, "copies": [*found["copies"], *moments]}

    def fetch(self, unit: Unit) -> None:
        for segment in unit.trainable:
            self._fused[id(segment)].fetch(self._empty(segment))

    def _empty(self, segment: Segment) -> Callable[[int, torch.dtype], Tensor]:
        """What gives memory for what comes to where a segment is updated."""
        near = segment.table.updates_on is Tier.DEVICE
        return self._tiers.device.empty if near else self._tiers.host.empty

    def store(self, unit: Unit) -> None:
        self._give_back([(segment, self._fused[id(segment)].leave()) for segment in unit.trainable])

    def _give_back(self, updated: Iterable[tuple[Segment, list[tuple[Region, Tensor]]]]) -> None:
        """What was updated goes to where it rests.

        Raises:
            OSError: what was stored earlier is not there; all of this is taken (see ``Region.store``).
        """
        problem: OSError | None = None
        for segment, each in updated:
            for region, values in each:
                try:
                    region.store(values)
                except OSError as error:
                    problem = problem or error
                if segment.table.updates_on is Tier.HOST:
                    self._tiers.host.recycle(values)
        if problem is not None:
            raise problem

    def moved_bytes(self, unit: Unit) -> int:
        return sum(self._fused[id(segment)].nbytes for segment in unit.trainable)

    def fetched(self) -> list[Tensor]:
        away = [shard for shard in self._fused.values() if shard.segment.table.moments.tier is not Tier.DEVICE]
        return [values for shard in away for values in shard.here]

    def speculate(self, unit: Unit, name: str) -> None:
        room = self.snapshots.room(unit.name)
        if room is None or self.has_pre_hooks():
            return
        for segment, used in zip(unit.trainable, unit.gradients.used, strict=True):
            if any(used):
                coefficient = None if segment.unscale == 1.0 else torch.full((), segment.unscale)
                terms = terms_of(self._group(segment), used, coefficient)
                self._fused[id(segment)].speculate(terms, self._block, room, self.snapshots.begin, name)

    def withdraw(self, units: Iterable[Unit] | None = None) -> None:
        for segment in self._segments() if units is None else (s for unit in units for s in unit.trainable):
            if isinstance(before := segment.under_way, Speculation):
                before.settle()

    def hold(self, units: Sequence[Unit], used: Mapping[str, Sequence[Sequence[bool]]], factor: Tensor | None) -> None:
        for unit in units:
            for segment, flags in zip(unit.trainable, used[unit.name], strict=True):
                options = options_of(self._group(segment))
                copies = segment.keeps_copy and any(flags)
                aside = self._host_memory(segment.shard_numel, segment.dtype) if copies else None
                self._held[id(segment)] = _DelayedUpdate(options, flags, factor_of(segment, factor), aside)

    def take_updated(self) -> None:
        self._held.clear()
        for segment in self._segments():
            segment.write_updated()

    def updated_row(self) -> MemoryRow:
        copies = sum(s.shard_numel * s.dtype.itemsize for s in self._segments() if s.keeps_copy)
        held = sum(each.aside.nbytes for each in self._held.values() if each.aside is not None)
        return MemoryRow("updated", "host", copies, 0.0, held)

    def _host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._tiers.host.empty(numel, dtype)

    def _segments(self) -> Iterator[Segment]:
        return (shard.segment for shard in self._fused.values())

    def _shard(self, segment: Segment) -> FusedShard:
        """The state of a segment, as it is after the last step."""
        if segment.under_way is not None:
            segment.under_way.settle()
        return self._fused[id(segment)]

    # -- what is kept

    def num_moments(self) -> int:
        return len(self._names)

    def regions(self) -> list[Region]:
        return [moment for shard in self._fused.values() for moment in shard.moments.values()]

    def regions_of(self, segment: Segment) -> list[Region]:
        return list(self._shard(segment).moments.values())

    def state_dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self._names, self._dtype)

    def describe(self, segment: Segment) -> dict[int, tuple[int, dict[str, Any]]]:
        shard = self._shard(segment)
        each = {name: PerElement(moment.dtype) for name, moment in shard.moments.items()}
        return {slot: (1, {**each, "step": step}) for slot, step in enumerate(shard.steps)}

    def has_state(self, segment: Segment, slot: int, name: str) -> bool:
        return name in self._names

    def stored(self, segment: Segment, slot: int) -> Iterator[tuple[str, int, Tensor | Shard]]:
        for name, moment in self._shard(segment).moments.items():
            yield name, 1, Shard(moment, 0, segment.shard_numel).part(segment.own_piece(slot)[0])

    def kept_once(self, segment: Segment, slot: int) -> dict[str, Any]:
        return {"step": self._shard(segment).steps[slot]}

    def state_shard(self, segment: Segment, name: str, dtype: torch.dtype) -> Tensor:
        return self._shard(segment).moments[name].get()

    def take_state(self, segment: Segment, slot: int, name: str, values: Tensor, *, changed: bool = False) -> None:
        self.written += 1
        shard, part = self._shard(segment), segment.own_piece(slot)
        Shard(shard.moments[name], 0, segment.shard_numel).part(part[0]).write(values[part[1]])
        if changed and shard.kind is SGD:  # a first step would overwrite the momentum instead of reading it
            shard.steps[slot] = max(1, shard.steps[slot])

    def needs(self, segment: Segment, slot: int) -> set[str] | None:
        return set(self._names)

    def forget(self, segment: Segment, slots: Collection[int]) -> None:
        self.written += 1
        shard = self._shard(segment)
        for slot in slots:
            shard.steps[slot] = 0
        for moment in shard.moments.values() if slots else ():
            if moment.resting is None and len(slots) == len(segment.spec.slots):  # in a file, which is not read
                whole = torch.zeros(segment.shard_numel, dtype=moment.dtype)
            else:
                whole = moment.values()
            for slot in slots:
                whole[segment.own_piece(slot)[0]].zero_()
            moment.store(whole)

    def moment(self, segment: Segment, name: str) -> Region | None:
        return self._shard(segment).moments[name]

    def take_piece(self, segment: Segment, slot: int, name: str, shard: Tensor) -> None:
        raise NotImplementedError(f"{name} is kept in shards: it is written to what moment() gives")

    def take_value(self, segment: Segment, slot: int, name: str, value: Any) -> None:
        self.written += 1
        if name == "step":
            self._shard(segment).steps[slot] = int(value)
