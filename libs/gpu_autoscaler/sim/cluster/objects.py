"""The cluster's objects as the API server stores them, with versions and a watch history, without controllers.

Objects are the wire structs that clients decode and are never changed in place.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from msgspec.structs import replace

from gpu_autoscaler.kube.protocol import BUDGETS, JOBS, NODES, PODS, SERVICES, Kind
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model.ids import derive_id

ObjectT = TypeVar("ObjectT", bound=core.Object)
Key = tuple[str, str]  # namespace and name

KINDS: tuple[Kind[Any], ...] = (PODS, NODES, BUDGETS, JOBS, SERVICES)


@dataclass(slots=True, eq=False)
class Entry:
    """One change of one object: its new state, or its last state if deleted."""

    object: core.Object
    is_deleted: bool


class Kubernetes:
    """The API server's object store."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self.version = 1
        self.history: dict[str, list[Entry]] = {kind.plural: [] for kind in KINDS}
        self._objects: dict[str, dict[Key, Any]] = {kind.plural: {} for kind in KINDS}
        self._served = {kind.path() for kind in KINDS}
        self._listeners: list[Callable[[str, Entry], None]] = []
        self._created_count = 0

    def serve(self, *kinds: Kind[Any]) -> None:
        """Serve objects of these kinds too; call before any watch starts."""
        for kind in kinds:
            self._served.add(kind.path())
            self.history[kind.plural] = []
            self._objects[kind.plural] = {}

    def has(self, kind: Kind[Any]) -> bool:
        return kind.path() in self._served

    def listen(self, listener: Callable[[str, Entry], None]) -> None:
        self._listeners.append(listener)

    def find(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT | None:
        item: ObjectT | None = self._objects[kind.plural].get((namespace, name))
        return item

    def all(self, kind: Kind[ObjectT]) -> list[ObjectT]:
        """Return every object of a kind, in order of creation."""
        return list(self._objects[kind.plural].values())

    def current(self, kind: Kind[ObjectT], item: ObjectT) -> ObjectT | None:
        """Return the current state of this object; None where it is gone, even if its name was reused."""
        current = self.find(kind, item.metadata.namespace, item.metadata.name)
        return current if current is not None and current.metadata.uid == item.metadata.uid else None

    def metadata(self, namespace: str, name: str, **more: Any) -> core.Metadata:  # noqa: ANN401 - fields of Metadata
        """Return the metadata of a new object; its uid is unique within a run."""
        self._created_count += 1
        uid = derive_id("uid", namespace, name, self._created_count)
        return core.Metadata(name=name, namespace=namespace, uid=uid, creation_timestamp=self.now(), **more)

    def put(self, kind: Kind[ObjectT], item: ObjectT) -> ObjectT:
        """Store the object at a new version; return it as stored."""
        stored = self._stamped(item)
        self._objects[kind.plural][item.metadata.namespace, item.metadata.name] = stored
        self._record(kind, Entry(stored, is_deleted=False))
        return stored

    def remove(self, kind: Kind[ObjectT], item: ObjectT) -> None:
        """Remove the object; its last state carries the version of its deletion."""
        last = self._objects[kind.plural].pop((item.metadata.namespace, item.metadata.name))
        self._record(kind, Entry(self._stamped(last), is_deleted=True))

    def delete(self, kind: Kind[ObjectT], item: ObjectT) -> None:
        """Delete the object: at once, or when its last finalizer is removed."""
        if not item.metadata.finalizers:
            self.remove(kind, item)
        elif item.metadata.deletion_timestamp is None:
            self.put(kind, replace(item, metadata=replace(item.metadata, deletion_timestamp=self.now())))

    def budgets_of(self, pod: core.Pod) -> list[core.PodDisruptionBudget]:
        return [
            budget
            for budget in self.all(BUDGETS)
            if budget.metadata.namespace == pod.metadata.namespace and selects(budget.spec.selector, pod)
        ]

    def as_of(self, kind: Kind[Any], entries_count: int) -> tuple[core.Object, ...]:
        """Return the objects of a kind after this many changes, as a stale server lists them."""
        shown: dict[Key, core.Object] = {}
        for entry in self.history[kind.plural][:entries_count]:
            key = (entry.object.metadata.namespace, entry.object.metadata.name)
            if entry.is_deleted:
                shown.pop(key, None)
            else:
                shown[key] = entry.object
        return tuple(shown.values())

    def _stamped(self, item: ObjectT) -> ObjectT:
        self.version += 1
        return replace(item, metadata=replace(item.metadata, resource_version=str(self.version)))

    def _record(self, kind: Kind[Any], entry: Entry) -> None:
        self.history[kind.plural].append(entry)
        for listener in tuple(self._listeners):
            listener(kind.plural, entry)


def selected(items: Iterator[ObjectT] | list[ObjectT], label: str) -> list[ObjectT]:
    """Return objects that carry the label; all for an empty label."""
    return [item for item in items if not label or label in item.metadata.labels]


def with_condition(
    conditions: tuple[core.Condition, ...],
    condition_type: str,
    status: core.ConditionStatus,
    at: datetime,
    **fields: str,
) -> tuple[core.Condition, ...]:
    """Return the conditions with this one set; its transition time changes only with its status."""
    other_conditions = tuple(condition for condition in conditions if condition.type != condition_type)
    before = next((condition for condition in conditions if condition.type == condition_type), None)
    since = before.last_transition_time if before is not None and before.status == status else at
    return (*other_conditions, core.Condition(type=condition_type, status=status, last_transition_time=since, **fields))


def is_true(conditions: tuple[core.Condition, ...], condition_type: str) -> bool:
    """True if the condition is present and true."""
    return any(condition.type == condition_type and condition.status == "True" for condition in conditions)


def with_pod_condition(
    pod: core.Pod, condition_type: str, status: core.ConditionStatus, at: datetime, **fields: str
) -> core.Pod:
    """Return the pod with this condition set, see `with_condition`."""
    conditions = with_condition(pod.status.conditions, condition_type, status, at, **fields)
    return replace(pod, status=replace(pod.status, conditions=conditions))


def selects(selector: core.LabelSelector | None, item: core.Object) -> bool:
    """True if the selector's labels are those of the object; None selects nothing."""
    return selector is not None and selector.match_labels.items() <= item.metadata.labels.items()


def amounts_text(cpu_milli: int, memory_bytes: int, disk_bytes: int, **more: int) -> Mapping[str, str]:
    """Return amounts as quantities, without zeros."""
    quantities = {"cpu": f"{cpu_milli}m", "memory": str(memory_bytes), "ephemeral-storage": str(disk_bytes)}
    quantities |= {name.replace("__", "/"): str(count) for name, count in more.items()}
    return {name: amount for name, amount in quantities.items() if amount not in ("0", "0m")}
