"""What an engine says of itself: bytes held beside the table, bytes sent beside the program, times, and text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from shardfold import accelerator
from shardfold.activations.modes import Replacements
from shardfold.engine._pipelined import Pipelined
from shardfold.engine.peak_rate import peak_of
from shardfold.engine.runner import Runner
from shardfold.engine.stats import Clock, Stats
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.parallel.expert_parallel import described as experts_described
from shardfold.parallel.layer_traffic import described
from shardfold.plan.cost import STATES, moves, resting_bytes, section_traffic, step_of, summed
from shardfold.plan.explain import explain
from shardfold.plan.layout import PRECISIONS, Layout, Tier
from shardfold.plan.lifetimes import Behaviour
from shardfold.plan.presets import name_of
from shardfold.plan.report import MemoryReport, MemoryRow, TrafficReport
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.tiers.tier import Region
from shardfold.torch_internals import storage_key

__all__ = ["Reports"]


class Reports:
    """The reports of one engine.

    Args:
        model: that is trained.
        table: as the user gave it.
        updater: of its shards; None: nothing is trained.
        runner: has the program.
        replaced: holds activations elsewhere.
        clock: of the steps.
        pipelined: tells of the stages of a pipeline.
        wires: what was measured of links, and chosen for them, in lines.
    """

    def __init__(
        self,
        model: ShardedModel,
        table: Layout,
        updater: ShardedOptimizer | None,
        runner: Runner,
        replaced: Replacements,
        clock: Clock,
        pipelined: Pipelined,
        wires: Sequence[str],
    ) -> None:
        self._model, self._table, self._updater = model, table, updater
        self._runner, self._replaced, self._clock = runner, replaced, clock
        self._pipelined, self._wires = pipelined, wires

    def memory(self) -> MemoryReport:
        """See :meth:`Engine.memory`."""
        model, updater = self._model, self._updater
        specs, sizes = [unit.spec for unit in model.units], model.comm.mesh.sizes
        moments, kept = (updater.num_moments(), updater.kept_bytes()) if updater is not None else (0, None)
        exact = resting_bytes(model.layout, specs, sizes, num_moments=moments, kept=kept)
        padded = resting_bytes(model.layout, specs, sizes, num_moments=moments, padded=True, kept=kept)
        resting, transient = self._regions(), self._transient()
        seen: set[int] = set()
        rows: list[MemoryRow] = []
        for name, regions in resting.items():
            held: dict[str, int] = {}
            for region in regions:
                held[region.tier] = held.get(region.tier, 0) + _held_bytes(region, seen)
            for tier in Tier:
                table, whole = (bytes_.get((name, tier), 0.0) for bytes_ in (exact, padded))
                if whole or held.get(tier):
                    rows.append(MemoryRow(name, str(tier), table, whole - table, held.get(tier, 0)))
        rows += [row() for row in model.rows]
        return MemoryReport(tuple(rows), _live_bytes(transient, seen), self._replaced.held())

    def _regions(self) -> dict[str, list[Region]]:
        """What rests, by state."""
        regions: dict[str, list[Region]] = {name: [] for name in STATES}
        for segment in self._model.segments():
            for name, region in segment.regions.items():
                regions[name].append(region)
        if self._updater is not None:
            regions["moments"] += self._updater.regions()
            for name, copied in self._updater.copied_regions().items():
                regions[name] += copied
        return regions

    def _transient(self) -> list[Tensor]:
        """What comes and goes."""
        transient: list[Tensor] = []
        for unit in self._model.units:
            for segment in unit.segments:
                if segment.split:
                    transient.append(segment.flat)
            for buffer in (unit.gradients.local, unit.gradients.sent):
                transient.extend(buffer.flats if buffer is not None else ())
            transient.extend(unit.gradients.summed or ())
        if self._updater is not None:
            transient += self._updater.fetched()
        return transient

    def traffic(self) -> TrafficReport:
        """See :meth:`Engine.traffic`."""
        model, meter, orders = self._model, self._model.comm.meter, self._runner.orders
        program = orders.stepped or orders.bound.program
        specs, sizes, ran = [unit.spec for unit in model.units], model.comm.mesh.sizes, meter.last_sections
        runs = [(program, ran), *orders.stages_of(meter.last_parts)]
        predicted = summed(section_traffic(each, model.layout, specs, sizes, times) for each, times in runs)
        if ran["step"] and self._updater is not None:
            predicted |= self._updater.traffic()
        moments = self._updater.num_moments() if self._updater is not None else 0
        moved = summed(
            moves(each, model.layout, specs, sizes, times, num_moments=moments, left_out=meter.last_left_out)
            for each, times in runs
        )
        asked = dict(meter.reported.ran)
        evaluation = program, asked.pop(None, {})
        evaluated = summed(
            moves(each, model.layout, specs, sizes, times) for each, times in [evaluation, *orders.stages_of(asked)]
        )
        return meter.report(predicted, moved, evaluated)

    def explained(self) -> str:
        """See :meth:`Engine.explain`."""
        model, updater, sizes = self._model, self._updater, self._model.comm.mesh.sizes
        bound = self._runner.orders.bound
        specs = [unit.spec for unit in model.units]
        moments, kept = (updater.num_moments(), updater.kept_bytes()) if updater is not None else (0, None)
        held = resting_bytes(model.layout, specs, sizes, num_moments=moments, padded=True, kept=kept)
        if updater is not None and updater.snapshots.planned:
            held["snapshots", Tier.HOST] = float(updater.snapshots.planned)
        if updater is not None and updater.delayed:
            held["updated", Tier.HOST] = updater.updated_row().table
        accumulate = self._runner.accumulate
        return explain(
            self._table,
            bound,
            held,
            accumulate,
            updater.traffic() if updater is not None else None,
            parts=model.rules.described(),
            activations=self._replaced.explained(),
            layers=[
                *self._wires,
                *self._pipelined.explained(accumulate),
                *described(model.module, TORCH_DTYPES[model.rules.default.compute].itemsize),
                *experts_described(model.module),
            ],
            moved=moves(
                bound.program, model.layout, specs, sizes, step_of(accumulate, bound.program), num_moments=moments
            ),
            behaviour=Behaviour(accelerator.has_streams(model.device), model.comm.transport.kind),
            own_step=updater is not None and not updater.fused,
            one_pass=updater is not None and updater.compiled,
            per_host=model.comm.mesh.per_host,
            waits=model.comm.agreement.waits_told() if sizes.size > 1 else (),
        )

    def described(self) -> str:
        """What ``print(engine)`` shows, in one line: layout, ranks, precision, units and parameters."""
        model, steps = self._model, self._model.run.steps
        state = f", closed at step {steps}" if model.closed else f", step {steps}"
        numel = sum(segment.spec.numel for segment in model.segments())
        trained = sum(segment.spec.numel for segment in model.segments() if segment.spec.trainable)
        layout, precision = name_of(self._table) or "a Layout of its own", model.rules.default
        policy = next((name for name, named in PRECISIONS.items() if named == precision), "a Precision of its own")
        ranks, units = model.world_size, len(model.units)
        return (
            f"Engine({type(model.module).__name__}, {layout}, {ranks} rank{'s' * (ranks > 1)} on "
            f"{model.device.type}, {policy}, {units} unit{'s' * (units != 1)}, {numel:,} parameters"
            f"{'' if trained == numel else f' ({trained:,} trained)'}{state})"
        )

    def stats(self, peak_flops: float | str | Path | None) -> Stats:
        """See :meth:`Engine.stats`."""
        model, clock = self._model, self._clock
        numels = [(segment.spec.trainable, segment.spec.numel) for segment in model.segments()]
        trainable, frozen = (sum(numel for trains, numel in numels if trains is what) for what in (True, False))
        mfu, formula = clock.mfu(trainable, frozen, peak_of(peak_flops, model.device, model.rules.default))
        memory = self.memory()
        peak = accelerator.peak(model.device)
        return Stats(
            steps=model.run.steps,
            skipped=clock.skipped,
            step_seconds=clock.step_seconds,
            tokens_per_second=clock.tokens_per_second,
            samples_per_second=clock.samples_per_second,
            mfu=mfu,
            mfu_formula=formula,
            exposed_seconds=None if model.comm.mesh.on_streams else clock.exposed_seconds,
            tiers=clock.tiers,
            traffic=self.traffic(),
            memory=memory,
            transient_peak=None if peak is None else peak - memory.held,
            pipeline=self._pipelined.measured(self._runner.accumulate),
            put_off=model.run.put_off,
            messages=clock.messages.sent,
            blocking_messages=clock.messages.blocking,
            straggler=clock.straggler,
        )


def _held_bytes(region: Region, seen: set[int]) -> int:
    """Bytes of a region: of memory, what lives and was not counted yet."""
    return region.nbytes if region.resting is None else _live_bytes([region.resting], seen)


def _live_bytes(tensors: list[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind ``tensors`` that were not counted yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() and storage_key(storage) not in seen:
            seen.add(storage_key(storage))
            total += storage.size()
    return total
