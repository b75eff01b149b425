"""What every emulated fleet does: its instances are machines of the simulated cluster, from launch to termination."""

from abc import ABC, abstractmethod

import msgspec
import pytest
from tests.support.aws import Region, TurnedClock
from tests.support.azure import Group
from tests.support.gcp import Project

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.protocol import CapacityProvider, LaunchRefused, Order
from gpu_autoscaler.simcloud.fleet_emulator import EmulatedFleet, FleetEmulator
from gpu_autoscaler.simcluster.cloud import Cloud, RefusalRule
from gpu_autoscaler.simcluster.cloud_http import attach_cloud
from gpu_autoscaler.simcluster.instances import invoice
from gpu_autoscaler.simcluster.kinds import NODES
from gpu_autoscaler.simcluster.offers import InstanceType
from gpu_autoscaler.simcluster.world import World


class Sleepless(TurnedClock):
    """The fake's clock as a world takes it."""

    factor = 1.0

    async def sleep(self, seconds: float) -> None:
        """Nobody waits here: the test turns the clock."""


class Scene:
    """A fake cloud, a cluster, and the driver that buys nodes of the one for the other."""

    def __init__(
        self,
        served: Region | Project | Group,
        fleet: EmulatedFleet,
        driver: CapacityProvider,
        types: tuple[InstanceType, ...],
    ) -> None:
        self.driver = driver
        self._clocks = (served.clock, Sleepless())
        self.world = World(self._clocks[1], seed=1)
        self.cloud: Cloud
        self.cloud, _ = attach_cloud(self.world, types)
        self.world.add_controller(FleetEmulator(fleet, self.cloud))
        self.now = served.clock.now

    async def order(self, action: str = "a1") -> Order:
        """A spot node with a label and a taint."""
        offers = sorted(await self.driver.offers(), key=lambda offer: offer.key)
        return Order(
            action_id=ActionId(action),
            installation="ours",
            pool="default",
            offer=next(offer for offer in offers if offer.capacity_type is CapacityType.SPOT),
            labels=(("team", "vision"),),
            taints=(Taint("nvidia.com/gpu", "NoSchedule", "true"),),
        )

    def turn(self, seconds: float) -> None:
        """Let both clocks pass, in steps that the cluster takes its turn in."""
        for _ in range(20):
            for clock in self._clocks:
                clock.turn(seconds / 20)
            self.world.step()


class EmulationContract(ABC):
    """The promises. A subclass has a fixture `scene`."""

    refused_offers: str  # pattern that the scene's order matches
    refused_code: str  # the cloud's word for: none is left
    boot_seconds = 200.0

    @abstractmethod
    def launches_count(self, scene: Scene) -> int:
        """How many instances the fake has launched."""

    async def test_an_instance_becomes_a_node(self, scene: Scene) -> None:
        """With the order's labels and taints, the action label, and the provider id by which it is found again."""
        made = await scene.driver.launch(await scene.order())
        scene.turn(self.boot_seconds)
        (node,) = scene.world.api.objects(NODES)
        assert node["spec"]["providerID"] == made.provider_id
        assert node["metadata"]["labels"]["team"] == "vision"
        assert node["metadata"]["labels"]["gpu-autoscaler.io/action-id"] == "a1"
        assert {"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "true"} in node["spec"]["taints"]

    async def test_a_terminated_instance_is_billed_by_the_cloud_s_times(self, scene: Scene) -> None:
        """The machine's bill equals the one from the driver's values."""
        made = await scene.driver.launch(await scene.order())
        scene.turn(self.boot_seconds)
        await scene.driver.terminate(made.provider_id, now=scene.now())
        scene.turn(60)
        (ended,) = await scene.driver.instances("ours")
        (line,) = invoice(scene.cloud.machines, scene.now()).lines
        assert not scene.world.api.objects(NODES)
        assert (line.launched_at, line.terminated_at) == (ended.launched_at, ended.terminated_at)
        assert line.price_micro_usd_per_hour == ended.price_micro_usd_per_hour

    async def test_a_reclaimed_instance_is_terminated(self, scene: Scene) -> None:
        """After a notice; the driver sees it terminated, with the same time on both sides."""
        await scene.driver.launch(await scene.order())
        scene.turn(self.boot_seconds)
        (machine,) = scene.cloud.machines
        scene.cloud.give_notice(machine, seconds=30.0)
        scene.turn(60)
        (ended,) = await scene.driver.instances("ours")
        assert ended.state == "terminated"
        assert ended.terminated_at == machine.terminated_at

    async def test_a_refusal_of_the_cluster_s_cloud_is_refused(self, scene: Scene) -> None:
        """As often as configured; afterwards the same offer can be launched."""
        code = "InsufficientInstanceCapacity"
        scene.cloud.refuse(RefusalRule(pattern=self.refused_offers, code=code, left_count=1, until=None))
        scene.turn(1)
        wanted = await scene.order()
        with pytest.raises(LaunchRefused, match=self.refused_code):
            await scene.driver.launch(wanted)
        await scene.driver.launch(msgspec.structs.replace(wanted, action_id=ActionId("a2")))
        assert self.launches_count(scene) == 1
