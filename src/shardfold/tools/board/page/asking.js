// Questions to the board. What it refuses is thrown as one sentence.

export class Refused extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

async function answered(path, given) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...given });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The board does not answer. Runs go on without it.", 0);
  }
  if (response.status === 204) return {};
  let said;
  try { said = await response.json(); } catch { said = null; }
  if (response.ok && said !== null) return said;
  throw new Refused(said?.error?.message || `The board answers ${response.status}.`, response.status);
}

export function query(given) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(given))
    for (const each of Array.isArray(value) ? value : [value])
      if (each !== null && each !== undefined && each !== "") found.append(name, each);
  return String(found);
}

export function get(path, given = {}, signal = undefined) {
  const asked = query(given);
  return answered(`api/${path}${asked ? "?" + asked : ""}`, { signal });
}

export function post(path, given = {}, signal = undefined) {
  return answered(`api/${path}`, {
    method: "POST", headers: { "Content-Type": "application/json", "X-Shardfold-Board": "1" }, body: JSON.stringify(given),
    signal,
  });
}

export function ofRun(id, what = "") {
  return `runs/${encodeURIComponent(id)}${what ? "/" + what : ""}`;
}

/** Whether it was said that there is no such run. */
export function isNone(error) {
  return error instanceof Refused && [404, 410].includes(error.status);
}

const LOOKS = 120, LOOK = 500; // milliseconds

/** Wait until a run that was asked for is under way, a minute at most. One that is refused is thrown as its sentence: its
 * folder goes with it. */
export async function begun(id, signal = undefined) {
  for (let look = 0; look < LOOKS; look += 1) {
    try {
      const run = await get(ofRun(id), {}, signal);
      if (run.state !== "starting") return;
    } catch (error) {
      if (isNone(error) || !(error instanceof Refused)) throw error;
    }
    await new Promise((done) => { setTimeout(done, LOOK); });
  }
}

const SLOWEST = 30, BACK = 2; // seconds

/** Call `turn(signal)` again and again: `seconds` after each answer, not while nobody sees the page, and more rarely
 * while it is refused. A board that is gone, or that began anew, is asked every `BACK` seconds. Returns what ends it. */
export function repeat(turn, seconds, trouble) {
  const control = new AbortController();
  let timer = 0, fails = 0, slowest = SLOWEST, under = false, more = false;
  async function once() {
    clearTimeout(timer);
    more = under;
    if (under || control.signal.aborted) return;
    under = true;
    try {
      await turn(control.signal);
      fails = 0;
      trouble("");
    } catch (error) {
      if (!(error instanceof Refused)) { if (!control.signal.aborted) throw error; } else {
        fails += 1;
        slowest = [0, 401].includes(error.status) ? BACK : SLOWEST;
        trouble(error.message);
      }
    } finally {
      under = false;
      if (!control.signal.aborted && !document.hidden)
        timer = setTimeout(once, more ? 0 : Math.min(fails ? slowest : seconds, seconds * 2 ** Math.min(fails, 5)) * 1000);
    }
  }
  const seen = () => { if (!document.hidden) once(); };
  document.addEventListener("visibilitychange", seen);
  once();
  const end = () => {
    control.abort();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  };
  return { end, once };
}
