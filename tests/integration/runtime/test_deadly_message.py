"""A message that kills its process: after a few restarts it becomes a dead letter, and the rest continues."""

import asyncio
import signal
from pathlib import Path

import pytest
from tests.support.ender import POISON, cancel, declared, envelope_of
from tests.support.enders import Enders
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.dead_letters import DeadLetters
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.runtime.poison_messages import ATTEMPTS_COUNT_MAX

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

COUNT = 60


async def test_a_deadly_message_is_set_aside_with_its_reason(server: NatsServer, tmp_path: Path) -> None:
    """The processes that it kills are few; it alone is blamed, and each of the others has its effect once."""
    load = await NatsBus.connect(server.url, name="load", declared=declared())
    await load.ensure()
    enders = Enders(server.url, tmp_path)
    deadly = envelope_of(JobCancelRequested(job_id=JobId("deadly"), note=POISON))
    for number in range(COUNT):
        if number == COUNT // 2:
            await load.publish(*deadly, message_id="deadly")
        await load.publish(*envelope_of(cancel(number)), message_id=str(number))
    try:
        for _ in range(ATTEMPTS_COUNT_MAX + 1):
            process = await enders.start()
            assert await process.ended() == -signal.SIGKILL

        last = await enders.start()
        letters = DeadLetters(load)
        async with asyncio.timeout(60):
            while not await letters.page() or await load.last_sequence("JOB") < 2 * COUNT + 1:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)
        assert await last.stop() == 0
    finally:
        await enders.close()

    (letter,) = await letters.page()
    assert (letter.service, letter.message_id, letter.error_kind) == ("ender", "deadly", "PoisonMessage")
    assert letter.reason.startswith("the process ended 4 times while it handled this message")
    assert letter.payload == deadly[1]
    assert await load.last_sequence("JOB") == 2 * COUNT + 1, "each of the others has its end once"
    await load.close()
