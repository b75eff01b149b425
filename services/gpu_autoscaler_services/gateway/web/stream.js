// Client of the gateway: JSON with ETags, and facts as resumable Server-Sent Events.
// Fetch instead of EventSource, because EventSource cannot send a token.

const TOKEN_KEY = "gpu-autoscaler-token";
const RECONNECT_MILLISECONDS = 2000;
const SILENCE_MILLISECONDS_MAX = 40000; // the gateway sends a heartbeat every 15 s

/** A refusal of the gateway; the message is the detail of its problem document. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The gateway requires another token. */
export class Unauthorized extends Refused {}

/** Remembers the token for this tab; an empty one is forgotten. */
export function rememberToken(token) {
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
}

export const hasToken = () => Boolean(sessionStorage.getItem(TOKEN_KEY));

function headers(more = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.ok || response.status === 304) return response;
  const problem = await response.json().catch(() => ({}));
  const detail = problem.detail || `${path}: HTTP ${response.status}`;
  throw response.status === 401 ? new Unauthorized(401, detail) : new Refused(response.status, detail);
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

/** Follows facts until `signal` is aborted. Calls `onFact(event)` for each, `onState("live" | "lost", error)` on changes. */
export async function follow(subjects, onFact, onState, signal) {
  let lastId = "";
  while (!signal.aborted) {
    const silence = new AbortController();
    let watchdog = 0;
    let failure = null;
    try {
      const response = await request(`api/v1/events?${subjectQuery(subjects)}`, {
        signal: AbortSignal.any([signal, silence.signal]),
        headers: lastId ? { "Last-Event-ID": lastId } : {},
      });
      onState("live", null);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => silence.abort(), SILENCE_MILLISECONDS_MAX);
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
      failure = error;
    }
    clearTimeout(watchdog);
    if (signal.aborted) return;
    onState("lost", failure);
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
