"""The fake of AWS as the nodes of a simulated cluster are bought from it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.simcloud.aws.fake import AwsFake
from gpu_autoscaler.simcloud.aws.fleet_emulator import AwsBooks
from gpu_autoscaler.simcloud.aws.server import serving
from gpu_autoscaler.simcloud.node_texts import USER_DATA
from gpu_autoscaler.simcloud.seeded import Standing
from gpu_autoscaler.simcluster.offers import CATALOGUE

REGION = "us-east-1"  # sells all of the catalogue but what AWS no longer has


def stand(now: Callable[[], datetime], texts: Path) -> Standing:
    """Return it with a launch template and a subnet in each zone; what nodes start with is written beside `texts`."""
    fake = AwsFake(REGION, now=now)
    user_data = texts.with_suffix(".user-data")
    user_data.write_text(USER_DATA, encoding="utf-8")
    settings = AwsOptions(
        region=fake.region,
        launch_template="gpu",
        subnets=tuple(fake.offer_template("gpu")),
        instance_types=tuple(kind.name for kind in CATALOGUE),
        user_data_path=str(user_data.absolute()),
    )

    @asynccontextmanager
    async def served(port: int) -> AsyncIterator[str]:
        with serving(fake, port=port) as url:  # in threads of its own
            yield url

    return Standing(books=AwsBooks(fake), catalogue=CATALOGUE, settings=settings, serving=served)
