"""Provider contract of the AWS driver for groups that are scaled by desired capacity."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, order
from tests.contract.provider.desired_capacity import DesiredCapacityContract
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


class CapacityRig(AwsRig):
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
        """Return the desired capacity of the group."""
        return int(self.fake.groups.get(name).desired_capacity)

    def remembered(self) -> list[str]:
        """Return the tags of the group."""
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


rig = rig_of(CapacityRig)


@pytest.mark.cloud(
    "aws",
    calls=("SetDesiredCapacity", "DescribeScalingActivities", "CreateOrUpdateTags", "DeleteTags"),
    errors=("failed scaling activity",),
)
class TestAwsDesiredCapacity(DesiredCapacityContract):
    """The inherited promises; the fixture is the module's."""


async def test_concurrent_orders_launch_one_instance_each(rig: CapacityRig) -> None:
    """Despite lost answers and late tags: the capacity matches the orders, and each has its instance."""
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


async def test_a_restart_finds_pending_orders(rig: CapacityRig) -> None:
    """Recorded and not requested yet, or requested with a lost answer: another process launches once."""
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


async def test_a_refusal_is_reported_after_the_order_is_removed(rig: CapacityRig) -> None:
    """The group would retry: its capacity is lowered and read back, the order removed, then the refusal raised."""
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


async def test_a_failure_before_the_order_is_no_refusal(rig: CapacityRig) -> None:
    """Failures before the order say nothing about it: the cloud is slow, and the order is retried."""
    await rig.refuse("*")
    with pytest.raises(LaunchRefused):
        await rig.ours.launch(await order(rig))
    await rig.refuse_nothing()
    await rig.wait(1)
    await rig.show_after(60)
    with pytest.raises(TransientError, match="not listed yet"):
        await rig.ours.launch(await order(rig, "a2"))


async def test_existing_instances_are_not_assigned_to_orders(rig: CapacityRig) -> None:
    """Instances from before the first order stay foreign, and one more is launched."""
    rig.fake.groups.set_number("workers", 2)
    before = {seen.instance_id for seen in rig.fake.machines.seen()}
    made = await rig.ours.launch(await order(rig))
    assert made.provider_id.rpartition("/")[2] not in before
    assert rig.wanted_count() == 3
    assert {instance.action_id for instance in await rig.ours.instances(OURS)} == {"a1", None}


async def test_a_group_s_own_replacement_serves_the_pending_order(rig: CapacityRig) -> None:
    """A member died and its successor is coming: it is the order's, and no third one is launched."""
    first = await rig.ours.launch(await order(rig))
    rig.fake.machines.reclaim(first.provider_id.rpartition("/")[2])
    group = rig.fake.groups.get("workers")
    group.instance_states = []  # the group has seen it, and not yet made the successor
    rig.fake.groups.heal()
    await rig.ours.launch(await order(rig, "a2"))
    alive = [instance for instance in await rig.ours.instances(OURS) if instance.state in ("pending", "running")]
    assert len(alive) == rig.wanted_count()
    assert "a2" in {each.action_id for each in alive}


async def test_instances_are_terminated_by_id_and_detached_at_a_notice(rig: CapacityRig) -> None:
    """The capacity falls by the terminated and by the detached one; no other ends."""
    assert isinstance(rig.ours, ReplacesInstances)
    made = [await rig.ours.launch(await order(rig, f"a{number}")) for number in range(3)]
    await rig.ours.terminate(made[0].provider_id, now=rig.now())
    await rig.ours.detach(made[1].provider_id)
    await rig.wait(30)
    alive = {instance.action_id for instance in await rig.ours.instances(OURS) if instance.state == "running"}
    assert (alive, rig.wanted_count()) == ({"a1", "a2"}, 1)


async def test_a_group_s_max_size_limits_orders(rig: CapacityRig) -> None:
    """No capacity above it is ever set, and the refusal names it."""
    rig.fake.groups.get("workers").max_size = 1
    await rig.ours.launch(await order(rig))
    asked_count = len(rig.fake.asked_of("SetDesiredCapacity"))
    with pytest.raises(LaunchRefused, match="MaxSize of 1") as refused:
        await rig.ours.launch(await order(rig, "a2"))
    assert refused.value.kind == "configuration"
    assert len(rig.fake.asked_of("SetDesiredCapacity")) == asked_count


async def test_a_denied_capacity_change_removes_the_order(rig: CapacityRig) -> None:
    """The refusal names the missing permission, and the order is not pending any more."""
    rig.fake.faults.add(Fault(kind="refused", call="SetDesiredCapacity", code="AccessDenied"))
    with pytest.raises((LaunchRefused, TransientError), match="autoscaling:SetDesiredCapacity"):
        await rig.ours.launch(await order(rig))
    assert rig.wanted_count() == 0
    assert not "".join(rig.remembered())


async def test_minimal_permissions_are_enough(rig: CapacityRig, tmp_path: Path) -> None:
    """Those of cluster-autoscaler plus writing tags: the offer comes from tags, the price from a file."""
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
async def test_a_group_with_a_launch_configuration_is_usable(rig: CapacityRig) -> None:
    """LaunchInstances does not support it, so it is sized by desired capacity; spot is derived from its spot price."""
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
        ({"Tags": []}, "lacks tag"),
    ],
)
async def test_a_group_unfit_for_desired_capacity_gives_the_reason(
    rig: CapacityRig, more: dict[str, Any], words: str
) -> None:
    """It has no offers, and orders for its pool are refused with the same reason."""
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


async def test_an_unordered_instance_of_a_group_is_left_untouched(rig: CapacityRig) -> None:
    """A provider id alone gives no permission."""
    by_hand = await rig.stranger(await order(rig))
    with pytest.raises(PermanentError, match="left untouched"):
        await rig.ours.terminate(by_hand, now=rig.now())


async def test_an_abandoned_order_launches_nothing(rig: CapacityRig) -> None:
    """Abandoned while the group could neither launch nor say why; the next order takes its place."""
    await rig.refuse("*")
    rig.fake.faults.add(Fault(kind="refused", call="DescribeScalingActivities", code="AccessDenied"))
    with pytest.raises(TransientError):
        await rig.ours.launch(await order(rig))
    await rig.refuse_nothing()
    await rig.wait(3601)
    wanted = await order(rig, "a2")
    with pytest.raises(TransientError, match="not listed yet"):
        await rig.ours.launch(wanted)
    rig.fake.groups.heal()
    made = await rig.ours.launch(wanted)
    assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]
    assert (made.action_id, rig.wanted_count()) == ("a2", 1)
    assert not "".join(rig.remembered())
