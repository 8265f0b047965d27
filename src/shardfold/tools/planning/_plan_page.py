"""A plan as one HTML file that needs nothing else: memory over time, and sliders that compute it anew in the page.

The page has the numbers of :mod:`shardfold.planner.surface` and the few sums that these are for, written in JavaScript
once more; a test moves its sliders and holds what it shows beside the planner's own figures. Positions may stand
behind ``#`` in the address, as ``#ranks=8&samples=4&layout=zero3&axes=tensor=2``.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardfold.planner.hardware import Cluster
from shardfold.planner.setting import Subject
from shardfold.planner.surface import Activity, activity_of, surface_of
from shardfold.tools.observe.page_parts import page
from shardfold.tools.planning.known_models import Planned
from shardfold.tools.planning.show import states

__all__ = ["plan_page", "plan_values"]

DIGITS = 10
MORE = """
.sliders { display: grid; gap: .6rem 1.4rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); }
.sliders label { display: block; } .sliders input, .sliders select { width: 100%; }
.area { stroke: none; opacity: .75; } .area.rest { fill: var(--other); } .area.engine { fill: var(--train); }
.area.model { fill: var(--held); } .limit { stroke: var(--ink); stroke-dasharray: 6 4; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; border-radius: .15rem; }
"""

SCRIPT = """
const plans = JSON.parse(document.getElementById('plan').textContent);
let plan = Object.values(plans)[0];
const shown = name => document.getElementById(name);
const bytes = n => { const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB']; let k = 0;
  while (n >= 1024 && k < 5) { n /= 1024; k += 1; } return n.toFixed(k ? 2 : 0) + ' ' + units[k]; };
const on = (row, s, l, i) => row[0][i] + row[1][i] * s + row[2][i] * l + row[3][i] * s * l;
function compute(layout, mode, ranks, samples, length) {
  const walked = (plan.apart[mode] || plan.layouts)[layout], model = plan.modes[mode];
  const points = walked[ranks === 1 ? 'one' : 'many'];
  const b = model.batch, batch = b[0] + b[1] * samples + b[2] * length + b[3] * samples * length;
  const rest = points.rest[0] + points.rest[1] / ranks, host = points.host[0] + points.host[1] / ranks;
  const rows = points.event.map((event, n) => {
    const engine = points.workspace + points.whole[n] + points.divided[n] / ranks;
    const held = batch + on(points.level[n] ? model.level : model.peak, samples, length, event);
    return { event: event, engine: engine, held: held, total: rest + engine + held };
  });
  let top = rows[0];
  for (const row of rows) if (row.total > top.total) top = row;
  return { rest: rest, host: host, rows: rows, top: top, name: model.names[top.event] };
}
function draw(found, budget) {
  const width = 900, height = 300, left = 80, base = 280, near = budget <= 4 * found.top.total,
    most = Math.max(found.top.total, near ? budget : 0) * 1.04;
  const x = n => left + n * (width - left) / Math.max(found.rows.length - 1, 1), y = v => base - v / most * (base - 10);
  const area = (name, low, high) => '<path class="area ' + name + '" d="M' +
    found.rows.map((row, n) => x(n).toFixed(1) + ' ' + y(high(row)).toFixed(1)).join('L') + 'L' +
    found.rows.map((row, n) => x(n).toFixed(1) + ' ' + y(low(row)).toFixed(1)).reverse().join('L') + 'Z"/>';
  const ticks = [0, 1, 2, 3, 4].map(k => most * k / 4.4).map(v => '<line class="grid" x1="' + left + '" x2="' + width +
    '" y1="' + y(v) + '" y2="' + y(v) + '"/><text class="tick" text-anchor="end" x="' + (left - 6) + '" y="' +
    (y(v) + 4) + '">' + bytes(v) + '</text>').join('');
  const limit = '<line class="limit" x1="' + left + '" x2="' + width + '" y1="' + y(budget) + '" y2="' +
    y(budget) + '"/>';
  return '<svg viewBox="0 0 ' + width + ' ' + (height) + '" role="img" aria-label="bytes over a step">' + ticks +
    area('rest', row => 0, row => found.rest) + area('engine', row => found.rest, row => found.rest + row.engine) +
    area('model', row => found.rest + row.engine, row => row.total) + (near ? limit : '') + '</svg>';
}
function show() {
  const value = name => shown(name) ? Number(shown(name).value) : 0;
  const ranks = 2 ** value('ranks'), samples = value('samples'), length = value('length');
  plan = plans[shown('axes').value];
  const layout = shown('layout').value, mode = shown('mode').value, budget = value('memory') * 2 ** 30;
  const found = compute(layout, mode, ranks, samples, length);
  shown('ranks-at').textContent = ranks; shown('samples-at').textContent = samples;
  if (shown('length')) shown('length-at').textContent = length;
  shown('memory-at').textContent = value('memory') + ' GiB';
  shown('peak').textContent = bytes(found.top.total); shown('peak').dataset.bytes = found.top.total;
  shown('where').textContent = found.name; shown('rest').textContent = bytes(found.rest);
  shown('host').textContent = bytes(found.host);
  shown('fits').textContent = found.top.total <= budget ? 'fits' : 'too much';
  shown('chart').innerHTML = draw(found, budget);
  const names = Object.keys(plan.layouts), modes = Object.keys(plan.modes);
  const cell = (name, m) => { const total = compute(name, m, ranks, samples, length).top.total;
    return '<td class="number">' + bytes(total) + (total <= budget ? '' : ' (too much)') + '</td>'; };
  const row = name => '<tr><td>' + name + '</td>' + modes.map(m => cell(name, m)).join('') + '</tr>';
  shown('table').innerHTML = '<tr><th>layout</th>' + modes.map(m => '<th class="number">' + m + '</th>').join('') +
    '</tr>' + names.map(row).join('');
}
for (const [name, given] of new URLSearchParams(location.hash.slice(1)))
  if (shown(name)) shown(name).value = name === 'ranks' ? Math.log2(Number(given)) : given;
for (const each of document.querySelectorAll('.sliders input, .sliders select')) each.addEventListener('input', show);
show();
"""


def plan_values(
    planned: Planned, shorter: Subject | None, layouts: Sequence[str], modes: Sequence[str], precision: str
) -> dict[str, Any]:
    """What the page computes with."""
    length = planned.length if shorter is not None else 0
    activities = {mode: activity_of(planned.subject, shorter, precision, mode, length) for mode in modes}
    first = activities[modes[0]]

    def points(activity: Activity, mode: str) -> dict[str, Any]:
        found = {name: surface_of(planned.subject, name, activity, precision, mode) for name in layouts}
        return {name: {"one": each.one._asdict(), "many": each.many._asdict()} for name, each in found.items()}

    apart = {mode: points(each, mode) for mode, each in activities.items() if each.names != first.names}
    return {
        "layouts": points(first, modes[0]),
        "apart": apart,
        "modes": {mode: _short(each)._asdict() for mode, each in activities.items()},
    }


def _short(activity: Activity) -> Activity:
    """Its numbers with as many digits as a page needs."""

    def cut(rows: list[list[float]]) -> list[list[float]]:
        return [[float(f"{value:.{DIGITS}g}") for value in row] for row in rows]

    return activity._replace(peak=cut(activity.peak), level=cut(activity.level))


def plan_page(
    models: Mapping[str, tuple[Planned, Subject | None]],
    where: Cluster,
    *,
    layouts: Sequence[str],
    modes: Sequence[str],
    precision: str,
    samples: int,
) -> str:
    """The page as text.

    Args:
        models: by how ranks share it the model, and it with samples of half the length; None: they have none.
        where: devices, which give the memory and the first number of ranks.
        layouts: names.
        modes: of activations.
        precision: policy.
        samples: of a micro-batch, to begin with.
    """
    values = {axes: plan_values(*each, layouts, modes, precision) for axes, each in models.items()}
    planned, shorter = next(iter(models.values()))
    title = f"{planned.name}: memory of a step"
    staged = any(each.subject.staged for each, _ in models.values())
    through = ", through stages of as many as are said there" if staged else ""
    ranks = max((where.size // planned.subject.division.ranks).bit_length() - 1, 0)
    memory = where.device.usable / 2**30
    sliders = [
        _choice("layout", "layout", layouts),
        _choice("mode", "activations", modes),
        _choice("axes", "axes", list(models)),
        _slider("ranks", "ranks of data", 0, max(10, ranks), 1, ranks),
        _slider("samples", "samples of a micro-batch", 1, max(64, 2 * samples), 1, samples),
        _slider("memory", "memory of a device", 0.25, max(192.0, memory), 0.25, memory),
    ]
    if shorter is not None:
        step = max(1, planned.length // 64)
        sliders.insert(5, _slider("length", "tokens of a sample", step, 2 * planned.length, step, planned.length))
    figures = "".join(
        f'<div class="tile"><span class="muted">{name}</span><b id="{key}"></b></div>'
        for key, name in (
            ("peak", "peak of each device"),
            ("fits", "this device"),
            ("where", "the peak is near"),
            ("rest", "at rest"),
            ("host", "in host memory"),
        )
    )
    kinds = (
        ("other", "at rest"),
        ("train", "the engine's buffers, workspaces"),
        ("held", "the micro-batch, forward, backward"),
    )
    legend = "".join(f'<span class="key" style="background: var(--{c})"></span>{name}' for c, name in kinds)
    data = json.dumps(values, separators=(",", ":")).replace("</", "<\\/")
    return page(
        title,
        [
            f"<h1>{html.escape(title)}</h1>",
            f'<p class="muted">{html.escape(states(planned, precision))}; one step of one '
            f"micro-batch{through}; devices with streams, as {html.escape(where.device.name)}.</p>",
            f'<div class="sliders">{"".join(sliders)}</div><div class="tiles">{figures}</div>',
            f"<h2>Bytes of a device over a step</h2><p>{legend}</p>",
            '<div id="chart"></div><h2>All layouts, here</h2><div class="scroll"><table id="table"></table></div>',
            f'<script type="application/json" id="plan">{data}</script><script>{SCRIPT}</script>',
        ],
        style=MORE,
    )


def _slider(key: str, name: str, low: float, high: float, step: float, at: float) -> str:
    return (
        f'<label>{name}: <b id="{key}-at"></b><input type="range" id="{key}" min="{low:g}" max="{high:g}" '
        f'step="{step:g}" value="{at:g}"></label>'
    )


def _choice(key: str, name: str, options: Sequence[str]) -> str:
    each = "".join(f"<option>{html.escape(option)}</option>" for option in options)
    return f'<label>{name}<select id="{key}">{each}</select></label>'
