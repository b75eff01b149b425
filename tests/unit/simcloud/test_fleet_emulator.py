"""Each instance of the simulated AWS has a machine of the simulated cluster, from launch to termination."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.aws import Region, served_region
from tests.unit.simcloud.emulation import EmulationContract, Scene

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.simcloud.aws.fleet_emulator import AwsFleet
from gpu_autoscaler.simcloud.fleet_emulator import USER_DATA
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG

pytestmark = pytest.mark.timeout(120)


class AwsScene(Scene):
    """A region, whose user data has labels and taints."""

    def __init__(self, region: Region, user_data_path: str) -> None:
        self.region = region
        self.user_data_path = user_data_path
        driver = region.provider("ours", user_data_path=user_data_path)
        super().__init__(region, AwsFleet(region.fake), driver, INSTANCE_CATALOG)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[AwsScene]:
    """Nothing bought yet."""
    user_data = tmp_path / "user-data"
    user_data.write_text(USER_DATA, encoding="utf-8")
    with served_region() as region:
        scene = AwsScene(region, str(user_data))
        yield scene
        await scene.driver.close()


class TestAws(EmulationContract):
    """The inherited promises."""

    refused_offers, refused_code = "g4dn.*", "InsufficientInstanceCapacity"

    def launches_count(self, scene: Scene) -> int:
        assert isinstance(scene, AwsScene)
        return scene.region.fake.launches_count


@pytest.mark.parametrize("ratio", [1.5, 4.0])
async def test_spot_above_its_ceiling_is_reclaimed(scene: AwsScene, ratio: float) -> None:
    """With an interruption notice; below its ceiling, or without one, an instance stays."""
    order = await scene.order()
    usual = order.offer.price_micro_usd_per_hour
    assert usual is not None
    capped = scene.region.provider(
        "ours", user_data_path=scene.user_data_path, spot_ceilings=(f"*={2 * usual / 1_000_000}",)
    )
    await scene.driver.launch(order)
    made = await capped.launch(msgspec.structs.replace(order, action_id=ActionId("a2")))
    scene.turn(200)
    scene.cloud.price_ratios[order.offer.key] = ratio
    scene.turn(1)
    noticed = {machine.provider_id for machine in scene.cloud.machines if machine.notice is not None}
    assert noticed == ({made.provider_id} if ratio > 2 else set())
    scene.turn(180)
    states = {instance.action_id: instance.state for instance in await scene.driver.instances("ours")}
    assert states == {"a1": "running", "a2": "terminated" if ratio > 2 else "running"}
    await capped.close()
