"""Timers of DeepSpeed's names: what was started and stopped, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shardfold.compat.deepspeed.utils.comms_logging import trim_mean
from shardfold.compat.deepspeed.utils.logging import logger, print_dist
from shardfold.errors import UsageError

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"]

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"

BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
TIME_EPSILON = 1e-6

GIB = 1024**3


class SynchronizedWallClockTimer:
    """Timers by name, which wait for the device: ``timers("forward").start()``."""

    class Timer:
        """One of them.

        Raises:
            UsageError: it is started twice, or stopped without a start.
        """

        def __init__(self, name: str) -> None:
            self.name_, self.started_, self._start = name, False, 0.0
            self.elapsed_records: list[float] = []

        def start(self) -> None:
            if self.started_:
                raise UsageError(f"the timer {self.name_!r} has already been started.")
            get_accelerator().synchronize()
            self._start, self.started_ = time.perf_counter(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            if not self.started_:
                raise UsageError(f"the timer {self.name_!r} is not started.")
            get_accelerator().synchronize()
            self.elapsed_records.append((time.perf_counter() - self._start) * 1000)
            self.started_ = False

        def reset(self) -> None:
            self.started_ = False
            self.elapsed_records.clear()

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds between all starts and stops; one that runs goes on."""
            running = self.started_
            if running:
                self.stop()
            total = sum(self.elapsed_records)
            if reset:
                self.reset()
            if running:
                self.start()
            return total

        def mean(self) -> float:
            """Milliseconds of one start and stop, without a tenth at either end."""
            return trim_mean(self.elapsed_records, 0.1)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """What the device has allocated, as text."""
        device = get_accelerator()
        values = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return "".join(f" | {name}: {value / GIB:.4f} GB" for name, value in values.items())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints ``time (ms) | name: ...`` on the ranks listed; None: on rank 0."""
        said = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers]
        memory = self.memory_usage() if memory_breakdown else ""
        print_dist(" | ".join(["time (ms)", *said]) + memory, ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Milliseconds of one start and stop, by name."""
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


class NoopTimer:
    """Timers that do nothing."""

    class Timer:
        def start(self) -> None: ...

        def reset(self) -> None: ...

        def stop(self, **kwargs: Any) -> None: ...

        def elapsed(self, **kwargs: Any) -> float:
            return 0

        def mean(self) -> float:
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        return self.timer

    def get_timers(self) -> dict[str, Timer]:
        return {}

    def log(self, *args: Any, **kwargs: Any) -> None: ...

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Samples per second, from the third step on.

    Args:
        config: has ``enabled`` and ``synchronized``.
        batch_size: samples of a step.
        start_step: steps that are not counted.
        steps_per_output: a line is logged so often; None: never.
        monitor_memory: memory is in it.
        logging_fn: takes the line; None: the logger.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.started, self._start = False, 0.0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def start(self) -> None:
        if self.config.enabled:
            self.started = True
            if self.global_step_count >= self.start_step:
                self._start = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends a micro-step, and the step if ``global_step``."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self._start:
            return
        duration = self._now() - self._start
        self.total_elapsed_time += duration
        self.step_elapsed_time += duration
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                memory = SynchronizedWallClockTimer.memory_usage() if self.monitor_memory else ""
                self.logging(
                    f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step="
                    f"{self.global_step_count}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                    f"CurrSamplesPerSec={self.batch_size / self.step_elapsed_time}{memory}"
                )
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Of the steps that are counted; -inf before there are any."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")
