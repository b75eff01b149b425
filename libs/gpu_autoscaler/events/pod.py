"""Facts about pods and disruption budgets, as the pod watcher saw them in Kubernetes."""

from typing import Literal

from gpu_autoscaler.events.fact import Versioned
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import (
    NO_DEMANDS,
    LabelRequirement,
    NeighbourDemands,
    NodeDemands,
    Preferences,
)

PodPhase = Literal["pending", "running", "succeeded", "failed", "unknown"]


class PodObserved(Versioned, frozen=True, kw_only=True):
    """A pod is like this at this resourceVersion. Whole, not a difference: the last one says all."""

    pod_uid: PodUid
    namespace: str
    name: str
    phase: PodPhase
    requests: Resources
    created_at: Instant
    node_name: str | None = None
    is_ready: bool = False
    unschedulable_since: Instant | None = None  # PodScheduled=False with reason Unschedulable
    unschedulable_message: str = ""
    is_gated: bool = False  # schedulingGates are set: nobody wants a node for it yet
    started_at: Instant | None = None
    finished_at: Instant | None = None
    deleting_since: Instant | None = None
    priority: int = 0  # Kubernetes' spec.priority
    demands: NodeDemands = NO_DEMANDS
    neighbours: NeighbourDemands | None = None  # None: other pods do not matter to it
    gpu_model: str | None = None  # asked for by label or affinity; None: any, or one of several
    gpu_models: tuple[str, ...] = ()  # any of these will do; empty: see gpu_model
    gpu_memory_bytes_min: int | None = None  # of one GPU; None: as its model has it
    labels: tuple[tuple[str, str], ...] = ()  # sorted by key
    annotations: tuple[tuple[str, str], ...] = ()  # those that we honour, sorted by key
    owner_kind: str | None = None  # controller: Job, ReplicaSet, DaemonSet, Node (mirror pod) ...
    owner_uid: str | None = None
    has_local_storage: bool = False  # emptyDir or hostPath that is lost with the node
    grace_seconds: float = 30.0
    job_id: JobId | None = None
    volume_trouble: str = ""  # why no node helps before one of its volumes is there; empty: one would
    device_trouble: str = ""  # why what it claims of devices cannot be bought; empty: it can, or it claims none
    group_count_min: int | None = None  # pods of its group that start together; None: the group does not say
    preferences: Preferences | None = None  # None: it would as soon be anywhere

    def condition(self) -> str | None:
        """A pod at a version is one fact."""
        return f"pod_observed/{self.pod_uid}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        """The pod."""
        return f"pod/{self.pod_uid}"


class PodGone(Versioned, frozen=True, kw_only=True):
    """The pod's object is gone from Kubernetes."""

    pod_uid: PodUid
    namespace: str
    name: str
    node_name: str | None = None
    job_id: JobId | None = None
    phase: PodPhase | None = None  # its last one: what ended before it went has lost nothing. None: not known

    def condition(self) -> str | None:
        """A pod goes once."""
        return f"pod_gone/{self.pod_uid}"

    def entity(self) -> str | None:
        """The pod."""
        return f"pod/{self.pod_uid}"


class PodListed(Versioned, frozen=True, kw_only=True):
    """A whole list was read: pods of older versions that are not in it are gone. Also the watch's sign of life."""

    pod_uids: tuple[PodUid, ...]
    listed_at: Instant


class PodWatched(Versioned, frozen=True, kw_only=True):
    """The watch was alive and complete up to this version at this instant (a bookmark)."""

    watched_at: Instant


class PodBudgetObserved(Versioned, frozen=True, kw_only=True):
    """A PodDisruptionBudget is like this at this resourceVersion."""

    budget_uid: str
    namespace: str
    name: str
    match_labels: tuple[LabelRequirement, ...]  # its selector, all of which must hold; empty selects every pod
    disruptions_allowed: int
    pods_healthy_count: int = 0
    pods_healthy_count_min: int = 0

    def condition(self) -> str | None:
        """A budget at a version is one fact."""
        return f"pod_budget_observed/{self.budget_uid}/{self.epoch}/{self.version}"


class PodBudgetGone(Versioned, frozen=True, kw_only=True):
    """The budget's object is gone from Kubernetes."""

    budget_uid: str
    namespace: str
    name: str

    def condition(self) -> str | None:
        """A budget goes once."""
        return f"pod_budget_gone/{self.budget_uid}"


class PodBudgetListed(Versioned, frozen=True, kw_only=True):
    """A whole list of budgets was read: older ones that are not in it are gone."""

    budget_uids: tuple[str, ...]
    listed_at: Instant
