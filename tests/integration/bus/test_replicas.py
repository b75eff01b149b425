"""Three real brokers: a service starts from settings alone, and everything that it makes has three copies."""

import sys
from pathlib import Path

import pytest
from tests.bench.scaler_process import process
from tests.support.nats_cluster import NatsCluster, running_cluster

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.streams import LEASES, BusDeclaration, buckets, streams
from gpu_autoscaler.runtime.config import HttpSettings, NatsSettings, Settings, StoreSettings, to_environment
from gpu_autoscaler_services.local.child import free_port

pytestmark = pytest.mark.integration


async def copies(cluster: NatsCluster, stream: str) -> int:
    """How many servers have the stream."""
    bus = await NatsBus.connect(cluster.urls, name="test", declared=BusDeclaration(streams=()))
    try:
        info = await bus._link.call(f"STREAM.INFO.{stream}")
        return 1 + len(info["cluster"].get("replicas", ()))
    finally:
        await bus.close()


async def test_streams_and_buckets_have_the_copies_of_the_settings(tmp_path: Path) -> None:
    """A lost server costs neither facts nor the lease, so its bucket has as many copies as the streams."""
    async with running_cluster(tmp_path) as cluster:
        settings = Settings(
            nats=NatsSettings(url=",".join(cluster.urls), replicas_count=3),
            store=StoreSettings(url=f"sqlite:///{(tmp_path / 'store.db').absolute()}"),
            http=HttpSettings(port=free_port()),
        )
        command = [sys.executable, "-m", "gpu_autoscaler_services.serve", "cost_tracker"]
        url = f"http://127.0.0.1:{settings.http.port}"
        async with process(command, to_environment(settings), url, tmp_path / "log"):
            names = [spec.name for spec in streams()] + [bucket.stream for bucket in buckets()]
            assert {name: await copies(cluster, name) for name in names} == dict.fromkeys(names, 3)
            assert LEASES.stream in names
