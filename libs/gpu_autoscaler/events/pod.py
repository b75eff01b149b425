"""Facts about pods, PodDisruptionBudgets, ResourceQuotas and ProvisioningRequests, as the pod watcher reads them from
Kubernetes."""

from typing import ClassVar, Literal

from gpu_autoscaler.events.fact import Versioned
from gpu_autoscaler.model.demands import PodSet, ProvisioningClass, ProvisioningCondition, ProvisioningConditionType
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NO_DEMANDS, LabelRequirement, NodeDemands, PodAffinitySpec, Preferences

PodPhase = Literal["pending", "running", "succeeded", "failed", "unknown"]


class PodObserved(Versioned, frozen=True, kw_only=True, omit_defaults=True):
    """The complete state of a pod at this resourceVersion."""

    pod_uid: PodUid
    namespace: str
    name: str
    phase: PodPhase
    requests: Resources  # resources that it requests
    created_at: Instant
    node_name: str | None = None  # node that it is bound to; None: not bound
    is_ready: bool = False
    unschedulable_since: Instant | None = None  # PodScheduled=False with reason Unschedulable; None: it is not
    unschedulable_message: str = ""  # of the Kubernetes scheduler; empty: none
    is_gated: bool = False  # schedulingGates are set: it needs no node yet
    started_at: Instant | None = None
    finished_at: Instant | None = None
    deleting_since: Instant | None = None
    priority: int = 0  # Kubernetes' spec.priority
    demands: NodeDemands = NO_DEMANDS
    pod_affinity: PodAffinitySpec | None = None  # None: no required rules
    gpu_model: str | None = None  # requested by label or affinity; None: any, or one of several
    gpu_models: tuple[str, ...] = ()  # acceptable models; empty: see gpu_model
    gpu_memory_bytes_min: int | None = None  # of one GPU; None: no minimum
    labels: tuple[tuple[str, str], ...] = ()  # sorted by key
    annotations: tuple[tuple[str, str], ...] = ()  # those that we use, sorted by key
    owner_kind: str | None = None  # controller: Job, ReplicaSet, DaemonSet, Node (mirror pod) ...; None: it has none
    owner_uid: str | None = None  # UID of its controller; None: it has none
    has_local_storage: bool = False  # files on emptyDir or hostPath that a move would lose
    grace_seconds: float = 30.0  # time between SIGTERM and SIGKILL
    job_id: JobId | None = None  # None: a pod without a job of ours
    volume_trouble: str = ""  # why no node helps before a volume is ready; empty: volumes are no obstacle
    device_trouble: str = ""  # why its device claims cannot be evaluated; empty: they can, or it has none
    group_count_min: int | None = None  # minimum of pods of its group that start together; None if unknown
    preferences: Preferences | None = None  # None: no preferences

    def condition(self) -> str | None:
        """One fact per pod and version."""
        return f"pod_observed/{self.pod_uid}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        return f"pod/{self.pod_uid}"


class PodGone(Versioned, frozen=True, kw_only=True):
    """The pod object was deleted from Kubernetes."""

    pod_uid: PodUid
    namespace: str
    name: str
    node_name: str | None = None  # node that it was bound to; None: not bound
    job_id: JobId | None = None  # None: a pod without a job of ours
    phase: PodPhase | None = None  # its last phase: a pod that had ended loses nothing. None if unknown

    def condition(self) -> str | None:
        """One fact per pod."""
        return f"pod_gone/{self.pod_uid}"

    def entity(self) -> str | None:
        return f"pod/{self.pod_uid}"


class PodListed(Versioned, frozen=True, kw_only=True, omit_defaults=True):
    """A complete list was read: older pods missing in it are gone. Also a heartbeat of the watch."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("listed_at",)

    pod_uids: tuple[PodUid, ...]  # all that were in the list
    listed_at: Instant
    opted_in_namespaces: tuple[str, ...] | None = None  # by label, where idle workloads end; None: unknown, so none


class PodWatched(Versioned, frozen=True, kw_only=True, omit_defaults=True):
    """The watch was complete up to this version at this time (a bookmark)."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("watched_at",)

    watched_at: Instant
    opted_in_namespaces: tuple[str, ...] | None = None  # as in `PodListed`; None: unknown, so none


class PodBudgetObserved(Versioned, frozen=True, kw_only=True):
    """The complete state of a PodDisruptionBudget at this resourceVersion."""

    budget_uid: str
    namespace: str
    name: str
    match_labels: tuple[LabelRequirement, ...]  # its selector; all must hold; empty selects every pod
    disruptions_allowed: int  # evictions that it allows now
    pods_healthy_count: int = 0  # ready pods that it selects
    pods_healthy_count_min: int = 0  # ready pods that must stay

    def condition(self) -> str | None:
        """One fact per budget and version."""
        return f"pod_budget_observed/{self.budget_uid}/{self.epoch}/{self.version}"


class PodBudgetGone(Versioned, frozen=True, kw_only=True):
    """The PodDisruptionBudget was deleted from Kubernetes."""

    budget_uid: str
    namespace: str
    name: str

    def condition(self) -> str | None:
        """One fact per budget."""
        return f"pod_budget_gone/{self.budget_uid}"


class PodBudgetListed(Versioned, frozen=True, kw_only=True):
    """A complete list of budgets was read: older ones that are missing in it are gone."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("listed_at",)

    budget_uids: tuple[str, ...]  # all that were in the list
    listed_at: Instant


# ResourceQuotas: published only where `kube.are_quotas_watched` is set, as 0.2 does not know these facts
# (docs/designs/012-resource-quotas.md).


class PodQuotaObserved(Versioned, frozen=True, kw_only=True):
    """The amounts of a ResourceQuota that pods count against, at this resourceVersion."""

    quota_uid: str
    namespace: str
    name: str
    # By key of the quota ("requests.nvidia.com/gpu", "pods"), sorted; in thousandths.
    hard_milli: tuple[tuple[str, int], ...]  # (key, limit in thousandths)
    used_milli: tuple[tuple[str, int], ...]  # a key without an entry: unknown
    # Which pods count: all of these hold; empty: all pods. The key is the scope, such as PriorityClass or BestEffort.
    scopes: tuple[LabelRequirement, ...] = ()  # it counts only pods that satisfy all; empty: every pod

    def condition(self) -> str | None:
        """One fact per quota and version."""
        return f"pod_quota_observed/{self.quota_uid}/{self.epoch}/{self.version}"


class PodQuotaGone(Versioned, frozen=True, kw_only=True):
    """The ResourceQuota was deleted from Kubernetes."""

    quota_uid: str
    namespace: str
    name: str

    def condition(self) -> str | None:
        """One fact per quota."""
        return f"pod_quota_gone/{self.quota_uid}"


class PodQuotaListed(Versioned, frozen=True, kw_only=True):
    """A complete list of quotas was read: older ones that are missing in it are gone."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("listed_at",)

    quota_uids: tuple[str, ...]  # all that were in the list
    listed_at: Instant


# ProvisioningRequests: published only where `kube.are_provisioning_requests_served` is set, as 0.2 does not know these
# facts (docs/designs/014-provisioning-requests.md).


class PodProvisioningObserved(Versioned, frozen=True, kw_only=True, omit_defaults=True):
    """A ProvisioningRequest of a class that is served, with its PodTemplates, at this version of all of them."""

    request_uid: str
    namespace: str
    name: str
    class_name: ProvisioningClass  # its provisioningClassName
    created_at: Instant
    members_count: int  # pods of all pod sets, also of those whose template is unknown
    pod_sets: tuple[PodSet, ...] = ()  # empty: see `trouble`
    within: str | None = None  # node label whose value all pods share; None: any nodes
    valid_seconds: float | None = None  # it fails so long after its creation; None: the default
    is_tried_once: bool = False  # a check without capacity fails at once
    trouble: str = ""  # why it cannot be served as it is, such as a template that does not exist
    conditions: tuple[ProvisioningCondition, ...] = ()  # of its status; empty: none yet

    def condition(self) -> str | None:
        """One fact per request and version."""
        return f"pod_provisioning_observed/{self.request_uid}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        return f"provisioning/{self.request_uid}"

    def status(self, condition_type: ProvisioningConditionType) -> ProvisioningCondition | None:
        """Return the condition of this type, None without one."""
        return next((known for known in self.conditions if known.type == condition_type), None)

    def is_true(self, condition_type: ProvisioningConditionType) -> bool:
        """True if the request has this condition, and it is true."""
        known = self.status(condition_type)
        return known is not None and known.is_true

    @property
    def closed_by(self) -> ProvisioningCondition | None:
        """The condition since which no capacity is kept or sought for it; None: there is none."""
        final = ("Failed", "BookingExpired", "CapacityRevoked")
        return next((known for known in self.conditions if known.type in final and known.is_true), None)


class PodProvisioningGone(Versioned, frozen=True, kw_only=True):
    """The ProvisioningRequest was deleted from Kubernetes."""

    request_uid: str
    namespace: str
    name: str

    def condition(self) -> str | None:
        """One fact per request."""
        return f"pod_provisioning_gone/{self.request_uid}"

    def entity(self) -> str | None:
        return f"provisioning/{self.request_uid}"


class PodProvisioningListed(Versioned, frozen=True, kw_only=True):
    """A complete list of ProvisioningRequests was read: older ones that are missing in it are gone."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("listed_at",)

    request_uids: tuple[str, ...]  # all that were in the list
    listed_at: Instant
