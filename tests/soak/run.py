"""One soak: start, disturb, settle, compare. Every wait has a limit, and nothing is left running."""

import asyncio
import contextlib
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from tests.soak import archive, population
from tests.soak.collecting import Collector, invoice_of, objects_of
from tests.soak.disturbances import Disturber, schedule
from tests.soak.judge import Evidence, Objects, judge, work_differences
from tests.soak.measurements import Measurements, folder_mib
from tests.soak.population import SimApi
from tests.soak.retention import FULL_LIST_SECONDS, RESYNC_SECONDS, limits_of
from tests.soak.system import BROKER_MEMORY_MIB_MAX, BROKERS_COUNT, SCRAPE_SECONDS, SNAPSHOT_SECONDS, SoakSystem

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.runtime.policies import load_policy
from gpu_autoscaler.simcluster.instances import Invoice
from gpu_autoscaler_services.demo.player import Player
from gpu_autoscaler_services.demo.promises import broken_by_facts, notice_answer_seconds
from gpu_autoscaler_services.demo.record import Record
from gpu_autoscaler_services.demo.subscriber import connect
from gpu_autoscaler_services.local.simulated_world import SimulatedWorld

POLICY = Path(__file__).with_name("policy.toml")
SAMPLE_SECONDS = 5.0
DISK_SAMPLE_SECONDS = 15.0
WARM_UP_SECONDS = 60.0  # of disturbances, before memory and disk are measured
# At the end of the run: jobs end, drains under notice end, the last spans are charged; then everything is compared.
SETTLE_SECONDS_MAX = 300.0
SETTLE_SECONDS = 100.0  # usually
JUDGE_SECONDS = 30.0
DISTURBED_SECONDS_MIN = 30.0
SETTLE_POLL_SECONDS = 5.0
NOTICE_ANSWER_SECONDS_MAX = 90.0  # of the notice's 120; the scaler itself may have been killed


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a soak."""

    minutes: float = 10.0
    seed: str = "1"
    nodes: int = 1_000
    pods: int = 10_000
    folder: Path = Path("out/soak")
    planted: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`out/soak.json`."""

    minutes: float
    nodes: int
    pods: int
    kills: int
    equal: bool
    differences: tuple[str, ...]
    broken: tuple[str, ...]
    notice_to_cordon_seconds_p99: float | None  # record of a notice to that of the cordon; None: no notice
    rss_mib: Mapping[str, tuple[int, int]]  # by process: start, end
    disk_mib: tuple[int, int]  # of brokers and database: start, end
    stream_fill_max: float  # of all streams at any time: bytes stored, of those allowed
    stream_fill: Mapping[str, float]  # by stream
    seed: str
    planted: str  # the known bug that it ran with
    disturbed_seconds: float
    kills_by_name: Mapping[str, int]
    notices: int  # that were answered
    skipped: tuple[str, ...]  # disturbances that this machine could not carry out in time
    intervals: Mapping[str, tuple[float, float]]  # seconds in this run, and usually
    retention_seconds: Mapping[str, int]  # by stream
    messages: Mapping[str, int]  # by stream, ever stored
    discarded: Mapping[str, int]  # of these, at the end
    cpu_seconds: Mapping[str, float]  # by process, over all its lives


# Lengthened because two cores carry no more beside 1,000 nodes; shortened in proportion to the retention.
INTERVALS = {
    "dcgm_scrape": (SCRAPE_SECONDS, 10.0),
    "snapshot": (SNAPSHOT_SECONDS, 180.0),
    "resync": (RESYNC_SECONDS, 60.0),
    "full_instance_list": (FULL_LIST_SECONDS, 1800.0),
}


class Soak:
    """One run."""

    def __init__(self, options: Options, print_line: Callable[[str], None]) -> None:
        self._options = options
        self._began = time.monotonic()
        self._print_line = print_line
        self._measurements = Measurements()
        self._broken: list[str] = []
        self._measured_from = self._disturbed_seconds = 0.0

    def _say(self, line: str) -> None:
        self._print_line(f"{self._seconds():6.1f} s  {line}")

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> Result:
        """Run it; return the result. Raises errors of the start."""
        options = self._options
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)

        async def populate(url: str) -> None:
            await population.fill(url, nodes_count=options.nodes, pods_count=options.pods)

        system = SoakSystem(
            options.folder,
            populate,
            minutes=options.minutes,
            policy=POLICY,
            offers=population.write_catalog(options.folder / "catalog.json"),
            planted=options.planted,
        )
        try:
            await system.start(self._say)
            self._say("every service is ready")
            return await self._soaked(system)
        finally:
            self._say("stopping")
            await system.stop()

    async def _soaked(self, system: SoakSystem) -> Result:
        folder = self._options.folder
        async with contextlib.AsyncExitStack() as closing:
            bus = await connect(system.nats_url)
            closing.push_async_callback(bus.close)
            oracle = await closing.enter_async_context(archive.Archive(bus, folder / "archive"))
            world = await closing.enter_async_context(SimulatedWorld(system.simcluster_url))
            api = SimApi(system.simcluster_url)
            closing.push_async_callback(api.close)
            sampling = asyncio.create_task(self._sample(system, bus))
            closing.callback(sampling.cancel)
            player = Player(
                bus=bus, gateway_url=system.gateway_url, world=world, clock=system.clock, print_line=self._say
            )
            collector = Collector(system, oracle, folder)
            await self._settle(api, collector, is_after=False)
            disturber = Disturber(system, api, world, bus, player, self._say)
            await self._disturb(system, disturber)
            state, objects = await self._settle(api, collector, is_after=True)
            self._say("comparing")
            sampling.cancel()
            evidence = await self._collect(state, objects, await invoice_of(api), oracle, collector)
            record = await asyncio.to_thread(collector.record)
            return await self._result(evidence, record, oracle, collector, disturber)

    async def _disturb(self, system: SoakSystem, disturber: Disturber) -> None:
        left = self._options.minutes * 60 - self._seconds() - SETTLE_SECONDS - JUDGE_SECONDS
        seconds = max(DISTURBED_SECONDS_MIN, left)
        began = self._seconds()
        self._measured_from = began + min(WARM_UP_SECONDS, seconds / 4)
        services = sorted(name for name in system.children if name != "simcluster")
        events = schedule(self._options.seed, services, seconds, pods_count=self._options.pods)
        self._say(f"{len(events)} disturbances in {seconds:.0f} s, seed {self._options.seed}")
        await disturber.run(events)
        self._broken += disturber.failures
        self._disturbed_seconds = self._seconds() - began

    async def _settle(self, api: SimApi, collector: Collector, *, is_after: bool) -> tuple[ClusterState, Objects]:
        """Wait until the oracle's work is that of simcluster, and none is open at the end; return both. What is left
        at the limit breaks the soak."""
        deadline = self._seconds() + SETTLE_SECONDS_MAX
        while True:
            state = await collector.state()
            objects = await objects_of(api)
            left = list(work_differences(state, objects)) or (_open_work(state) if is_after else [])
            if not left:
                self._say(f"settled: {len(objects.nodes)} nodes, {len(objects.pods)} pods")
                return state, objects
            self._say(f"settling: {'; '.join(left)[:200]}")
            if self._seconds() > deadline:
                self._broken += [f"not settled within {SETTLE_SECONDS_MAX:g} s: {line}" for line in left]
                return state, objects
            await asyncio.sleep(SETTLE_POLL_SECONDS)

    async def _sample(self, system: SoakSystem, bus: NatsBus) -> None:
        disk_at = 0.0
        while True:
            pids = {name: child.pid for name, child in system.children.items()}
            pids |= {f"broker-{number}": member.pid for number, member in enumerate(system.brokers.members)}
            self._measurements.sample(self._seconds(), pids)
            if self._seconds() >= disk_at:
                disk_at = self._seconds() + DISK_SAMPLE_SECONDS
                mib = await asyncio.to_thread(folder_mib, self._options.folder / "nats")
                # Without the log of writes, whose size is that of a setting.
                mib += await asyncio.to_thread(folder_mib, system.postgres.folder, "pg_wal")
                self._measurements.disk_mib.append((self._seconds(), mib))
                with contextlib.suppress(TransientError):
                    for stream in archive.STREAMS:
                        span = await bus.span(stream)
                        fill = span.bytes_count / span.bytes_max
                        self._measurements.fill_max[stream] = max(fill, self._measurements.fill_max.get(stream, 0.0))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _collect(
        self, state: ClusterState, objects: Objects, invoice: Invoice, oracle: archive.Archive, collector: Collector
    ) -> Evidence:
        """Read what is compared; ends the services that save their state."""
        rss, disk = self._measurements.rss_mib(self._measured_from), self._measurements.disk_level(self._measured_from)
        known = [await collector.rebuilt()]
        try:
            known += await collector.saved()
        except PermanentError as exc:
            self._broken.append(str(exc))
        await collector.spans()
        self._broken += oracle.failures()
        self._broken += [f"the oracle missed {count} messages of {name}" for name, count in oracle.missed.items()]
        charges, unpublished = await collector.charges(invoice)
        return Evidence(
            known=known,
            state=state,
            objects=objects,
            invoice=invoice.lines,
            charges=charges,
            spans=await asyncio.to_thread(collector.charged, unpublished),
            judged_at=invoice.as_of,
            rss_mib={name: level for name, level in rss.items() if name != "simcluster"},
            rss_mib_max={f"broker-{number}": BROKER_MEMORY_MIB_MAX for number in range(BROKERS_COUNT)},
            disk_mib=disk,
        )

    async def _result(
        self, evidence: Evidence, record: Record, oracle: archive.Archive, collector: Collector, disturber: Disturber
    ) -> Result:
        options, measurements = self._options, self._measurements
        self._broken += broken_by_facts(
            record, load_policy(POLICY), clock_factor=1.0, answer_seconds_max=NOTICE_ANSWER_SECONDS_MAX
        )
        verdict = judge(msgspec.structs.replace(evidence, broken=self._broken))
        answers = sorted(notice_answer_seconds(record))
        spans = await collector.spans()
        (options.folder / "samples.json").write_bytes(msgspec.json.encode(measurements.samples()))
        return Result(
            minutes=round(self._seconds() / 60, 1),
            nodes=len(evidence.objects.nodes),
            pods=len(evidence.objects.pods),
            kills=len(disturber.kills),
            equal=verdict.is_equal,
            differences=verdict.differences,
            broken=verdict.broken,
            notice_to_cordon_seconds_p99=round(answers[math.ceil(0.99 * len(answers)) - 1], 3) if answers else None,
            rss_mib={name: (round(level.start), round(level.end)) for name, level in evidence.rss_mib.items()},
            disk_mib=(round(evidence.disk_mib.start), round(evidence.disk_mib.end)),
            stream_fill_max=round(max(measurements.fill_max.values(), default=0.0), 3),
            stream_fill={name: round(fill, 3) for name, fill in measurements.fill_max.items()},
            seed=options.seed,
            planted=options.planted,
            disturbed_seconds=round(self._disturbed_seconds, 1),
            kills_by_name=dict(sorted(Counter(disturber.kills).items())),
            notices=len(answers),
            skipped=tuple(disturber.skipped),
            intervals=INTERVALS,
            retention_seconds={name: limit.max_age_seconds for name, limit in limits_of(options.minutes).items()},
            messages=dict(oracle.last_sequences),
            discarded={name: span.first_sequence - 1 for name, span in spans.items()},
            cpu_seconds={name: round(seconds, 1) for name, seconds in sorted(measurements.cpu_seconds.items())},
        )


def _open_work(state: ClusterState) -> list[str]:
    """Return what is still in progress: jobs of our own, and waiting pods."""
    jobs_count = sum(record.queued is not None and record.finished is None for record in state.jobs.values())
    pods_count = sum(pod.phase == "pending" for pod in state.pods.values())
    return [
        f"{count} {what}" for count, what in ((jobs_count, "unfinished jobs"), (pods_count, "waiting pods")) if count
    ]
