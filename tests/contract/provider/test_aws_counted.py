"""The AWS driver keeps the promises also where a pool's group allows no LaunchInstances, and is told a number."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, order
from tests.contract.provider.counted import CountedContract
from tests.contract.provider.test_aws import AwsRig, rig_of
from tests.contract.provider.test_aws_groups import make_group
from tests.support.aws import REGION, Region

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.aws.desired_capacity import LEDGER_TAG
from gpu_autoscaler.providers.aws.permissions import CALLS
from gpu_autoscaler.providers.protocol import LaunchRefused, Order, ReplacesInstances
from gpu_autoscaler.simcloud.faults import Fault

boto3 = pytest.importorskip("boto3", reason="NOT RUN: boto3 is not installed; `make .venv/.dev` installs it")
pytestmark = pytest.mark.timeout(180)


def counted(region: Region, name: str, *, zone: int = 0, owner: str = OURS, **more: Any) -> None:  # noqa: ANN401 - AWS's words
    """Have a group of one zone, as a user's own tools would: empty, with the installation's tag, protected."""
    fitting: dict[str, Any] = {
        "VPCZoneIdentifier": region.subnets[zone],
        "NewInstancesProtectedFromScaleIn": True,
        "Tags": [{"Key": INSTALLATION, "Value": owner, "PropagateAtLaunch": True}],
    }
    make_group(region, name, **(fitting | more))


class CountedRig(AwsRig):
    """A group for each of two installations, which stands for the pool `default`; ours has another pool."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        region.fake.offer_template("group", "g4dn.xlarge")
        counted(region, "workers")
        counted(region, "workers-b", zone=1)
        counted(region, "theirs", owner=THEIRS)
        self.ours = self.provider("default=workers", "other=workers-b")
        self.theirs = self.provider("default=theirs", installation=THEIRS)

    def provider(self, *groups: str, installation: str = OURS) -> Any:  # noqa: ANN401 - as `Region.provider`
        """A driver with these groups alone."""
        return self.region.provider(installation, launch_template=None, subnets=(), desired_capacity_groups=groups)

    def wanted_count(self, name: str = "workers") -> int:
        """What the group is told."""
        return int(self.fake.groups.get(name).desired_capacity)

    def remembered(self) -> list[str]:
        """What stands in the group's tags."""
        return [tag["Value"] for tag in self.fake.groups.get("workers").tags if tag["Key"].startswith(LEDGER_TAG)]

    async def lose_next_answer(self) -> None:
        """Of the next call that changes something."""
        for call in ("SetDesiredCapacity", "TerminateInstance*"):
            self.fake.faults.add(Fault(kind="lost", call=call, left_count=1))

    async def stranger(self, wanted: Order) -> ProviderId:  # noqa: ARG002 - the group sells one thing
        """The number was raised by hand, and the instance has lost its tags."""
        self.fake.groups.set_number("workers", 1)
        (seen,) = self.fake.machines.seen()
        self.fake.machines.backend.tags[seen.instance_id].clear()
        return ProviderId(f"aws:///{seen.zone}/{seen.instance_id}")


rig = rig_of(CountedRig)


@pytest.mark.cloud(
    "aws",
    calls=("SetDesiredCapacity", "DescribeScalingActivities", "CreateOrUpdateTags", "DeleteTags"),
    errors=("failed scaling activity",),
)
class TestAwsCounted(CountedContract):
    """The inherited promises; the fixture is the module's."""


async def test_orders_at_once_are_one_instance_each(rig: CountedRig) -> None:
    """Answers are lost, tags cannot be set at first: the number is that of the orders, and each has its instance."""
    orders = [await order(rig, f"a{number}") for number in range(5)]
    rig.fake.faults.add(Fault(kind="lost", call="SetDesiredCapacity", left_count=2))
    rig.fake.faults.add(Fault(kind="refused", call="CreateTags", code="RequestLimitExceeded", left_count=2))
    rig.fake.faults.add(Fault(kind="lost", call="CreateOrUpdateTags", left_count=1))
    for _ in range(5):
        await asyncio.gather(*(rig.ours.launch(each) for each in orders), return_exceptions=True)
    listed = await rig.ours.instances(OURS)
    assert sorted(str(each.action_id) for each in listed) == [f"a{number}" for number in range(5)]
    assert rig.wanted_count() == rig.fake.launches_count == 5
    assert not "".join(rig.remembered())


async def test_a_restart_finds_what_was_ordered(rig: CountedRig) -> None:
    """Written down and not asked for yet, or asked for and the answer lost: another process buys once all the same."""
    rig.fake.faults.add(Fault(kind="refused", call="SetDesiredCapacity", code="ServiceUnavailable", left_count=1))
    rig.fake.faults.add(Fault(kind="lost", call="SetDesiredCapacity", left_count=1))
    wanted = await order(rig)
    for _ in range(2):
        with pytest.raises(TransientError):
            await rig.ours.launch(wanted)
        assert any("+a1/" in text for text in rig.remembered())
    another = rig.provider("default=workers")
    made = await another.launch(wanted)
    await another.close()
    assert (made.action_id, rig.wanted_count(), rig.fake.launches_count) == (wanted.action_id, 1, 1)


async def test_a_refusal_is_told_when_nothing_stands_any_more(rig: CountedRig) -> None:
    """The group would go on trying: its number is lowered again and read back, the order forgotten, and then told."""
    first = await rig.ours.launch(await order(rig))
    await rig.refuse("*")
    with pytest.raises(LaunchRefused, match="sufficient capacity") as refused:
        await rig.ours.launch(await order(rig, "a2"))
    await rig.refuse_nothing()
    assert (refused.value.kind, refused.value.code) == ("capacity", "InsufficientInstanceCapacity")
    assert rig.wanted_count() == 1
    assert not "".join(rig.remembered())
    assert rig.fake.groups.heal() == 0
    assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [first.provider_id]


async def test_an_old_failure_is_no_refusal(rig: CountedRig) -> None:
    """What failed before the order says nothing of it: the cloud is slow, and asked again."""
    await rig.refuse("*")
    with pytest.raises(LaunchRefused):
        await rig.ours.launch(await order(rig))
    await rig.refuse_nothing()
    await rig.wait(1)
    await rig.show_after(60)
    with pytest.raises(TransientError, match="does not show yet"):
        await rig.ours.launch(await order(rig, "a2"))


async def test_what_is_there_already_is_no_newcomer(rig: CountedRig) -> None:
    """Instances of before the first order stay whose they are, and one more is made."""
    rig.fake.groups.set_number("workers", 2)
    before = {seen.instance_id for seen in rig.fake.machines.seen()}
    made = await rig.ours.launch(await order(rig))
    assert made.provider_id.rpartition("/")[2] not in before
    assert rig.wanted_count() == 3
    assert {instance.action_id for instance in await rig.ours.instances(OURS)} == {"a1", None}


async def test_what_a_group_replaces_of_itself_serves_the_order_that_stands(rig: CountedRig) -> None:
    """A member died and its successor is on its way: that one is the order's, and no third is bought."""
    first = await rig.ours.launch(await order(rig))
    rig.fake.machines.reclaim(first.provider_id.rpartition("/")[2])
    group = rig.fake.groups.get("workers")
    group.instance_states = []  # the group has seen it, and not yet made the successor
    rig.fake.groups.heal()
    await rig.ours.launch(await order(rig, "a2"))
    alive = [instance for instance in await rig.ours.instances(OURS) if instance.state in ("pending", "running")]
    assert len(alive) == rig.wanted_count()
    assert "a2" in {each.action_id for each in alive}


async def test_down_by_name_and_out_of_the_group_at_a_notice(rig: CountedRig) -> None:
    """The number falls by the one that goes, and by the one that is taken; nobody else goes."""
    assert isinstance(rig.ours, ReplacesInstances)
    made = [await rig.ours.launch(await order(rig, f"a{number}")) for number in range(3)]
    await rig.ours.terminate(made[0].provider_id, now=rig.now())
    await rig.ours.detach(made[1].provider_id)
    await rig.wait(30)
    alive = {instance.action_id for instance in await rig.ours.instances(OURS) if instance.state == "running"}
    assert (alive, rig.wanted_count()) == ({"a1", "a2"}, 1)


async def test_a_group_s_maximum_is_ours(rig: CountedRig) -> None:
    """No number above it is ever told, and the refusal names it."""
    rig.fake.groups.get("workers").max_size = 1
    await rig.ours.launch(await order(rig))
    asked_count = len(rig.fake.asked_of("SetDesiredCapacity"))
    with pytest.raises(LaunchRefused, match="MaxSize of 1") as refused:
        await rig.ours.launch(await order(rig, "a2"))
    assert refused.value.kind == "configuration"
    assert len(rig.fake.asked_of("SetDesiredCapacity")) == asked_count


async def test_a_number_that_may_not_be_set_leaves_nothing_behind(rig: CountedRig) -> None:
    """The right is missing: told with the right's name, and the order does not stand any more."""
    rig.fake.faults.add(Fault(kind="refused", call="SetDesiredCapacity", code="AccessDenied"))
    with pytest.raises((LaunchRefused, TransientError), match="autoscaling:SetDesiredCapacity"):
        await rig.ours.launch(await order(rig))
    assert rig.wanted_count() == 0
    assert not "".join(rig.remembered())


async def test_few_rights_are_enough(rig: CountedRig, tmp_path: Path) -> None:
    """Those that cluster-autoscaler's users grant, and to write tags: what a group buys is told by its tags, what that
    costs by a file."""
    granted = {
        "DescribeAutoScalingGroups",
        "SetDesiredCapacity",
        "TerminateInstanceInAutoScalingGroup",
        "DescribeInstances",
        "DescribeSpotPriceHistory",
        "CreateOrUpdateTags",
        "DeleteTags",
        "CreateTags",
    }
    path = tmp_path / "prices.json"
    path.write_text('{"g4dn.xlarge/*/on-demand": 0.526}', encoding="utf-8")
    label = "k8s.io/cluster-autoscaler/node-template/label/"
    tags = {
        INSTALLATION: OURS,
        f"{label}node.kubernetes.io/instance-type": "g4dn.xlarge",
        f"{label}gpu-autoscaler.io/capacity-type": "on-demand",
    }
    told = [{"Key": key, "Value": value, "PropagateAtLaunch": True} for key, value in tags.items()]
    counted(rig.region, "poor", Tags=told)
    launches = {"RunInstances", "LaunchInstances"}  # a fault of these keeps the fake's group from making any
    for call in CALLS.keys() - granted - launches:
        rig.fake.faults.add(Fault(kind="refused", call=call, code="AccessDenied"))
    provider = rig.region.provider(
        OURS, launch_template=None, subnets=(), desired_capacity_groups=("default=poor",), prices_path=str(path)
    )
    (offer,) = await provider.offers()
    wanted = Order(action_id=ActionId("a1"), installation=OURS, pool="default", offer=offer, labels=(), taints=())
    made = await provider.launch(wanted)
    await provider.terminate(made.provider_id, now=rig.now())
    await rig.wait(30)
    (ended,) = await provider.instances(OURS)
    await provider.close()
    assert (offer.key, offer.price_micro_usd_per_hour) == ("g4dn.xlarge/eu-west-1a/on-demand", 526_000)
    assert (ended.action_id, ended.state, rig.wanted_count("poor")) == ("a1", "terminated", 0)
    assert not any(rig.fake.asked_of(call) for call in launches)


@pytest.mark.cloud("aws", calls=("DescribeLaunchConfigurations",))
async def test_a_group_with_a_launch_configuration_is_bought_from(rig: CountedRig) -> None:
    """AWS launches nothing by order from it, so it is told a number; spot is what has a price for spot."""
    keys = {"aws_access_key_id": "fake", "aws_secret_access_key": "fake"}
    client = boto3.client("autoscaling", region_name=REGION, endpoint_url=rig.region.url, **keys)
    client.create_launch_configuration(
        LaunchConfigurationName="old", ImageId="ami-00000000000000000", InstanceType="g5.xlarge", SpotPrice="1.0"
    )
    client.create_auto_scaling_group(
        AutoScalingGroupName="old",
        LaunchConfigurationName="old",
        MinSize=0,
        MaxSize=9,
        VPCZoneIdentifier=rig.region.subnets[0],
        NewInstancesProtectedFromScaleIn=True,
        Tags=[{"Key": INSTALLATION, "Value": OURS, "PropagateAtLaunch": True}],
    )
    client.close()
    provider = rig.provider("default=old")
    (offer,) = await provider.offers()
    made = await provider.launch(msgspec.structs.replace(await order(rig), offer=offer))
    await provider.close()
    assert offer.key == "g5.xlarge/eu-west-1a/spot"
    assert made.capacity_type is CapacityType.SPOT


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"VPCZoneIdentifier": None}, "several zones"),
        ({"NewInstancesProtectedFromScaleIn": False}, "scale-in"),
        ({"Tags": []}, "lacks the tag"),
    ],
)
async def test_a_group_that_cannot_be_told_a_number_says_why(rig: CountedRig, more: dict[str, Any], words: str) -> None:
    """It sells nothing, and an order for its pool is refused with the same words."""
    if "VPCZoneIdentifier" in more:
        more = {"VPCZoneIdentifier": ",".join(rig.region.subnets)}
    counted(rig.region, "odd", **more)
    provider = rig.provider("default=odd")
    offers = await provider.offers()
    with pytest.raises(LaunchRefused, match=words) as refused:
        await provider.launch(await order(rig))
    await provider.close()
    assert not offers
    assert refused.value.kind == "configuration"


async def test_an_instance_of_a_group_that_nobody_ordered_is_left_alone(rig: CountedRig) -> None:
    """A provider id alone gives no right."""
    by_hand = await rig.stranger(await order(rig))
    with pytest.raises(PermanentError, match="left untouched"):
        await rig.ours.terminate(by_hand, now=rig.now())


async def test_an_order_that_nobody_asks_for_any_more_buys_nothing(rig: CountedRig) -> None:
    """It was given back while the group could neither make it nor say why; the next order takes its place."""
    await rig.refuse("*")
    rig.fake.faults.add(Fault(kind="refused", call="DescribeScalingActivities", code="AccessDenied"))
    with pytest.raises(TransientError):
        await rig.ours.launch(await order(rig))
    await rig.refuse_nothing()
    await rig.wait(3601)
    wanted = await order(rig, "a2")
    with pytest.raises(TransientError, match="does not show yet"):
        await rig.ours.launch(wanted)
    rig.fake.groups.heal()
    made = await rig.ours.launch(wanted)
    assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]
    assert (made.action_id, rig.wanted_count()) == ("a2", 1)
    assert not "".join(rig.remembered())
