// The list of runs: true states, filter, order, and a choice to compare. Only what changed travels.

import { get, repeat } from "./asking.js";
import { Curves } from "./chart.js";
import { ago, count, duration, empty, heldOut, isOver, link, make, number, say, setState, stateBadge, tell } from "./parts.js";

const MOST = 200; // rows at a time
const EVERY = 1; // seconds
const SPARK = [88, 22];
const COLUMNS = [
  { key: "state", name: "State" },
  { key: "name", name: "Run" },
  { key: "step", name: "Step", number: true },
  { key: "loss", name: "Loss", number: true },
  { key: "held_out", name: "Held out", number: true },
  { key: "curve", name: "Curve" },
  { key: "rate", name: "Tokens/s", number: true },
  { key: "seconds_left", name: "Left", number: true },
  { key: "ranks", name: "Ranks", number: true },
  { key: "layout", name: "Layout" },
  { key: "age", name: "Last word", number: true },
  { key: "why", name: "Why" },
];

export function runAddress(id, tab = "") {
  return `#/run/${encodeURIComponent(id)}${tab ? "/" + tab : ""}`;
}

class Row {
  constructor(run, ticked, onTick) {
    this.tick = make("input", { type: "checkbox", change: () => onTick(run.id, this.tick.checked) });
    this.tick.checked = ticked;
    this.badge = stateBadge(run.state);
    this.name = link(runAddress(run.id), run.name);
    this.recipe = make("span", { class: "muted recipe" });
    this.bar = make("progress", { max: "1", value: "0", "aria-hidden": "true" });
    this.cells = Object.fromEntries(["step", "loss", "held_out", "rate", "seconds_left", "ranks", "layout", "age", "why"].map(
      (key) => [key, make("span")]));
    this.line = make("polyline");
    const spark = make("svg", { class: "spark", viewBox: `0 0 ${SPARK[0]} ${SPARK[1]}`, "aria-hidden": "true",
      preserveAspectRatio: "none" }, this.line);
    const cell = (key, ...inner) => make("td", { role: "cell", class: key + (COLUMNS.find((one) => one.key === key)?.number
      ? " number" : ""), "data-name": COLUMNS.find((one) => one.key === key)?.name }, inner);
    this.element = make("tr", { role: "row" },
      cell("tick", this.tick), cell("state", this.badge),
      make("th", { role: "rowheader", scope: "row", class: "name" }, this.name, this.recipe),
      cell("step", this.cells.step, this.bar), cell("loss", this.cells.loss), cell("held_out", this.cells.held_out), cell("curve", spark),
      ...["rate", "seconds_left", "ranks", "layout", "age", "why"].map((key) => cell(key, this.cells[key])));
    this.update(run);
  }

  update(run) {
    this.run = run;
    this.heard = performance.now();
    setState(this.badge, run.state);
    this.element.dataset.state = run.state;
    tell(this.name, run.name || run.id);
    this.name.title = run.name || run.id;
    tell(this.recipe, run.recipe || "");
    this.tick.setAttribute("aria-label", `Compare ${run.name}`);
    const { step, loss, held_out: held, rate, seconds_left: left, ranks, layout, why } = this.cells;
    tell(step, run.steps ? `${number(run.step)} / ${number(run.steps)}` : number(run.step));
    this.bar.hidden = !run.steps;
    this.bar.value = run.steps ? run.step / run.steps : 0;
    tell(loss, number(run.loss_mean ?? run.loss));
    loss.title = "Mean of the last 32 steps";
    tell(held, run.held_out ? heldOut(run.held_out) : "–");
    if (run.held_out) delete held.parentElement.dataset.none; else held.parentElement.dataset.none = "1";
    held.title = run.held_out ? `At step ${number(run.held_out.step)}` : "";
    tell(rate, isOver(run) ? "" : count(run.rate));
    tell(left, isOver(run) || run.seconds_left === null ? "" : duration(run.seconds_left));
    tell(ranks, number(run.ranks));
    tell(layout, run.layout || "–");
    layout.title = run.layout || "";
    tell(why, run.why || "");
    why.title = run.why || "";
    this.older();
  }

  older() {
    const since = (performance.now() - this.heard) / 1000;
    tell(this.cells.age, ago(typeof this.run.age === "number" ? this.run.age + since : null));
  }

  draw(points) {
    const good = points.filter(([, , , mean]) => mean !== null && Number.isFinite(mean));
    let low = Infinity, high = -Infinity;
    for (const [, , , mean] of good) { low = Math.min(low, mean); high = Math.max(high, mean); }
    const first = good[0]?.[0] ?? 0, across = (good[good.length - 1]?.[0] ?? 0) - first || 1, up = high - low || 1;
    this.line.setAttribute("points", good.map(([x, , , mean]) =>
      `${((x - first) / across * (SPARK[0] - 2) + 1).toFixed(1)},${((high - mean) / up * (SPARK[1] - 4) + 2).toFixed(1)}`).join(" "));
  }

  matches(filter, kind) {
    const { run } = this, over = isOver(run);
    if (kind === "live" && over || kind === "over" && !over || kind === "bad" && !["failed", "lost", "stalled"].includes(run.state))
      return false;
    const text = [run.name, run.recipe, run.state, run.layout, run.why].join(" ").toLowerCase();
    return filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }
}

export function runsView(main, route, { entitle, trouble }) {
  entitle("Runs");
  const rows = new Map(), ticked = new Set(route.given.getAll("id")), curves = new Curves();
  let cursor = null, known = false, readOnly = false, most = MOST, sort = route.given.get("sort") || "-started";
  const states = new Map();

  const filter = make("input", { type: "search", placeholder: "name, recipe, layout, words", autocomplete: "off",
    input: () => { route.put({ filter: filter.value }); arrange(); } });
  filter.value = route.given.get("filter") || "";
  const kind = make("select", { change: () => { route.put({ kind: kind.value }); arrange(); } },
    [["", "all"], ["live", "under way"], ["over", "over"], ["bad", "failed, lost, stalled"]].map(([value, text]) =>
      make("option", { value }, text)));
  kind.value = route.given.get("kind") || "";
  const order = make("select", { class: "order", change: () => sorted(order.value) }, [["-started", "newest first"],
    ["started", "oldest first"], ["name", "name"], ["loss", "least loss"], ["held_out", "least held out"], ["state", "state"], ["-step", "most steps"]].map(
    ([value, text]) => make("option", { value }, text)));
  const counted = make("p", { class: "muted", role: "status" }), roots = make("p", { class: "muted roots" });
  const compare = make("a", { href: "#/compare", class: "button main" });
  const none = make("button", { type: "button", click: () => {
    for (const row of rows.values()) row.tick.checked = false;
    ticked.clear();
    choose();
    filter.focus();
  } }, "Clear");
  const chosen = make("div", { class: "chosen", hidden: true }, compare, none);
  const heads = new Map();
  const head = COLUMNS.map((each) => {
    if (each.key === "curve" || each.key === "why")
      return make("th", { role: "columnheader", scope: "col", class: each.key }, each.name);
    const press = make("button", { type: "button", click: () => sorted(sort === each.key ? "-" + each.key : each.key) }, each.name,
      make("span", { class: "arrow", "aria-hidden": "true" }));
    const cell = make("th", { role: "columnheader", scope: "col", class: each.key + (each.number ? " number" : "") }, press);
    heads.set(each.key, cell);
    return cell;
  });
  const body = make("tbody", { role: "rowgroup" });
  const more = make("button", { type: "button", hidden: true, click: () => { most += MOST; arrange(); } }, "Show more");
  const place = make("div", { class: "list" });
  const list = make("table", { class: "runs", role: "table", "aria-label": "Runs" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" },
      make("th", { role: "columnheader", scope: "col", class: "tick" }, make("span", { class: "aside" }, "Compare")), head)), body);
  main.append(make("div", { class: "tools" }, make("label", {}, "Find", filter), make("label", {}, "Show", kind),
    make("label", { class: "order" }, "Order", order), counted, roots), chosen, place, more);

  function sorted(by) {
    sort = by;
    route.put({ sort: by === "-started" ? null : by });
    arrange();
  }

  function choose() {
    route.put({ id: [...ticked] });
    chosen.hidden = !ticked.size;
    tell(compare, `Compare ${ticked.size} run${ticked.size === 1 ? "" : "s"}`);
    compare.href = "#/compare?" + new URLSearchParams([...ticked].map((id) => ["id", id]));
  }

  function arrange() {
    const down = sort.startsWith("-"), key = sort.replace("-", "");
    const of = (row) => ({ held_out: row.run.held_out?.value, loss: row.run.loss_mean ?? row.run.loss })[key] ?? row.run[key] ?? null;
    const shown = [...rows.values()].filter((row) => row.matches(filter.value, kind.value)).sort((one, other) => {
      const [left, right] = [of(one), of(other)];
      if (left === null || right === null) return (left === null) - (right === null);
      const before = typeof left === "number" && typeof right === "number" ? left - right
        : String(left).localeCompare(String(right), "en", { numeric: true });
      return (down ? -before : before) || String(one.run.name).localeCompare(String(other.run.name), "en", { numeric: true });
    });
    const had = body.contains(document.activeElement) ? document.activeElement : null; // a row that moves loses the focus
    const wanted = shown.slice(0, most).map((row) => row.element);
    wanted.forEach((each, at) => { if (body.children[at] !== each) body.insertBefore(each, body.children[at] || null); });
    while (body.children.length > wanted.length) body.lastElementChild.remove();
    more.hidden = shown.length <= most;
    for (const [name, cell] of heads) {
      const by = name === key ? (down ? "descending" : "ascending") : null;
      if (by) cell.setAttribute("aria-sort", by); else cell.removeAttribute("aria-sort");
      cell.querySelector(".arrow").textContent = by ? (down ? " ↓" : " ↑") : "";
    }
    order.value = sort;
    const live = [...rows.values()].filter((row) => !isOver(row.run)).length;
    tell(counted, `${shown.length === rows.size ? "" : `${shown.length} of `}${rows.size} run${rows.size === 1 ? "" : "s"}, ${live} under way`);
    const now = !known ? "" : !rows.size ? "none" : !shown.length ? "unlike" : "list";
    if (place.dataset.has !== now) { // else what has the focus would lose it
      place.dataset.has = now;
      place.replaceChildren({
        "": () => "",
        none: () => make("div", { class: "empty" }, make("p", {}, "There are no runs here yet."),
          readOnly ? null : make("p", {}, link("#/new", "Start one", { class: "button main" }))),
        unlike: () => empty("No run is like that."),
        list: () => list,
      }[now]());
    }
    if (had && document.activeElement !== had) had.focus({ preventScroll: true });
    return shown.slice(0, most);
  }

  function heard(run) {
    const before = states.get(run.id);
    if (before && before !== run.state) say(`${run.name} is ${run.state}${run.why ? ": " + run.why : ""}`);
    states.set(run.id, run.state);
    if (rows.has(run.id)) rows.get(run.id).update(run);
    else rows.set(run.id, new Row(run, ticked.has(run.id), (id, on) => { if (on) ticked.add(id); else ticked.delete(id); choose(); }));
  }

  let turns = 0, drawn = "";
  const poll = repeat(async (signal) => {
    const said = await get("runs", { after: cursor }, signal);
    if (said.whole) rows.clear();
    tell(roots, said.roots.join("  "));
    for (const id of said.gone) { rows.delete(id); if (ticked.delete(id)) choose(); }
    said.runs.forEach(heard);
    known = true;
    readOnly = said.read_only;
    cursor = said.cursor;
    for (const row of rows.values()) row.older();
    const shown = arrange(), ids = shown.map((row) => row.run.id);
    if (!ids.length) return;
    const asked = [...ids].sort().join("\n");
    if (asked !== drawn || turns % 5 === 0 || curves.share < 1) {
      drawn = asked;
      await curves.turn([...ids].sort(), ["loss"], { pixels: 60 }, signal);
      for (const row of shown) row.draw(curves.of(row.run.id, "loss"));
    }
    turns += 1;
  }, EVERY, trouble);
  choose();
  return { end: poll.end };
}
