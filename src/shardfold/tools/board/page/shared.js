// What the view of a run and that of several have in common.

import { get, ofRun } from "./asking.js";
import { swatch } from "./chart.js";
import { bytes, duration, empty, make, number, words } from "./parts.js";

const UNITS = { memory_bytes: bytes, seconds: duration };
const NO_CURVES = ["step", "seconds", "tokens"];
const FIRST = ["loss", "held_out_loss", "bits_per_byte", "held_out_bits_per_byte", "reward", "tokens_per_s", "lr", "grad_norm"];
export const MOST_KEYS = 32; // that the board tells at once
const MOST_SAMPLES = 200; // of a run, the last ones

export function unitOf(key) {
  return UNITS[key] || number;
}

/** Figures that have a curve, the usual ones first. */
export function shownKeys(keys) {
  const rank = (key) => { const place = FIRST.indexOf(key); return place < 0 ? FIRST.length : place; };
  return [...new Set(keys)].filter((key) => !NO_CURVES.includes(key)).sort((one, other) => rank(one) - rank(other)
    || one.localeCompare(other));
}

/** What of curves the address asks for. */
export function view(route) {
  const given = route.given, size = (name) => given.has(name) && Number.isFinite(Number(given.get(name))) ? Number(given.get(name)) : null;
  return {
    by: ["tokens", "seconds"].includes(given.get("by")) ? given.get("by") : "step",
    smooth: Math.min(0.99, Math.max(0, size("smooth") ?? 0)), log: given.get("log") === "1", from: size("from"), to: size("to"),
  };
}

/** Axis, smoothing and scale; `changed(asksAgain)`. */
export function chartControls(route, shown, changed) {
  const by = make("select", { change: () => {
    Object.assign(shown, { by: by.value, from: null, to: null });
    route.put({ by: by.value === "step" ? null : by.value, from: null, to: null });
    changed(true);
  } }, [["step", "step"], ["tokens", "tokens"], ["seconds", "time"]].map(([value, text]) => make("option", { value }, text)));
  by.value = shown.by;
  const smooth = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", input: () => {
    shown.smooth = Number(smooth.value);
    route.put({ smooth: shown.smooth || null });
    changed(false);
  } });
  smooth.value = shown.smooth;
  const log = make("input", { type: "checkbox", change: () => {
    shown.log = log.checked;
    route.put({ log: log.checked ? 1 : null });
    changed(false);
  } });
  log.checked = shown.log;
  return [make("label", {}, "By", by), make("label", {}, "Smoothing", smooth),
    make("label", { class: "tick" }, log, "Logarithmic")];
}

/** [state and tier, bytes] of a run; memory is {tier: {state: bytes}}. */
export function tierRows(run) {
  return Object.entries(run.memory || {}).flatMap(([tier, states]) =>
    Object.entries(states).map(([state, size]) => [`${words(state)}, ${tier}`, size]));
}

/** [what was sent in the last step, bytes] of a run. */
export function sentRows(run) {
  const found = new Map();
  for (const row of run.traffic || []) {
    const title = `sent, ${words(String(row.kind ?? row.operation ?? row.op ?? "all"))}`;
    if (typeof row.sent === "number") found.set(title, (found.get(title) || 0) + row.sent);
  }
  return [...found];
}

/** Samples of runs side by side, at one step. */
export function samplesOf(section, ids, name) {
  const held = new Map(ids.map((id) => [id, []])), after = new Map();
  const place = make("div"), step = make("select", { change: () => draw() });
  const label = make("label", {}, "Step", step);
  section.replaceChildren(make("div", { class: "over" }, make("h2", {}, "Samples"), label), place);

  function steps() {
    const all = [...new Set([...held.values()].flat().map((each) => each.step))].sort((one, other) => other - one);
    const before = step.value, last = !step.options.length || step.selectedIndex === 0;
    step.replaceChildren(...all.map((each) => make("option", { value: each ?? "" }, each === null ? "end" : number(each))));
    if (!last) step.value = before;
    label.hidden = all.length < 2;
  }

  function draw() {
    const prompts = new Map();
    for (const id of ids)
      for (const each of held.get(id))
        if (String(each.step ?? "") === step.value) {
          const of = each.prompt ?? "";
          if (!prompts.has(of)) prompts.set(of, new Map());
          if (!prompts.get(of).has(id)) prompts.get(of).set(id, []);
          prompts.get(of).get(id).push(each);
        }
    if (!prompts.size) { place.replaceChildren(empty("No samples yet.")); return; }
    place.replaceChildren(...[...prompts].map(([prompt, of]) => make("article", { class: "sample" },
      prompt ? make("p", { class: "prompt" }, prompt) : null,
      make("div", { class: "columns" }, ids.filter((id) => of.has(id)).map((id) => make("div", { class: "answer" },
        ids.length > 1 ? make("p", { class: "head" }, swatch(ids.indexOf(id)), name(id)) : null,
        of.get(id).map((each) => make("div", {}, make("p", { class: "text" }, each.text),
          typeof each.reward === "number" ? make("p", { class: "muted" }, `reward ${number(each.reward)}`) : null))))))));
  }

  return {
    async turn(signal) {
      const said = await Promise.all(ids.map((id) => get(ofRun(id, "samples"), { after: after.get(id) }, signal).catch((error) => {
        if (error.status === 404) return { samples: [], after: after.get(id) };
        throw error;
      })));
      const first = !step.options.length && !place.firstChild;
      let news = first;
      ids.forEach((id, at) => {
        news ||= said[at].samples.length > 0;
        held.set(id, [...held.get(id), ...said[at].samples].slice(-MOST_SAMPLES));
        after.set(id, said[at].after);
      });
      if (news) { steps(); draw(); }
    },
  };
}
