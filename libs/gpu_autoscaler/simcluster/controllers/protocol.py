"""The interface of a controller, and the agenda of its scheduled work."""

import hashlib
import heapq
import itertools
from collections.abc import Iterator
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from gpu_autoscaler.simcluster.answers import ApiRefusal
from gpu_autoscaler.simcluster.api import Api
from gpu_autoscaler.simcluster.kinds import EVENTS, Kind
from gpu_autoscaler.simcluster.objects import Json, stamp, stamp_micro
from gpu_autoscaler.simcluster.store import Change

Item = TypeVar("Item")


class Controller(Protocol):
    """A control loop: records changes, works in steps, never waits."""

    def on_change(self, change: Change) -> None:
        """Record the change. Must not write to the store."""

    def step(self, now: datetime) -> None:
        """Do what is due at `now`, in cluster time; at most a bounded amount of it."""


class Agenda(Generic[Item]):
    """Items scheduled for a time, earliest first; equal times in the order they were added."""

    def __init__(self) -> None:
        self._entries: list[tuple[datetime, int, Item]] = []
        self._order = itertools.count()

    def add(self, due: datetime, item: Item) -> None:
        heapq.heappush(self._entries, (due, next(self._order), item))

    def take_due(self, now: datetime) -> Iterator[Item]:
        """Yield and remove due items, including those that are added meanwhile."""
        while self._entries and self._entries[0][0] <= now:
            yield heapq.heappop(self._entries)[2]


class Recorder:
    """The events of one component, as `kubectl describe` shows them."""

    def __init__(self, api: Api, component: str) -> None:
        self._api = api
        self._component = component

    def record(self, kind: Kind, item: Json, event_type: str, reason: str, message: str) -> None:
        """Write or count up the event. Lost if the namespace is being deleted, as in reality."""
        metadata = item["metadata"]
        namespace = metadata.get("namespace", "default")
        digest = hashlib.blake2b(f"{metadata['uid']} {reason}".encode(), digest_size=8).hexdigest()
        name = f"{metadata['name']}.{digest}"
        now = self._api.now()

        def count_up(event: Json) -> None:
            event.update(message=message, count=event["count"] + 1, lastTimestamp=stamp(now))

        if self._api.modify(EVENTS, f"{namespace}/{name}", count_up):
            return
        regarding = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            **({"namespace": namespace} if kind.namespaced else {}),
        }
        body = {
            "metadata": {"name": name},
            "involvedObject": regarding,
            "reason": reason,
            "message": message,
            "type": event_type,
            "count": 1,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": f"{self._component}-simcluster",
            "eventTime": stamp_micro(now),
            "firstTimestamp": stamp(now),
            "lastTimestamp": stamp(now),
            "action": reason,
        }
        try:
            self._api.create(EVENTS, namespace, body)
        except ApiRefusal:
            return
