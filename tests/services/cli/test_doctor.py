"""`gpu-autoscaler doctor` checks access and configuration and names next steps; against the fake AWS."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.contract.provider.test_aws_groups import make_group
from tests.support.aws import REGION, Region, served_region
from tests.support.braked_fleet import BROKE, BrakedFleet
from tests.support.front import front
from tests.support.timed_facts import TimedFact

from gpu_autoscaler.providers import aws
from gpu_autoscaler.providers.aws.permissions import CALLS
from gpu_autoscaler.providers.karpenter.catalog import offers_in
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler_services.cli.main import run

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    """A served region, and settings for it in the environment."""
    with served_region() as served:
        for name, value in {
            "PROVIDER_NAME": "aws",
            "PROVIDER_URL": served.url,
            "AWS_REGION": REGION,
            "AWS_LAUNCH_TEMPLATE": "gpu",
            "AWS_SUBNETS": ",".join(served.subnets),
            "AWS_INSTANCE_TYPES": "g4dn.xlarge,p4d.*",
        }.items():
            monkeypatch.setenv(f"GPU_AUTOSCALER_{name}", value)
        yield served


def findings(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, str]]:
    """Run doctor, check its exit code, return findings by subject."""
    assert run(["doctor", "-o", "json"]) == code
    return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_valid_configuration_has_no_errors(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """Credentials, zones, offers, a dry-run launch, quotas; nothing is created."""
    found = findings(capsys, 0)
    assert {finding["level"] for finding in found.values()} == {"ok"}
    assert {"credentials", "zones", "offers", "RunInstances"} <= set(found)
    assert "dry run succeeded" in found["RunInstances"]["message"]
    assert region.fake.launches_count == 0


async def test_the_tripped_brake_is_reported_where_a_gateway_is_named(
    region: Region, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason and the command that ends it; a gateway that does not answer is an error."""
    world = BrakedFleet(BROKE)
    for number in range(5):
        world.add(f"n{number}")
    world.plan()
    async with front(tmp_path) as gate:
        await gate.tell(tuple(TimedFact(entry.fact, entry.envelope.time) for entry in world.facts))
        monkeypatch.setenv("GPU_AUTOSCALER_GATEWAY", gate.url)
        brake = (await asyncio.to_thread(findings, capsys, 0))["brake"]
    gone = (await asyncio.to_thread(findings, capsys, 1))["gateway"]

    assert brake["level"] == "warning"
    assert "3 nodes were removed by force" in brake["message"]
    assert brake["next_step"] == "run: gpu-autoscaler resume brake"
    assert gone["level"] == "error"


def test_a_missing_permission_is_named_with_its_consequence(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """The call, the actions to grant, and what fails until then."""
    region.fake.faults.add(Fault(kind="refused", call="RunInstances", code="UnauthorizedOperation"))
    found = findings(capsys, 1)["RunInstances"]
    assert (found["level"], "nothing is launched from the launch template" in found["message"]) == ("error", True)
    assert "ec2:RunInstances, ec2:CreateTags, iam:PassRole" in found["next_step"]


@pytest.mark.cloud("aws", calls=("CreateFleet",))
def test_fleets_are_checked_if_enabled(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disabled: their benefit is mentioned. Enabled: a dry run, and a missing permission is named."""
    off = findings(capsys, 0)
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_FLEETS", "true")
    on = findings(capsys, 0)
    region.fake.faults.add(Fault(kind="refused", call="CreateFleet", code="UnauthorizedOperation"))
    denied = findings(capsys, 1)["CreateFleet"]
    assert "ec2:CreateFleet" in off["aws.fleets"]["message"]
    assert "CreateFleet" not in off
    assert "dry run succeeded: 2 x g4dn.xlarge" in on["CreateFleet"]["message"]
    assert "ec2:CreateFleet, ec2:RunInstances" in denied["next_step"]
    assert region.fake.launches_count == 0


def test_unknown_names_are_reported(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown subnet, template and type, each by its setting."""
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_SUBNETS", f"{region.subnets[0]},subnet-0123456789abcdef0")
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_LAUNCH_TEMPLATE", "gone")
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_INSTANCE_TYPES", "g4dn.xlarge,g99.*")
    found = findings(capsys, 1)
    assert found["aws.subnets subnet-0123456789abcdef0"]["level"] == "error"
    assert "InvalidLaunchTemplateName.NotFoundException" in found["RunInstances"]["message"]
    assert "matches no type" in found["aws.instance_types g99.*"]["message"]


@pytest.mark.cloud("aws", calls=("GetQueueAttributes",), errors=("QueueDoesNotExist",))
def test_the_event_queue_is_checked(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existence and read permission; a missing queue is named."""
    queue_url = region.fake.bridge.open_queue()
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_QUEUE_URL", queue_url)
    assert findings(capsys, 0)["aws.queue_url"]["message"] == "readable; 0 events waiting"
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_QUEUE_URL", queue_url + "-gone")
    assert "not found" in findings(capsys, 1)["aws.queue_url"]["message"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_QUEUE_URL", queue_url)
    region.fake.faults.add(Fault(kind="refused", call="GetQueueAttributes", code="AccessDenied"))
    assert "sqs:GetQueueAttributes" in findings(capsys, 1)["GetQueueAttributes"]["next_step"]


@pytest.mark.cloud("aws", calls=("ListServiceQuotas",))
def test_a_quota_of_zero_is_reported(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """With the quota's code and the affected types."""
    region.fake.quota_vcpus["p4d.*"] = 0
    found = findings(capsys, 0)["quota Running On-Demand P instances"]
    assert (found["level"], "p4d.24xlarge" in found["message"], "L-417A185B" in found["next_step"]) == (
        "warning",
        True,
        True,
    )


def test_refused_credentials_end_the_check(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """One error with the next step, not one per call."""
    region.fake.faults.add(Fault(kind="refused", code="RequestExpired"))
    found = findings(capsys, 1)
    assert list(found) == ["DescribeInstances"]
    assert "this machine's clock" in found["DescribeInstances"]["message"]


def test_an_unknown_region_is_reported_with_valid_ones(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for a time-out of an unknown host."""
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_REGION", "eu-west-9")
    assert run(["doctor", "-o", "json"]) != 0
    found = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert "eu-west-1" in found["aws.region"]["next_step"]
    assert region.fake.launches_count == 0


def test_groups_are_checked(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem that prevents purchases is an error, others are warnings; both have a next step."""
    region.fake.offer_template("group", "g4dn.xlarge")
    make_group(region, "odd", CapacityRebalance=True, Tags=[])
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUPS", "default=odd,training=gone")
    assert run(["doctor", "-o", "json"]) == 1
    rows = [
        (finding["level"], finding["subject"], finding["message"] + finding["next_step"])
        for finding in json.loads(capsys.readouterr().out)
    ]
    assert any(
        level == "error" and subject.endswith("odd") and "CapacityRebalance" in text for level, subject, text in rows
    )
    assert any(level == "error" and subject.endswith("gone") and "not found" in text for level, subject, text in rows)
    assert any(level == "warning" and "gpu-autoscaler.io/installation" in text for level, subject, text in rows)


def test_groups_of_cluster_autoscaler_are_shown_for_adoption(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their tag, with the setting that adopts one."""
    region.fake.offer_template("group", "g4dn.xlarge")
    enabled = {"Key": "k8s.io/cluster-autoscaler/enabled", "Value": "true", "PropagateAtLaunch": False}
    make_group(region, "found", Tags=[enabled])
    group = findings(capsys, 0)["group found"]
    assert (group["level"], "<pool>=found" in group["next_step"]) == ("warning", True)
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUPS", "default=found")
    adopted = findings(capsys, 0)
    assert "group found" not in adopted
    assert adopted["aws.groups found"]["message"].startswith("offers g4dn.xlarge as on-demand")


def test_the_printed_policy_covers_the_settings(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than needed: actions of groups only if groups are configured."""
    assert run(["doctor", "--policy"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)["Statement"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUPS", "default=gpu-workers")
    run(["doctor", "--policy"])
    (both,) = json.loads(capsys.readouterr().out)["Statement"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_FLEETS", "true")
    run(["doctor", "--policy"])
    (fleets,) = json.loads(capsys.readouterr().out)["Statement"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUP_MAX_SIZES", "gpu-workers=40")
    run(["doctor", "--policy"])
    (maxima,) = json.loads(capsys.readouterr().out)["Statement"]
    assert set(maxima["Action"]) - set(fleets["Action"]) == {"autoscaling:UpdateAutoScalingGroup"}
    assert "ec2:CreateFleet" in fleets["Action"]
    assert "ec2:CreateFleet" not in alone["Action"]
    assert "ec2:RunInstances" in alone["Action"]
    assert "autoscaling:LaunchInstances" not in alone["Action"]
    assert "autoscaling:LaunchInstances" in both["Action"]
    assert not region.fake.asked


async def test_a_price_snapshot_replaces_price_calls(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver without price permissions reads the file: the same offers at the same prices."""
    path = tmp_path / "prices.json"
    assert await asyncio.to_thread(run, ["prices", "snapshot", str(path)]) == 0
    asking = region.provider("ours", instance_types=("g4dn.xlarge", "p4d.*"))
    expected = await asking.offers()
    await asking.close()
    for call in ("GetProducts", "DescribeSpotPriceHistory"):
        region.fake.faults.add(Fault(kind="refused", call=call, code="UnauthorizedOperation"))
    reading = region.provider("ours", instance_types=("g4dn.xlarge", "p4d.*"), prices_path=str(path))
    read = await reading.offers()
    await reading.close()
    assert {offer.price_source for offer in read} == {"price file"}
    assert [msgspec.structs.replace(offer, price_source=None) for offer in read] == [
        msgspec.structs.replace(offer, price_source=None) for offer in expected
    ]
    assert all(offer.price_micro_usd_per_hour for offer in read)


def test_every_permission_has_a_call() -> None:
    """No permission is requested that the driver does not use."""
    sources = [path.read_text(encoding="utf-8") for path in Path(aws.__file__).parent.glob("*.py")]
    others = [text for text in sources if "CALLS: Mapping" not in text]
    assert [name for name in CALLS if not any(f'"{name}"' in text for text in others)] == []


async def test_the_catalog_is_saved_for_karpenter(
    region: Region, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Types, zones, sizes and prices in a file that the Karpenter driver reads: the same offers."""
    path = tmp_path / "offers.json"
    assert await asyncio.to_thread(run, ["prices", "catalog", str(path)]) == 0
    assert "of aws" in capsys.readouterr().err
    asking = region.provider("ours", instance_types=("g4dn.xlarge", "p4d.*"))
    expected = {offer.key: offer for offer in await asking.offers()}
    await asking.close()
    read = {offer.key: offer for offer in offers_in(str(path))}
    assert read.keys() == expected.keys()
    for key, offer in read.items():
        assert (offer.resources, offer.gpu_model) == (expected[key].resources, expected[key].gpu_model), key
        assert offer.price_micro_usd_per_hour == expected[key].price_micro_usd_per_hour, key
