"""The second opinion about what is bought for whom: nothing on spot that must not be there, nothing before its time.

Shares no code with `plan`. Called by `core/check.py`.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from gpu_autoscaler.core.checks.pods import job_named
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import ClusterState, JobRecord
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons import ReplacesNodes

# Classes `system-cluster-critical` and above (Kubernetes documentation, "Pod Priority and Preemption").
_CRITICAL_MIN = 2_000_000_000


def choice_mistakes(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
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
