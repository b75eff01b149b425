// Panels of the page. Pure functions from an answer of the gateway to elements. `data-key` names what an element is about.

import { clockTime, count, duration, h, s, short, shortTime, usd } from "./format.js";

const PLANS_SHOWN_MAX = 12;
const NODES_DENSE = 24; // with more nodes, cards are small
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
  const meter = s("svg", { viewBox: "0 0 100 5", preserveAspectRatio: "none" }, s("rect", { width: share, height: 5 }));
  return [
    tile("Nodes", [String(nodes)], [kinds.join(", ") || "none yet", booting ? `; ${booting} booting` : ""].join("")),
    tile(
      "GPUs busy",
      [`${status.gpu_busy_count} `, h("small", {}, `of ${status.gpu_count}`)],
      status.gpu_booting_count ? `${count(status.gpu_booting_count, "more GPU")} booting` : status.gpu_count ? `${share} % of usable GPUs` : "no GPUs yet",
      h("dd", { class: "meter", "aria-hidden": "true" }, meter),
    ),
    tile("Jobs waiting", [String(waiting)], waitingDetail(status, waiting)),
    tile("Jobs running", [String(running)], `${ended} ended`),
    tile(
      "Current price",
      [`${usd(status.price_micro_usd_per_hour)} `, h("small", {}, "per hour")],
      status.price_unknown_count ? `${count(status.price_unknown_count, "instance")} without a known price` : "all prices known",
    ),
  ];
}

function waitingDetail(status, waiting) {
  const coming = status.jobs_by_status.provisioning || 0;
  if (status.pods_unschedulable_count) return count(status.pods_unschedulable_count, "unschedulable pod");
  if (coming) return `${coming} with nodes booting`;
  return waiting ? "in the queue" : "queue empty";
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

/** Active directives: who, why, and the time left. */
export function directives(items, now) {
  return items.map((row) =>
    h(
      "li",
      {},
      h("span", { class: "chip boot" }, row.directive.directive),
      h("span", {}, h("b", {}, describeDirective(row.directive)), ` by ${row.given_by}: ${row.reason}`),
      h("span", { class: "note" }, timeLeft(row, now)),
    ),
  );
}

function timeLeft(row, now) {
  if (row.key === "brake") return `since ${shortTime(row.given_at)}, until resumed`;
  return `${duration((new Date(row.until) - now) / 1000)} left, until ${shortTime(row.until)}`;
}

function describeDirective(directive) {
  if (directive.directive === "brake") return "Removals by force held";
  if (directive.directive === "freeze") return "Purchases and voluntary removals suspended";
  if (directive.directive === "pause") return `Pool ${directive.pool} paused`;
  const bounds = [["node", directive.nodes_count_min, directive.nodes_count_max], ["GPU", directive.gpu_count_min, directive.gpu_count_max]]
    .filter(([, least, most]) => (least ?? most ?? null) !== null)
    .map(([unit, least, most]) => {
      if (least === most) return count(least, unit);
      return [["at least", least], ["at most", most]].filter(([, number]) => (number ?? null) !== null).map(([prefix, number]) => `${prefix} ${count(number, unit)}`).join(", ");
    });
  const scope = [directive.pool && `of pool ${directive.pool}`, directive.gpu_model].filter(Boolean);
  return [bounds.join(", "), ...(scope.length ? scope : ["in the cluster"])].join(" ");
}

export function nodesLegend() {
  const kinds = [["busy", "busy"], ["", "free"], ["booting", "booting"], ["leaving", "leaving"]];
  return kinds.map(([name, label]) => h("li", {}, h("i", { class: `gpu ${name}`, "aria-hidden": "true" }), label));
}

export function nodes(list, now) {
  if (!list.items.length) return [h("li", { class: "empty" }, "No nodes. The first job that needs one triggers a purchase.")];
  return list.items.map((node) => nodeCard(node, now));
}

export const isDense = (list) => list.items.length > NODES_DENSE;

/** A name that opens its explanation. `place` tells apart the same name in several panels. */
function whyButton(kind, name, label, place) {
  return h("button", { type: "button", class: "why", "data-why": `${kind}/${name}`, "data-key": `${place}/${kind}/${name}`, "aria-haspopup": "dialog" }, label);
}

const nodeTitle = (node) => (node.node_uid ? node.name : `order ${short(node.action_id || node.name)}`);

function nodeCard(node, now) {
  const type = [node.instance_type, node.zone].filter(Boolean).join(" · ");
  return h(
    "li",
    { class: `node${node.notice ? " noticed" : ""}${LEAVING.has(node.phase) ? " gone" : ""}`, "data-key": node.node_uid || node.name },
    h("div", { class: "line" }, h("span", { class: "name" }, whyButton("node", node.name, nodeTitle(node), "nodes")), phaseChip(node)),
    h("div", { class: "what" }, type || "type unknown yet"),
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
    node.notice && h("span", { class: "chip danger" }, seconds === null ? "interruption notice" : seconds > 0 ? `reclaim in ${duration(seconds)}` : "deadline passed"),
    node.capacity_type && h("span", { class: `chip ${node.capacity_type === "spot" ? "work" : "quiet"}` }, node.capacity_type),
    node.gpu_model && h("span", { class: "chip quiet" }, node.gpu_model),
    load !== null && h("span", { class: "chip quiet" }, `${Math.round(100 * load)} % used`),
    price !== null && h("span", { class: "chip quiet" }, `${usd(price)}/h`),
  ].filter(Boolean);
}

export function jobs(items, now) {
  const columns = ["Job", "State", "GPUs", "Nodes", "Waiting / running", "Est. cost"];
  const head = h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col", class: name === "Est. cost" ? "number" : null }, name))));
  if (!items.length) return [head, h("tbody", {}, h("tr", {}, h("td", { class: "empty", colspan: columns.length }, "No waiting or running jobs. Submit one with: gpu-autoscaler jobs submit --help")))];
  return [head, h("tbody", {}, items.map((job, index) => jobRows(job, items[index - 1], now, columns.length)))];
}

/** The row of a job, and one for why it waits: many jobs wait for the same reason, which is shown with the first. */
function jobRows(job, previous, now, columnsCount) {
  const gpus = `${job.members > 1 ? `${job.members} × ` : ""}${job.gpu_count}${job.gpu_type ? ` ${job.gpu_type}` : ""}`;
  const where = job.node_names.length > 2 ? count(job.node_names.length, "node") : job.node_names.join(", ");
  const message = previous && previous.message === job.message ? "Same reason as above." : job.message;
  const row = h(
    "tr",
    { "data-key": job.job_id },
    h("td", { class: "grow" }, whyButton("job", job.job_id, job.job_name, "jobs"), h("span", { class: "under" }, `${job.project_id} · priority ${job.priority}`)),
    h("td", {}, h("span", { class: `chip ${JOB_TONE[job.status] || ""}` }, job.status), job.queue_position ? h("span", { class: "under" }, `queue position ${job.queue_position}`) : null),
    h("td", {}, gpus),
    h("td", { class: "grow" }, where || "—"),
    h("td", {}, jobTime(job, now), jobStart(job, now)),
    h("td", { class: "number" }, job.estimated_cost_usd === null ? "—" : usd(job.estimated_cost_usd * 1e6)),
  );
  if (!job.message) return [row];
  return [row, h("tr", { class: "message", "data-key": `${job.job_id} message` }, h("td", { colspan: columnsCount }, h("div", {}, message)))];
}

/** Estimated start of a waiting job; its basis is in the dialog. */
function jobStart(job, now) {
  if (job.status === "running" || !job.queue_position) return null;
  if (!job.estimated_start_time) return h("span", { class: "under" }, "start unknown");
  const left = (new Date(job.estimated_start_time) - now) / 1000;
  return h("span", { class: "under" }, left > 0 ? `starts in ${duration(left)}` : "starts now");
}

function jobTime(job, now) {
  const from = job.status === "running" && job.started_at ? job.started_at : job.created_at;
  return duration((now - new Date(from)) / 1000);
}

const VERBS = { buy_node: ["buy", "buy"], drain_node: ["drain", "drain"], cancel_drain: ["keep", "buy"], release_instance: ["release", "drain"], remove_orphaned_node: ["remove", "drain"], add_finalizer: ["guard", "deferred"], remove_finalizer: ["unguard", "deferred"], avoid_node: ["avoid", "deferred"], open_node: ["open", "deferred"], request_checkpoints: ["save", "drain"], requeue_job: ["requeue", "deferred"], cancel_idle_job: ["cancel", "drain"], announce_reservation_end: ["notice", "drain"] };

/** Acts of upkeep are missing in answers of earlier gateways. */
const decisionsOf = (plan) => [...plan.decisions, ...(plan.upkeep ?? [])];

/** `names` maps subjects such as `job/<id>` to display names. What the next newer plan defers as well is left out. */
export function plans(list, names) {
  if (!list.items.length) return [h("li", { class: "empty" }, "No plan yet. The first change of the cluster triggers one.")];
  return withoutRepetition(list.items).slice(0, PLANS_SHOWN_MAX).map(({ plan, groups, first }) =>
    h(
      "li",
      { "data-key": plan.plan_id },
      h(
        "div",
        { class: "when" },
        h("time", { datetime: plan.as_of }, clockTime(plan.as_of)),
        h("span", {}, first === plan ? `plan ${plan.sequence}` : `plan ${plan.sequence}, like all since ${clockTime(first.as_of)}`),
      ),
      decisionsOf(plan).map((decision) => decisionLine(...VERBS[decision.decision], decision.sentence, subjectLabel(decision))),
      groupBySentence(groups, (subject) => objectLabel(subject, names, plan.plan_id)).map(([sentence, objects]) => decisionLine("deferred", "deferred", sentence, objects)),
      unlistedCount(plan) ? decisionLine("deferred", "deferred", `${count(unlistedCount(plan), "more object")} deferred.`, Object.keys(plan.deferred_unlisted).join(", ")) : null,
      decisionsOf(plan).length + plan.deferred.length + unlistedCount(plan) ? null : decisionLine("none", "deferred", "Previously deferred actions are done or no longer needed.", ""),
    ),
  );
}

/** Plans, newest first, with the groups to show of each; `first` is the oldest of a row of plans that say the same. A
 * reason with a countdown differs in every plan by its figures alone. */
function withoutRepetition(items) {
  const shown = [];
  let repeated = new Set();
  for (const plan of items) {
    const all = deferredGroups(plan);
    const groups = all.map((group) => fresh(group, repeated)).filter(Boolean);
    repeated = new Set(all.flatMap((group) => group.subjects.map((subject) => deferral(group, subject))));
    const isSame = shown.length && !decisionsOf(plan).length && !groups.length && plan.deferred.length;
    if (isSame) shown.at(-1).first = plan;
    else shown.push({ plan, groups, first: plan });
  }
  return shown;
}

const deferral = (group, subject) => `${group.step}/${group.reason}/${subject}`;

/** The group without repeated objects; null if none remains. Of a group that lists only its first objects, these decide. */
function fresh(group, repeated) {
  const subjects = group.subjects.filter((subject) => !repeated.has(deferral(group, subject)));
  if (!subjects.length) return null;
  const isListed = group.objects_count === group.subjects.length;
  return { ...group, subjects, objects_count: isListed ? subjects.length : group.objects_count };
}

/** What a plan defers: nodes, pods and jobs can be explained. */
function objectLabel(subject, names, place) {
  const label = names.get(subject) || subject;
  const [, kind, name] = subject.match(/^(node|pod|job)\/(.+)$/) || [];
  return kind ? whyButton(kind, name, label, place) : label;
}

/** Nodes can be explained; offers and instances cannot. */
const NODE_DECISIONS = new Set(["drain_node", "cancel_drain", "remove_orphaned_node", "add_finalizer", "remove_finalizer", "avoid_node", "open_node", "request_checkpoints"]);

function subjectLabel({ decision, subject, action_id }) {
  if (decision === "cancel_idle_job") return whyButton("job", subject, subject, action_id);
  return NODE_DECISIONS.has(decision) ? whyButton("node", subject, subject, action_id) : subject;
}

/** Differences between shadow and active policy: current ones, then past ones. */
export function shadow(answer) {
  const same = answer.now.length ? [] : [h("li", { class: "empty" }, "Both policies decide the same now.")];
  return [...same, ...[...answer.now, ...answer.earlier].map(shadowCard)];
}

function shadowCard(difference) {
  const lasting = difference.until_at ? `${clockTime(difference.since_at)} to ${clockTime(difference.until_at)}` : `since ${clockTime(difference.since_at)}`;
  return h(
    "li",
    {},
    h("div", { class: "when" }, h("time", { datetime: difference.since_at }, lasting), h("span", {}, difference.name.replace("/", " "))),
    shadowLine("active", difference.real),
    shadowLine("shadow", difference.shadow),
  );
}

function shadowLine(policy, side) {
  const tone = side.outcome in VERBS ? VERBS[side.outcome][1] : "deferred";
  return decisionLine(policy, tone, side.sentence || "No action.", "");
}

export function shadowNote(answer) {
  if (answer.is_compared_with_scaler === false) return "compared with another policy than the scaler's; set the same policy.path";
  return answer.now.length ? `${count(answer.now.length, "difference")} now; not executed` : "not executed";
}

/** Groups of a plan; a plan of 0.2 has none, and names each object. */
function deferredGroups(plan) {
  return plan.deferred_groups.length ? plan.deferred_groups : plan.deferred.map(({ step, reason, sentence, subject }) => ({ step, reason, sentence, subjects: [subject], objects_count: 1 }));
}

const unlistedCount = (plan) => Object.values(plan.deferred_unlisted).reduce((sum, objects) => sum + objects, 0);

/** [sentence, objects]: a reason shared by several groups is shown once, with the first objects and the number of the others. */
function groupBySentence(groups, labelOf) {
  const lines = new Map();
  for (const { sentence, subjects, objects_count } of groups) {
    const line = lines.get(sentence) || { named: [], total: 0 };
    lines.set(sentence, { named: [...line.named, ...subjects], total: line.total + objects_count });
  }
  return [...lines].map(([sentence, { named, total }]) => [
    sentence,
    [...named.map((subject, index) => [index ? ", " : "", labelOf(subject)]), total > named.length ? ` and ${total - named.length} more` : ""],
  ]);
}

function decisionLine(verb, tone, sentence, subject) {
  const isDeferred = tone === "deferred";
  return h(
    "div",
    { class: "decision" },
    h("span", { class: `verb ${tone}` }, verb),
    h("span", { class: isDeferred ? "sentence deferred-sentence" : "sentence" }, sentence, h("span", { class: "about" }, subject)),
  );
}

/** Bars of allocated and idle spend; `width` in pixels, so that labels keep their size. */
export function spend(cost, width) {
  if (!cost) return [h("p", { class: "empty" }, "Charges are still being read.")];
  const spans = cost.spans.slice(-24);
  if (!spans.length) return [h("p", { class: "empty" }, "No charges yet.")];
  const height = 190, left = 52, bottom = 20, top = 8;
  const high = niceCeiling(Math.max(...spans.map((part) => part.allocated_micro_usd + part.idle_micro_usd)));
  const y = (micro) => top + (height - top - bottom) * (1 - micro / high);
  const step = (width - left) / Math.max(spans.length, 8);
  const [allocated, idle] = ["allocated_micro_usd", "idle_micro_usd"].map((name) => spans.reduce((total, part) => total + part[name], 0));
  const [perSpan, shown] = [cost.span_seconds, cost.span_seconds * spans.length].map((seconds) => (seconds % 3600 ? `${seconds / 60} min` : `${seconds / 3600} h`));
  const label = `Spend of ${shown}, per ${perSpan}: ${usd(allocated)} allocated, ${usd(idle)} idle`;
  const chart = s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label },
    [0, high / 2, high].map((mark) => [
      s("line", { class: "grid", x1: left, x2: width, y1: y(mark), y2: y(mark) }),
      s("text", { x: left - 6, y: y(mark) + 4, "text-anchor": "end" }, usd(mark)),
    ]),
    spans.map((part, index) => bar(part, left + index * step, step, y, index % Math.ceil(spans.length / Math.max(2, width / 90)) === 0 ? height - 4 : null)),
  );
  const legend = [["allocated", allocated], ["idle", idle]].map(([name, amount]) =>
    h("li", {}, h("i", { class: `gpu ${name}`, "aria-hidden": "true" }), `${name} ${usd(amount)}`),
  );
  return [chart, h("figcaption", {}, h("ul", { class: "legend" }, legend, h("li", {}, `in ${shown}, shown per ${perSpan}`)))];
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

/** Objects that a recorded plan defers. */
const deferredCount = (plan) => {
  const grouped = (plan.deferred_groups || []).reduce((sum, group) => sum + group.objects_count, 0);
  return plan.deferred.length + grouped + (plan.deferred_unlisted || []).reduce((sum, [, objects]) => sum + objects, 0);
};

const DESCRIBE = {
  "job.requested": (fact) => `${fact.job_name} submitted`,
  "job.queued": (fact) => `${fact.spec.job_name} waits for ${count(fact.spec.member_count * fact.spec.member_resources.gpu_count, "GPU")}`,
  "job.rejected": (fact) => `${fact.job_name || "a request"} rejected: ${fact.violations.map((violation) => `${violation.field} ${violation.reason}`).join("; ")}`,
  "job.placed": (fact) => `placed on ${[...new Set(fact.node_names)].join(", ")}`,
  "job.preempted": (fact) => `preempted: ${fact.cause}`,
  "job.finished": (fact) => `${fact.outcome}${fact.message ? `: ${fact.message}` : ""}`,
  "job.estimated": (fact) => (fact.estimate.start_at ? `expected to start at ${clockTime(fact.estimate.start_at)}` : "estimated start unknown"),
  "job.estimate_scored": (fact) => (fact.start_error_seconds === null ? "no estimate" : `started ${duration(Math.abs(fact.start_error_seconds))} ${fact.start_error_seconds < 0 ? "earlier" : "later"} than estimated`),
  "policy.directive_given": (fact) => `${describeDirective(fact.directive)}, by ${fact.given_by}: ${fact.reason}`,
  "policy.directive_lifted": (fact) => `${fact.key}, by ${fact.lifted_by}${fact.reason ? `: ${fact.reason}` : ""}`,
  "policy.changed": (fact) => fact.differences.join("; ") || fact.policy_digest.slice(0, 8),
  "scaling.plan_made": (fact) => `${count(fact.plan.decisions.length + (fact.plan.upkeep?.decisions.length ?? 0), "decision")}, ${deferredCount(fact.plan)} deferred`,
  "scaling.node_ordered": (fact) => `${fact.offer.instance_type} in ${fact.offer.zone}, ${fact.offer.capacity_type}`,
  "scaling.node_launched": (fact) => `${fact.instance_type} in ${fact.zone}, ${fact.capacity_type}`,
  "scaling.launch_refused": (fact) => `${fact.offer.instance_type} in ${fact.offer.zone}: ${fact.code}`,
  "scaling.drain_started": (fact) => `${fact.node_name}${fact.is_voluntary ? "" : ", forced"}`,
  "scaling.checkpoint_requested": (fact) => `${fact.pods.join(", ")} on ${fact.node_name}`,
  "scaling.pod_evicted": (fact) => `${fact.pod} from ${fact.node_name}`,
  "spot.notice_received": (fact) => `${fact.node_name || fact.provider_id}: ${fact.kind}`,
  "cost.accrued": (fact) => `${usd(fact.total_micro_usd)} for ${fact.node_name || fact.provider_id}`,
  "pod.observed": (fact) => `${fact.namespace}/${fact.name} ${fact.phase}${fact.node_name ? ` on ${fact.node_name}` : ""}`,
  "node.observed": (fact) => `${fact.name} ${fact.is_ready ? "ready" : "not ready"}, ${count(fact.allocatable.gpu_count || 0, "GPU")}`,
  "node.instance_observed": (fact) => `${fact.instance_type} ${fact.state}`,
};

export const noEvents = () => [h("li", { class: "empty" }, "No facts yet.")];

export function event(fact, isFresh) {
  const subject = fact.type.replace(/\.v\d+$/, "");
  const data = fact.data;
  const describe = DESCRIBE[subject] || (() => data.node_name || data.name || data.job_id || "");
  return h(
    "li",
    { class: isFresh ? "fresh" : null, "data-key": fact.id },
    h("time", { datetime: fact.time }, clockTime(fact.time)),
    h("span", { class: "text" }, h("span", { class: "subject" }, subject), " ", describe(data)),
  );
}

// ---- explanations

/** What the page knows of an object of the latest answers, with what it has no room for elsewhere. */
export function facts(kind, name, latest, now) {
  if (kind === "node") {
    const node = latest.nodes?.items.find((item) => item.name === name || item.node_uid === name);
    return { title: node ? `Node ${nodeTitle(node)}` : `Node ${name}`, items: node ? nodeFacts(node, now) : [] };
  }
  if (kind === "job") {
    const job = latest.jobs?.find((item) => item.job_id === name);
    return { title: `Job ${job ? job.job_name : name}`, items: job ? jobFacts(job, now) : [] };
  }
  return { title: `Pod ${name}`, items: [] };
}

function nodeFacts(node, now) {
  const pods = node.pods.map((pod, index) => [index ? ", " : "", whyButton("pod", pod.pod, pod.pod, "why"), ` (${count(pod.gpu_count, "GPU")})`]);
  return [
    definitions([
      ["Phase", node.phase],
      ["Type", [node.instance_type, node.zone, node.capacity_type].filter(Boolean).join(" · ")],
      ["GPUs", `${gpusLabel(node)}${node.gpu_model ? `, ${node.gpu_model}` : ""}`],
      ["Age", node.since ? duration((now - new Date(node.since)) / 1000) : ""],
      ["Price", node.price_micro_usd_per_hour === null ? "unknown" : `${usd(node.price_micro_usd_per_hour)} per hour`],
      ["Pods", pods.length ? pods : "none"],
    ]),
  ];
}

function jobFacts(job, now) {
  const latest = job.estimated_start_latest ? `, at the latest ${shortTime(job.estimated_start_latest)}` : "";
  return [
    definitions([
      ["State", `${job.status}, for ${jobTime(job, now)}`],
      ["Project", `${job.project_id}, priority ${job.priority}`],
      ["Submitted by", job.submitted_by],
      ["Nodes", job.node_names.join(", ")],
      ["Start", job.status === "running" || !job.estimated_start_time ? "" : `${shortTime(job.estimated_start_time)}${latest}`],
      ["Estimate", job.estimate_basis],
    ]),
  ];
}

const definitions = (rows) => h("dl", { class: "facts" }, rows.filter(([, value]) => value.length).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

export const whyPending = () => [h("p", { class: "empty" }, "Reading the recorded facts.")];

export const whyRefused = (detail) => [h("p", { class: "refused", role: "alert" }, detail)];

export function why(answer) {
  return [
    answer.now ? h("p", { class: "now" }, answer.now) : null,
    h("ol", { class: "story" }, answer.sentences.map((sentence) => h("li", {}, sentence))),
  ].filter(Boolean);
}
