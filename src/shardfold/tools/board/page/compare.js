// Runs beside each other: lines by step, tokens or time, what their settings differ in, bytes, samples.

import { get, ofRun, query, repeat } from "./asking.js";
import { Chart, Curves, swatch } from "./chart.js";
import { bytes, count, duration, empty, link, make, number, stateBadge, table, words } from "./parts.js";
import { chartControls, samplesOf, shownKeys, sentRows, tierRows, unitOf, view } from "./shared.js";
import { runAddress } from "./runs.js";

const EVERY = 2; // seconds
const FEW = 8; // runs of which more points come than a narrow window has pixels

export function compareView(main, route, { entitle, trouble }) {
  entitle("Compare");
  const ids = [...new Set(route.given.getAll("id"))];
  if (ids.length) return compared(main, route, ids, trouble);
  main.append(empty("Tick runs in the list to compare them."), make("p", {}, link("#/runs", "To the list", { class: "button main" })));
  return { end() {} };
}

function compared(main, route, ids, trouble) {
  const details = new Map(), hidden = new Set(route.given.getAll("hide"));
  const curves = new Curves();
  const legend = make("ul", { class: "legend", "aria-label": "Runs" }), held = make("div", { class: "charts" });
  const [facts, differs, memory, samples] = [1, 2, 3, 4].map(() => make("section"));
  const shown = view(route);
  const choice = make("fieldset", { class: "figures" }, make("legend", {}, "Figures"));
  let keys = route.given.getAll("key"), charts = new Map(), known = "";
  const controls = chartControls(route, shown, (asksAgain) => { if (asksAgain) poll.once(); else redraw(); });
  main.append(make("div", { class: "tools" }, choice, controls), legend, held, facts, differs, memory, samples);

  function name(id) {
    return details.get(id)?.name || id;
  }

  function chosen() {
    keys = [...choice.querySelectorAll("input:checked")].map((each) => each.value);
    route.put({ key: keys });
    rebuild();
    list();
    poll.once();
  }

  function rebuild() {
    charts = new Map((keys.length ? keys : ["loss"]).map((key) => [key, new Chart(words(key), {
      unit: unitOf(key), onZoom: (from, to) => { zoom(from, to); } })]));
    held.replaceChildren(...[...charts.values()].map((each) => each.element));
  }

  function zoom(from = null, to = null) {
    Object.assign(shown, { from, to });
    route.put({ from, to });
    poll.once();
  }

  function redraw() {
    for (const [key, chart] of charts) {
      chart.set(ids.filter((id) => !hidden.has(id)).map((id) => ({
        name: name(id), slot: ids.indexOf(id), points: curves.of(id, key),
      })), { axis: curves.by, weight: shown.smooth, log: shown.log, zoomed: shown.from !== null });
    }
  }

  function list() {
    legend.replaceChildren(...ids.map((id, slot) => {
      const on = make("input", { type: "checkbox", "aria-label": `Show ${name(id)}`, change: () => {
        if (on.checked) hidden.delete(id); else hidden.add(id);
        route.put({ hide: [...hidden] });
        redraw();
      } });
      on.checked = !hidden.has(id);
      const without = ids.filter((each) => each !== id);
      return make("li", {}, make("label", {}, on, swatch(slot)), link(runAddress(id), name(id)),
        details.has(id) ? stateBadge(details.get(id).state) : null,
        make("a", { href: "api/csv?" + query({ id, key: keys.length ? keys : ["loss"] }), download: true, "aria-label": `CSV of ${name(id)}` }, "CSV"),
        make("a", { href: "#/compare?" + query({ id: without }), class: "drop", "aria-label": `Without ${name(id)}`, title: "Without this one" }, "×"));
    }));
  }

  function section_(of, title, inner) {
    of.replaceChildren(make("h2", {}, title), inner);
  }

  const heads = () => ids.map((id, slot) => ({ name: make("span", { class: "head" }, swatch(slot), name(id)), number: true }));

  function results() {
    const of = [...details.values()], best = (value, low) => {
      const good = of.map(value).filter((each) => typeof each === "number" && Number.isFinite(each));
      return new Set(good).size > 1 ? (low ? Math.min(...good) : Math.max(...good)) : null;
    };
    const row = (title, value, shownAs, low = null) => {
      const first = low === null ? null : best(value, low);
      return [title, ...ids.map((id) => {
        const each = details.has(id) ? value(details.get(id)) : null;
        if (each === null || each === undefined) return "–";
        return first !== null && each === first ? make("b", { class: "best" }, shownAs(each), make("span", { class: "aside" }, " (best)")) : shownAs(each);
      })];
    };
    const held = (figure) => (run) => run.held_out?.figure === figure ? run.held_out.value : null;
    const rate = (run) => { // of all steps, where it is over: that of the last one is chance
      const { tokens, seconds, steps, resumed_at: before = 0 } = run.summary || {};
      return tokens > 0 && seconds > 0 && steps > before ? tokens * (steps - before) / steps / seconds : run.rate;
    };
    const kept = (path) => (run) => path.split(".").reduce((at, part) => at?.[part], run) ?? null;
    const rows = [
      row("state", (run) => run.state, String),
      row("steps", (run) => run.step, number),
      row("loss of the last step", (run) => run.loss, number),
      row("loss, mean of the last 32 steps", (run) => run.loss_mean, number, true),
      row("loss, held out", held("loss"), number, true),
      row("bits per byte, held out", held("bits_per_byte"), number, true),
      row("held out at step", (run) => run.held_out?.step, number),
      row("tokens", kept("summary.tokens"), count),
      row("time", (run) => run.summary?.seconds ?? run.seconds ?? null, duration),
      row("tokens/s", rate, count, false),
      row("ranks", (run) => run.ranks || null, number),
      row("layout", (run) => run.layout || "–", String),
      row("why", (run) => run.why || "–", (why) => make("span", { class: "brief" }, why)),
    ].filter(([, ...cells]) => cells.some((cell) => (cell.textContent ?? cell) !== "–"));
    section_(facts, "Results", table("Results", [{ name: "figure" }, ...heads()], rows));
  }

  function memories() {
    const found = new Map();
    ids.forEach((id, place) => {
      const run = details.get(id) || {};
      for (const [title, value] of [...tierRows(run), ...sentRows(run)]) {
        if (!found.has(title)) found.set(title, ids.map(() => null));
        found.get(title)[place] = value;
      }
    });
    const rows = [...found].map(([title, values]) => [title, ...values.map((each) => bytes(each))]);
    section_(memory, "Bytes on rank 0, held between steps and sent in the last one", rows.length ? table("Bytes on rank 0", [{ name: "state, tier" }, ...heads()], rows)
      : empty("Written when a run ends."));
  }

  async function settings(signal) {
    const there = present(), said = there.length ? await get("differences", { id: there }, signal) : { rows: [] };
    const text = (value) => value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
    const rows = said.rows.map(({ key, values }) => [key, ...ids.map((id) => text(values[there.indexOf(id)]))]);
    section_(differs, "Settings that differ", rows.length ? table("Settings that differ",
      [{ name: "setting" }, ...heads().map((each) => ({ ...each, number: false }))], rows)
      : empty(ids.length > 1 ? "All settings are equal." : "One run alone differs in nothing: tick another in the list."));
  }

  /** Those whose folders are there. */
  function present() {
    return ids.filter((id) => details.has(id) && !details.get(id).gone);
  }

  const texts = samplesOf(samples, ids, name);
  let cursor = null;
  async function turn(signal) {
    const said = await get("runs", { after: cursor }, signal), news = [];
    cursor = said.cursor;
    for (const row of said.runs) {
      if (!ids.includes(row.id)) continue;
      const before = details.get(row.id);
      details.set(row.id, { ...before, ...row, gone: false });
      if (before?.state !== row.state || !before.keys?.length) news.push(row.id);
    }
    const gone = said.whole ? ids.filter((id) => !said.runs.some((row) => row.id === id)) : said.gone;
    for (const id of ids)
      if (gone.includes(id))
        details.set(id, { name: id, ...details.get(id), state: "unknown", why: "it is gone", gone: true });
    const moved = said.runs.length + gone.length > 0;
    if (moved && !legend.contains(document.activeElement)) list();
    const there = present(), pixels = there.length > FEW && charts.size ? [...charts.values()][0].pixels : null;
    if (there.length && await curves.turn(there, [...charts.keys()], { ...shown, pixels }, signal)) redraw();
    if (curves.share < 1) setTimeout(() => poll.once());
    if (news.length) await more(news, signal);
    if (moved) results();
  }

  /** What the rows of the list do not say. */
  async function more(news, signal) {
    const found = await Promise.all(news.map((id) => get(ofRun(id), {}, signal).catch((error) => {
      if (error.status === 404) return { keys: [] };
      throw error;
    })));
    news.forEach((id, place) => details.set(id, { ...details.get(id), ...found[place] }));
    figures();
    memories();
    await settings(signal);
    await texts.turn(signal);
  }

  /** The choice of what has curves. */
  function figures() {
    const all = shownKeys([...details.values()].flatMap((each) => each.keys || []));
    if (all.join("\n") === known) return;
    known = all.join("\n");
    if (!keys.length && all.length && !all.includes("loss")) {
      keys = [all[0]];
      rebuild();
    }
    choice.replaceChildren(make("legend", {}, "Figures"), ...all.map((key) => {
      const tick = make("input", { type: "checkbox", value: key, change: chosen });
      tick.checked = (keys.length ? keys : ["loss"]).includes(key);
      return make("label", { class: "tick" }, tick, words(key));
    }));
  }

  rebuild();
  list();
  const poll = repeat(turn, EVERY, trouble);
  return { end: poll.end };
}
