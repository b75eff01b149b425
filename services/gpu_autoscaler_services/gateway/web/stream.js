// Client of the gateway: JSON with ETags, and facts as resumable Server-Sent Events.
// Fetch instead of EventSource, because EventSource cannot send a token.

const TOKEN_KEY = "gpu-autoscaler-token";
const RECONNECT_MILLISECONDS = 2000;
const SILENCE_MILLISECONDS_MAX = 40000; // the gateway sends a heartbeat every 15 s

export class Unauthorized extends Error {}

export function rememberToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

function headers(more = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401) throw new Unauthorized("a token is required");
  if (!response.ok && response.status !== 304) throw new Error(`${path}: HTTP ${response.status}`);
  return response;
}

const cache = new Map(); // path -> {etag, value}

/** The JSON at `path`, and whether it changed since the last request. */
export async function read(path) {
  const cached = cache.get(path);
  const response = await request(path, { cache: "no-store", headers: cached ? { "If-None-Match": cached.etag } : {} });
  if (response.status === 304) return { value: cached.value, changed: false };
  const value = await response.json();
  cache.set(path, { etag: response.headers.get("ETag"), value });
  return { value, changed: true };
}

export const subjectQuery = (subjects) => subjects.map((subject) => `subject=${encodeURIComponent(subject)}`).join("&");

/** Follows facts without end. Calls `onFact(event)` for each, `onState("live" | "lost")` on changes. */
export async function follow(subjects, onFact, onState) {
  let lastId = "";
  for (;;) {
    const abort = new AbortController();
    let watchdog = 0;
    try {
      const response = await request(`api/v1/events?${subjectQuery(subjects)}`, {
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
      if (error instanceof Unauthorized) throw error;
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
