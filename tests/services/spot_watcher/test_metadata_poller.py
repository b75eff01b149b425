"""Concurrent metadata reads of many nodes."""

import asyncio

from aiohttp import web
from tests.support.small_servers import serving

from gpu_autoscaler_services.spot_watcher.metadata_poller import POLLS_AT_ONCE_MAX, READS_OF_POLL_MAX, metadata_session


async def test_concurrent_reads_do_not_wait_for_connections() -> None:
    """Each read is answered only when all of them are in progress."""
    reads_count, present = POLLS_AT_ONCE_MAX * READS_OF_POLL_MAX, 0
    all_there = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        nonlocal present
        present += 1
        if present >= reads_count:
            all_there.set()
        await all_there.wait()
        return web.Response(text="FALSE")

    async with serving(answer) as url, metadata_session() as session, asyncio.timeout(60):
        answers = await asyncio.gather(*(session.get(url) for _ in range(reads_count)))
    assert {response.status for response in answers} == {200}
