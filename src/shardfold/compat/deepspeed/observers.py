"""What a config asks to be shown of a training, on one engine: progress, times, memory, bytes, operations, monitors.

    observers = Observers(settings, core)             # core: the shardfold.Engine; outer=: its DeepSpeedEngine, if any
    with observers.phase("forward"): ...              # also "backward" and "step"; costs nothing where nothing asks
    observers.note_loss(loss)                         # of each micro-batch, not divided
    observers.after_step(report, step=global_steps, samples=global_samples, rates=get_lr(), momenta=get_mom())
    observers.step = ...                              # after a checkpoint was loaded

Rank 0 writes; asking sends nothing. Lines go to the logger of ``deepspeed.utils.logger`` at the level INFO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfold.compat.deepspeed.config_text import effective
from shardfold.compat.deepspeed.monitor.base import Event, is_rank_0
from shardfold.compat.deepspeed.monitor.monitor import MonitorMaster
from shardfold.compat.deepspeed.profiling.flops_profiler import FlopsProfiler
from shardfold.compat.deepspeed.profiling.traffic_log import TrafficLog
from shardfold.compat.deepspeed.utils.timer import BACKWARD_GLOBAL_TIMER, FORWARD_GLOBAL_TIMER, STEP_GLOBAL_TIMER
from shardfold.plan.report import StepReport

if TYPE_CHECKING:
    from shardfold.compat.deepspeed.config_read import Settings
    from shardfold.engine.engine import Engine

__all__ = ["Observers"]

LOG = logging.getLogger("DeepSpeed")
PHASES = {"forward": FORWARD_GLOBAL_TIMER, "backward": BACKWARD_GLOBAL_TIMER, "step": STEP_GLOBAL_TIMER}


class Observers:
    """Everything that a config's observing keys ask for.

    Args:
        settings: which keys are on.
        engine: what is observed.
        outer: the DeepSpeedEngine around it, for the printed profile.
        monitor: the monitors, made already; None: they are made.

    Attributes:
        step: optimizer steps so far, skipped ones included, as of the last :meth:`after_step`.
        monitor: the monitors, as one.
        flops_profiler: of the engine's module, or None.
        traffic_log: what steps have sent so far.
        seconds: of each phase since the last line of progress.

    Raises:
        DeepSpeedConfigError: a monitor is enabled whose package is not installed.
    """

    def __init__(
        self, settings: Settings, engine: Engine, outer: Any = None, monitor: MonitorMaster | None = None
    ) -> None:
        self._settings, self._engine = settings, engine
        self.step = 0
        self.monitor = MonitorMaster(settings) if monitor is None else monitor
        self.traffic_log = TrafficLog(settings)
        self.flops_profiler: FlopsProfiler | None = None
        if settings["flops_profiler.enabled"]:
            factor = settings["flops_profiler.recompute_fwd_factor"]
            self.flops_profiler = FlopsProfiler(engine.module, outer, factor)
        self._timed = settings.wall_clock_breakdown
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._losses: list[Tensor] = []
        if settings.dump_state and is_rank_0():
            print(f"{effective(settings)}\n\n{engine.explain()}")

    def follow(self, engine: Engine) -> None:
        """From now on this one is observed, with the same model."""
        self._engine = engine

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a forward, a backward or a step."""
        if self._timed or (self.flops_profiler is not None and name == "forward"):
            return self._watched(name)
        return nullcontext()

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        profiled = name == "forward" and self._profiles_now()
        if profiled:
            assert self.flops_profiler is not None
            self.flops_profiler.start_profile()
        began = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - began
            if profiled:
                assert self.flops_profiler is not None
                self.flops_profiler.stop_profile()

    def _profiles_now(self) -> bool:
        """Whether this is the first forward of the step that is profiled: step ``n`` is the one after ``n`` updates."""
        profiler = self.flops_profiler
        due = self.step == self._settings["flops_profiler.profile_step"] and self._engine.module.training
        return profiler is not None and due and not profiler.started

    def _now(self) -> float:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        return perf_counter()

    def note_loss(self, loss: Tensor) -> None:
        """A micro-batch's loss, for ``Train/Samples/train_loss``."""
        if self.monitor.enabled:
            self._losses.append(loss.detach())

    def after_step(
        self, report: StepReport, *, step: int, samples: int, rates: Sequence[float], momenta: Sequence[Any] = ()
    ) -> None:
        """After an optimizer step, done or skipped.

        Args:
            report: what ``engine.step()`` returned.
            step: how many there were so far.
            samples: processed by all ranks so far.
            rates: of each group.
            momenta: of each group.
        """
        self.step = step
        every = self._settings.steps_per_print
        due = every is not None and step % every == 0
        if self.monitor.enabled:
            self.monitor.write_events(self._events(report, samples, rates, due))
            self._losses.clear()
        if self.traffic_log.enabled:
            said = self.traffic_log.add(self._engine.traffic())
            if self.traffic_log.verbose and said:
                self._say(said)
        if due:
            self._report(rates, momenta)
        if self.flops_profiler is not None and self.flops_profiler.started:
            self._print_profile()

    def _events(self, report: StepReport, samples: int, rates: Sequence[float], due: bool) -> list[Event]:
        events: list[Event] = []
        if self._losses:
            mean = float(torch.stack([loss.float().reshape(()) for loss in self._losses]).mean())
            events.append(("Train/Samples/train_loss", mean, samples))
        events += [("Train/Samples/lr", rate, samples) for rate in list(rates)[:1]]
        if self._settings["fp16.enabled"]:
            events.append(("Train/Samples/loss_scale", report.loss_scale, samples))
        if self._timed and due:
            events += [(f"Train/Samples/elapsed_time_ms_{name}", 1e3 * self.seconds[name], samples) for name in PHASES]
        return events

    def _report(self, rates: Sequence[float], momenta: Sequence[Any]) -> None:
        skipped = self._engine.loss_scale.skipped if self._engine.loss_scale is not None else 0
        self._say(f"step={self.step}, skipped={skipped}, lr={list(rates)}, mom={list(momenta)}")
        if self._timed:
            self._say(
                "time (ms) | " + " | ".join(f"{PHASES[name]}: {1e3 * time:.2f}" for name, time in self.seconds.items())
            )
            self.seconds = dict.fromkeys(PHASES, 0.0)
        if self._settings.memory_breakdown:
            self._say(f"bytes held by rank 0\n{self._engine.memory()}")

    def _print_profile(self) -> None:
        profiler, get = self.flops_profiler, self._settings
        assert profiler is not None
        if is_rank_0():
            profiler.print_model_profile(
                profile_step=get["flops_profiler.profile_step"],
                module_depth=get["flops_profiler.module_depth"],
                top_modules=get["flops_profiler.top_modules"],
                detailed=get["flops_profiler.detailed"],
                output_file=get["flops_profiler.output_file"],
            )
        profiler.end_profile()

    @staticmethod
    def _say(text: str) -> None:
        if is_rank_0():
            LOG.info(text)
