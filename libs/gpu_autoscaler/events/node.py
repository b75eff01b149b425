"""Facts about nodes (as Kubernetes shows them) and instances (as the cloud shows them)."""

from typing import Literal

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import Taint, is_startup

InstanceState = Literal["pending", "running", "terminating", "terminated"]
# An instance only moves forward, so its state's place in life is its version.
INSTANCE_STATE_VERSION: dict[InstanceState, int] = {
    "pending": 1,
    "running": 2,
    "terminating": 3,
    "terminated": 4,
}


class NodeObserved(Versioned, frozen=True, kw_only=True):
    """A node is like this at this resourceVersion. Whole, not a difference."""

    node_uid: NodeUid
    name: str
    is_ready: bool
    allocatable: Resources
    created_at: Instant
    provider_id: ProviderId | None = None
    instance_type: str | None = None
    zone: str | None = None
    capacity_type: CapacityType | None = None  # None: the labels do not say
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None
    is_cordoned: bool = False
    ready_since: Instant | None = None
    deleting_since: Instant | None = None
    is_guarded: bool = False  # our finalizer holds the object until its instance is gone
    internal_ip: str | None = None
    labels: tuple[tuple[str, str], ...] = ()  # sorted by key
    annotations: tuple[tuple[str, str], ...] = ()  # those that we honour, sorted by key
    taints: tuple[Taint, ...] = ()
    action_id: ActionId | None = None  # our tag: the decision that bought it; None: not ours

    @property
    def is_starting(self) -> bool:
        """True while a taint is there that whoever makes the node ready takes away."""
        return any(map(is_startup, self.taints))

    def condition(self) -> str | None:
        """A node at a version is one fact."""
        return f"node_observed/{self.node_uid}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        """The node."""
        return f"node/{self.node_uid}"


class NodeGone(Versioned, frozen=True, kw_only=True):
    """The node's object is gone from Kubernetes; its instance may still cost money."""

    node_uid: NodeUid
    name: str
    provider_id: ProviderId | None = None

    def condition(self) -> str | None:
        """A node object goes once."""
        return f"node_gone/{self.node_uid}"

    def entity(self) -> str | None:
        """The node."""
        return f"node/{self.node_uid}"


class NodeListed(Versioned, frozen=True, kw_only=True):
    """A whole list was read: nodes of older versions that are not in it are gone. Also the watch's sign of life."""

    node_uids: tuple[NodeUid, ...]
    listed_at: Instant


class NodeWatched(Versioned, frozen=True, kw_only=True):
    """The watch was alive and complete up to this version at this instant (a bookmark)."""

    watched_at: Instant


class NodeInstanceObserved(Versioned, frozen=True, kw_only=True):
    """The cloud shows an instance with our tag in this state; `version` is the state's place in life."""

    provider_id: ProviderId
    action_id: ActionId | None  # its tag; None: the tag could not be read
    state: InstanceState
    instance_type: str
    zone: str
    capacity_type: CapacityType
    price_micro_usd_per_hour: int | None
    launched_at: Instant  # billing starts
    terminated_at: Instant | None = None  # billing ends
    is_taken: bool = False  # of one that ends: by the cloud's choice, under its notice or without a word of ours

    def condition(self) -> str | None:
        """An instance enters a state once."""
        return f"node_instance_observed/{self.provider_id}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        """The instance."""
        return f"instance/{self.provider_id}"


class NodeInstanceListed(Fact, frozen=True, kw_only=True):
    """Every instance with our tag was listed at this instant; only a fresh list can prove an absence."""

    provider_ids: tuple[ProviderId, ...]
    listed_at: Instant
