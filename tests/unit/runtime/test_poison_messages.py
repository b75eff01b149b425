"""Redelivered messages that may have ended another process."""

from datetime import UTC, datetime

import pytest
from tests.support.runners import Place, Probe, running, until

from gpu_autoscaler.bus.streams import ATTEMPT, ConsumerSpec, consumers_of_process
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.poison_messages import ATTEMPTS_COUNT_MAX, AttemptRecords, PoisonMessage

T0 = datetime(2026, 11, 21, tzinfo=UTC)


class Canceler(Probe):
    """Consumes cancel requests."""

    name = "canceler"
    consumes = (JobCancelRequested,)


def cancel(name: str) -> JobCancelRequested:
    """Return a request to cancel the job."""
    return JobCancelRequested(job_id=JobId(name))


async def fetch_and_crash(place: Place, spec: ConsumerSpec) -> None:
    """Fetch all messages in a process that ends."""
    bus = await place.bus(Canceler)
    await (await bus.effect_consumer(spec.durable)).fetch(10, 0.1)
    place.passed += 2 * (datetime.fromtimestamp(spec.ack_wait_seconds, UTC) - datetime.fromtimestamp(0, UTC))


async def recorded_attempts(place: Place) -> list[bytes]:
    """Return all records, in order."""
    return [message.payload for message in await place.messages(ATTEMPT)]


async def test_a_first_delivery_leaves_no_record() -> None:
    """The common case costs nothing."""
    place, service = Place(), Canceler()
    await place.say(cancel("a"))
    async with running(place, service):
        await until(lambda: len(service.given) == 1)
    assert await recorded_attempts(place) == []


async def test_a_survived_message_is_cleared() -> None:
    """Recorded, then cleared: frequent restarts of a service do not add up."""
    place, service = Place(), Canceler()
    (spec,) = [spec for spec in consumers_of_process(Canceler.name, Canceler.consumes) if spec.stream == "JOB"]
    await place.say(cancel("a"))
    await fetch_and_crash(place, spec)
    async with running(place, service):
        await until(lambda: len(service.given) == 1)
        await until(lambda: attempts_are(place, [1, 0]))


async def attempts_are(place: Place, counts: list[int]) -> bool:
    """True when these are the records."""
    return await recorded_attempts(place) == [b'{"attempts_count":%d}' % count for count in counts]


async def test_a_poison_message_is_set_aside() -> None:
    """At the limit, without being handled; the others are handled."""
    place, service = Place(), Canceler()
    (spec,) = [spec for spec in consumers_of_process(Canceler.name, Canceler.consumes) if spec.stream == "JOB"]
    await place.say(cancel("a"))
    await place.say(cancel("b"))
    await fetch_and_crash(place, spec)
    bus = await place.bus(Canceler)
    (delivery,) = await (await bus.effect_consumer(spec.durable)).fetch(1, 0.1)
    attempts = AttemptRecords(bus, Canceler.name)
    for count in range(ATTEMPTS_COUNT_MAX):
        assert await attempts.attempts_count(delivery) == count
        await attempts.begin(delivery, count)
    with pytest.raises(PoisonMessage, match="the process ended 4 times while it handled this message"):
        await attempts.attempts_count(delivery)
    await delivery.nak(0.0)

    async with running(place, service) as runner:
        await until(lambda: len(service.given) == 1)
        await until(lambda: runner.metrics.dead_letters.labels("job", "poison_message")._value.get() == 1)
    assert [recorded.fact for recorded in service.given] == [cancel("b")]
    (letter,) = await place.dead_letters()
    assert (letter.service, letter.error_kind, letter.stream_sequence) == ("canceler", "PoisonMessage", 1)
