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
    """After a restart of the broker all are back, spread over the longest first wait: no storm.

    One that has a notice to report does not wait for its turn. `make bench CASE=NODES` does it with a thousand.
    """
    reconnects, count = Reconnects(first_seconds_max=6.0, seconds_max=8.0), 60
    links: list[RequestLink] = []
    loop = asyncio.get_running_loop()
    async with serving_broker(tmp_path, with_callout=False) as broker, AsyncExitStack() as closing:
        runner = await closing.enter_async_context(gateway(broker))
        hurried = Metadata(MINE)
        others = [Metadata(ProviderId(f"aws:///eu-west-1a/i-{number}")) for number in range(count)]
        for metadata in (hurried, *others):
            entered = watcher(metadata, broker.url(NODE_WATCHER), reconnects=reconnects, links=links)
            await closing.enter_async_context(entered)
        await until(lambda: len(links) == count + 1 and all(link.is_up for link in links), 60.0)
        await broker.server.kill()
        hurried.notices = (reclaim(),)
        await broker.server.start()
        started = loop.time()
        back_at: dict[RequestLink, float] = {}
        noticed_at: list[float] = []

        def all_back() -> bool:
            now = loop.time() - started
            back_at.update({link: now for link in links[1:] if link.connections_count > 1 and link not in back_at})
            if notices(runner) and not noticed_at:
                noticed_at.append(now)
            return len(back_at) == count and bool(noticed_at)

        await until(all_back, 60.0)
    ordered = sorted(back_at.values())
    assert ordered[-1] < 30.0
    assert noticed_at[0] < 10.0
    assert ordered[count * 9 // 10] - ordered[count // 10] > 2.0, "they return in random waits of up to 6 s"
