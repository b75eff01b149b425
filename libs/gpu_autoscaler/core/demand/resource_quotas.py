"""ResourceQuotas of Kubernetes: jobs whose pods a quota would refuse use no capacity, and nothing is bought for them.

A refused pod never exists: the controller of the job fails to create it. So quotas are applied to members that do not
exist as pods yet, in the order in which `quotas.py` grants them. A quota is applied only where it certainly counts the
pods.

Source: Kubernetes documentation, "Resource Quotas" (read 2026-11-23).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.tenancy_settings import QUOTA_NAME
from gpu_autoscaler.core.state.queries import is_finished
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.pod import PodObserved, PodQuotaObserved
from gpu_autoscaler.model.format import quantity
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.jobs import JobSpec, Runtime, Violation
from gpu_autoscaler.model.reasons.defer import ResourceQuotaExceeded
from gpu_autoscaler.model.resources import GPU_RESOURCE, Resources, parse_quantity_milli
from gpu_autoscaler.model.scheduling import LabelRequirement

_MILLI = 1000
# Of keys about limits only requests are known: a lower bound, so that nothing waits for what the quota would allow.
_PREFIXES = ("requests.", "limits.")


def created_quota(project_id: str, policy: ScalingPolicy) -> dict[str, str]:
    """Return the amounts of the ResourceQuota that the policy gives the namespace of a project; empty: none."""
    limits = [limit.gpu_count_max for limit in policy.limits.projects if limit.name == project_id]
    gpus = {f"requests.{GPU_RESOURCE}": str(count) for count in limits if count is not None}
    return gpus | policy.tenancy.quota | policy.tenancy.project(project_id).quota


def quota_violation(spec: JobSpec, state: ClusterState, policy: ScalingPolicy) -> Violation | None:
    """Return the violation of a gang that is larger than a ResourceQuota of its namespace; None: it is not, or its
    quotas are unknown."""
    for quota, key, hard in ResourceQuotaUsage(state, policy).limits(spec):
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


class ResourceQuotaUsage:
    """What pods count against each quota, with those that are about to be created. Mutable: jobs are added in the order
    in which they are served.

    Of a namespace that the scheduler creates, the quota of the policy counts until that of Kubernetes is known.
    """

    def __init__(self, state: ClusterState, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._quotas = _quotas_by_namespace(state.quotas)
        self._pods = state.pods
        self._taken: Counter[tuple[str, str]] = Counter()  # by quota and key

    @property
    def is_empty(self) -> bool:
        """True if there is no quota at all."""
        return not self._quotas and not self._policy.tenancy.namespace_template

    def take(self, spec: JobSpec, count: int) -> None:
        """Count that many members."""
        for quota, key, _ in self.limits(spec):
            self._taken[quota.quota_uid, key] += amount_milli(key, spec.member_resources) * count

    def refusal(self, spec: JobSpec, count: int) -> ResourceQuotaExceeded | None:
        """Return the first quota that would refuse one of that many members; None: none would."""
        for quota, key, hard in self.limits(spec):
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

    def limits(self, spec: JobSpec) -> Iterator[tuple[PodQuotaObserved, str, int]]:
        """Yield the quotas that count the members of the job, each with its keys and amounts."""
        quotas = self._quotas.get(spec.namespace, ())
        place = self._policy.tenancy.place(spec.project_id)
        if place.is_created and place.namespace == spec.namespace and QUOTA_NAME not in {each.name for each in quotas}:
            quotas = (*quotas, _of_policy(spec, self._policy))
        for quota in quotas:
            if _counts(quota, spec):
                yield from ((quota, key, hard) for key, hard in quota.hard_milli)

    def _used(self, quota: PodQuotaObserved, key: str) -> int:
        """Return the larger of what the quota reports and what its pods request: one of both is later."""
        reported = dict(quota.used_milli).get(key, 0)
        if quota.scopes:
            return reported  # which existing pods count is unknown
        pods = _pods_by_namespace(self._pods).get(quota.namespace, ())
        return max(reported, sum(amount_milli(key, pod.requests) for pod in pods))


def _of_policy(spec: JobSpec, policy: ScalingPolicy) -> PodQuotaObserved:
    """Return the quota that the namespace of the job will have."""
    amounts = created_quota(spec.project_id, policy)
    return PodQuotaObserved(
        epoch=0,
        version=0,
        quota_uid=f"policy/{spec.namespace}",
        namespace=spec.namespace,
        name=QUOTA_NAME,
        hard_milli=tuple((key, parse_quantity_milli(amount)) for key, amount in sorted(amounts.items())),
        used_milli=(),
    )


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
