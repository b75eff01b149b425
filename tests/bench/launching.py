"""LANES: a hundred notices in half a minute while 500 launches are in flight: from the notice to cordon and eviction.

Scaler, nats-server and the driver of each cloud with its own API rate limits are real; cloud and cluster are emulated.
Karpenter launches have no rate limit of ours: there the emulation takes as long as the driver waits for Karpenter.
`one lane` is the scaler with a single consumer of sixteen slots, which launches keep while they wait.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from tests.bench.line import Line
from tests.support.fake_capacity import FakeCapacity
from tests.support.launch_storm import OneLane, Seconds, slots_kept_while_waiting
from tests.support.launch_storm import measure as measure_storm
from tests.support.stories import offer

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.streams import BUCKETS, BusDeclaration, streams
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.protocol import CapacityProvider, Instance, Order
from gpu_autoscaler.providers.registry import ProviderOptions, open_provider
from gpu_autoscaler.runtime.config import load_settings
from gpu_autoscaler.runtime.service import consumers_of
from gpu_autoscaler_services.scaler.service import Scaler

Cloud = Callable[[Path], AbstractAsyncContextManager[CapacityProvider]]

LAUNCHES_COUNT, NOTICES_COUNT = 500, 100
SPREAD_SECONDS = 30.0
SERVED_SECONDS_MAX = 120.0
LAST_SETTINGS = {
    "aws": "GPU_AUTOSCALER_AWS_SUBNETS",
    "azure": "GPU_AUTOSCALER_AZURE_MACHINE_PATH",
    "gcp": "GPU_AUTOSCALER_GCP_GROUPS",
}
KARPENTER_SECONDS = 25.0  # that the driver waits for Karpenter's answer
CORDONED_SECONDS_MAX, EVICTED_SECONDS_MAX = 2.0, 3.0
RATIO_MIN = 5.0
TOLERATED_TIMES = 5.0  # the machine is shared
ONE_LANE_NOTICES_COUNT = 20
INSTALLATION = "bench"


def measure() -> list[Line]:
    """Each driver with lanes, none in flight, and AWS with one lane."""
    idle = asyncio.run(_measure(_nothing, launches_count=0))
    lines = [_line("LANES none in flight, cordoned p99", _p99(idle.cordoned), "no launch in flight")]
    worst = 0.0
    for name, cloud in (("AWS", _aws), ("GCP", _gcp), ("Azure", _azure), ("Karpenter", _karpenter)):
        seconds = asyncio.run(_measure(cloud))
        worst = max(worst, _p99(seconds.cordoned))
        against = f"{LAUNCHES_COUNT} launches in flight, {NOTICES_COUNT} notices"
        lines += [
            _line(f"LANES {name}, cordoned p99", _p99(seconds.cordoned), against, CORDONED_SECONDS_MAX),
            _line(f"LANES {name}, first eviction p99", _p99(seconds.evicted), against, EVICTED_SECONDS_MAX),
        ]
    with slots_kept_while_waiting():
        before = asyncio.run(_measure(_aws, kind=OneLane, notices_count=ONE_LANE_NOTICES_COUNT))
    ratio = _p99(before.cordoned) / worst
    lines += [
        _line("LANES AWS on one lane, cordoned p99", _p99(before.cordoned), f"{ONE_LANE_NOTICES_COUNT} notices"),
        Line(
            case="LANES", value=ratio, unit="x", against="one lane / the slowest cloud with lanes",
            target=f">= {RATIO_MIN:g}", met=ratio >= RATIO_MIN,
        ),
    ]  # fmt: skip
    return lines


def _line(case: str, value: float, against: str, most: float | None = None) -> Line:
    if most is None:
        return Line(case=case, value=value, unit="s", against=against)
    is_tolerated = value <= TOLERATED_TIMES * most
    return Line(
        case=case, value=value, unit="s", against=against, target=f"<= {most:g}", met=value <= most,
        is_tolerated=is_tolerated,
    )  # fmt: skip


def _p99(ordered: Sequence[float]) -> float:
    return ordered[max(int(len(ordered) * 0.99) - 1, 0)]


async def _measure(
    cloud: Cloud,
    *,
    kind: type[Scaler] = Scaler,
    launches_count: int = LAUNCHES_COUNT,
    notices_count: int = NOTICES_COUNT,
) -> Seconds:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = NatsServer(folder / "nats")
        await server.start()
        try:

            async def connect(of: type[Scaler]) -> Bus:
                declared = BusDeclaration(streams=streams(), consumers=consumers_of(of), buckets=BUCKETS)
                bus = await NatsBus.connect(server.url, name="scaler", declared=declared)
                await bus.ensure()
                return bus

            async with cloud(folder) as provider:
                offers = await provider.offers()
                bought = next(item for item in offers if item.capacity_type is CapacityType.SPOT)
                return await measure_storm(
                    connect, provider, bought, folder,
                    launches_count=launches_count, notices_count=notices_count, spread_seconds=SPREAD_SECONDS,
                    kind=kind, seconds_max=600.0,
                )  # fmt: skip
        finally:
            await server.stop()


def wall_now() -> datetime:
    """The clock of drivers."""
    return datetime.now(UTC)


class _Fake(FakeCapacity):
    """A cloud without a rate limit that takes this long for a launch."""

    def __init__(self, launch_seconds: float) -> None:
        super().__init__([offer()], installation=INSTALLATION, now=wall_now)
        self._launch_seconds = launch_seconds

    async def launch(self, order: Order) -> Instance:
        await asyncio.sleep(self._launch_seconds)
        return await super().launch(order)


@asynccontextmanager
async def _nothing(_: Path) -> AsyncIterator[CapacityProvider]:
    yield _Fake(0.0)


@asynccontextmanager
async def _karpenter(_: Path) -> AsyncIterator[CapacityProvider]:
    yield _Fake(KARPENTER_SECONDS)


def _aws(folder: Path) -> AbstractAsyncContextManager[CapacityProvider]:
    return _emulated("aws", folder)


def _gcp(folder: Path) -> AbstractAsyncContextManager[CapacityProvider]:
    return _emulated("gcp", folder)


def _azure(folder: Path) -> AbstractAsyncContextManager[CapacityProvider]:
    return _emulated("azure", folder)


@asynccontextmanager
async def _emulated(cloud: str, folder: Path) -> AsyncIterator[CapacityProvider]:
    """The driver of a cloud whose emulation runs in a process of its own, as its load is not the scaler's."""
    program = Path(sys.executable).with_name("gpu-autoscaler")
    served = await asyncio.create_subprocess_exec(
        program, "fake-cloud", cloud, "--port", "0", stdout=asyncio.subprocess.PIPE, cwd=folder
    )
    try:
        settings = load_settings(None, await _printed_settings(served, LAST_SETTINGS[cloud]))
        if settings.azure.machine_path is not None:
            path = str(folder / settings.azure.machine_path)
            settings = msgspec.structs.replace(
                settings, azure=msgspec.structs.replace(settings.azure, machine_path=path)
            )
        provider = open_provider(
            cloud,
            ProviderOptions(
                installation=INSTALLATION,
                url=settings.provider.url,
                call_seconds_max=settings.provider.call_seconds_max,
                now=wall_now,
                aws=settings.aws,
                azure=settings.azure,
                gcp=settings.gcp,
            ),
        )
        try:
            yield provider
        finally:
            await provider.close()
    finally:
        served.terminate()
        await served.wait()


async def _printed_settings(served: asyncio.subprocess.Process, last: str) -> dict[str, str]:
    """Return the settings that the emulation prints once it serves; `last` is the name of the last one."""
    assert served.stdout is not None
    settings: dict[str, str] = {}
    async with asyncio.timeout(SERVED_SECONDS_MAX):
        while last not in settings:
            line = (await served.stdout.readline()).decode()
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").strip().partition("=")
                settings[name] = value.strip("'")
    return settings
