"""Runs a simulated cluster whose nodes are bought through a fake cloud's own API, in one process.

`python -m gpu_autoscaler.simcloud --cloud azure --port 8001 --cloud-port 4566 --settings FILE`
"""

import argparse
import asyncio
import importlib
import sys
from pathlib import Path

import msgspec

from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.signals import stop_event
from gpu_autoscaler.simcloud.fleet_emulator import FleetEmulator, SeededCloud
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.server import start
from gpu_autoscaler.simcluster.world import TICK_SECONDS, World

# Loaded on demand: each needs packages that the others do not. A new cloud is one line here.
CLOUDS = {
    "aws": "gpu_autoscaler.simcloud.aws.fleet_emulator",
    "azure": "gpu_autoscaler.simcloud.azure.fleet_emulator",
    "gcp": "gpu_autoscaler.simcloud.gcp.fleet_emulator",
}


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="simcloud", description="A GPU cluster, and a fake cloud to buy it from.")
    parser.add_argument("--cloud", choices=sorted(CLOUDS), default="aws", help="which cloud is faked")
    parser.add_argument("--port", type=int, default=0, help="of the Kubernetes API and the nodes")
    parser.add_argument("--cloud-port", type=int, default=0, help="of the fake cloud")
    parser.add_argument("--settings", type=Path, required=True, help="where to write the driver's settings, as JSON")
    options = parser.parse_args(arguments)
    clock = Clock.from_environment()
    module = importlib.import_module(CLOUDS[options.cloud])
    seeded: SeededCloud = module.seed(clock.now, options.settings)
    options.settings.write_bytes(msgspec.json.encode(seeded.settings))
    asyncio.run(_serve(seeded, clock, options.port, options.cloud_port))
    return 0


async def _serve(seeded: SeededCloud, clock: Clock, port: int, cloud_port: int) -> None:
    world = World(clock, tick_seconds=TICK_SECONDS * clock.factor)
    cloud, cloud_routes = attach_cloud(world, seeded.catalog)
    world.add_controller(FleetEmulator(seeded.fleet, cloud))
    async with seeded.serving(cloud_port) as cloud_url:
        runner, url = await start(world, port=port, extensions=[cloud_routes])
        sys.stdout.write(f"{url} {cloud_url}\n")
        sys.stdout.flush()
        await stop_event().wait()
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
