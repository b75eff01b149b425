"""Mutable tables of the state while a batch of facts is folded in. Used by `core/intake` and `core/state` only.

A table is copied at its first change in a batch, so a batch of any size copies each table at most once.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from gpu_autoscaler.core.state import state as records
from gpu_autoscaler.core.state.demand_history import DemandHistory
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.lineage import hand_on
from gpu_autoscaler.core.state.node_shortfalls import ObservedAllocatable
from gpu_autoscaler.core.state.telemetry_history import NodeTelemetryHistory, extend_telemetry_history
from gpu_autoscaler.events.fact import Versioned
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodBudgetObserved, PodObserved, PodProvisioningObserved, PodQuotaObserved
from gpu_autoscaler.events.policy import PolicyChanged, PolicyDirectiveLifted, PolicyDocumentsAccepted
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.model.forecasts import Score
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PodUid, ProviderId
from gpu_autoscaler.model.reasons.defer_limits import BrakeTripped

K = TypeVar("K")
V = TypeVar("V")
E = TypeVar("E", bound=Versioned)


def version_of(fact: Versioned) -> records.Version:
    """Return the version of the fact."""
    return (fact.epoch, fact.version)


# ---- tombstones, by the hour of deletion: a batch copies few hours, and whole hours are pruned at once


def tombstone_of(buckets: Mapping[int, Mapping[K, records.Tombstone]], key: K) -> records.Tombstone | None:
    """Return the tombstone of an entity; None: not known to be deleted."""
    for tombstones in buckets.values():
        if (tombstone := tombstones.get(key)) is not None:
            return tombstone
    return None


def all_tombstones(buckets: Mapping[int, Mapping[K, records.Tombstone]]) -> Iterator[records.Tombstone]:
    """Yield every tombstone, unordered."""
    for tombstones in buckets.values():
        yield from tombstones.values()


class TombstoneBuckets(Generic[K]):
    """Tombstones while a batch is folded in. An entity has at most one."""

    __slots__ = ("_own", "now")

    def __init__(self, origin: Mapping[int, Mapping[K, records.Tombstone]]) -> None:
        self.now = origin
        self._own: dict[int, dict[K, records.Tombstone]] = {}  # hours that were copied

    def _owned(self, at_hour: int) -> dict[K, records.Tombstone]:
        own = self._own.get(at_hour)
        if own is None:
            own = self._own[at_hour] = dict(self.now.get(at_hour, ()))
            self.now = {**self.now, at_hour: own}
        return own

    def get(self, key: K) -> records.Tombstone | None:
        return tombstone_of(self.now, key)

    def set(self, key: K, tombstone: records.Tombstone) -> None:
        """Add a tombstone; call `remove` first if the entity has one."""
        self._owned(hour(tombstone.gone_at))[key] = tombstone

    def remove(self, key: K) -> None:
        """Remove a tombstone; empty hours are removed too, so that equal states are equal objects."""
        for at_hour, tombstones in self.now.items():
            if key in tombstones:
                own = self._owned(at_hour)
                del own[key]
                if not own:
                    self._forget({at_hour})
                return

    def forget(self, before_hour: int) -> None:
        """Remove every hour before this one."""
        if old := {at_hour for at_hour in self.now if at_hour < before_hour}:
            self._forget(old)

    def _forget(self, hours: Collection[int]) -> None:
        self.now = {at_hour: tombstones for at_hour, tombstones in self.now.items() if at_hour not in hours}
        for at_hour in hours:
            self._own.pop(at_hour, None)


# ---- tables


class Table(Generic[K, V]):
    """A mapping of the state, copied at its first change."""

    __slots__ = ("_own", "changed", "now")

    def __init__(self, origin: Mapping[K, V]) -> None:
        self.now = origin
        self._own: dict[K, V] | None = None
        self.changed: set[K] = set()  # keys that were set or removed

    def _owned(self) -> dict[K, V]:
        if self._own is None:
            self._own = dict(self.now)
            self.now = self._own
        return self._own

    def get(self, key: K) -> V | None:
        return self.now.get(key)

    def set(self, key: K, value: V) -> None:
        own = self._own  # usually copied already: saves a call per change
        (self._owned() if own is None else own)[key] = value
        self.changed.add(key)

    def update(self, entries: Mapping[K, V]) -> None:
        if entries:
            self._owned().update(entries)
            self.changed.update(entries)

    def remove(self, key: K) -> None:
        """Remove a key if it is present."""
        if key in self.now:
            del self._owned()[key]
            self.changed.add(key)

    def forget(self, is_old: Callable[[V], bool]) -> None:
        """Remove every old value; nothing is copied if there is none."""
        kept = {key: value for key, value in self.now.items() if not is_old(value)}
        if len(kept) < len(self.now):
            self.changed.update(key for key in self.now if key not in kept)
            self._own = kept
            self.now = kept


class Entities(Generic[K, E]):
    """Entities that a source lists and watches: existing, deleted, and the freshness of the list. The newer version
    wins, of equal ones the deletion."""

    __slots__ = ("gone", "living", "synced")

    def __init__(
        self, living: Mapping[K, E], gone: Mapping[int, Mapping[K, records.Tombstone]], synced: records.Synced | None
    ) -> None:
        self.living = Table(living)
        self.gone = TombstoneBuckets(gone)
        self.synced = synced

    def observe(self, key: K, entity: E) -> bool:
        """Apply an observation; False if an equal or newer version was known."""
        known = self.living.now.get(key)
        if known is not None:
            if (known.epoch, known.version) >= (entity.epoch, entity.version):
                return False
        elif (tombstone := self.gone.get(key)) is not None:
            if tombstone.version >= version_of(entity):
                return False
            self.gone.remove(key)
        self.living.set(key, entity)
        return True

    def end(self, key: K, tombstone: records.Tombstone) -> bool:
        """Apply a deletion, also of an unknown entity; False if a newer version was known."""
        known, earlier = self.living.get(key), self.gone.get(key)
        if known is not None and version_of(known) > tombstone.version:
            return False
        if earlier is not None and earlier.version >= tombstone.version:
            return False
        if known is not None:
            self.living.remove(key)
        if earlier is not None:
            self.gone.remove(key)
        self.gone.set(key, tombstone)
        return True

    def list(self, keys: Collection[K], version: records.Version, at: datetime) -> tuple[tuple[K, E], ...]:
        """Apply a whole list; return older entities missing from it, which the caller deletes."""
        if self.synced is not None and self.synced.version >= version:
            self.watch(version, at)  # nothing changed since, but the source is alive
            return ()
        seen_at = at if self.synced is None else max(at, self.synced.seen_at)
        self.synced = records.Synced(version, seen_at)
        listed = frozenset(keys)
        return tuple(
            (key, entity)
            for key, entity in self.living.now.items()
            if key not in listed and version_of(entity) <= version
        )

    def watch(self, version: records.Version, at: datetime) -> None:
        """Apply a bookmark. Before the first list, and for an older list, it has no effect."""
        if self.synced is not None and version >= self.synced.version and at > self.synced.seen_at:
            self.synced = records.Synced(self.synced.version, at)


# Names of ClusterState by kind. Entities have three fields each: living, gone and synced.
_ENTITIES = frozenset(
    name.removesuffix("_gone") for name in records.ClusterState.__struct_fields__ if name.endswith("_gone")
)
_ENTITY_FIELDS = frozenset(f"{name}{suffix}" for name in _ENTITIES for suffix in ("", "_gone", "_synced"))
_OTHERS = tuple(name for name in records.ClusterState.__struct_fields__ if name not in _ENTITY_FIELDS)
_TABLES = frozenset(name for name in _OTHERS if isinstance(getattr(records.EMPTY_STATE, name), Mapping))


class Batch:
    """The state while facts are folded in. Attributes are named as in `ClusterState`, and made at their first use: a
    batch of one fact uses few of them."""

    pods: Entities[PodUid, PodObserved]
    budgets: Entities[str, PodBudgetObserved]
    quotas: Entities[str, PodQuotaObserved]
    provisioning: Entities[str, PodProvisioningObserved]
    nodes: Entities[NodeUid, NodeObserved]
    busy_until: Table[str, datetime]
    instances: Table[ProviderId, NodeInstanceObserved]
    instances_seen_at: Table[ProviderId, datetime]
    instances_listed_at: datetime | None
    usable: Table[NodeUid, records.Usable]
    observed_allocatable: Table[str, ObservedAllocatable]
    spot_terminations: Table[str, Mapping[int, records.SpotTerminations]]
    unhealthy_since: Table[NodeUid, datetime]
    telemetry: Table[NodeUid, GpuNodeSummarized]
    telemetry_history: Table[NodeUid, NodeTelemetryHistory]
    notices: Table[str, records.NoticeRecord]
    offers: SpotOffersSampled | None
    rebalance_recommended_at: Table[ProviderId, datetime]
    jobs: Table[JobId, records.JobRecord]
    durations: Table[str, records.DurationGroup]
    gpu_time: Table[str, Mapping[int, int]]
    reported_demand: Table[str, records.ReportedDemandRecord]
    directives: Table[str, records.DirectiveRecord]
    brake_releases: Table[str, PolicyDirectiveLifted]
    policy_changed: PolicyChanged | None
    policy_documents: PolicyDocumentsAccepted | None
    opted_in_namespaces: tuple[str, ...]
    orders: Table[ActionId, records.OrderRecord]
    drains: Table[ActionId, records.DrainRecord]
    gangs: Table[str, records.GangRecord]
    rejections: Table[str, records.RejectionRecord]
    upkeep: Table[str, records.UpkeepRecord]
    brake: BrakeTripped | None
    last_plan_sequence: int
    last_plan_at: datetime | None
    demand_history: Table[str, DemandHistory]
    forecast_scores: Table[str, tuple[Score, ...]]
    restored_at: datetime | None
    spent: Table[str, Mapping[str, int]]
    charges: Table[ProviderId, records.Charge]
    spent_by_job: Table[JobId, records.JobSpent]
    ledger_reported_at: datetime | None
    newest: Table[str, datetime]

    def __init__(self, state: records.ClusterState) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - declared above
        """Return a part of the state that is used for the first time; tables are kept, and copied when they change."""
        part = getattr(self._state, name)
        if name in _TABLES:
            part = vars(self)[name] = Table(part)
        elif name in _ENTITIES:
            state = self._state
            part = vars(self)[name] = Entities(part, getattr(state, f"{name}_gone"), getattr(state, f"{name}_synced"))
        return part

    def follow(self, before: GpuNodeSummarized | None, window: GpuNodeSummarized) -> None:
        """Add one more window to the telemetry history of its node."""
        history = extend_telemetry_history(self.telemetry_history.get(window.node_uid), before, window)
        if history is not None:
            self.telemetry_history.set(window.node_uid, history)

    def state(self) -> records.ClusterState:
        """Return the current state; the same object if nothing changed. It derives from what the one before derived."""
        before = self._state
        tables: dict[str, Table[Any, Any]] = {}
        values: dict[str, object] = {}
        for name, part in vars(self).items():
            match part:
                case Table():
                    tables[name] = part
                case Entities():
                    tables[name] = part.living
                    values |= {f"{name}_gone": part.gone.now, f"{name}_synced": part.synced}
                case _ if part is not before:
                    values[name] = part
        tables = {name: table for name, table in tables.items() if table.now is not getattr(before, name)}
        values = {name: value for name, value in values.items() if value is not getattr(before, name)}
        if not tables and not values:
            return before
        state = replace(before, **{name: table.now for name, table in tables.items()}, **values)
        keys = {name: frozenset(table.changed) for name, table in tables.items()}
        hand_on(before, state, keys | dict.fromkeys(values, frozenset()))
        return state
