"""The fake AWS for the fleet emulator, and as the cloud of a simulated cluster."""

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.aws.options import AwsOptions
from gpu_autoscaler.providers.aws.translate import PRICE, provider_id_of
from gpu_autoscaler.simcloud.aws import machines
from gpu_autoscaler.simcloud.aws.fake import AwsFake
from gpu_autoscaler.simcloud.aws.market import costs_more_than
from gpu_autoscaler.simcloud.aws.server import serving
from gpu_autoscaler.simcloud.fleet_emulator import USER_DATA, EmulatedFleet, FleetInstance, SeededCloud, ordered
from gpu_autoscaler.simcluster.cloud import NOTICE_SECONDS
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, offers_of

REGION = "us-east-1"  # offers the whole catalog but retired types
_OFFERS = {offer.instance_type: offer for offer in offers_of(INSTANCE_CATALOG)}


class AwsFleet(EmulatedFleet):
    """EC2 instances, their orders reconstructed from tags and user data."""

    launch_calls = "*Instances"

    def __init__(self, fake: AwsFake) -> None:
        self.fake: AwsFake = fake

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return the fake's lock: it answers in its own threads."""
        return self.fake.lock

    def settle(self) -> None:
        self.fake.machines.settle()

    def seen(self) -> list[FleetInstance]:
        return [self._seen(machine) for machine in self.fake.machines.seen() if ACTION_ID in machine.tags]

    def reclaim(self, instance_id: str) -> datetime:
        return self.fake.machines.reclaim(instance_id)

    def _seen(self, machine: machines.FleetInstance) -> FleetInstance:
        offer, fake = f"{machine.instance_type}/{machine.zone}/spot", self.fake
        is_outbid = machine.is_spot and costs_more_than(machine.usd_per_hour_max, offer, fake.zones, fake.spot_ratio_of)
        return FleetInstance(
            instance_id=machine.instance_id,
            provider_id=provider_id_of(machine.zone, machine.instance_id),
            order=ordered(
                _OFFERS[machine.instance_type],
                machine.zone,
                CapacityType.SPOT if machine.is_spot else CapacityType.ON_DEMAND,
                machine.tags,
                (ACTION_ID, INSTALLATION, POOL, PRICE),
                base64.b64decode(machine.user_data).decode(),
            ),
            launched_at=machine.launched_at,
            ended_by_user_at=machine.ended_by_user_at,
            is_alive=machine.is_alive,
            outbid_notice_seconds=NOTICE_SECONDS if is_outbid else None,
        )


def seed(now: Callable[[], datetime], texts: Path) -> SeededCloud:
    """Return it with a launch template and a subnet in each zone; user data is written to `texts`."""
    fake = AwsFake(REGION, now=now)
    user_data = texts.with_suffix(".user-data")
    user_data.write_text(USER_DATA, encoding="utf-8")
    settings = AwsOptions(
        region=fake.region,
        launch_template="gpu",
        subnets=tuple(fake.offer_template("gpu")),
        instance_types=tuple(kind.name for kind in INSTANCE_CATALOG),
        user_data_path=str(user_data.absolute()),
    )

    @asynccontextmanager
    async def served(port: int) -> AsyncIterator[str]:
        with serving(fake, port=port) as url:  # in its own threads
            yield url

    return SeededCloud(fleet=AwsFleet(fake), catalog=INSTANCE_CATALOG, settings=settings, serving=served)
