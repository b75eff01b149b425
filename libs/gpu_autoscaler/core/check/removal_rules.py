"""Rules of the plan check on removals: protection, budgets, health, forced drains, replacements, utilization.

Shares no code with the steps of `plan`: protections, budgets and capacity are read again, in their simplest form.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from gpu_autoscaler.core.check.spend_rules import spend_removal_violations
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.cron import parse_schedule
from gpu_autoscaler.core.policy.disruption_settings import DisruptionBudget
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.core.state.telemetry_history import GpuTelemetryHistory
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodBudgetObserved, PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.directives import Override
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.jobs import OWNERS_TO_COMPLETION
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import ReplacesNodes, UtilizationHigh
from gpu_autoscaler.model.reasons.drain import (
    AboveOverride,
    BootTimedOut,
    GangAbandoned,
    NodeDeleted,
    NodeDrifted,
    NodeExpired,
    NodeIdle,
    NodeUnderused,
    NodeUnhealthy,
    RebalanceRecommended,
    SpendExhausted,
    SpotReclaim,
)
from gpu_autoscaler.model.resources import Resources

# ---- forced drains and replacements


def forced_drain_violations(
    drain: DrainNode, state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Iterator[str]:
    """Yield a sentence for a forced drain without a fault, age or failed boot, or with too short a deadline."""
    node, rules = state.nodes.get(drain.node_uid), policy.removal
    if node is None:
        return
    age_seconds, limit = (as_of - node.created_at).total_seconds(), rules.expire_seconds_max
    match drain.reason:
        case NodeExpired():
            least = None if limit is None else limit * (1 - rules.expire_jitter_ratio) + rules.expire_grace_seconds
            if least is None or age_seconds < least:
                yield Violation(f"node {drain.node_name} is drained by force at an age of {age_seconds:g} s", drain)
        case NodeUnhealthy():
            if not drain.reason.is_fatal:
                yield Violation(f"node {drain.node_name} is drained by force, though its GPUs still work", drain)
        case BootTimedOut():
            view = next((view for view in node_views(state, as_of) if view.node_uid == drain.node_uid), None)
            if view is None or view.usable_since is not None or view.usable_by is None or as_of < view.usable_by:
                yield Violation(
                    f"node {drain.node_name} is drained by force, though it was usable, or may still be", drain
                )
        case _:
            yield Violation(
                f"node {drain.node_name} is drained by force, which {drain.reason.tag()} does not allow", drain
            )
    if drain.deadline_at < as_of + timedelta(seconds=rules.forced_drain_seconds):
        yield Violation(
            f"node {drain.node_name} is drained by force within less than {rules.forced_drain_seconds:g} s", drain
        )


def replacement_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each replacement that is not cheaper, or was removed within the cooldown."""
    prices = {instance.provider_id: instance.price_micro_usd_per_hour for instance in state.instances.values()}
    for record in state.orders.values():
        if record.launched is not None:
            prices.setdefault(record.launched.provider_id, record.launched.price_micro_usd_per_hour)
    yield from _bought_back(plan, state, policy)
    overhead = policy.node_overhead_micro_usd_per_hour
    spent: Counter[tuple[NodeUid, ...]] = Counter()
    buys: dict[tuple[NodeUid, ...], list[BuyNode]] = defaultdict(list)
    for decision in plan.purchases:
        reason = decision.reason
        if isinstance(reason, ReplacesNodes) and reason.cause == "underused":
            buys[reason.node_uids].append(decision)
            is_paid = decision.offer.capacity_type is CapacityType.RESERVED  # with or without the node
            spent[reason.node_uids] += overhead + (0 if is_paid else decision.offer.price_micro_usd_per_hour or 0)
    for node_uids, price in spent.items():
        instances = [state.nodes[uid].provider_id for uid in node_uids if uid in state.nodes]
        known = [prices.get(instance) for instance in instances if instance is not None]
        # Some prices may be known from the offer alone: nothing is proven for those.
        if (
            None not in known
            and len(known) == len(node_uids)
            and price >= sum((price_there or 0) + overhead for price_there in known)
        ):
            yield Violation(
                f"nodes {', '.join(node_uids)} are replaced to save cost, at {price} micro-dollars an hour",
                *buys[node_uids],
            )


def _bought_back(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield purchases to save cost of a type removed by choice within the cooldown."""
    since = plan.as_of - timedelta(seconds=policy.scale_down_cooldown_seconds)
    left = {
        record.decision.provider_id
        for record in state.drains.values()
        if isinstance(record.decision, DrainNode)
        and record.decision.is_voluntary
        and record.cancelled is None
        and record.planned_at is not None
        and record.planned_at > since
    }
    kinds = {instance.instance_type for instance in state.instances.values() if instance.provider_id in left}
    for decision in plan.purchases:
        reason = decision.reason
        is_for_money = isinstance(reason, ReplacesNodes) and reason.cause == "underused"
        if is_for_money and decision.offer.instance_type in kinds:
            yield Violation(
                f"{decision.offer.key} is bought to save cost, and a node of its type was removed within the cooldown",
                decision,
            )


# ---- health

# A window that ended longer ago proves nothing now. Source: our own; two lost windows and a late one.
_SEEN_SECONDS_MAX = 180.0


def health_violations(
    drains: Iterable[DrainNode], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Iterator[str]:
    """Yield a sentence for each node drained as unhealthy that was healthy recently, and if too many are unhealthy."""
    chosen = [drain for drain in drains if isinstance(drain.reason, NodeUnhealthy)]
    if not chosen:
        return
    rules = policy.removal
    amiss = {
        uid for uid, at in state.unhealthy_since.items() if (as_of - at).total_seconds() >= rules.unhealthy_seconds_max
    }
    fatal = amiss | set(_with_gpus(state, policy, as_of, is_fatal=True))
    sick = fatal | set(_with_gpus(state, policy, as_of, is_fatal=False))
    for drain in chosen:
        if drain.node_uid not in (sick if drain.is_voluntary else fatal):
            yield Violation(f"node {drain.node_name} is drained as unhealthy, and was healthy recently", drain)
    known = sick & state.usable.keys()
    if len(known) > max(rules.unhealthy_nodes_ok_count, rules.unhealthy_ratio_max * len(state.usable)):
        yield Violation(
            f"{len(chosen)} nodes are drained as unhealthy while {len(known)} of {len(state.usable)} appear unhealthy",
            *chosen,
        )


def _with_gpus(state: ClusterState, policy: ScalingPolicy, as_of: datetime, *, is_fatal: bool) -> Iterator[NodeUid]:
    """Yield nodes with a GPU fault that lasted long enough and was present when last observed, just now."""
    before = as_of - timedelta(seconds=policy.removal.gpu_health.evidence_seconds)
    for uid, trail in state.telemetry_history.items():
        is_fresh = as_of - trail.seen_until <= timedelta(seconds=_SEEN_SECONDS_MAX)
        if is_fresh and any(_is_amiss(gpu, policy, before, is_fatal=is_fatal) for gpu in trail.gpus):
            yield uid


def _is_amiss(gpu: GpuTelemetryHistory, policy: ScalingPolicy, before: datetime, *, is_fatal: bool) -> bool:
    rules = policy.removal.gpu_health
    codes = rules.xids_fatal if is_fatal else rules.xids_degraded
    if any(xid in codes and since <= before for xid, since in gpu.xids):
        return True
    if is_fatal:
        marks = (gpu.row_remap_failed_since, gpu.double_bit_since)
        return any(since is not None and since <= before for since in marks)
    return any(-level > rules.celsius_max and since <= before for level, since in gpu.negated_celsius)


# ---- work that is better not moved now

_RETRIES_KEPT_COUNT = 2  # that a job moved by choice must have
_DOUBLINGS_COUNT_MAX = 8  # of the protected time, one for each earlier move of the job


def protection_violations(
    drain: DrainNode, pods: Iterable[PodObserved], state: ClusterState, policy: ScalingPolicy, as_of: datetime
) -> Iterator[str]:
    """Yield a sentence for each pod moved by choice that just began, ends soon, or whose job is protected."""
    rules = policy.removal.protection
    for pod in pods:
        if pod.deleting_since is not None:
            continue
        name = f"node {drain.node_name} is drained by choice, but pod {pod.namespace}/{pod.name}"
        job = None if pod.job_id is None else state.jobs.get(pod.job_id)
        placed = None if job is None else job.placed
        moved_count = 0 if placed is None else placed.attempt - placed.retries_used - 1
        least = timedelta(seconds=rules.run_seconds_min) * 2 ** min(moved_count, _DOUBLINGS_COUNT_MAX)
        if pod.started_at is not None and pod.started_at > as_of - least:
            yield Violation(f"{name} has just begun", drain)
        if job is not None:
            yield from (Violation(f"{name} {what}", drain) for what in _job_protections(job, policy))
        ends_at = _announced_end(pod)
        if ends_at is None and job is not None and job.started is not None and job.queued is not None:
            ends_at = job.started.started_at + timedelta(seconds=job.queued.spec.duration_seconds_max)
        if ends_at is not None and timedelta() <= ends_at - as_of <= timedelta(seconds=rules.ending_soon_seconds):
            yield Violation(f"{name} is about to end", drain)


def _announced_end(pod: PodObserved) -> datetime | None:
    node_labels = [value for key, value in pod.annotations if key == labels.EXPECTED_END]
    try:
        at = datetime.fromisoformat(node_labels[0]) if node_labels else None
    except ValueError:
        return None
    return None if at is None or at.tzinfo is None else at


def _job_protections(job: JobRecord, policy: ScalingPolicy) -> Iterator[str]:
    rules, queued, placed = policy.removal.protection, job.queued, job.placed
    if queued is None or placed is None:
        return
    if rules.job_priority_min is not None and queued.spec.priority >= rules.job_priority_min:
        yield f"is of a job of priority {queued.spec.priority}"
    if min(placed.node_uids, default=None) != max(placed.node_uids, default=None):
        yield "is of a job that runs on several nodes"
    if policy.job_retries_count_max - placed.retries_used < _RETRIES_KEPT_COUNT:
        yield "is of a job that has no retry to spare"


# ---- disruption budgets; schedules are evaluated minute by minute

_MINUTE = timedelta(minutes=1)


def disruption_budget_violations(
    chosen: Collection[DrainNode], moving_count: int, nodes_count: int, policy: ScalingPolicy, as_of: datetime
) -> Iterator[str]:
    """Yield a sentence for each budget exceeded by `moving_count` earlier drains and these of one cause."""
    counts = Counter(_cause(drain) for drain in chosen)
    for budget in policy.removal.disruption_budgets:
        is_bad = any(budget.violations())
        if not is_bad and not _holds(budget, as_of):
            continue
        for cause, count in counts.items():
            if budget.causes and cause not in budget.causes:
                continue
            going = moving_count + count
            causing = [drain for drain in chosen if _cause(drain) == cause]
            if is_bad:
                yield Violation(f"{going} nodes would be removed as {cause} under an invalid budget", *causing)
            elif budget.nodes_count_max is not None and going > budget.nodes_count_max:
                yield Violation(
                    f"{going} nodes would be removed as {cause}; a disruption budget allows {budget.nodes_count_max}",
                    *causing,
                )
            # Rounded up, so less than one node more than the share.
            elif budget.nodes_ratio_max is not None and going - nodes_count * budget.nodes_ratio_max > 1 - 1e-6:
                yield Violation(
                    f"{going} of {nodes_count} nodes would be removed as {cause}; a budget allows a smaller share",
                    *causing,
                )


def _cause(drain: DrainNode) -> str:
    names = {
        NodeUnderused: "underused",
        NodeDrifted: "drifted",
        NodeExpired: "expired",
        NodeUnhealthy: "unhealthy",
        BootTimedOut: "unhealthy",
        RebalanceRecommended: "rebalance_recommended",
    }
    return names.get(type(drain.reason), "empty")


def _holds(budget: DisruptionBudget, as_of: datetime) -> bool:
    if budget.schedule is None or budget.duration_seconds is None:
        return True
    face = parse_schedule(budget.schedule, budget.time_zone)
    at = as_of.replace(second=0, microsecond=0)
    while at > as_of - timedelta(seconds=budget.duration_seconds):
        wall = at.astimezone(face.zone)
        if wall.minute in face.minutes and wall.hour in face.hours and face.starts_on(wall.date()):
            return True
        at -= _MINUTE
    return False


def removal_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each forbidden removal, and for each at-risk node that is not drained."""
    views = node_views(state, plan.as_of)
    drains = plan.drains
    chosen = [drain for drain in drains if not isinstance(drain.reason, SpotReclaim | NodeDeleted | SpendExhausted)]
    releases = plan.releases
    # Read only if needed: most plans touch none of ten thousand pods.
    is_asked = bool(drains) or any(view.notice is not None for view in views)
    pods = _pods_by_node(state) if is_asked else {}
    spend_violations = [drain for drain in drains if isinstance(drain.reason, SpendExhausted)]
    ours: list[DrainNode | ReleaseInstance] = [*chosen, *spend_violations, *releases]
    ours_count = len(ours)
    if policy.is_frozen and ours_count:
        yield Violation(f"{ours_count} nodes are removed by choice while the policy is frozen", *ours)
    if ours_count:
        yield from _stale_watch(ours, plan, state, policy)
    yield from spend_removal_violations(plan, state, policy)
    for drain in drains:
        yield from _node_violations(drain, state, plan.as_of)
    for drain in chosen:
        if drain.is_voluntary:
            yield from _protected_node(drain, state, pods.get(drain.node_name, ()))
            yield from protection_violations(drain, pods.get(drain.node_name, ()), state, policy, plan.as_of)
        else:
            yield from forced_drain_violations(drain, state, policy, plan.as_of)
        yield from _unplaced_pods(drain, drains, views, pods)
        yield from _merged_violations(drain, state, policy, views, pods)
    yield from _broken_budgets([drain for drain in chosen if drain.is_voluntary], state, pods)
    yield from _count_violations(chosen, plan, state, policy, views)
    yield from health_violations(chosen, state, policy, plan.as_of)
    yield from _release_violations(releases, views, plan.as_of)
    yield from _releases_with_work(releases, views, state)
    yield from _abandoned_gang_violations(plan)
    yield from _cancel_violations(plan, state)
    yield from replacement_violations(plan, state, policy)
    yield from _at_risk_violations(plan, drains, views, pods)


def _pods_by_node(state: ClusterState) -> dict[str, list[PodObserved]]:
    """Return the work on each node, without the node's own pods and finished ones."""
    pods: dict[str, list[PodObserved]] = {}
    for pod in state.pods.values():
        has_ended = pod.phase in ("succeeded", "failed")
        if pod.node_name is not None and not has_ended and pod.owner_kind not in ("DaemonSet", "Node"):
            pods.setdefault(pod.node_name, []).append(pod)
    return pods


def _stale_watch(
    ours: Iterable[DrainNode | ReleaseInstance], plan: Plan, state: ClusterState, policy: ScalingPolicy
) -> Iterator[str]:
    for name, synced in (("pods", state.pods_synced), ("nodes", state.nodes_synced)):
        if synced is None or (plan.as_of - synced.seen_at).total_seconds() > policy.watch_age_seconds_max:
            yield Violation(f"nodes are removed by choice on an old or missing list of {name}", *ours)


def _node_violations(drain: DrainNode, state: ClusterState, as_of: datetime) -> Iterator[str]:
    """Yield drains of nodes that do not exist or are not ours, and interruptions without an active notice."""
    node = state.nodes.get(drain.node_uid)
    if node is None or node.name != drain.node_name:
        yield Violation(f"node {drain.node_name} is drained, but there is no such node", drain)
        return
    if drain.provider_id is not None and drain.provider_id != node.provider_id:
        yield Violation(
            f"node {drain.node_name} is drained with an instance that is not its own: {drain.provider_id}", drain
        )
    if isinstance(drain.reason, NodeDeleted):
        if node.deleting_since is None or not node.has_finalizer or not _is_ours(node, state):
            yield Violation(
                f"node {drain.node_name} is drained as deleted, but is not being deleted or lacks our finalizer", drain
            )
        return
    is_chosen = not isinstance(drain.reason, SpotReclaim)
    if is_chosen and not _is_ours(node, state):
        yield Violation(f"node {drain.node_name} is drained by choice, but we did not buy it", drain)
    active_notices = (record for record in state.notices.values() if record.withdrawn is None)
    if not is_chosen and all(record.notice.provider_id != node.provider_id for record in active_notices):
        yield Violation(f"node {drain.node_name} is drained for an interruption, but no notice is active", drain)
    if is_chosen and drain.deadline_at <= as_of:
        yield Violation(f"node {drain.node_name} is drained by choice with a deadline that has passed", drain)


def _is_ours(node: NodeObserved, state: ClusterState) -> bool:
    launched = {order.launched.provider_id for order in state.orders.values() if order.launched is not None}
    return node.action_id is not None or node.provider_id in launched


def _protected_node(drain: DrainNode, state: ClusterState, pods: Iterable[PodObserved]) -> Iterator[str]:
    node = state.nodes.get(drain.node_uid)
    marks = () if node is None else node.annotations
    keys = (labels.SCALE_DOWN_DISABLED, labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT)
    if any(key in keys and value == "true" for key, value in marks):
        yield Violation(f"node {drain.node_name} is drained by choice, but is protected by an annotation", drain)
    for pod in pods:
        if isinstance(drain.reason, NodeIdle | GangAbandoned | AboveOverride):
            yield Violation(
                f"node {drain.node_name} is drained as idle, but pod {pod.namespace}/{pod.name} is there", drain
            )
        job = None if pod.job_id is None else state.jobs.get(pod.job_id)
        is_kept = job is not None and job.queued is not None and not job.queued.spec.is_preemptible
        is_going = pod.deleting_since is not None  # being deleted already
        if not is_going and (is_kept or _is_protected(pod)):
            yield Violation(
                f"node {drain.node_name} is drained by choice, but pod {pod.namespace}/{pod.name} is protected", drain
            )


def _is_protected(pod: PodObserved) -> bool:
    marks = dict(pod.annotations)
    if "true" in (marks.get(labels.DO_NOT_DISRUPT), marks.get(labels.KARPENTER_DO_NOT_DISRUPT)):
        return True
    safe = marks.get(labels.SAFE_TO_EVICT)
    # A pod that saves is requested to do so first.
    starts_over = pod.owner_kind in OWNERS_TO_COMPLETION and labels.CHECKPOINTED_AT not in marks
    loses_work = pod.owner_kind is None or starts_over or pod.has_local_storage
    return safe == "false" or (safe != "true" and loses_work)


def _broken_budgets(
    chosen: list[DrainNode], state: ClusterState, pods: Mapping[str, list[PodObserved]]
) -> Iterator[str]:
    there = [pod for drain in chosen for pod in pods.get(drain.node_name, ())]
    moved = [pod for pod in there if pod.deleting_since is None]  # the others are being deleted already
    for budget in state.budgets.values():
        selected = [pod for pod in moved if _selects(budget, pod)]
        count = len(selected)
        if count > budget.disruptions_allowed:
            name = f"{budget.namespace}/{budget.name}"
            names = {pod.node_name for pod in selected}
            yield Violation(
                f"{count} pods of PodDisruptionBudget {name} would move; it allows {budget.disruptions_allowed}",
                *(drain for drain in chosen if drain.node_name in names),
            )


def _selects(budget: PodBudgetObserved, pod: PodObserved) -> bool:
    marks = dict(pod.labels)
    for need in budget.match_labels:
        value = marks.get(need.key)
        holds = {
            "In": value in need.values,
            "NotIn": value not in need.values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not holds.get(need.operator, True):
            return False
    return budget.namespace == pod.namespace


def _unplaced_pods(
    drain: DrainNode, drains: list[DrainNode], views: tuple[NodeView, ...], pods: Mapping[str, list[PodObserved]]
) -> Iterator[str]:
    """Yield pods that fit on no usable node that stays, each alone and all together in each amount."""
    going = {drain.node_name for drain in drains}
    free = []
    for view in views:
        if view.phase is NodePhase.READY and view.notice is None and view.name not in going:
            taken = [pod.requests for pod in pods.get(view.name, ())]
            free.append((view.gpu_model, sum(taken, start=Resources()), view.allocatable))
    moved = [pod for pod in pods.get(drain.node_name, ()) if pod.deleting_since is None]
    for pod in moved:
        model = pod.gpu_model
        if not any((taken + pod.requests).fits_in(all_) and model in (None, has) for has, taken, all_ in free):
            yield Violation(
                f"node {drain.node_name} is drained by choice, but pod {pod.namespace}/{pod.name} fits nowhere else",
                drain,
            )
    # A node whose allocatable has become less than its pods request takes nothing from what others have free.
    rests = (allocatable - taken for _, taken, allocatable in free if taken.fits_in(allocatable))
    whole = sum(rests, start=Resources())
    requested = sum((pod.requests for pod in moved), start=Resources())
    if not requested.fits_in(whole):
        yield Violation(f"node {drain.node_name} is drained by choice, but its pods do not all fit elsewhere", drain)


def _merged_violations(
    drain: DrainNode,
    state: ClusterState,
    policy: ScalingPolicy,
    views: tuple[NodeView, ...],
    pods: Mapping[str, list[PodObserved]],
) -> Iterator[str]:
    """Yield a node, much of which is requested, that leaves to save cost without a replacement or cheaper capacity."""
    if not isinstance(drain.reason, NodeUnderused) or drain.reason.utilization_ratio is not None:
        return
    view = next((view for view in views if view.node_uid == drain.node_uid), None)
    whole_count = 0 if view is None else view.allocatable.gpu_count
    taken_count = sum(pod.requests.gpu_count for pod in pods.get(drain.node_name, ()))
    if view is None or not whole_count or taken_count / whole_count <= policy.consolidation_requested_ratio_max:
        return
    bought = (order.decision.reason for order in state.orders.values() if order.decision is not None)
    is_replaced = any(isinstance(reason, ReplacesNodes) and drain.node_uid in reason.node_uids for reason in bought)
    is_cheaper = view.capacity_type is CapacityType.ON_DEMAND and any(
        other.phase is NodePhase.READY and other.capacity_type is not CapacityType.ON_DEMAND for other in views
    )
    if not is_replaced and not is_cheaper:
        yield Violation(
            f"node {drain.node_name} leaves to save cost, though {taken_count} of its {whole_count} GPUs are requested",
            drain,
        )


def _count_violations(
    chosen: list[DrainNode], plan: Plan, state: ClusterState, policy: ScalingPolicy, views: tuple[NodeView, ...]
) -> Iterator[str]:
    """Yield too many removals at once, or below the minimum; nodes that never became usable do not count."""
    chosen = [drain for drain in chosen if not isinstance(drain.reason, BootTimedOut)]
    if not chosen:
        return
    kept = {decision.node_uid for decision in plan.decisions if isinstance(decision, CancelDrain)}
    going: set[NodeUid] = {drain.node_uid for drain in chosen}
    if len(going) < len(chosen):
        yield Violation("a node is drained twice by one plan", *chosen)
    moving = set(going)
    for record in state.drains.values():
        decided = record.decision
        is_over = record.drained is not None or record.cancelled is not None or record.terminated is not None
        if (
            isinstance(decided, DrainNode)
            and not isinstance(decided.reason, SpotReclaim | NodeDeleted | BootTimedOut)
            and not is_over
            and decided.node_uid in state.nodes
        ):
            moving.add(decided.node_uid)
    ours = [view for view in views if view.is_ours and view.is_counted]
    usable_count = sum(1 for view in ours if view.usable_since is not None)
    # Rounded up, so less than one node more than the share; binary fractions are off by far less than a millionth.
    if len(moving - kept) - usable_count * policy.disruption_ratio_max > 1 - 1e-6:
        yield Violation(f"{len(moving - kept)} nodes of {usable_count} would be removed by choice at once", *chosen)
    yield from disruption_budget_violations(chosen, len(moving - kept - going), usable_count, policy, plan.as_of)
    staying_count = sum(1 for view in ours if view.node_uid not in going and not view.is_leaving)
    least = min((policy.nodes_count_min, *_override_maxima(plan, state)))
    if staying_count < least:
        yield Violation(f"{staying_count} nodes would be left of at least {least}", *chosen)


def _override_maxima(plan: Plan, state: ClusterState) -> Iterator[int]:
    """Yield maxima of cluster-wide overrides, which precede the policy's minimum."""
    for record in state.directives.values():
        directive = record.given.directive
        if record.lifted is None and plan.as_of < record.given.until and isinstance(directive, Override):
            is_of_all = directive.pool is None and directive.gpu_model is None
            if is_of_all and directive.nodes_count_max is not None:
                yield directive.nodes_count_max


def _release_violations(releases: list[ReleaseInstance], views: tuple[NodeView, ...], as_of: datetime) -> Iterator[str]:
    by_action = {view.action_id: view for view in views}
    for release in releases:
        view = by_action.get(release.order_action_id)
        if view is None or not view.is_ours:
            yield Violation(f"order {release.order_action_id} is released, but is not an open order of ours", release)
        elif view.phase is NodePhase.READY:
            yield Violation(f"order {release.order_action_id} is released, but its node {view.name} is in use", release)
        elif isinstance(release.reason, GangAbandoned | SpendExhausted):
            continue
        elif view.usable_by is not None and as_of < view.usable_by and view.phase is not NodePhase.FAILED:
            yield Violation(f"order {release.order_action_id} is released before its deadline", release)


def _releases_with_work(
    releases: list[ReleaseInstance], views: tuple[NodeView, ...], state: ClusterState
) -> Iterator[str]:
    up = {view.action_id: view.name for view in views if view.node is not None and view.node.is_ready}
    for release in releases:
        name = up.get(release.order_action_id)
        if isinstance(release.reason, BootTimedOut) and name is not None:
            for pod in state.pods.values():
                if pod.node_name == name and pod.phase == "running" and pod.owner_kind not in ("DaemonSet", "Node"):
                    yield Violation(f"node {name} is released while {pod.namespace}/{pod.name} runs on it", release)


def _abandoned_gang_violations(plan: Plan) -> Iterator[str]:
    """Yield removals for an abandoned gang that the plan buys for, or does not defer for that reason."""
    held = {deferral.subject: deferral.reason.tag() for deferral in plan.deferred}
    bought = {decision.gang for decision in plan.purchases}
    for decision in plan.decisions:
        if isinstance(decision, DrainNode | ReleaseInstance) and isinstance(decision.reason, GangAbandoned):
            gang = decision.reason.gang
            if gang in bought or held.get(gang) != decision.reason.defer_reason:
                yield Violation(
                    f"a node of gang {gang} is removed as abandoned, but the gang is not deferred for that reason",
                    decision,
                )


def _cancel_violations(plan: Plan, state: ClusterState) -> Iterator[str]:
    for decision in plan.decisions:
        if isinstance(decision, CancelDrain):
            record = state.drains.get(decision.drain_action_id)
            if record is None or record.drained is not None or record.terminated is not None:
                yield Violation(f"a drain of node {decision.node_name} is canceled that is not in progress", decision)


def _at_risk_violations(
    plan: Plan, drains: list[DrainNode], views: tuple[NodeView, ...], pods: Mapping[str, list[PodObserved]]
) -> Iterator[str]:
    """Yield nodes under notice that are not drained, and their pods that are neither bought for nor deferred."""
    draining = {drain.node_uid for drain in drains if not drain.is_voluntary}
    accounted = {held.subject for held in plan.deferred}
    for decision in plan.decisions:
        accounted.update(getattr(decision.reason, "demand", ()))
    for view in views:
        if view.notice is None or view.node_uid is None:
            continue
        decided = None if view.drain is None else view.drain.decision
        is_forced = isinstance(decided, DrainNode) and not decided.is_voluntary
        is_going = is_forced or view.node_uid in draining or view.phase in (NodePhase.DRAINED, NodePhase.TERMINATING)
        if not is_going:
            yield f"node {view.name} is under notice since {view.notice.first_received_at}, and nothing drains it"
        for pod in pods.get(view.name, ()):
            is_settled = pod.owner_kind is None or pod.deleting_since is not None
            if not is_settled and f"pod/{pod.pod_uid}" not in accounted:
                yield Violation(
                    f"pod {pod.namespace}/{pod.name} loses its node; the plan neither buys for it nor defers it",
                    demand=(f"pod/{pod.pod_uid}",),
                )


# ---- utilization; reads the last window of each node, where `plan` reads the history


def utilization_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each purchase or drain for utilization that the figures or the policy do not justify."""
    bought = [decision for decision in plan.purchases if isinstance(decision.reason, UtilizationHigh)]
    drained = [
        (decision, decision.reason)
        for decision in plan.drains
        if isinstance(decision.reason, NodeUnderused) and decision.reason.utilization_ratio is not None
    ]
    if not bought and not drained:
        return
    if bought and policy.utilization_trigger != "direct":
        yield Violation(
            f"{len(bought)} nodes are bought for utilization alone, which the policy does not allow", *bought
        )
    if len(bought) > 1 or len(drained) > 1:
        yield Violation(
            f"{len(bought) + len(drained)} nodes are bought or removed for utilization at once",
            *bought,
            *(drain for drain, _ in drained),
        )
    ratios = [
        ratio
        for uid, window in state.telemetry.items()
        if uid in state.nodes and (ratio := _busy(window, policy, plan.as_of)) is not None
    ]
    if bought and not any(ratio > policy.utilization.high_ratio for ratio in ratios):
        yield Violation("a node is bought for high utilization, which no node's telemetry shows", *bought)
    for drain, _ in drained:
        known = state.telemetry.get(drain.node_uid)
        ratio = None if known is None else _busy(known, policy, plan.as_of)
        if ratio is None or not 0 < ratio <= policy.utilization.low_ratio:
            yield Violation(
                f"node {drain.node_name} is drained for low utilization, which its telemetry does not show", drain
            )


def _busy(window: GpuNodeSummarized, policy: ScalingPolicy, as_of: datetime) -> float | None:
    """Return the mean over all GPUs of a recent window; None: it is old, or incomplete."""
    ended_at = window.window_started_at + timedelta(seconds=window.window_seconds)
    known = [gpu.utilization_ratio_mean for gpu in window.gpus]
    sure = [ratio for ratio in known if ratio is not None]
    is_old = (as_of - ended_at).total_seconds() > policy.utilization.telemetry_age_seconds_max
    return None if is_old or not sure or len(sure) < len(known) else sum(sure) / len(sure)
