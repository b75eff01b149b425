"""The simulated cluster as it stood when an earlier version was recorded: `python -m tests.upgrade.world`.

Objects, machines and their bill are put back as they were, under their own uids and versions; from then on all goes on.
"""

import argparse
import asyncio
import signal
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.providers.protocol import Instance
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.cloud_http import TrueInstance, attach_cloud
from gpu_autoscaler.simcluster.exporter import Telemetry
from gpu_autoscaler.simcluster.instances import Machine
from gpu_autoscaler.simcluster.kinds import NODES, PODS
from gpu_autoscaler.simcluster.objects import key_of, phase_of, seconds_in_annotation
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG
from gpu_autoscaler.simcluster.server import start
from gpu_autoscaler.simcluster.world import TICK_SECONDS, World


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What there was."""

    objects: dict[str, list[dict[str, Any]]]  # by table, owners before what they own
    instances: tuple[TrueInstance, ...]  # in order of launch

    @property
    def version(self) -> int:
        """The highest version of an object."""
        return max(int(item["metadata"]["resourceVersion"]) for items in self.objects.values() for item in items)


def put_back(world: World, cloud: Cloud, saved: Saved) -> None:
    """Make it so."""
    for number, told in enumerate(saved.instances):
        machine = _machine(told, saved, cloud, number)
        cloud._by_id[machine.instance_id] = machine
        cloud._by_node[machine.node_name] = machine
        if told.installation is not None and machine.action_id is not None:
            cloud._by_token[told.installation, machine.action_id] = machine
    world.store.version = saved.version  # what is put now is newer than anything that anybody has seen
    for table, items in saved.objects.items():
        for item in items:
            world.store.put(table, key_of(item), item)
            if table == PODS.table and phase_of(item) == "Running":
                _goes_on(world, item)


def _machine(told: TrueInstance, saved: Saved, cloud: Cloud, number: int) -> Machine:
    shown: Instance = told.instance
    kind = next(kind for kind in INSTANCE_CATALOG if kind.name == shown.instance_type)
    sold = f"{shown.instance_type}/{shown.zone}/{shown.capacity_type}"
    offer = next(offer for offer in cloud.offers() if offer.key == sold)
    is_there = any(node["metadata"]["name"] == told.node_name for node in saved.objects[NODES.table])
    return Machine(
        instance_id=shown.provider_id.rpartition("/")[2],
        node_name=told.node_name,
        internal_ip=f"10.0.{number // 250}.{number % 250 + 1}",
        action_id=shown.action_id,
        installation=told.installation,
        pool="",
        kind=kind,
        offer=replace(offer, price_micro_usd_per_hour=shown.price_micro_usd_per_hour),
        labels=(),
        taints=(),
        launched_at=shown.launched_at,
        boot_seconds=offer.boot_seconds,
        telemetry=Telemetry(told.node_name, kind),
        state=shown.state,
        terminated_at=shown.terminated_at,
        is_registered=is_there,
    )


def _goes_on(world: World, pod: dict[str, Any]) -> None:
    """Its work ends when it would have."""
    seconds = seconds_in_annotation(pod, "run-seconds")
    if seconds is not None:
        began = datetime.fromisoformat(pod["status"]["startTime"])
        world.kubelets._plan("end", pod, began + timedelta(seconds=seconds))


async def _serve(port: int, saved: Saved) -> None:
    clock = Clock.from_environment()
    world = World(clock, tick_seconds=TICK_SECONDS * clock.factor)
    cloud, routes = attach_cloud(world)
    put_back(world, cloud, saved)
    runner, _ = await start(world, port=port, extensions=[routes])
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--world", type=Path, required=True)
    options = parser.parse_args()
    sys.exit(asyncio.run(_serve(options.port, msgspec.json.decode(options.world.read_bytes(), type=Saved))))
