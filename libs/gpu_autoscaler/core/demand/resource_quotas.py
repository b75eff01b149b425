"""ResourceQuotas of Kubernetes: jobs whose pods a quota would refuse use no capacity, and nothing is bought for them.

A refused pod never exists: the controller of the job fails to create it. So quotas are applied to members that do not
exist as pods yet, in the order in which demand is served. A quota is applied only where it certainly counts the pods.

Source: Kubernetes documentation, "Resource Quotas" (read 2026-11-23).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.state.queries import is_finished
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved, PodQuotaObserved
from gpu_autoscaler.model.format import quantity
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import JobSpec, Runtime, Violation
from gpu_autoscaler.model.reasons.defer import ResourceQuotaExceeded
from gpu_autoscaler.model.resources import GPU_RESOURCE, Resources
from gpu_autoscaler.model.scheduling import LabelRequirement

_MILLI = 1000
# Of keys about limits only requests are known: a lower bound, so that nothing waits for what the quota would allow.
_PREFIXES = ("requests.", "limits.")
_NOT_CREATED = (DemandSource.QUEUED_JOB, DemandSource.ELASTIC_MEMBER)


def limited_by_quotas(items: Sequence[DemandItem], state: ClusterState) -> tuple[DemandItem, ...]:
    """Return the items, in their order, with those blocked whose pods a ResourceQuota would refuse.

    Placed jobs come first: their pods are about to be created.
    """
    if not state.quotas:
        return tuple(items)
    accounts = _Accounts(state)
    for item in items:
        if item.source is DemandSource.PLACED_JOB and (spec := _spec(state, item.job_id)) is not None:
            accounts.take(spec, item.member_count)
    limited: list[DemandItem] = []
    refused: dict[JobId, ResourceQuotaExceeded] = {}
    for item in items:
        spec = _spec(state, item.job_id) if item.source in _NOT_CREATED and item.blocked is None else None
        if spec is None:
            limited.append(item)
            continue
        # A job without its gang has no elastic members either.
        reason = refused.get(spec.job_id) or accounts.refusal(spec, item.member_count)
        if reason is None:
            accounts.take(spec, item.member_count)
            limited.append(item)
            continue
        if item.source is DemandSource.QUEUED_JOB:
            refused[spec.job_id] = reason
        limited.append(msgspec.structs.replace(item, blocked=reason))
    return tuple(limited)


def quota_violation(spec: JobSpec, state: ClusterState) -> Violation | None:
    """Return the violation of a gang that is larger than a ResourceQuota of its namespace; None: it is not, or its
    quotas are unknown."""
    for quota in _quotas_by_namespace(state.quotas).get(spec.namespace, ()):
        if not _counts(quota, spec):
            continue
        for key, hard in quota.hard_milli:
            needed = amount_milli(key, spec.member_resources) * spec.gang_count
            if needed > hard:
                return Violation(
                    "members",
                    f"need {quantity(needed)} {key} together, but ResourceQuota {quota.namespace}/{quota.name} of "
                    f"project {spec.project_id} allows {quantity(hard)}; request less, or have the quota raised",
                    "quota",
                )
    return None


def amount_milli(key: str, resources: Resources) -> int:
    """Return what one pod with these requests counts against a key of a quota, in thousandths; 0: nothing."""
    if key in ("pods", "count/pods"):
        return _MILLI
    name = next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key)
    match name:
        case "cpu":
            return resources.cpu_milli
        case "memory":
            return resources.memory_bytes * _MILLI
        case "ephemeral-storage":
            return resources.ephemeral_storage_bytes * _MILLI
        case _ if name == GPU_RESOURCE:
            return resources.gpu_count * _MILLI
        case _:
            return dict(resources.slices).get(name, 0) * _MILLI


class _Accounts:
    """What pods count against each quota, with those that are about to be created."""

    def __init__(self, state: ClusterState) -> None:
        self._quotas = _quotas_by_namespace(state.quotas)
        self._pods = _pods_by_namespace(state.pods)
        self._taken: Counter[tuple[str, str]] = Counter()  # by quota and key

    def take(self, spec: JobSpec, count: int) -> None:
        """Count that many members."""
        for quota, key, _ in self._limits(spec):
            self._taken[quota.quota_uid, key] += amount_milli(key, spec.member_resources) * count

    def refusal(self, spec: JobSpec, count: int) -> ResourceQuotaExceeded | None:
        """Return the first quota that would refuse one of that many members; None: none would."""
        for quota, key, hard in self._limits(spec):
            needed = amount_milli(key, spec.member_resources) * count
            used = self._used(quota, key) + self._taken[quota.quota_uid, key]
            if needed and used + needed > hard:
                return ResourceQuotaExceeded(
                    quota=f"{quota.namespace}/{quota.name}",
                    resource=key,
                    used_milli=used,
                    needed_milli=needed,
                    hard_milli=hard,
                )
        return None

    def _limits(self, spec: JobSpec) -> Iterator[tuple[PodQuotaObserved, str, int]]:
        for quota in self._quotas.get(spec.namespace, ()):
            if _counts(quota, spec):
                yield from ((quota, key, hard) for key, hard in quota.hard_milli)

    def _used(self, quota: PodQuotaObserved, key: str) -> int:
        """Return the larger of what the quota reports and what its pods request: one of both is later."""
        reported = dict(quota.used_milli).get(key, 0)
        if quota.scopes:
            return reported  # which existing pods count is unknown
        pods = self._pods.get(quota.namespace, ())
        return max(reported, sum(amount_milli(key, pod.requests) for pod in pods))


def _spec(state: ClusterState, job_id: JobId | None) -> JobSpec | None:
    job = None if job_id is None else state.jobs.get(job_id)
    return None if job is None or job.queued is None else job.queued.spec


@cached_by_identity(2)
def _quotas_by_namespace(quotas: Mapping[str, PodQuotaObserved]) -> Mapping[str, Sequence[PodQuotaObserved]]:
    by_namespace: defaultdict[str, list[PodQuotaObserved]] = defaultdict(list)
    for quota in sorted(quotas.values(), key=lambda quota: (quota.name, quota.quota_uid)):
        by_namespace[quota.namespace].append(quota)
    return dict(by_namespace)


@cached_by_identity(2)
def _pods_by_namespace(pods: Mapping[PodUid, PodObserved]) -> Mapping[str, Sequence[PodObserved]]:
    """Return the pods that count against quotas: those that have not ended."""
    by_namespace: defaultdict[str, list[PodObserved]] = defaultdict(list)
    for pod in pods.values():
        if not is_finished(pod):
            by_namespace[pod.namespace].append(pod)
    return dict(by_namespace)


def _counts(quota: PodQuotaObserved, spec: JobSpec) -> bool:
    """Return whether the quota certainly counts the members of the job."""
    return all(_is_in_scope(scope, spec) for scope in quota.scopes)


def _is_in_scope(scope: LabelRequirement, spec: JobSpec) -> bool:
    has_time_limit = spec.runtime is Runtime.VOLCANO  # of other kinds the object has it, not its pods
    match scope.key:
        case "PriorityClass":
            # Without a class of ours the cluster may have a default one.
            holds = {"In": spec.priority_class in scope.values, "NotIn": spec.priority_class not in scope.values}
            return bool(spec.priority_class) and holds.get(scope.operator, scope.operator == "Exists")
        case "NotBestEffort":
            return spec.member_resources.cpu_milli > 0 or spec.member_resources.memory_bytes > 0
        case "Terminating":
            return has_time_limit
        case "NotTerminating":
            return not has_time_limit
        case _:
            return False
