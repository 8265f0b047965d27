"""Live progress: two lines redrawn in place on a terminal, a plain line every few seconds anywhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from shardfold.tools.observe.metrics import StepMetrics
from shardfold.tools.observe.readable import format_bytes, format_count, format_duration, sparkline
from shardfold.tools.observe.working_line import ONLY

__all__ = ["Progress"]

PLAIN_EVERY = 5.0  # seconds between plain lines
DRAW_EVERY = 0.1  # seconds between drawings on a terminal


def said_of(step: StepMetrics) -> tuple[float, str]:
    """Return how far a step is, and what that is called."""
    return (step.loss, "loss") if step.bits_per_byte is None else (step.bits_per_byte, "bits per byte")


class Display(RichProgress):
    """Rich's line of progress and one below it."""

    def __init__(self, total: int, console: Console) -> None:
        self.body = Text()
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TimeRemainingColumn(), TextColumn("left"))
        super().__init__(*columns, console=console, auto_refresh=False, transient=True, expand=True)
        self.steps = self.add_task("", total=total)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self.body


class Progress:
    """Shows a training's steps while they happen. Ranks other than 0 pass `enabled=False` and print nothing."""

    def __init__(self, total: int, *, console: Console | None = None, enabled: bool = True) -> None:
        self.console = console or Console()
        self.enabled = enabled
        self._total = total
        self._before: int | None = None  # steps of an earlier run that this one goes on with
        self._losses: list[float] = []  # of every step
        self._held_out: float | None = None
        self._tokens_per_s: float | None = None  # smoothed over some ten steps, as single ones jitter
        self._last_drawn, self._is_only = float("-inf"), False
        self._live = Display(total, self.console) if enabled and self.console.is_terminal else None

    def __enter__(self) -> Progress:
        self._is_only = self.enabled and ONLY.acquire(blocking=False)
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if self._is_only:
            ONLY.release()

    def enable(self) -> None:
        """From now on this rank shows them, as the one that did is gone; between ``__enter__`` and ``__exit__``."""
        if self.enabled:
            return
        self.enabled, self._is_only = True, ONLY.acquire(blocking=False)
        if self.console.is_terminal:
            self._live = Display(self._total, self.console)
            self._live.start()

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Say that it is at something else than steps."""
        if self._live:
            before, self._live.body = self._live.body, Text(doing, style="dim")
            self._live.refresh()
            yield
            self._live.body = before
        else:
            yield

    def note(self, message: str) -> None:
        """Print a line that stays."""
        if self.enabled:
            self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: StepMetrics) -> None:
        """Show one finished step."""
        if not self.enabled:
            return
        if self._before is None:
            self._before = step.step - 1
            if self._live:
                self._live.reset(self._live.steps, completed=self._before)
        value, _ = said_of(step)
        if math.isfinite(value):  # of a skipped step it need not be
            self._losses.append(value)
        mean = self._tokens_per_s or step.tokens_per_s
        self._tokens_per_s = mean + 0.1 * (step.tokens_per_s - mean)
        held_out = step.held_out_loss if step.held_out_bits_per_byte is None else step.held_out_bits_per_byte
        evaluated = held_out is not None
        if evaluated:
            self._held_out = held_out
        now = time.monotonic()
        final = step.step == self._total
        every = DRAW_EVERY if self._live else PLAIN_EVERY
        if not (final or evaluated or now - self._last_drawn >= every):
            return
        self._last_drawn = now
        if self._live:
            self._live.body = self._body(step)
            self._live.update(self._live.steps, completed=step.step, refresh=True)
        else:
            self.console.print(self._line(step), highlight=False, soft_wrap=True)

    def _eta(self, step: StepMetrics) -> str:
        done = step.step - (self._before or 0)
        return format_duration(step.seconds / done * (self._total - step.step))

    @staticmethod
    def _scale(step: StepMetrics) -> str:
        if step.loss_scale is None:
            return ""
        skipped = f", {step.skipped} step{'s' if step.skipped > 1 else ''} skipped" if step.skipped else ""
        return f"loss scale {step.loss_scale:g}{skipped}"

    def _line(self, step: StepMetrics) -> str:
        known = step.held_out_loss if step.held_out_bits_per_byte is None else step.held_out_bits_per_byte
        held_out = "" if known is None else f"  held-out {known:.3f}"
        value, unit = said_of(step)
        figures = "".join(f"{name.replace('_', ' ')} {figure:.3f}  " for name, figure in step.figures.items())
        scale = self._scale(step) and f"{self._scale(step)}  "
        return (
            f"step {step.step}/{self._total}  {value:.3f} {unit}{held_out}  {figures}{scale}"
            f"{format_count(self._tokens_per_s or 0)} tokens/s  {format_bytes(step.memory_bytes)} per rank  "
            f"{self._eta(step)} left"
        )

    def _body(self, step: StepMetrics) -> Text:
        value, unit = said_of(step)
        body = Text("  ").join(
            part
            for part in [
                Text.assemble((f"{value:.3f}", "bold"), f" {unit}"),
                Text(sparkline(self._losses), style="cyan"),
                Text("" if self._held_out is None else f"held-out {self._held_out:.3f}", style="magenta"),
                *(Text(f"{name.replace('_', ' ')} {figure:.3f}") for name, figure in step.figures.items()),
                Text(self._scale(step), style="yellow" if step.skipped else "dim"),
                Text(f"{format_count(self._tokens_per_s or 0)} tokens/s", style="dim"),
                Text(f"{format_bytes(step.memory_bytes)} per rank", style="dim"),
            ]
            if part
        )
        body.no_wrap, body.overflow = True, "ellipsis"
        return body
