"""The cloud's list of our instances as an endless source. Decides nothing."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import msgspec
import structlog

from gpu_autoscaler.core.state.queries import listed_instances
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import InstanceChanges, NodeInstanceListed, NodeWatched
from gpu_autoscaler.model.errors import AutoscalerError
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.providers.protocol import CapacityProvider, Instance
from gpu_autoscaler.runtime.clock import Clock

LIST_SECONDS = 10.0  # cluster time between two lists
# Differences mean nothing without the list before them, so one is published in full well within any retention.
FULL_LIST_PERIOD = timedelta(minutes=30)
LIST_WALL_SECONDS_MIN = 1.0  # the cloud's API rate limits hold in wall time, however fast the cluster clock

log = structlog.get_logger()


class InstancesListed(msgspec.Struct, frozen=True, kw_only=True):
    """Every instance with this installation's tag."""

    instances: tuple[Instance, ...]
    listed_at: Instant


class InstanceWatch:
    """Lists our instances repeatedly; may be iterated again after a failure."""

    def __init__(self, provider: CapacityProvider, installation: str, clock: Clock) -> None:
        self._provider = provider
        self._installation = installation
        self._clock = clock

    async def __aiter__(self) -> AsyncIterator[InstancesListed]:
        """Yield a whole list every LIST_SECONDS. A failed list is skipped: it is no proof of absence."""
        while True:
            listed_at = self._clock.now()  # before the call: an instance launched meanwhile may be missing
            try:
                instances = await self._provider.instances(self._installation)
            except AutoscalerError as exc:
                log.warning("instance list failed, retried", error=str(exc))
            else:
                yield InstancesListed(instances=tuple(instances), listed_at=listed_at)
            await asyncio.sleep(max(self._clock.wall_seconds(LIST_SECONDS), LIST_WALL_SECONDS_MIN))


class InstanceLists:
    """Publishes the cloud's lists as differences, and in full at the start and every FULL_LIST_PERIOD.

    A full list of 1,000 instances has 40 to 160 kB, and one is read every 10 seconds.
    """

    def __init__(self) -> None:
        self._full_at: datetime | None = None

    def fact(self, state: ClusterState, listed: InstancesListed) -> NodeInstanceListed | NodeWatched:
        """Return the fact of this list: its difference to the last one in the state, where there is one."""
        provider_ids = frozenset(instance.provider_id for instance in listed.instances)
        since = state.instances_listed_at
        is_full_due = self._full_at is None or listed.listed_at - self._full_at >= FULL_LIST_PERIOD
        if is_full_due or since is None or since >= listed.listed_at:
            self._full_at = listed.listed_at
            return NodeInstanceListed(provider_ids=tuple(sorted(provider_ids)), listed_at=listed.listed_at)
        known = listed_instances(state.instances_seen_at, since)
        changes = InstanceChanges(
            since=since, appeared=tuple(sorted(provider_ids - known)), missing=tuple(sorted(known - provider_ids))
        )
        return NodeWatched(epoch=0, version=0, watched_at=listed.listed_at, instances=changes)
