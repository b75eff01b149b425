"""The real scaler as a process of its own, on a real server with file-backed streams, and a cluster for it to know."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path

import aiohttp
import msgspec
from tests.bench.starting import publish_all
from tests.support.stories import node, on_sale, pod, synced
from tests.support.timed_facts import Story, TimedFact, record

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BusDeclaration, streams
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.sim.capacity import SimCapacity
from gpu_autoscaler.runtime.config import (
    GatewaySettings,
    HttpSettings,
    KubeSettings,
    LogSettings,
    NatsSettings,
    PolicySettings,
    ProviderSettings,
    SensingSettings,
    Settings,
    StoreSettings,
    to_environment,
)
from gpu_autoscaler_services.local.child import free_port

NODES_COUNT = 1_000
PODS_PER_NODE = 10
READY_SECONDS_MAX = 300.0
_CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
POLICY = """nodes_count_max = 1000000
watch_age_seconds_max = 3600.0
idle_seconds_max = 3600.0
[removal]
waiting_micro_usd_per_hour = 1_000_000_000_000
"""


class Ground:
    """Broker, simulated cloud, and how to start a scaler between them."""

    def __init__(self, folder: Path, server: NatsServer, bus: NatsBus, simcluster_url: str) -> None:
        self.folder = folder
        self.server = server
        self.bus = bus
        self.simcluster_url = simcluster_url
        self.environment: dict[str, str] = {}  # of services, besides their settings
        self._tellings_count = 0

    async def offers(self) -> tuple[Offer, ...]:
        """What the simulated cloud sells."""
        provider = SimCapacity(self.simcluster_url, installation="bench")
        try:
            return tuple(sorted(await provider.offers(), key=lambda offer: offer.key))
        finally:
            await provider.close()

    async def say(self, story: Iterable[TimedFact]) -> None:
        """Publish facts; those of this process have ids of their own."""
        self._tellings_count += 1
        own = f"bench-{self._tellings_count}"
        await publish_all(
            self.bus, [msgspec.structs.replace(envelope, id=f"{own}/{envelope.id}") for envelope in envelopes(story)]
        )

    async def install(self) -> None:
        """Give services their bytecode, as an installation does: here it may be that none is written, or none yet."""
        self.environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode")}
        importing = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import gpu_autoscaler_services.serve", env={**os.environ, **self.environment}
        )
        assert await importing.wait() == 0, "what is to be started can be imported"

    @asynccontextmanager
    async def scaler(self) -> AsyncIterator["ScalerProcess"]:
        """A scaler that is ready; ended afterwards."""
        async with self.serving("scaler") as running:
            yield running

    @asynccontextmanager
    async def serving(self, service: str, sensing: SensingSettings | None = None) -> AsyncIterator["ScalerProcess"]:
        """A service that is ready; ended afterwards."""
        policy = self.folder / "policy.toml"
        policy.write_text(POLICY, encoding="utf-8")
        settings = Settings(
            nats=NatsSettings(url=self.server.url),
            kube=KubeSettings(url=self.simcluster_url),
            provider=ProviderSettings(name="sim", url=self.simcluster_url),
            store=StoreSettings(url=f"sqlite:///{(self.folder / 'store.db').absolute()}"),
            http=HttpSettings(port=free_port()),
            gateway=GatewaySettings(port=free_port()),
            policy=PolicySettings(path=str(policy), shadow_path=str(policy)),
            log=LogSettings(format="json", level="warning"),
            sensing=sensing or SensingSettings(),
            instance=service,
        )
        began = time.perf_counter()
        url = f"http://127.0.0.1:{settings.http.port}"
        command = [sys.executable, "-m", "gpu_autoscaler_services.serve", service]
        environment = {**self.environment, **to_environment(settings)}
        async with process(command, environment, url, self.folder / f"{service}.log") as running:
            yield ScalerProcess(running, url, time.perf_counter() - began)


class ScalerProcess:
    """A scaler, or another service, at work."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, ready_seconds: float) -> None:
        self.ready_seconds = ready_seconds  # from the start of the process
        self._process = process
        self._url = url

    def resident_mebibytes(self) -> float:
        """RSS now. Source: Linux `proc(5)`, /proc/<pid>/status."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the process has no memory; it is gone")

    def processor_seconds(self) -> float:
        """User and system time so far."""
        return processor_seconds(self._process.pid)

    async def figures(self) -> dict[str, float]:
        """Return the text of `/metrics`."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/metrics") as answer:
            lines = [line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far. Source: Linux `proc(5)`, /proc/<pid>/stat, fields 14 and 15."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_SECOND


@asynccontextmanager
async def ground(folder: Path, *options: str) -> AsyncIterator[Ground]:
    """Everything but the services, in this folder, simcluster with these options; ended afterwards."""
    async with AsyncExitStack() as closing:
        (folder / "nats").mkdir(parents=True)
        server = NatsServer(folder / "nats")
        await server.start()
        closing.push_async_callback(server.stop)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "gpu_autoscaler.simcluster", "--port", str(port), *options]
        await closing.enter_async_context(process(command, {}, url, folder / "simcluster.log"))
        bus = await NatsBus.connect(server.url, name="bench", declared=BusDeclaration(streams=streams()))
        closing.push_async_callback(bus.close)
        await bus.ensure()
        yield Ground(folder, server, bus, url)


@asynccontextmanager
async def process(
    command: Sequence[str], environment: dict[str, str], url: str, log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ready by its `/readyz`; ended afterwards."""
    with log.open("wb") as out:
        running = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **environment}, stdout=out, stderr=out
        )
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(READY_SECONDS_MAX):
            while not await _is_ready(session, url):
                assert running.returncode is None, f"{' '.join(command[1:])} ended: see {log}"
                await asyncio.sleep(0.02)
        yield running
    finally:
        if running.returncode is None:
            running.terminate()
        await running.wait()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


def cluster(offers: tuple[Offer, ...], at: datetime, *, sized: Offer) -> Story:
    """Return a thousand full nodes that must not be removed, ten thousand pods on them, offers, full lists."""
    gpus = sized.resources.gpu_count
    told: list[TimedFact] = [*on_sale(*offers, at=at)]
    for number in range(NODES_COUNT):
        name = f"node-{number}"
        told += node(name, sized, is_ours=False, at=at)
        for index in range(PODS_PER_NODE):
            told += pod(f"{name}-{index}", on=name, gpus=gpus if index == 0 else 0, at=at)
    return (*told, *synced(told, as_of=at))


def envelopes(story: Iterable[TimedFact]) -> list[Envelope]:
    """The facts as they are published."""
    return [msgspec.structs.replace(one.envelope, source="/bench") for one in record(story)]
