"""Numbers as people read them: bytes, counts, durations, a curve as one line of bars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["format_bytes", "format_count", "format_duration", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return the values as bars one character high, averaged down to `width` of them."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def format_bytes(number: float) -> str:
    """Return a number of bytes with a binary unit and three or four digits."""
    if abs(number) < 1024:
        return f"{number:.0f} B"
    value, unit = scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.1f} {unit}"


def format_count(number: float) -> str:
    """Return a count with an SI suffix: 1.35M."""
    value, suffix = scaled(number, 1000, ("", "k", "M", "G", "T"))
    return f"{value:.3g}{suffix}"


def scaled(number: float, base: int, units: Sequence[str]) -> tuple[float, str]:
    power = 0
    while abs(number) >= base and power < len(units) - 1:
        number /= base
        power += 1
    return number, units[power]


def format_duration(seconds: float) -> str:
    """Return m:ss, or h:mm:ss from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
