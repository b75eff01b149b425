"""Provider contract of the AWS driver, through boto3 against moto with faults."""

import asyncio
import base64
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.provider.contract import OURS, THEIRS, ProviderContract, Rig, Trouble, order
from tests.support.aws import Region, served_region

from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.protocol import DescribesInstance, LaunchRefused, Order, RefusalKind
from gpu_autoscaler.providers.tokens import idempotency_token, idempotency_uuid
from gpu_autoscaler.simcloud.faults import Fault

pytestmark = pytest.mark.timeout(180)

REFUSED = {
    "capacity": "InsufficientInstanceCapacity",
    "quota": "VcpuLimitExceeded",
    "permission": "UnauthorizedOperation",
    "configuration": "InvalidLaunchTemplateName.NotFoundException",
}
LAUNCHES = ("RunInstances", "LaunchInstances", "CreateFleet")
TROUBLE: dict[Trouble, str] = {
    "throttled": "RequestLimitExceeded",
    "down": "ServiceUnavailable",
    "expired": "RequestExpired",
}


class AwsRig(Rig):
    """One region, two installations of one account."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.fake = region.fake
        self.ours = region.provider(OURS)
        self.theirs = region.provider(THEIRS)

    def now(self) -> datetime:
        """Moves in `wait` alone."""
        return self.region.clock.now()

    async def refuse(self, pattern: str, kind: RefusalKind = "capacity") -> None:
        """In EC2's words."""
        for call in LAUNCHES:
            self.fake.faults.add(Fault(kind="refused", call=call, offer=pattern, code=REFUSED[kind]))

    async def leave_room(self, pattern: str, count: int) -> None:
        """Whatever call asks for them."""
        self.fake.faults.add(Fault(kind="refused", offer=pattern, code=REFUSED["capacity"], passed_count=count))

    async def refuse_nothing(self) -> None:
        """All faults go."""
        self.fake.faults.clear()

    async def lose_next_answer(self) -> None:
        """Of the next call that changes something."""
        for call in (*LAUNCHES, "TerminateInstance*"):
            self.fake.faults.add(Fault(kind="lost", call=call, left_count=1))

    async def trouble(self, kind: Trouble) -> None:
        """Of every call."""
        self.fake.faults.add(Fault(kind="refused", code=TROUBLE[kind]))

    async def calm(self) -> None:
        """All faults go."""
        self.fake.faults.clear()

    async def show_after(self, seconds: float) -> None:
        """As eventual consistency has it."""
        self.fake.machines.shown_after_seconds = seconds

    async def end_unexpectedly(self, provider_id: ProviderId) -> None:
        """With a reason that has no date."""
        self.fake.machines.die(provider_id.rpartition("/")[2])

    async def stock(self, wanted: Order, count: int) -> None:
        """One is launched, the others are copies of it."""
        made = await self.ours.launch(wanted)
        self.fake.machines.stock(made.provider_id.rpartition("/")[2], count - 1)

    async def stranger(self, wanted: Order) -> ProviderId:
        """Its tags are taken off."""
        made = await self.ours.launch(wanted)
        self.fake.machines.backend.tags[made.provider_id.rpartition("/")[2]].clear()
        return made.provider_id

    async def wait(self, seconds: float) -> None:
        """At once."""
        self.region.clock.turn(seconds)


def rig_of(kind: Callable[[Region], AwsRig]) -> Any:  # noqa: ANN401 - the type of a fixture is pytest's own affair
    """Return the fixture `rig`: one of this kind, in a region of its own."""

    @pytest.fixture(name="rig")
    async def served() -> AsyncIterator[AwsRig]:
        with served_region() as region:
            made = kind(region)
            yield made
            await made.ours.close()
            await made.theirs.close()

    return served


rig = rig_of(AwsRig)


@pytest.mark.cloud(
    "aws",
    calls=(
        "RunInstances",
        "TerminateInstances",
        "DescribeInstances",
        "DescribeSubnets",
        "DescribeInstanceTypes",
        "DescribeInstanceTypeOfferings",
        "DescribeSpotPriceHistory",
        "GetProducts",
    ),
    errors=("answer lost", "answer late", "region down", "instance dies while booting"),
)
class TestAws(ProviderContract):
    """The inherited promises; the fixture is the module's."""


async def test_never_two_launches_for_one_token(rig: AwsRig) -> None:
    """Whatever was lost, refused or repeated: the fake counts one launch per action."""
    await rig.lose_next_answer()
    orders = [await order(rig, f"a{number}") for number in range(4)]
    for _ in range(3):
        await asyncio.gather(*(rig.ours.launch(each) for each in orders), return_exceptions=True)
    tokens = Counter(call.parameters["ClientToken"] for call in rig.fake.asked_of("RunInstances"))
    assert len(tokens) == len(orders)
    assert all(len(token) == 32 for token in tokens)
    assert rig.fake.launches_count == len(orders)


async def test_an_instance_is_tagged_with_its_owner(rig: AwsRig) -> None:
    """Installation, action, pool and agreed price, on the instance and its disk."""
    wanted = await order(rig)
    made = await rig.ours.launch(wanted)
    call = rig.fake.asked_of("RunInstances")[0]
    tags = call.tags("instance")
    assert tags == call.tags("volume")
    assert tags["gpu-autoscaler.io/installation"] == OURS
    assert tags["gpu-autoscaler.io/action-id"] == wanted.action_id
    assert tags["gpu-autoscaler.io/pool"] == wanted.pool
    assert made.provider_id.startswith(f"aws:///{wanted.offer.zone}/i-")


async def test_spot_is_bought_as_spot_and_never_above_on_demand(rig: AwsRig) -> None:
    """One-time, terminated and not stopped on interruption; no maximum price, so EC2 limits it to on-demand's."""
    offers = await rig.ours.offers()
    spot = next(offer for offer in offers if offer.capacity_type is CapacityType.SPOT)
    made = await rig.ours.launch(msgspec.structs.replace(await order(rig), offer=spot))
    asked = rig.fake.asked_of("RunInstances")[0].parameters
    assert made.capacity_type is CapacityType.SPOT
    assert asked["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert asked["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    assert "InstanceMarketOptions.SpotOptions.MaxPrice" not in asked


async def test_credentials_that_expire_between_pages_fail_the_list(rig: AwsRig) -> None:
    """A page is missing, so there is no list."""
    await rig.stock(await order(rig), 501)
    rig.fake.faults.add(Fault(kind="refused", call="DescribeInstances", code="RequestExpired", passed_count=1))
    with pytest.raises(TransientError, match="credentials"):
        await rig.ours.instances(OURS)
    assert len(rig.fake.asked_of("DescribeInstances")) == 2


async def test_an_exhausted_quota_refuses_its_family_until_an_instance_ends(rig: AwsRig) -> None:
    """The account's own limit, enforced by the cloud."""
    rig.fake.quota_vcpus["g4dn.*"] = 4
    wanted = await order(rig)
    assert wanted.offer.instance_type == "g4dn.xlarge"
    made = await rig.ours.launch(wanted)
    with pytest.raises(LaunchRefused) as refused:
        await rig.ours.launch(await order(rig, "a2"))
    await rig.ours.terminate(made.provider_id, now=rig.now())
    await rig.wait(10)
    await rig.ours.launch(await order(rig, "a3"))
    assert (refused.value.kind, refused.value.scope) == ("quota", "region")


@pytest.mark.cloud("aws", calls=("ListServiceQuotas",), errors=("quota of zero", "quotas unreadable"))
async def test_a_quota_below_one_instance_makes_offers_unavailable(rig: AwsRig) -> None:
    """Known before any order, with the quota's code; rechecked after ten minutes."""
    rig.fake.quota_vcpus["g*"] = 0
    barred = await rig.ours.offers()
    assert {offer.unavailable_because is not None for offer in barred} == {True}
    assert "L-DB2E81BA (Running On-Demand G and VT instances) is 0 vCPUs" in "".join(
        offer.unavailable_because or "" for offer in barred
    )
    rig.fake.quota_vcpus["g*"] = 4
    await rig.wait(599)
    assert {offer.unavailable_because is not None for offer in await rig.ours.offers()} == {True}
    await rig.wait(1)
    assert {offer.unavailable_because for offer in await rig.ours.offers()} == {None}
    rig.fake.faults.add(Fault(kind="refused", call="ListServiceQuotas", code="AccessDeniedException"))
    await rig.wait(600)
    assert {offer.unavailable_because for offer in await rig.ours.offers()} == {None}


async def test_a_denied_launch_names_its_permissions(rig: AwsRig) -> None:
    """Call, action and next step."""
    await rig.refuse("*", "permission")
    with pytest.raises(LaunchRefused, match=r"RunInstances.*ec2:RunInstances, ec2:CreateTags, iam:PassRole.*doctor"):
        await rig.ours.launch(await order(rig))


async def test_a_missing_answer_ends_at_our_time_limit(rig: AwsRig) -> None:
    """The call may have succeeded: a retry returns its instance."""
    wanted = await order(rig)
    rig.fake.faults.add(Fault(kind="slow", call="RunInstances", wait_seconds=2.0, left_count=1))
    hasty = rig.region.provider(OURS)
    await hasty.offers()
    hasty._client._calls._call_seconds_max = 0.5
    with pytest.raises(TransientError, match="safe to retry"):
        await hasty.launch(wanted)
    made = await rig.ours.launch(wanted)
    await hasty.close()
    assert [instance.provider_id for instance in await rig.ours.instances(OURS)] == [made.provider_id]
    assert rig.fake.launches_count == 1


async def test_an_instance_of_another_cloud_is_left_untouched(rig: AwsRig) -> None:
    """Its provider id is enough; no call is made."""
    with pytest.raises(PermanentError, match="is not an instance of"):
        await rig.ours.terminate(ProviderId("gce://project/zone/name"), now=rig.now())
    assert not rig.fake.asked_of("DescribeInstances")


async def test_an_instance_of_another_region_cannot_be_described(rig: AwsRig) -> None:
    """This endpoint does not know it, which does not prove that it is gone."""
    assert isinstance(rig.ours, DescribesInstance)
    with pytest.raises(PermanentError, match="is not in region"):
        await rig.ours.instance(ProviderId("aws:///ap-east-9a/i-0123456789abcdef0"))
    assert not rig.fake.asked_of("DescribeInstances")


async def test_a_price_is_known_or_none(rig: AwsRig) -> None:
    """From the price list and the spot history of each zone; a type without one has no price, and is not free."""
    provider = rig.region.provider(OURS, instance_types=("g4dn.xlarge", "g4dn.metal"))
    prices = {offer.key: offer.price_micro_usd_per_hour for offer in await provider.offers()}
    await provider.close()
    assert prices["g4dn.xlarge/eu-west-1a/on-demand"] == 526_000
    assert prices["g4dn.xlarge/eu-west-1a/spot"] == 160_000
    assert prices["g4dn.metal/eu-west-1a/on-demand"] is None


async def test_without_permission_the_built_in_types_are_used(rig: AwsRig) -> None:
    """Sizes of the table, offered everywhere until refused; prices may be unknown too."""
    for call in ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings", "DescribeSpotPriceHistory", "GetProducts"):
        rig.fake.faults.add(Fault(kind="refused", call=call, code="UnauthorizedOperation"))
    offers = {offer.key: offer for offer in await rig.ours.offers()}
    assert len(offers) == 2 * 3 * 2  # types, zones, capacity types
    offer = offers["g4dn.xlarge/eu-west-1b/spot"]
    assert (offer.gpu_model, offer.resources.gpu_count, offer.price_micro_usd_per_hour) == ("T4", 1, None)


async def test_a_price_file_overrides_the_cloud(rig: AwsRig, tmp_path: Path) -> None:
    """By type, or by type and zone."""
    path = tmp_path / "prices.json"
    path.write_text('{"g4dn.xlarge/*/on-demand": 0.6, "g4dn.xlarge/eu-west-1b/spot": 0.2}', encoding="utf-8")
    provider = rig.region.provider(OURS, prices_path=str(path))
    prices = {offer.key: offer.price_micro_usd_per_hour for offer in await provider.offers()}
    await provider.close()
    assert prices["g4dn.xlarge/eu-west-1a/on-demand"] == 600_000
    assert prices["g4dn.xlarge/eu-west-1b/spot"] == 200_000
    assert prices["g4dn.xlarge/eu-west-1a/spot"] == 160_000


async def test_an_unknown_subnet_is_named(rig: AwsRig) -> None:
    """With the settings to check; a wrong region shows here too."""
    provider = rig.region.provider(OURS, subnets=("subnet-0123456789abcdef0",))
    with pytest.raises(TransientError, match=r"subnet-0123456789abcdef0 not found in eu-west-1; check aws\.subnets"):
        await provider.offers()
    await provider.close()


async def test_labels_and_taints_reach_the_node(rig: AwsRig, tmp_path: Path) -> None:
    """By the user data from which the kubelet starts."""
    path = tmp_path / "user-data"
    path.write_text("--node-labels={labels} --register-with-taints={taints}", encoding="utf-8")
    provider = rig.region.provider(OURS, user_data_path=str(path))
    await provider.launch(await order(rig))
    await provider.close()
    asked = rig.fake.asked_of("RunInstances")[0].parameters["UserData"]
    assert base64.b64decode(asked).decode() == (
        "--node-labels=team=vision --register-with-taints=nvidia.com/gpu=true:NoSchedule"
    )


def test_tokens_have_the_formats_of_clouds() -> None:
    """32 hex digits, or the same as UUID; each installation has its own."""
    assert len(idempotency_token(OURS, ActionId("a1"))) == 32
    assert idempotency_uuid(OURS, ActionId("a1")).replace("-", "") == idempotency_token(OURS, ActionId("a1"))
    assert idempotency_token(OURS, ActionId("a1")) != idempotency_token(THEIRS, ActionId("a1"))


async def test_a_price_has_its_source_and_age(rig: AwsRig, tmp_path: Path) -> None:
    """Recent prices have no date; a silent price list, and a file, have theirs."""
    began, path = rig.now(), tmp_path / "prices.json"
    path.write_text('{"g5.xlarge/*/on-demand": 1.0}', encoding="utf-8")
    os.utime(path, (began.timestamp() - 86_400, began.timestamp() - 86_400))
    provider = rig.region.provider(OURS, prices_path=str(path))
    first = {offer.key: offer for offer in await provider.offers()}
    rig.fake.faults.add(Fault(kind="refused", call="GetProducts", code="AccessDeniedException"))
    await rig.wait(7200 + 60)
    later = {offer.key: offer for offer in await provider.offers()}
    found = {one.subject: one for one in await provider.preflight()}
    await provider.close()
    list_key, file_key, spot_key = (
        f"{name}.xlarge/eu-west-1a/{of}" for name, of in (("g4dn", "on-demand"), ("g5", "on-demand"), ("g4dn", "spot"))
    )
    assert [(first[key].price_source, first[key].priced_at) for key in (list_key, spot_key)] == [
        ("price list", None),
        ("spot price history", None),
    ]
    assert (first[file_key].price_source, first[file_key].priced_at) == ("price file", began - timedelta(days=1))
    assert (later[list_key].price_micro_usd_per_hour, later[list_key].priced_at) == (526_000, began)
    assert later[spot_key].priced_at is None
    assert "(price file)" in found["prices"].message


@pytest.mark.cloud("aws", calls=("DescribePlacementGroups",), errors=("InvalidPlacementGroup.Unknown",))
async def test_a_pool_s_instances_use_its_placement_group(rig: AwsRig) -> None:
    """Only this pool's; a missing group is refused by name, and doctor reports it before."""
    rig.fake.placement_groups["near"] = "cluster"
    groups = ("default=near", "other=gone")
    provider = rig.region.provider(OURS, placement_groups=groups)
    await provider.launch(await order(rig))
    await provider.launch(msgspec.structs.replace(await order(rig, "a2"), pool="plain"))
    with pytest.raises(LaunchRefused, match=r"InvalidPlacementGroup\.Unknown.*gone") as refused:
        await provider.launch(msgspec.structs.replace(await order(rig, "a3"), pool="other"))
    found = {one.subject: one for one in await provider.preflight()}
    await provider.close()
    asked = [call.parameters.get("Placement.GroupName") for call in rig.fake.asked_of("RunInstances")[:2]]
    assert asked == ["near", None]
    assert refused.value.kind == "configuration"
    assert found["aws.placement_groups gone"].level == "error"
    assert "one zone" in found["aws.placement_groups near"].next_step
