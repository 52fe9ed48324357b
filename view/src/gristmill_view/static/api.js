// Reads the JSON of the API. A token is kept in sessionStorage, which ends with the tab, and sent in a header only.
const KEY = "gristmill-token";
let token = sessionStorage.getItem(KEY);
let asking = null;
let ask = null;

/** Sets the function that asks a person for a token: it resolves to the token. */
export const askTokenWith = (asker) => { ask = asker; };
export const hasToken = () => token !== null;
export function forgetToken() {
  token = null;
  sessionStorage.removeItem(KEY);
}

export class Problem extends Error {
  constructor(code, message, remedy, status) {
    super(message);
    this.code = code;
    this.remedy = remedy;
    this.status = status;
  }
}

/** Returns the path of a run's data. Ids go through encodeURIComponent, so an id cannot change the path. */
export const pathOf = (run, ...parts) => ["runs", run, ...parts].map(encodeURIComponent).join("/");

const headers = () => (token === null ? {} : { Authorization: `Bearer ${token}` });

// A browser ends its requests when the machine's network changes: Docker changes it with each container.
const PAUSES_MS = [300, 1000, 3000];
const paused = (ms) => new Promise((resume) => setTimeout(resume, ms));

async function call(path, signal, { accept = "application/json", pauses = PAUSES_MS } = {}) {
  const left = [...pauses];
  for (;;) {
    const used = token;
    let response;
    try {
      // "omit": no cookie, and no login dialog of the browser's own.
      response = await fetch(`/view/api/${path}`, { headers: { ...headers(), Accept: accept }, credentials: "omit", signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (!left.length) throw new Problem("unreachable", "The server does not answer.", "Check that it runs, then try again.", 0);
      await paused(left.shift());
      continue;
    }
    if (response.status !== 401) return response;
    if (used === token) await newToken(used !== null);
  }
}

async function newToken(refused) {
  asking ??= ask(refused).finally(() => { asking = null; });
  token = await asking;
  sessionStorage.setItem(KEY, token);
}

async function checked(response) {
  if (response.ok) return response;
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* a proxy's page: the status says enough */ }
  throw new Problem(error.code ?? "http", error.message ?? `The server answered ${response.status}.`, error.remedy ?? "", response.status);
}

/** Returns the JSON at /view/api/`path`. Throws Problem. */
export const get = async (path, signal) => (await checked(await call(path, signal))).json();

/** Saves a download under its name. A link cannot carry the token, so the page fetches the file. */
export async function save(path, name) {
  const blob = await (await checked(await call(path, undefined, { accept: "*/*" }))).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const HIDDEN_MS = 30_000;

/** Whether a run may get another step. */
export const moves = ({ state, live }) => ["open", "suspended"].includes(state) || live;

/**
 * Listens to the events of a run that moves, and connects again after an error. EventSource cannot send a token, so this reads the
 * stream itself. `after`: returns the last step that the page has. `on`: functions by event, and `state` with
 * "live", "lost". Returns a function that ends it.
 *
 * A hidden tab stops after half a minute: a browser has six connections to a server for all its tabs.
 */
export function listen(overview, after, on) {
  if (!moves(overview)) return () => {};
  let stop = null;
  let later = null;
  const begin = () => { stop = new AbortController(); follow(overview.run, after, on, stop); };
  const seen = () => {
    clearTimeout(later);
    if (document.hidden) later = setTimeout(() => { stop.abort(); stop = null; }, HIDDEN_MS);
    else if (stop === null) begin();
  };
  document.addEventListener("visibilitychange", seen);
  begin();
  return () => { document.removeEventListener("visibilitychange", seen); clearTimeout(later); stop?.abort(); };
}

function follow(run, after, on, stop) {
  (async () => {
    let pause = 500;
    while (!stop.signal.aborted) {
      try {
        const path = `${pathOf(run, "events")}?after=${after()}`;
        const response = await checked(await call(path, stop.signal, { accept: "text/event-stream", pauses: [] }));
        on.state("live");
        const began = performance.now();
        await read(response.body, on);
        // A server or proxy that ends each stream at once is not asked twice per second for ever.
        if (performance.now() - began > 10_000) pause = 500;
      } catch (error) {
        if (error.name === "AbortError") return;
      }
      if (stop.signal.aborted) return;
      on.state("lost");
      await paused(pause * (0.75 + Math.random() / 2));
      pause = Math.min(pause * 2, 10_000);
    }
  })();
}

async function read(body, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    kept += value;
    const events = kept.split("\n\n");
    kept = events.pop();
    for (const text of events) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(text);
      if (found) on[found[1]]?.(JSON.parse(found[2]));
    }
  }
}
