"""Messages that were delivered before, to somebody who may have died of them."""

from datetime import UTC, datetime

import pytest
from tests.support.runners import Place, Probe, running, until

from gpu_autoscaler.bus.streams import ATTEMPT, ConsumerSpec, consumers_of_process
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.poison_messages import ATTEMPTS_COUNT_MAX, AttemptRecords, PoisonMessage

T0 = datetime(2026, 11, 21, tzinfo=UTC)


class Hearer(Probe):
    """Hears of cancels."""

    name = "hearer"
    consumes = (JobCancelRequested,)


def cancel(name: str) -> JobCancelRequested:
    """Somebody wants the job to end."""
    return JobCancelRequested(job_id=JobId(name))


async def taken_and_dropped(place: Place, spec: ConsumerSpec) -> None:
    """A process takes what there is, and is gone."""
    bus = await place.bus(Hearer)
    await (await bus.effect_consumer(spec.durable)).fetch(10, 0.1)
    place.passed += 2 * (datetime.fromtimestamp(spec.ack_wait_seconds, UTC) - datetime.fromtimestamp(0, UTC))


async def begun_counts(place: Place) -> list[bytes]:
    """What is on record, in order."""
    return [message.payload for message in await place.messages(ATTEMPT)]


async def test_what_was_never_begun_elsewhere_leaves_no_record() -> None:
    """The usual way costs nothing."""
    place, service = Place(), Hearer()
    await place.say(cancel("a"))
    async with running(place, service):
        await until(lambda: len(service.given) == 1)
    assert await begun_counts(place) == []


async def test_one_that_is_survived_is_no_suspect_any_more() -> None:
    """Begun on record, then cleared; a service that restarts often does not add its restarts up."""
    place, service = Place(), Hearer()
    (spec,) = [each for each in consumers_of_process(Hearer.name, Hearer.consumes) if each.stream == "JOB"]
    await place.say(cancel("a"))
    await taken_and_dropped(place, spec)
    async with running(place, service):
        await until(lambda: len(service.given) == 1)
        await until(lambda: begun_is(place, [1, 0]))


async def begun_is(place: Place, counts: list[int]) -> bool:
    """True when this is what is on record."""
    return await begun_counts(place) == [b'{"attempts_count":%d}' % count for count in counts]


async def test_one_that_nobody_survives_is_set_aside() -> None:
    """At the limit, without being handled; the reason says what is known, and the others are handled."""
    place, service = Place(), Hearer()
    (spec,) = [each for each in consumers_of_process(Hearer.name, Hearer.consumes) if each.stream == "JOB"]
    await place.say(cancel("a"))
    await place.say(cancel("b"))
    await taken_and_dropped(place, spec)
    bus = await place.bus(Hearer)
    (delivery,) = await (await bus.effect_consumer(spec.durable)).fetch(1, 0.1)
    trials = AttemptRecords(bus, Hearer.name)
    for count in range(ATTEMPTS_COUNT_MAX):
        assert await trials.attempts_count(delivery) == count
        await trials.begin(delivery, count)
    with pytest.raises(PoisonMessage, match="the process ended 4 times while it handled this message"):
        await trials.attempts_count(delivery)
    await delivery.nak(0.0)

    async with running(place, service) as runner:
        await until(lambda: len(service.given) == 1)
        await until(lambda: runner.metrics.dead_letters.labels("job", "poison_message")._value.get() == 1)
    assert [recorded.fact for recorded in service.given] == [cancel("b")]
    (letter,) = await place.dead_letters()
    assert (letter.service, letter.error_kind, letter.stream_sequence) == ("hearer", "PoisonMessage", 1)
