"""Runs simcluster as a process: `python -m gpu_autoscaler.simcluster --port 8001 --clock-factor 10`."""

import argparse
import asyncio
import sys
from pathlib import Path

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.signals import stop_event
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, load_catalog
from gpu_autoscaler.simcluster.server import start
from gpu_autoscaler.simcluster.world import TICK_SECONDS, World


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0, or 78 where it could not start."""
    options = _options(arguments)
    try:
        clock = Clock(options.clock_factor) if options.clock_factor else Clock.from_environment()
        asyncio.run(_serve(options, clock))
    except ConfigError as exc:
        sys.stderr.write(f"simcluster cannot start: {exc}\n")
        return 78
    except OSError as exc:
        sys.stderr.write(f"simcluster cannot start: {exc}\nchoose another --port, or 0 for a free one\n")
        return 78
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simcluster", description="A GPU cluster in a cloud, in one process.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one, printed on stdout")
    parser.add_argument("--clock-factor", type=float, help="how much faster cluster time passes, 1 to 20")
    parser.add_argument("--token", help="ask for this bearer token on the Kubernetes API")
    parser.add_argument("--offers", type=Path, help="JSON file of instance types to sell instead of the built-in ones")
    return parser.parse_args(arguments)


async def _serve(options: argparse.Namespace, clock: Clock) -> None:
    world = World(clock, tick_seconds=TICK_SECONDS * clock.factor)
    types = load_catalog(options.offers) if options.offers else INSTANCE_CATALOG
    _, cloud_routes = attach_cloud(world, types)
    runner, url = await start(
        world, host=options.host, port=options.port, token=options.token, extensions=[cloud_routes]
    )
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    await stop_event().wait()
    await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
