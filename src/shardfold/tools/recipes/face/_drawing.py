"""Pictures for a page as text: curves as SVG, bars as HTML, images as PNG in the page; no library draws them."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardfold.tools.recipes.face.images import ImageSource

__all__ = ["STYLE", "ChartAxis", "bars", "curves", "faces", "key", "png"]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 440, 270, 50, 40, 12, 12
HUES = 5

STYLE = """
:root { --hue-0: #2166ac; --hue-1: #c2410c; --hue-2: #2f855a; --hue-3: #8250c4; --hue-4: #b7791f; --bar: #2166ac;
  --bar-2: #8fb6da; }
@media (prefers-color-scheme: dark) { :root { --hue-0: #6aaae8; --hue-1: #f08a4b; --hue-2: #63c08d; --hue-3: #b794f4;
  --hue-4: #e0b04c; --bar: #6aaae8; --bar-2: #35577a; } }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .axis { fill: var(--muted); font-size: 11.5px; }
.hue-0 { stroke: var(--hue-0); } .hue-1 { stroke: var(--hue-1); } .hue-2 { stroke: var(--hue-2); }
.hue-3 { stroke: var(--hue-3); } .hue-4 { stroke: var(--hue-4); }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; color: var(--muted); margin: .5rem 0; }
.keys i { display: inline-block; width: 1rem; height: .22rem; margin-right: .35rem; vertical-align: middle; }
.bars { display: grid; grid-template-columns: auto 1fr; gap: .3rem .9rem; align-items: center; margin: .8rem 0;
  font-size: .9rem; font-variant-numeric: tabular-nums; }
.bars .what { white-space: nowrap; }
.bars .track { display: grid; gap: 2px; } .bars .bar { display: flex; align-items: center; gap: .5rem; }
.bars .bar i { display: block; height: .85rem; border-radius: 0 .2rem .2rem 0; background: var(--bar-2); flex: none; }
.bars .bar i.strong { background: var(--bar); } .bars .bar span { white-space: nowrap; font-size: .8rem; }
.faces { width: 100%; image-rendering: pixelated; border-radius: .4rem; display: block; }
@media (max-width: 36rem) { .bars { grid-template-columns: 1fr; gap: .1rem; } .bars .what { margin-top: .45rem; } }
"""


class ChartAxis(NamedTuple):
    """Of a chart: what it is of, from where to where, and whether by powers of ten."""

    title: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """From 0 to 1."""
        if self.log:
            value, low, high = (math.log10(max(v, 1e-12)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(max((value - low) / (high - low or 1), 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round numbers along it."""
        if self.log:
            return [
                10.0**n for n in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high) + 1e-9) + 1)
            ]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2 or 1))
        step *= next((m for m in (1, 2, 5) if (self.high - self.low) / (step * m) <= 6), 5)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def curves(lines: Sequence[Sequence[tuple[float, float]]], x: ChartAxis, y: ChartAxis, *, label: str) -> str:
    """Lines in one chart, each in its hue.

    Args:
        label: what a screen reader says of it.
    """
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(value: float) -> float:
        return LEFT + x.place(value) * wide

    def down(value: float) -> float:
        return TOP + (1 - y.place(value)) * high

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">']
    for tick in y.ticks():
        at = down(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x.ticks():
        at = across(tick)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_number(tick)}</text>'
        )
    for number, line in enumerate(lines):
        points = " ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in line if math.isfinite(b))
        parts.append(f'<polyline class="curve hue-{number % HUES}" points="{points}"/>')
    parts.append(
        f'<text class="axis" x="{LEFT + wide / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{html.escape(x.title)}</text>"
    )
    parts.append(
        f'<text class="axis" transform="translate(12 {TOP + high / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y.title)}</text></svg>"
    )
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10000 else f"{value:.4g}"


def key(names: Sequence[str]) -> str:
    """Which hue is whose."""
    spans = [
        f'<span><i style="background:var(--hue-{number % HUES})"></i>{html.escape(name)}</span>'
        for number, name in enumerate(names)
    ]
    return f'<div class="keys">{"".join(spans)}</div>'


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], most: float) -> str:
    """A pair of bars for each row, the second one strong.

    Args:
        rows: what it is, and the length and the words of each bar.
        most: the length that is as wide as the page; words stand behind.
    """
    parts = ['<div class="bars">']
    for what, pair in rows:
        parts.append(f'<div class="what">{html.escape(what)}</div><div class="track">')
        for n, (value, words) in enumerate(pair):
            strong = ' class="strong"' if n else ""
            parts.append(
                f'<div class="bar"><i{strong} style="width:{62 * value / most:.1f}%"></i>'
                f"<span>{html.escape(words)}</span></div>"
            )
        parts.append("</div>")
    return "".join([*parts, "</div>"])


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels ``(rows, columns)`` or ``(rows, columns, 3)`` as a PNG file."""
    rows, columns = pixels.shape[:2]
    kind = 2 if pixels.ndim == 3 else 0
    lines = b"".join(b"\0" + line.tobytes() for line in np.ascontiguousarray(pixels))
    header = struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def faces(source: ImageSource, identities: int = 6, shots: int = 8) -> str:
    """A row of images for each of some identities, as an element of the page."""
    rows: list[npt.NDArray[np.uint8]] = []
    for identity in range(min(identities, len(source.names))):
        mine = np.flatnonzero(source.labels == identity)[:shots]
        images = source.read(mine.tolist())
        blank = np.full((shots - len(mine), *images.shape[1:]), 255, np.uint8)
        together = np.concatenate([images, blank]).transpose(2, 0, 3, 1)
        rows.append(together.reshape(images.shape[2], -1, images.shape[1]))
    sheet = np.concatenate(rows)
    sheet = sheet[:, :, 0] if sheet.shape[2] == 1 else sheet
    text = base64.b64encode(png(sheet)).decode()
    words = f"images of {min(identities, len(source.names))} identities that were kept apart, a row for each"
    return f'<img class="faces" alt="{words}" src="data:image/png;base64,{text}">'
