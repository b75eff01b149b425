"""What a lease is on every bus: one holder at a time, another soon after it is gone."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.contract.bus.desk import Desk

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.streams import BUCKETS, LEASES, BusDeclaration
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.lease import Lease, holder_of

SOON_SECONDS_MAX = 60.0  # a standby has it within three seconds; the machine may be busy


async def lease(desk: Desk, instance: str, monotonic_seconds: Callable[[], float] = time.monotonic) -> Lease:
    """A process's lease on the role of this test, on its own connection."""
    bus: Bus = await desk.bus(BusDeclaration(streams=(desk.stream,), buckets=BUCKETS))
    return Lease(bus, desk.root, instance, monotonic_seconds)


@asynccontextmanager
async def kept(one: Lease) -> AsyncIterator[asyncio.Task[None]]:
    """Keep it while the block lasts; then give it back. The task may be cancelled, as a process may die."""
    stop = asyncio.Event()
    task = asyncio.create_task(one.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)


async def until_held(one: Lease) -> None:
    """Wait for it."""
    async with asyncio.timeout(SOON_SECONDS_MAX):
        while not one.is_held:
            await asyncio.sleep(0.01)


class LeaseContract:
    """Inherit, and give a `desk`."""

    async def test_one_of_two_holds_it_and_everybody_can_say_who(self, desk: Desk) -> None:
        """Longer than an entry lives: it is written again in time."""
        first, second = await lease(desk, "first"), await lease(desk, "second")
        async with kept(first):
            await until_held(first)
            async with kept(second):
                for _ in range(30):
                    await asyncio.sleep(LEASES.ttl_seconds / 20)
                    assert not (first.is_held and second.is_held)
                anybody = await desk.bus(BusDeclaration(streams=(), buckets=BUCKETS))

                async def all_agree() -> bool:
                    """One that was kept from renewing in time by a busy machine may have lost it meanwhile."""
                    held, other = (first, second) if first.is_held else (second, first)
                    said = (other.other_holder, await holder_of(anybody, desk.root))
                    return held.is_held and said == (held.holder, held.holder)

                async with asyncio.timeout(SOON_SECONDS_MAX):
                    while not await all_agree():
                        await asyncio.sleep(0.05)

    async def test_what_is_given_back_is_taken_at_once(self, desk: Desk) -> None:
        """Whoever ends in order does not let others wait."""
        first, second = await lease(desk, "first"), await lease(desk, "second")
        async with kept(first):
            await until_held(first)
        assert not first.is_held
        async with kept(second):
            await until_held(second)

    async def test_the_standby_takes_over_from_a_dead_holder(self, desk: Desk) -> None:
        """Nobody gives it back: its entry vanishes, and not before the holder knows that its time is over."""
        first, second = await lease(desk, "first"), await lease(desk, "second")
        async with kept(first) as dying:
            await until_held(first)
            async with kept(second):
                dying.cancel()
                await until_held(second)
                assert not first.is_held

    async def test_a_holder_that_was_paused_knows_at_once(self, desk: Desk) -> None:
        """Its own clock shows that the term is over; pending work is left to the next holder."""
        paused_seconds = 0.0
        one = await lease(desk, "paused", lambda: time.monotonic() + paused_seconds)
        async with kept(one):
            await until_held(one)
            one.require()
            paused_seconds = float(LEASES.ttl_seconds)
            assert not one.is_held
            with pytest.raises(TransientError, match="left to its holder"):
                one.require()

    async def test_of_two_that_ask_at_once_one_has_it(self, desk: Desk) -> None:
        """Both saw it free."""
        hands = [await lease(desk, f"hand-{number}") for number in range(5)]
        await asyncio.gather(*(hand._acquire() for hand in hands))
        assert sum(hand.is_held for hand in hands) == 1
