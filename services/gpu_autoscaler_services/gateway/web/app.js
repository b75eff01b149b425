// The web page: reads the gateway once, then again whenever a fact reports a change.

import { clockTime, focusOn, redraw, shortTime, usd } from "./format.js";
import * as panels from "./panels.js";
import { Refused, Unauthorized, follow, hasToken, read, rememberToken, subjectQuery } from "./stream.js";

const LISTED = ["job.>", "policy.>", "scaling.>", "spot.notice_received", "spot.notice_withdrawn", "pod.observed", "pod.gone", "node.observed", "node.gone", "node.instance_observed"];
const SUBJECTS = [...LISTED, "shadow.>", "cost.>", "gpu.node_summarized.*"];
const QUIET = /^(gpu|cost|shadow)\./; // shown in panels, but not in the list of facts
const REFRESH_MILLISECONDS = 700;
const RETRY_MILLISECONDS = 2000; // after a refusal
const REFRESH_MILLISECONDS_MAX = 10000; // for countdowns and ages
const EVENTS_COUNT_MAX = 60;
const NAMES_COUNT_MAX = 5000;
const JOBS_SHOWN_MAX = 300;
const NODES_PAGE = 1000; // the most that the gateway shows at once
const ACTIVE_STATES = ["running", "provisioning", "preempted", "queued", "pending"]; // in the order of the table
const CONNECTION = { live: "live", lost: "connection lost, reconnecting", refused: "not up to date", connecting: "connecting" };

const byId = (id) => document.getElementById(id);
const events = [];
let arrivedCount = 0; // facts that the stream brought to the list
let clock = { asOf: Date.now(), at: performance.now(), factor: 1 };
let session = new AbortController(); // of the current token
let streamState = "connecting";
let readProblem = null; // why the last refresh failed
let streamProblem = null;
let timer = 0;
let isReading = false;
let isStale = false; // a fact arrived since the last refresh started
let latest = {};

/** Estimated cluster time. */
const now = () => clock.asOf + (performance.now() - clock.at) * clock.factor;

/** Shows whether the page is up to date, and what the gateway refuses, in its own words. */
function showConnection() {
  const problem = [readProblem, streamProblem].find((error) => error instanceof Refused);
  const state = problem ? "refused" : readProblem ? "lost" : streamState;
  byId("connection").dataset.state = state;
  byId("connection").querySelector("span").textContent = CONNECTION[state];
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem ? `The gateway refuses (${problem.status}): ${problem.message}` : "";
}

async function liveJobs() {
  const states = ACTIVE_STATES.map((state) => `state=${state}`).join("&");
  const { items } = (await read(`api/v1/gpu/jobs?${states}&limit=${JOBS_SHOWN_MAX}`)).value;
  const rank = (job) => [ACTIVE_STATES.indexOf(job.status), job.queue_position || 0];
  return items.sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
}

/** Reads and draws everything; there is one chain of refreshes, however often this is called. */
async function refresh() {
  clearTimeout(timer);
  isStale = true;
  if (isReading) return;
  isReading = true;
  isStale = false;
  const { signal } = session;
  try {
    const [status, nodes, plans, shadow, cost, jobs] = await Promise.all([
      read("api/v1/status"), readNodes(), read("api/v1/plans?limit=40"), read("api/v1/shadow?limit=8"), readCost(), liveJobs(),
    ]);
    clock = { asOf: Date.parse(status.value.as_of), at: performance.now(), factor: status.value.clock_factor };
    latest = { status: status.value, nodes: nodes.value, plans: plans.value, shadow: shadow.value, cost, jobs };
    readProblem = null;
    draw();
  } catch (error) {
    readProblem = error;
  }
  isReading = false;
  if (signal.aborted) return byId("login").hidden ? refresh() : undefined;
  if (readProblem instanceof Unauthorized) return askForToken(readProblem);
  showConnection();
  timer = setTimeout(refresh, isStale ? REFRESH_MILLISECONDS : readProblem ? RETRY_MILLISECONDS : REFRESH_MILLISECONDS_MAX);
}

/** All nodes, from several pages where there are many. */
async function readNodes() {
  const first = await read(`api/v1/nodes?limit=${NODES_PAGE}`);
  let { items, next_cursor: cursor } = first.value;
  while (cursor) {
    const page = (await read(`api/v1/nodes?limit=${NODES_PAGE}&cursor=${cursor}`)).value;
    items = [...items, ...page.items];
    cursor = page.next_cursor;
  }
  return { ...first, value: { ...first.value, items } };
}

/** Null while the gateway still sums charges, so that the rest of the page is not delayed. */
async function readCost() {
  try {
    return await readSpans();
  } catch (error) {
    if (error instanceof Refused && error.status === 503) return null;
    throw error;
  }
}

async function readSpans() {
  const hourly = (await read("api/v1/cost")).value;
  return hourly.spans.length > 3 ? hourly : (await read("api/v1/cost?span_seconds=300")).value;
}

function draw() {
  const { status, nodes, plans, shadow, cost, jobs } = latest;
  byId("factor").hidden = status.clock_factor === 1;
  byId("factor").textContent = `cluster time × ${status.clock_factor}`;
  redraw(byId("summary"), panels.summary(status));
  byId("directives").hidden = !status.directives.length;
  redraw(byId("directives"), panels.directives(status.directives, now()));
  byId("nodes").classList.toggle("dense", panels.isDense(nodes));
  redraw(byId("nodes"), panels.nodes(nodes, now()));
  redraw(byId("plans"), panels.plans(plans, names(nodes, jobs)));
  byId("shadow-panel").hidden = !shadow.changed_at;
  redraw(byId("shadow"), panels.shadow(shadow));
  byId("shadow-note").textContent = panels.shadowNote(shadow);
  redraw(byId("jobs"), panels.jobs(jobs, now()));
  byId("jobs-note").textContent = jobs.length >= JOBS_SHOWN_MAX ? `newest ${JOBS_SHOWN_MAX}` : "";
  byId("plans-note").textContent = plans.items.length ? "newest first; what a newer plan repeats is omitted" : "";
  redraw(byId("spend"), panels.spend(cost, byId("spend").clientWidth || 720));
  byId("spend-note").textContent = cost ? spendNote(cost) : "";
}

/** The total is that of all known charges; the bars are the last of them. */
function spendNote(cost) {
  const total = cost.allocated_micro_usd + cost.idle_micro_usd;
  return total ? `${usd(total)} since ${new Date(cost.from_at).toLocaleDateString("en-US", { month: "short", day: "numeric" })}, ${shortTime(cost.from_at)}` : "";
}

const displayNames = new Map(); // kept after a job or node is gone

/** Display names of the subjects of decisions. */
function names(nodes, jobs) {
  for (const job of jobs) displayNames.set(`job/${job.job_id}`, `job ${job.job_name}`);
  for (const node of nodes.items) {
    if (node.node_uid) displayNames.set(`node/${node.node_uid}`, `node ${node.name}`);
  }
  for (const { type, data } of events) {
    if (type.startsWith("pod.observed")) displayNames.set(`pod/${data.pod_uid}`, `pod ${data.namespace}/${data.name}`);
  }
  while (displayNames.size > NAMES_COUNT_MAX) displayNames.delete(displayNames.keys().next().value);
  return displayNames;
}

/** Schedules a refresh; a burst of facts causes one. */
function refreshSoon() {
  if (!isReading && !isStale) {
    clearTimeout(timer);
    timer = setTimeout(refresh, REFRESH_MILLISECONDS);
  }
  isStale = true;
}

// ---- facts

function onFact(fact) {
  if (!QUIET.test(fact.type)) {
    events.unshift(fact);
    arrivedCount += 1;
    drawEvents(fact);
  }
  refreshSoon();
}

function drawEvents(fresh) {
  events.length = Math.min(events.length, EVENTS_COUNT_MAX);
  redraw(byId("events"), events.length ? events.map((item) => panels.event(item, item === fresh)) : panels.noEvents());
}

/** Reads the newest facts, also those of the time without a stream; those that arrive meanwhile are kept, once. */
async function readEvents() {
  const countBefore = arrivedCount;
  const { items } = (await read(`api/v1/facts?limit=${EVENTS_COUNT_MAX}&${subjectQuery(LISTED)}`)).value;
  const listed = items.map((item) => item.event);
  const known = new Set(listed.map((fact) => fact.id));
  const arrived = events.slice(0, arrivedCount - countBefore).filter((fact) => !known.has(fact.id));
  events.splice(0, events.length, ...arrived, ...listed);
  drawEvents(null);
}

function onStream(state, error) {
  streamState = state;
  streamProblem = error;
  showConnection();
  if (state !== "live") return;
  refreshSoon();
  readEvents().catch(() => {}); // the list then grows with the facts that arrive
}

// ---- tokens

function askForToken(refusal) {
  if (!byId("login").hidden) return;
  session.abort();
  clearTimeout(timer);
  readProblem = streamProblem = null;
  streamState = "lost";
  showConnection();
  byId("connection").querySelector("span").textContent = "a token is required";
  byId("login-problem").textContent = hasToken() ? refusal.message : "";
  rememberToken("");
  byId("login").hidden = false;
  byId("token").focus();
  byId("token").select();
}

byId("login").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  rememberToken(byId("token").value.trim());
  byId("login").hidden = true;
  byId("login-problem").textContent = "";
  start();
});

async function start() {
  session.abort();
  session = new AbortController();
  const { signal } = session;
  streamState = "connecting";
  showConnection();
  refresh();
  try {
    await follow(SUBJECTS, onFact, onStream, signal);
  } catch (error) {
    if (!signal.aborted) askForToken(error);
  }
}

// ---- why

let explained = ""; // kind/name of the object in the dialog
let openedBy = ""; // key of the element to which the focus returns

async function explain(subject) {
  const [kind, name] = [subject.slice(0, subject.indexOf("/")), subject.slice(subject.indexOf("/") + 1)];
  explained = subject;
  const facts = panels.facts(kind, name, latest, now());
  byId("why-title").textContent = facts.title;
  const show = (answer) => explained === subject && redraw(byId("why-text"), [...facts.items, ...answer]);
  show(panels.whyPending());
  if (!byId("why").open) byId("why").showModal();
  byId("why-title").focus();
  try {
    show(panels.why((await read(`api/v1/why/${kind}/${encodeURIComponent(name)}`)).value));
  } catch (error) {
    if (error instanceof Unauthorized) {
      byId("why").close();
      return askForToken(error);
    }
    show(panels.whyRefused(error instanceof Refused ? error.message : "The gateway does not answer."));
  }
}

document.addEventListener("click", (clicked) => {
  const button = clicked.target.closest("[data-why]");
  if (button) {
    if (!byId("why").open) openedBy = button.dataset.key;
    explain(button.dataset.why);
  } else if (clicked.target === byId("why")) byId("why").close(); // the backdrop
});
byId("why").addEventListener("close", () => {
  explained = "";
  focusOn(document, openedBy);
});

redraw(byId("nodes-legend"), panels.nodesLegend());
setInterval(() => {
  byId("clock").textContent = clockTime(now());
  if (latest.nodes && latest.nodes.items.some((node) => node.notice)) redraw(byId("nodes"), panels.nodes(latest.nodes, now()));
}, 1000);
start();
