"""A fast read has the guarantees of a slow one: whichever process is killed, each message has its effect once."""

import asyncio
import random
import sqlite3
import sys
from pathlib import Path

import pytest
from tests.support.drainer import chained, kept
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

MESSAGES_COUNT = 20_000
KILLS_COUNT = 5


async def test_a_drain_that_is_killed_at_any_moment_has_each_effect_once(server: NatsServer, tmp_path: Path) -> None:
    """Killed again and again while it reads, folds and writes: the chain over all messages is that of one read."""
    moments = random.Random(17)  # noqa: S311 - moments to kill at
    bus = await NatsBus.connect(server.url, name="publisher", declared=BusDeclaration(streams=streams()))
    await bus.ensure()
    names = [f"message-{number}" for number in range(MESSAGES_COUNT)]
    await bus.publish_many([Publication(subject="pod.watched", payload=b"x" * 300, message_id=one) for one in names])
    await bus.close()
    path, kills_count, cuts = tmp_path / "kept.db", 0, [0]
    row = sqlite3.connect(path, isolation_level=None, timeout=30)
    arguments = ("-m", "tests.support.drainer", server.url, str(path), str(MESSAGES_COUNT))

    while True:
        before = kept(row)[0]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
        if kills_count < KILLS_COUNT:
            # A moment after it has got somewhere, wherever it is then.
            async with asyncio.timeout(60):
                while kept(row)[0] == before and process.returncode is None:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(moments.uniform(0, 0.02))
            if process.returncode is None:
                process.kill()
                kills_count += 1
        code = await asyncio.wait_for(process.wait(), 120)
        cuts.append(kept(row)[0])
        if code == 0:
            break

    expected = ""
    for name in names:
        expected = chained(expected, name)
    assert kept(row) == (MESSAGES_COUNT, MESSAGES_COUNT, expected)
    assert kills_count >= 2, "it was too fast to be killed; publish more"
    assert len([cut for cut in cuts if 0 < cut < MESSAGES_COUNT]) >= 2, "some were killed in the middle"
