// The gateway's answers: JSON with ETags, and facts as Server-Sent Events that resume where they stopped.
// Fetch instead of EventSource, because EventSource cannot send a token.

const TOKEN_KEY = "gpu-autoscaler-token";
const RECONNECT_MILLISECONDS = 2000;
const SILENCE_MILLISECONDS_MAX = 40000; // the gateway sends a heartbeat every 15 s

export class Refused extends Error {}

export function rememberToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

function headers(more = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401) throw new Refused("a token is needed");
  if (!response.ok && response.status !== 304) throw new Error(`${path} answered ${response.status}`);
  return response;
}

const known = new Map(); // path -> {etag, value}

/** The JSON at `path`, and whether it changed since it was asked for last. */
export async function read(path) {
  const before = known.get(path);
  const response = await ask(path, { cache: "no-store", headers: before ? { "If-None-Match": before.etag } : {} });
  if (response.status === 304) return { value: before.value, changed: false };
  const value = await response.json();
  known.set(path, { etag: response.headers.get("ETag"), value });
  return { value, changed: true };
}

export const subjectQuery = (subjects) => subjects.map((subject) => `subject=${encodeURIComponent(subject)}`).join("&");

/** Follow facts for ever. `onFact(event)` for each, `onState("live" | "lost")` when that changes. */
export async function follow(subjects, onFact, onState) {
  let lastId = "";
  for (;;) {
    const abort = new AbortController();
    let watchdog = 0;
    try {
      const response = await ask(`api/v1/events?${subjectQuery(subjects)}`, {
        signal: abort.signal,
        headers: lastId ? { "Last-Event-ID": lastId } : {},
      });
      onState("live");
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE_MILLISECONDS_MAX);
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const event = parse(block);
          if (event.id) lastId = event.id;
          if (event.data && event.name === "message") onFact(JSON.parse(event.data));
        }
      }
    } catch (error) {
      if (error instanceof Refused) throw error;
    }
    clearTimeout(watchdog);
    onState("lost");
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MILLISECONDS));
  }
}

function parse(block) {
  const event = { id: "", name: "message", data: "" };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const field = line.slice(0, colon);
    const value = line.slice(colon + 1).trimStart();
    if (field === "id") event.id = value;
    if (field === "event") event.name = value;
    if (field === "data") event.data += value;
  }
  return event;
}
