"""`gpu-autoscaler doctor` says what is right and wrong with a set-up, and what to do; asked of the fake AWS."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.contract.provider.test_aws_groups import make_group
from tests.support.aws import REGION, Region, served_region

from gpu_autoscaler.providers import aws
from gpu_autoscaler.providers.aws.permissions import CALLS
from gpu_autoscaler.providers.karpenter.catalog import offers_in
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler_services.cli.main import run

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    """A served region, and an environment of settings that fits it."""
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
    """What the command found, by subject; it must end with this code."""
    assert run(["doctor", "-o", "json"]) == code
    return {one["subject"]: one for one in json.loads(capsys.readouterr().out)}


def test_a_good_set_up_is_found_fine(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """Credentials, zones, offers, a launch that is only tried, quotas; nothing is made."""
    found = findings(capsys, 0)
    assert {one["level"] for one in found.values()} == {"ok"}
    assert {"credentials", "zones", "offers", "RunInstances"} <= set(found)
    assert "would have made" in found["RunInstances"]["message"]
    assert region.fake.launches_count == 0


def test_a_missing_permission_is_named_with_what_it_costs(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """Which call, which actions to allow, and what does not work until then."""
    region.fake.faults.add(Fault(kind="refused", call="RunInstances", code="UnauthorizedOperation"))
    found = findings(capsys, 1)["RunInstances"]
    assert (found["level"], "nothing is bought" in found["message"]) == ("error", True)
    assert "ec2:RunInstances, ec2:CreateTags, iam:PassRole" in found["next_step"]


@pytest.mark.cloud("aws", calls=("CreateFleet",))
def test_a_fleet_is_tried_where_it_is_switched_on(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off it is told what it would bring; on it is tried without making it, and its right is named where it lacks."""
    off = findings(capsys, 0)
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_FLEETS", "true")
    on = findings(capsys, 0)
    region.fake.faults.add(Fault(kind="refused", call="CreateFleet", code="UnauthorizedOperation"))
    denied = findings(capsys, 1)["CreateFleet"]
    assert "ec2:CreateFleet" in off["aws.fleets"]["message"]
    assert "CreateFleet" not in off
    assert "would have made two g4dn.xlarge" in on["CreateFleet"]["message"]
    assert "ec2:CreateFleet, ec2:RunInstances" in denied["next_step"]
    assert region.fake.launches_count == 0


def test_names_that_are_not_there_are_told(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subnet of elsewhere, a template and a type that do not exist, each by its setting."""
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_SUBNETS", f"{region.subnets[0]},subnet-0123456789abcdef0")
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_LAUNCH_TEMPLATE", "gone")
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_INSTANCE_TYPES", "g4dn.xlarge,g99.*")
    found = findings(capsys, 1)
    assert found["aws.subnets subnet-0123456789abcdef0"]["level"] == "error"
    assert "InvalidLaunchTemplateName.NotFoundException" in found["RunInstances"]["message"]
    assert "names no type" in found["aws.instance_types g99.*"]["message"]


@pytest.mark.cloud("aws", calls=("GetQueueAttributes",), errors=("QueueDoesNotExist",))
def test_the_queue_of_events_is_looked_at(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is there and may be read; one that is not there is named."""
    queue_url = region.fake.bridge.open_queue()
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_QUEUE_URL", queue_url)
    assert findings(capsys, 0)["aws.queue_url"]["message"] == "can be read; 0 events wait"
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_QUEUE_URL", queue_url + "-gone")
    assert "there is no queue" in findings(capsys, 1)["aws.queue_url"]["message"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_QUEUE_URL", queue_url)
    region.fake.faults.add(Fault(kind="refused", call="GetQueueAttributes", code="AccessDenied"))
    assert "sqs:GetQueueAttributes" in findings(capsys, 1)["GetQueueAttributes"]["next_step"]


@pytest.mark.cloud("aws", calls=("ListServiceQuotas",))
def test_a_quota_of_zero_is_told_before_it_refuses(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """With the quota's code and the types that it stops."""
    region.fake.quota_vcpus["p4d.*"] = 0
    found = findings(capsys, 0)["quota Running On-Demand P instances"]
    assert (found["level"], "p4d.24xlarge" in found["message"], "L-417A185B" in found["next_step"]) == (
        "warning",
        True,
        True,
    )


def test_credentials_that_are_not_accepted_end_the_look(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    """One fault that says where to look, and not the same one for each call."""
    region.fake.faults.add(Fault(kind="refused", code="RequestExpired"))
    found = findings(capsys, 1)
    assert list(found) == ["DescribeInstances"]
    assert "this machine's clock" in found["DescribeInstances"]["message"]


def test_a_region_that_is_not_there_is_told_with_those_that_are(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a call to an address that does not exist waits for its limit of time."""
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_REGION", "eu-west-9")
    assert run(["doctor", "-o", "json"]) != 0
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert "eu-west-1" in found["aws.region"]["next_step"]
    assert region.fake.launches_count == 0


def test_groups_are_looked_at_by_name(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stops purchases is a fault, what only loses something is advice, both with the step to take."""
    region.fake.offer_template("group", "g4dn.xlarge")
    make_group(region, "odd", CapacityRebalance=True, Tags=[])
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUPS", "default=odd,training=gone")
    assert run(["doctor", "-o", "json"]) == 1
    told = [
        (one["level"], one["subject"], one["message"] + one["next_step"]) for one in json.loads(capsys.readouterr().out)
    ]
    assert any(
        level == "error" and subject.endswith("odd") and "CapacityRebalance" in said for level, subject, said in told
    )
    assert any(
        level == "error" and subject.endswith("gone") and "no such group" in said for level, subject, said in told
    )
    assert any(level == "warning" and "gpu-autoscaler.io/installation" in said for level, subject, said in told)


def test_groups_of_cluster_autoscaler_are_shown_for_adoption(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its tag, with the line that adopts one."""
    region.fake.offer_template("group", "g4dn.xlarge")
    enabled = {"Key": "k8s.io/cluster-autoscaler/enabled", "Value": "true", "PropagateAtLaunch": False}
    make_group(region, "found", Tags=[enabled])
    said = findings(capsys, 0)["group found"]
    assert (said["level"], "<pool>=found" in said["next_step"]) == ("warning", True)
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUPS", "default=found")
    adopted = findings(capsys, 0)
    assert "group found" not in adopted
    assert adopted["aws.groups found"]["message"].startswith("sells g4dn.xlarge as on-demand")


def test_the_policy_is_that_of_the_calls(
    region: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the settings ask for and no more: groups bring their actions only where there are some."""
    assert run(["doctor", "--policy"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)["Statement"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUPS", "default=gpu-workers")
    run(["doctor", "--policy"])
    (both,) = json.loads(capsys.readouterr().out)["Statement"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_FLEETS", "true")
    run(["doctor", "--policy"])
    (fleets,) = json.loads(capsys.readouterr().out)["Statement"]
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_GROUP_MAXIMA", "gpu-workers=40")
    run(["doctor", "--policy"])
    (maxima,) = json.loads(capsys.readouterr().out)["Statement"]
    assert set(maxima["Action"]) - set(fleets["Action"]) == {"autoscaling:UpdateAutoScalingGroup"}
    assert "ec2:CreateFleet" in fleets["Action"]
    assert "ec2:CreateFleet" not in alone["Action"]
    assert "ec2:RunInstances" in alone["Action"]
    assert "autoscaling:LaunchInstances" not in alone["Action"]
    assert "autoscaling:LaunchInstances" in both["Action"]
    assert not region.fake.asked


async def test_a_snapshot_of_prices_can_be_bought_by(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes is what a driver reads that may not ask for prices: the same offers at the same prices."""
    path = tmp_path / "prices.json"
    assert await asyncio.to_thread(run, ["prices", "snapshot", str(path)]) == 0
    asking = region.provider("ours", instance_types=("g4dn.xlarge", "p4d.*"))
    told = await asking.offers()
    await asking.close()
    for call in ("GetProducts", "DescribeSpotPriceHistory"):
        region.fake.faults.add(Fault(kind="refused", call=call, code="UnauthorizedOperation"))
    reading = region.provider("ours", instance_types=("g4dn.xlarge", "p4d.*"), prices_path=str(path))
    read = await reading.offers()
    await reading.close()
    assert {offer.price_source for offer in read} == {"file of prices"}
    assert [msgspec.structs.replace(offer, price_source=None) for offer in read] == [
        msgspec.structs.replace(offer, price_source=None) for offer in told
    ]
    assert all(offer.price_micro_usd_per_hour for offer in read)


def test_every_permission_has_a_call() -> None:
    """An action that no line of the driver needs is not asked for."""
    sources = [path.read_text(encoding="utf-8") for path in Path(aws.__file__).parent.glob("*.py")]
    others = [text for text in sources if "CALLS: Mapping" not in text]
    assert [name for name in CALLS if not any(f'"{name}"' in text for text in others)] == []


async def test_what_the_cloud_sells_is_written_for_karpenter(
    region: Region, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Types, zones, sizes and prices of now, as a file that its driver reads: the same offers."""
    path = tmp_path / "offers.json"
    assert await asyncio.to_thread(run, ["prices", "shelf", str(path)]) == 0
    assert "of aws" in capsys.readouterr().err
    asking = region.provider("ours", instance_types=("g4dn.xlarge", "p4d.*"))
    told = {offer.key: offer for offer in await asking.offers()}
    await asking.close()
    read = {offer.key: offer for offer in offers_in(str(path))}
    assert read.keys() == told.keys()
    for key, offer in read.items():
        assert (offer.resources, offer.gpu_model) == (told[key].resources, told[key].gpu_model), key
        assert offer.price_micro_usd_per_hour == told[key].price_micro_usd_per_hour, key
