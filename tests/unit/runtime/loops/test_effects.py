"""Consumed facts: outputs are stored before the acknowledgment, and every kind of failure is handled."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import structlog
from tests.support.memory_bus import MemoryBus
from tests.support.runners import QUICK, Place, Probe, running, until
from tests.support.stories import request

from gpu_autoscaler.bus.protocol import Delivery, EffectConsumer
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPlaced, JobRequested
from gpu_autoscaler.model.errors import InvalidFact, PermanentError, RequestRefused, TransientError, UnknownType
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.loop_context import dead_letter_reason
from gpu_autoscaler.runtime.poison_messages import PoisonMessage
from gpu_autoscaler.runtime.service import Outcome, Outputs

T0 = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Finisher(Probe):
    """Ends every job that somebody wants to end."""

    name = "finisher"
    consumes = (JobCancelRequested,)
    publishes = (JobFinished, JobPlaced)


def cancel(job_id: str = "a") -> JobCancelRequested:
    """Somebody wants the job to end."""
    return JobCancelRequested(job_id=JobId(job_id))


def finished(job_id: str = "a") -> JobFinished:
    """The job ended."""
    return JobFinished(job_id=JobId(job_id), outcome="cancelled", finished_at=T0)


def placed(attempt: int) -> JobPlaced:
    """The job has a place."""
    return JobPlaced(job_id=JobId("a"), attempt=attempt, node_uids=(), node_names=(), placed_at=T0)


async def finish(recorded: Recorded) -> Outputs:
    """End the job that the fact is about."""
    assert isinstance(recorded.fact, JobCancelRequested)
    return [finished(recorded.fact.job_id)]


async def is_settled(place: Place, stream: str = "JOB") -> bool:
    """True when no consumer of the stream has anything left to do."""
    return all(
        not consumer._pending and not consumer.pending_count(place.now())
        for (name, _), consumer in place.broker.consumers.items()
        if name == stream
    )


async def test_what_comes_of_a_fact_names_its_cause() -> None:
    """The output's id is its condition, its cause the fact, and the story's first fact is carried on."""
    place = Place()
    async with running(place, Finisher(finish)) as runner:
        await place.say(cancel(), "request-1")
        await until(lambda: is_settled(place))
    (said,) = await place.stored(JobFinished)
    assert (said.id, said.causation_id, said.correlation_id) == ("job_finished/a", "request-1", "request-1")
    assert said.source == "/gpu-autoscaler/finisher/test"
    assert runner.metrics.facts_handled.labels("job", "done")._value.get() == 1


class Dying(MemoryBus):
    """A process that dies between storing the outputs and acknowledging: its word never reaches the broker."""

    async def effect_consumer(self, durable: str) -> EffectConsumer:
        """A consumer whose deliveries are never ended."""
        consumer = await super().effect_consumer(durable)

        class Mute:
            pending_count, close = consumer.pending_count, consumer.close
            acknowledged_sequence = consumer.acknowledged_sequence

            async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
                deliveries = await consumer.fetch(count_max, wait_seconds_max)
                for delivery in deliveries:
                    delivery.ack = asyncio.Event().wait  # type: ignore[method-assign, assignment]
                return deliveries

        return Mute()


async def test_a_crash_between_output_and_acknowledgement_changes_nothing() -> None:
    """The fact comes again, is handled again, and what comes of it is in the stream once."""
    place, first, second = Place(), Finisher(finish), Finisher(finish)
    await place.say(cancel(), "request-1")
    quick_end = QUICK.__class__(shutdown_seconds_max=0.01, fetch_seconds_max=0.1)
    async with running(place, first, bus=await place.bus(Finisher, Dying), limits=quick_end):
        await until(lambda: len(first.given) == 1)
        await until(lambda: place.broker.stream("JOB").last_sequence == 2)
    assert not await is_settled(place)
    place.passed += timedelta(seconds=31)  # the broker's ack_wait
    async with running(place, second):
        await until(lambda: is_settled(place))
    assert [recorded.envelope.id for recorded in second.given] == ["request-1"]
    assert len(await place.stored(JobFinished)) == 1


async def test_outputs_are_stored_before_the_acknowledgement() -> None:
    """While the broker takes nothing, the fact stays; when it is back, both happen."""
    place, service = Place(), Finisher(finish)
    bus = await place.bus(Finisher)
    await place.say(cancel())
    bus.is_away = True  # type: ignore[attr-defined]
    async with running(place, service, bus=bus) as runner:
        await until(lambda: len(service.given) > 1)
        assert not await is_settled(place)
        assert "bus" in {name for name, reason in runner.readiness.conditions.items() if reason}
        bus.is_away = False  # type: ignore[attr-defined]
        await until(lambda: is_settled(place))
    assert len(await place.stored(JobFinished)) == 1


async def test_later_means_later() -> None:
    """A TransientError is tried again after the wait it asks for, and is no dead letter however often it comes."""
    tries: list[float] = []

    async def fail_at_first(_: Recorded) -> Outputs:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) < 8:
            raise TransientError("the cloud throttles", retry_after_seconds=0.03)
        return [finished()]

    place = Place()
    async with running(place, Finisher(fail_at_first)) as runner:
        await place.say(cancel())
        await until(lambda: is_settled(place))
    assert len(tries) == 8
    assert min(after - before for before, after in pairwise(tries)) >= 0.029
    assert await place.dead_letters() == []
    assert runner.metrics.facts_handled.labels("job", "retried")._value.get() == 7


async def test_never_means_a_dead_letter_and_the_next_fact() -> None:
    """A PermanentError sets the message aside with its reason; what comes after it is handled."""

    async def refuse_a(recorded: Recorded) -> Outputs:
        assert isinstance(recorded.fact, JobCancelRequested)
        if recorded.fact.job_id == "a":
            raise PermanentError("job a cannot be cancelled: it never was")
        return [finished(recorded.fact.job_id)]

    place = Place()
    async with running(place, Finisher(refuse_a)) as runner:
        await place.say(cancel("a"), "one")
        await place.say(cancel("b"), "two")
        await until(lambda: is_settled(place))
    (letter,) = await place.dead_letters()
    assert (letter.service, letter.message_id, letter.reason) == (
        "finisher",
        "one",
        "job a cannot be cancelled: it never was",
    )
    assert [said.fact.entity() for said in await place.stored(JobFinished)] == ["job/b"]
    assert runner.metrics.dead_letters.labels("job", "permanent_error")._value.get() == 1


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (b"{", "not a CloudEvent"),
        (b'{"specversion":"1.0","id":"x","type":"job.cancel_requested.v9","data":{}}', "unknown to this version"),
        (b'{"specversion":"1.0","id":"x","type":"job.cancel_requested.v1","data":{}}', "job_id"),
        (
            (
                b'{"specversion":"1.0","id":"x","type":"job.finished.v1","data":{"job_id":"a","outcome":"failed",'
                b'"finished_at":"2026-11-21T12:00:00Z"}}'
            ),
            "was published on 'job.cancel_requested'",
        ),
    ],
)
async def test_what_is_no_fact_is_set_aside(payload: bytes, told: str) -> None:
    """Broken, unknown, incomplete, or on another's subject: a dead letter that says so, and the service goes on.

    Clients publish on this subject, so it is counted as a refused request, which alerts no operator.
    """
    place, service = Place(), Finisher(finish)
    async with running(place, service) as runner:
        await place.send("job.cancel_requested", payload, "broken")
        await place.say(cancel("b"))
        await until(lambda: is_settled(place))
    (letter,) = await place.dead_letters()
    assert told in letter.reason
    assert (letter.service, letter.payload) == ("readers", payload)
    assert runner.metrics.dead_letters.labels("job", "refused_request")._value.get() == 1
    assert len(service.given) == 1


@pytest.mark.parametrize(
    ("error", "subject", "reason"),
    [
        (RequestRefused("job refused: gpu_count is 0"), "job.requested", "refused_request"),
        (InvalidFact("not a CloudEvent"), "demand.reported", "refused_request"),
        (UnknownType("job.requested.v9"), "job.requested", "refused_request"),
        (InvalidFact("not a CloudEvent"), "job.queued", "invalid_fact"),
        (UnknownType("node.seen.v9"), "node.observed", "unknown_type"),
        (PermanentError("403 jobs.batch create"), "job.requested", "permanent_error"),
        (PoisonMessage("ended three processes"), "job.requested", "poison_message"),
        (KeyError("x"), "job.requested", "bug"),
    ],
)
def test_only_a_clients_own_mistake_is_a_refused_request(error: Exception, subject: str, reason: str) -> None:
    """What we publish ourselves, what our rights forbid and what ends our processes stay for operators."""
    assert dead_letter_reason(error, subject) == reason


async def test_a_bug_is_loud_and_ends() -> None:
    """Traceback once, not ready while it lasts, a dead letter at the limit, and the next fact has its turn."""

    async def fall(recorded: Recorded) -> Outputs:
        assert isinstance(recorded.fact, JobCancelRequested)
        if recorded.fact.job_id == "a":
            raise KeyError("what the author forgot")
        return [finished(recorded.fact.job_id)]

    place, service = Place(), Finisher(fall)
    with structlog.testing.capture_logs() as lines:
        async with running(place, service) as runner:
            await place.say(cancel("a"))
            await until(lambda: bool(runner.readiness.conditions.get("facts job")))
            assert not runner.readiness.is_ready
            await until(lambda: is_settled(place))
            await place.say(cancel("b"))
            await until(lambda: is_settled(place))
            await until(lambda: runner.readiness.is_ready)
    assert len(service.given) == QUICK.bug_tries_count_max + 1
    assert len([line for line in lines if line.get("exc_info")]) == 1
    (letter,) = await place.dead_letters()
    assert "bug in finisher: KeyError('what the author forgot')" in letter.reason
    assert runner.metrics.facts_handled.labels("job", "bug")._value.get() == QUICK.bug_tries_count_max


async def test_a_fact_may_be_asked_for_again() -> None:
    """What is known so far is published at once, and waiting is no failure, however often."""

    async def in_steps(_: Recorded) -> Outputs:
        if len(service.given) < 8:
            return Outcome(facts=(placed(len(service.given)),), redeliver_after_seconds=0.01)
        return [finished()]

    place, service = Place(), Finisher(in_steps)
    async with running(place, service) as runner:
        await place.say(cancel())
        await until(lambda: is_settled(place))
    assert len(await place.stored(JobPlaced)) == 7
    assert runner.metrics.facts_handled.labels("job", "redelivered")._value.get() == 7
    assert await place.dead_letters() == []


async def test_an_input_that_hangs_times_out() -> None:
    """No call of an input lasts longer than the limit; the fact is retried."""

    async def hang_at_first(_: Recorded) -> Outputs:
        if len(service.given) == 1:
            await asyncio.sleep(60)
        return [finished()]

    place, service = Place(), Finisher(hang_at_first)
    limits = QUICK.__class__(effect_seconds_max=0.05, backoff=QUICK.backoff)
    async with running(place, service, limits=limits):
        await place.say(cancel())
        await until(lambda: is_settled(place))
    assert len(await place.stored(JobFinished)) == 1


async def test_facts_are_handled_one_at_a_time_in_order() -> None:
    """A service needs no locks between two facts."""
    inside: list[int] = []

    async def look(_: Recorded) -> Outputs:
        inside.append(1)
        await asyncio.sleep(0.002)
        assert len(inside) == 1
        inside.pop()
        return ()

    place, service = Place(), Finisher(look)
    for number in range(30):
        await place.say(cancel(str(number)))
    async with running(place, service):
        await until(lambda: is_settled(place))
    assert [recorded.sequence for recorded in service.given] == list(range(1, 31))


async def test_a_service_may_handle_several_facts_at_once() -> None:
    """At most the declared number: a slow call does not delay the others."""
    inside, most = 0, 0

    async def look(_: Recorded) -> Outputs:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return ()

    class Wide(Finisher):
        concurrency_max = 4

    place, service = Place(), Wide(look)
    for number in range(20):
        await place.say(cancel(str(number)))
    async with running(place, service):
        await until(lambda: is_settled(place))
    assert most == 4


async def test_one_delivery_that_is_lost_does_not_end_the_others_heartbeat() -> None:
    """A broker that forgot one delivery, or cannot tell the lag, still hears that the work on the rest goes on."""
    beats: list[None] = []

    class Forgetful(MemoryBus):
        async def effect_consumer(self, durable: str) -> EffectConsumer:
            consumer = await super().effect_consumer(durable)

            async def forgotten() -> None:
                raise TransientError("not confirmed")

            async def heard() -> None:
                beats.append(None)

            class Half:
                close, acknowledged_sequence = consumer.close, consumer.acknowledged_sequence

                async def fetch(self, count_max: int, wait_seconds_max: float) -> Sequence[Delivery]:
                    deliveries = await consumer.fetch(count_max, wait_seconds_max)
                    for each in deliveries:
                        each.in_progress = forgotten if each.message.sequence == 1 else heard  # type: ignore[method-assign]
                    return deliveries

                async def pending_count(self) -> int:
                    raise PermanentError("the broker refuses to say")

            return Half()

    class Wide(Finisher):
        concurrency_max = 4

    async def hang(_: Recorded) -> Outputs:
        await asyncio.sleep(60)
        return ()

    place, service = Place(), Wide(hang)
    for name in ("a", "b"):
        await place.say(cancel(name))
    async with running(place, service, bus=await place.bus(Wide, Forgetful)):
        await until(lambda: len(beats) >= 3)


async def test_stopping_finishes_what_is_in_hand_and_hands_back_the_rest() -> None:
    """The fact in the door is finished, published and acknowledged; those behind it go to others at once."""
    is_inside, may_go = asyncio.Event(), asyncio.Event()

    async def slowly(recorded: Recorded) -> Outputs:
        is_inside.set()
        await may_go.wait()
        return await finish(recorded)

    place, service, other = Place(), Finisher(slowly), Finisher(finish)
    for job_id in "abc":
        await place.say(cancel(job_id))
    async with running(place, service) as runner:
        await is_inside.wait()
        runner.stop()
        await asyncio.sleep(0.05)
        may_go.set()
    assert [said.fact.entity() for said in await place.stored(JobFinished)] == ["job/a"]
    async with running(place, other):
        await until(lambda: is_settled(place))
    assert len(service.given) + len(other.given) == 3


async def test_a_program_without_our_package_may_ask() -> None:
    """A bare body is a request: named by its Nats-Msg-Id, at the instant it arrived; a broken one names its field."""

    class Reader(Probe):
        name = "reader"
        consumes = (JobRequested,)

    place, service = Place(), Reader()
    body = (
        b'{"job_name":"t","project_id":"p","gpu_requirements":{"gpu_count":1},"container":{"image":"i"},"color":"red"}'
    )
    async with running(place, service):
        await place.send("job.requested", body, "mine-1")
        await place.send("job.requested", body, "mine-1")
        await place.send("job.requested", body.replace(b"1", b'"many"'), "mine-2")
        await place.say(request("theirs"), "mine-3")
        await until(lambda: is_settled(place))
    bare, full = (recorded.envelope for recorded in service.given)
    assert (bare.id, full.id) == ("mine-1", "mine-3")
    assert abs(bare.time - Clock.wall_now()) < timedelta(seconds=10)
    (letter,) = await place.dead_letters()
    assert "gpu_requirements.gpu_count: Expected `int`, got `str`" in letter.reason


async def test_an_undeclared_output_is_our_bug() -> None:
    """What a service publishes stands in its declarations, or it is not published."""

    async def say_something_else(_: Recorded) -> Outputs:
        return [cancel("again")]

    place = Place()
    async with running(place, Finisher(say_something_else)):
        await place.say(cancel())
        await until(lambda: is_settled(place))
    (letter,) = await place.dead_letters()
    assert "does not declare that it publishes job.cancel_requested.v1" in letter.reason
