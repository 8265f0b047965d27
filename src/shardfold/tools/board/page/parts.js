// What views are made of: elements whose text is always text, numbers as people read them, words that are said aloud.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Of `given`, functions are listeners, true and false are flags, others are attributes; children that are
 * no elements become text, so nothing that comes from a run is ever read as markup. */
export function make(tag, given = {}, ...children) {
  const made = tag === "svg" || tag === "polyline" || tag === "path" ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

/** Change what an element says, only where it says something else: focus and selection stay. */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function link(view, text, given = {}) {
  return make("a", { href: view, ...given }, text);
}

export function button(text, act, given = {}) {
  return make("button", { type: "button", click: act, ...given }, text);
}

/** Said by screen readers, shown to nobody. */
export function say(words) {
  document.getElementById("said").textContent = words;
}

// -- numbers

export function number(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

export function count(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(digits)) + letter;
  const short = Number(value.toPrecision(digits));
  return short !== 0 && Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
}

export function bytes(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < names.length - 1) { value /= 1024; power += 1; }
  const shown = digits > 3 ? Number(value.toPrecision(digits))
    : power && Math.abs(value) < 100 ? value.toFixed(value < 10 ? 2 : 1) : Math.round(value);
  return shown + " " + names[power];
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds) || seconds < 0) return "–";
  const whole = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
  if (whole >= 86400) return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole % 3600 / 60);
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function ago(seconds) {
  return typeof seconds !== "number" ? "–" : seconds < 2 ? "now" : duration(seconds) + " ago";
}

/** A held-out figure: {figure, value}. */
export function heldOut({ figure, value }) {
  return number(value) + (figure === "bits_per_byte" ? " bits/byte" : "");
}

const NAMES = { tokens_per_s: "tokens/s", lr: "learning rate", grad_norm: "gradient norm", memory_bytes: "memory", mfu: "MFU" };

/** What a figure or a setting is called. */
export function words(name) {
  return NAMES[name] || name.replaceAll("_", " ");
}

// -- states: a sign and a word, so that no one has to tell colours apart

const SIGNS = {
  waiting: "○", starting: "◔", training: "▶", evaluating: "▶", saving: "▶", stalled: "‖", done: "✓", stopped: "■",
  failed: "✕", lost: "?", unknown: "·",
};

/** Whether nothing of it goes on, as far as its folder tells. */
export function isOver(run) {
  return run.is_over || run.state === "unknown";
}

export function stateBadge(state) {
  const made = make("span", { class: "badge" }, make("span", { "aria-hidden": "true", class: "sign" }), make("span"));
  setState(made, state);
  return made;
}

export function setState(badge, state) {
  if (badge.dataset.state === state) return;
  badge.dataset.state = state;
  badge.children[0].textContent = SIGNS[state] || "·";
  badge.children[1].textContent = state;
}

// -- tables

/** Columns: {name, number}; a row: cells as text or elements. The first cell of a row is its head. */
export function table(caption, columns, rows, given = {}) {
  const head = columns.map((each) => make("th", { scope: "col", class: each.number ? "number" : null }, each.name));
  const body = rows.map((cells) => make("tr", {}, cells.map((cell, place) => place
    ? make("td", { class: columns[place].number ? "number" : null }, cell)
    : make("th", { scope: "row" }, cell))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", given, make("caption", { class: "aside" }, caption),
      make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)));
}

export function empty(text) {
  return make("p", { class: "muted empty" }, text);
}

/** A text that is copied with one press. */
export function copied(label, text) {
  const shown = make("pre", { tabindex: "0", role: "group", "aria-label": label }, text);
  const press = button("Copy", async () => {
    try { await navigator.clipboard.writeText(shown.textContent); tell(press, "Copied"); } catch {
      getSelection().selectAllChildren(shown);
      tell(press, "Selected");
    }
    setTimeout(() => tell(press, "Copy"), 1500);
  }, { "aria-label": "Copy: " + label });
  return { element: make("div", { class: "copied" }, make("div", { class: "over" }, make("h2", {}, label), press), shown),
    set: (other) => tell(shown, other) };
}

/** A question with fields, and elements between them and the answers; answers what was given, or null. With `act(given)`
 * it stays open until that is done, and has its sentence where it is refused. */
export function ask(title, explained, fields, yes, { inside = [], act = null, no = "Cancel" } = {}) {
  return new Promise((answer) => {
    const inputs = fields.map((each) => {
      const input = each.choices
        ? make("select", { name: each.name }, each.choices.map((one) => make("option", { value: one }, one)))
        : make("input", { name: each.name, type: "text", inputmode: each.inputmode, placeholder: each.placeholder, autocomplete: "off" });
      if (each.value !== undefined && each.value !== null) input.value = each.value;
      return make("label", {}, each.label, input, each.help ? make("span", { class: "help" }, each.help) : null);
    });
    const refused = make("p", { class: "refused", role: "alert", hidden: true }), press = make("button", { value: "yes", class: "main" }, yes);
    const form = make("form", { method: "dialog", submit: (event) => { if (act && event.submitter?.value !== "no") acts(event); } },
      make("h2", { id: "asked" }, title), make("p", {}, explained), inputs, inside, refused, make("div", { class: "acts" }, press,
        no ? make("button", { value: "no", formnovalidate: true }, no) : null));
    async function acts(event) {
      event.preventDefault();
      refused.hidden = press.disabled = true;
      tell(press, yes + " …");
      try {
        await act(Object.fromEntries(new FormData(form)), () => dialog.open);
        dialog.close("yes");
      } catch (error) {
        refused.hidden = false;
        tell(refused, error.message);
      }
      press.disabled = false;
      tell(press, yes);
    }
    const dialog = make("dialog", { "aria-labelledby": "asked" }, form);
    dialog.addEventListener("close", () => {
      answer(dialog.returnValue === "yes" ? Object.fromEntries(new FormData(form)) : null);
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
