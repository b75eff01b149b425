"""A frozen process with work in progress: others take the work, and its resumption does no harm."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from tests.support.ender import cancel, declared, envelope_of
from tests.support.enders import EnderProcess, Enders
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.dead_letters import DeadLetters
from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

COUNT = 400


async def until_ready(process: EnderProcess) -> None:
    """Wait until `/readyz` returns this."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{process.port}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def test_what_a_frozen_process_holds_is_done_by_another(server: NatsServer, tmp_path: Path) -> None:
    """Each job ends once although one of two processes was frozen; after resuming it works and exits cleanly."""
    load = await NatsBus.connect(server.url, name="load", declared=declared())
    await load.ensure()
    enders = Enders(server.url, tmp_path)
    try:
        slow, quick = await enders.start(), await enders.start()
        for process in (slow, quick):
            await until_ready(process)
        for number in range(COUNT):
            await load.publish(*envelope_of(cancel(number)), message_id=str(number))
            if number == COUNT // 8:
                os.kill(slow.process.pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            while await load.last_sequence("JOB") < 2 * COUNT:
                await asyncio.sleep(0.05)
        os.kill(slow.process.pid, signal.SIGCONT)
        await until_ready(slow)
        for number in range(COUNT, COUNT + 50):
            await load.publish(*envelope_of(cancel(number)), message_id=str(number))
        async with asyncio.timeout(60):
            while await load.last_sequence("JOB") < 2 * (COUNT + 50):
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)  # what would come again comes now
        assert await load.last_sequence("JOB") == 2 * (COUNT + 50)
        assert await DeadLetters(load).page() == []
        assert [await process.stop() for process in (slow, quick)] == [0, 0]
        assert all("fact handled" in process.said for process in (slow, quick))
    finally:
        await enders.close()
        await load.close()
