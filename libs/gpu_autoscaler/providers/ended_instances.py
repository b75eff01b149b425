"""Instances that a driver saw running and that have ended, for clouds that do not list deleted instances.

Kept in memory for as long as other clouds list theirs. After a restart, absence from the list is the only sign of an
end; no decision needs more.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.providers.protocol import Instance

SHOWN = timedelta(hours=1)  # as EC2 (EC2 User Guide, "Terminate Amazon EC2 instances")


class EndedInstances:
    """Last observation of each instance, until an hour after its end."""

    def __init__(self) -> None:
        self._alive: dict[ProviderId, Instance] = {}
        self._ending_since: dict[ProviderId, datetime] = {}  # terminated by us
        self._ended: dict[ProviderId, Instance] = {}

    def record_running(self, instance: Instance) -> None:
        if instance.provider_id not in self._ended:
            self._alive[instance.provider_id] = instance

    def record_terminating(self, provider_id: ProviderId, at: datetime) -> None:
        """Record when its termination was requested, which dates its end."""
        self._ending_since.setdefault(provider_id, at)

    def is_dated(self, provider_id: ProviderId) -> bool:
        """Return whether its end needs no date: it is known, or the instance was never seen."""
        return provider_id in self._ending_since or provider_id not in self._alive

    def record_end(self, provider_id: ProviderId, at: datetime) -> Instance | None:
        """Record that it no longer exists and return it as ended, at the latest `at`; None if it was never seen."""
        last = self._alive.pop(provider_id, None)
        if last is not None:
            ended_at = max(self._ending_since.pop(provider_id, at), last.launched_at)
            self._ended[provider_id] = msgspec.structs.replace(last, state="terminated", terminated_at=ended_at)
        return self._ended.get(provider_id)

    def by_order(self, action_id: ActionId) -> Instance | None:
        """Return the order's instance, ended or as last seen; None if none was seen."""
        instances = (*self._ended.values(), *self._alive.values())
        return next((instance for instance in instances if instance.action_id == action_id), None)

    def missing(self, listed: Iterable[ProviderId]) -> list[ProviderId]:
        """Return instances seen running that a list lacks: ended or not listed yet. The caller has to look up each."""
        listed_ids = set(listed)
        return [provider_id for provider_id in self._alive if provider_id not in listed_ids]

    def recent(self, now: datetime) -> list[Instance]:
        """Return those that ended within the last hour, and forget older ones."""
        self._ended = {
            key: instance
            for key, instance in self._ended.items()
            if instance.terminated_at is not None and now - instance.terminated_at < SHOWN
        }
        return list(self._ended.values())
