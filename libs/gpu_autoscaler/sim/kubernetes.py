"""The cluster's objects as the API server stores them, with versions and a watch history, without controllers.

Objects are the wire structs that clients decode and are never changed in place. Controllers, cloud, services and users
change them through this store.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

from msgspec.structs import replace

from gpu_autoscaler.kube import wire
from gpu_autoscaler.kube.protocol import BUDGETS, JOBS, NODES, PODS, SERVICES, Kind
from gpu_autoscaler.model.ids import derive_id

ObjectT = TypeVar("ObjectT", bound=wire.Object)
Key = tuple[str, str]  # namespace and name

KINDS: tuple[Kind[Any], ...] = (PODS, NODES, BUDGETS, JOBS, SERVICES)


class Entry:
    """One change of one object: its new state, or its last state if deleted."""

    __slots__ = ("is_deleted", "object")

    def __init__(self, thing: wire.Object, *, is_deleted: bool) -> None:
        self.object = thing
        self.is_deleted = is_deleted


class Kubernetes:
    """The API server's object store."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self.version = 1
        self.history: dict[str, list[Entry]] = {kind.plural: [] for kind in KINDS}
        self._objects: dict[str, dict[Key, Any]] = {kind.plural: {} for kind in KINDS}
        self._served = {kind.path() for kind in KINDS}
        self._listeners: list[Callable[[str, Entry], None]] = []
        self._made_count = 0

    def serve(self, *kinds: Kind[Any]) -> None:
        """Serve objects of these kinds too; call before any watch starts."""
        for kind in kinds:
            self._served.add(kind.path())
            self.history[kind.plural] = []
            self._objects[kind.plural] = {}

    def has(self, kind: Kind[Any]) -> bool:
        """False for a kind that this cluster does not serve."""
        return kind.path() in self._served

    def listen(self, listener: Callable[[str, Entry], None]) -> None:
        """Call the listener for every change from now on."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[str, Entry], None]) -> None:
        """Stop calling the listener."""
        self._listeners.remove(listener)

    def find(self, kind: Kind[ObjectT], namespace: str, name: str) -> ObjectT | None:
        """Return the object; None if no object has this name."""
        found: ObjectT | None = self._objects[kind.plural].get((namespace, name))
        return found

    def all(self, kind: Kind[ObjectT]) -> list[ObjectT]:
        """Return every object of a kind, in order of creation."""
        return list(self._objects[kind.plural].values())

    def current(self, kind: Kind[ObjectT], thing: ObjectT) -> ObjectT | None:
        """Return the current state of this object; None where it is gone, even if its name was reused."""
        found = self.find(kind, thing.metadata.namespace, thing.metadata.name)
        return found if found is not None and found.metadata.uid == thing.metadata.uid else None

    def metadata(self, namespace: str, name: str, **more: Any) -> wire.Metadata:  # noqa: ANN401 - fields of Metadata
        """Return the metadata of a new object; its uid is unique within a run."""
        self._made_count += 1
        uid = derive_id("uid", namespace, name, self._made_count)
        return wire.Metadata(name=name, namespace=namespace, uid=uid, creation_timestamp=self.now(), **more)

    def put(self, kind: Kind[ObjectT], thing: ObjectT) -> ObjectT:
        """Store the object at a new version; return it as stored."""
        stored = self._stamped(thing)
        self._objects[kind.plural][thing.metadata.namespace, thing.metadata.name] = stored
        self._tell(kind, Entry(stored, is_deleted=False))
        return stored

    def remove(self, kind: Kind[ObjectT], thing: ObjectT) -> None:
        """Remove the object; its last state carries the version of its deletion."""
        last = self._objects[kind.plural].pop((thing.metadata.namespace, thing.metadata.name))
        self._tell(kind, Entry(self._stamped(last), is_deleted=True))

    def delete(self, kind: Kind[ObjectT], thing: ObjectT) -> None:
        """Delete the object: at once, or when its last finalizer is removed."""
        if not thing.metadata.finalizers:
            self.remove(kind, thing)
        elif thing.metadata.deletion_timestamp is None:
            self.put(kind, replace(thing, metadata=replace(thing.metadata, deletion_timestamp=self.now())))

    def as_of(self, kind: Kind[Any], entries_count: int) -> tuple[wire.Object, ...]:
        """Return the objects of a kind after this many changes, as a stale server lists them."""
        shown: dict[Key, wire.Object] = {}
        for entry in self.history[kind.plural][:entries_count]:
            key = (entry.object.metadata.namespace, entry.object.metadata.name)
            if entry.is_deleted:
                shown.pop(key, None)
            else:
                shown[key] = entry.object
        return tuple(shown.values())

    def _stamped(self, thing: ObjectT) -> ObjectT:
        self.version += 1
        return replace(thing, metadata=replace(thing.metadata, resource_version=str(self.version)))

    def _tell(self, kind: Kind[Any], entry: Entry) -> None:
        self.history[kind.plural].append(entry)
        for listener in tuple(self._listeners):
            listener(kind.plural, entry)


def selected(things: Iterator[ObjectT] | list[ObjectT], label: str) -> list[ObjectT]:
    """Return objects that carry the label; all for an empty label."""
    return [thing for thing in things if not label or label in thing.metadata.labels]


def with_condition(
    conditions: tuple[wire.Condition, ...], condition_type: str, status: wire.ConditionStatus, at: datetime, **said: str
) -> tuple[wire.Condition, ...]:
    """Return the conditions with this one set; its transition time changes only with its status."""
    others = tuple(one for one in conditions if one.type != condition_type)
    before = next((one for one in conditions if one.type == condition_type), None)
    since = before.last_transition_time if before is not None and before.status == status else at
    return (*others, wire.Condition(type=condition_type, status=status, last_transition_time=since, **said))


def amounts_text(cpu_milli: int, memory_bytes: int, disk_bytes: int, **more: int) -> Mapping[str, str]:
    """Return amounts as quantities, without zeros."""
    known = {"cpu": f"{cpu_milli}m", "memory": str(memory_bytes), "ephemeral-storage": str(disk_bytes)}
    known |= {name.replace("__", "/"): str(count) for name, count in more.items()}
    return {name: amount for name, amount in known.items() if amount not in ("0", "0m")}
