"""Each instance of the simulated Google Cloud has a machine of the simulated cluster until it is deleted."""

from collections.abc import AsyncIterator

import pytest
from tests.support.gcp import Project, served_project
from tests.unit.simcloud.emulation import EmulationContract, Scene

pytestmark = pytest.mark.timeout(120)


class GcpScene(Scene):
    """A project with a group for each offer."""

    def __init__(self, project: Project) -> None:
        from gpu_autoscaler.simcloud.gcp.catalog import TYPES  # noqa: PLC0415 - needs googleapiclient
        from gpu_autoscaler.simcloud.gcp.fleet_emulator import GcpFleet  # noqa: PLC0415 - as the catalog

        self.project = project
        super().__init__(project, GcpFleet(project.fake), project.provider("ours"), TYPES)


@pytest.fixture
async def scene() -> AsyncIterator[GcpScene]:
    """Nothing bought yet."""
    async with served_project() as project:
        scene = GcpScene(project)
        yield scene
        await scene.driver.close()


class TestGcp(EmulationContract):
    """The inherited promises; times are exact to the millisecond."""

    refused_offers, refused_code = "g2-*", "ZONE_RESOURCE_POOL_EXHAUSTED"
    boot_seconds = 200.123456

    def launches_count(self, scene: Scene) -> int:
        assert isinstance(scene, GcpScene)
        return scene.project.fake.machines.launches_count


async def test_a_price_change_applies_to_gcp_spot_prices(scene: Scene) -> None:
    """In its zone, visible within minutes; on-demand prices are unchanged."""
    usual = {offer.key: offer.price_micro_usd_per_hour or 0 for offer in await scene.driver.offers()}
    jumped = (await scene.order()).offer
    scene.cloud.price_ratios[f"*/{jumped.zone}/spot"] = 4.0
    scene.turn(301)
    now = {offer.key: offer.price_micro_usd_per_hour for offer in await scene.driver.offers()}
    assert now == {key: price * 4 if key.endswith(f"{jumped.zone}/spot") else price for key, price in usual.items()}
    scene.cloud.price_ratios.clear()
    scene.turn(301)
    assert {offer.key: offer.price_micro_usd_per_hour for offer in await scene.driver.offers()} == usual
