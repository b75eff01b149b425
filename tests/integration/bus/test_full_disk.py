"""The broker's disk fills and is freed: it is reported, no confirmed message is lost, and work resumes."""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from tests.support.ender import Ender, cancel, declared, envelope_of
from tests.support.full_disk import Disk, GrowthLimit, small_disk
from tests.support.working import persistently, until, working

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Ack, Publication
from gpu_autoscaler.bus.server import NatsServer

pytestmark = pytest.mark.integration

COUNT = 100


async def is_healthy(server: NatsServer) -> bool:
    """What a liveness probe asks the server."""
    url = f"http://127.0.0.1:{server.monitor_port}/healthz"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status == 200


async def story(disk: Disk) -> None:
    """A service at work; the disk is full for a while; whoever runs the broker frees it and, where it is needed, starts
    the broker again."""
    server = NatsServer(
        disk.store,
        monitor=True,
        settings=[f'jetstream {{ store_dir: "{disk.store / "jetstream"}", max_file_store: 100GB }}'],
    )
    async with AsyncExitStack() as closing:
        await server.start()
        closing.push_async_callback(server.stop)
        load = await NatsBus.connect(server.url, name="load", declared=declared())
        closing.push_async_callback(load.close)
        bus = await NatsBus.connect(server.url, name="ender", declared=declared())
        closing.push_async_callback(bus.close)
        await load.ensure()
        await _work_while_full(server, disk, load, bus)


async def _work_while_full(server: NatsServer, disk: Disk, load: NatsBus, bus: NatsBus) -> None:
    service = Ender()
    confirmed: list[Ack] = []

    async def ask(numbers: Iterable[int]) -> None:
        for number in numbers:
            subject, payload = envelope_of(cancel(number))
            one = Publication(subject=subject, payload=payload, message_id=str(number), headers={"Pad": "x" * 20_000})
            confirmed.extend(await persistently(load, [one]))
            await asyncio.sleep(0.01)

    async with working(bus, service) as runner, asyncio.TaskGroup() as tasks:
        await ask(range(COUNT // 2))
        await until(lambda: len(service.handled) > COUNT // 4 and runner.readiness.is_ready, "at work")
        asking = tasks.create_task(ask(range(COUNT // 2, COUNT)))  # all of it after the disk is full
        disk.fill(server)
        await until(lambda: not runner.readiness.is_ready, "not ready")
        await until(lambda: runner.readiness.conditions["bus"] is not None, "the reason")
        assert "storing messages" in (runner.readiness.conditions["bus"] or "")
        kept = len(confirmed)
        await asyncio.sleep(2)
        disk.free(server)
        async with asyncio.timeout(60):  # by itself, or a broker that stays wedged says so to who may start it again
            while len(confirmed) <= kept + 5 and await is_healthy(server):
                await asyncio.sleep(0.1)
        if len(confirmed) <= kept + 5:
            await server.restart()
        await asyncio.wait_for(asking, 60)
        await until(lambda: len(set(service.handled)) == COUNT, "all handled")
        await until(lambda: runner.readiness.is_ready, "ready again")

    for number, ack in enumerate(confirmed):
        message = await load.message_at("JOB", ack.sequence)
        assert message is not None, f"message {number} was confirmed as {ack.sequence} and is not there"
        assert message.message_id == str(number)
    assert await load.last_sequence("JOB") == 2 * COUNT, "each job is asked to end once, and ends once"


async def test_a_disk_that_fills_and_is_freed(tmp_path: Path) -> None:
    """On a small file system where this machine may have one."""
    with small_disk(tmp_path / "disk") as disk:
        await story(disk)


async def test_files_that_cannot_grow_for_a_while(tmp_path: Path) -> None:
    """The same errors without a separate file system, so that it runs everywhere."""
    (tmp_path / "disk").mkdir()
    await story(GrowthLimit(tmp_path / "disk"))
