"""V2: how fast durable facts become state, beside the stock way to take them: fetch(1000), decode, acknowledge each.

Both read the same file-backed stream on one server, in turns. Ours is the whole runtime as a service has it: ordered
read, decoding through the record's only door, fold, cut. The peer decodes with the same decoder and folds nothing.
"""

import asyncio
import gc
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig
from tests.bench.folding import history
from tests.bench.line import Line
from tests.bench.starting import Pods, publish_all

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.catalog import FACT_CATALOG
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.runner import Runner

PODS_COUNT = 40_000  # 200,000 facts
ROUNDS_COUNT = 3
BATCH_COUNT = 1_000
RATIO_MIN = 4.0


def measure() -> list[Line]:
    """Medians of three rounds, both in turn."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        facts_count, ours_spent, stock_spent = runner.run(_measure(Path(folder)))
    ours, stock = [spent.wall_seconds for spent in ours_spent], [spent.wall_seconds for spent in stock_spent]
    ratio = statistics.median(one / other for one, other in zip(stock, ours, strict=True))
    processor_ratio = statistics.median(
        one.processor_seconds / other.processor_seconds for one, other in zip(stock_spent, ours_spent, strict=True)
    )
    return [
        Line(case="V2 drained", value=facts_count / statistics.median(ours), unit="facts/s", against="into state"),
        Line(
            case="V2 stock",
            value=facts_count / statistics.median(stock),
            unit="facts/s",
            against=f"nats-py fetch({BATCH_COUNT}), decode, ack each",
        ),
        Line(
            case="V2 processor",
            value=processor_ratio,
            unit="x",
            against="the stock way, processor time of the reader alone",
        ),
        Line(
            case="V2",
            value=ratio,
            unit="x",
            against=f"the stock way, {facts_count:,} facts",
            target=f">= {RATIO_MIN}",
            met=ratio >= RATIO_MIN,
        ),
    ]


class Spent(msgspec.Struct, frozen=True):
    """What one drain took of the wall clock, and of this process's processor."""

    wall_seconds: float
    processor_seconds: float


class _Watch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        gc.collect()
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def spent(self) -> Spent:
        """So far."""
        return Spent(time.perf_counter() - self._wall, time.process_time() - self._processor)


async def _measure(folder: Path) -> tuple[int, list[Spent], list[Spent]]:
    envelopes = history(PODS_COUNT)
    async with AsyncExitStack() as closing:
        server = NatsServer(folder)
        await server.start()
        closing.push_async_callback(server.stop)
        bus = await NatsBus.connect(server.url, name="bench", declared=BusDeclaration(streams=streams()))
        closing.push_async_callback(bus.close)
        await bus.ensure()
        await publish_all(bus, envelopes)
        count = len(envelopes)
        ours: list[Spent] = []
        stock: list[Spent] = []
        del envelopes
        for number in range(ROUNDS_COUNT):
            stock.append(await _stock(server.url, f"stock-{number}", count))
            ours.append(await _ours(bus, count))
    return count, ours, stock


async def _ours(bus: NatsBus, count: int) -> Spent:
    view = StateView()
    runner = Runner(Pods(), bus, view=view, clock=Clock())
    watch = _Watch()
    running = asyncio.create_task(runner.run())
    while view.last_sequence("POD") < count:
        await asyncio.sleep(0.005)
    spent = watch.spent()
    runner.stop()
    await running
    assert not view.state.pods, "every pod of the history is gone in the end"
    return spent


async def _stock(url: str, durable: str, count: int) -> Spent:
    client = Client()
    await client.connect(url)
    stream = client.jetstream()
    config = ConsumerConfig(durable_name=durable, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=10 * BATCH_COUNT)
    watch = _Watch()
    reader = await stream.pull_subscribe("pod.>", durable=durable, stream="POD", config=config)
    taken = 0
    while taken < count:
        for message in await reader.fetch(BATCH_COUNT, timeout=10):
            FACT_CATALOG.decode(message.data)
            await message.ack()
            taken += 1
    await client.flush()
    spent = watch.spent()
    await client.close()
    return spent
