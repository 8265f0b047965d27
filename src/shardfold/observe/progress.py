"""Live progress: two lines redrawn in place on a terminal, a plain line every few seconds anywhere else."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardfold.observe.formats import format_bytes, format_count, format_duration, sparkline
from shardfold.observe.metrics import StepMetrics

__all__ = ["Progress"]

PLAIN_EVERY = 5.0  # seconds between plain lines
DRAW_EVERY = 0.1  # seconds between drawings on a terminal


class Progress:
    """Shows a training's steps while they happen. Ranks other than 0 pass `enabled=False` and print nothing."""

    def __init__(self, total: int, *, console: Console | None = None, enabled: bool = True) -> None:
        self.console = console or Console()
        self.enabled = enabled
        self._total = total
        self._losses: list[float] = []  # bits per byte of every step
        self._held_out: float | None = None
        self._tokens_per_s: float | None = None  # smoothed over some ten steps, as single ones jitter
        self._last_drawn = float("-inf")
        live = enabled and self.console.is_terminal
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def note(self, message: str) -> None:
        """Print a line that stays."""
        if self.enabled:
            self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: StepMetrics) -> None:
        """Show one finished step."""
        if not self.enabled:
            return
        if math.isfinite(step.bits_per_byte):  # of a skipped step it need not be
            self._losses.append(step.bits_per_byte)
        mean = self._tokens_per_s or step.tokens_per_s
        self._tokens_per_s = mean + 0.1 * (step.tokens_per_s - mean)
        evaluated = step.held_out_bits_per_byte is not None
        if evaluated:
            self._held_out = step.held_out_bits_per_byte
        now = time.monotonic()
        final = step.step == self._total
        every = DRAW_EVERY if self._live else PLAIN_EVERY
        if not (final or evaluated or now - self._last_drawn >= every):
            return
        self._last_drawn = now
        if self._live:
            self._live.update(self._picture(step), refresh=True)
        else:
            self.console.print(self._line(step), highlight=False, soft_wrap=True)

    def _eta(self, step: StepMetrics) -> str:
        return format_duration(step.seconds / step.step * (self._total - step.step))

    @staticmethod
    def _scale(step: StepMetrics) -> str:
        if step.loss_scale is None:
            return ""
        skipped = f", {step.skipped} step{'s' if step.skipped > 1 else ''} skipped" if step.skipped else ""
        return f"loss scale {step.loss_scale:g}{skipped}"

    def _line(self, step: StepMetrics) -> str:
        held_out = "" if step.held_out_bits_per_byte is None else f"  held-out {step.held_out_bits_per_byte:.3f}"
        scale = self._scale(step) and f"{self._scale(step)}  "
        return (
            f"step {step.step}/{self._total}  {step.bits_per_byte:.3f} bits per byte{held_out}  {scale}"
            f"{format_count(self._tokens_per_s or 0)} tokens/s  {format_bytes(step.memory_bytes)} per rank  "
            f"{self._eta(step)} left"
        )

    def _picture(self, step: StepMetrics) -> Group:
        head = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None):
            head.add_column(ratio=ratio, no_wrap=True)
        bar = ProgressBar(total=self._total, completed=step.step, complete_style="cyan", finished_style="green")
        head.add_row(f"step [bold]{step.step}[/bold]/{self._total}", bar, f"{self._eta(step)} left")
        body = Text("  ").join(
            part
            for part in [
                Text.assemble((f"{step.bits_per_byte:.3f}", "bold"), " bits per byte"),
                Text(sparkline(self._losses), style="cyan"),
                Text("" if self._held_out is None else f"held-out {self._held_out:.3f}", style="magenta"),
                Text(self._scale(step), style="yellow" if step.skipped else "dim"),
                Text(f"{format_count(self._tokens_per_s or 0)} tokens/s", style="dim"),
                Text(f"{format_bytes(step.memory_bytes)} per rank", style="dim"),
            ]
            if part
        )
        body.no_wrap, body.overflow = True, "ellipsis"
        return Group(head, body)
