"""The fake Azure for the fleet emulator, and as the cloud of a simulated cluster."""

import base64
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.cloudmeta.azure import provider_id_of
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.azure.translate import ACTION_TAG, INSTALLATION_TAG, POOL_TAG, PRICE_TAG, zone_name
from gpu_autoscaler.simcloud.azure.fake import GROUP, SUBSCRIPTION, AzureFake
from gpu_autoscaler.simcloud.azure.machines import Machine
from gpu_autoscaler.simcloud.azure.market import INSTANCE_CATALOG, MACHINE, is_above_ceiling
from gpu_autoscaler.simcloud.fleet_emulator import USER_DATA, EmulatedFleet, FleetInstance, SeededCloud, ordered
from gpu_autoscaler.simcloud.rest import serving_rest
from gpu_autoscaler.simcluster.offers import offers_of

_NOTICE_SECONDS = 30.0  # minimum of Scheduled Events (Azure documentation, "Scheduled Events", `Preempt`)
_OFFERS = {offer.instance_type: offer for offer in offers_of(INSTANCE_CATALOG)}


class AzureFleet(EmulatedFleet):
    """Azure machines, their orders reconstructed from tags and custom data."""

    launch_calls = "VirtualMachines_CreateOrUpdate"
    codes = {  # noqa: RUF012 - never written
        "capacity": "ZonalAllocationFailed",
        "quota": "OperationNotAllowed",
        "permission": "AuthorizationFailed",
        "configuration": "InvalidParameter",
    }

    def __init__(self, fake: AzureFake) -> None:
        self.fake: AzureFake = fake

    def settle(self) -> None:
        """Nothing to do: a machine's state follows from its dates."""

    def seen(self) -> list[FleetInstance]:
        """Return all machines with our tags, except those that were never allocated."""
        every = self.fake.machines.ever()
        return [self._seen(machine) for machine in every if ACTION_TAG in machine.tags and machine.failure is None]

    def reclaim(self, instance_id: str) -> datetime:
        return self.fake.machines.evict(self.fake.id_of("virtualMachines", instance_id))

    def _seen(self, machine: Machine) -> FleetInstance:
        return FleetInstance(
            instance_id=machine.name,
            provider_id=provider_id_of(machine.resource_id),
            order=ordered(
                _OFFERS[machine.size],
                zone_name(machine.location, machine.zones),
                CapacityType.SPOT if machine.is_spot else CapacityType.ON_DEMAND,
                machine.tags,
                (ACTION_TAG, INSTALLATION_TAG, POOL_TAG, PRICE_TAG),
                base64.b64decode(machine.properties.get("osProfile", {}).get("customData", "")).decode(),
            ),
            launched_at=machine.created_at,
            ended_by_user_at=machine.ended_by_user_at,
            is_alive=machine.ends_at is None,
            outbid_notice_seconds=_NOTICE_SECONDS if is_above_ceiling(machine, self.fake.spot_ratio_of) else None,
        )


def seed(now: Callable[[], datetime], texts: Path) -> SeededCloud:
    """Return it with a flexible scale set; machine properties and user data are written to `texts`."""
    fake = AzureFake(now=now)
    return SeededCloud(
        fleet=AzureFleet(fake),
        catalog=INSTANCE_CATALOG,
        settings=settings_of(fake, texts),
        serving=lambda port: serving_rest(fake, port=port),
    )


def settings_of(fake: AzureFake, texts: Path) -> AzureOptions:
    """Return a driver's settings for the fake, which gets a scale set `gpu`."""
    machine, user_data = texts.with_suffix(".machine.json"), texts.with_suffix(".user-data")
    machine.write_text(json.dumps(MACHINE, indent=2), encoding="utf-8")
    user_data.write_text(USER_DATA, encoding="utf-8")
    return AzureOptions(
        subscription=SUBSCRIPTION,
        resource_group=GROUP,
        region=fake.region,
        scale_set=fake.offer_flexible("gpu"),
        machine_path=str(machine.absolute()),
        instance_types=tuple(kind.name for kind in INSTANCE_CATALOG),
        user_data_path=str(user_data.absolute()),
    )
