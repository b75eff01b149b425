"""EC2 Fleets of type instant: all nodes of a gang or none, also if the fleet is tagged late."""

import asyncio
import re
from collections import Counter

import msgspec
import pytest
from tests.contract.provider.contract import OURS
from tests.contract.provider.launch_groups import FIRST, LaunchGroupsContract, gang, listed, names, ours
from tests.contract.provider.test_aws import AwsRig, rig_of
from tests.support.aws import Region

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.protocol import DescribesInstance, LaunchRefused
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = [pytest.mark.timeout(180), pytest.mark.cloud("aws", calls=("CreateFleet", "CreateTags"))]


class FleetRig(AwsRig):
    """The same region, with fleets switched on."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.ours = region.provider("installation-ours", fleets=True)
        self.theirs = region.provider("installation-theirs", fleets=True)


rig = rig_of(FleetRig)


class TestAwsFleets(LaunchGroupsContract):
    """The inherited promises; the fixture is the module's."""


def lose_tags(rig: FleetRig, passed_count: int = 0) -> None:
    """Kill the process between fleet and tags: at most `passed_count` tags are written."""
    rig.fake.faults.add(Fault(kind="refused", call="CreateTags", code="InternalError", passed_count=passed_count))


@pytest.mark.parametrize("written_count", [0, 1, 2])
async def test_missing_tags_are_reconstructed(rig: FleetRig, written_count: int) -> None:
    """Killed between fleet and tags: each instance has the same order before and after it is written."""
    wanted = await gang(rig)
    lose_tags(rig, written_count)
    with pytest.raises(TransientError):
        await ours(rig).launch_group(FIRST, wanted)
    before = await listed(rig)
    rig.fake.faults.clear()
    assert isinstance(rig.ours, DescribesInstance)
    alone = [await rig.ours.instance(instance.provider_id) for instance in await rig.ours.instances(OURS)]
    made = names(list(await ours(rig).launch_group(FIRST, wanted)))
    assert sorted(before) == ["t1", "t2", "t3"]
    assert names([one for one in alone if one is not None]) == before
    assert made == before == await listed(rig)
    assert rig.fake.launches_count == 3


async def test_a_failed_launch_leaves_no_write_of_tags_behind(rig: FleetRig) -> None:
    """One tag is refused, the others are written slowly: the launch fails when all have been tried, so that no later
    list or retry meets them half written."""
    wanted = await gang(rig)
    rig.fake.faults.add(Fault(kind="slow", call="CreateTags", passed_count=1, wait_seconds=0.3))
    rig.fake.faults.add(Fault(kind="refused", call="CreateTags", code="InternalError", left_count=1))
    before = asyncio.all_tasks()
    with pytest.raises(TransientError):
        await ours(rig).launch_group(FIRST, wanted)
    assert asyncio.all_tasks() == before
    assert len(rig.fake.asked_of("CreateTags")) == 3


async def test_part_of_a_fleet_is_reconstructed_alike(rig: FleetRig) -> None:
    """One order was abandoned before tags were written: the others keep theirs, and it can be terminated."""
    wanted = await gang(rig)
    lose_tags(rig)
    with pytest.raises(TransientError):
        await ours(rig).launch_group(FIRST, wanted)
    rig.fake.faults.clear()
    before = await listed(rig)
    part = names(list(await ours(rig).launch_group(FIRST, wanted[1:])))
    ended = await rig.ours.terminate(
        next(instance.provider_id for instance in await rig.ours.instances(OURS) if instance.action_id == "t1"),
        now=rig.now(),
    )
    assert part == {name: before[name] for name in ("t2", "t3")}
    assert ended is not None
    assert ended.action_id == "t1"


async def test_a_partially_listed_young_fleet_is_not_assigned(rig: FleetRig) -> None:
    """Two of three are listed: their orders are unknown, and none is listed with a wrong one."""
    wanted = await gang(rig)
    lose_tags(rig)
    with pytest.raises(TransientError):
        await ours(rig).launch_group(FIRST, wanted)
    rig.fake.faults.clear()
    before = await listed(rig)
    hidden = min(instance.provider_id.rpartition("/")[2] for instance in await rig.ours.instances(OURS))
    life = rig.fake.machines._lives[hidden]
    shown_at, life.shown_at = life.shown_at, life.shown_at.replace(year=2030)
    in_part = await rig.ours.instances(OURS)
    with pytest.raises(TransientError, match="not fully listed yet"):
        await ours(rig).launch_group(FIRST, wanted[:2])
    life.shown_at = shown_at
    assert list(in_part) == []
    assert await listed(rig) == before


async def test_a_fleet_requests_all_or_none_of_one_type(rig: FleetRig) -> None:
    """One override, MinTargetCapacity of all, and the market options and tags of RunInstances."""
    spot = next(offer for offer in await rig.ours.offers() if offer.capacity_type is CapacityType.SPOT)
    wanted = [msgspec.structs.replace(one, offer=spot) for one in await gang(rig)]
    made = await ours(rig).launch_group(FIRST, wanted)
    (call,) = rig.fake.asked_of("CreateFleet")
    asked, tags = call.parameters, call.tags("instance")
    assert {one.capacity_type for one in made} == {CapacityType.SPOT}
    assert asked["Type"] == "instant"
    assert asked["TargetCapacitySpecification.TotalTargetCapacity"] == "3"
    assert asked["SpotOptions.MinTargetCapacity"] == "3"
    assert asked["SpotOptions.SingleInstanceType"] == asked["SpotOptions.SingleAvailabilityZone"] == "true"
    assert asked["SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    assert asked["LaunchTemplateConfigs.1.Overrides.1.InstanceType"] == spot.instance_type
    assert "LaunchTemplateConfigs.1.Overrides.1.MaxPrice" not in asked
    assert len(asked["ClientToken"]) == 32
    assert tags == call.tags("volume")
    assert tags["gpu-autoscaler.io/installation"] == OURS
    assert tags["gpu-autoscaler.io/orders-0"] == "t1,t2,t3"
    assert "gpu-autoscaler.io/action-id" not in tags


async def test_a_fleet_is_launched_once_per_token(rig: FleetRig) -> None:
    """Whatever was lost or repeated, the fake counts one launch per order."""
    await rig.lose_next_answer()
    wanted = await gang(rig)
    for _ in range(3):
        try:
            await ours(rig).launch_group(FIRST, wanted)
        except TransientError:
            continue
    tokens = Counter(call.parameters["ClientToken"] for call in rig.fake.asked_of("CreateFleet"))
    assert len(tokens) == 1
    assert rig.fake.launches_count == 3


async def test_a_quota_below_the_whole_fleet_launches_none(rig: FleetRig) -> None:
    """A used token repeats its refusal even with free capacity: a new transaction succeeds."""
    rig.fake.quota_vcpus["g4dn.*"] = 8  # room for two
    wanted = await gang(rig)
    refusals = []
    for _ in range(2):
        with pytest.raises(LaunchRefused) as refused:
            await ours(rig).launch_group(FIRST, wanted)
        refusals.append((refused.value.code, refused.value.kind, refused.value.scope))
        rig.fake.quota_vcpus.clear()
    later = await gang(rig, first=7)
    made = await ours(rig).launch_group(ActionId("t7"), later)
    assert refusals == [("VcpuLimitExceeded", "quota", "region")] * 2
    assert await listed(rig) == names(list(made))


@pytest.mark.parametrize(
    ("code", "kind", "scope"),
    [
        ("InsufficientInstanceCapacity", "capacity", "offer"),
        ("UnfulfillableCapacity", "capacity", "offer"),
        ("MaxSpotInstanceCountExceeded", "quota", "region"),
    ],
)
@pytest.mark.cloud("aws", errors=("MaxSpotInstanceCountExceeded", "UnfulfillableCapacity"))
async def test_an_empty_fleet_becomes_a_refusal(rig: FleetRig, code: str, kind: str, scope: str) -> None:
    """By the error in its answer, which is not an error of the call."""
    rig.fake.faults.add(Fault(kind="refused", call="CreateFleet", code=code))
    with pytest.raises(LaunchRefused, match=code) as refused:
        await ours(rig).launch_group(FIRST, await gang(rig))
    assert (refused.value.code, refused.value.kind, refused.value.scope) == (code, kind, scope)


async def test_an_incomplete_fleet_is_terminated(rig: FleetRig) -> None:
    """Part of a gang is not kept: its instances end, and all of it is refused, also on a retry."""
    rig.fake.fleet_missing_count = 1
    wanted = await gang(rig)
    for _ in range(2):
        with pytest.raises(LaunchRefused, match="2 launched and terminated"):
            await ours(rig).launch_group(FIRST, wanted)
    await rig.wait(700)  # for as long a third might have shown late
    assert {instance.state for instance in await rig.ours.instances(OURS)} == {"terminated"}
    assert rig.fake.launches_count == 2


async def test_an_empty_answer_is_no_refusal(rig: FleetRig) -> None:
    """Neither instances nor errors on a retry: the fleet is found by its tags."""
    wanted = await gang(rig)
    made = names(list(await ours(rig).launch_group(FIRST, wanted)))
    (token,) = rig.fake._tokens
    asked, answer = rig.fake._tokens[token]
    rig.fake._tokens[token] = (asked, re.sub(rb"<fleetInstanceSet>.*</fleetInstanceSet>", b"", answer))
    assert names(list(await ours(rig).launch_group(FIRST, wanted))) == made
    assert await listed(rig) == made


async def test_a_denied_fleet_names_its_permissions(rig: FleetRig) -> None:
    """Call, actions and next step."""
    await rig.refuse("*", "permission")
    with pytest.raises(LaunchRefused, match=r"CreateFleet.*ec2:CreateFleet, ec2:RunInstances.*iam:PassRole.*doctor"):
        await ours(rig).launch_group(FIRST, await gang(rig))


async def test_ceiling_and_placement_group_apply_to_a_fleet(rig: FleetRig) -> None:
    """As for a single instance."""
    rig.fake.placement_groups["near"] = "cluster"
    provider = rig.region.provider(OURS, fleets=True, placement_groups=("default=near",), spot_ceilings=("g4dn.*=0.2",))
    spot = next(
        offer
        for offer in await provider.offers()
        if offer.capacity_type is CapacityType.SPOT and offer.instance_type == "g4dn.xlarge"
    )
    wanted = [msgspec.structs.replace(one, offer=spot) for one in await gang(rig)]
    await provider.launch_group(FIRST, wanted)
    rig.fake.spot_ratio_of = lambda _: 2.0
    with pytest.raises(LaunchRefused) as refused:
        await provider.launch_group(
            ActionId("t7"), [msgspec.structs.replace(one, offer=spot) for one in await gang(rig, first=7)]
        )
    await provider.close()
    asked = rig.fake.asked_of("CreateFleet")[0].parameters
    override = "LaunchTemplateConfigs.1.Overrides.1"
    assert (asked[f"{override}.Placement.GroupName"], asked[f"{override}.MaxPrice"]) == ("near", "0.20000")
    assert (refused.value.code, refused.value.kind) == ("SpotMaxPriceTooLow", "capacity")
    assert rig.fake.launches_count == 3


async def test_a_gang_is_limited_by_its_tags(rig: FleetRig) -> None:
    """Tags hold many action ids; a larger gang is refused before any call."""
    wanted = [
        msgspec.structs.replace(one, action_id=ActionId(f"{number:032x}"))
        for number, one in enumerate(await gang(rig, 20))
    ]
    lose_tags(rig)
    with pytest.raises(TransientError):
        await ours(rig).launch_group(wanted[0].action_id, wanted)
    rig.fake.faults.clear()
    assert sorted(await listed(rig)) == [one.action_id for one in wanted]
    tags = rig.fake.asked_of("CreateFleet")[0].tags("instance")
    assert max(map(len, tags.values())) <= 256
    assert len(tags) <= 50
    many = [msgspec.structs.replace(wanted[0], action_id=ActionId(f"{number:032x}")) for number in range(100, 400)]
    with pytest.raises(LaunchRefused, match="tags hold 280 action ids") as refused:
        await ours(rig).launch_group(many[0].action_id, many)
    assert refused.value.kind == "configuration"
    assert len(rig.fake.asked_of("CreateFleet")) == 1


async def test_orders_without_fleet_support_are_launched_singly(rig: FleetRig) -> None:
    """Without the setting, for reserved capacity and for pools with groups."""
    (wanted, *_) = await gang(rig)
    plain = rig.region.provider(OURS)
    grouped = rig.region.provider(OURS, fleets=True, groups=("default=asg",))
    reserved = msgspec.structs.replace(wanted.offer, capacity_type=CapacityType.RESERVED)
    assert ours(rig).can_launch_group("default", wanted.offer)
    assert not ours(rig).can_launch_group("default", reserved)
    assert not plain.can_launch_group("default", wanted.offer)
    assert not grouped.can_launch_group("default", wanted.offer)
    assert grouped.can_launch_group("other", wanted.offer)
    await plain.close()
    await grouped.close()


def test_settings_incompatible_with_fleets_are_named(rig: FleetRig) -> None:
    """Fleets have no user data, and need a launch template."""
    with pytest.raises(ConfigError, match=r"aws\.fleets: fleets pass no user data"):
        rig.region.provider(OURS, fleets=True, user_data_path="user-data")
    with pytest.raises(ConfigError, match=r"aws\.fleets: requires aws\.launch_template"):
        rig.region.provider(OURS, fleets=True, launch_template=None, groups=("default=asg",))
