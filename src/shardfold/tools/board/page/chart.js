// A chart of lines with bands from least to largest, on a canvas: 200 lines of 600 points are drawn in one frame.
// It is read by pointer, by keys and as a table.

import { get } from "./asking.js";
import { button, bytes, count, duration, make, number, table, tell } from "./parts.js";

const LEFT = 64, RIGHT = 10, TOP = 8, BOTTOM = 22;
const COLOURS = 8;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const NAMED = 8; // lines whose values are shown at once
const ROWS = 24; // of the table
const POINTS = 1000; // of a curve, unless there are many: more than pixels, so that a narrow window shows what a wide one does
const PART = 5000; // milliseconds after which a part is looked at again

export const AXES = {
  step: { name: "step", shown: (value) => number(Math.round(value)), tick: count },
  tokens: { name: "tokens", shown: count, tick: count },
  seconds: { name: "time", shown: duration, tick: duration },
};

/** The class that colours line `slot`. */
export function slotClass(slot) {
  return "s" + slot % COLOURS;
}

/** The sign of line `slot` in a list: its colour and its dashes. */
export function swatch(slot) {
  const line = make("polyline", { points: "0,5 22,5", "stroke-dasharray": dashes(slot).join(" ") || null });
  return make("svg", { class: "swatch " + slotClass(slot), viewBox: "0 0 22 10", "aria-hidden": "true" }, line);
}

function dashes(slot) {
  return DASHES[Math.floor(slot / COLOURS) % DASHES.length];
}

/** The mean of what came before, in which a value weighs `weight` times less for each `unit` of the axis that it is older:
 * so lines with few points are smoothed as those with many. What is not finite is no part of it. */
export function smoothed(points, weight, unit) {
  let held = 0, size = 0, before = -Infinity;
  return points.map(([x, , , mean]) => {
    if (mean === null || !Number.isFinite(mean)) return [x, NaN];
    const left = weight ** ((x - before) / unit);
    held = left * held + (1 - left) * mean;
    size = left * size + (1 - left);
    before = x;
    return [x, held / size];
  });
}

/** At most `most` points, and the last one as it is: of those that share one the first place, least, largest, mean, and how
 * many are no numbers. */
export function thinned(points, most) {
  const every = Math.ceil((points.length - 1) / Math.max(1, most - 1));
  if (every < 2) return points;
  const found = [];
  for (let at = 0; at < points.length - 1; at += every) {
    const some = points.slice(at, Math.min(at + every, points.length - 1)), good = some.filter(([, , , mean]) => mean !== null);
    const strange = some.reduce((sum, each) => sum + each[4], 0);
    found.push(good.length ? [some[0][0], Math.min(...good.map((each) => each[1])), Math.max(...good.map((each) => each[2])),
      good.reduce((sum, each) => sum + each[3], 0) / good.length, strange] : [some[0][0], null, null, null, strange]);
  }
  return [...found, points[points.length - 1]];
}

/** Round numbers, the first and last of which are around all values. */
export function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  let size = 10 ** Math.floor(Math.log10(span / most));
  for (const digit of [1, 2, 5, 10, 20])
    if (span / (size * digit) <= most) { size *= digit; break; }
  const first = Math.floor(low / size + 1e-9), last = Math.max(Math.ceil(high / size - 1e-9), first + 1);
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * size).toPrecision(12)));
}

function decades(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.max(Math.ceil(Math.log10(high)), first + 1);
  const step = Math.ceil((last - first) / 5);
  const found = [];
  for (let power = first; power < last + step; power += step) found.push(10 ** power);
  return found;
}

/** Texts of marks, with as many digits as tell them apart. */
function markTexts(marks, unit) {
  const shown = unit === number ? count : unit;
  const found = [3, 4, 5, 6].map((digits) => marks.map((mark) => shown(mark, digits)));
  return found.find((texts) => new Set(texts).size === texts.length) || found[0];
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low && x - points[low - 1][0] < points[low][0] - x ? low - 1 : low;
}

/** The pen of an empty canvas of so many pixels of the page. */
function cleared(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
}

export class Chart {
  /** `onZoom(from, to)`: a part was marked; without numbers: all is wanted again. `unit`: how values are shown. */
  constructor(title, { onZoom, unit = number }) {
    this.title = title;
    this.unit = unit;
    this.series = [];
    this.axis = "step";
    this.weight = 0;
    this.log = false;
    this.at = null;
    this._onZoom = onZoom;
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this._over = make("canvas", { "aria-hidden": "true" }); // what follows the pointer, so that lines are not drawn again for it
    this._tip = make("div", { class: "tip", hidden: true });
    this._mark = make("div", { class: "mark", hidden: true });
    this._none = make("p", { class: "muted none", hidden: true }, "No points yet.");
    this._spoken = make("p", { class: "aside", role: "status" });
    this.plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart" },
      this.canvas, this._over, this._mark, this._tip, this._none);
    this._back = button("Show all", () => this._onZoom(), { hidden: true, class: "small" });
    this._told = make("span", { class: "told" });
    const summary = make("summary", {}, "Values");
    this._values = make("details", { toggle: () => this._fillTable() }, summary, make("div"));
    this.element = make("figure", { class: "chart" },
      make("figcaption", {}, make("h2", {}, title), this._told, this._back), this.plot, this._values, this._spoken);
    this._listen();
    new ResizeObserver(() => { if (this._given && this.pixels !== this._thin) this.set(...this._given); else this.draw(); }).observe(this.plot);
    const again = () => { if (this.element.isConnected) this.draw(); else removeEventListener("scheme", again); };
    addEventListener("scheme", again);
  }

  get pixels() {
    return Math.max(100, Math.round((this.plot.clientWidth || 600) - LEFT - RIGHT));
  }

  /** `series`: [{name, slot, points: [[x, least, largest, mean, how many are no numbers], ...]}]; null is no number. */
  set(given, { axis = "step", weight = 0, log = false, zoomed = false } = {}) {
    this._given = [given, { axis, weight, log, zoomed }];
    this._thin = this.pixels;
    const series = given.map((each) => ({ ...each, points: thinned(each.points, this._thin) }));
    Object.assign(this, { series, axis, weight, log });
    this._back.hidden = !zoomed;
    tell(this._none, zoomed ? "No points in this part." : "No points yet.");
    const longest = this._longest(), unit = longest.length > 1
      ? (longest[longest.length - 1][0] - longest[0][0]) / (longest.length - 1) : 1;
    this.lines = series.map((each) => weight
      ? smoothed(each.points, weight, unit) : each.points.map(([x, , , mean]) => [x, mean]));
    const told = series.length === 1 ? this._last(0) : series.length <= 2
      ? series.map((each, place) => `${each.name} ${this._last(place)}`).join(", ") : `${series.length} lines`;
    const shown = [told, ...series.map(({ slot }) => slot)].join();
    if (shown !== this._shown) {
      this._shown = shown;
      this._told.replaceChildren(...(series.length === 2 ? series.flatMap((each, place) =>
        [place ? ", " : "", swatch(each.slot), `${each.name} ${this._last(place)}`]) : [told]));
    }
    this.plot.setAttribute("aria-label", `${this.title} by ${AXES[axis].name}, ${told}. Left and right read values, plus `
      + "and minus zoom, 0 shows all.");
    if (this._values.open) this._fillTable();
    this.draw();
  }

  _longest() {
    return this.series.reduce((one, each) => each.points.length > one.length ? each.points : one, []);
  }

  _last(place) {
    const points = this.series[place].points;
    return points.length ? this.unit(points[points.length - 1][3] ?? NaN) : "–";
  }

  _range() {
    let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
    for (const { points } of this.series) {
      for (const [x, least, largest] of points) {
        if (x < left) left = x;
        if (x > right) right = x;
        if (Number.isFinite(least) && least !== null && (!this.log || least > 0) && least < low) low = least;
        if (Number.isFinite(largest) && largest !== null && (!this.log || largest > 0) && largest > high) high = largest;
      }
    }
    return { left, right, low, high };
  }

  draw() {
    if (this._waits) return;
    this._waits = requestAnimationFrame(() => { this._waits = 0; this._paint(); });
  }

  _paint() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !height || !this.lines) return;
    const pen = cleared(this.canvas, width, height);
    const range = this._range();
    this._none.hidden = range.left <= range.right;
    this.place = null;
    if (!this._none.hidden) { cleared(this._over, width, height); return; }
    if (range.low > range.high) { range.low = this.log ? 0.1 : 0; range.high = 1; }
    if (range.low === range.high && !this.log) { // a flat line is in the middle
      const room = Math.abs(range.low) / 10 || 1;
      range.low -= room;
      range.high += room;
    }
    const round = this.unit === bytes ? 1024 ** Math.floor(Math.log2(Math.max(1, range.high)) / 10) : 1;
    const marks = this.log ? decades(range.low, range.high)
      : ticks(range.low / round, range.high / round, height < 160 ? 3 : 5).map((mark) => mark * round);
    const of = this.log ? Math.log10 : (value) => value;
    const bottom = of(marks[0]), top = of(marks[marks.length - 1]);
    const across = (width - LEFT - RIGHT) / (range.right - range.left || 1), up = (height - TOP - BOTTOM) / (top - bottom);
    this.place = {
      x: (value) => LEFT + (value - range.left) * across,
      y: (value) => height - BOTTOM - (of(value) - bottom) * up,
      back: (pixel) => range.left + (pixel - LEFT) / across,
      ...range, width, height,
    };
    this._grid(pen, marks);
    this._lines(pen);
    if (this.at === null) this._cross();
    else if (this.at < range.left || this.at > range.right) this._hide();
    else this._show(this.at, this._beside, false);
  }

  _colour(name) {
    this._probe ||= this.element.appendChild(make("i", { hidden: true }));
    this._probe.setAttribute("class", name);
    return getComputedStyle(this._probe).color;
  }

  _grid(pen, marks) {
    const { x, y, left, right, width, height } = this.place;
    const muted = this._colour("muted"), line = this._colour("line");
    pen.font = "11px system-ui, sans-serif";
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const texts = markTexts(marks, this.unit);
    marks.forEach((mark, place) => {
      const at = Math.round(y(mark)) + 0.5;
      pen.strokeStyle = line;
      pen.beginPath();
      pen.moveTo(LEFT, at);
      pen.lineTo(width - RIGHT, at);
      pen.stroke();
      pen.fillStyle = muted;
      pen.fillText(texts[place], LEFT - 6, at);
    });
    pen.textBaseline = "alphabetic";
    const inner = ticks(left, right, width < 480 ? 4 : 6).filter((each) => each >= left && each <= right
      && (this.axis !== "step" || Number.isInteger(each)));
    const across = inner.length > 1 ? inner : [left, right];
    markTexts(across, AXES[this.axis].tick).forEach((text, place) => {
      const half = pen.measureText(text).width / 2;
      pen.textAlign = "center";
      pen.fillText(text, Math.min(width - half, Math.max(half, x(across[place]))), height - 6);
    });
  }

  _lines(pen) {
    const { x, y } = this.place, good = (value) => Number.isFinite(value) && value !== null && (!this.log || value > 0);
    const many = this.series.length > 12;
    pen.lineJoin = "round";
    this.series.forEach(({ slot, points }, place) => {
      const colour = this._colour(slotClass(slot));
      pen.strokeStyle = pen.fillStyle = colour;
      if (!many && points.some(([, least, largest]) => largest > least)) this._band(pen, points, good);
      pen.setLineDash(dashes(slot));
      if (this.weight && !many) {
        pen.globalAlpha = 0.3;
        pen.lineWidth = 1;
        this._line(pen, points.map(([at, , , mean]) => [at, mean]), good);
        pen.globalAlpha = 1;
      }
      pen.lineWidth = many ? 1 : 1.6;
      this._line(pen, this.lines[place], good);
      pen.setLineDash([]);
      if (points.length === 1 && good(points[0][3])) {
        pen.beginPath();
        pen.arc(x(points[0][0]), y(points[0][3]), 3, 0, 7);
        pen.fill();
      }
      this._strange(pen, points);
    });
  }

  _band(pen, points, good) {
    const { x, y } = this.place;
    pen.globalAlpha = 0.18;
    let part = [];
    const fill = () => {
      if (part.length > 1) {
        pen.beginPath();
        part.forEach(([at, , largest], place) => place ? pen.lineTo(x(at), y(largest)) : pen.moveTo(x(at), y(largest)));
        for (const [at, least] of part.toReversed()) pen.lineTo(x(at), y(least));
        pen.fill();
      }
      part = [];
    };
    for (const point of points) if (good(point[1]) && good(point[2])) part.push(point); else fill();
    fill();
    pen.globalAlpha = 1;
  }

  _line(pen, line, good) {
    const { x, y } = this.place;
    let draws = false;
    pen.beginPath();
    for (const [at, value] of line) {
      if (!good(value)) { draws = false; continue; }
      if (draws) pen.lineTo(x(at), y(value)); else pen.moveTo(x(at), y(value));
      draws = true;
    }
    pen.stroke();
  }

  /** Crosses at the upper edge where values are no numbers. */
  _strange(pen, points) {
    const { x } = this.place;
    let before = -Infinity;
    pen.lineWidth = 1.5;
    for (const [at, , , , strange] of points) {
      const there = x(at);
      if (!strange || there - before < 7) continue;
      before = there;
      pen.beginPath();
      pen.moveTo(there - 3, TOP - 3);
      pen.lineTo(there + 3, TOP + 3);
      pen.moveTo(there + 3, TOP - 3);
      pen.lineTo(there - 3, TOP + 3);
      pen.stroke();
    }
  }

  _cross() {
    if (!this.place) return;
    const { x, y, width, height } = this.place, pen = cleared(this._over, width, height);
    if (this.at === null) return;
    pen.strokeStyle = this._colour("muted");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x(this.at), TOP);
    pen.lineTo(x(this.at), height - BOTTOM);
    pen.stroke();
    for (const { slot, value, at } of this._under(this.at, null)) {
      if (!Number.isFinite(value)) continue;
      pen.fillStyle = this._colour(slotClass(slot));
      pen.beginPath();
      pen.arc(x(at), y(value), 3.5, 0, 7);
      pen.fill();
    }
  }

  /** What lines are at `at`: of many, those that are nearest to the pixel `beside`. */
  _under(at, beside) {
    const found = this.series.flatMap((each, place) => {
      if (!each.points.length) return [];
      const point = nearest(each.points, at), value = this.lines[place][point][1] ?? NaN;
      return [{ name: each.name, slot: each.slot, at: each.points[point][0], value, point: each.points[point] }];
    });
    if (found.length <= NAMED) return found;
    const far = ({ value }) => Number.isFinite(value) ? Math.abs(this.place.y(value) - (beside ?? 0)) : Infinity;
    return found.toSorted((one, other) => far(one) - far(other)).slice(0, NAMED);
  }

  _show(at, beside, aloud) {
    if (!this.place) return;
    const first = this._under(at, beside);
    if (!first.length) return;
    const near = first.toSorted((one, other) => Math.abs(one.at - at) - Math.abs(other.at - at))[0].at;
    this.at = near;
    this._beside = beside;
    const rows = this._under(near, beside);
    const head = `${AXES[this.axis].name} ${AXES[this.axis].shown(near)}`;
    this._tip.replaceChildren(make("b", {}, head), ...rows.map(({ name, slot, value, point }) => make("div", {}, swatch(slot),
      make("span", { class: "of" }, name), make("b", {}, this.unit(value ?? NaN)),
      point[2] > point[1] ? make("span", { class: "muted" }, `${this.unit(point[1])} to ${this.unit(point[2])}`) : null,
      point[4] && point[3] !== null ? make("span", { class: "muted" }, "and NaN") : null)));
    this._tip.hidden = false;
    const there = this.place.x(near), left = there > this.place.width / 2;
    this._tip.style.left = left ? "auto" : there + 12 + "px";
    this._tip.style.right = left ? this.place.width - there + 12 + "px" : "auto";
    if (aloud) tell(this._spoken, head + ": " + rows.map((each) => `${each.name} ${this.unit(each.value)}`).join(", "));
    this._cross();
  }

  _hide() {
    this.at = null;
    this._tip.hidden = true;
    this._cross();
  }

  _listen() {
    let began = null;
    const at = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    const inside = (pixel) => Math.min(this.plot.clientWidth - RIGHT, Math.max(LEFT, pixel));
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button || !this.place) return;
      began = inside(at(event));
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.place) return;
      const now = inside(at(event));
      this._show(this.place.back(now), event.clientY - this.plot.getBoundingClientRect().top, false);
      if (began === null) return;
      this._mark.hidden = Math.abs(now - began) < 6;
      this._mark.style.left = Math.min(now, began) + "px";
      this._mark.style.width = Math.abs(now - began) + "px";
    });
    const ends = (event, zooms) => {
      const now = inside(at(event)), from = began;
      began = null;
      this._mark.hidden = true;
      if (zooms && from !== null && this.place && Math.abs(now - from) >= 6)
        this._onZoom(this.place.back(Math.min(now, from)), this.place.back(Math.max(now, from)));
    };
    this.plot.addEventListener("pointerup", (event) => ends(event, true));
    this.plot.addEventListener("pointercancel", (event) => ends(event, false));
    this.plot.addEventListener("pointerleave", () => { if (began === null) this._hide(); });
    this.plot.addEventListener("dblclick", () => this._onZoom());
    this.plot.addEventListener("blur", () => this._hide());
    this.plot.addEventListener("keydown", (event) => {
      if (!this.place || event.ctrlKey || event.metaKey || event.altKey) return;
      const { left, right } = this.place, here = this.at ?? right, step = (right - left) / (event.shiftKey ? 10 : 100);
      const longest = this._longest();
      const place = nearest(longest, here);
      const to = {
        ArrowLeft: () => Math.min(longest[Math.max(0, place - 1)][0], event.shiftKey ? here - step : Infinity),
        ArrowRight: () => Math.max(longest[Math.min(longest.length - 1, place + 1)][0], event.shiftKey ? here + step : -Infinity),
        Home: () => left, End: () => right,
      }[event.key];
      if (to) this._show(Math.min(right, Math.max(left, to())), null, true);
      else if (event.key === "+" || event.key === "=")
        this._onZoom(Math.max(left, here - (right - left) / 4), Math.min(right, here + (right - left) / 4));
      else if (event.key === "-" || event.key === "0" || event.key === "Escape") this._onZoom();
      else return;
      event.preventDefault();
    });
  }

  /** The same as numbers, at some places of the axis. */
  _fillTable() {
    if (!this._values.open) return;
    const longest = this._longest();
    const every = Math.max(1, Math.ceil(longest.length / ROWS));
    const places = longest.filter((_, place) => place % every === 0 || place === longest.length - 1).map(([x]) => x);
    const columns = [{ name: AXES[this.axis].name, number: true }, ...this.series.map(({ name }) => ({ name, number: true }))];
    const rows = places.map((x) => [AXES[this.axis].shown(x), ...this.series.map((each, place) => {
      if (!each.points.length || each.points[0][0] > x || each.points[each.points.length - 1][0] < x) return "–";
      return this.unit(this.lines[place][nearest(each.points, x)][1] ?? NaN);
    })]);
    this._values.lastElementChild.replaceChildren(table(`${this.title}, values`, columns, rows));
  }
}

/** Points as charts have them: [x, least, largest, mean, how many of it are no numbers]. */
function filled(points) {
  return points.map(([x, least, largest = least, mean = least, strange = mean === null ? 1 : 0]) => [x, least, largest, mean, strange]);
}

/** Points of lines by cursor: a level for the pixels there are, then only what is new, and a finer or coarser level when
 * there is too much of it or a part is looked at. */
export class Curves {
  constructor() {
    this.held = new Map();
    this.by = "step"; // what the points are over
    this.share = 1; // of the files that was read
    this._cursor = null;
    this._for = "";
  }

  /** New points of `keys` of runs `ids`; true: something changed. `pixels`: points that are enough, also at the end. */
  async turn(ids, keys, { by = "step", from = null, to = null, pixels: enough = null }, signal) {
    const pixels = enough ?? POINTS;
    const asked = JSON.stringify([ids, keys, by, from, to, Math.round(pixels / 100)]), now = performance.now();
    if (from !== null && asked === this._for && now - this._asked < PART) return false;
    const most = 3 * pixels, full = [...this.held.values()].some((points) => points.length > most);
    const after = asked === this._for && !full && from === null ? this._cursor : null;
    const said = await get("curves", { id: ids, key: keys, by, from, to, pixels, after }, signal);
    this._asked = now;
    if (after === null) this.held = new Map();
    let changed = after === null;
    for (const each of said.series) {
      const name = each.id + "\n" + each.key, before = this.held.get(name), points = filled(each.points);
      if (before === undefined || each.whole) this.held.set(name, points);
      else this._join(before, points, to);
      changed ||= each.whole || points.length > 0;
    }
    if (from === null && enough === null)
      for (const id of ids) await this._end(id, said.series.filter((each) => each.id === id && each.whole && each.level > 1), by, pixels, signal);
    this.by = by;
    this._cursor = said.cursor;
    this.share = said.read ?? 1;
    this._for = asked;
    return changed;
  }

  /** Rows as they are in place of the last point of several: so the last value is that of the last row. */
  async _end(id, series, by, pixels, signal) {
    const from = Math.max(...series.map(({ points }) => points[points.length - 1]?.[0] ?? -Infinity));
    if (!Number.isFinite(from)) return;
    const said = await get("curves", { id, key: series.map((each) => each.key), by, from, pixels }, signal);
    for (const each of said.series) this._join(this.held.get(id + "\n" + each.key), filled(each.points), null);
  }

  /** A run that goes on from an earlier step says those steps again. */
  _join(before, points, to) {
    if (!points.length) return;
    while (before.length && before[before.length - 1][0] >= points[0][0]) before.pop();
    for (const point of points) if (to === null || point[0] <= to) before.push(point);
  }

  of(id, key) {
    return this.held.get(id + "\n" + key) || [];
  }
}
