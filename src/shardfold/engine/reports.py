"""What an engine says of itself: bytes held beside the table, bytes sent beside the program, times, and text."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfold.activations.modes import Replacements
from shardfold.engine.runner import Runner
from shardfold.engine.stats import Clock, Stats
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.plan.cost import STATES, section_traffic, state_bytes
from shardfold.plan.explain import explain
from shardfold.plan.layout import PRECISIONS, Layout
from shardfold.plan.presets import PRESETS
from shardfold.plan.report import MemoryReport, MemoryRow, TrafficReport
from shardfold.sharding.model import ShardedModel
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
    """

    def __init__(
        self, model: ShardedModel, table: Layout, updater: ShardedOptimizer | None, runner: Runner,
        replaced: Replacements, clock: Clock,
    ) -> None:  # fmt: skip
        self._model, self._table, self._updater = model, table, updater
        self._runner, self._replaced, self._clock = runner, replaced, clock

    def memory(self) -> MemoryReport:
        """See :meth:`Engine.memory`."""
        model, updater = self._model, self._updater
        specs, sizes = [unit.spec for unit in model.units], model.comm.mesh.sizes
        moments, kept = (updater.num_moments(), updater.kept_bytes()) if updater is not None else (0, None)
        exact = state_bytes(model.layout, specs, sizes, num_moments=moments, kept=kept)
        padded = state_bytes(model.layout, specs, sizes, num_moments=moments, padded=True, kept=kept)
        tensors, transient = self._tensors()
        seen: set[int] = set()
        rows: list[MemoryRow] = []
        for name, cell in {n: getattr(model.layout, n, None) for n in tensors}.items():
            held = _live_bytes(tensors[name], seen)
            if held or padded.get(name):
                tier = str(cell.tier) if cell is not None else "device"
                table = exact.get(name, 0.0)
                rows.append(MemoryRow(name, tier, table, padded.get(name, 0.0) - table, held))
        rows += [row() for row in model.rows]
        return MemoryReport(tuple(rows), _live_bytes(transient, seen), self._replaced.held())

    def _tensors(self) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """What rests, by state, and what comes and goes."""
        tensors: dict[str, list[Tensor]] = {name: [] for name in STATES}
        transient: list[Tensor] = []
        for unit in self._model.units:
            for segment in unit.segments:
                states = {
                    "held": segment.held, "grads": segment.gradient_flat, "params": segment.rest,
                    "master": segment.master, "format": segment.format_state,
                }  # fmt: skip
                for name, tensor in states.items():
                    if tensor is not None:
                        tensors[name].append(tensor)
                if segment.split:
                    transient.append(segment.flat)
            if unit.gradients.incoming is not None:
                transient.extend(unit.gradients.incoming.flats)
            transient.extend(grad for _, grad in unit.gradients.arriving)
        if self._updater is not None:
            tensors["moments"] += self._updater.state_tensors()
        return tensors, transient

    def traffic(self) -> TrafficReport:
        """See :meth:`Engine.traffic`."""
        model, meter, program = self._model, self._model.comm.meter, self._runner.orders.program
        specs, ran = [unit.spec for unit in model.units], meter.last_sections
        predicted = section_traffic(program, model.layout, specs, model.comm.mesh.sizes, ran)
        if ran["step"] and self._updater is not None:
            predicted |= self._updater.traffic()
        return meter.report(predicted)

    def explained(self) -> str:
        """See :meth:`Engine.explain`."""
        model, updater, sizes = self._model, self._updater, self._model.comm.mesh.sizes
        specs = [unit.spec for unit in model.units]
        moments, kept = (updater.num_moments(), updater.kept_bytes()) if updater is not None else (0, None)
        held = state_bytes(model.layout, specs, sizes, num_moments=moments, padded=True, kept=kept)
        return explain(
            self._table, model.layout, self._runner.orders.program, specs, sizes, held, self._runner.accumulate,
            updater.traffic() if updater is not None else None,
            parts=model.rules.described(), activations=self._replaced.explained(),
        )  # fmt: skip

    def described(self) -> str:
        """What ``print(engine)`` shows, in one line: layout, ranks, precision, units and parameters."""
        model, steps = self._model, self._model.run.steps
        state = f", closed at step {steps}" if model.closed else f", step {steps}"
        numel = sum(segment.spec.numel for segment in model.segments())
        trained = sum(segment.spec.numel for segment in model.segments() if segment.spec.trainable)
        cells, precision = self._table.cells(), model.rules.default
        layout = next((name for name, preset in PRESETS.items() if preset.cells() == cells), "a Layout of its own")
        policy = next((name for name, named in PRECISIONS.items() if named == precision), "a Precision of its own")
        ranks, units = model.world_size, len(model.units)
        return (
            f"Engine({type(model.module).__name__}, {layout}, {ranks} rank{'s' * (ranks > 1)} on "
            f"{model.device.type}, {policy}, {units} unit{'s' * (units != 1)}, {numel:,} parameters"
            f"{'' if trained == numel else f' ({trained:,} trained)'}{state})"
        )

    def stats(self, peak_flops: float | None) -> Stats:
        """See :meth:`Engine.stats`."""
        model, clock = self._model, self._clock
        numels = [(segment.spec.trainable, segment.spec.numel) for segment in model.segments()]
        trainable, frozen = (sum(numel for trains, numel in numels if trains is what) for what in (True, False))
        mfu, formula = clock.mfu(trainable, frozen, peak_flops)
        memory = self.memory()
        cuda = model.device.type == "cuda"
        return Stats(
            steps=model.run.steps,
            skipped=clock.skipped,
            step_seconds=clock.step_seconds,
            tokens_per_second=clock.tokens_per_second,
            samples_per_second=clock.samples_per_second,
            mfu=mfu,
            mfu_formula=formula,
            exposed_seconds=None if model.comm.mesh.backend == "nccl" else clock.exposed_seconds,
            traffic=self.traffic(),
            memory=memory,
            transient_peak=torch.cuda.max_memory_allocated(model.device) - memory.held if cuda else None,
        )


def _live_bytes(tensors: list[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind ``tensors`` that were not counted yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() and storage_key(storage) not in seen:
            seen.add(storage_key(storage))
            total += storage.size()
    return total
