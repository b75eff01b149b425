"""A fake Azure for tests: each test gets an empty resource group of its own."""

import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.aws import TurnedClock

from gpu_autoscaler.providers.azure.capacity import AzureCapacity
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.simcloud.azure.fake import GROUP, SUBSCRIPTION, AzureFake
from gpu_autoscaler.simcloud.azure.market import MACHINE
from gpu_autoscaler.simcloud.rest import serving_rest

REGION = "westeurope"
TYPES = ("Standard_NC4as_T4_v3", "Standard_NC24ads_A100_v4")


class Group:
    """A served resource group with a flexible scale set `gpu`, and what a test needs to know of it."""

    def __init__(self, fake: AzureFake, url: str, clock: TurnedClock, folder: Path) -> None:
        self.fake = fake
        self.url = url
        self.clock = clock
        self.machine_path = folder / "machine.json"
        self.machine_path.write_text(json.dumps(MACHINE), encoding="utf-8")
        fake.offer_flexible("gpu")

    def options(self, **changes: object) -> AzureOptions:
        """Settings that fit the group."""
        fitting = {
            "subscription": SUBSCRIPTION,
            "resource_group": GROUP,
            "region": REGION,
            "scale_set": "gpu",
            "machine_path": str(self.machine_path),
            "instance_types": TYPES,
        }
        return AzureOptions(**(fitting | changes))  # type: ignore[arg-type]

    def provider(self, installation: str, **changes: object) -> AzureCapacity:
        """A driver that buys here."""
        options = self.options(**changes)
        return AzureCapacity(
            options, installation=installation, url=self.url, call_seconds_max=60.0, now=self.clock.now
        )


@asynccontextmanager
async def served_group(folder: Path) -> AsyncIterator[Group]:
    """Serve an empty group until the block ends."""
    if importlib.util.find_spec("azure.mgmt.compute") is None:
        pytest.skip("NOT RUN: azure-mgmt-compute is not installed; `make .venv/.dev` installs it (the fake Azure)")
    clock = TurnedClock()
    fake = AzureFake(REGION, now=clock.now)
    async with serving_rest(fake) as url:
        yield Group(fake, url, clock, folder)
