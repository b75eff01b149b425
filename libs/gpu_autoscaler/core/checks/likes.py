"""The second opinion on what work would like: of offers that cost the same, none is bought that all of it likes less.

Shares no code with `plan`. It speaks only where it is certain: of nodes for pods and jobs whose liking can be read from
offers alone, and where nothing but their liking tells two offers apart. Liked nodes come before pods to be near to or
far from (the order told in `core/placing/liking.py`), so those change nothing here; an even spread comes before, so
what asks for one is passed over. Called by `core/check.py`.
"""

from collections.abc import Iterator

from gpu_autoscaler.core.checks.pods import pods_read
from gpu_autoscaler.core.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons import UnmetDemand
from gpu_autoscaler.model.scheduling import LabelRequirement

_Work = PodObserved | JobSpec


def like_mistakes(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each node that all work on it would rather have had elsewhere, for the same money."""
    bought = [each for each in plan.decisions if isinstance(each, BuyNode) and isinstance(each.reason, UnmetDemand)]
    if not bought or state.offers is None or not _are_places_alike(plan, state, policy):
        return
    pools = {pool.name: pool for pool in policy.pools}
    for buy in bought:
        work = _work_of(buy, state)
        pool = pools.get(buy.pool)
        if (
            not work
            or pool is None
            or (buy.offer.capacity_type is CapacityType.SPOT and not _is_calm(plan, state, policy))
        ):
            continue
        for other in state.offers.offers:
            if _is_as_good(other, buy.offer, pool, state) and all(_likes_more(one, other, buy.offer) for one in work):
                yield f"{buy.offer.key} is bought for {', '.join(map(_name, work))}, and {other.key} is liked better"


# ---- what may tell places apart besides liking


def _are_places_alike(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> bool:
    """False where limits, refusals, people, neighbours or nodes that came smaller may speak for one of two offers."""
    is_refused = any(one.refused is not None and one.refused.retry_at > plan.as_of for one in state.orders.values())
    has_neighbours = pods_read(state.pods).mind_neighbours
    return not (policy.limits.zones or state.directives or state.observed_allocatable or is_refused or has_neighbours)


def _is_calm(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> bool:
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


def _work_of(buy: BuyNode, state: ClusterState) -> tuple[_Work, ...]:
    """All that the node is bought for; none where the liking of some of it cannot be told from offers."""
    reason = buy.reason
    keys = reason.demand if isinstance(reason, UnmetDemand) else ()
    found = [work for key in keys if (work := _known(key, state)) is not None]
    return tuple(found) if len(found) == len(keys) else ()


def _known(key: str, state: ClusterState) -> _Work | None:
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


def _likes_more(work: _Work, other: Offer, taken: Offer) -> bool:
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


def _name(work: _Work) -> str:
    return f"job {work.job_id}" if isinstance(work, JobSpec) else f"pod {work.namespace}/{work.name}"
