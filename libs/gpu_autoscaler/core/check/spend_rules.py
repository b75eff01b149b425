"""Rules of the plan check on spend by day and month: no purchase exceeds a limit, no removal follows from a doubtful
ledger.

Counted again from nodes and charges, in its own way: by the seconds of each node's time.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from fractions import Fraction

from gpu_autoscaler.core.check.placement_rules import job_named
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.drain import SpendExhausted

_ENDING_SECONDS = 120.0  # as `plan` allows for the end of an instance
_SECONDS_PER_HOUR = 3600
_ROUNDINGS = 10_000  # micro-dollars
_LEDGER_SECONDS_MAX = 900.0  # of time that the cloud has confirmed and the ledger has not charged
_Limit = tuple[str, str, int]  # owner, period, micro-dollars


def spend_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each limit that past, promised and planned spend may exceed together."""
    bought = plan.purchases
    limits = list(spend_limits(policy))
    if not bought or not limits:
        return
    yield from _work_seconds_violations(bought, state)
    for owner, period, most in limits:
        mine = [buy for buy in bought if owner in _owners(buy.pool, buy.offer.zone, dict(buy.labels))]
        if not mine:
            continue
        if state.ledger_reported_at is None:
            yield Violation(f"{len(mine)} nodes are bought, and the spend of {owner} in the {period} is unknown", *mine)
            continue
        _, end = period_bounds(period, plan.as_of)
        total = spent(owner, period, plan.as_of, state)
        for view in ours(owner, state, plan.as_of):
            until = min(end, _latest_end(view, state, policy, plan.as_of) or end)
            total += _price(view.price_micro_usd_per_hour, (until - plan.as_of).total_seconds())
        for decision in mine:
            seconds = (end - plan.as_of).total_seconds()
            tail = _tail(policy)
            if decision.work_seconds_max is not None and tail is not None:
                seconds = min(seconds, policy.boot_seconds_max + decision.work_seconds_max + tail)
            total += _price(decision.offer.price_micro_usd_per_hour, seconds)
        if total > most:
            yield Violation(
                f"{owner} may spend {float(total):.0f} micro-dollars in the {period}; its limit is {most}", *mine
            )


def spend_removal_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each removal for a spend budget that is not exceeded, or against protection."""
    hard = {(owner, period): most for owner, period, most in spend_limits(policy, only_hard=True)}
    for decision in plan.decisions:
        if not isinstance(decision, DrainNode | ReleaseInstance) or not isinstance(decision.reason, SpendExhausted):
            continue
        owner, period = decision.reason.owner, decision.reason.period
        most, (_, end) = hard.get((owner, period)), period_bounds(period, plan.as_of)
        rest = spent(owner, period, plan.as_of, state) + sum(
            _price(view.price_micro_usd_per_hour, (end - plan.as_of).total_seconds())
            for view in ours(owner, state, plan.as_of)
        )
        # Tolerance for rounding: the possible cost to the end of the period is far larger where it matters.
        if most is None or rest + _ROUNDINGS < most:
            yield Violation(
                f"{decision.action_id} removes a node for a spend budget, but no hard limit of {owner} is at risk",
                decision,
            )
        if (doubt := _ledger_doubt(owner, plan.as_of, state)) is not None:
            yield Violation(
                f"{decision.action_id} removes a node for the spend budget of {owner}, but {doubt}", decision
            )
        if isinstance(decision, DrainNode):
            yield from _marked(decision, state)


def _ledger_doubt(owner: str, as_of: datetime, state: ClusterState) -> str | None:
    """Return why the spend of the owner is certainly unknown; None: it may be known."""
    if state.ledger_reported_at is None:
        return "the ledger has not reported"
    for view in ours(owner, state, as_of):
        if view.price_micro_usd_per_hour is None:
            return f"the price of {view.name} is unknown"
    ends: dict[ProviderId, datetime] = {
        view.provider_id: as_of
        for view in ours("cluster", state, as_of)
        if view.provider_id is not None and not view.is_booting
    }
    for instance in state.instances.values():
        if instance.terminated_at is not None:
            ends.setdefault(instance.provider_id, instance.terminated_at)
        seen_at, end = state.instances_seen_at.get(instance.provider_id), ends.get(instance.provider_id)
        charge = state.charges.get(instance.provider_id)
        if seen_at is None or end is None or (charge is not None and charge.is_corrected):
            continue
        since = instance.launched_at if charge is None else max(instance.launched_at, charge.until_at)
        if (seconds := (min(seen_at, as_of, end) - since).total_seconds()) > _LEDGER_SECONDS_MAX:
            return f"the ledger has not charged {seconds:.0f} s of {instance.provider_id}"
    return None


def _marked(drain: DrainNode, state: ClusterState) -> Iterator[str]:
    """Yield removals of work that is protected whatever it costs."""
    node = state.nodes.get(drain.node_uid)
    keys = (labels.SCALE_DOWN_DISABLED, labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT)
    if node is not None and any(key in keys and value == "true" for key, value in node.annotations):
        yield Violation(
            f"node {drain.node_name} is removed for a spend budget, but is protected by an annotation", drain
        )
    for pod in state.pods.values():
        is_work = pod.phase not in ("succeeded", "failed") and pod.owner_kind not in ("DaemonSet", "Node")
        if pod.node_name != drain.node_name or not is_work or pod.deleting_since is not None:
            continue
        marks, job = dict(pod.annotations), None if pod.job_id is None else state.jobs.get(pod.job_id)
        is_kept = job is not None and job.queued is not None and not job.queued.spec.is_preemptible
        is_marked = "true" in (marks.get(labels.DO_NOT_DISRUPT), marks.get(labels.KARPENTER_DO_NOT_DISRUPT))
        if is_kept or is_marked or marks.get(labels.SAFE_TO_EVICT) == "false" or pod.owner_kind is None:
            yield Violation(
                f"node {drain.node_name} is removed for a spend budget, but {pod.namespace}/{pod.name} is protected",
                drain,
            )


def spend_limits(policy: ScalingPolicy, *, only_hard: bool = False) -> Iterator[_Limit]:
    """Yield every limit of the policy by owner and period."""
    owned = [("", policy.limits.spend)]
    for kind, parts in (("zone", policy.limits.zones), ("project", policy.limits.projects)):
        owned += [(f"{kind}/{part.name}", part.spend) for part in parts]
    owned += [(f"pool/{pool.name}", pool.spend) for pool in policy.pools]
    for owner, money in owned:
        for period, most in (("day", money.day_micro_usd_max), ("month", money.month_micro_usd_max)):
            if most is not None and (money.is_hard or not only_hard):
                yield owner or "cluster", period, most


def period_bounds(period: str, at: datetime) -> tuple[datetime, datetime]:
    """Return when the day or month of this instant begins and ends."""
    day = datetime(at.year, at.month, at.day, tzinfo=UTC)
    if period == "day":
        return day, day + timedelta(days=1)
    month, following = day.replace(day=1), at.month % 12 + 1
    return month, month.replace(month=following, year=at.year + (following == 1))


def spent(owner: str, period: str, as_of: datetime, state: ClusterState) -> Fraction:
    """Return what was charged to the owner, and the price of its time since that was not charged."""
    start, _ = period_bounds(period, as_of)
    name = start.isoformat()[: 10 if period == "day" else 7]
    total = Fraction(state.spent.get(name, {}).get(owner, 0))
    counted = set()
    for view in ours(owner, state, as_of):
        counted.add(view.provider_id)
        began = as_of if view.order is None or view.order.planned_at is None else view.order.planned_at
        if view.order is not None and view.order.launched is not None:
            began = view.order.launched.launched_at
        if view.instance is not None:
            began = view.instance.launched_at
        charge = None if view.provider_id is None else state.charges.get(view.provider_id)
        since = max(start, began if charge is None else max(began, charge.until_at))
        total += _price(view.price_micro_usd_per_hour, (as_of - since).total_seconds())
    for instance in state.instances.values():
        charge = state.charges.get(instance.provider_id)
        if instance.terminated_at is None or instance.provider_id in counted or (charge and charge.is_corrected):
            continue
        order = None if instance.action_id is None else state.orders.get(instance.action_id)
        decision = None if order is None else order.decision
        node_labels = {} if decision is None else dict(decision.labels)
        if owner in _owners(None if decision is None else decision.pool, instance.zone, node_labels):
            since = max(start, instance.launched_at if charge is None else max(instance.launched_at, charge.until_at))
            total += _price(instance.price_micro_usd_per_hour, (instance.terminated_at - since).total_seconds())
    return total


def ours(owner: str, state: ClusterState, as_of: datetime) -> list[NodeView]:
    """Return the nodes that count against the owner's limits."""
    return [
        view
        for view in node_views(state, as_of)
        if view.is_ours and view.is_counted and owner in _owners(view.pool, view.zone, view.labels)
    ]


def _owners(pool: str | None, zone: str | None, node_labels: Mapping[str, str]) -> tuple[str, ...]:
    return ("cluster", f"pool/{pool}", f"zone/{zone}", f"project/{node_labels.get(labels.PROJECT_ID)}")


def _price(price_micro_usd_per_hour: int | None, seconds: float) -> Fraction:
    return Fraction((price_micro_usd_per_hour or 0) * max(0.0, seconds)) / _SECONDS_PER_HOUR


def _tail(policy: ScalingPolicy) -> float | None:
    if any(pool.nodes_count_min or pool.is_paused for pool in policy.pools):
        return None
    if policy.nodes_count_min or policy.headrooms or policy.scheduled_limits or policy.forecast.is_on:
        return None
    kept = [policy.idle_seconds if pool.idle_seconds is None else pool.idle_seconds for pool in policy.pools]
    idle_seconds = max(policy.idle_seconds_max if seconds is None else seconds for seconds in kept)
    stays_seconds = max(idle_seconds, policy.scale_down_cooldown_seconds)
    return stays_seconds + policy.drain_seconds_max + _ENDING_SECONDS


def _latest_end(view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> datetime | None:
    """Return the latest end of the node; None: unknown."""
    drain = None if view.drain is None else view.drain.decision
    if view.phase is NodePhase.FAILED and view.node is not None and view.node.is_ready and _has_work(view, state):
        return None
    if view.phase in (NodePhase.DRAINED, NodePhase.TERMINATING, NodePhase.FAILED):
        return as_of + timedelta(seconds=_ENDING_SECONDS)
    if isinstance(drain, DrainNode) and not drain.is_voluntary:
        return max(drain.deadline_at, as_of) + timedelta(seconds=_ENDING_SECONDS)
    tail, decision = _tail(policy), None if view.order is None else view.order.decision
    if tail is None or view.phase is NodePhase.LOST:
        return None
    if view.is_booting:
        if decision is None or decision.work_seconds_max is None or view.usable_by is None:
            return None
        return view.usable_by + timedelta(seconds=decision.work_seconds_max + tail)
    ends = [as_of]
    for pod in state.pods.values():
        if (
            pod.node_name != view.name
            or pod.phase in ("succeeded", "failed")
            or pod.owner_kind in ("DaemonSet", "Node")
        ):
            continue
        job = None if pod.job_id is None else state.jobs.get(pod.job_id)
        if job is None or job.queued is None:
            return None
        ends.append((pod.started_at or as_of) + timedelta(seconds=job.queued.spec.duration_seconds_max))
    return max(ends) + timedelta(seconds=tail)


def _has_work(view: NodeView, state: ClusterState) -> bool:
    return any(
        pod.node_name == view.name
        and pod.phase not in ("succeeded", "failed")
        and pod.owner_kind not in ("DaemonSet", "Node")
        for pod in state.pods.values()
    )


def _work_seconds_violations(bought: list[BuyNode], state: ClusterState) -> Iterator[str]:
    """Yield purchases that allow less time than the longest of their work takes. Of replacements bought together one
    has to allow it, as they do not declare which pod goes where."""
    for decision in bought:
        for key in getattr(decision.reason, "demand", ()):
            kind, _, name = key.partition("/")
            pod = next((pod for pod in state.pods.values() if pod.pod_uid == name), None) if kind == "pod" else None
            job_id = job_named(key) if pod is None else pod.job_id
            job = None if job_id is None else state.jobs.get(job_id)
            longest = None if job is None or job.queued is None else job.queued.spec.duration_seconds_max
            allowed = [purchase.work_seconds_max for purchase in _same_replacement(decision, bought)]
            if all(seconds is not None and (longest is None or longest > seconds) for seconds in allowed):
                yield Violation(
                    f"{decision.offer.key} is bought for {allowed[0]:g} s of work, and {key} may take longer",
                    decision,
                    demand=(key,),
                )


def _same_replacement(decision: BuyNode, bought: list[BuyNode]) -> list[BuyNode]:
    """Return the purchase, with the others that replace the same nodes."""
    others = (purchase for purchase in bought if purchase is not decision and purchase.reason == decision.reason)
    return [decision, *(others if isinstance(decision.reason, ReplacesNodes) else ())]
