"""The announcer writes what is new, once, and within its rate limit."""

import time
from datetime import datetime, timedelta

from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    bought,
    drained,
    evicted,
    given,
    node,
    on_sale,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.explain.kube_events import Announcement
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import FactId, PlanId
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler_services.announcer.service import EVENTS_PER_TICK_MAX, Announcer


class Recorder:
    """Keeps announcements; can be set to fail."""

    def __init__(self) -> None:
        self.announcements: list[Announcement] = []
        self.error: AutoscalerError | None = None

    async def record(self, announcement: Announcement, now: datetime) -> None:
        """Keep it, or fail."""
        assert now >= T0
        if self.error is not None:
            raise self.error
        self.announcements.append(announcement)

    def taken(self) -> list[str]:
        """The object names of all announcements since the last call."""
        names, self.announcements = [announcement.name for announcement in self.announcements], []
        return names


def waiting(count: int) -> ClusterState:
    """This number of pods that no offer fits."""
    pods = [pod(f"p{number:03}", gpus=16, unschedulable_since=T0 + number * SECOND) for number in range(count)]
    return given(*pods, on_sale(), as_of=T0 + MINUTE)


def announcer(state: ClusterState, recorder: Recorder) -> Announcer:
    """An announcer with the state and the plan that follows from it."""
    service = Announcer(StateView(state), policy(), recorder)
    made = ScalingPlanMade(
        plan_id=PlanId("p1"),
        plan=plan(state, policy(), T0 + MINUTE),
        cut=Cut(),
        policy_digest="policy",
        core_digest="core",
        service_version="0",
    )
    envelope = Envelope(id=FactId("f1"), source="/scaler", time=T0, fact=made)
    service.on_folded([Recorded(envelope=envelope, stream=made.stream(), sequence=1)])
    return service


async def test_an_unchanged_message_is_repeated_after_half_an_hour() -> None:
    """Not with every tick, but before Kubernetes forgets it."""
    recorder = Recorder()
    service = announcer(waiting(1), recorder)
    for after, names in ((0, ["p000"]), (10, []), (29 * 60, []), (30 * 60, ["p000"]), (31 * 60, [])):
        await service.on_tick(T0 + MINUTE + timedelta(seconds=after))
        assert recorder.taken() == names, after


async def test_a_changed_message_is_written_after_a_minute() -> None:
    """A message with a changing number would otherwise be an Event a tick."""
    recorder = Recorder()
    service = announcer(waiting(1), recorder)
    await service.on_tick(T0 + MINUTE)
    topic, (_, at) = next(iter(service._written.items()))
    service._written[topic] = ("another message", at)
    await service.on_tick(T0 + MINUTE + 50 * SECOND)
    assert recorder.taken() == ["p000"]
    await service.on_tick(T0 + 2 * MINUTE)
    assert recorder.taken() == ["p000"]


async def test_many_waiting_pods_are_announced_over_several_ticks() -> None:
    """Longest waiting first, each of them once."""
    recorder = Recorder()
    service = announcer(waiting(3 * EVENTS_PER_TICK_MAX), recorder)
    announced: list[str] = []
    for number in range(4):
        await service.on_tick(T0 + MINUTE + number * 10 * SECOND)
        names = recorder.taken()
        assert len(names) <= EVENTS_PER_TICK_MAX
        announced += names
    assert announced == [f"p{number:03}" for number in range(3 * EVENTS_PER_TICK_MAX)]


async def test_urgent_ticks_do_not_exceed_the_rate_limit() -> None:
    """However many evictions follow each other: in their order, each once."""
    recorder = Recorder()
    pods = [evicted(f"p{number:03}", off="n1", at=T0) for number in range(2 * EVENTS_PER_TICK_MAX)]
    state = given(node("n1"), drained("n1"), *pods, as_of=T0 + MINUTE)
    service = Announcer(StateView(state), policy(), recorder)
    names: list[str] = []
    for seconds, count_max in ((0, 1), (1, 1), (2, 1), (9, 1), (10, 2), (11, 2), (25, 3), (40 * 60, 4)):
        await service.on_tick(T0 + MINUTE + seconds * SECOND)
        evictions = (announcement for announcement in recorder.announcements if announcement.reason == "Evicted")
        names += [announcement.name for announcement in evictions]
        recorder.announcements.clear()
        assert len(names) <= count_max * EVENTS_PER_TICK_MAX
    assert names == [f"p{number:03}" for number in range(2 * EVENTS_PER_TICK_MAX)]


async def test_new_announcements_come_before_repeated_ones() -> None:
    """Messages that change every minute on many pods do not starve the others."""
    recorder = Recorder()
    service = announcer(waiting(2 * EVENTS_PER_TICK_MAX), recorder)
    await service.on_tick(T0 + MINUTE)
    first = recorder.taken()
    service._written = {topic: ("another message", at) for topic, (_, at) in service._written.items()}
    await service.on_tick(T0 + 3 * MINUTE)
    assert set(recorder.taken()).isdisjoint(first)


async def test_an_unreachable_server_is_tried_once_a_tick() -> None:
    """Nothing counts as written, and everything follows when the server is back."""
    recorder = Recorder()
    service = announcer(waiting(3), recorder)
    recorder.error = TransientError("unreachable")
    await service.on_tick(T0 + MINUTE)
    recorder.error = None
    await service.on_tick(T0 + MINUTE + 10 * SECOND)
    assert recorder.taken() == ["p000", "p001", "p002"]


async def test_a_rejected_event_is_not_retried_every_tick() -> None:
    """It blocks no other."""
    recorder = Recorder()
    service = announcer(waiting(2), recorder)
    recorder.error = PermanentError("403")
    await service.on_tick(T0 + MINUTE)
    recorder.error = None
    await service.on_tick(T0 + MINUTE + 10 * SECOND)
    assert recorder.taken() == []
    await service.on_tick(T0 + HOUR)
    assert recorder.taken() == ["p000", "p001"]


async def test_thousands_of_waiting_pods_are_processed_quickly() -> None:
    """Each pod costs the same, however many nodes are on their way."""
    recorder = Recorder()
    nodes = [bought(purchase(f"buy-{number}", reason=wants(f"pod/uid-p{number:03}"))) for number in range(500)]
    pods = [pod(f"p{number:03}", gpus=16, unschedulable_since=T0) for number in range(5_000)]
    service = announcer(given(*pods, *nodes, on_sale(), as_of=T0 + MINUTE), recorder)
    began = time.process_time()
    await service.on_tick(T0 + MINUTE)
    assert time.process_time() - began < 10.0  # a fraction of a second; minutes where each pod looks at each node
    assert len(recorder.announcements) == EVENTS_PER_TICK_MAX


def wants(key: str) -> UnmetDemand:
    """The reason of a purchase for this."""
    return UnmetDemand(demand=(key,), offers_considered=1, price_micro_usd_per_hour=1)
