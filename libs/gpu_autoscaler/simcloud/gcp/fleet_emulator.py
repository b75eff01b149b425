"""The fake Google Cloud for the fleet emulator, and as the cloud of a simulated cluster."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.providers.gcp.translate import (
    ACTION_ID,
    INSTALLATION,
    NODE_LABELS,
    NODE_TAINTS,
    POOL,
    PRICE,
    provider_id_of,
)
from gpu_autoscaler.simcloud.fleet_emulator import USER_DATA, EmulatedFleet, FleetInstance, SeededCloud, ordered
from gpu_autoscaler.simcloud.gcp.catalog import TYPES
from gpu_autoscaler.simcloud.gcp.fake import CREATE, PROJECT, GcpFake
from gpu_autoscaler.simcloud.gcp.machines import Machine
from gpu_autoscaler.simcloud.rest import serving_rest
from gpu_autoscaler.simcluster.offers import offers_of

_OFFERS = {offer.instance_type: offer for offer in offers_of(TYPES)}


class GcpFleet(EmulatedFleet):
    """Google Cloud instances, their orders reconstructed from metadata. The price catalog does not follow prices."""

    launch_calls = CREATE
    codes = {  # noqa: RUF012 - never written
        "capacity": "ZONE_RESOURCE_POOL_EXHAUSTED",
        "quota": "QUOTA_EXCEEDED",
        "permission": "forbidden",
        "configuration": "invalid",
    }

    def __init__(self, fake: GcpFake) -> None:
        self.fake: GcpFake = fake
        self._seen: dict[str, Machine] = {}  # by name, including deleted ones

    def settle(self) -> None:
        self.fake.machines.settle()

    def seen(self) -> list[FleetInstance]:
        living = {machine.name: machine for machine in self.fake.machines.machines.values()}
        self._seen |= {name: machine for name, machine in living.items() if ACTION_ID in machine.metadata}
        return [_described(machine, is_there=name in living) for name, machine in self._seen.items()]

    def reclaim(self, instance_id: str) -> datetime:
        return self.fake.machines.preempt(instance_id)


def _described(machine: Machine, *, is_there: bool) -> FleetInstance:
    metadata = machine.metadata
    return FleetInstance(
        instance_id=machine.name,
        provider_id=provider_id_of(PROJECT, machine.zone, machine.name),
        order=ordered(
            _OFFERS[machine.machine_type],
            machine.zone,
            machine.capacity_type,
            metadata,
            (ACTION_ID, INSTALLATION, POOL, PRICE),
            USER_DATA.format(labels=metadata[NODE_LABELS], taints=metadata[NODE_TAINTS]),
        ),
        launched_at=machine.created_at,
        ended_by_user_at=machine.gone_at or machine.stopped_at,
        is_alive=is_there and machine.is_alive,
    )


def seed(now: Callable[[], datetime], texts: Path) -> SeededCloud:  # noqa: ARG001 - it has none: nodes read metadata
    """Return it with a managed group for each type in each zone, spot and on-demand."""
    fake = GcpFake(now=now)
    return SeededCloud(
        fleet=GcpFleet(fake),
        catalog=TYPES,
        settings=GcpOptions(project=PROJECT, groups=tuple(fake.offer_everything())),
        serving=lambda port: serving_rest(fake, port=port),
    )
