"""The announcer: says on pods and nodes, as Kubernetes Events, why they wait, come, stay and go. Decides nothing."""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import ClassVar, Protocol

import structlog

from gpu_autoscaler.core.explain.kube_events import Announcement, announcements
from gpu_autoscaler.core.explain.status import StatusView
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingDrainCancelled, ScalingPlanMade, ScalingPodEvicted
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outputs

# So many at once, and in as long as a tick takes, however often something is urgent. Kubernetes' own clients allow a
# source 25 at once and then one in five minutes (k8s.io/client-go, tools/record/events_cache.go, read 2026-11-21).
EVENTS_PER_TICK_MAX = 20
TICK_SECONDS = 10.0
# What is news: the same words after so long, as Events are kept an hour (kube-apiserver --event-ttl, read 2026-11-21);
# other words about the same thing sooner, and not with each number in them that moves.
REPEAT_AFTER, REWORD_AFTER = timedelta(minutes=30), timedelta(minutes=1)
_FOLDED_DOMAINS = frozenset({"pod", "node", "spot", "job", "demand", "policy", "scaling", "cost"})

log = structlog.get_logger()


class Events(Protocol):
    """Where announcements are written."""

    async def say(self, said: Announcement, now: datetime) -> None:
        """Write it. Raises TransientError, PermanentError."""
        ...


class Announcer:
    """Looks at the state as it is, and says what is new. What it has said it remembers; the Events themselves count."""

    name: ClassVar[str] = "announcer"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = tuple(fact for fact in FACTS if fact.domain() in _FOLDED_DOMAINS)
    publishes: ClassVar[tuple[type[Fact], ...]] = ()
    urgent: ClassVar[tuple[type[Fact], ...]] = (
        ScalingPlanMade,
        SpotNoticeReceived,
        ScalingPodEvicted,  # a pod can be described for as long as its grace lasts
        ScalingDrainCancelled,
    )
    tick_seconds: ClassVar[float | None] = TICK_SECONDS
    starts_from_snapshot: ClassVar[bool] = False  # the last plan is no part of the state

    def __init__(self, view: StateView, policy: ScalingPolicy, events: Events) -> None:
        self._view = view
        self._file = policy
        self._events = events
        self._plan: Plan | None = None
        self._said: dict[tuple[str, str], tuple[str, datetime]] = {}  # topic -> words, when
        self._written_at: deque[datetime] = deque(maxlen=EVENTS_PER_TICK_MAX)  # the last ones

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Read the state under this policy file from now on."""
        self._file = policy

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember the last plan: it is where the reasons stand."""
        for each in recorded:
            if isinstance(each.fact, ScalingPlanMade):
                self._plan = each.fact.plan

    async def on_tick(self, now: datetime) -> Outputs:
        """Say what is new, within the limit of one tick; the rest is still new at the next one."""
        state = self._view.state
        policy = effective_policy(self._file, state.policy_documents)
        told = list(announcements(StatusView.of(state, policy, now, self._plan)))
        topics = {each.topic for each in told}
        self._said = {topic: said for topic, said in self._said.items() if topic in topics}
        # What was never said comes first, then what was said longest ago: nobody is passed over for ever.
        news = sorted((one for one in told if self._is_news(one, now)), key=lambda one: self._last_said(one, now))
        for each in news[: self._room(now)]:
            self._written_at.append(now)
            try:
                await self._events.say(each, now)
            except TransientError as exc:
                log.warning("events not written, tried again with the next tick", error=str(exc))
                break  # the server is away; one question is enough to know
            except PermanentError as exc:
                log.warning("event not written, left out", object=each.name, reason=each.reason, error=str(exc))
            self._said[each.topic] = (each.message, now)
        return ()

    def _room(self, now: datetime) -> int:
        recent = sum(now - at < timedelta(seconds=TICK_SECONDS) for at in self._written_at)
        return EVENTS_PER_TICK_MAX - recent

    def _last_said(self, one: Announcement, now: datetime) -> datetime:
        return self._said[one.topic][1] if one.topic in self._said else datetime.min.replace(tzinfo=now.tzinfo)

    def _is_news(self, one: Announcement, now: datetime) -> bool:
        words, at = self._said.get(one.topic, (None, None))
        if at is None:
            return True
        return not one.is_once and now - at >= (REPEAT_AFTER if words == one.message else REWORD_AFTER)
