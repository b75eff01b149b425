"""Rules of the plan check on purchases: capacity type, models, cooldowns, refusals, batching, waits, preferences.

Shares no code with `plan`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.check.placement_rules import UNBOUND, has_pod_rules, job_named
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState, JobRecord, OrderRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import ReplacesNodes, UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen, CapacityExpected, SpotAwaited
from gpu_autoscaler.model.scheduling import LabelRequirement

# Classes `system-cluster-critical` and above (Kubernetes documentation, "Pod Priority and Preemption").
_CRITICAL_MIN = 2_000_000_000
_HIGH_PRIORITY = 1000
# Labels and operators of node preferences that offers alone can answer.
_READABLE_KEYS = (labels.ZONE, labels.INSTANCE_TYPE)
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_Workload = PodObserved | JobSpec


def selection_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each purchase of the wrong kind, or at the wrong time."""
    for bought in plan.purchases:
        if bought.gang is not None:
            yield from _too_soon(bought.gang, plan, state, policy)
        if not isinstance(bought.reason, ReplacesNodes):
            for key in getattr(bought.reason, "demand", ()):
                yield from _not_of_a_model(key, bought, state)
        if bought.offer.capacity_type is CapacityType.SPOT and not _is_part(bought, plan):
            for key in getattr(bought.reason, "demand", ()):
                yield from _not_on_spot(key, plan, state, policy)


def _is_part(bought: BuyNode, plan: Plan) -> bool:
    """True for replacements bought together that include a node off spot: they do not declare which pod goes where."""
    return isinstance(bought.reason, ReplacesNodes) and any(
        other.reason == bought.reason and other.offer.capacity_type is not CapacityType.SPOT for other in plan.purchases
    )


def _too_soon(gang: str, plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    record, rules = state.gangs.get(gang), policy.gangs
    if record is None:
        return
    doubled = rules.backoff_seconds_min * 2.0 ** min(record.abandoned_count - 1, 30)
    until = record.abandoned_at + timedelta(seconds=min(doubled, rules.backoff_seconds_max))
    if plan.as_of < until:
        yield Violation(
            f"nodes are bought for gang {gang}, which waits until {until.isoformat()} after it was abandoned",
            demand=(gang,),
        )


def _not_on_spot(key: str, plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    kind, _, name = key.partition("/")
    pod = state.pods.get(PodUid(name)) if kind == "pod" else None
    job_id = job_named(key) if pod is None else pod.job_id
    job = None if job_id is None else state.jobs.get(job_id)
    if job is not None and job.queued is not None:
        if not job.queued.spec.is_preemptible:
            yield Violation(f"spot is bought for job {job_id}, which must not be interrupted", demand=(key,))
        elif _is_at_its_last(job, policy, plan.as_of):
            yield Violation(f"spot is bought for job {job_id}, which was interrupted on spot too often", demand=(key,))
    elif pod is not None and pod.priority >= _CRITICAL_MIN:
        yield Violation(
            f"spot is bought for pod {pod.namespace}/{pod.name}, which is critical to the cluster", demand=(key,)
        )


def _not_of_a_model(key: str, bought: BuyNode, state: ClusterState) -> Iterator[str]:
    job_id = job_named(key)
    job = None if job_id is None else state.jobs.get(job_id)
    if job is None or job.queued is None:
        return
    spec = job.queued.spec
    requested = {spec.gpu_model} - {None} | set(spec.gpu_models)
    # Work without GPUs accepts any node; a request with a model and no GPU is rejected on submission.
    if requested and spec.member_resources.has_gpus and bought.offer.gpu_model not in requested:
        will_do = ", ".join(sorted(filter(None, requested)))
        yield Violation(
            f"{bought.offer.key} is bought for job {spec.job_id}, which accepts only {will_do}", bought, demand=(key,)
        )


def _is_at_its_last(job: JobRecord, policy: ScalingPolicy, as_of: datetime) -> bool:
    if job.preempted is None or all(set(pool.capacity_types) == {CapacityType.SPOT} for pool in policy.pools):
        return False
    if as_of >= job.preempted.preempted_at + timedelta(seconds=policy.spot.on_demand_wait_seconds):
        return False
    return job.preempted.retries_used >= min(policy.spot.interruptions_count_max, policy.job_retries_count_max)


# ---- scale-up cooldown


def cooldown_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each purchase within the cooldown for jobs none of which is urgent."""
    seconds = policy.limits.scale_up_cooldown_seconds
    if not seconds:
        return
    orders = [order for order in state.orders.values() if order.decision is not None and order.planned_at is not None]
    known = [order for order in orders if order.decision and isinstance(order.decision.reason, UnmetDemand)]
    ages = [(plan.as_of - order.planned_at).total_seconds() for order in known if order.planned_at is not None]
    if not ages or min(ages) >= seconds:
        return
    begun = {order.decision.gang for order in known if order.decision is not None}
    for decision in plan.purchases:
        if not isinstance(decision.reason, UnmetDemand):
            continue
        named = [job_named(key) for key in decision.reason.demand]
        jobs = [None if job_id is None else state.jobs.get(job_id) for job_id in named]
        priorities = [None if job is None or job.queued is None else job.queued.spec.priority for job in jobs]
        # Nothing is proven for pods: their urgency follows the priority scale of Kubernetes.
        is_proven = priorities and None not in priorities and max(value or 0 for value in priorities) < _HIGH_PRIORITY
        if is_proven and (decision.gang is None or decision.gang not in begun):
            yield Violation(
                f"{decision.offer.key} is bought {min(ages):g} s after the last one; the cooldown is {seconds:g} s",
                decision,
            )


# ---- refusals by the cloud; `plan` also waits longer after repeated refusals


def is_unavailable(offer: Offer, plan: Plan, state: ClusterState) -> bool:
    """True for an offer under a refusal: of its type and zone, its whole zone, or its quota."""
    for order in state.orders.values():
        refused = order.refused
        if refused is None or refused.retry_at <= plan.as_of or refused.offer.zone != offer.zone:
            continue
        if refused.scope == "zone":
            return True
        same = (refused.offer.instance_type, refused.offer.capacity_type) == (offer.instance_type, offer.capacity_type)
        if refused.scope != "region" and same and not _is_sold_since(order, state):
            return True
        if refused.scope == "region" and _quota(refused.offer) == _quota(offer):
            ends = (
                instance.terminated_at
                for instance in state.instances.values()
                if instance.terminated_at is not None and instance.terminated_at > refused.refused_at
            )
            if not any(ends):  # else something that counted against it may have ended
                return True
    return False


def _quota(offer: Offer) -> tuple[str, str]:
    """Return family and capacity type, which have their own quota in a region; the zone is equal already."""
    return re.split(r"[.-]", offer.instance_type)[0], offer.capacity_type


def _is_sold_since(order: OrderRecord, state: ClusterState) -> bool:
    """True if a later plan launched the same offer, whatever the order of the cloud's answers."""
    refused = order.refused
    assert refused is not None, "only refused orders"  # noqa: S101 - narrows the type
    tried_at = order.planned_at or refused.refused_at
    return any(
        order.decision.offer.key == refused.offer.key and (order.planned_at or order.launched.launched_at) > tried_at
        for order in state.orders.values()
        if order.launched is not None and order.decision is not None
    )


# ---- batching


def batching_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each item in a batch window that is late, alone, urgent, or a gang."""
    held = {entry.subject: entry.reason for entry in plan.deferred if isinstance(entry.reason, BatchWindowOpen)}
    if not held:
        return
    longest = timedelta(seconds=policy.batching.wait_seconds_max)
    unbound_count = len(UNBOUND.of(state))
    unplaced_count = sum(job.queued is not None and job.finished is None for job in state.jobs.values())
    if unbound_count + unplaced_count < 2:
        yield Violation(f"{next(iter(held))} waits for a batch, and nothing else waits", demand=held)
    for subject, reason in held.items():
        kind, _, name = subject.partition("/")
        pod, job = state.pods.get(PodUid(name)), state.jobs.get(JobId(name))
        if kind == "pod" and pod is not None:
            came = pod.created_at
            owner = None if pod.job_id is None else state.jobs.get(pod.job_id)
            priority = _HIGH_PRIORITY if pod.priority > 0 else 0
            if owner is not None and owner.queued is not None:
                priority = owner.queued.spec.priority
        elif kind == "job" and job is not None and job.queued is not None:
            came, priority = job.queued.queued_at, job.queued.spec.priority
            missing_count = job.queued.spec.gang_count - job.completed_count
            if missing_count > 1 and not any(pod.job_id == name for pod in state.pods.values()):
                yield Violation(f"{subject} is a gang, and waits for a batch", demand=(subject,))
        else:
            yield Violation(
                f"{subject} waits for a batch, and is neither a waiting pod nor a waiting job", demand=(subject,)
            )
            continue
        if priority >= _HIGH_PRIORITY:
            yield Violation(f"{subject} has high priority, and waits for a batch", demand=(subject,))
        if not plan.as_of < reason.until <= came + longest:
            yield Violation(
                f"{subject} waits for its batch until {reason.until}, longer than allowed", demand=(subject,)
            )


# ---- waiting for running work


def spot_wait_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each job or pod that waits for spot although it must not, or longer than allowed."""
    for held in plan.deferred:
        if not isinstance(held.reason, SpotAwaited):
            continue
        kind, _, name = held.subject.partition("/")
        job, pod = state.jobs.get(JobId(name)), state.pods.get(PodUid(name))
        rules = policy.spot
        if kind == "job" and job is not None and job.queued is not None:
            spec, longest = job.queued.spec, policy.queued_timeout_seconds
            since, priority, is_spot_allowed = job.queued.queued_at, spec.priority, spec.is_preemptible
        elif kind == "pod" and pod is not None and pod.job_id is None:
            longest, since = policy.pending_pod_timeout_seconds, pod.unschedulable_since or pod.created_at
            priority, is_spot_allowed = 1000 if pod.priority > 0 else 500 + pod.priority, pod.priority < _CRITICAL_MIN
        else:
            continue
        longest = max(min(longest, rules.medium_priority_wait_seconds), rules.low_priority_wait_seconds)
        if priority >= _HIGH_PRIORITY or not is_spot_allowed:
            yield Violation(
                f"{held.subject} waits for spot, which its priority or its work forbids", demand=(held.subject,)
            )
        if held.reason.until > since + timedelta(seconds=longest) or held.reason.until <= plan.as_of:
            yield Violation(
                f"{held.subject} waits for spot until {held.reason.until}, longer than allowed", demand=(held.subject,)
            )


def wait_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each item that waits for running work longer than allowed."""
    waits = [(held.subject, held.reason) for held in plan.deferred if isinstance(held.reason, CapacityExpected)]
    waits = [(subject, reason) for subject, reason in waits if reason.expected_at is not None]
    if not waits:
        return
    usable = {view.name for view in node_views(state, plan.as_of) if view.phase is NodePhase.READY}
    for subject, reason in waits:
        if reason.node not in usable or reason.expected_at is None:
            continue  # a node on its way
        kind, _, name = subject.partition("/")
        job, pod = state.jobs.get(JobId(name)), state.pods.get(PodUid(name))
        if kind == "job" and job is not None and job.queued is not None:
            since, longest = job.queued.queued_at, policy.queued_timeout_seconds
            if job.queued.spec.priority >= _HIGH_PRIORITY:
                yield Violation(
                    f"{subject} has high priority and waits for capacity on {reason.node}", demand=(subject,)
                )
        elif kind == "pod" and pod is not None:
            since, longest = pod.unschedulable_since or pod.created_at, policy.pending_pod_timeout_seconds
        else:
            continue
        if reason.expected_at > since + timedelta(seconds=longest) or reason.expected_at <= plan.as_of:
            yield Violation(
                f"{subject} waits for capacity on {reason.node} until {reason.expected_at}, longer than allowed",
                demand=(subject,),
            )


# ---- elastic members


def elastic_member_violations(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each purchase for a member that its job does not have, or cannot use yet."""
    held = {deferral.subject for deferral in plan.deferred if not isinstance(deferral.reason, CapacityExpected)}
    for decision in plan.purchases:
        if not isinstance(decision.reason, UnmetDemand):
            continue
        for key in decision.reason.demand:
            kind, rest = (*key.split("/", 1), "")[:2]
            if kind != "member":
                continue
            name, number = rest.rsplit("/", 1)
            job = state.jobs.get(JobId(name))
            if job is None or job.queued is None or job.finished is not None or job.cancel_requested is not None:
                yield Violation(
                    f"{decision.offer.key} is bought for {key}, and its job needs no capacity", decision, demand=(key,)
                )
                continue
            least, most = job.queued.spec.member_count_min, job.queued.spec.member_count
            if least is None or not least < int(number) <= most:
                yield Violation(
                    f"{decision.offer.key} is bought for {key}, which is no elastic member of its job",
                    decision,
                    demand=(key,),
                )
            if f"job/{name}" in held:
                yield Violation(
                    f"{decision.offer.key} is bought for {key}, and the gang of its job has no capacity",
                    decision,
                    demand=(key,),
                )


# ---- launch groups


def launch_group_violations(plan: Plan, _: ClusterState, __: ScalingPolicy) -> Iterator[str]:
    """Yield launch groups of unequal nodes or several gangs: the cloud launches or refuses a group as a whole."""
    calls: dict[str, list[BuyNode]] = defaultdict(list)
    for decision in plan.purchases:
        if decision.transaction is not None:
            calls[decision.transaction].append(decision)
    for name, bought in calls.items():
        if len(bought) < 2 or bought[0].action_id != name:
            yield Violation(
                f"{len(bought)} nodes are bought in one call as {name}, which is not the first of two or more", *bought
            )
        if bought[0].gang is None or any(purchase.gang != bought[0].gang for purchase in bought):
            yield Violation(f"nodes are bought in one call as {name}, and are not of one gang", *bought)
        if any(
            (purchase.pool, purchase.offer, purchase.taints) != (bought[0].pool, bought[0].offer, bought[0].taints)
            for purchase in bought
        ):
            yield Violation(f"nodes are bought in one call as {name}, and are not identical", *bought)


# ---- preferences
# Of offers of equal cost, none is bought that all its work prefers less. Checked only for work whose preferences can be
# read from offers alone (pod affinity changes nothing here, spread preferences do), if nothing else distinguishes two.


def preference_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node for which all its work preferred another offer of equal cost."""
    bought = [decision for decision in plan.purchases if isinstance(decision.reason, UnmetDemand)]
    if not bought or state.offers is None or not _are_zones_equivalent(plan, state, policy):
        return
    pools = {pool.name: pool for pool in policy.pools}
    for buy in bought:
        work = _workloads_of(buy, state)
        pool = pools.get(buy.pool)
        if (
            not work
            or pool is None
            or (buy.offer.capacity_type is CapacityType.SPOT and not _has_no_interruptions(plan, state, policy))
        ):
            continue
        for other in state.offers.offers:
            if _is_as_good(other, buy.offer, pool, state) and all(
                _is_preferred(workload, other, buy.offer) for workload in work
            ):
                yield Violation(
                    f"{buy.offer.key} is bought for {', '.join(map(_name, work))}, and {other.key} is preferred", buy
                )


def _are_zones_equivalent(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> bool:
    """False if limits, refusals, directives, pod constraints or observed amounts may favor one of two offers."""
    is_unavailable = any(
        order.refused is not None and order.refused.retry_at > plan.as_of for order in state.orders.values()
    )
    return not (
        policy.limits.zones or state.directives or state.observed_allocatable or is_unavailable or has_pod_rules(state)
    )


def _has_no_interruptions(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> bool:
    """True if there were no interruptions, and few enough GPUs that all of them may be in one capacity pool."""
    decided = [order.decision for order in state.orders.values() if order.terminated is None]
    nodes = [decision for decision in (*decided, *plan.decisions) if isinstance(decision, BuyNode)]
    gpu_count = sum(node.offer.resources.gpu_count for node in nodes)
    return not state.spot_terminations and gpu_count <= policy.spot.capacity_pool_gpu_count_min


def _is_as_good(other: Offer, taken: Offer, pool: NodePool, state: ClusterState) -> bool:
    """True for another offer of the pool that is equal in all that the selection considers, without any node so far."""
    same = ("capacity_type", "resources", "price_micro_usd_per_hour", "boot_seconds", "interruption_ratio",
            "gpu_memory_bytes", "paid_from", "paid_until", "unavailable_because", "marks")  # fmt: skip
    if other.key == taken.key or any(getattr(other, name) != getattr(taken, name) for name in same):
        return False
    filters: tuple[tuple[tuple[str, ...], str | None], ...] = (
        (pool.instance_types, other.instance_type),
        (pool.gpu_models, other.gpu_model),
        (pool.zones, other.zone),
    )
    if any(allowed and value not in allowed for allowed, value in filters):
        return False
    return all(order.decision is None or order.decision.offer.key != other.key for order in state.orders.values())


def _workloads_of(buy: BuyNode, state: ClusterState) -> tuple[_Workload, ...]:
    """Return all work that the node is bought for; empty if preferences of some of it cannot be read from offers."""
    reason = buy.reason
    keys = reason.demand if isinstance(reason, UnmetDemand) else ()
    work = [of_key for key in keys if (of_key := _workload_with_preferences(key, state)) is not None]
    return tuple(work) if len(work) == len(keys) else ()


def _workload_with_preferences(key: str, state: ClusterState) -> _Workload | None:
    kind, _, name = key.partition("/")
    if kind == "job":
        job = state.jobs.get(JobId(name))
        spec = None if job is None or job.queued is None else job.queued.spec
        return spec if spec is not None and spec.within is None and len(spec.gpu_models) > 1 else None
    pod = state.pods.get(PodUid(name)) if kind == "pod" else None
    declared = None if pod is None else pod.preferences
    if pod is None or declared is None or declared.spreads or pod.job_id is not None or _is_in_a_group(pod):
        return None
    if pod.demands.node_selector or pod.demands.node_affinity:
        return None
    requested = [need for preferred in declared.nodes for need in preferred.term.requirements]
    return (
        pod
        if requested and all(need.key in _READABLE_KEYS and need.operator in _OPERATORS for need in requested)
        else None
    )


def _is_in_a_group(pod: PodObserved) -> bool:
    """True if a gang may bind it to a domain."""
    return any(
        key in (*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION) for key, _ in pod.labels + pod.annotations
    )


def _is_preferred(work: _Workload, other: Offer, taken: Offer) -> bool:
    if isinstance(work, JobSpec):
        models = work.gpu_models
        known = other.gpu_model in models and taken.gpu_model in models
        return known and models.index(other.gpu_model or "") < models.index(taken.gpu_model or "")
    return other.gpu_model == taken.gpu_model and _weight(work, other) > _weight(work, taken)


def _weight(pod: PodObserved, offer: Offer) -> int:
    """Return the weight of the pod's node preferences that the offer satisfies, added up as Kubernetes does."""
    preferred = () if pod.preferences is None else pod.preferences.nodes
    return sum(term.weight for term in preferred if all(_holds(need, offer) for need in term.term.requirements))


def _holds(need: LabelRequirement, offer: Offer) -> bool:
    is_named = (offer.zone if need.key == labels.ZONE else offer.instance_type) in need.values
    return {"In": is_named, "NotIn": not is_named, "Exists": True}.get(need.operator, False)


def _name(work: _Workload) -> str:
    return f"job {work.job_id}" if isinstance(work, JobSpec) else f"pod {work.namespace}/{work.name}"
