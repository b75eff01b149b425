"""The declared sizes and ages, held against a day of facts of 1,000 nodes, stored by a real server."""

from pathlib import Path

import pytest
from tests.bench.stream_load import PODS_FILE
from tests.bench.stream_objects import CLOUDS, Cloud
from tests.bench.stream_sizes import TOTAL_BYTES_MAX, by_stream, days_held, measured_on
from tests.support.nats import nats_store, server

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.bus.stream_limits import stream_limits
from gpu_autoscaler.bus.streams import BUCKETS, DAY_SECONDS, STREAMS, BusDeclaration, streams
from gpu_autoscaler.model.errors import ConfigError

__all__ = ["nats_store", "server"]  # fixtures

pytestmark = pytest.mark.integration

AGES_DAYS = {"JOB": 30, "SCALING": 30, "POD": 7, "NODE": 7, "SPOT": 7, "COST": 7, "SHADOW": 7, "GPU": 1}


def test_all_streams_together_have_at_most_16_gibibytes() -> None:
    """That is what a volume of the default size holds."""
    assert sum([*(spec.max_bytes for spec in STREAMS), *(spec.max_bytes for spec in BUCKETS)]) <= TOTAL_BYTES_MAX


def test_ages_are_those_that_are_promised() -> None:
    """A week, of jobs and plans a month; telemetry for a day, and raw samples for an hour."""
    specs = {spec.name: spec for spec in STREAMS}
    assert {name: specs[name].max_age_seconds / DAY_SECONDS for name in AGES_DAYS} == AGES_DAYS
    assert specs["GPU"].ttl_seconds("gpu.node_sampled.n1") == 3600


@pytest.mark.skipif(not PODS_FILE.is_file(), reason=f"no trace {PODS_FILE}; set GPU_AUTOSCALER_TRACES")
@pytest.mark.parametrize("cloud", CLOUDS, ids=lambda cloud: cloud.name)
async def test_each_stream_holds_its_age(server: NatsServer, cloud: Cloud) -> None:
    """With the ids of each cloud: those of Azure are several times as long as those of AWS."""
    loads = by_stream(await measured_on(server, cloud))
    held = {spec.name: days_held(spec, loads[spec.name]) for spec in STREAMS if spec.name in loads}
    assert held.keys() == AGES_DAYS.keys()
    assert {name: days for name, days in held.items() if days < AGES_DAYS[name]} == {}


@pytest.mark.parametrize("limits", [(), tuple(f"{spec.name}=32MiB" for spec in STREAMS)])
async def test_a_server_that_offers_too_little_is_named_with_the_next_step(
    nats_store: Path, limits: tuple[str, ...]
) -> None:
    """It reserves the sizes when the streams are created; without the step, that looks like a full disk."""
    folder = nats_store / "jetstream"
    server = NatsServer(nats_store, settings=[f'jetstream {{ store_dir: "{folder}", max_file_store: 1GB }}'])
    await server.start()
    declared = BusDeclaration(streams=streams(stream_limits(limits)))
    bus = await NatsBus.connect(server.url, name="client", declared=declared)
    if limits:
        await bus.ensure()
    else:
        with pytest.raises(ConfigError, match=r"stream GPU: .*; raise max_file_store .* smaller nats\.stream_limits"):
            await bus.ensure()
    await bus.close()
    await server.stop()
