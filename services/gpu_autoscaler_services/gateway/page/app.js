// The live page: asks the gateway once, then again whenever a fact says that something changed.

import { clockTime, usd } from "./format.js";
import * as panels from "./panels.js";
import { Refused, follow, read, rememberToken, subjectQuery } from "./stream.js";

const LISTED = ["job.>", "policy.>", "scaling.>", "spot.notice_received", "spot.notice_withdrawn", "pod.observed", "pod.gone", "node.observed", "node.gone", "node.instance_observed"];
const SUBJECTS = [...LISTED, "shadow.>", "cost.>", "gpu.node_summarised.*"];
const QUIET = /^(gpu|cost|shadow)\./; // drawn, but not worth a line in the list of facts
const REFRESH_MILLISECONDS = 700;
const REFRESH_MILLISECONDS_MAX = 10000; // countdowns and ages need one now and then
const EVENTS_COUNT_MAX = 60;
const NAMES_COUNT_MAX = 5000;
const JOBS_SHOWN = 300;
const LIVING = ["running", "provisioning", "preempted", "queued", "pending"]; // in the order of the table

const place = (id) => document.getElementById(id);
const events = [];
let clock = { asOf: Date.now(), at: performance.now(), factor: 1 };
let timer = 0;
let isReading = false;
let isStale = false; // a fact came since the last reading began
let latest = {};

/** Cluster time as far as this page knows it. */
const now = () => clock.asOf + (performance.now() - clock.at) * clock.factor;

function setConnection(state) {
  const words = { live: "live", lost: "connection lost, trying again", connecting: "connecting" };
  place("connection").dataset.state = state;
  place("connection").querySelector("span").textContent = words[state];
}

async function liveJobs() {
  const states = LIVING.map((state) => `state=${state}`).join("&");
  const { items } = (await read(`api/v1/gpu/jobs?${states}&limit=${JOBS_SHOWN}`)).value;
  const rank = (job) => [LIVING.indexOf(job.status), job.queue_position || 0];
  return items.sort((one, other) => rank(one)[0] - rank(other)[0] || rank(one)[1] - rank(other)[1]);
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
    if (error instanceof Refused) {
      isReading = false;
      return askForToken();
    }
    setConnection("lost");
  }
  isReading = false;
  timer = setTimeout(refresh, isStale ? REFRESH_MILLISECONDS : REFRESH_MILLISECONDS_MAX);
}

/** Null while the gateway still adds up: the rest of the page need not wait for that. */
async function readCost() {
  try {
    return await readSpans();
  } catch (error) {
    if (error instanceof Refused) throw error;
    return null;
  }
}

async function readSpans() {
  const hourly = (await read("api/v1/cost")).value;
  return hourly.spans.length > 3 ? hourly : (await read("api/v1/cost?span_seconds=300")).value;
}

function draw() {
  const { status, nodes, plans, shadow, cost, jobs } = latest;
  place("factor").hidden = status.clock_factor === 1;
  place("factor").textContent = `time runs × ${status.clock_factor}`;
  place("summary").replaceChildren(...panels.summary(status));
  place("directives").hidden = !status.directives.length;
  redraw("directives", panels.directives(status.directives, now()));
  place("nodes").classList.toggle("dense", panels.isDense(nodes));
  redraw("nodes", panels.nodes(nodes, now()));
  redraw("plans", panels.plans(plans, names(nodes, jobs)));
  place("shadow-panel").hidden = !shadow.said_at;
  redraw("shadow", panels.shadow(shadow));
  place("shadow-note").textContent = panels.shadowNote(shadow);
  redraw("jobs", panels.jobs(jobs, now()));
  place("jobs-note").textContent = jobs.length >= JOBS_SHOWN ? `the newest ${JOBS_SHOWN}` : "";
  place("plans-note").textContent = plans.items.length ? "newest first, with what was held back" : "";
  place("money").replaceChildren(...panels.money(cost, place("money").clientWidth || 720));
  place("money-note").textContent = cost ? moneyNote(cost) : "";
}

function moneyNote(cost) {
  const total = cost.allocated_micro_usd + cost.idle_micro_usd;
  const width = cost.span_seconds === 3600 ? "by the hour" : `by ${cost.span_seconds / 60} minutes`;
  return total ? `${usd(total)} in all, ${width}` : "";
}

const called = new Map(); // names stay known after a job or node has gone

/** What people call the subjects of decisions. */
function names(nodes, jobs) {
  for (const job of jobs) called.set(`job/${job.job_id}`, `job ${job.job_name}`);
  for (const node of nodes.items) if (node.node_uid) called.set(`node/${node.node_uid}`, `node ${node.name}`);
  while (called.size > NAMES_COUNT_MAX) called.delete(called.keys().next().value);
  return called;
}

/** New children, old scroll. */
function redraw(id, children) {
  const { scrollTop, scrollLeft } = place(id);
  place(id).replaceChildren(...children);
  Object.assign(place(id), { scrollTop, scrollLeft });
}

/** Read again in a moment; a burst of facts is one reading. */
function soon() {
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
    redraw("events", events.map((one) => panels.event(one, one === fact)));
  }
  soon();
}

function askForToken() {
  setConnection("lost");
  place("login").hidden = false;
  place("token").focus();
}

place("login").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  rememberToken(place("token").value);
  place("login").hidden = true;
  start();
});

async function start() {
  await refresh();
  try {
    const facts = (await read(`api/v1/facts?limit=${EVENTS_COUNT_MAX}&${subjectQuery(LISTED)}`)).value.items.map((item) => item.event);
    events.splice(0, events.length, ...facts);
    place("events").replaceChildren(...(events.length ? events.map((one) => panels.event(one, false)) : panels.noEvents()));
    await follow(SUBJECTS, onFact, (state) => { setConnection(state); if (state === "live") soon(); });
  } catch (error) {
    if (error instanceof Refused) askForToken();
    else setTimeout(start, REFRESH_MILLISECONDS_MAX);
  }
}

place("nodes-legend").replaceChildren(...panels.nodesLegend());
setInterval(() => {
  place("clock").textContent = clockTime(now());
  if (latest.nodes && latest.nodes.items.some((node) => node.notice)) redraw("nodes", panels.nodes(latest.nodes, now()));
}, 1000);
start();
