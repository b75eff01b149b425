"""The Azure driver keeps the promises also where machines come from a uniform scale set, which is told a number."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.provider.contract import OURS, THEIRS, Rig, order
from tests.contract.provider.counted import CountedContract
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
        """What the set is told."""
        return self.fake.scale_sets.capacity(name)

    async def foreign_member(self, wanted: Order) -> ProviderId:  # noqa: ARG002 - the set sells one thing
        """The number was raised by hand."""
        self.fake.scale_sets.get("t4")["sku"]["capacity"] += 1
        self.fake.scale_sets._grow("t4", 1)
        (told,) = self.fake.scale_sets.members("t4")
        return ProviderId(f"azure://{told['id']}")

    async def stock(self, wanted: Order, count: int, name: str = "t4") -> None:
        """The set was told the number, and its tags say whose they are."""
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
class TestAzureUniform(CountedContract):
    """The inherited promises; the fixture is the module's."""

    async def test_a_large_fleet_is_listed_whole(self, rig: Rig) -> None:
        """As many sets of one pool as it takes: each remembers as many as its tags hold."""
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


async def test_orders_at_once_are_one_machine_each(rig: UniformRig) -> None:
    """Each is written on the set with its number; answers are lost, and the set is changed by others meanwhile."""
    orders = [await order(rig, f"a{number}") for number in range(5)]
    rig.fake.faults.add(Fault(kind="lost", call="VirtualMachineScaleSets_Update", left_count=2))
    for _ in range(4):
        await asyncio.gather(*(rig.ours.launch(each) for each in orders), return_exceptions=True)
    listed = await rig.ours.instances(OURS)
    assert sorted(str(each.action_id) for each in listed) == [f"a{number}" for number in range(5)]
    assert rig.wanted_count() == rig.fake.launches_count == 5


async def test_a_restart_finds_what_was_ordered(rig: UniformRig) -> None:
    """The number was raised, the answer lost, the process gone: another one finds the order on the set."""
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
async def test_a_used_token_never_buys_again_after_a_restart(rig: UniformRig) -> None:
    """The set's tags know whose the machine was, that Azure shows no more."""
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


async def test_a_machine_that_nobody_has_seen_is_nobody_else_s(rig: UniformRig) -> None:
    """The answer was lost, the process killed, the machine taken before anybody looked: its order is told as ended in
    the end, buys no second one, and does not get the machine of the next order.
    """
    wanted = await order(rig)
    await rig.lose_next_answer()
    with pytest.raises(TransientError):
        await rig.ours.launch(wanted)
    (told,) = rig.fake.scale_sets.members("t4")
    rig.fake.scale_sets.delete("t4", [told["instanceId"]])
    await rig.wait(30)
    another = rig.group.provider(OURS, scale_sets=("default=t4",), scale_set=None, machine_path=None)
    with pytest.raises(TransientError, match="does not show yet"):
        await another.launch(wanted)
    await rig.wait(600)
    second = await another.launch(await order(rig, "a2"))
    again = await another.launch(wanted)
    listed = {instance.action_id: instance.state for instance in await another.instances(OURS)}
    await another.close()
    assert (again.action_id, again.state) == ("a1", "terminated")
    assert (second.action_id, listed) == ("a2", {"a2": "running", "a1": "terminated"})
    assert rig.fake.launches_count == 2


async def test_a_pool_of_several_sets_buys_where_there_is_room(rig: UniformRig) -> None:
    """Orders spread over the sets that sell their offer; a full one is passed over; a lost answer and a restart find
    each order in the set that it was written on; another zone's orders go to that zone's set.
    """
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
    """For want of capacity, with the next step: nothing is written on them."""
    uniform(rig.group, "full", singlePlacementGroup=True)
    await rig.stock(await order(rig), 100, "full")
    provider = rig.group.provider(OURS, scale_sets=("default=full",), scale_set=None, machine_path=None)
    with pytest.raises(LaunchRefused, match=r"no more; give pool default another in azure\.scale_sets") as refused:
        await provider.launch(await order(rig))
    await provider.close()
    assert (refused.value.kind, refused.value.code) == ("capacity", "ScaleSetFull")
    assert not rig.fake.asked_of("VirtualMachineScaleSets_Update")


async def test_a_changed_set_is_read_again_once(rig: UniformRig) -> None:
    """412 says that somebody was faster; a set that never rests is asked again later."""
    rig.fake.faults.add(
        Fault(kind="refused", call="VirtualMachineScaleSets_Update", code="PreconditionFailed", left_count=1)
    )
    await rig.ours.launch(await order(rig))
    rig.fake.faults.add(Fault(kind="refused", call="VirtualMachineScaleSets_Update", code="PreconditionFailed"))
    with pytest.raises(TransientError):
        await rig.ours.launch(await order(rig, "a2"))
    rig.fake.faults.clear()
    assert rig.wanted_count() == 1


async def test_a_refusal_is_told_when_nothing_stands_any_more(rig: UniformRig) -> None:
    """Azure keeps the number that it could not reach: lowered again, read back, and only then told."""
    wanted = await order(rig)
    first = await rig.ours.launch(wanted)
    await rig.refuse("*")
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch(await order(rig, "a2"))
    listed = await rig.ours.instances(OURS)
    assert (refused.value.kind, refused.value.code) == ("capacity", "ZonalAllocationFailed")
    assert [each.provider_id for each in listed] == [first.provider_id]
    assert rig.wanted_count() == 1


async def test_an_end_lowers_the_number_by_that_machine(rig: UniformRig) -> None:
    """By its name: nobody else goes."""
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
        ({"spotRestorePolicy": {"enabled": True}}, "restore spot"),
        ({"automaticRepairsPolicy": {"enabled": True}}, "automatic repairs are on"),
        ({"virtualMachineProfile": {"priority": "Spot", "evictionPolicy": "Deallocate"}}, "eviction policy to Delete"),
        ({"orchestrationMode": "Flexible"}, "orchestration is Flexible"),
        ({"owner": None}, "nobody's installation"),
        ({"owner": THEIRS}, "names another installation"),
    ],
)
async def test_a_set_that_cannot_be_bought_from_says_why(rig: UniformRig, more: dict[str, Any], words: str) -> None:
    """It sells nothing, and an order for its pool is refused with the same words."""
    uniform(rig.group, "odd", **more)
    provider = rig.group.provider(OURS, scale_set=None, machine_path=None, scale_sets=("default=odd",))
    offers = await provider.offers()
    with pytest.raises(LaunchRefused, match=words) as refused:
        await provider.launch(await order(rig))
    await provider.close()
    assert not offers
    assert refused.value.kind == "configuration"


async def test_a_set_that_azure_scales_is_not_written_to(rig: UniformRig) -> None:
    """Two autoscalers would undo each other's work: told, by the setting's name."""
    target = rig.fake.id_of("virtualMachineScaleSets", "t4")
    rig.fake.autoscale_settings = [{"name": "cpu-rule", "properties": {"enabled": True, "targetResourceUri": target}}]
    with pytest.raises(LaunchRefused, match="cpu-rule changes its number as well"):
        await rig.ours.launch(await order(rig, index=0))
    assert not rig.fake.asked_of("VirtualMachineScaleSets_Update")


async def test_a_machine_of_a_set_that_is_not_ours_to_name_is_left_alone(rig: UniformRig) -> None:
    """A provider id alone gives no right."""
    by_name = rig.fake.id_of("virtualMachineScaleSets", "theirs/virtualMachines/0")
    with pytest.raises(PermanentError, match="left untouched"):
        await rig.ours.terminate(ProviderId(f"azure://{by_name}"), now=rig.now())
