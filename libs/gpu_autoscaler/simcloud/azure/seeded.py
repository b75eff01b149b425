"""The fake Azure prepared as the cloud of a simulated cluster."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.providers.azure import AzureOptions
from gpu_autoscaler.simcloud.azure.fake import GROUP, SUBSCRIPTION, AzureFake
from gpu_autoscaler.simcloud.azure.fleet_emulator import AzureFleet
from gpu_autoscaler.simcloud.azure.market import INSTANCE_CATALOG
from gpu_autoscaler.simcloud.azure.texts import MACHINE
from gpu_autoscaler.simcloud.node_texts import USER_DATA
from gpu_autoscaler.simcloud.rest import serving_rest
from gpu_autoscaler.simcloud.seeded import SeededCloud


def seed(now: Callable[[], datetime], texts: Path) -> SeededCloud:
    """Return it with a flexible scale set; machine properties and user data are written to `texts`."""
    fake = AzureFake(now=now)
    settings = settings_of(fake, texts)
    return SeededCloud(
        fleet=AzureFleet(fake),
        catalog=INSTANCE_CATALOG,
        settings=settings,
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
