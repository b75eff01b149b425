"""A state while a batch of facts is folded into it. Used by `core/fold.py` and `core/folding/pruning.py` alone.

A mapping is copied at its first change in a batch and never again, so a batch of a million facts copies each mapping
once, and a batch of one copies only what it touches.
"""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, Generic, TypeVar

from gpu_autoscaler.core.folding.graves import TombstoneBuckets
from gpu_autoscaler.core.state import ClusterState, Synced, Tombstone, Version
from gpu_autoscaler.core.trails import extend_telemetry_history
from gpu_autoscaler.events.fact import Versioned
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodBudgetObserved, PodObserved
from gpu_autoscaler.model.ids import NodeUid, PodUid, ProviderId

K = TypeVar("K")
V = TypeVar("V")
E = TypeVar("E", bound=Versioned)


class Table(Generic[K, V]):
    """A mapping of the state that is copied when it is first changed."""

    __slots__ = ("_own", "now")

    def __init__(self, origin: Mapping[K, V]) -> None:
        self.now = origin
        self._own: dict[K, V] | None = None

    def _owned(self) -> dict[K, V]:
        if self._own is None:
            self._own = dict(self.now)
            self.now = self._own
        return self._own

    def get(self, key: K) -> V | None:
        """The value as it is now."""
        return self.now.get(key)

    def set(self, key: K, value: V) -> None:
        """Put a value in place."""
        own = self._own  # once copied, as most often: no call for each of a fact's words
        (self._owned() if own is None else own)[key] = value

    def remove(self, key: K) -> None:
        """Take a key away; one that is not there stays away."""
        if key in self.now:
            del self._owned()[key]

    def forget(self, is_old: Callable[[V], bool]) -> None:
        """Leave out every value that is old; nothing is copied where none is."""
        kept = {key: value for key, value in self.now.items() if not is_old(value)}
        if len(kept) < len(self.now):
            self._own = kept
            self.now = kept


def version_of(fact: Versioned) -> Version:
    """The fact's place in its source's count."""
    return (fact.epoch, fact.version)


class Entities(Generic[K, E]):
    """Things that a source lists and watches: those that are there, those that are gone, how complete it is.

    Of equal versions the end wins over the observation; else the newer version wins, in any order of arrival.
    """

    __slots__ = ("gone", "living", "synced")

    def __init__(self, living: Mapping[K, E], gone: Mapping[int, Mapping[K, Tombstone]], synced: Synced | None) -> None:
        self.living = Table(living)
        self.gone = TombstoneBuckets(gone)
        self.synced = synced

    def observe(self, key: K, entity: E) -> bool:
        """Take the observation in; False if a newer or equal word was known."""
        known = self.living.now.get(key)
        if known is not None:
            if (known.epoch, known.version) >= (entity.epoch, entity.version):
                return False
        elif (stone := self.gone.get(key)) is not None:
            if stone.version >= version_of(entity):
                return False
            self.gone.remove(key)
        self.living.set(key, entity)
        return True

    def end(self, key: K, stone: Tombstone) -> bool:
        """Take the end in; False if a newer word was known. The end of something unknown is kept too."""
        known, earlier = self.living.get(key), self.gone.get(key)
        if known is not None and version_of(known) > stone.version:
            return False
        if earlier is not None and earlier.version >= stone.version:
            return False
        if known is not None:
            self.living.remove(key)
        if earlier is not None:
            self.gone.remove(key)
        self.gone.set(key, stone)
        return True

    def list(self, keys: Collection[K], version: Version, at: datetime) -> tuple[tuple[K, E], ...]:
        """Take a whole list in; returns what is older than it and not in it, for the caller to end."""
        if self.synced is not None and self.synced.version >= version:
            self.watch(version, at)  # nothing has changed since, and somebody looked
            return ()
        seen_at = at if self.synced is None else max(at, self.synced.seen_at)
        self.synced = Synced(version, seen_at)
        listed = frozenset(keys)
        return tuple(
            (key, entity)
            for key, entity in self.living.now.items()
            if key not in listed and version_of(entity) <= version
        )

    def watch(self, version: Version, at: datetime) -> None:
        """Take a sign of life in. Before the first list, and of an older list, it proves nothing."""
        if self.synced is not None and version >= self.synced.version and at > self.synced.seen_at:
            self.synced = Synced(self.synced.version, at)


class Batch:
    """The state's mappings while facts are folded in. Attributes are named as in `ClusterState`."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.pods: Entities[PodUid, PodObserved] = Entities(state.pods, state.pods_gone, state.pods_synced)
        self.budgets: Entities[str, PodBudgetObserved] = Entities(
            state.budgets, state.budgets_gone, state.budgets_synced
        )
        self.busy_until = Table(state.busy_until)
        self.nodes: Entities[NodeUid, NodeObserved] = Entities(state.nodes, state.nodes_gone, state.nodes_synced)
        self.instances = Table(state.instances)
        self.instances_seen_at: Table[ProviderId, datetime] = Table(state.instances_seen_at)
        self.instances_listed_at = state.instances_listed_at
        self.usable = Table(state.usable)
        self.observed_allocatable = Table(state.observed_allocatable)
        self.spot_terminations = Table(state.spot_terminations)
        self.unhealthy_since: Table[NodeUid, datetime] = Table(state.unhealthy_since)
        self.telemetry = Table(state.telemetry)
        self.telemetry_history = Table(state.telemetry_history)
        self.notices = Table(state.notices)
        self.offers = state.offers
        self.rebalance_recommended_at: Table[ProviderId, datetime] = Table(state.rebalance_recommended_at)
        self.jobs = Table(state.jobs)
        self.reported_demand = Table(state.reported_demand)
        self.directives = Table(state.directives)
        self.policy_changed = state.policy_changed
        self.policy_documents = state.policy_documents
        self.orders = Table(state.orders)
        self.drains = Table(state.drains)
        self.gangs = Table(state.gangs)
        self.last_plan_sequence = state.last_plan_sequence
        self.last_plan_at = state.last_plan_at
        self.demand_history = Table(state.demand_history)
        self.forecast_scores = Table(state.forecast_scores)
        self.restored_at = state.restored_at
        self.spent = Table(state.spent)
        self.charges = Table(state.charges)
        self.spent_by_job = Table(state.spent_by_job)
        self.ledger_reported_at = state.ledger_reported_at
        self.newest = Table(state.newest)

    def follow(self, before: GpuNodeSummarised | None, window: GpuNodeSummarised) -> None:
        """Take one more window of a node's telemetry into its trail."""
        trail = extend_telemetry_history(self.telemetry_history.get(window.node_uid), before, window)
        if trail is not None:
            self.telemetry_history.set(window.node_uid, trail)

    def state(self) -> ClusterState:
        """Return the state as it is now; the very same one where nothing changed."""
        now: dict[str, Any] = {
            "pods": self.pods.living.now,
            "pods_gone": self.pods.gone.now,
            "pods_synced": self.pods.synced,
            "budgets": self.budgets.living.now,
            "budgets_gone": self.budgets.gone.now,
            "budgets_synced": self.budgets.synced,
            "busy_until": self.busy_until.now,
            "nodes": self.nodes.living.now,
            "nodes_gone": self.nodes.gone.now,
            "nodes_synced": self.nodes.synced,
            "instances": self.instances.now,
            "instances_seen_at": self.instances_seen_at.now,
            "instances_listed_at": self.instances_listed_at,
            "usable": self.usable.now,
            "observed_allocatable": self.observed_allocatable.now,
            "spot_terminations": self.spot_terminations.now,
            "unhealthy_since": self.unhealthy_since.now,
            "telemetry": self.telemetry.now,
            "telemetry_history": self.telemetry_history.now,
            "notices": self.notices.now,
            "offers": self.offers,
            "rebalance_recommended_at": self.rebalance_recommended_at.now,
            "jobs": self.jobs.now,
            "reported_demand": self.reported_demand.now,
            "directives": self.directives.now,
            "policy_changed": self.policy_changed,
            "policy_documents": self.policy_documents,
            "orders": self.orders.now,
            "gangs": self.gangs.now,
            "drains": self.drains.now,
            "last_plan_sequence": self.last_plan_sequence,
            "last_plan_at": self.last_plan_at,
            "demand_history": self.demand_history.now,
            "forecast_scores": self.forecast_scores.now,
            "restored_at": self.restored_at,
            "spent": self.spent.now,
            "charges": self.charges.now,
            "spent_by_job": self.spent_by_job.now,
            "ledger_reported_at": self.ledger_reported_at,
            "newest": self.newest.now,
        }
        is_same = all(value is getattr(self._state, name) for name, value in now.items())
        return self._state if is_same else ClusterState(**now)
