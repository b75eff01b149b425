"""The announcer: writes Kubernetes Events on pods and nodes: why they wait, arrive, stay and are removed."""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import ClassVar, Protocol

import structlog

from gpu_autoscaler.core.explain.kube_events import Announcement, announcements
from gpu_autoscaler.core.explain.status import StatusView
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.catalog import STATE_FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingDrainCancelled, ScalingPlanMade, ScalingPodEvicted
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outputs

# Maximum number of Events in any TICK_SECONDS, urgent ticks included. Kubernetes' own clients allow a source 25 at once
# and then one in five minutes (k8s.io/client-go, tools/record/events_cache.go, read 2026-11-21).
EVENTS_PER_TICK_MAX = 20
TICK_SECONDS = 10.0
# An unchanged message is repeated before Kubernetes forgets it (kube-apiserver --event-ttl is an hour, read
# 2026-11-21); a changed one sooner, but not with every number that changes in it.
REPEAT_AFTER, REWORD_AFTER = timedelta(minutes=30), timedelta(minutes=1)

log = structlog.get_logger()


class Events(Protocol):
    """Where announcements are written."""

    async def record(self, announcement: Announcement, now: datetime) -> None:
        """Write it. Raises TransientError, PermanentError."""


class Announcer:
    """Compares the announcements of the current state with those it has written, and writes what is new."""

    name: ClassVar[str] = "announcer"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = STATE_FACTS
    publishes: ClassVar[tuple[type[Fact], ...]] = ()
    urgent: ClassVar[tuple[type[Fact], ...]] = (
        ScalingPlanMade,
        SpotNoticeReceived,
        ScalingPodEvicted,  # an evicted pod can be described only during its grace period
        ScalingDrainCancelled,
    )
    tick_seconds: ClassVar[float | None] = TICK_SECONDS
    remembers: ClassVar[tuple[type[Fact], ...]] = (ScalingPlanMade,)  # the latest plan is not part of the state

    def __init__(self, view: StateView, policy: ScalingPolicy, events: Events) -> None:
        self._view = view
        self._file = policy
        self._events = events
        self._plan: Plan | None = None
        self._written: dict[tuple[str, str], tuple[str, datetime]] = {}  # topic -> message, when
        self._written_at: deque[datetime] = deque(maxlen=EVENTS_PER_TICK_MAX)  # the latest ones

    def use_policy(self, policy: ScalingPolicy) -> None:
        self._file = policy

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Keep the latest plan: it holds the reasons."""
        for entry in recorded:
            if isinstance(entry.fact, ScalingPlanMade):
                self._plan = entry.fact.plan

    async def on_tick(self, now: datetime) -> Outputs:
        """Write what is new, within the limit of one tick; the rest is still new in the next one."""
        state = self._view.state
        policy = effective_policy(self._file, state.policy_documents)
        current = list(announcements(StatusView.of(state, policy, now, self._plan)))
        topics = {announcement.topic for announcement in current}
        self._written = {topic: written for topic, written in self._written.items() if topic in topics}
        # What was never written comes first, then what was written longest ago, so that nothing starves.
        new = [announcement for announcement in current if self._is_new(announcement, now)]
        never = ("", datetime.min.replace(tzinfo=now.tzinfo))
        new.sort(key=lambda announcement: self._written.get(announcement.topic, never)[1])
        recent_count = sum(now - at < timedelta(seconds=TICK_SECONDS) for at in self._written_at)
        for announcement in new[: EVENTS_PER_TICK_MAX - recent_count]:
            self._written_at.append(now)
            try:
                await self._events.record(announcement, now)
            except TransientError as exc:
                log.warning("events not written, retried with the next tick", error=str(exc))
                break  # the API server is unreachable: one attempt a tick is enough
            except PermanentError as exc:
                log.warning("event rejected", object=announcement.name, reason=announcement.reason, error=str(exc))
            self._written[announcement.topic] = (announcement.message, now)
        return ()

    def _is_new(self, announcement: Announcement, now: datetime) -> bool:
        message, at = self._written.get(announcement.topic, (None, None))
        if at is None:
            return True
        wait = REPEAT_AFTER if message == announcement.message else REWORD_AFTER
        return not announcement.is_once and now - at >= wait
