"""Rule of the plan check on ResourceQuotas: nothing is bought for pods that a quota of their namespace refuses.

Shares no code with `plan`. It counts what the quota itself reports as used, and the members that the plan buys for.
"""

from collections import Counter
from collections.abc import Iterator

from gpu_autoscaler.core.check.placement_rules import job_named
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodQuotaObserved
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand


def resource_quota_violations(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each quota that is smaller than what its pods use with those that nodes are bought for."""
    if not state.quotas:
        return
    purchases = plan.purchases
    reasons = [item.reason for item in purchases if isinstance(item.reason, UnmetDemand | ReplacesAtRiskNode)]
    keys = sorted({key for reason in reasons for key in reason.demand if not key.startswith("pod/")})
    wanted: Counter[JobId] = Counter()
    for key in keys:
        job_id = job_named(key)
        if job_id is not None and (spec := _spec(state, job_id)) is not None:
            wanted[job_id] += _gang_missing(state, spec) if key.startswith("job/") else 1
    for quota in state.quotas.values():
        demand = [spec for job_id in wanted if (spec := _spec(state, job_id)) is not None and _counts(quota, spec)]
        for name, hard in quota.hard_milli:
            needed = sum(_amount(name, spec) * wanted[spec.job_id] for spec in demand)
            used = dict(quota.used_milli).get(name, 0)
            if needed and used + needed > hard:
                bought_for = tuple(key for key in keys if job_named(key) in {spec.job_id for spec in demand})
                yield Violation(
                    f"nodes are bought for pods that need {needed / 1000:g} {name}, but {used / 1000:g} of "
                    f"{hard / 1000:g} of ResourceQuota {quota.namespace}/{quota.name} are used",
                    demand=bought_for,
                )


def _spec(state: ClusterState, job_id: JobId) -> JobSpec | None:
    job = state.jobs.get(job_id)
    return None if job is None or job.queued is None else job.queued.spec


def _gang_missing(state: ClusterState, spec: JobSpec) -> int:
    """Return the members of the gang to come; pods that exist are in the quota's own figure."""
    completed_count = state.jobs[spec.job_id].completed_count
    return max(0, spec.gang_count - completed_count - sum(pod.job_id == spec.job_id for pod in state.pods.values()))


def _counts(quota: PodQuotaObserved, spec: JobSpec) -> bool:
    """True for a quota of all pods of the namespace, or of those of the job's PriorityClass."""
    return quota.namespace == spec.namespace and all(
        scope.key == "PriorityClass" and scope.operator == "In" and spec.priority_class in scope.values
        for scope in quota.scopes
    )


def _amount(name: str, spec: JobSpec) -> int:
    member = spec.member_resources
    amounts = {
        "requests.nvidia.com/gpu": member.gpu_count * 1000,
        "requests.cpu": member.cpu_milli,
        "requests.memory": member.memory_bytes * 1000,
        "cpu": member.cpu_milli,
        "memory": member.memory_bytes * 1000,
        "pods": 1000,
        **{f"requests.{resource}": count * 1000 for resource, count in member.slices},
    }
    return amounts.get(name, 0)
