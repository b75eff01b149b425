"""Provider contract of the AWS driver for Auto Scaling groups."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, ProviderContract, order
from tests.contract.provider.test_aws import AwsRig, rig_of
from tests.support.aws import REGION, Region

from gpu_autoscaler.model.errors import ConfigError, PermanentError, TransientError
from gpu_autoscaler.model.labels import INSTALLATION
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint
from gpu_autoscaler.providers.aws.options import AwsOptions, validate_options
from gpu_autoscaler.providers.protocol import LaunchRefused, ReplacesInstances
from gpu_autoscaler.simcloud.faults import Fault

boto3 = pytest.importorskip("boto3", reason="NOT RUN: boto3 is not installed; `make .venv/.dev` installs it")
pytestmark = pytest.mark.timeout(180)


def make_group(region: Region, name: str = "gpu-workers", *, template: str = "group", **more: Any) -> None:  # noqa: ANN401 - AWS's words
    """Have a group, as a user's own tools would: empty, of three zones, with the installation's tag."""
    fitting: dict[str, Any] = {
        "MinSize": 0,
        "MaxSize": 3000,
        "LaunchTemplate": {"LaunchTemplateName": template},
        "VPCZoneIdentifier": ",".join(region.subnets),
        "Tags": [{"Key": INSTALLATION, "Value": OURS, "PropagateAtLaunch": True}],
    }
    if "MixedInstancesPolicy" in more:
        del fitting["LaunchTemplate"]
    keys = {"aws_access_key_id": "fake", "aws_secret_access_key": "fake"}
    client = boto3.client("autoscaling", region_name=REGION, endpoint_url=region.url, **keys)
    client.create_auto_scaling_group(AutoScalingGroupName=name, **(fitting | more))
    client.close()


class GroupRig(AwsRig):
    """A group for each of two installations, of T4 nodes on demand, which stands for the pool `default`."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        region.fake.offer_template("group", "g4dn.xlarge")
        make_group(region)
        make_group(region, "theirs", Tags=[])
        self.ours = region.provider(OURS, launch_template=None, subnets=(), groups=("default=gpu-workers",))
        self.theirs = region.provider(THEIRS, launch_template=None, subnets=(), groups=("default=theirs",))

    def desired_count(self) -> int:
        """What our group wants."""
        return int(self.fake.groups.get("gpu-workers").desired_capacity)


rig = rig_of(GroupRig)


@pytest.mark.cloud(
    "aws",
    calls=(
        "DescribeAutoScalingGroups",
        "DescribeLaunchTemplateVersions",
        "LaunchInstances",
        "CreateTags",
        "TerminateInstanceInAutoScalingGroup",
    ),
)
class TestAwsGroups(ProviderContract):
    """The inherited promises; the fixture is the module's."""


async def test_a_group_offers_its_type_in_its_zones(rig: GroupRig) -> None:
    """Under its own purchase option, and nothing else."""
    assert sorted(offer.key for offer in await rig.ours.offers()) == [
        f"g4dn.xlarge/eu-west-1{zone}/on-demand" for zone in "abc"
    ]


async def test_groups_grow_by_order_and_shrink_by_id(rig: GroupRig) -> None:
    """The desired capacity follows launches and terminations and is never set."""
    made = [await rig.ours.launch(await order(rig, f"a{number}", index=number)) for number in range(3)]
    grown = rig.desired_count()
    await rig.ours.terminate(made[1].provider_id, now=rig.now())
    await rig.wait(30)
    assert (grown, rig.desired_count()) == (3, 2)
    assert {each.zone for each in made} == {"eu-west-1a", "eu-west-1b", "eu-west-1c"}
    living = [instance.provider_id for instance in await rig.ours.instances(OURS) if instance.state == "running"]
    assert sorted(living) == sorted([made[0].provider_id, made[2].provider_id])
    assert not rig.fake.asked_of("SetDesiredCapacity")
    assert not rig.fake.asked_of("TerminateInstances")


async def test_never_two_launches_for_one_token_of_a_group(rig: GroupRig) -> None:
    """Despite lost answers and late tags: one instance per action, each with its tag."""
    orders = [await order(rig, f"a{number}") for number in range(3)]
    rig.fake.faults.add(Fault(kind="lost", call="LaunchInstances", left_count=2))
    rig.fake.faults.add(Fault(kind="refused", call="CreateTags", code="RequestLimitExceeded", left_count=2))
    for _ in range(4):
        await asyncio.gather(*(rig.ours.launch(each) for each in orders), return_exceptions=True)
    tokens = Counter(call.parameters["ClientToken"] for call in rig.fake.asked_of("LaunchInstances"))
    listed = await rig.ours.instances(OURS)
    assert len(tokens) == rig.fake.launches_count == rig.desired_count() == len(orders)
    assert sorted(str(each.action_id) for each in listed) == ["a0", "a1", "a2"]


async def test_a_spot_group_launches_spot(rig: GroupRig) -> None:
    """By its launch template."""
    rig.fake.offer_template("spot", "g5.xlarge", is_spot=True)
    make_group(rig.region, "spot-workers", template="spot")
    provider = rig.region.provider(OURS, launch_template=None, subnets=(), groups=("default=spot-workers",))
    offers = sorted(await provider.offers(), key=lambda offer: offer.key)
    made = await provider.launch(msgspec.structs.replace(await order(rig), offer=offers[0]))
    await provider.close()
    assert {offer.capacity_type for offer in offers} == {CapacityType.SPOT}
    assert made.capacity_type is CapacityType.SPOT


@pytest.mark.parametrize(
    ("label", "said", "sold"),
    [
        ("gpu-autoscaler.io/capacity-type", "spot", CapacityType.SPOT),
        ("eks.amazonaws.com/capacityType", "ON_DEMAND", CapacityType.ON_DEMAND),
        ("team", "vision", None),
    ],
)
async def test_an_empty_group_is_described_by_its_node_template(
    rig: GroupRig, label: str, said: str, sold: CapacityType | None
) -> None:
    """By cluster-autoscaler's tags, if its launch template may not be read; the purchase option is never guessed."""
    wanted = await order(rig)
    node = "k8s.io/cluster-autoscaler/node-template/label/"
    tags = {INSTALLATION: OURS, f"{node}node.kubernetes.io/instance-type": "g5.xlarge", node + label: said}
    told = [{"Key": key, "Value": value, "PropagateAtLaunch": True} for key, value in tags.items()]
    make_group(rig.region, "unread", Tags=told)
    rig.fake.faults.add(Fault(kind="refused", call="DescribeLaunchTemplateVersions", code="UnauthorizedOperation"))
    provider = rig.region.provider(OURS, launch_template=None, subnets=(), groups=("default=unread",))
    offers = await provider.offers()
    if sold is None:
        with pytest.raises(LaunchRefused, match="its purchase option is unknown"):
            await provider.launch(wanted)
    await provider.close()
    assert {(offer.instance_type, offer.capacity_type) for offer in offers} == (
        {("g5.xlarge", sold)} if sold else set()
    )


async def test_a_node_template_describes_future_nodes(rig: GroupRig) -> None:
    """Labels, taints and resources of cluster-autoscaler's tags apply to the offer in its pool only; unreadable
    tags are named."""
    node = "k8s.io/cluster-autoscaler/node-template"
    tags = {
        INSTALLATION: OURS,
        f"{node}/label/team": "vision",
        f"{node}/label/topology.kubernetes.io/zone": "eu-west-1z",
        f"{node}/taint/dedicated": "vision:NoSchedule",
        f"{node}/taint/startup-taint.cluster-autoscaler.kubernetes.io/driver": "true:NoSchedule",
        f"{node}/taint/wrong": "NoSchedule",
        f"{node}/resources/ephemeral-storage": "40Gi",
        f"{node}/resources/memory": "4Ti",
    }
    told = [{"Key": key, "Value": value, "PropagateAtLaunch": True} for key, value in tags.items()]
    make_group(rig.region, "tagged", Tags=told)
    names = ("vision=tagged", "default=gpu-workers")
    provider = rig.region.provider(OURS, launch_template=None, subnets=(), groups=names)
    offer = min(await provider.offers(), key=lambda offer: offer.key)
    said = [one.next_step for one in await provider.preflight() if one.subject == "aws.groups tagged"]
    await provider.close()
    (plain, *_) = sorted(await rig.ours.offers(), key=lambda offer: offer.key)
    assert offer.marks_in("vision").labels == (("team", "vision"),)
    assert offer.marks_in("vision").taints == (Taint("dedicated", "NoSchedule", "vision"),)
    assert (offer.marks_in("default").labels, plain.marks) == ((), ())
    assert offer.resources.ephemeral_storage_bytes == 40 * 2**30 < plain.resources.ephemeral_storage_bytes
    assert offer.resources.memory_bytes == plain.resources.memory_bytes
    assert any(f"{node}/taint/wrong" in step for step in said)


async def test_a_throttled_read_marks_no_group_as_missing(rig: GroupRig) -> None:
    """It is retried: nothing is considered missing, or remembered so."""
    for call in ("DescribeLaunchTemplateVersions", "DescribePolicies"):
        provider = rig.region.provider(OURS, launch_template=None, subnets=(), groups=("default=gpu-workers",))
        rig.fake.faults.add(Fault(kind="refused", call=call, code="RequestLimitExceeded", left_count=1))
        with pytest.raises(TransientError, match=call):
            await provider.offers()
        assert len(await provider.offers()) == 3
        await provider.close()


async def test_a_full_group_is_refused(rig: GroupRig) -> None:
    """Its MaxSize applies, whatever our limits."""
    rig.fake.groups.get("gpu-workers").max_size = 1
    await rig.ours.launch(await order(rig))
    with pytest.raises(LaunchRefused, match="MaxSize") as refused:
        await rig.ours.launch(await order(rig, "a2"))
    assert refused.value.kind == "configuration"
    assert rig.desired_count() == 1


async def test_a_token_used_in_another_zone_is_reported(rig: GroupRig) -> None:
    """AWS ignores the zone in a retry and returns the first instance, which is not what is ordered now."""
    await rig.ours.launch(await order(rig))
    with pytest.raises(PermanentError, match=r"not g4dn\.xlarge/eu-west-1b/on-demand"):
        await rig.ours.launch(await order(rig, index=1))


@pytest.mark.cloud("aws", calls=("DetachInstances",), errors=("group replaces interrupted instances",))
@pytest.mark.parametrize("made_count", [1, 0], ids=["in its group", "detached"])
async def test_an_interruption_has_one_successor(rig: GroupRig, made_count: int) -> None:
    """A group replaces its losses, and so do we: so the instance is detached at its notice."""
    assert isinstance(rig.ours, ReplacesInstances)
    made = await rig.ours.launch(await order(rig))
    if made_count == 0:
        await rig.ours.detach(made.provider_id)
        await rig.ours.detach(made.provider_id)
        assert rig.desired_count() == 0
        assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]
    rig.fake.machines.reclaim(made.provider_id.rpartition("/")[2])
    assert rig.fake.groups.heal() == made_count


async def test_a_detached_instance_can_be_terminated(rig: GroupRig) -> None:
    """By its id; other people's are neither detached nor terminated."""
    assert isinstance(rig.ours, ReplacesInstances)
    made = await rig.ours.launch(await order(rig))
    theirs = await rig.theirs.launch(await order(rig, "theirs", installation=THEIRS))
    await rig.ours.detach(made.provider_id)
    await rig.ours.detach(theirs.provider_id)
    ended = await rig.ours.terminate(made.provider_id, now=rig.region.clock.now())
    assert ended is not None
    assert ended.state == "terminating"
    assert int(rig.fake.groups.get("theirs").desired_capacity) == 1


@pytest.mark.cloud("aws", calls=("DescribePolicies",), errors=("group scales itself", "EKS managed node group"))
@pytest.mark.parametrize("kind", ["policy", "eks"])
async def test_a_group_sized_by_others_is_not_used(rig: GroupRig, kind: str) -> None:
    """Its own policies, or EKS: both would work against each other, so it is refused with the reason."""
    tags = [{"Key": "eks:nodegroup-name", "Value": "gpu-ng", "PropagateAtLaunch": True}] if kind == "eks" else []
    make_group(rig.region, "sized", Tags=tags)
    if kind == "policy":
        keys = {"aws_access_key_id": "fake", "aws_secret_access_key": "fake"}
        client = boto3.client("autoscaling", region_name=REGION, endpoint_url=rig.region.url, **keys)
        client.put_scaling_policy(AutoScalingGroupName="sized", PolicyName="on-load", AdjustmentType="ChangeInCapacity")
        client.close()
    ours = rig.region.provider(OURS, launch_template=None, subnets=(), groups=("default=sized",))
    wanted = {"policy": "its own scaling policies on-load size it", "eks": "EKS managed node group gpu-ng"}[kind]
    assert list(await ours.offers()) == []
    with pytest.raises(LaunchRefused, match=wanted) as refused:
        await ours.launch(await order(rig))
    assert refused.value.kind == "configuration"
    assert rig.fake.asked_of("LaunchInstances") == []
    await ours.close()

    shared = rig.region.provider(
        OURS, launch_template=None, subnets=(), groups=("default=sized",), shared_groups=("sized",)
    )
    sold = [offer.key for offer in await shared.offers()]
    texts = [str(finding) for finding in await shared.preflight() if finding.subject == "aws.groups sized"]
    await shared.close()
    assert len(sold) == (3 if kind == "policy" else 0)  # groups of EKS cannot be shared
    assert any("on-load are accepted by aws.shared_groups" in text for text in texts) is (kind == "policy")


def test_only_groups_with_launch_instances_can_be_shared() -> None:
    """Groups sized by desired capacity have one writer."""
    options = AwsOptions(region=REGION, desired_capacity_groups=("default=old",), shared_groups=("old",))
    with pytest.raises(ConfigError, match=r"aws\.shared_groups: 'old' is not in aws\.groups; .* cannot be shared"):
        validate_options(options)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"CapacityRebalance": True}, ("CapacityRebalance", "turn it off")),
        ({"missing": True}, ("not found",)),
        ({"MaxSize": 0}, ("its MaxSize is 0", "raise it")),
        (
            {
                "MixedInstancesPolicy": {
                    "LaunchTemplate": {
                        "LaunchTemplateSpecification": {"LaunchTemplateName": "group", "Version": "$Default"},
                        "Overrides": [{"InstanceType": "g5.xlarge"}, {"InstanceType": "g4dn.xlarge"}],
                    },
                    "InstancesDistribution": {"OnDemandPercentageAboveBaseCapacity": 40},
                }
            },
            ("several instance types", "mixes spot and on-demand"),
        ),
    ],
)
async def test_an_unusable_group_gives_the_reason(rig: GroupRig, more: dict[str, Any], words: Sequence[str]) -> None:
    """It has no offers, and orders for its pool are refused with the same reason."""
    if "missing" not in more:
        make_group(rig.region, "odd", **more)
    provider = rig.region.provider(OURS, launch_template=None, subnets=(), groups=("default=odd",))
    offers = await provider.offers()
    with pytest.raises(LaunchRefused) as refused:
        await provider.launch(await order(rig))
    await provider.close()
    assert not offers
    assert refused.value.kind == "configuration"
    assert all(word in str(refused.value) for word in words)
