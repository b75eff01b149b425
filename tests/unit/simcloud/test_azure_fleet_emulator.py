"""Changes of the simulated cluster's cloud appear in the simulated Azure."""

from pathlib import Path

import pytest
from tests.support.azure import served_group
from tests.unit.simcloud.emulation import Sleepless

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.simcloud.azure.fleet_emulator import AzureFleet
from gpu_autoscaler.simcloud.azure.market import INSTANCE_CATALOG
from gpu_autoscaler.simcloud.fleet_emulator import FleetEmulator
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.world import World

pytestmark = pytest.mark.timeout(120)


async def test_a_price_change_applies_to_azure_spot_prices(tmp_path: Path) -> None:
    """For the whole region, as the price list has no zones, and visible within minutes; on-demand prices are
    unchanged."""
    async with served_group(tmp_path) as group:
        world = World(Sleepless(), seed=1)
        cloud, _ = attach_cloud(world, INSTANCE_CATALOG)
        world.add_controller(FleetEmulator(AzureFleet(group.fake), cloud))
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


def order(offer: Offer, action: str) -> Order:
    """One node of it."""
    return Order(action_id=ActionId(action), installation="ours", pool="default", offer=offer, labels=(), taints=())


async def test_spot_above_its_ceiling_is_evicted(tmp_path: Path) -> None:
    """With the eviction's 30 s notice; without a ceiling (-1) a machine is never evicted for its price."""
    async with served_group(tmp_path) as group:
        world = World(Sleepless(), seed=1)
        cloud, _ = attach_cloud(world, INSTANCE_CATALOG)
        world.add_controller(FleetEmulator(AzureFleet(group.fake), cloud))
        plain = group.provider("ours")
        spot = next(offer for offer in await plain.offers() if offer.key.endswith("/spot"))
        capped = group.provider("ours", spot_ceilings=(f"*={2 * (spot.price_micro_usd_per_hour or 0) / 1_000_000}",))
        try:
            await plain.launch(order(spot, "a1"))
            made = await capped.launch(order(spot, "a2"))
            world.step()
            assert all(machine.notice is None for machine in cloud.machines)
            cloud.price_ratios["*/spot"] = 4.0
            world.step()
            (noticed,) = (machine for machine in cloud.machines if machine.notice is not None)
            assert noticed.provider_id == made.provider_id
        finally:
            await plain.close()
            await capped.close()
