"""Provider contract of the Google Cloud driver, against an API simulated after Google's discovery document."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, ProviderContract, Rig, Trouble, order, shown
from tests.support.gcp import Project, served_project

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.protocol import LaunchRefused, Order, RefusalKind
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(180)

REFUSED = {
    "capacity": "ZONE_RESOURCE_POOL_EXHAUSTED",
    "quota": "QUOTA_EXCEEDED",
    "permission": "forbidden",
    "configuration": "VM_EXTERNAL_IP_ACCESS_POLICY_CONSTRAINT",
}
CREATE, DELETE = "instanceGroupManagers.createInstances", "instanceGroupManagers.deleteInstances"
TROUBLE: dict[Trouble, str] = {"throttled": "rateLimitExceeded", "down": "backendError", "expired": "authError"}


class GcpRig(Rig):
    """One project, two installations of it."""

    capacity_code = REFUSED["capacity"]

    def __init__(self, project: Project) -> None:
        self.project = project
        self.fake = project.fake
        self.ours = project.provider(OURS)
        self.theirs = project.provider(THEIRS)

    def now(self) -> datetime:
        """Moves in `wait` alone."""
        return self.project.clock.now()

    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """As Google reports it: mostly with the instance, after the launch was accepted."""
        self.fake.faults.add(Fault(kind="refused", call=CREATE, offer=pattern, code=REFUSED[kind]))

    async def refuse_nothing(self) -> None:
        """All faults go."""
        self.fake.faults.clear()

    async def lose_next_answer(self) -> None:
        """Of the next call that changes something."""
        for call in (CREATE, DELETE):
            self.fake.faults.add(Fault(kind="lost", call=call, left_count=1))

    async def trouble(self, kind: Trouble) -> None:
        """Of every call."""
        self.fake.faults.add(Fault(kind="refused", code=TROUBLE[kind]))

    async def calm(self) -> None:
        """All faults go."""
        self.fake.faults.clear()

    async def show_after(self, seconds: float) -> None:
        """In lists of instances; the group knows at once."""
        self.fake.machines.shown_after_seconds = seconds

    async def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """It stops, and stays."""
        self.fake.machines.stop(provider_id.rpartition("/")[2])

    async def stock(self, wanted: Order, count: int) -> None:
        """One is launched, the others are copies of it."""
        made = await self.ours.launch(wanted)
        self.fake.machines.stock(made.provider_id.rpartition("/")[2], count - 1)

    async def stranger(self, wanted: Order) -> ProviderId:
        """Made by the group on its own, as when somebody resizes it."""
        group = next(group for group in self.fake.machines.groups.values() if group.offer_key == wanted.offer.key)
        self.fake.machines.want(group, f"{group.name}-x7k2", {})
        return ProviderId(f"gce://fake-project/{group.zone}/{group.name}-x7k2")

    async def wait(self, seconds: float) -> None:
        """At once."""
        self.project.clock.turn(seconds)


@pytest.fixture
async def rig() -> AsyncIterator[GcpRig]:
    """A project, and two installations that buy there."""
    async with served_project() as project:
        made = GcpRig(project)
        yield made
        await made.ours.close()
        await made.theirs.close()


@pytest.mark.cloud(
    "gcp",
    calls=(
        "instances.aggregatedList",
        "instances.get",
        "instanceGroupManagers.list",
        "instanceGroupManagers.listManagedInstances",
        "instanceGroupManagers.createInstances",
        "instanceGroupManagers.deleteInstances",
        "zoneOperations.list",
        "instanceTemplates.get",
        "machineTypes.get",
        "regions.get",
        "advice.capacityHistory",
        "services.skus.list",
    ),
    errors=("answer lost", "answer late", "region down", "instance dies while booting"),
)
class TestGcp(ProviderContract):
    """The inherited promises; the fixture is the module's."""


async def test_never_two_launches_for_one_token(rig: GcpRig) -> None:
    """Whatever was lost, refused or repeated: the fake counts one launch per action."""
    await rig.lose_next_answer()
    orders = [await order(rig, f"a{number}") for number in range(4)]
    for _ in range(3):
        await asyncio.gather(*(rig.ours.launch(each) for each in orders), return_exceptions=True)
    names = Counter(instance["name"] for call in rig.fake.asked_of(CREATE) for instance in call.body["instances"])
    assert len(names) == len(orders)
    assert rig.fake.machines.launches_count == len(orders)


@pytest.mark.cloud("gcp", errors=("group keeps retrying",))
async def test_a_refused_launch_is_deleted_before_it_is_reported(rig: GcpRig) -> None:
    """The group would keep trying: when capacity is back, nothing is created."""
    wanted = await order(rig)
    rig.fake.faults.add(
        Fault(kind="refused", call=CREATE, offer=wanted.offer.key, code=REFUSED["capacity"], left_count=1)
    )
    with pytest.raises(LaunchRefused):
        await rig.ours.launch(wanted)
    assert not any(group.wanted for group in rig.fake.machines.groups.values())
    await rig.wait(600)
    assert not await rig.ours.instances(OURS)
    assert rig.fake.machines.launches_count == 0


@pytest.mark.cloud("gcp", calls=("zoneOperations.get",))
async def test_an_unlisted_name_is_looked_up_by_its_operation(rig: GcpRig) -> None:
    """An accepted request that is not listed yet is waited for, and not repeated."""
    wanted = await order(rig)
    rig.fake.lists_behind_count = 2  # before it is ordered, and after
    made = await rig.ours.launch(wanted)
    (asked,) = rig.fake.asked_of("zoneOperations.get")
    assert asked.parameters["operation"].startswith("operation-")
    assert (made.action_id, len(rig.fake.asked_of(CREATE))) == (wanted.action_id, 1)


async def test_an_undecided_launch_is_continued_by_a_retry(rig: GcpRig) -> None:
    """A launch can take longer than a call: TransientError, and the retry finds the same launch."""
    rig.project.call_seconds_max = 1.0
    hasty = rig.project.provider(OURS)
    wanted = await order(rig)
    await hasty.offers()
    rig.fake.machines.decided_seconds = 60.0
    with pytest.raises(TransientError, match="the same request"):
        await hasty.launch(wanted)
    await rig.wait(90)
    made = await hasty.launch(wanted)
    await hasty.close()
    assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]
    assert len(rig.fake.asked_of(CREATE)) == 1


async def test_an_instance_has_owner_and_node_metadata(rig: GcpRig) -> None:
    """Installation, action, pool, agreed price, labels and taints, from its creation."""
    wanted = await order(rig)
    made = await rig.ours.launch(wanted)
    (machine,) = rig.fake.machines.machines.values()
    assert machine.metadata["gpu-autoscaler-installation"] == OURS
    assert machine.metadata["gpu-autoscaler-action-id"] == wanted.action_id
    assert machine.metadata["gpu-autoscaler-pool"] == wanted.pool
    assert machine.metadata["gpu-autoscaler-node-labels"] == "team=vision"
    assert machine.metadata["gpu-autoscaler-node-taints"] == "nvidia.com/gpu=true:NoSchedule"
    assert made.provider_id == f"gce://fake-project/{wanted.offer.zone}/{machine.name}"


async def test_a_restarted_driver_knows_recent_ends(rig: GcpRig) -> None:
    """From operations and the instance's name: its type, start and end; not its price."""
    made = await rig.ours.launch(await order(rig))
    await rig.wait(100)
    await rig.ours.terminate(made.provider_id, now=rig.now())
    await rig.wait(30)
    fresh = rig.project.provider(OURS)
    await fresh.offers()
    (ended,) = await fresh.instances(OURS)
    again = await fresh.launch(await order(rig))
    await fresh.close()
    assert (ended.provider_id, ended.state, ended.instance_type) == (made.provider_id, "terminated", made.instance_type)
    assert ended.launched_at == made.launched_at
    assert ended.terminated_at is not None
    assert ended.price_micro_usd_per_hour is None
    assert (again.provider_id, again.state) == (made.provider_id, "terminated")


async def test_a_deleted_preempted_instance_is_reported(rig: GcpRig) -> None:
    """Dated by the preemption's operation."""
    offers = await rig.ours.offers()
    spot = next(offer for offer in offers if offer.capacity_type is CapacityType.SPOT)
    made = await rig.ours.launch(msgspec.structs.replace(await order(rig), offer=spot))
    await rig.wait(50)
    rig.fake.machines.preempt(made.provider_id.rpartition("/")[2])
    taken_at = rig.now()
    await rig.wait(50)
    ended = await shown(rig, made.provider_id)
    assert (made.capacity_type, ended.state, ended.terminated_at) == (CapacityType.SPOT, "terminated", taken_at)


@pytest.mark.cloud("gcp", errors=("zone unreachable",))
async def test_an_unreachable_zone_fails_the_list(rig: GcpRig) -> None:
    """The answer is a success with a warning."""
    made = await rig.ours.launch(await order(rig))
    rig.fake.unseen_zones.add(made.zone)
    with pytest.raises(TransientError, match=f"zones/{made.zone} unreachable"):
        await rig.ours.instances(OURS)


async def test_credentials_that_expire_between_pages_fail_the_list(rig: GcpRig) -> None:
    """A page is missing, so there is no list at all."""
    await rig.stock(await order(rig), 501)
    call = "instances.aggregatedList"
    asked_count = len(rig.fake.asked_of(call))
    rig.fake.faults.add(Fault(kind="refused", call=call, code="authError", passed_count=1))
    with pytest.raises(TransientError, match="credentials"):
        await rig.ours.instances(OURS)
    assert len(rig.fake.asked_of(call)) == asked_count + 2


async def test_an_exhausted_quota_refuses_its_gpus_until_an_instance_ends(rig: GcpRig) -> None:
    """The project's own limit, enforced by the cloud and reported with the instance."""
    rig.fake.quota_gpus["NVIDIA_L4_GPUS"] = 1
    wanted = await order(rig)
    assert wanted.offer.key == "g2-standard-4/europe-west4-a/on-demand"
    made = await rig.ours.launch(wanted)
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch(await order(rig, "a2"))
    await rig.ours.terminate(made.provider_id, now=rig.now())
    await rig.wait(10)
    await rig.ours.launch(await order(rig, "a3"))
    assert (refused.value.kind, refused.value.scope) == ("quota", "region")


async def test_a_denied_launch_names_its_permissions(rig: GcpRig) -> None:
    """Call, permission and next step."""
    await rig.refuse("*", "permission")
    with pytest.raises(LaunchRefused, match=r"createInstances.*compute\.instanceGroupManagers\.update.*doctor"):
        await rig.ours.launch(await order(rig))


async def test_an_instance_of_another_cloud_or_project_is_left_untouched(rig: GcpRig) -> None:
    """Its provider id is enough; no call is made."""
    for name in ("aws:///eu-west-1a/i-0123", "gce://another/europe-west4-a/gpu-1"):
        with pytest.raises(PermanentError, match="is not an instance of"):
            await rig.ours.terminate(ProviderId(name), now=rig.now())
    assert not rig.fake.asked_of("instances.get")


@pytest.mark.cloud("gcp", calls=("instances.delete",))
async def test_an_instance_removed_from_its_group_can_be_terminated(rig: GcpRig) -> None:
    """It is ours, and no group knows it."""
    made = await rig.ours.launch(await order(rig))
    (machine,) = rig.fake.machines.machines.values()
    del machine.metadata["created-by"]
    await rig.ours.terminate(made.provider_id, now=rig.now())
    await rig.wait(10)
    rig.fake.machines.settle()
    assert len(rig.fake.asked_of("instances.delete")) == 1
    assert not rig.fake.machines.machines


async def test_concurrent_launches_share_reads(rig: GcpRig) -> None:
    """A gang of forty needs fewer reads of each list than that."""
    orders = [await order(rig, f"a{number}") for number in range(40)]
    made = await asyncio.gather(*(rig.ours.launch(each) for each in orders))
    assert len({each.provider_id for each in made}) == 40
    for call in ("instances.aggregatedList", "instanceGroupManagers.listManagedInstances"):
        assert len(rig.fake.asked_of(call)) < 40
