"""MaxSize of groups: written only for groups in aws.group_max_sizes, before a launch."""

import msgspec
import pytest
from tests.contract.provider.contract import OURS, order
from tests.contract.provider.test_aws import AwsRig, rig_of
from tests.contract.provider.test_aws_desired_capacity import counted
from tests.contract.provider.test_aws_groups import make_group
from tests.support.aws import Region

from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.providers.aws.capacity import AwsCapacity
from gpu_autoscaler.providers.preflight import Finding
from gpu_autoscaler.providers.protocol import LaunchRefused
from gpu_autoscaler.simcloud.faults import Fault

pytest.importorskip("boto3", reason="NOT RUN: boto3 is not installed; `make .venv/.dev` installs it")
pytestmark = [pytest.mark.timeout(180), pytest.mark.cloud("aws", calls=("UpdateAutoScalingGroup",))]


class MaximaRig(AwsRig):
    """A LaunchInstances group and a desired-capacity group, both with a max size of 10, as a user created them."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        region.fake.offer_template("group", "g4dn.xlarge")
        make_group(region, "launched", MaxSize=10)
        counted(region, "counted", MaxSize=10)
        self.ours = self.provider("launched=2", "counted=2")

    def provider(self, *maxima: str) -> AwsCapacity:
        """A driver with both groups and these maxima."""
        return self.region.provider(
            OURS,
            launch_template=None,
            subnets=(),
            groups=("launched=launched",),
            desired_capacity_groups=("counted=counted",),
            group_max_sizes=maxima,
        )

    def most(self, name: str) -> int:
        """The group's MaxSize."""
        return int(self.fake.groups.get(name).max_size)

    async def buy(self, name: str, action: str, provider: AwsCapacity | None = None) -> ProviderId:
        """Order one node of the pool that this group stands for."""
        wanted = msgspec.structs.replace(await order(self, action), pool=name)
        return (await (provider or self.ours).launch(wanted)).provider_id

    async def is_at_its_most(self, name: str) -> bool:
        """True where one more is refused, as the group may have no more."""
        with pytest.raises(LaunchRefused, match="MaxSize") as refused:
            await self.buy(name, "one-more")
        return refused.value.kind == "configuration"

    async def examined(self, provider: AwsCapacity | None = None) -> dict[str, Finding]:
        """Return doctor's findings by subject."""
        asked = provider or self.provider("launched=2", "counted=2")
        found = {one.subject: one for one in await asked.preflight()}
        if provider is None:
            await asked.close()
        return found


rig = rig_of(MaximaRig)


@pytest.mark.parametrize("name", ["launched", "counted"])
async def test_max_size_is_written_with_the_first_order(rig: MaximaRig, name: str) -> None:
    """Written once, then AWS itself refuses more; listing offers writes nothing."""
    await rig.ours.offers()
    before = rig.most(name)
    for number in range(2):
        await rig.buy(name, f"a{number}")
    assert (before, rig.most(name)) == (10, 2)
    assert await rig.is_at_its_most(name)
    assert len(rig.fake.asked_of("UpdateAutoScalingGroup")) == 1


async def test_an_unconfigured_group_is_left_untouched(rig: MaximaRig) -> None:
    """And its permission is not needed."""
    plain = rig.provider("counted=2")
    await rig.buy("launched", "a1", plain)
    await plain.close()
    assert rig.most("launched") == 10
    assert not rig.fake.asked_of("UpdateAutoScalingGroup")


async def test_a_changed_max_size_is_restored(rig: MaximaRig) -> None:
    """With the next order after the group was read again; raised or lowered."""
    await rig.buy("launched", "a1")
    rig.fake.groups.get("launched").max_size = 50
    await rig.wait(301)
    await rig.buy("launched", "a2")
    lowered = rig.most("launched")
    larger = rig.provider("launched=20")
    await rig.buy("launched", "a3", larger)
    await larger.close()
    assert (lowered, rig.most("launched")) == (2, 20)


@pytest.mark.parametrize("name", ["launched", "counted"])
async def test_max_size_is_never_written_below_the_desired_capacity(rig: MaximaRig, name: str) -> None:
    """AWS would terminate instances: nothing is written or bought, and all of them keep running."""
    wide = rig.provider()
    for number in range(4):
        await rig.buy(name, f"a{number}", wide)
    await wide.close()
    assert await rig.is_at_its_most(name)
    assert rig.most(name) == 10
    assert not rig.fake.asked_of("UpdateAutoScalingGroup")
    assert {instance.state for instance in await rig.ours.instances(OURS)} == {"running"}


async def test_nothing_is_bought_while_max_size_cannot_be_written(rig: MaximaRig) -> None:
    """A missing permission is named; a transient fault or a lost answer is retried."""
    rig.fake.faults.add(Fault(kind="refused", call="UpdateAutoScalingGroup", code="AccessDenied", left_count=1))
    with pytest.raises(LaunchRefused, match="allow autoscaling:UpdateAutoScalingGroup") as refused:
        await rig.buy("launched", "a1")
    rig.fake.faults.add(Fault(kind="lost", call="UpdateAutoScalingGroup", left_count=1))
    with pytest.raises(TransientError):
        await rig.buy("launched", "a1")
    assert refused.value.kind == "permission"
    assert rig.fake.launches_count == 0
    await rig.buy("launched", "a1")
    assert rig.most("launched") == 2


async def test_doctor_reports_each_max_size(rig: MaximaRig) -> None:
    """Current and future value, and conflicts; it writes nothing."""
    found = await rig.examined()
    plain = rig.provider("counted=10")
    others = await rig.examined(plain)
    for number in range(3):
        await rig.buy("launched", f"a{number}", plain)
    await plain.close()
    full = await rig.examined()
    assert "MaxSize is 10 and becomes 2 with the first order" in found["aws.group_max_sizes launched"].message
    assert "MaxSize is 10; it is written only" in others["aws.group_max_sizes launched"].message
    assert "as configured" in others["aws.group_max_sizes counted"].message
    assert full["aws.group_max_sizes launched"].level == "warning"
    assert "desired capacity of 3" in full["aws.group_max_sizes launched"].message
    assert not rig.fake.asked_of("UpdateAutoScalingGroup")


async def test_a_min_size_above_max_size_rules_the_group_out(rig: MaximaRig) -> None:
    """Reported by doctor before any order; a MaxSize of zero does not matter, as it is written."""
    rig.fake.groups.get("launched").min_size = 3
    rig.fake.groups.get("counted").max_size = 0
    asked = rig.provider("launched=2", "counted=2")
    faults = [one for one in await asked.preflight() if one.level == "error"]
    await asked.close()
    assert [fault.subject for fault in faults] == ["aws.groups launched"]
    assert "MinSize of 3 exceeds" in faults[0].message
    await rig.buy("counted", "a1")


@pytest.mark.parametrize(
    ("maximum", "said"),
    [
        ("launched", "is not group=instances"),
        ("launched=many", "is not group=instances"),
        ("launched=0", "is not group=instances"),
        ("launched=-1", "is not group=instances"),
        ("gone=3", "is not in aws.groups or aws.desired_capacity_groups"),
    ],
)
def test_an_invalid_max_size_is_named(rig: MaximaRig, maximum: str, said: str) -> None:
    """With the setting, at start."""
    with pytest.raises(ConfigError, match=said):
        rig.provider(maximum)
    with pytest.raises(ConfigError, match="is set twice"):
        rig.provider("launched=3", "launched=4")
