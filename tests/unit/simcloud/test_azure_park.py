"""What is changed in the simulated cluster's cloud is changed in the fake Azure behind it."""

from pathlib import Path

import pytest
from tests.support.aws import TurnedClock
from tests.support.azure import served_group

from gpu_autoscaler.simcloud.azure.market import CATALOGUE
from gpu_autoscaler.simcloud.azure.park import AzureBooks
from gpu_autoscaler.simcloud.park import Park
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.world import World

pytestmark = pytest.mark.timeout(120)


class Sleepless(TurnedClock):
    """The group's clock as a world takes it."""

    factor = 1.0

    async def sleep(self, seconds: float) -> None:
        """Nobody waits here: the test turns the clock."""


async def test_a_price_jump_of_the_cluster_s_cloud_is_one_of_azure_s_spot(tmp_path: Path) -> None:
    """For the whole region, as the price list knows no zones, and seen within minutes; on demand costs what it did."""
    async with served_group(tmp_path) as group:
        world = World(Sleepless(), seed=1)
        cloud, _ = attach_cloud(world, CATALOGUE)
        world.add_controller(Park(AzureBooks(group.fake), cloud))
        driver = group.provider("ours")
        try:
            usual = {offer.key: offer.price_micro_usd_per_hour or 0 for offer in await driver.offers()}
            cloud.price_ratios["Standard_NC4as_T4_v3/*/spot"] = 4.0
            group.clock.turn(301)
            now = {offer.key: offer.price_micro_usd_per_hour for offer in await driver.offers()}
            assert now == {
                key: price * 4 if key.startswith("Standard_NC4as_T4_v3/") and key.endswith("/spot") else price
                for key, price in usual.items()
            }
            cloud.price_ratios.clear()
            group.clock.turn(301)
            assert {offer.key: offer.price_micro_usd_per_hour for offer in await driver.offers()} == usual
        finally:
            await driver.close()
