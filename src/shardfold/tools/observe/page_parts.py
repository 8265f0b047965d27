"""What pages are made of: the frame and its style, tiles, tables. Text without a script; values are escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["STYLE", "page", "scroll", "table", "tiles"]

NUMBER = ' class="number"'

STYLE = """
:root { color-scheme: light dark; --ink: #22252b; --muted: #6b7480; --line: #e3e6ea; --paper: #fff; --card: #f6f7f9;
  --train: #2166ac; --held: #c2410c; --other: #8b95a1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --muted: #9aa4b0; --line: #333a44; --paper: #16191e;
  --card: #1e2329; --train: #6aaae8; --held: #f08a4b; --other: #7b8693; } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; } p { margin: .3rem 0; }
.muted { color: var(--muted); }
.tiles { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); margin-top: 1.2rem; }
.tile { background: var(--card); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
svg { width: 100%; height: auto; display: block; } .grid { stroke: var(--line); }
.tick { fill: var(--muted); font-size: 11px; }
.line { fill: none; stroke: var(--train); stroke-width: 2; stroke-linejoin: round; }
.line.faint { opacity: .25; stroke-width: 1; }
.line.held { stroke: var(--held); } .line.other { stroke: var(--other); stroke-width: 1; stroke-dasharray: 5 4; }
.dot { fill: var(--train); } .dot.held { fill: var(--held); } .dot.other { fill: var(--other); }
.name { font-size: 11px; fill: var(--train); } .name.held { fill: var(--held); } .name.other { fill: var(--muted); }
.scroll { overflow-x: auto; } .charts > div { min-width: 0; }
@media (max-width: 40rem) { .scroll > svg { min-width: 34rem; } }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 50%; }
th, td { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); font-weight: 400;
  white-space: nowrap; }
th { color: var(--muted); } td.number, th.number { text-align: right; }
pre { background: var(--card); border-radius: .5rem; padding: .9rem; overflow: auto; font-size: .82rem;
  max-height: 34rem; }
"""


def page(title: str, sections: Iterable[str], *, style: str = "") -> str:
    """A whole page of these elements.

    Args:
        style: rules of its own, behind those that pages share.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head><body>",
            *sections,
            "</body></html>",
            "",
        ]
    )


def tiles(shown: Iterable[tuple[str, str]]) -> str:
    """Of each name and value a tile."""
    each = (
        f'<div class="tile"><span class="muted">{html.escape(name)}</span><b>{html.escape(value)}</b></div>'
        for name, value in shown
    )
    return f'<div class="tiles">{"".join(each)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns whose first cell has a digit are numbers, and stand to the right."""
    numbers = [any(letter.isdigit() for letter in cell) for cell in rows[0]] if rows else [False] * len(head)

    def row(cells: Sequence[str], tag: str) -> str:
        shown = zip(numbers, map(html.escape, cells), strict=True)
        return "<tr>" + "".join(f"<{tag}{NUMBER * number}>{cell}</{tag}>" for number, cell in shown) + "</tr>"

    body = "".join(row(each, "td") for each in rows)
    return scroll(f"<table>{row(head, 'th')}{body}</table>")


def scroll(inner: str) -> str:
    """What a narrow page shows a part of at a time."""
    return f'<div class="scroll">{inner}</div>'
