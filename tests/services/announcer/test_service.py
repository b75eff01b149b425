"""The announcer says what is new, once, and not more than anybody wants to read."""

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


class Wall:
    """Where announcements hang; it can refuse them."""

    def __init__(self) -> None:
        self.said: list[Announcement] = []
        self.refusal: AutoscalerError | None = None

    async def say(self, said: Announcement, now: datetime) -> None:
        """Hang it up."""
        assert now >= T0
        if self.refusal is not None:
            raise self.refusal
        self.said.append(said)

    def taken(self) -> list[str]:
        """The names of whom it was about, since last asked."""
        names, self.said = [one.name for one in self.said], []
        return names


def waiting(count: int) -> ClusterState:
    """So many pods that nothing on sale can hold."""
    pods = [pod(f"p{number:03}", gpus=16, unschedulable_since=T0 + number * SECOND) for number in range(count)]
    return given(*pods, on_sale(), as_of=T0 + MINUTE)


def announcer(state: ClusterState, wall: Wall) -> Announcer:
    """One that knows the state and the plan that is made of it."""
    service = Announcer(StateView(state), policy(), wall)
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


async def test_what_was_said_is_said_again_only_after_a_long_while() -> None:
    """Not with each tick; but before Kubernetes forgets it."""
    wall = Wall()
    service = announcer(waiting(1), wall)
    for after, names in ((0, ["p000"]), (10, []), (29 * 60, []), (30 * 60, ["p000"]), (31 * 60, [])):
        await service.on_tick(T0 + MINUTE + timedelta(seconds=after))
        assert wall.taken() == names, after


async def test_other_words_are_news_but_not_every_few_seconds() -> None:
    """A reason whose numbers move would else be an event a tick."""
    wall = Wall()
    service = announcer(waiting(1), wall)
    await service.on_tick(T0 + MINUTE)
    topic, (_, at) = next(iter(service._said.items()))
    service._said[topic] = ("other words", at)
    await service.on_tick(T0 + MINUTE + 50 * SECOND)
    assert wall.taken() == ["p000"]
    await service.on_tick(T0 + 2 * MINUTE)
    assert wall.taken() == ["p000"]


async def test_a_storm_of_waiting_pods_is_told_bit_by_bit() -> None:
    """So many a tick, those that wait longest first, and each of them once."""
    wall = Wall()
    service = announcer(waiting(3 * EVENTS_PER_TICK_MAX), wall)
    told = []
    for number in range(4):
        await service.on_tick(T0 + MINUTE + number * 10 * SECOND)
        names = wall.taken()
        assert len(names) <= EVENTS_PER_TICK_MAX
        told += names
    assert told == [f"p{number:03}" for number in range(3 * EVENTS_PER_TICK_MAX)]


async def test_urgent_ticks_say_no_more_than_the_clock_allows() -> None:
    """However many evictions follow each other: so many in the time of a tick, in their order, and each once."""
    wall = Wall()
    pods = [evicted(f"p{number:03}", off="n1", at=T0) for number in range(2 * EVENTS_PER_TICK_MAX)]
    state = given(node("n1"), drained("n1"), *pods, as_of=T0 + MINUTE)
    service = Announcer(StateView(state), policy(), wall)
    told: list[str] = []
    for seconds, count_max in ((0, 1), (1, 1), (2, 1), (9, 1), (10, 2), (11, 2), (25, 3), (40 * 60, 4)):
        await service.on_tick(T0 + MINUTE + seconds * SECOND)
        told += [one.name for one in wall.said if one.reason == "Evicted"]
        wall.said.clear()
        assert len(told) <= count_max * EVENTS_PER_TICK_MAX
    assert told == [f"p{number:03}" for number in range(2 * EVENTS_PER_TICK_MAX)]


async def test_who_was_never_told_of_comes_before_who_is_told_again() -> None:
    """Words that change each minute on many pods keep nobody else from being told of."""
    wall = Wall()
    service = announcer(waiting(2 * EVENTS_PER_TICK_MAX), wall)
    await service.on_tick(T0 + MINUTE)
    first = wall.taken()
    service._said = {topic: ("other words", at) for topic, (_, at) in service._said.items()}
    await service.on_tick(T0 + 3 * MINUTE)
    assert set(wall.taken()).isdisjoint(first)


async def test_a_server_that_is_away_is_asked_once_a_tick() -> None:
    """Nothing counts as said, and all of it comes when the server is back."""
    wall = Wall()
    service = announcer(waiting(3), wall)
    wall.refusal = TransientError("away")
    await service.on_tick(T0 + MINUTE)
    wall.refusal = None
    await service.on_tick(T0 + MINUTE + 10 * SECOND)
    assert wall.taken() == ["p000", "p001", "p002"]


async def test_an_event_that_is_refused_is_left_out() -> None:
    """It is not asked for with every tick, and holds up no other."""
    wall = Wall()
    service = announcer(waiting(2), wall)
    wall.refusal = PermanentError("403")
    await service.on_tick(T0 + MINUTE)
    wall.refusal = None
    await service.on_tick(T0 + MINUTE + 10 * SECOND)
    assert wall.taken() == []
    await service.on_tick(T0 + HOUR)
    assert wall.taken() == ["p000", "p001"]


async def test_thousands_of_waiting_pods_are_looked_through_in_a_moment() -> None:
    """Each pod costs the same, however many nodes are on their way."""
    wall = Wall()
    nodes = [bought(purchase(f"buy-{number}", reason=wants(f"pod/uid-p{number:03}"))) for number in range(500)]
    pods = [pod(f"p{number:03}", gpus=16, unschedulable_since=T0) for number in range(5_000)]
    service = announcer(given(*pods, *nodes, on_sale(), as_of=T0 + MINUTE), wall)
    began = time.process_time()
    await service.on_tick(T0 + MINUTE)
    assert time.process_time() - began < 10.0  # a fraction of a second; minutes where each pod looks at each node
    assert len(wall.said) == EVENTS_PER_TICK_MAX


def wants(key: str) -> UnmetDemand:
    """The reason of a purchase for this."""
    return UnmetDemand(demand=(key,), offers_considered=1, price_micro_usd_per_hour=1)
