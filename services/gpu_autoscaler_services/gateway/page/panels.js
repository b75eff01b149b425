// Each panel of the page: an answer of the gateway in, elements out. Nothing here asks, waits or remembers.

import { clockTime, count, h, s, short, shortTime, span, usd } from "./format.js";

const NODES_DENSE = 24; // from here on a node is a small card
const BOOTING = new Set(["planned", "ordered", "launched", "registered"]);
const LEAVING = new Set(["cordoned", "draining", "drained", "terminating", "gone", "failed", "lost"]);
const WAITING = ["pending", "queued", "provisioning", "preempted"];
const JOB_TONE = { running: "work", provisioning: "boot", preempted: "danger", failed: "danger", completed: "good" };

const sum = (record, names) => names.reduce((total, name) => total + (record[name] || 0), 0);

export function summary(status) {
  const nodes = Object.values(status.nodes_by_phase).reduce((total, number) => total + number, 0);
  const booting = sum(status.nodes_by_phase, [...BOOTING]);
  const kinds = Object.entries(status.nodes_by_capacity_type).map(([kind, number]) => `${number} ${kind}`);
  const waiting = sum(status.jobs_by_status, WAITING);
  const running = status.jobs_by_status.running || 0;
  const ended = sum(status.jobs_by_status, ["completed", "failed", "cancelled"]);
  const share = status.gpu_count ? Math.round((100 * status.gpu_busy_count) / status.gpu_count) : 0;
  const meter = h("span");
  meter.style.width = `${share}%`;
  return [
    tile("Nodes", [String(nodes)], [kinds.join(", ") || "none yet", booting ? `, ${booting} on the way` : ""].join("")),
    tile(
      "GPUs busy",
      [`${status.gpu_busy_count} `, h("small", {}, `of ${status.gpu_count}`)],
      status.gpu_booting_count ? `${count(status.gpu_booting_count, "more GPU")} booting` : status.gpu_count ? `${share} % of what is there` : "none there yet",
      h("dd", { class: "meter", "aria-hidden": "true" }, meter),
    ),
    tile("Jobs waiting", [String(waiting)], waitingDetail(status, waiting)),
    tile("Jobs running", [String(running)], `${ended} ended`),
    tile(
      "Price now",
      [`${usd(status.price_micro_usd_per_hour)} `, h("small", {}, "an hour")],
      status.price_unknown_count ? `${count(status.price_unknown_count, "instance")} of unknown price` : "all prices known",
    ),
  ];
}

function waitingDetail(status, waiting) {
  const coming = status.jobs_by_status.provisioning || 0;
  if (status.pods_unschedulable_count) return `${count(status.pods_unschedulable_count, "pod")} without room`;
  if (coming) return `${coming} with nodes on the way`;
  return waiting ? "in the queue" : "the queue is empty";
}

function tile(label, figure, detail, meter = null) {
  return h(
    "div",
    { class: "tile" },
    h("dt", {}, label),
    h("dd", { class: "figure" }, ...figure),
    meter,
    h("dd", { class: "detail" }, detail),
  );
}

/** What people overrule now: who, why, and for how long still. */
export function directives(items, now) {
  return items.map((one) =>
    h(
      "li",
      {},
      h("span", { class: "chip boot" }, one.directive.directive),
      h("span", {}, h("b", {}, directiveTold(one.directive)), ` by ${one.given_by}: ${one.reason}`),
      h("span", { class: "note" }, `${span((new Date(one.until) - now) / 1000)} left, until ${shortTime(one.until)}`),
    ),
  );
}

function directiveTold(directive) {
  if (directive.directive === "freeze") return "Nothing is bought, nothing is removed";
  if (directive.directive === "pause") return `Pool ${directive.pool} stays as it is`;
  const bounds = [["node", directive.nodes_count_min, directive.nodes_count_max], ["GPU", directive.gpu_count_min, directive.gpu_count_max]]
    .filter(([, least, most]) => (least ?? most ?? null) !== null)
    .map(([unit, least, most]) => {
      if (least === most) return count(least, unit);
      return [["at least", least], ["at most", most]].filter(([, number]) => (number ?? null) !== null).map(([word, number]) => `${word} ${count(number, unit)}`).join(", ");
    });
  const scope = [directive.pool && `of pool ${directive.pool}`, directive.gpu_model].filter(Boolean);
  return [bounds.join(", "), ...(scope.length ? scope : ["in all"])].join(" ");
}

export function nodesLegend() {
  const kinds = [["busy", "busy"], ["", "free"], ["booting", "booting"], ["leaving", "leaving"]];
  return kinds.map(([name, label]) => h("li", {}, h("i", { class: `gpu ${name}`, "aria-hidden": "true" }), label));
}

export function nodes(list, now) {
  if (!list.items.length) return [h("li", { class: "empty" }, "No nodes. The first job that needs one brings it.")];
  return list.items.map((node) => nodeCard(node, now));
}

export const isDense = (list) => list.items.length > NODES_DENSE;

function nodeCard(node, now) {
  const title = node.node_uid ? node.name : `order ${short(node.action_id || node.name)}`;
  const type = [node.instance_type, node.zone].filter(Boolean).join(" · ");
  const doing = node.pods.map((pod) => pod.pod).join(", ");
  return h(
    "li",
    { class: `node${node.notice ? " noticed" : ""}${LEAVING.has(node.phase) ? " gone" : ""}`, title: [node.name, type, node.reason, doing].filter(Boolean).join("\n") },
    h("div", { class: "line" }, h("span", { class: "name" }, title), phaseChip(node)),
    h("div", { class: "what" }, type || "not yet known"),
    h("div", { class: "gpus", role: "img", "aria-label": gpusLabel(node) }, squares(node)),
    h("div", { class: "chips" }, chips(node, now)),
  );
}

function phaseChip(node) {
  const tone = BOOTING.has(node.phase) ? "boot" : node.phase === "ready" ? "good" : "";
  return h("span", { class: `chip ${tone}` }, node.phase);
}

function gpusLabel(node) {
  if (BOOTING.has(node.phase)) return `${count(node.gpu_count, "GPU")} booting`;
  return `${node.gpu_busy_count} of ${count(node.gpu_count, "GPU")} busy`;
}

function squares(node) {
  const free = BOOTING.has(node.phase) ? "booting" : LEAVING.has(node.phase) ? "leaving" : "";
  return Array.from({ length: node.gpu_count }, (_, index) =>
    h("i", { class: `gpu ${index < node.gpu_busy_count ? "busy" : free}` }),
  );
}

function chips(node, now) {
  const price = node.price_micro_usd_per_hour;
  const seconds = node.notice && node.notice.reclaim_at ? (new Date(node.notice.reclaim_at) - now) / 1000 : null;
  const load = node.gpu_utilization_ratio;
  return [
    node.notice && h("span", { class: "chip danger" }, seconds === null ? "notice" : seconds > 0 ? `reclaim in ${span(seconds)}` : "deadline passed"),
    node.capacity_type && h("span", { class: `chip ${node.capacity_type === "spot" ? "work" : "quiet"}` }, node.capacity_type),
    node.gpu_model && h("span", { class: "chip quiet" }, `${node.gpu_count} × ${node.gpu_model}`),
    load !== null && h("span", { class: "chip quiet", title: "mean GPU utilisation of the last minute" }, `${Math.round(100 * load)} % used`),
    price !== null && h("span", { class: "chip quiet" }, `${usd(price)}/h`),
  ].filter(Boolean);
}

export function jobs(items, now) {
  const columns = ["Job", "State", "GPUs", "Where", "Waits / runs", "Up to"];
  const head = h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col", class: name === "Up to" ? "number" : null }, name))));
  if (!items.length) return [head, h("tbody", {}, h("tr", {}, h("td", { class: "empty", colspan: columns.length }, "Nothing waits and nothing runs.")))];
  return [head, h("tbody", {}, items.map((job) => jobRow(job, now)))];
}

function jobRow(job, now) {
  const gpus = `${job.members > 1 ? `${job.members} × ` : ""}${job.gpu_count}${job.gpu_type ? ` ${job.gpu_type}` : ""}`;
  const where = job.node_names.length > 2 ? count(job.node_names.length, "node") : job.node_names.join(", ");
  return h(
    "tr",
    {},
    h("td", { class: "grow" }, job.job_name, h("span", { class: "under" }, `${job.project_id} · priority ${job.priority}`)),
    h("td", {}, h("span", { class: `chip ${JOB_TONE[job.status] || ""}` }, job.status), job.queue_position ? h("span", { class: "under" }, `number ${job.queue_position} in the queue`) : null),
    h("td", {}, gpus),
    h("td", { class: "grow" }, where || "—", job.message ? h("span", { class: "under" }, job.message) : null),
    h("td", {}, jobTime(job, now), jobStart(job, now)),
    h("td", { class: "number" }, job.estimated_cost_usd === null ? "—" : usd(job.estimated_cost_usd * 1e6)),
  );
}

/** When a job that waits is expected to start; what that is known by is told on hover. */
function jobStart(job, now) {
  if (job.status === "running" || !job.queue_position) return null;
  if (!job.estimated_start_time) return h("span", { class: "under", title: job.estimate_basis }, "start unknown");
  const left = (new Date(job.estimated_start_time) - now) / 1000;
  const latest = job.estimated_start_latest ? `, ${shortTime(job.estimated_start_latest)} at the latest` : "";
  return h("span", { class: "under", title: `${job.estimate_basis}${latest}` }, left > 0 ? `starts in ${span(left)}` : "starts now");
}

function jobTime(job, now) {
  const from = job.status === "running" && job.started_at ? job.started_at : job.created_at;
  return span((now - new Date(from)) / 1000);
}

const VERBS = { buy_node: ["buy", "buy"], drain_node: ["drain", "drain"], cancel_drain: ["keep", "buy"], release_instance: ["release", "drain"] };

/** `names` maps subjects such as `job/<id>` to what people call them. */
export function plans(list, names) {
  if (!list.items.length) return [h("li", { class: "empty" }, "No plan yet. The first one comes with the first change.")];
  return list.items.map((plan) =>
    h(
      "li",
      {},
      h("div", { class: "when" }, h("time", { datetime: plan.as_of }, clockTime(plan.as_of)), h("span", { class: "mono", title: plan.plan_id }, `plan ${plan.sequence}`)),
      plan.decisions.map((decision) => decisionLine(...VERBS[decision.decision], decision.sentence, decision.subject)),
      heldBack(plan.deferred, names).map(([sentence, about]) => decisionLine("not yet", "held", sentence, about.join(", "))),
      plan.decisions.length + plan.deferred.length ? null : decisionLine("nothing", "held", "What was held back is done or no longer wanted.", ""),
    ),
  );
}

/** What the policy in shadow would do and the one in force does not, and the other way round: now, then earlier. */
export function shadow(answer) {
  const same = answer.now.length ? [] : [h("li", { class: "empty" }, "Both policies decide the same of what is there now.")];
  return [...same, ...[...answer.now, ...answer.earlier].map(shadowCard)];
}

function shadowCard(one) {
  const lasting = one.until_at ? `${clockTime(one.since_at)} to ${clockTime(one.until_at)}` : `since ${clockTime(one.since_at)}`;
  return h(
    "li",
    {},
    h("div", { class: "when" }, h("time", { datetime: one.since_at }, lasting), h("span", {}, one.name.replace("/", " "))),
    shadowLine("real", one.real),
    shadowLine("shadow", one.shadow),
  );
}

function shadowLine(whose, side) {
  const tone = side.what in VERBS ? VERBS[side.what][1] : "held";
  return decisionLine(whose, tone, side.sentence || "Nothing.", "");
}

export function shadowNote(answer) {
  if (answer.is_compared_with_scaler === false) return "compared with another policy than the scaler's";
  return answer.now.length ? `${count(answer.now.length, "decision")} otherwise now; acts on nothing` : "acts on nothing";
}

/** Sentences with all that each is about: a reason that ten jobs share is told once. */
function heldBack(held, names) {
  const about = new Map();
  for (const { sentence, subject } of held) about.set(sentence, [...(about.get(sentence) || []), names.get(subject) || subject]);
  return [...about];
}

function decisionLine(word, tone, sentence, subject) {
  const isHeld = tone === "held";
  return h(
    "div",
    { class: "decision" },
    h("span", { class: `verb ${tone}` }, word),
    h("span", { class: isHeld ? "sentence held-sentence" : "sentence" }, sentence, h("span", { class: "about" }, subject)),
  );
}

/** Bars of allocated and idle money; `width` is the room in pixels, so that labels keep their size. */
export function money(cost, width) {
  if (!cost) return [h("p", { class: "empty" }, "Still being added up.")];
  const spans = cost.spans.slice(-24);
  if (!spans.length) return [h("p", { class: "empty" }, "Nothing was charged yet.")];
  const height = 190, left = 52, bottom = 20, top = 8;
  const high = niceCeiling(Math.max(...spans.map((part) => part.allocated_micro_usd + part.idle_micro_usd)));
  const y = (micro) => top + (height - top - bottom) * (1 - micro / high);
  const step = (width - left) / Math.max(spans.length, 8);
  const label = `Money by ${cost.span_seconds === 3600 ? "hour" : span(cost.span_seconds)}: ${usd(cost.allocated_micro_usd)} allocated, ${usd(cost.idle_micro_usd)} idle in all`;
  const picture = s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label },
    [0, high / 2, high].map((mark) => [
      s("line", { class: "grid", x1: left, x2: width, y1: y(mark), y2: y(mark) }),
      s("text", { x: left - 6, y: y(mark) + 4, "text-anchor": "end" }, usd(mark)),
    ]),
    spans.map((part, index) => bar(part, left + index * step, step, y, index % Math.ceil(spans.length / Math.max(2, width / 90)) === 0 ? height - 4 : null)),
  );
  const legend = [["allocated", "allocated to work"], ["idle", "idle"]].map(([name, text]) =>
    h("li", {}, h("i", { class: `gpu ${name}`, "aria-hidden": "true" }), text),
  );
  return [picture, h("figcaption", {}, h("ul", { class: "legend" }, legend))];
}

function bar(part, x, step, y, labelY) {
  const total = part.allocated_micro_usd + part.idle_micro_usd;
  const wide = Math.min(step * 0.72, 44);
  return s(
    "g",
    {},
    s("title", {}, `${shortTime(part.from_at)}: ${usd(part.allocated_micro_usd)} allocated, ${usd(part.idle_micro_usd)} idle`),
    s("rect", { class: "allocated", x, width: wide, y: y(part.allocated_micro_usd), height: y(0) - y(part.allocated_micro_usd) }),
    s("rect", { class: "idle", x, width: wide, y: y(total), height: y(part.allocated_micro_usd) - y(total) }),
    labelY ? s("text", { x, y: labelY }, shortTime(part.from_at)) : null,
  );
}

function niceCeiling(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 4, 5, 10].map((factor) => factor * unit).find((mark) => mark >= value);
}

const SAY = {
  "job.requested": (fact) => `${fact.job_name} was asked for`,
  "job.queued": (fact) => `${fact.spec.job_name} waits for ${count(fact.spec.member_count * fact.spec.member_resources.gpu_count, "GPU")}`,
  "job.rejected": (fact) => `${fact.job_name || "a request"} was refused: ${fact.mistakes.map((one) => `${one.field} ${one.reason}`).join("; ")}`,
  "job.placed": (fact) => `placed on ${[...new Set(fact.node_names)].join(", ")}`,
  "job.preempted": (fact) => `lost its place: ${fact.cause}`,
  "job.finished": (fact) => `${fact.outcome}${fact.message ? `: ${fact.message}` : ""}`,
  "job.estimated": (fact) => (fact.estimate.start_at ? `expected to start at ${clockTime(fact.estimate.start_at)}` : "nobody knows when it starts"),
  "job.estimate_scored": (fact) => (fact.start_error_seconds === null ? "nothing was expected" : `started ${span(Math.abs(fact.start_error_seconds))} ${fact.start_error_seconds < 0 ? "sooner" : "later"} than expected`),
  "policy.directive_given": (fact) => `${directiveTold(fact.directive)}, by ${fact.given_by}: ${fact.reason}`,
  "policy.directive_lifted": (fact) => `${fact.key}, by ${fact.lifted_by}${fact.reason ? `: ${fact.reason}` : ""}`,
  "policy.changed": (fact) => fact.differences.join("; ") || fact.policy_digest.slice(0, 8),
  "scaling.plan_made": (fact) => `${count(fact.plan.decisions.length, "decision")}, ${fact.plan.deferred.length} held back`,
  "scaling.node_ordered": (fact) => `${fact.offer.instance_type} in ${fact.offer.zone}, ${fact.offer.capacity_type}`,
  "scaling.node_launched": (fact) => `${fact.instance_type} in ${fact.zone}, ${fact.capacity_type}`,
  "scaling.launch_refused": (fact) => `${fact.offer.instance_type} in ${fact.offer.zone}: ${fact.code}`,
  "scaling.drain_started": (fact) => `${fact.node_name}${fact.is_voluntary ? "" : ", not by choice"}`,
  "scaling.checkpoint_requested": (fact) => `${fact.pods.join(", ")} on ${fact.node_name}`,
  "scaling.pod_evicted": (fact) => `${fact.pod} from ${fact.node_name}`,
  "spot.notice_received": (fact) => `${fact.node_name || fact.provider_id}: ${fact.kind}`,
  "cost.accrued": (fact) => `${usd(fact.total_micro_usd)} for ${fact.node_name || fact.provider_id}`,
  "pod.observed": (fact) => `${fact.namespace}/${fact.name} ${fact.phase}${fact.node_name ? ` on ${fact.node_name}` : ""}`,
  "node.observed": (fact) => `${fact.name} ${fact.is_ready ? "ready" : "not ready"}, ${count(fact.allocatable.gpu_count || 0, "GPU")}`,
  "node.instance_observed": (fact) => `${fact.instance_type} ${fact.state}`,
};

export const noEvents = () => [h("li", { class: "empty" }, "None yet.")];

export function event(fact, isFresh) {
  const subject = fact.type.replace(/\.v\d+$/, "");
  const data = fact.data;
  const say = SAY[subject] || (() => data.node_name || data.name || data.job_id || "");
  return h(
    "li",
    { class: isFresh ? "fresh" : null },
    h("time", { datetime: fact.time }, clockTime(fact.time)),
    h("span", { class: "text" }, h("span", { class: "subject" }, subject), " ", say(data)),
  );
}
