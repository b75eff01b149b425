"""The fake AWS prepared as the cloud of a simulated cluster."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.simcloud.aws.fake import AwsFake
from gpu_autoscaler.simcloud.aws.fleet_emulator import AwsFleet
from gpu_autoscaler.simcloud.aws.server import serving
from gpu_autoscaler.simcloud.node_texts import USER_DATA
from gpu_autoscaler.simcloud.seeded import SeededCloud
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG

REGION = "us-east-1"  # offers the whole catalog but retired types


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
