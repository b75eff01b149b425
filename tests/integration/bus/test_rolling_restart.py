"""What no running broker changes goes by a rolling restart: its store limit and its largest message."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.nats_cluster import NatsCluster, servers_of, until_formed
from tests.support.working import persistently, until

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.nats.link import Timeouts
from gpu_autoscaler.bus.nats.migrate import Change, MigrationOptions, migrate_broker
from gpu_autoscaler.bus.nats.open import open_link
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import MEBIBYTE, SERVER_PAYLOAD_BYTES_MAX, BusDeclaration, ConsumerSpec, StreamSpec
from gpu_autoscaler.model.errors import ConfigError

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

STREAM = StreamSpec(
    name="LOAD",
    subjects=("load.>",),
    description="of a test",
    max_age_seconds=3600,
    max_bytes=8 * MEBIBYTE,
    replicas_count=3,
)
CONSUMER = ConsumerSpec(durable="service-load-act", stream="LOAD", subjects=("load.fact",))
LARGER = msgspec.structs.replace(STREAM, max_bytes=48 * MEBIBYTE)
LARGE_BYTES = SERVER_PAYLOAD_BYTES_MAX + MEBIBYTE


def configure(cluster: NatsCluster, number: int, store_mebibytes: int, payload_bytes: int) -> None:
    """Set what the server reads at its next start."""
    server = cluster.servers[number]
    folder = json.dumps(str((server.store / "jetstream").resolve()))
    limits = f"max_file_store: {store_mebibytes * MEBIBYTE}, max_memory_store: {MEBIBYTE}"
    jetstream = f"jetstream {{ {limits}, store_dir: {folder} }}"
    server._settings = (server._settings[0], jetstream, f"max_payload: {payload_bytes}")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    """Three servers with little space."""
    cluster = NatsCluster(servers_of(tmp_path / "nats"))
    for number in range(len(cluster.servers)):
        configure(cluster, number, store_mebibytes=16, payload_bytes=SERVER_PAYLOAD_BYTES_MAX)
    try:
        await asyncio.gather(*(server.start() for server in cluster.servers))
        await until_formed(cluster.urls)
        yield cluster
    finally:
        await asyncio.gather(*(server.kill() for server in cluster.servers))


async def roll(cluster: NatsCluster, *, store_mebibytes: int, payload_bytes: int, bus: NatsBus) -> None:
    """Restart one server after another with these settings; the next one when all copies are up to date."""
    for number, server in enumerate(cluster.servers):
        configure(cluster, number, store_mebibytes, payload_bytes)
        await server.restart()
        await cluster.until_whole(bus, STREAM.name)


async def migrated(cluster: NatsCluster, declared: BusDeclaration) -> tuple[Change, ...]:
    """Migrate the broker."""
    link = await open_link(cluster.urls, name="migrator", timeouts=Timeouts(connect_seconds_max=60.0))
    try:
        return await migrate_broker(link, declared, MigrationOptions(is_applied=True))
    finally:
        await link.close()


async def test_limits_of_the_servers_grow_by_a_rolling_restart_under_load(cluster: NatsCluster) -> None:
    """A stream larger than the store limit is refused with the next step; after it, it is applied. Every message that
    was confirmed meanwhile is stored once and handled, and larger messages are accepted at the end."""
    declared = BusDeclaration(streams=(STREAM,), consumers=(CONSUMER,))
    bus = await NatsBus.connect(
        cluster.urls, name="load", declared=declared, timeouts=Timeouts(connect_seconds_max=60.0)
    )
    await bus.ensure()
    larger = BusDeclaration(streams=(LARGER,), consumers=(CONSUMER,))
    (refused,) = await migrated(cluster, larger)
    assert (refused.property, refused.outcome) == ("max_bytes", "refused")
    assert "increase the store limit (max_file_store) of the servers, restart them one after another" in (
        refused.next_step
    )

    confirmed: list[int] = []
    handled: list[str] = []
    ending, ended = asyncio.Event(), asyncio.Event()

    async def publish() -> None:
        while not ending.is_set():
            publication = Publication(subject="load.fact", payload=b"x", message_id=str(len(confirmed)))
            (ack,) = await persistently(bus, [publication])
            confirmed.append(ack.sequence)
            await asyncio.sleep(0.005)
        ended.set()  # the last one is confirmed after `ending`

    async def handle() -> None:
        consumer = await bus.effect_consumer(CONSUMER.durable)
        while not (ended.is_set() and len(set(handled)) == len(confirmed)):
            try:
                for delivery in await consumer.fetch(100, 0.5):
                    handled.append(delivery.message.message_id or "")
                    await delivery.ack()
            except Exception:  # noqa: BLE001 - while servers restart; delivered again
                await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(publish()), asyncio.create_task(handle())]
    await until(lambda: len(handled) > 20, "load")
    await roll(cluster, store_mebibytes=64, payload_bytes=LARGE_BYTES + MEBIBYTE, bus=bus)
    (applied,) = await migrated(cluster, larger)
    assert (applied.property, applied.outcome) == ("max_bytes", "applied")
    before = len(confirmed)
    await until(lambda: len(confirmed) > before + 20, "load afterwards")
    ending.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)

    assert len(set(confirmed)) == len(confirmed), "each is stored once"
    assert await bus.last_sequence(STREAM.name) == len(confirmed)
    assert sorted(map(int, set(handled))) == list(range(len(confirmed))), "each is handled"
    assert bus._link.client.max_payload == LARGE_BYTES + MEBIBYTE
    await bus.close()


async def test_a_server_that_takes_too_small_messages_is_named_with_the_next_step(tmp_path: Path) -> None:
    """Services of a release with larger messages wait for the restart of the servers."""
    server = NatsServer(tmp_path / "nats", settings=(f"max_payload: {MEBIBYTE}",))
    await server.start()
    with pytest.raises(ConfigError, match=f"set max_payload to {SERVER_PAYLOAD_BYTES_MAX}.* one after another"):
        await migrated(NatsCluster([server]), BusDeclaration(streams=(STREAM,)))
    await server.stop()
