"""Each instance of the simulated Google Cloud has a machine of the simulated cluster until it is deleted."""

from collections.abc import AsyncIterator

import pytest
from tests.support.aws import TurnedClock
from tests.support.gcp import Project, served_project

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.gcp.capacity import GcpCapacity
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.simcloud.fleet_emulator import FleetEmulator
from gpu_autoscaler.simcluster.cloud import Cloud, RefusalRule
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.instances import invoice
from gpu_autoscaler.simcluster.kinds import NODES
from gpu_autoscaler.simcluster.world import World

pytestmark = pytest.mark.timeout(120)


class Sleepless(TurnedClock):
    """The project's clock as a world takes it."""

    factor = 1.0

    async def sleep(self, seconds: float) -> None:
        """Nobody waits here: the test turns the clock."""


class Scene:
    """A project, a cluster, and the driver that buys nodes of the one for the other."""

    def __init__(self, project: Project, driver: GcpCapacity) -> None:
        from gpu_autoscaler.simcloud.gcp.catalog import TYPES  # noqa: PLC0415 - needs googleapiclient
        from gpu_autoscaler.simcloud.gcp.fleet_emulator import GcpFleet  # noqa: PLC0415 - as the catalog

        self.project = project
        self.driver = driver
        self._clock = Sleepless()
        self.world = World(self._clock, seed=1)
        self.cloud: Cloud
        self.cloud, _ = attach_cloud(self.world, TYPES)
        self.world.add_controller(FleetEmulator(GcpFleet(project.fake), self.cloud))

    async def order(self, action: str = "a1") -> Order:
        """A spot node with a label and a taint."""
        spot = next(offer for offer in await self.driver.offers() if offer.capacity_type is CapacityType.SPOT)
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
            self.project.clock.turn(seconds / 20)
            self.world.step()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """Nothing bought yet."""
    async with served_project() as project:
        driver = project.provider("ours")
        yield Scene(project, driver)
        await driver.close()


async def test_an_instance_becomes_a_node(scene: Scene) -> None:
    """With the order's labels and taints, and the provider id by which it is found again."""
    made = await scene.driver.launch(await scene.order())
    scene.turn(200)
    (node,) = scene.world.api.objects(NODES)
    assert node["spec"]["providerID"] == made.provider_id
    assert node["metadata"]["labels"]["team"] == "vision"
    assert {"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "true"} in node["spec"]["taints"]


async def test_a_terminated_instance_is_billed_by_gcp_times(scene: Scene) -> None:
    """The machine's bill equals the one from the driver's values, to the millisecond."""
    made = await scene.driver.launch(await scene.order())
    scene.turn(200.123456)
    await scene.driver.terminate(made.provider_id, now=scene.project.clock.now())
    scene.turn(60)
    (ended,) = await scene.driver.instances("ours")
    (line,) = invoice(scene.cloud.machines, scene.project.clock.now()).lines
    assert not scene.world.api.objects(NODES)
    assert (line.launched_at, line.terminated_at) == (ended.launched_at, ended.terminated_at)
    assert line.price_micro_usd_per_hour == ended.price_micro_usd_per_hour


async def test_a_reclaimed_instance_is_terminated_at_gcp(scene: Scene) -> None:
    """After a notice; the driver sees it terminated, with the same time on both sides."""
    await scene.driver.launch(await scene.order())
    scene.turn(200)
    (machine,) = scene.cloud.machines
    scene.cloud.give_notice(machine, seconds=30.0)
    scene.turn(60)
    (ended,) = await scene.driver.instances("ours")
    assert ended.state == "terminated"
    assert ended.terminated_at == machine.terminated_at


async def test_a_refusal_of_the_cluster_s_cloud_is_refused_by_gcp(scene: Scene) -> None:
    """As often as configured; afterwards the same offer can be launched."""
    scene.cloud.refuse(RefusalRule(pattern="g2-*", code="InsufficientInstanceCapacity", left_count=1, until=None))
    scene.turn(1)
    with pytest.raises(LaunchRefused, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
        await scene.driver.launch(await scene.order())
    await scene.driver.launch(await scene.order("a2"))
    assert scene.project.fake.machines.launches_count == 1


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
