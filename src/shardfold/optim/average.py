"""An exponential moving average of the master shards: each rank averages what it updates, so nothing is gathered.

It follows a model whose structure changes: what is new enters with its value, what leaves is forgotten.

The same numbers as ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`` on the
whole model: the first update copies, later ones give ``decay * average + (1 - decay) * value``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shardfold.comm.coalesced import complete
from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.plan.checks import check_flags, described, is_number, known_arguments
from shardfold.plan.layout import Axes, Tier
from shardfold.plan.report import MemoryRow
from shardfold.sharding.autograd import outside_inference
from shardfold.sharding.model import Loan, Owner, ShardedModel, refuse_during
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.together import on_disk, together
from shardfold.sharding.unit import Unit
from shardfold.sharding.whole_segments import whole_parameters
from shardfold.sharding.whole_state import named_state

__all__ = ["Average"]

COUNT, PREFIX = "n_averaged", "module."  # AveragedModel's names


@known_arguments
class Average:
    """An exponential moving average of an engine's trainable parameters, in fp32, split as master is.

    It is updated by each ``engine.step()`` that updates. Frozen parameters and buffers are the model's own.

    Args:
        engine: must have an optimizer.
        decay: weight of the average so far, in [0, 1).
        warmup: the decay of update ``n`` (from 0) is at most ``(1 + n) / (10 + n)``, so that early values fade.

    Attributes:
        updates: how many updates it has seen.

    Raises:
        ConfigError: ``decay`` is out of range, or the engine is none or has no optimizer.

    Examples:
        >>> average = sf.Average(engine, decay=0.99)
        >>> engine.backward(engine(x).square().mean())
        >>> step = engine.step()
        >>> with average.applied():  # the model has averaged weights in here
        ...     prediction = engine.module(x)
        >>> average.close()
    """

    def __init__(self, engine: Owner, decay: float = 0.999, *, warmup: bool = False) -> None:
        model = getattr(engine, "sharded", None)
        if not isinstance(model, ShardedModel):
            raise ConfigError(f"Average: the engine is {described(engine)}: give a shardfold.Engine.")
        if not is_number(decay, 0, 1) or decay == 1:
            raise ConfigError(f"Average(decay={described(decay)}): it is the weight of the average so far, in [0, 1).")
        check_flags("Average", warmup=warmup)
        if model.optimizer is None:
            raise ConfigError("Average needs an engine with an optimizer: what is not trained needs no average.")
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self._model, self._closed = model, False
        self._by_segment: dict[int, Tensor] = {}
        for unit in model.units:
            self.add(unit)
        model.run.after_step.append(self._update)
        model.rows.append(self._memory)
        model.run.averages.append(self)

    def close(self) -> None:
        """Ends the averaging and gives the memory back."""
        if self._update in self._model.run.after_step:
            self._model.run.after_step.remove(self._update)
            self._model.rows.remove(self._memory)
            self._model.run.averages.remove(self)
        self._by_segment, self._closed = {}, True

    def add(self, unit: Unit) -> None:
        """From now on the unit is averaged too, beginning with its values."""
        for segment in unit.trainable:
            self._by_segment[id(segment)] = _master(segment).to(torch.float32, copy=True)

    def drop(self, unit: Unit) -> None:
        """Forgets a unit that is no more."""
        for segment in unit.trainable:
            del self._by_segment[id(segment)]

    def go_on_at(self, updates: int) -> None:
        """It has seen so many updates."""
        self.updates = updates

    def shard(self, segment: Segment) -> Tensor:
        """The average of a segment's master range, ``(length / parts,)``."""
        return self._by_segment[id(segment)]

    @property
    def _segments(self) -> list[Segment]:
        return [] if self._closed else [segment for unit in self._model.units for segment in unit.trainable]

    @property
    def _shards(self) -> list[Tensor]:
        return [self._by_segment[id(segment)] for segment in self._segments]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model's parameters are the average; afterwards they are what they were, bit for bit.

        Every rank must enter it: layouts that keep all parameters on every rank gather them, others send nothing. A
        copy of what is replaced is held meanwhile.

        Raises:
            UsageError: inside ``engine.gathered()``, whose values are lent, or after :meth:`close`.
        """
        model = self._model
        if self._closed:
            raise UsageError("average.applied(): this average was closed.")
        refuse_during(model.loans, "average.applied()")
        model.gate.meet("average.applied()", follow=True)
        model.gate.secure()
        kept: list[tuple[Shard, Tensor]] = []
        loan = Loan("average.applied()")
        model.loans.append(loan)
        try:
            self._model.let_go()
            self._put_in(kept)
            yield
        finally:
            model.loans.remove(loan)
            self._model.let_go()
            with torch.no_grad():
                for target, value in kept:
                    target.write(value)
            self._mark_written()

    @outside_inference()
    def state_dict(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU of every rank, with the names of PyTorch's ``AveragedModel``, which can load it.

        ``n_averaged``, and ``module.`` before every name of the model. Every rank must call it.
        """
        model = self._model
        model.gate.meet("average.state_dict()", follow=True)
        model.gate.secure()
        shards: list[tuple[Segment, Tensor | Shard, Axes]] = [
            (s, shard, s.table.master.over) for s, shard in zip(self._segments, self._shards, strict=True)
        ]
        for unit in model.units:
            for segment in unit.segments:
                if not segment.spec.trainable:
                    rest = segment.shard("params")
                    assert rest is not None
                    shards.append((segment, rest, segment.table.rest.over))
        whole = whole_parameters(model.comm, shards, "average.state_dict()")
        state = {PREFIX + name: value for name, value in named_state(model.module, whole).items()}
        return {COUNT: torch.tensor(self.updates), **state}

    @outside_inference()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`state_dict` gave, under any layout; every rank calls it.

        Raises:
            ModelError: on all ranks: a trainable parameter is missing or has another shape.
        """
        found: list[list[Tensor]] = []
        self._model.gate.meet("average.load_state_dict()", check=lambda: found.extend(self._found(state)))
        for segment, shard, values in zip(self._segments, self._shards, found, strict=True):
            for slot, value in enumerate(values):
                piece, part = segment.own_piece(slot)
                shard[piece].copy_(value.reshape(-1)[part])
        self.updates = int(state[COUNT])

    def _found(self, state: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The values of each segment's parameters.

        Raises:
            ModelError: one is missing or has another shape.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in self._model.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(PREFIX + name)
        found: list[list[Tensor]] = []
        for segment in self._segments:
            found.append([])
            for parameter in segment.parameters:
                value = next((state[name] for name in names[id(parameter)] if name in state), None)
                if value is None or value.shape != parameter.shape:
                    said = "missing" if value is None else f"of shape {tuple(value.shape)}"
                    raise ModelError(
                        f"average.load_state_dict(): {names[id(parameter)][0]!r} is {said}, but the model has it with "
                        f"shape {tuple(parameter.shape)}: load what average.state_dict() of the same model gave."
                    )
                found[-1].append(value)
        if COUNT not in state:
            raise ModelError(f"average.load_state_dict(): {COUNT!r} is missing: load what average.state_dict() gave.")
        return found

    def _update(self) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay

        def average() -> None:
            for segment, shard in zip(self._segments, self._shards, strict=True):
                if self.updates:
                    shard.lerp_(_master(segment).float(), 1 - decay)
                else:
                    shard.copy_(_master(segment))

        with torch.no_grad():
            files = self._model.layout.master.tier is Tier.DISK
            together(self._model.comm, "the average behind engine.step()", average, files=files)
        self.updates += 1

    def _put_in(self, kept: list[tuple[Shard, Tensor]]) -> None:
        """Writes the average into every state that forward reads or that is saved; ``kept`` gets what was there."""
        rests: dict[Axes, list[Tensor]] = {}  # by the axes over which they are to be completed

        def put() -> None:
            for segment, shard in zip(self._segments, self._shards, strict=True):
                for state, copy, bounds in segment.copies():
                    values = copy.read()
                    kept.append((copy, values if copy.memory is None else values.clone()))
                    if state != "held":
                        a, b = (end - bounds[0] for end in segment.master_range)
                        copy.part(slice(a, b)).write(shard)
                if segment.rest is not None and (params := segment.table.params) is not None:
                    rests.setdefault(segment.table.master.over[len(params.over) :], []).append(segment.rest)

        with torch.no_grad():
            together(self._model.comm, "average.applied()", put, files=on_disk(self._model.layout))
        for over, flats in rests.items():
            complete(self._model.comm, flats, over, "average.applied()")
        self._mark_written()

    def _mark_written(self) -> None:
        """A backward whose forward came before must raise, as when weights change in plain PyTorch."""
        torch.autograd.graph.increment_version([p for segment in self._segments for p in segment.parameters])

    def _memory(self) -> MemoryRow:
        parts = self._model.comm.mesh.parts
        share = [(segment.spec, 4 / parts(segment.table.master.over)) for segment in self._segments]
        table = sum(spec.numel * size for spec, size in share)
        padding = sum(spec.padding * size for spec, size in share)
        held = sum(shard.untyped_storage().size() for shard in self._shards)
        return MemoryRow("average", "device", table, padding, held)


def _master(segment: Segment) -> Tensor:
    """The values that are averaged."""
    master = segment.shard("master")
    assert master is not None
    return master.read()
