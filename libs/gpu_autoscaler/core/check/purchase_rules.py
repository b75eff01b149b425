"""The second opinion about what is bought for whom: nothing on spot that must not be there, nothing before its time.

Shares no code with `plan`. Called by `core/check/plan_check.py`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.check.placement_rules import job_named, pod_summary
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
from gpu_autoscaler.model.reasons.defer_waits import BatchWindowOpen, CapacityExpected
from gpu_autoscaler.model.scheduling import LabelRequirement

# Classes `system-cluster-critical` and above (Kubernetes documentation, "Pod Priority and Preemption").
_CRITICAL_MIN = 2_000_000_000


def selection_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each purchase that should not be this one, or not be made now."""
    for bought in plan.decisions:
        if not isinstance(bought, BuyNode):
            continue
        if bought.gang is not None:
            yield from _too_soon(bought.gang, plan, state, policy)
        if not isinstance(bought.reason, ReplacesNodes):
            for key in getattr(bought.reason, "demand", ()):
                yield from _not_of_a_model(key, bought, state)
        if bought.offer.capacity_type is CapacityType.SPOT and not _is_part(bought, plan):
            for key in getattr(bought.reason, "demand", ()):
                yield from _not_on_spot(key, plan, state, policy)


def _is_part(bought: BuyNode, plan: Plan) -> bool:
    """Nodes that replace others together name the pods of all of them: one that is no spot may be for any."""
    return isinstance(bought.reason, ReplacesNodes) and any(
        isinstance(other, BuyNode)
        and other.reason == bought.reason
        and other.offer.capacity_type is not CapacityType.SPOT
        for other in plan.decisions
    )


def _too_soon(gang: str, plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    record, rules = state.gangs.get(gang), policy.gangs
    if record is None:
        return
    doubled = rules.backoff_seconds_min * 2.0 ** min(record.abandoned_count - 1, 30)
    until = record.abandoned_at + timedelta(seconds=min(doubled, rules.backoff_seconds_max))
    if plan.as_of < until:
        yield f"nodes are bought for gang {gang}, which waits until {until.isoformat()} after it was given up"


def _not_on_spot(key: str, plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    kind, _, name = key.partition("/")
    pod = state.pods.get(PodUid(name)) if kind == "pod" else None
    job_id = job_named(key) if pod is None else pod.job_id
    job = None if job_id is None else state.jobs.get(job_id)
    if job is not None and job.queued is not None:
        if not job.queued.spec.is_preemptible:
            yield f"spot is bought for job {job_id}, which must not be interrupted"
        elif _is_at_its_last(job, policy, plan.as_of):
            yield f"spot is bought for job {job_id}, which it has interrupted too often"
    elif pod is not None and pod.priority >= _CRITICAL_MIN:
        yield f"spot is bought for pod {pod.namespace}/{pod.name}, which is critical to the cluster"


def _not_of_a_model(key: str, bought: BuyNode, state: ClusterState) -> Iterator[str]:
    job_id = job_named(key)
    job = None if job_id is None else state.jobs.get(job_id)
    if job is None or job.queued is None:
        return
    spec = job.queued.spec
    asked = {spec.gpu_model} - {None} | set(spec.gpu_models)
    # Who asks for no GPU is content with any node; a request that names a model and no GPU is refused at the door.
    if asked and spec.member_resources.has_gpus and bought.offer.gpu_model not in asked:
        will_do = ", ".join(sorted(filter(None, asked)))
        yield f"{bought.offer.key} is bought for job {spec.job_id}, and only {will_do} will do"


def _is_at_its_last(job: JobRecord, policy: ScalingPolicy, as_of: datetime) -> bool:
    if job.preempted is None or all(set(pool.capacity_types) == {CapacityType.SPOT} for pool in policy.pools):
        return False
    if as_of >= job.preempted.preempted_at + timedelta(seconds=policy.spot.on_demand_wait_seconds):
        return False
    most = min(policy.spot.interruptions_count_max, policy.job_retries_count_max)
    return job.preempted.attempt >= most


# The part of the second opinion that looks at the scale-up cooldown. Called by `core/check/plan_check.py` alone.

_HIGH_PRIORITY = 1000


def cooldown_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node that is bought within the cooldown for jobs none of which is urgent."""
    seconds = policy.limits.scale_up_cooldown_seconds
    if not seconds:
        return
    orders = [order for order in state.orders.values() if order.decision is not None and order.planned_at is not None]
    known = [order for order in orders if order.decision and isinstance(order.decision.reason, UnmetDemand)]
    ages = [(plan.as_of - order.planned_at).total_seconds() for order in known if order.planned_at is not None]
    if not ages or min(ages) >= seconds:
        return
    begun = {order.decision.gang for order in known if order.decision is not None}
    for decision in plan.decisions:
        if not isinstance(decision, BuyNode) or not isinstance(decision.reason, UnmetDemand):
            continue
        named = [job_named(key) for key in decision.reason.demand]
        jobs = [None if job_id is None else state.jobs.get(job_id) for job_id in named]
        priorities = [None if job is None or job.queued is None else job.queued.spec.priority for job in jobs]
        # Of pods nothing is proven here: what makes one urgent is Kubernetes' own scale of priorities.
        is_proven = priorities and None not in priorities and max(each or 0 for each in priorities) < _HIGH_PRIORITY
        if is_proven and (decision.gang is None or decision.gang not in begun):
            yield f"{decision.offer.key} is bought {min(ages):g} s after the last purchase, {seconds:g} s are to pass"


# The second opinion on what the cloud would not sell lately. Called by `core/check/plan_check.py` alone; `plan` reads
# the same orders in `core/provisioning/unavailable_offers.py`, and waits longer where a refusal came again.


def is_unavailable(offer: Offer, plan: Plan, state: ClusterState) -> bool:
    """A refusal of an offer is about that type in that zone; of a zone, about all in it (regions: the plan's word)."""
    for order in state.orders.values():
        said = order.refused
        if said is None or said.retry_at <= plan.as_of or said.offer.zone != offer.zone:
            continue
        if said.scope == "zone":
            return True
        same = (said.offer.instance_type, said.offer.capacity_type) == (offer.instance_type, offer.capacity_type)
        if said.scope != "region" and same and not _is_sold_since(order, state):
            return True
        if said.scope == "region" and _quota(said.offer) == _quota(offer):
            ends = (
                one.terminated_at
                for one in state.instances.values()
                if one.terminated_at is not None and one.terminated_at > said.refused_at
            )
            return not any(ends)  # else something that counted against it may have ended
    return False


def _quota(offer: Offer) -> tuple[str, str]:
    """A region's quotas count families and capacity types for themselves; the zone is the same already."""
    return re.split(r"[.-]", offer.instance_type)[0], offer.capacity_type


def _is_sold_since(refused: OrderRecord, state: ClusterState) -> bool:
    """True where the cloud sold the same to a later plan: its answer to an earlier one may come after that."""
    said = refused.refused
    assert said is not None, "it is asked of what was refused"  # noqa: S101 - our bug
    tried_at = refused.planned_at or said.refused_at
    return any(
        one.decision.offer.key == said.offer.key and (one.planned_at or one.launched.launched_at) > tried_at
        for one in state.orders.values()
        if one.launched is not None and one.decision is not None
    )


# The second opinion on waiting for the rest of a burst: never longer than the policy allows, nor by what may
# not.

_HIGH_PRIORITY = 1000


def batching_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each piece of work that waits for others though it is late, alone, urgent, or a gang."""
    held = {each.subject: each.reason for each in plan.deferred if isinstance(each.reason, BatchWindowOpen)}
    if not held:
        return
    longest = timedelta(seconds=policy.batching.wait_seconds_max)
    unbound_count = len(pod_summary(state.pods).unbound)
    unplaced_count = sum(job.queued is not None and job.finished is None for job in state.jobs.values())
    if unbound_count + unplaced_count < 2:
        yield f"{next(iter(held))} is told to wait for others, and nothing else waits"
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
            if job.queued.spec.gang_count > 1 and not any(pod.job_id == name for pod in state.pods.values()):
                yield f"{subject} is a gang, and waits for the rest of a burst"
        else:
            yield f"{subject} is told to wait for the rest of a burst, and is neither a pod nor a job that waits"
            continue
        if priority >= _HIGH_PRIORITY:
            yield f"{subject} is of high priority, and waits for the rest of a burst"
        if not plan.as_of < reason.until <= came + longest:
            yield f"{subject} waits for the rest of its burst until {reason.until}, longer than it may"


# The second opinion on waiting for running work: never beyond what the policy allows, and never for high
# priority.


def wait_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each piece of work that is told to wait for longer than it may."""
    waits = [(held.subject, held.reason) for held in plan.deferred if isinstance(held.reason, CapacityExpected)]
    waits = [(subject, reason) for subject, reason in waits if reason.expected_at is not None]
    if not waits:
        return
    usable = {view.name for view in node_views(state, plan.as_of) if view.phase is NodePhase.READY}
    for subject, reason in waits:
        if reason.node not in usable or reason.expected_at is None:
            continue  # a node on its way: it was bought for somebody
        kind, _, name = subject.partition("/")
        job, pod = state.jobs.get(JobId(name)), state.pods.get(PodUid(name))
        if kind == "job" and job is not None and job.queued is not None:
            since, longest = job.queued.queued_at, policy.queued_timeout_seconds
            if job.queued.spec.priority >= _HIGH_PRIORITY:
                yield f"{subject} is of high priority and waits for room on {reason.node}"
        elif kind == "pod" and pod is not None:
            since, longest = pod.unschedulable_since or pod.created_at, policy.pending_pod_timeout_seconds
        else:
            continue
        if reason.expected_at > since + timedelta(seconds=longest) or reason.expected_at <= plan.as_of:
            yield f"{subject} waits for room on {reason.node} until {reason.expected_at}, longer than it may"


# The second opinion on members beyond a gang: bought for only beside a gang that has its place, and never too
# many.


def elastic_member_violations(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node that is bought for a member which its job does not have, or cannot use yet."""
    held = {one.subject for one in plan.deferred if not isinstance(one.reason, CapacityExpected)}
    for decision in plan.decisions:
        if not isinstance(decision, BuyNode) or not isinstance(decision.reason, UnmetDemand):
            continue
        for key in decision.reason.demand:
            kind, rest = (*key.split("/", 1), "")[:2]
            if kind != "member":
                continue
            name, number = rest.rsplit("/", 1)
            job = state.jobs.get(JobId(name))
            if job is None or job.queued is None or job.finished is not None or job.cancel_requested is not None:
                yield f"{decision.offer.key} is bought for {key}, and its job wants no room"
                continue
            least, most = job.queued.spec.member_count_min, job.queued.spec.member_count
            if least is None or not least < int(number) <= most:
                yield f"{decision.offer.key} is bought for {key}, which is none beyond the gang of its job"
            if f"job/{name}" in held:
                yield f"{decision.offer.key} is bought for {key}, and the gang of its job has no place"


# The second opinion on what is bought in one call: alike, and of one gang. Called by `core/check/plan_check.py` alone.


def launch_group_violations(plan: Plan, _: ClusterState, __: ScalingPolicy) -> Iterator[str]:
    """What the cloud is asked for in one call is refused or sold as one, so all of it has to be of one gang."""
    calls: dict[str, list[BuyNode]] = defaultdict(list)
    for decision in plan.decisions:
        if isinstance(decision, BuyNode) and decision.transaction is not None:
            calls[decision.transaction].append(decision)
    for name, bought in calls.items():
        if len(bought) < 2 or bought[0].action_id != name:
            yield f"{len(bought)} nodes are bought in one call as {name}, which is the first of two or more nowhere"
        if bought[0].gang is None or any(one.gang != bought[0].gang for one in bought):
            yield f"nodes are bought in one call as {name}, and are not of one gang"
        if any(
            (one.pool, one.offer, one.taints) != (bought[0].pool, bought[0].offer, bought[0].taints) for one in bought
        ):
            yield f"nodes are bought in one call as {name}, and are not alike"


# The second opinion on what work would like: of offers that cost the same, none is bought that all of it
# likes less. Shares no code with `plan`. It speaks only where it is certain: of nodes for pods and jobs whose
# liking can be read from offers alone, and where nothing but their liking tells two offers apart. Liked nodes
# come before pods to be near to or far from (the order told in `core/placement/preference_scores.py`), so those change
# nothing here; an even spread comes before, so what asks for one is passed over. Called by `core/check/plan_check.py`.

_Workload = PodObserved | JobSpec


def preference_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node that all work on it would rather have had elsewhere, for the same money."""
    bought = [each for each in plan.decisions if isinstance(each, BuyNode) and isinstance(each.reason, UnmetDemand)]
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
            if _is_as_good(other, buy.offer, pool, state) and all(_is_preferred(one, other, buy.offer) for one in work):
                yield f"{buy.offer.key} is bought for {', '.join(map(_name, work))}, and {other.key} is liked better"


# ---- what may tell places apart besides liking


def _are_zones_equivalent(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> bool:
    """False where limits, refusals, people, neighbours or nodes that came smaller may speak for one of two offers."""
    is_unavailable = any(one.refused is not None and one.refused.retry_at > plan.as_of for one in state.orders.values())
    has_neighbours = pod_summary(state.pods).has_pod_rules
    return not (
        policy.limits.zones or state.directives or state.observed_allocatable or is_unavailable or has_neighbours
    )


def _has_no_interruptions(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> bool:
    """True where no storm was seen, and all GPUs of ours are so few that they may be in one place."""
    decided = [one.decision for one in state.orders.values() if one.terminated is None]
    nodes = [one for one in (*decided, *plan.decisions) if isinstance(one, BuyNode)]
    gpu_count = sum(one.offer.resources.gpu_count for one in nodes)
    return not state.spot_terminations and gpu_count <= policy.spot.capacity_pool_gpu_count_min


def _is_as_good(other: Offer, taken: Offer, pool: NodePool, state: ClusterState) -> bool:
    """True for another offer of the pool that is the same in all that a choice goes by; no node of it came so far."""
    same = ("capacity_type", "resources", "price_micro_usd_per_hour", "boot_seconds", "interruption_ratio",
            "gpu_memory_bytes", "paid_from", "paid_until", "barred_because", "marks")  # fmt: skip
    if other.key == taken.key or any(getattr(other, name) != getattr(taken, name) for name in same):
        return False
    filters: tuple[tuple[tuple[str, ...], str | None], ...] = (
        (pool.instance_types, other.instance_type),
        (pool.gpu_models, other.gpu_model),
        (pool.zones, other.zone),
    )
    if any(allowed and value not in allowed for allowed, value in filters):
        return False
    return all(one.decision is None or one.decision.offer.key != other.key for one in state.orders.values())


# ---- whose liking is known


def _workloads_of(buy: BuyNode, state: ClusterState) -> tuple[_Workload, ...]:
    """All that the node is bought for; none where the liking of some of it cannot be told from offers."""
    reason = buy.reason
    keys = reason.demand if isinstance(reason, UnmetDemand) else ()
    found = [work for key in keys if (work := _workload_with_preferences(key, state)) is not None]
    return tuple(found) if len(found) == len(keys) else ()


def _workload_with_preferences(key: str, state: ClusterState) -> _Workload | None:
    kind, _, name = key.partition("/")
    if kind == "job":
        job = state.jobs.get(JobId(name))
        spec = None if job is None or job.queued is None else job.queued.spec
        return spec if spec is not None and spec.within is None and len(spec.gpu_models) > 1 else None
    pod = state.pods.get(PodUid(name)) if kind == "pod" else None
    said = None if pod is None else pod.preferences
    if pod is None or said is None or said.spreads or pod.job_id is not None or _is_in_a_group(pod):
        return None
    if pod.demands.node_selector or pod.demands.node_affinity:
        return None
    asked = [need for liked in said.nodes for need in liked.term.requirements]
    return pod if asked and all(need.key in _READ and need.operator in _OPERATORS for need in asked) else None


def _is_in_a_group(pod: PodObserved) -> bool:
    """True where a gang may bind it to a place."""
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
    """What a node of the offer has of the pod's liked nodes, as Kubernetes adds it up."""
    liked = () if pod.preferences is None else pod.preferences.nodes
    return sum(each.weight for each in liked if all(_holds(need, offer) for need in each.term.requirements))


def _holds(need: LabelRequirement, offer: Offer) -> bool:
    is_named = (offer.zone if need.key == labels.ZONE else offer.instance_type) in need.values
    return {"In": is_named, "NotIn": not is_named, "Exists": True}.get(need.operator, False)


_READ = (labels.ZONE, labels.INSTANCE_TYPE)
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


def _name(work: _Workload) -> str:
    return f"job {work.job_id}" if isinstance(work, JobSpec) else f"pod {work.namespace}/{work.name}"
