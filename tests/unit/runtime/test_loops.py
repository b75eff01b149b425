"""State, ticks and watched sources: what a service knows, when it decides, and what it does when the world fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, cast

import structlog
from tests.support.memory_bus import MemoryProjection
from tests.support.runners import Away, Place, Probe, running, until

from gpu_autoscaler.bus.protocol import Projection
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPlaced
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId, PlanId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner
from gpu_autoscaler.runtime.service import Outcome, Outputs, Service

T0 = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Reader(Probe):
    """Keeps jobs as state."""

    name = "reader"
    folds = (JobCancelRequested, JobFinished)
    urgent = (JobCancelRequested,)
    tick_seconds: ClassVar[float | None] = 60.0


class Planner(Probe):
    """Makes one plan after the other."""

    name = "planner"
    folds = (ScalingPlanMade,)
    publishes = (ScalingPlanMade,)
    tick_seconds: ClassVar[float | None] = 0.01

    async def on_tick(self, now: datetime) -> Outputs:
        await super().on_tick(now)
        parent = self.view.state.last_plan_sequence
        fact = ScalingPlanMade(
            plan_id=PlanId(f"{id(self)}-{len(self.ticks)}"),
            plan=Plan(as_of=now, parent_sequence=parent),
            cut=self.view.cut,
            policy_digest="p",
            core_digest="c",
        )
        folded = self.view.last_sequence("SCALING")
        return Outcome(facts=(fact,), expected_last_sequence=parent, folded_sequence=folded)


def cancel(job_id: str) -> JobCancelRequested:
    """Somebody wants the job to end."""
    return JobCancelRequested(job_id=JobId(job_id))


async def test_no_service_is_ready_before_the_first_read() -> None:
    """A process says that it has started before its first loop turns: who asks just then hears of history unread."""
    readiness = Readiness()
    readiness.block("running", "starting")
    Runner(cast("Service", Reader()), await Place().bus(), view=StateView(), clock=Clock(), readiness=readiness)
    readiness.clear("running")

    assert not readiness.is_ready


class Slow(Away):
    """A broker that gives history out only when it may."""

    async def projection(self, stream: str, *, subjects: Sequence[str] = (), after_sequence: int = 0) -> Projection:
        """A read that waits before its first batch."""
        projection = await super().projection(stream, subjects=subjects, after_sequence=after_sequence)
        assert isinstance(projection, MemoryProjection)
        place_may_read = self.may_read

        class Waiting:
            async def __aiter__(self) -> AsyncIterator[Any]:
                await place_may_read.wait()
                async for batch in projection:
                    yield batch

            async def lag_count(self) -> int:
                return await projection.lag_count()

            async def close(self) -> None:
                await projection.close()

        return Waiting()

    may_read = asyncio.Event()


async def test_nothing_is_decided_before_the_state_is_up_to_date() -> None:
    """Not ready and no tick while history is read; then one tick at once, on all of it."""
    place, service = Place(), Reader()
    await place.say(cancel("a"))
    bus = await place.bus(Reader, Slow)
    assert isinstance(bus, Slow)
    bus.may_read = asyncio.Event()
    async with running(place, service, bus=bus) as runner:
        await until(lambda: runner.readiness.conditions.get("state") == "not caught up with JOB")
        await asyncio.sleep(0.1)
        assert service.ticks == []
        assert not runner.readiness.is_ready
        bus.may_read.set()
        await until(lambda: len(service.ticks) == 1)
        await until(lambda: runner.readiness.is_ready)
    assert list(service.view.state.jobs) == ["a"]
    assert service.view.cut == Cut(last_sequences=(("JOB", 1),))


async def test_an_urgent_fact_brings_the_tick_forward() -> None:
    """At once, and a burst is decided on in few ticks."""
    place, service = Place(), Reader()
    async with running(place, service):
        await until(lambda: len(service.ticks) == 1)
        await place.say(cancel("a"))
        await until(lambda: len(service.ticks) == 2, seconds_max=20.0)
        for number in range(200):
            await place.say(cancel(f"b{number}"))
        await until(lambda: len(service.view.state.jobs) == 201)
        await until(lambda: len(service.ticks) >= 3, seconds_max=20.0)
        await asyncio.sleep(0.1)
    assert len(service.ticks) < 10


async def test_a_fact_that_is_not_urgent_waits_for_its_tick() -> None:
    """Only what is declared urgent brings the tick forward."""
    place, service = Place(), Reader()
    async with running(place, service):
        await until(lambda: len(service.ticks) == 1)
        await place.say(JobFinished(job_id=JobId("a"), outcome="failed", finished_at=datetime.now(UTC)))
        await until(lambda: len(service.view.state.jobs) == 1)
        await asyncio.sleep(0.1)
    assert len(service.ticks) == 1


async def test_an_unreadable_message_becomes_one_dead_letter_named_in_the_snapshot() -> None:
    """Two services that fold the stream leave one dead letter; the state goes on without the message."""
    place, first, second = Place(), Reader(), Reader()
    async with running(place, first), running(place, second):
        await place.send("job.cancel_requested", b"{", "broken")
        await place.say(cancel("a"))
        for service in (first, second):
            await until(lambda service=service: len(service.view.state.jobs) == 1)
    (letter,) = await place.dead_letters()
    assert letter.message_id == "broken"
    assert first.view.cut == Cut(last_sequences=(("JOB", 2),), set_aside=(("JOB", 1),))


async def test_an_unreadable_message_stored_during_downtime_becomes_a_dead_letter_later() -> None:
    """However old it is; the next start finds the letter and writes no other."""
    place = Place()
    place.passed = timedelta(hours=-1)
    await place.send("job.cancel_requested", b"{", "broken")
    place.passed = timedelta()
    async with running(place, Reader()):
        await until(lambda: has_letters(place, 1))
    place.passed = timedelta(hours=1)  # the broker has forgotten the letter's id
    again = Reader()
    async with running(place, again):
        await until(lambda: again.view.cut.set_aside == (("JOB", 1),))
        await asyncio.sleep(0.2)
    (letter,) = await place.dead_letters()
    assert (letter.message_id, letter.service) == ("broken", "readers")


async def has_letters(place: Place, count: int) -> bool:
    """Return whether there are `count` dead letters."""
    return len(await place.dead_letters()) == count


async def test_a_plan_is_folded_before_the_next_one_is_made() -> None:
    """Every plan's parent is the one before it; none is refused, though ticks follow each other at once."""
    place, service = Place(), Planner()
    async with running(place, service) as runner:
        await until(lambda: len(service.ticks) > 10)
    plans = [said.fact for said in await place.stored(ScalingPlanMade)]
    assert [plan.plan.parent_sequence for plan in plans if isinstance(plan, ScalingPlanMade)] == list(range(len(plans)))
    assert runner.metrics.plans_stale._value.get() == 0


async def test_of_two_planners_one_is_refused_and_goes_on() -> None:
    """The stream takes one plan for a parent; the other is counted as stale, which is normal, and plans again."""
    place, first, second = Place(), Planner(), Planner()
    async with running(place, first) as one, running(place, second) as other:
        await until(lambda: len(first.ticks) > 20 and len(second.ticks) > 20)
        await until(lambda: one.readiness.is_ready and other.readiness.is_ready)
    plans = [said.fact for said in await place.stored(ScalingPlanMade)]
    parents = [plan.plan.parent_sequence for plan in plans if isinstance(plan, ScalingPlanMade)]
    assert parents == list(range(len(plans)))
    assert one.metrics.plans_stale._value.get() + other.metrics.plans_stale._value.get() > 0


async def test_a_tick_that_fails_is_loud_and_comes_again() -> None:
    """Traceback once, not ready, counted; the first tick that works makes it ready again."""
    is_broken = True

    async def divide(_: datetime) -> Outputs:
        if is_broken:
            raise ZeroDivisionError("the author's")
        return ()

    class Ticker(Probe):
        tick_seconds: ClassVar[float | None] = 0.01

    place, service = Place(), Ticker(on_tick=divide)
    with structlog.testing.capture_logs() as lines:
        async with running(place, service) as runner:
            await until(lambda: len(service.ticks) > 3)
            assert "ZeroDivisionError" in (runner.readiness.conditions["ticks"] or "")
            is_broken = False
            await until(lambda: runner.readiness.is_ready)
    assert runner.metrics.reconcile_errors._value.get() > 3
    assert len([line for line in lines if line.get("exc_info")]) == 1


async def test_facts_wait_for_the_state_to_hold_them() -> None:
    """An input that gets a fact reads a state that contains it."""

    class Both(Reader):
        consumes = (JobCancelRequested,)
        tick_seconds: ClassVar[float | None] = None

    async def look(recorded: Recorded) -> Outputs:
        assert isinstance(recorded.fact, JobCancelRequested)
        assert recorded.fact.job_id in service.view.state.jobs
        return ()

    place, service = Place(), Both(look)
    async with running(place, service) as runner:
        for number in range(50):
            await place.say(cancel(str(number)))
        await until(lambda: len(service.given) == 50)
    assert runner.metrics.facts_handled.labels("job", "done")._value.get() == 50


async def test_a_service_may_remember_what_the_state_forgets() -> None:
    """It sees each folded fact once, in order, history first."""

    class Rememberer(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def on_folded(self, recorded: Sequence[Recorded]) -> None:
            self.seen += [item.sequence for item in recorded]

    place, service = Place(), Rememberer()
    for number in range(20):
        await place.say(cancel(f"a{number}"))
    async with running(place, service):
        await until(lambda: len(service.seen) == 20)
        await place.say(cancel("b"))
        await until(lambda: len(service.seen) == 21)
    assert service.seen == list(range(1, 22))


async def test_a_failed_fold_is_logged_and_restarted() -> None:
    """Not ready while it fails; it goes on where it stopped, and says so when it works again."""

    class Fragile(Reader):
        is_broken = True

        def on_folded(self, recorded: Sequence[Recorded]) -> None:
            if self.is_broken and recorded:
                self.is_broken = False
                raise KeyError("what the author forgot")

    place, service = Place(), Fragile()
    with structlog.testing.capture_logs() as lines:
        async with running(place, service) as runner:
            await until(lambda: runner.readiness.is_ready)
            await place.say(cancel("a"))
            await until(lambda: not service.is_broken)
            await until(lambda: any(line["event"] == "loop failed, restart scheduled" for line in lines))
            await place.say(cancel("b"))
            await until(lambda: len(service.view.state.jobs) == 2)
            await until(lambda: runner.readiness.is_ready)


class Watcher(Probe):
    """Turns what it is shown into placements."""

    name = "watcher"
    publishes = (JobPlaced,)

    def __init__(self, *shown: object) -> None:
        super().__init__()
        self.shown: asyncio.Queue[object] = asyncio.Queue()
        self.tries = 0
        self.pulled = 0
        for item in shown:
            self.shown.put_nowait(item)

    def sources(self) -> Sequence[AsyncIterator[Any]]:
        return [self._source()]

    async def _source(self) -> AsyncIterator[Any]:
        while True:
            item = await self.shown.get()
            if item is StopAsyncIteration:
                return
            self.pulled += 1
            yield item

    async def on_item(self, item: Any) -> Outputs:  # noqa: ANN401 - as the protocol
        self.tries += 1
        if isinstance(item, Exception) and self.tries < 4:
            raise item
        if isinstance(item, Exception):
            return ()
        return [JobPlaced(job_id=JobId("a"), attempt=item, node_uids=(), node_names=(), placed_at=T0)]


async def test_watched_items_keep_their_order_and_pile_up_nowhere() -> None:
    """While the broker is away the source is not pulled; nothing is lost, nothing overtakes."""
    place, service = Place(), Watcher(*range(1, 6))
    bus = await place.bus(Watcher)
    assert isinstance(bus, Away)
    bus.is_away = True
    async with running(place, service, bus=bus) as runner:
        await until(lambda: service.tries > 2)
        assert service.pulled == 1
        assert runner.readiness.conditions["source 0"] == "the broker is away"
        bus.is_away = False
        await until(lambda: service.pulled == 5)
        await until(lambda: runner.readiness.is_ready)
    facts = [said.fact for said in await place.stored(JobPlaced)]
    assert [fact.attempt for fact in facts if isinstance(fact, JobPlaced)] == [1, 2, 3, 4, 5]


async def test_an_item_that_never_works_does_not_hold_up_the_rest() -> None:
    """TransientError: again, in its place. PermanentError: logged as an error, and on to the next."""
    place, service = Place(), Watcher(TransientError("not yet"), 2)
    async with running(place, service):
        await until(lambda: service.tries == 5)
    assert len(await place.stored(JobPlaced)) == 1
    place, service = Place(), Watcher(PermanentError("no such thing"), 2)
    with structlog.testing.capture_logs() as lines:
        async with running(place, service):
            await until(lambda: service.tries == 2)
    assert len(await place.stored(JobPlaced)) == 1
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["watched item set aside"]


async def test_a_source_that_ends_is_reported() -> None:
    """A source goes on until it is closed; its end is a bug that shows."""
    place, service = Place(), Watcher(1, StopAsyncIteration)
    async with running(place, service) as runner:
        await until(lambda: "ended" in (runner.readiness.conditions.get("source 0") or ""))
        assert not runner.readiness.is_ready


async def test_a_source_that_failed_is_opened_again() -> None:
    """A bug in the door, or a source that ended, blinds the watch for a moment and not for good."""
    place, service = Place(), Watcher(KeyError("what the author forgot"), 2, StopAsyncIteration, 3)
    with structlog.testing.capture_logs() as lines:
        async with running(place, service) as runner:
            await until(lambda: service.pulled == 3)
            await until(lambda: runner.readiness.is_ready)
    facts = [said.fact for said in await place.stored(JobPlaced)]
    assert [fact.attempt for fact in facts if isinstance(fact, JobPlaced)] == [2, 3]
    assert [line["log_level"] for line in lines if "loop failed" in line["event"]] == ["error", "error"]


def test_state_and_cut_move_together_and_only_forward() -> None:
    """A stream that says nothing keeps its place; what was set aside stays named, within the limit."""
    view = StateView()
    view.advance(view.state, {"JOB": 5}, [("JOB", 3)])
    view.advance(view.state, {"POD": 2})
    view.advance(view.state, {"JOB": 4}, [("JOB", number) for number in range(6, 2006)])
    assert view.cut.last_sequences == (("JOB", 5), ("POD", 2))
    assert (view.last_sequence("JOB"), view.last_sequence("GPU")) == (5, 0)
    assert len(view.cut.set_aside) == 1000
    assert view.cut.set_aside[-1] == ("JOB", 2005)


async def test_a_tick_may_say_when_the_next_one_is_due() -> None:
    """Instead of its regular interval, until a tick says nothing about it."""

    class Ticker(Probe):
        tick_seconds: ClassVar[float | None] = 3600.0

        async def on_tick(self, now: datetime) -> Outputs:
            await super().on_tick(now)
            return Outcome(next_tick_seconds=0.01 if len(self.ticks) < 4 else None)

    place, service = Place(), Ticker()
    async with running(place, service):
        await until(lambda: len(service.ticks) == 4)
        await asyncio.sleep(0.1)
        assert len(service.ticks) == 4


async def test_a_tick_without_anything_to_do_is_left_out() -> None:
    """The service is asked each time; what is left out counts as done and keeps the process ready."""

    class Resting(Probe):
        tick_seconds: ClassVar[float | None] = 0.01
        asked_count = 0

        def needs_tick(self, now: datetime) -> bool:  # noqa: ARG002 - the runtime's signature
            self.asked_count += 1
            return len(self.ticks) < 2 or self.asked_count > 20

    place, service = Place(), Resting()
    async with running(place, service) as runner:
        await until(lambda: service.asked_count == 20)
        assert len(service.ticks) == 2
        await until(lambda: len(service.ticks) > 2)
    assert runner.metrics.ticks.labels("done")._value.get() >= 20
