"""Reports of node watchers on a real broker: nothing at rest, and no notice lost by a restart of any part."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.node_watchers import Metadata, gateway, notices, serving_broker, until, watcher

from gpu_autoscaler.bus.nats.requests import Reconnects, RequestLink
from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler_services.permissions import NODE_WATCHER

pytestmark = [pytest.mark.integration]

MINE = ProviderId("aws:///eu-west-1a/i-0aaaaaaaaaaaaaaaa")


def reclaim(seconds: float = 120.0) -> ReclaimNotice:
    """A notice with its deadline, as EC2 shows it."""
    at = (datetime.now(UTC) + timedelta(seconds=seconds)).replace(microsecond=0)
    return ReclaimNotice("terminate", at.isoformat(), at)


async def test_a_notice_is_published_and_withdrawn(tmp_path: Path) -> None:
    """Shown, published under the instance of the subject; no longer shown, withdrawn."""
    metadata = Metadata(MINE)
    async with (
        serving_broker(tmp_path, with_callout=False) as broker,
        gateway(broker) as runner,
        watcher(metadata, broker.url(NODE_WATCHER)),
    ):
        metadata.notices = (reclaim(),)
        await until(lambda: notices(runner))
        (record,) = notices(runner).values()
        assert (record.notice.provider_id, record.notice.channel) == (MINE, "metadata")
        metadata.notices = ()
        await until(lambda: not next(iter(notices(runner).values())).is_active)


async def test_a_withdrawal_during_a_restart_of_the_watcher_is_published(tmp_path: Path) -> None:
    """The new process knows nothing of the notice: the gateway does."""
    metadata = Metadata(MINE)
    async with serving_broker(tmp_path, with_callout=False) as broker, gateway(broker) as runner:
        async with watcher(metadata, broker.url(NODE_WATCHER)):
            metadata.notices = (reclaim(),)
            await until(lambda: notices(runner))
        metadata.notices = ()
        async with watcher(metadata, broker.url(NODE_WATCHER)):
            await until(lambda: not next(iter(notices(runner).values())).is_active)


async def test_a_notice_survives_a_missing_gateway_and_a_restarted_broker(tmp_path: Path) -> None:
    """It is repeated until it is settled."""
    metadata, links = Metadata(MINE), list[RequestLink]()
    async with (
        serving_broker(tmp_path, with_callout=False) as broker,
        watcher(metadata, broker.url(NODE_WATCHER), links=links),
    ):
        await until(lambda: links and links[0].is_up)
        metadata.notices = (reclaim(),)
        await broker.server.kill()
        await broker.server.start()
        async with gateway(broker) as runner:
            await until(lambda: notices(runner))
        assert links[0].connections_count == 2


async def test_many_watchers_come_back_one_after_another(tmp_path: Path) -> None:
    """After a restart of the broker all are back within the longest waits, spread over them: no storm.

    One that has a notice to report does not wait for its turn. `make bench CASE=NODES` does it with a thousand.
    """
    reconnects, count = Reconnects(first_seconds_max=4.0, seconds_max=8.0), 200
    instances = [ProviderId(f"aws:///eu-west-1a/i-{number}") for number in range(count)]
    links: list[RequestLink] = []
    back_at: list[float] = []
    loop = asyncio.get_running_loop()
    async with serving_broker(tmp_path, with_callout=False) as broker, AsyncExitStack() as closing:
        runner = await closing.enter_async_context(gateway(broker))
        hurried = Metadata(MINE)
        for metadata in (hurried, *map(Metadata, instances)):
            entered = watcher(metadata, broker.url(NODE_WATCHER), reconnects=reconnects, links=links)
            await closing.enter_async_context(entered)
        await until(lambda: len(links) == count + 1 and all(link.is_up for link in links), 60.0)
        await broker.server.kill()
        hurried.notices = (reclaim(),)
        await broker.server.start()
        started = loop.time()
        waiting = set(links[1:])

        def all_back() -> bool:
            back = {link for link in waiting if link.connections_count > 1}
            back_at.extend(loop.time() - started for _ in back)
            waiting.difference_update(back)
            return not waiting

        await until(lambda: notices(runner))
        noticed_after = loop.time() - started
        await until(all_back, 60.0)
    assert noticed_after < 4.0
    assert back_at[-1] < 30.0
    quarter = [at for at in back_at if at < 1.0]
    assert len(quarter) < count * 0.6, "they return in random waits of up to 4 s"
