"""Instances that a driver has seen alive and that are no more, of clouds that show nothing of what is deleted.

Kept in memory for as long as other clouds show theirs. After a restart absence from the list has to tell: nothing
that is decided needs more.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.providers.protocol import Instance

SHOWN = timedelta(hours=1)  # what EC2 does (EC2 User Guide, "Terminate Amazon EC2 instances")


class EndedInstances:
    """What was seen last of each instance, until an hour after its end."""

    def __init__(self) -> None:
        self._alive: dict[ProviderId, Instance] = {}
        self._ending_since: dict[ProviderId, datetime] = {}  # by our own order
        self._ended: dict[ProviderId, Instance] = {}

    def saw(self, instance: Instance) -> None:
        """Remember an instance that is there."""
        if instance.provider_id not in self._ended:
            self._alive[instance.provider_id] = instance

    def ending(self, provider_id: ProviderId, at: datetime) -> None:
        """Its end was ordered then, which is what dates it."""
        self._ending_since.setdefault(provider_id, at)

    def is_dated(self, provider_id: ProviderId) -> bool:
        """Return whether its end is known already, or of no interest as it was never seen."""
        return provider_id in self._ending_since or provider_id not in self._alive

    def gone(self, provider_id: ProviderId, at: datetime) -> Instance | None:
        """It is not there any more: return it as ended, `at` the latest; None if it was never seen."""
        last = self._alive.pop(provider_id, None)
        if last is not None:
            ended_at = max(self._ending_since.pop(provider_id, at), last.launched_at)
            self._ended[provider_id] = msgspec.structs.replace(last, state="terminated", terminated_at=ended_at)
        return self._ended.get(provider_id)

    def of(self, action_id: ActionId) -> Instance | None:
        """Return the instance of this order, ended or as it was seen last; None if none was seen."""
        every = (*self._ended.values(), *self._alive.values())
        return next((one for one in every if one.action_id == action_id), None)

    def missing(self, listed: Iterable[ProviderId]) -> list[ProviderId]:
        """Return those seen alive that a list lacks: gone, or not shown yet. Whoever asks has to look at each."""
        shown = set(listed)
        return [provider_id for provider_id in self._alive if provider_id not in shown]

    def recent(self, now: datetime) -> list[Instance]:
        """Return those that ended within the hour, and forget the others."""
        self._ended = {
            key: one
            for key, one in self._ended.items()
            if one.terminated_at is not None and now - one.terminated_at < SHOWN
        }
        return list(self._ended.values())
