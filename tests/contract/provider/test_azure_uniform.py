"""Provider contract of the Azure driver for uniform scale sets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.provider.contract import OURS, THEIRS, Rig, order
from tests.contract.provider.desired_capacity import DesiredCapacityContract
from tests.contract.provider.test_azure import AzureRig
from tests.support.azure import REGION, Group, served_group

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.providers.azure.desired_capacity import LEDGER_TAGS_MAX, TAG_LENGTH_MAX
from gpu_autoscaler.providers.azure.translate import INSTALLATION_TAG, LEDGER_TAG
from gpu_autoscaler.providers.desired_capacity import Ledger
from gpu_autoscaler.providers.protocol import LaunchRefused, Order
from gpu_autoscaler.providers.tokens import idempotency_token
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(180)


def uniform(group: Group, name: str, *, owner: str | None = OURS, zone: str = "1", **more: object) -> None:
    """Have a uniform set of T4 machines, as a user's own tools would make it: empty, in one zone, with a tag."""
    properties = {"overprovision": False, "upgradePolicy": {"mode": "Manual"}, "virtualMachineProfile": {}}
    group.fake.scale_sets.put(
        name,
        {
            "location": REGION,
            "zones": [zone],
            "sku": {"name": "Standard_NC4as_T4_v3", "tier": "Standard", "capacity": 0},
            "tags": {} if owner is None else {INSTALLATION_TAG: owner},
            "properties": properties | more,
        },
    )


class UniformRig(AzureRig):
    """A uniform set for each of two installations, which stands for the pool `default`; ours has another pool."""

    launch_call = "VirtualMachineScaleSets_Update"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        uniform(group, "t4")
        uniform(group, "t4-zone-2", zone="2")
        uniform(group, "theirs", owner=THEIRS)
        alone = {"scale_set": None, "machine_path": None}
        self.ours = group.provider(OURS, scale_sets=("default=t4", "other=t4-zone-2"), **alone)
        self.theirs = group.provider(THEIRS, scale_sets=("default=theirs",), **alone)

    def wanted_count(self, name: str = "t4") -> int:
        """Return the desired capacity of the scale set."""
        return self.fake.scale_sets.capacity(name)

    async def stranger(self, wanted: Order) -> ProviderId:  # noqa: ARG002 - the set sells one thing
        """The number was raised by hand."""
        self.fake.scale_sets.get("t4")["sku"]["capacity"] += 1
        self.fake.scale_sets._grow("t4", 1)
        (told,) = self.fake.scale_sets.members("t4")
        return ProviderId(f"azure://{told['id']}")

    async def stock(self, wanted: Order, count: int, name: str = "t4") -> None:
        """Set the capacity of the scale set and tag it as ours."""
        body = self.fake.scale_sets.get(name)
        body["sku"]["capacity"] = count
        self.fake.scale_sets._grow(name, count)
        members = [str(member["instanceId"]) for member in self.fake.scale_sets.members(name)]
        ledger = Ledger(
            assigned={member: (ActionId(idempotency_token(OURS, ActionId(member))), "526000") for member in members}
        )
        texts = ledger.encode(TAG_LENGTH_MAX, LEDGER_TAGS_MAX, members)
        assert texts is not None, f"{count} orders of {wanted.pool} are more than the tags hold"
        body["tags"] |= {f"{LEDGER_TAG}{number}": text for number, text in enumerate(texts)}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[UniformRig]:
    """A resource group with uniform sets."""
    async with served_group(tmp_path) as group:
        made = UniformRig(group)
        yield made
        await made.ours.close()
        await made.theirs.close()


@pytest.mark.cloud(
    "azure",
    calls=(
        "VirtualMachineScaleSets_Update",
        "VirtualMachineScaleSets_DeleteInstances",
        "VirtualMachineScaleSetVMs_List",
        "AutoscaleSettings_ListByResourceGroup",
        "ActivityLogs_List",
    ),
)
class TestAzureUniform(DesiredCapacityContract):
    """The inherited promises; the fixture is the module's."""

    async def test_a_large_fleet_is_listed_completely(self, rig: Rig) -> None:
        """Over several sets of one pool: each records as many as its tags hold."""
        assert isinstance(rig, UniformRig)
        names = [f"large-{number}" for number in range(6)]
        for name in names:
            uniform(rig.group, name)
            await rig.stock(await order(rig), 335 if name == names[0] else 333, name)
        settings = tuple(f"default={name}" for name in names)
        large = rig.group.provider(OURS, scale_sets=settings, scale_set=None, machine_path=None)
        listed = await large.instances(OURS)
        await large.close()
        assert len({each.provider_id for each in listed}) == len(listed) == 2000
        assert len({each.action_id for each in listed}) == 2000


async def test_concurrent_orders_launch_one_machine_each(rig: UniformRig) -> None:
    """Each is recorded on the set with its capacity; answers are lost, and others change the set meanwhile."""
    orders = [await order(rig, f"a{number}") for number in range(5)]
    rig.fake.faults.add(Fault(kind="lost", call="VirtualMachineScaleSets_Update", left_count=2))
    for _ in range(4):
        await asyncio.gather(*(rig.ours.launch(each) for each in orders), return_exceptions=True)
    listed = await rig.ours.instances(OURS)
    assert sorted(str(each.action_id) for each in listed) == [f"a{number}" for number in range(5)]
    assert rig.wanted_count() == rig.fake.launches_count == 5


async def test_a_restart_finds_pending_orders(rig: UniformRig) -> None:
    """The capacity was raised, the answer lost, the process gone: another one finds the order on the set."""
    wanted = await order(rig)
    await rig.lose_next_answer()
    with pytest.raises(TransientError):
        await rig.ours.launch(wanted)
    alone = {"scale_set": None, "machine_path": None}
    another = rig.group.provider(OURS, scale_sets=("default=t4",), **alone)
    made = await another.launch(wanted)
    await another.close()
    assert (made.action_id, rig.wanted_count()) == (wanted.action_id, 1)


@pytest.mark.cloud("azure", errors=("killed between call and answer",))
async def test_a_used_token_never_launches_again_after_a_restart(rig: UniformRig) -> None:
    """The set's tags know the order of a machine that Azure no longer shows."""
    wanted = await order(rig)
    made = await rig.ours.launch(wanted)
    await rig.wait(30)
    rig.fake.scale_sets.delete("t4", [made.provider_id.rpartition("/")[2]])
    await rig.wait(30)
    another = rig.group.provider(OURS, scale_sets=("default=t4",), scale_set=None, machine_path=None)
    again = await another.launch(wanted)
    await another.close()
    assert (again.provider_id, again.state) == (made.provider_id, "terminated")
    assert (rig.wanted_count(), rig.fake.launches_count) == (0, 1)


async def test_a_machine_that_was_never_seen_is_not_reassigned(rig: UniformRig) -> None:
    """Its order is reported as ended in the end, launches no second one, and does not get the machine of another
    order."""
    wanted = await order(rig)
    await rig.lose_next_answer()
    with pytest.raises(TransientError):
        await rig.ours.launch(wanted)
    (told,) = rig.fake.scale_sets.members("t4")
    rig.fake.scale_sets.delete("t4", [told["instanceId"]])
    await rig.wait(30)
    another = rig.group.provider(OURS, scale_sets=("default=t4",), scale_set=None, machine_path=None)
    with pytest.raises(TransientError, match="not listed yet"):
        await another.launch(wanted)
    await rig.wait(600)
    second = await another.launch(await order(rig, "a2"))
    again = await another.launch(wanted)
    listed = {instance.action_id: instance.state for instance in await another.instances(OURS)}
    await another.close()
    assert (again.action_id, again.state) == ("a1", "terminated")
    assert (second.action_id, listed) == ("a2", {"a2": "running", "a1": "terminated"})
    assert rig.fake.launches_count == 2


async def test_a_pool_with_several_sets_uses_free_capacity(rig: UniformRig) -> None:
    """Orders spread over the sets that offer them; full ones are skipped; retries find each order in its set."""
    for name in ("t4-b", "t4-full"):
        uniform(rig.group, name, singlePlacementGroup=True)
    await rig.stock(await order(rig), 100, "t4-full")
    names = ("t4", "t4-b", "t4-full", "t4-zone-2")
    settings = {"scale_sets": tuple(f"default={name}" for name in names), "scale_set": None, "machine_path": None}
    first = rig.group.provider(OURS, **settings)
    wanted = [await order(rig, f"a{number}") for number in range(12)]
    rig.fake.faults.add(Fault(kind="lost", call="VirtualMachineScaleSets_Update", left_count=3))
    await asyncio.gather(*(first.launch(each) for each in wanted), return_exceptions=True)
    await first.close()
    second = rig.group.provider(OURS, **settings)
    made = [await second.launch(each) for each in wanted]
    far = await second.launch(await order(rig, "far", index=1))
    await second.close()
    assert len({each.provider_id for each in made}) == 12
    assert rig.wanted_count("t4") + rig.wanted_count("t4-b") == 12
    assert min(rig.wanted_count("t4"), rig.wanted_count("t4-b")) > 0
    assert (rig.wanted_count("t4-full"), rig.wanted_count("t4-zone-2")) == (100, 1)
    assert far.zone == f"{REGION}-2"


async def test_a_pool_whose_sets_are_all_full_is_refused(rig: UniformRig) -> None:
    """For lack of capacity, with the next step: nothing is written."""
    uniform(rig.group, "full", singlePlacementGroup=True)
    await rig.stock(await order(rig), 100, "full")
    provider = rig.group.provider(OURS, scale_sets=("default=full",), scale_set=None, machine_path=None)
    with pytest.raises(LaunchRefused, match=r"maximum of 100 machines; give pool default another scale set") as refused:
        await provider.launch(await order(rig))
    await provider.close()
    assert (refused.value.kind, refused.value.code) == ("capacity", "ScaleSetFull")
    assert not rig.fake.asked_of("VirtualMachineScaleSets_Update")


async def test_a_changed_set_is_read_again(rig: UniformRig) -> None:
    """412 means that somebody else was faster; a set that changes constantly is retried later."""
    rig.fake.faults.add(
        Fault(kind="refused", call="VirtualMachineScaleSets_Update", code="PreconditionFailed", left_count=1)
    )
    await rig.ours.launch(await order(rig))
    rig.fake.faults.add(Fault(kind="refused", call="VirtualMachineScaleSets_Update", code="PreconditionFailed"))
    with pytest.raises(TransientError):
        await rig.ours.launch(await order(rig, "a2"))
    rig.fake.faults.clear()
    assert rig.wanted_count() == 1


async def test_a_refusal_is_reported_after_the_order_is_removed(rig: UniformRig) -> None:
    """Azure keeps an unreachable capacity: it is lowered and read back before the refusal is raised."""
    wanted = await order(rig)
    first = await rig.ours.launch(wanted)
    await rig.refuse("*")
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch(await order(rig, "a2"))
    listed = await rig.ours.instances(OURS)
    assert (refused.value.kind, refused.value.code) == ("capacity", "ZonalAllocationFailed")
    assert [each.provider_id for each in listed] == [first.provider_id]
    assert rig.wanted_count() == 1


async def test_a_deletion_lowers_the_capacity_by_that_machine(rig: UniformRig) -> None:
    """By its id: no other ends."""
    made = [await rig.ours.launch(await order(rig, f"a{number}")) for number in range(3)]
    await rig.ours.terminate(made[0].provider_id, now=rig.now())
    await rig.wait(30)
    alive = [instance.provider_id for instance in await rig.ours.instances(OURS) if instance.state == "running"]
    assert sorted(alive) == sorted([made[1].provider_id, made[2].provider_id])
    assert rig.wanted_count() == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"overprovision": True}, "overprovisions"),
        ({"spotRestorePolicy": {"enabled": True}}, "restores spot"),
        ({"automaticRepairsPolicy": {"enabled": True}}, "automatic repairs are on"),
        ({"virtualMachineProfile": {"priority": "Spot", "evictionPolicy": "Deallocate"}}, "eviction policy to Delete"),
        ({"orchestrationMode": "Flexible"}, "orchestration mode is Flexible"),
        ({"owner": None}, "it has no owner"),
        ({"owner": THEIRS}, "names another installation"),
    ],
)
async def test_an_unusable_scale_set_gives_the_reason(rig: UniformRig, more: dict[str, Any], words: str) -> None:
    """It has no offers, and orders for its pool are refused with the same reason."""
    uniform(rig.group, "odd", **more)
    provider = rig.group.provider(OURS, scale_set=None, machine_path=None, scale_sets=("default=odd",))
    offers = await provider.offers()
    with pytest.raises(LaunchRefused, match=words) as refused:
        await provider.launch(await order(rig))
    await provider.close()
    assert not offers
    assert refused.value.kind == "configuration"


async def test_a_set_with_an_azure_autoscaler_is_not_used(rig: UniformRig) -> None:
    """Two autoscalers would undo each other's work: refused, with the setting's name."""
    target = rig.fake.id_of("virtualMachineScaleSets", "t4")
    rig.fake.autoscale_settings = [{"name": "cpu-rule", "properties": {"enabled": True, "targetResourceUri": target}}]
    with pytest.raises(LaunchRefused, match="cpu-rule also sizes it"):
        await rig.ours.launch(await order(rig, index=0))
    assert not rig.fake.asked_of("VirtualMachineScaleSets_Update")


async def test_a_machine_of_an_unconfigured_set_is_left_untouched(rig: UniformRig) -> None:
    """A provider id alone gives no permission."""
    by_name = rig.fake.id_of("virtualMachineScaleSets", "theirs/virtualMachines/0")
    with pytest.raises(PermanentError, match="left untouched"):
        await rig.ours.terminate(ProviderId(f"azure://{by_name}"), now=rig.now())
