"""What the broker no longer delivers is set aside by whichever service looks first, once."""

import pytest
from tests.support.ender import cancel
from tests.support.memory_bus import MemoryBus
from tests.support.runners import Place, Probe, running, until

from gpu_autoscaler.bus.streams import (
    ADVISORY_ROOT,
    MAX_DELIVERIES_CONSUMER,
    BusDeclaration,
    ConsumerSpec,
    consumers_of_process,
    streams,
)
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.runtime.runner import Runner

IMPATIENT = ConsumerSpec(
    durable="other-job-act", stream="JOB", subjects=("job.cancel_requested",), ack_wait_seconds=0.01, max_deliver=2
)


class Consuming(Probe):
    """Handles cancels and says nothing."""

    consumes = (JobCancelRequested,)


async def give_up(place: Place, count: int) -> None:
    """Somebody else's consumer is given `count` messages twice and never says what became of them."""
    bus = MemoryBus(place.broker, BusDeclaration(streams=streams(), consumers=(IMPATIENT,)), now=place.now)
    await bus.ensure()
    consumer = await bus.effect_consumer(IMPATIENT.durable)
    for number in range(count):
        await place.say(cancel(number))
    given = 0
    while given < 2 * count:
        given += len(await consumer.fetch(count, 1.0))
    assert await consumer.fetch(count, 0.05) == []


def counted(runner: Runner) -> float | None:
    """Messages of JOB that this service set aside because the broker gave them up; None before it counts."""
    labels = {"domain": "job", "reason": "max_deliveries"}
    samples = [sample for family in runner.metrics.dead_letters.collect() for sample in family.samples]
    return next((sample.value for sample in samples if sample.labels == labels and "_total" in sample.name), None)


async def test_an_undeliverable_message_becomes_one_dead_letter() -> None:
    """Two services look; each message has one letter with its payload, and is counted by one of them."""
    place = Place()
    await give_up(place, 3)

    async def are_set_aside() -> bool:
        return len(await place.dead_letters()) == 3

    async with running(place, Consuming()) as first, running(place, Consuming()) as second:
        await until(are_set_aside)
        await until(lambda: (counted(first) or 0) + (counted(second) or 0) == 3)
    letters = await place.dead_letters()
    assert {(letter.service, letter.error_kind) for letter in letters} == {("other", "MaxDeliveries")}
    assert [letter.stream_sequence for letter in letters] == [1, 2, 3]
    assert all(letter.payload for letter in letters)


@pytest.mark.parametrize(
    "advisory", [b"no json", b'{"stream":"GONE","consumer":"x-y-act","stream_seq":1,"deliveries":2}']
)
async def test_an_invalid_advisory_does_not_stop_the_others(advisory: bytes) -> None:
    """It is set aside itself, and the service stays ready."""
    place = Place()
    await place.send(f"{ADVISORY_ROOT}.GONE.x-y-act", advisory, "nonsense")
    await give_up(place, 1)

    async def are_set_aside() -> bool:
        return len(await place.dead_letters()) == 2

    async with running(place, Consuming()) as runner:
        await until(are_set_aside)
        assert runner.readiness.is_ready
    nonsense, _ = await place.dead_letters()
    assert (nonsense.service, nonsense.payload) == ("dead_letters", advisory)
    assert "invalid MAX_DELIVERIES advisory" in nonsense.reason


async def test_the_counter_starts_at_zero() -> None:
    """A rate of undeliverable messages includes the first one."""
    async with running(Place(), Consuming()) as runner:
        await until(lambda: counted(runner) == 0.0)


def test_a_process_that_consumes_declares_the_shared_consumer() -> None:
    """A service that handles nothing has no word in what is given up."""
    assert MAX_DELIVERIES_CONSUMER in consumers_of_process("probe", (JobCancelRequested,))
    assert consumers_of_process("probe", ()) == ()
