"""V3: how fast facts are stored with every acknowledgment seen, beside nats-py's own way to publish without waiting.

Both send the same bytes under the same kind of id to one file-backed stream, in turns. Then ours once more, with the
server killed and started again in the middle: what the stream holds afterwards is compared with what was confirmed.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from nats.aio.client import Client
from tests.bench.folding import history
from tests.bench.line import Line

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Publication
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.envelope import encode

FACTS_COUNT = 100_000
ROUNDS_COUNT = 3
STOCK_PENDING_COUNT_MAX = 4_000  # nats-py's default
KILLED_AFTER_SECONDS = 0.5
RATIO_MIN = 1.5


def measure() -> list[Line]:
    """Medians of three rounds, both in turn, then the round with a restart."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ours, stock, lost_count, restart_seconds = runner.run(_measure(Path(folder)))
    ratio = statistics.median(other / one for one, other in zip(ours, stock, strict=True))
    return [
        Line(case="V3 published", value=FACTS_COUNT / statistics.median(ours), unit="facts/s", against="all confirmed"),
        Line(case="V3 stock", value=FACTS_COUNT / statistics.median(stock), unit="facts/s", against="publish_async"),
        Line(case="V3 restart", value=restart_seconds, unit="s", against="all, with the server killed and back"),
        Line(
            case="V3 lost", value=lost_count, unit="facts", against="those confirmed", target="0", met=lost_count == 0
        ),
        Line(
            case="V3",
            value=ratio,
            unit="x",
            against=f"nats-py publish_async, {FACTS_COUNT:,} facts",
            target=f">= {RATIO_MIN}",
            met=ratio >= RATIO_MIN,
        ),
    ]  # fmt: skip


def _publications(round_name: str) -> list[Publication]:
    return [
        Publication(subject=one.fact.subject(), payload=encode(one), message_id=f"{round_name}/{one.id}")
        for one in history(FACTS_COUNT // 5)
    ]


async def _measure(folder: Path) -> tuple[list[float], list[float], int, float]:
    async with AsyncExitStack() as closing:
        server = NatsServer(folder)
        await server.start()
        closing.push_async_callback(server.stop)
        bus = await NatsBus.connect(server.url, name="bench", declared=BusDeclaration(streams=streams()))
        closing.push_async_callback(bus.close)
        await bus.ensure()
        ours: list[float] = []
        stock: list[float] = []
        for number in range(ROUNDS_COUNT):
            stock.append(await _stock(server.url, _publications(f"stock-{number}")))
            ours.append(await _ours(bus, _publications(f"ours-{number}")))
        lost_count, seconds = await _over_a_restart(bus, server, _publications("restart"))
    return ours, stock, lost_count, seconds


async def _ours(bus: NatsBus, publications: list[Publication]) -> float:
    began = time.perf_counter()
    acks = await bus.publish_many(publications)
    seconds = time.perf_counter() - began
    assert len({ack.sequence for ack in acks}) == len(publications)
    return seconds


async def _stock(url: str, publications: list[Publication]) -> float:
    client = Client()
    await client.connect(url)
    stream = client.jetstream(publish_async_max_pending=STOCK_PENDING_COUNT_MAX)
    began = time.perf_counter()
    futures = [
        await stream.publish_async(
            publication.subject, publication.payload, headers={"Nats-Msg-Id": publication.message_id}
        )
        for publication in publications
    ]
    await stream.publish_async_completed()
    assert len({future.result().seq for future in futures}) == len(publications)
    seconds = time.perf_counter() - began
    await client.close()
    return seconds


async def _over_a_restart(bus: NatsBus, server: NatsServer, publications: list[Publication]) -> tuple[int, float]:
    """Return how many confirmed facts the stream lost, duplicated or misplaced, and the seconds it took."""
    began = time.perf_counter()
    publishing = asyncio.create_task(bus.publish_many(publications))
    await asyncio.sleep(KILLED_AFTER_SECONDS)
    assert not publishing.done(), "the server is to be killed in the middle; publish more"
    await server.kill()
    await server.start()
    acks = await publishing
    seconds = time.perf_counter() - began
    confirmed = {ack.sequence: one.message_id for ack, one in zip(acks, publications, strict=True)}
    first, last = min(confirmed), await bus.last_sequence("POD")
    stored: dict[int, str | None] = {}
    async for batch in await bus.projection("POD", after_sequence=first - 1):
        stored.update((message.sequence, message.message_id) for message in batch)
        if batch[-1].sequence >= last:
            break
    lost = {sequence for sequence, name in confirmed.items() if stored.get(sequence) != name}
    twice_count = len(stored) - len(set(stored.values()))
    return len(lost) + (len(publications) - len(confirmed)) + twice_count, seconds
