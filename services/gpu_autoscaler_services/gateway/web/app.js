// The web page: reads the gateway once, then again whenever a fact reports a change.

import { clockTime, usd } from "./format.js";
import * as panels from "./panels.js";
import { Unauthorized, follow, read, rememberToken, subjectQuery } from "./stream.js";

const LISTED = ["job.>", "policy.>", "scaling.>", "spot.notice_received", "spot.notice_withdrawn", "pod.observed", "pod.gone", "node.observed", "node.gone", "node.instance_observed"];
const SUBJECTS = [...LISTED, "shadow.>", "cost.>", "gpu.node_summarized.*"];
const QUIET = /^(gpu|cost|shadow)\./; // shown in panels, but not in the list of facts
const REFRESH_MILLISECONDS = 700;
const REFRESH_MILLISECONDS_MAX = 10000; // for countdowns and ages
const EVENTS_COUNT_MAX = 60;
const NAMES_COUNT_MAX = 5000;
const JOBS_SHOWN_MAX = 300;
const ACTIVE_STATES = ["running", "provisioning", "preempted", "queued", "pending"]; // in the order of the table

const byId = (id) => document.getElementById(id);
const events = [];
let clock = { asOf: Date.now(), at: performance.now(), factor: 1 };
let timer = 0;
let isReading = false;
let isStale = false; // a fact arrived since the last refresh started
let latest = {};

/** Estimated cluster time. */
const now = () => clock.asOf + (performance.now() - clock.at) * clock.factor;

function setConnection(state) {
  const labels = { live: "live", lost: "connection lost, reconnecting", connecting: "connecting" };
  byId("connection").dataset.state = state;
  byId("connection").querySelector("span").textContent = labels[state];
}

async function liveJobs() {
  const states = ACTIVE_STATES.map((state) => `state=${state}`).join("&");
  const { items } = (await read(`api/v1/gpu/jobs?${states}&limit=${JOBS_SHOWN_MAX}`)).value;
  const rank = (job) => [ACTIVE_STATES.indexOf(job.status), job.queue_position || 0];
  return items.sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
}

async function refresh() {
  isReading = true;
  isStale = false;
  try {
    const [status, nodes, plans, shadow, cost, jobs] = await Promise.all([
      read("api/v1/status"), read("api/v1/nodes"), read("api/v1/plans?limit=12"), read("api/v1/shadow?limit=8"), readCost(), liveJobs(),
    ]);
    clock = { asOf: Date.parse(status.value.as_of), at: performance.now(), factor: status.value.clock_factor };
    latest = { status: status.value, nodes: nodes.value, plans: plans.value, shadow: shadow.value, cost, jobs };
    draw();
  } catch (error) {
    if (error instanceof Unauthorized) {
      isReading = false;
      return askForToken();
    }
    setConnection("lost");
  }
  isReading = false;
  timer = setTimeout(refresh, isStale ? REFRESH_MILLISECONDS : REFRESH_MILLISECONDS_MAX);
}

/** Null while the gateway still sums charges, so that the rest of the page is not delayed. */
async function readCost() {
  try {
    return await readSpans();
  } catch (error) {
    if (error instanceof Unauthorized) throw error;
    return null;
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
  byId("summary").replaceChildren(...panels.summary(status));
  byId("directives").hidden = !status.directives.length;
  redraw("directives", panels.directives(status.directives, now()));
  byId("nodes").classList.toggle("dense", panels.isDense(nodes));
  redraw("nodes", panels.nodes(nodes, now()));
  redraw("plans", panels.plans(plans, names(nodes, jobs)));
  byId("shadow-panel").hidden = !shadow.changed_at;
  redraw("shadow", panels.shadow(shadow));
  byId("shadow-note").textContent = panels.shadowNote(shadow);
  redraw("jobs", panels.jobs(jobs, now()));
  byId("jobs-note").textContent = jobs.length >= JOBS_SHOWN_MAX ? `newest ${JOBS_SHOWN_MAX}` : "";
  byId("plans-note").textContent = plans.items.length ? "newest first, with deferred actions" : "";
  byId("spend").replaceChildren(...panels.spend(cost, byId("spend").clientWidth || 720));
  byId("spend-note").textContent = cost ? spendNote(cost) : "";
}

function spendNote(cost) {
  const total = cost.allocated_micro_usd + cost.idle_micro_usd;
  const width = cost.span_seconds === 3600 ? "per hour" : `per ${cost.span_seconds / 60} minutes`;
  return total ? `total ${usd(total)}, ${width}` : "";
}

const displayNames = new Map(); // kept after a job or node is gone

/** Display names of the subjects of decisions. */
function names(nodes, jobs) {
  for (const job of jobs) displayNames.set(`job/${job.job_id}`, `job ${job.job_name}`);
  for (const node of nodes.items) if (node.node_uid) displayNames.set(`node/${node.node_uid}`, `node ${node.name}`);
  while (displayNames.size > NAMES_COUNT_MAX) displayNames.delete(displayNames.keys().next().value);
  return displayNames;
}

/** Replaces children and keeps the scroll position. */
function redraw(id, children) {
  const { scrollTop, scrollLeft } = byId(id);
  byId(id).replaceChildren(...children);
  Object.assign(byId(id), { scrollTop, scrollLeft });
}

/** Schedules a refresh; a burst of facts causes one. */
function refreshSoon() {
  if (!isReading && !isStale) {
    clearTimeout(timer);
    timer = setTimeout(refresh, REFRESH_MILLISECONDS);
  }
  isStale = true;
}

function onFact(fact) {
  if (!QUIET.test(fact.type)) {
    events.unshift(fact);
    events.length = Math.min(events.length, EVENTS_COUNT_MAX);
    redraw("events", events.map((item) => panels.event(item, item === fact)));
  }
  refreshSoon();
}

function askForToken() {
  setConnection("lost");
  byId("login").hidden = false;
  byId("token").focus();
}

byId("login").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  rememberToken(byId("token").value);
  byId("login").hidden = true;
  start();
});

async function start() {
  await refresh();
  try {
    const facts = (await read(`api/v1/facts?limit=${EVENTS_COUNT_MAX}&${subjectQuery(LISTED)}`)).value.items.map((item) => item.event);
    events.splice(0, events.length, ...facts);
    byId("events").replaceChildren(...(events.length ? events.map((item) => panels.event(item, false)) : panels.noEvents()));
    await follow(SUBJECTS, onFact, (state) => { setConnection(state); if (state === "live") refreshSoon(); });
  } catch (error) {
    if (error instanceof Unauthorized) askForToken();
    else setTimeout(start, REFRESH_MILLISECONDS_MAX);
  }
}

byId("nodes-legend").replaceChildren(...panels.nodesLegend());
setInterval(() => {
  byId("clock").textContent = clockTime(now());
  if (latest.nodes && latest.nodes.items.some((node) => node.notice)) redraw("nodes", panels.nodes(latest.nodes, now()));
}, 1000);
start();
