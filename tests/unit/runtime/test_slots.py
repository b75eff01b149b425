"""A slot is held while a fact is handled, and free while its handler waits for a rate limit."""

import asyncio

import pytest

from gpu_autoscaler.providers.throttling import RateLimit
from gpu_autoscaler.runtime.slots import LaneSlots, all_of


async def waiting_turn(slots: LaneSlots, limit: RateLimit, done: list[int], number: int) -> None:
    """Handle something that needs the rate limit."""
    async with slots.one():
        await limit.take("Launch")
        done.append(number)


async def test_who_waits_for_a_rate_limit_holds_no_slot() -> None:
    """With both slots' handlers waiting for ten seconds, a third is handled at once."""
    slots, limit, done = LaneSlots(2), RateLimit(0.1, 1, wait_seconds_max=60.0), list[int]()
    await limit.take("Launch")
    waiting = [asyncio.create_task(waiting_turn(slots, limit, done, number)) for number in range(2)]
    await asyncio.sleep(0.05)
    assert slots.waiting_count == 2
    async with asyncio.timeout(5.0):
        async with slots.one():
            done.append(99)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert done == [99]
    assert slots.waiting_count == 0
    await every_slot_is_free(slots)


async def test_a_slot_is_taken_again_before_the_call() -> None:
    """At most as many calls run at once as there are slots, whatever waited before."""
    slots, limit, inside, most = LaneSlots(2), RateLimit(1000.0, 1), 0, 0

    async def handle() -> None:
        nonlocal inside, most
        async with slots.one():
            await limit.take("Launch")
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.02)
            inside -= 1

    await asyncio.gather(*(handle() for _ in range(12)))
    assert most == 2
    await every_slot_is_free(slots)


async def test_a_call_that_outlives_its_handler_keeps_no_slot() -> None:
    """A read that others share goes on after the handler that began it."""
    slots, limit, reads = LaneSlots(1), RateLimit(10.0, 1), list[asyncio.Task[None]]()
    await limit.take("List")
    async with slots.one():
        reads.append(asyncio.create_task(limit.take("List")))
        await asyncio.sleep(0.01)
    await asyncio.gather(*reads)
    await every_slot_is_free(slots)


async def test_all_slots_of_all_lanes_are_held_alone() -> None:
    """Whoever holds them waits for those in hand, and keeps later ones out."""
    lanes = [LaneSlots(2), LaneSlots(1)]
    async with all_of(lanes):
        for slots in lanes:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02), slots.one():
                    pass
    for slots in lanes:
        await every_slot_is_free(slots)


async def every_slot_is_free(slots: LaneSlots) -> None:
    """Fail unless all slots can be had, and no more than these."""
    async with asyncio.timeout(5.0), slots.all():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02), slots.one():
                pass
