"""Runs a simulated cluster whose nodes are bought through a fake cloud's own API, in one process.

`python -m gpu_autoscaler.simcloud --port 8001 --cloud-port 4566 --settings FILE`
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import msgspec

from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcloud.aws.fake import AwsFake
from gpu_autoscaler.simcloud.aws.park import USER_DATA, Park
from gpu_autoscaler.simcloud.aws.server import serving
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.offers import CATALOGUE
from gpu_autoscaler.simcluster.server import start
from gpu_autoscaler.simcluster.world import TICK_SECONDS, World

REGION = "us-east-1"  # sells all of the catalogue but what AWS no longer has


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="simcloud", description="A GPU cluster, and the fake of AWS to buy it from.")
    parser.add_argument("--port", type=int, default=0, help="of the Kubernetes API and the nodes")
    parser.add_argument("--cloud-port", type=int, default=0, help="of the fake cloud")
    parser.add_argument("--settings", type=Path, required=True, help="where to write the driver's settings, as JSON")
    options = parser.parse_args(arguments)
    clock = Clock.from_environment()
    fake = AwsFake(REGION, now=clock.now)
    options.settings.write_bytes(msgspec.json.encode(_settings(fake, options.settings)))
    with serving(fake, port=options.cloud_port) as url:
        asyncio.run(_serve(fake, clock, options.port, url))
    return 0


def _settings(fake: AwsFake, path: Path) -> AwsOptions:
    user_data = path.with_suffix(".user-data")
    user_data.write_text(USER_DATA, encoding="utf-8")
    return AwsOptions(
        region=fake.region,
        launch_template="gpu",
        subnets=tuple(fake.offer_template("gpu")),
        instance_types=tuple(kind.name for kind in CATALOGUE),
        user_data_path=str(user_data.absolute()),
    )


async def _serve(fake: AwsFake, clock: Clock, port: int, cloud_url: str) -> None:
    world = World(clock, tick_seconds=TICK_SECONDS * clock.factor)
    cloud, cloud_routes = attach_cloud(world, CATALOGUE)
    world.add_controller(Park(fake, cloud))
    runner, url = await start(world, port=port, extensions=[cloud_routes])
    sys.stdout.write(f"{url} {cloud_url}\n")
    sys.stdout.flush()
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
