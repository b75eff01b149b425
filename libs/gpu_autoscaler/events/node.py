"""Facts about nodes (as Kubernetes reports them) and instances (as the cloud reports them)."""

from typing import ClassVar, Literal

import msgspec

from gpu_autoscaler.events.fact import Fact, Versioned
from gpu_autoscaler.model.ids import ActionId, NodeUid, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import Taint, is_startup

InstanceState = Literal["pending", "running", "terminating", "terminated"]
# An instance only moves forward, so the order of its states serves as version.
INSTANCE_STATE_VERSION: dict[InstanceState, int] = {"pending": 1, "running": 2, "terminating": 3, "terminated": 4}


class NodeObserved(Versioned, frozen=True, kw_only=True):
    """The complete state of a node at this resourceVersion."""

    node_uid: NodeUid
    name: str
    is_ready: bool
    allocatable: Resources  # capacity for pods
    created_at: Instant
    provider_id: ProviderId | None = None
    instance_type: str | None = None  # None: no label
    zone: str | None = None  # None: no label
    capacity_type: CapacityType | None = None  # None: no label
    gpu_model: str | None = None
    gpu_memory_bytes: int | None = None  # of one GPU; None: unknown
    is_cordoned: bool = False  # spec.unschedulable is set: no new pods
    ready_since: Instant | None = None  # when it became ready; None: it is not
    deleting_since: Instant | None = None
    has_finalizer: bool = False  # our finalizer holds the object until its instance is gone
    internal_ip: str | None = None  # its address in the cluster; None: unknown
    labels: tuple[tuple[str, str], ...] = ()  # sorted by key
    annotations: tuple[tuple[str, str], ...] = ()  # those that we use, sorted by key
    taints: tuple[Taint, ...] = ()
    action_id: ActionId | None = None  # our label: the decision that bought it; None: not ours

    @property
    def is_starting(self) -> bool:
        """True while the node has a startup taint."""
        return any(map(is_startup, self.taints))

    def condition(self) -> str | None:
        """One fact per node and version."""
        return f"node_observed/{self.node_uid}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        return f"node/{self.node_uid}"


class NodeGone(Versioned, frozen=True, kw_only=True):
    """The node object was deleted from Kubernetes; its instance may still be billed."""

    node_uid: NodeUid
    name: str
    provider_id: ProviderId | None = None

    def condition(self) -> str | None:
        """One fact per node object."""
        return f"node_gone/{self.node_uid}"

    def entity(self) -> str | None:
        return f"node/{self.node_uid}"


class NodeListed(Versioned, frozen=True, kw_only=True):
    """A complete list was read: older nodes missing in it are gone. Also a heartbeat of the watch."""

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("listed_at",)

    node_uids: tuple[NodeUid, ...]
    listed_at: Instant


class InstanceChanges(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The difference of the cloud's list to the previous one; empty: it is unchanged.

    Has no effect on readers whose last list is not that of `since`: they wait for the next full one.
    """

    since: Instant  # `listed_at` of the list that this one continues
    appeared: tuple[ProviderId, ...] = ()  # in this list alone
    missing: tuple[ProviderId, ...] = ()  # in the previous list alone


class NodeWatched(Versioned, frozen=True, kw_only=True):
    """The watch was complete up to this version at this time (a bookmark).

    With `instances` it is the cloud's list that was read, at version 0 of no Kubernetes list. It has no type of its
    own, as release 0.2 sets messages of unknown types aside: it ignores this one, and may follow again on a rollback.
    """

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("watched_at",)

    watched_at: Instant
    instances: InstanceChanges | None = None  # changes of the cloud's list; None: it is about nodes


class NodeInstanceObserved(Versioned, frozen=True, kw_only=True):
    """The cloud reports an instance with our tag in this state; `version` is the order of the state."""

    provider_id: ProviderId
    action_id: ActionId | None  # its tag; None: unreadable
    state: InstanceState  # as the cloud reports it
    instance_type: str
    zone: str
    capacity_type: CapacityType
    price_micro_usd_per_hour: int | None
    launched_at: Instant  # billing starts
    terminated_at: Instant | None = None  # billing ends; None: not yet
    is_reclaimed: bool = False  # of one that ends: the cloud reclaimed it, with its notice or without an action of ours

    def condition(self) -> str | None:
        """One fact per instance and state."""
        return f"node_instance_observed/{self.provider_id}/{self.epoch}/{self.version}"

    def entity(self) -> str | None:
        return f"instance/{self.provider_id}"


class NodeInstanceListed(Fact, frozen=True, kw_only=True):
    """All instances with our tag at this time; only a fresh list proves that an instance is absent.

    Published in full at first and twice an hour; `NodeWatched.instances` continues it.
    """

    CLOCK_FIELDS: ClassVar[tuple[str, ...]] = ("listed_at",)

    provider_ids: tuple[ProviderId, ...]  # all that were in the list
    listed_at: Instant
