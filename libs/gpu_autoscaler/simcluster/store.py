"""Storage like etcd and the watch cache: versioned objects, a bounded log of changes, indices, subscribers.

Objects are never changed in place; one counter numbers all changes of the cluster.
"""

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from gpu_autoscaler.simcluster.objects import Json

ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]
Values = Callable[[Json], Iterable[str]]

# As many changes per kind as 10,000 pods make in a busy minute; more only costs memory.
HISTORY_CHANGES_MAX = 20_000


class Record:
    """One version of an object, and its JSON, encoded once for all readers."""

    __slots__ = ("_encoded", "key", "object", "version")

    def __init__(self, key: str, item: Json, version: int) -> None:
        self.key = key
        self.object = item
        self.version = version
        self._encoded: bytes | None = None

    @property
    def encoded(self) -> bytes:
        if self._encoded is None:
            self._encoded = msgspec.json.encode(self.object)
        return self._encoded


@dataclass(frozen=True, slots=True)
class Change:
    """One change of an object: its new and its old state."""

    table: str
    type: ChangeType
    record: Record  # of a deletion: the last state, under the version of the deletion
    previous: Record | None


class Log:
    """The last changes of one table, oldest first. Of dropped changes only the version is known."""

    def __init__(self, changes_max: int) -> None:
        self.changes_max = changes_max
        self.dropped_through = 0  # version of the youngest change that is gone; 0: nothing is
        self._changes: list[Change] = []
        self._versions: list[int] = []

    def append(self, change: Change) -> None:
        """Append a change; a full log drops a tenth at once, which keeps dropping cheap."""
        self._changes.append(change)
        self._versions.append(change.record.version)
        if len(self._changes) > self.changes_max:
            self._drop(max(1, self.changes_max // 10))

    def since(self, version: int) -> list[Change] | None:
        """Return the changes after `version`, None if some of them were dropped."""
        if version < self.dropped_through:
            return None
        return self._changes[bisect_right(self._versions, version) :]

    def compact(self, through: int) -> None:
        """Drop every change up to a version, even if there was none: older readers get 410."""
        self._drop(bisect_right(self._versions, through))
        self.dropped_through = max(self.dropped_through, through)

    def _drop(self, count: int) -> None:
        if count:
            self.dropped_through = self._versions[count - 1]
            del self._changes[:count], self._versions[:count]


class Table:
    """Objects of one kind, in key order, with their log, indices and waiting watches."""

    def __init__(self, changes_max: int) -> None:
        self.records: dict[str, Record] = {}
        self.log = Log(changes_max)
        self.waiting: set[asyncio.Event] = set()
        self._keys: list[str] = []
        self._indices: dict[str, tuple[Values, dict[str, set[str]]]] = {}
        self.add_index("owner", lambda item: [owner["uid"] for owner in item["metadata"].get("ownerReferences") or ()])

    def keys(self, namespace: str | None) -> list[str]:
        """Return the keys of a namespace, or all, in order."""
        if namespace is None:
            return list(self._keys)
        start = bisect_left(self._keys, namespace + "/")
        return self._keys[start : bisect_left(self._keys, namespace + "0", lo=start)]  # "0" follows "/"

    def add_index(self, name: str, values: Values) -> None:
        """Maintain an index of the objects by `values` from now on."""
        entries: dict[str, set[str]] = {}
        self._indices[name] = (values, entries)
        for record in self.records.values():
            for value in values(record.object):
                entries.setdefault(value, set()).add(record.key)

    def indexed(self, name: str, value: str) -> list[Record]:
        """Return the objects with that value in the index, in key order."""
        return [self.records[key] for key in sorted(self._indices[name][1].get(value, ()))]

    def apply(self, change: Change) -> None:
        """Apply the change to records, order, indices and log; then wake the watches."""
        key, previous = change.record.key, change.previous
        for values, entries in self._indices.values():
            for value in values(previous.object) if previous else ():
                entries[value].discard(key)
                if not entries[value]:
                    del entries[value]
            for value in values(change.record.object) if change.type != "DELETED" else ():
                entries.setdefault(value, set()).add(key)
        if change.type == "DELETED":
            del self.records[key]
            del self._keys[bisect_left(self._keys, key)]
        else:
            if previous is None:
                insort(self._keys, key)
            self.records[key] = change.record
        self.log.append(change)
        self.wake()

    def wake(self) -> None:
        for event in self.waiting:
            event.set()


class Store:
    """All tables under one version counter. Subscribers receive each change at once, in order."""

    def __init__(self, changes_max: int = HISTORY_CHANGES_MAX) -> None:
        self.version = 1  # as in a fresh etcd
        self._changes_max = changes_max
        self._tables: dict[str, Table] = {}
        self._subscribers: list[Callable[[Change], None]] = []

    def table(self, name: str) -> Table:
        """Return the table of that name, created on first use."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = Table(self._changes_max)
        return table

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Yield every table with its name."""
        return iter(self._tables.items())

    def subscribe(self, on_change: Callable[[Change], None]) -> None:
        self._subscribers.append(on_change)

    def put(self, table: str, key: str, item: Json) -> Record:
        """Store `item` under a new version; the store owns it from now on."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        record = Record(key, item, self.version)
        previous = self.table(table).records.get(key)
        self._apply(Change(table, "MODIFIED" if previous else "ADDED", record, previous))
        return record

    def remove(self, table: str, key: str) -> Record:
        """Remove the object; its last state gets the version of the removal."""
        self.version += 1
        previous = self.table(table).records[key]
        metadata = {**previous.object["metadata"], "resourceVersion": str(self.version)}
        record = Record(key, {**previous.object, "metadata": metadata}, self.version)
        self._apply(Change(table, "DELETED", record, previous))
        return record

    def compact(self) -> None:
        """Drop all history: every earlier watch and list is too old."""
        for table in self._tables.values():
            table.log.compact(self.version)

    def _apply(self, change: Change) -> None:
        self.table(change.table).apply(change)
        for on_change in self._subscribers:
            on_change(change)
