"""Each instance of the simulated AWS has a machine of the simulated cluster, from launch to termination."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.aws import Region, TurnedClock, served_region

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.aws.capacity import AwsCapacity
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.simcloud.aws.fleet_emulator import AwsFleet
from gpu_autoscaler.simcloud.fleet_emulator import USER_DATA, FleetEmulator
from gpu_autoscaler.simcluster.cloud import Cloud, RefusalRule
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.instances import invoice
from gpu_autoscaler.simcluster.kinds import NODES
from gpu_autoscaler.simcluster.world import World

pytestmark = pytest.mark.timeout(120)


class Sleepless(TurnedClock):
    """The region's clock as a world takes it."""

    factor = 1.0

    async def sleep(self, seconds: float) -> None:
        """Nobody waits here: the test turns the clock."""


class Scene:
    """A region, a cluster, and the driver that buys nodes of the one for the other."""

    def __init__(self, region: Region, user_data_path: str) -> None:
        self.region = region
        self.user_data_path = user_data_path
        self.driver: AwsCapacity = region.provider("ours", user_data_path=user_data_path)
        self._clock = Sleepless()
        self.world = World(self._clock, seed=1)
        self.cloud: Cloud
        self.cloud, _ = attach_cloud(self.world)
        self.world.add_controller(FleetEmulator(AwsFleet(region.fake), self.cloud))

    async def order(self, action: str = "a1") -> Order:
        """A spot node with a label and a taint."""
        offers = sorted(await self.driver.offers(), key=lambda offer: offer.key)
        spot = next(offer for offer in offers if offer.capacity_type is CapacityType.SPOT)
        return Order(
            action_id=ActionId(action),
            installation="ours",
            pool="default",
            offer=spot,
            labels=(("team", "vision"),),
            taints=(Taint("nvidia.com/gpu", "NoSchedule", "true"),),
        )

    def turn(self, seconds: float) -> None:
        """Let both clocks pass, in steps that the cluster takes its turn in."""
        for _ in range(20):
            self._clock.turn(seconds / 20)
            self.region.clock.turn(seconds / 20)
            self.world.step()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Nothing bought yet."""
    user_data = tmp_path / "user-data"
    user_data.write_text(USER_DATA, encoding="utf-8")
    with served_region() as region:
        scene = Scene(region, str(user_data))
        yield scene
        await scene.driver.close()


async def test_an_instance_becomes_a_node(scene: Scene) -> None:
    """With the order's labels and taints, the action label, and the provider ID that identifies it."""
    made = await scene.driver.launch(await scene.order())
    scene.turn(200)
    (node,) = scene.world.api.objects(NODES)
    assert node["spec"]["providerID"] == made.provider_id
    assert node["metadata"]["labels"]["team"] == "vision"
    assert node["metadata"]["labels"]["gpu-autoscaler.io/action-id"] == "a1"
    assert {"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "true"} in node["spec"]["taints"]


async def test_a_terminated_instance_is_billed_by_aws_times(scene: Scene) -> None:
    """The machine's bill equals the one from the driver's values."""
    made = await scene.driver.launch(await scene.order())
    scene.turn(200)
    await scene.driver.terminate(made.provider_id, now=scene.region.clock.now())
    scene.turn(60)
    (ended,) = await scene.driver.instances("ours")
    (line,) = invoice(scene.cloud.machines, scene.region.clock.now()).lines
    assert not scene.world.api.objects(NODES)
    assert (line.launched_at, line.terminated_at) == (ended.launched_at, ended.terminated_at)
    assert line.price_micro_usd_per_hour == ended.price_micro_usd_per_hour


async def test_a_reclaimed_instance_is_terminated_at_aws(scene: Scene) -> None:
    """After a notice; the driver sees it terminated, with the same time on both sides."""
    await scene.driver.launch(await scene.order())
    scene.turn(200)
    (machine,) = scene.cloud.machines
    scene.cloud.give_notice(machine, seconds=30.0)
    scene.turn(60)
    (ended,) = await scene.driver.instances("ours")
    assert ended.state == "terminated"
    assert ended.terminated_at == machine.terminated_at


async def test_a_refusal_of_the_cluster_s_cloud_is_refused_by_aws(scene: Scene) -> None:
    """As often as configured; afterwards the same offer can be launched."""
    scene.cloud.refuse(RefusalRule(pattern="g4dn.*", code="InsufficientInstanceCapacity", left_count=1, until=None))
    scene.turn(1)
    wanted = await scene.order()
    with pytest.raises(LaunchRefused, match="InsufficientInstanceCapacity"):
        await scene.driver.launch(wanted)
    await scene.driver.launch(msgspec.structs.replace(wanted, action_id=ActionId("a2")))
    assert scene.region.fake.launches_count == 1


@pytest.mark.parametrize("ratio", [1.5, 4.0])
async def test_spot_above_its_ceiling_is_reclaimed(scene: Scene, ratio: float) -> None:
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
