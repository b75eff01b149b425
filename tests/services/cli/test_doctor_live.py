"""`gpu-autoscaler doctor --live` buys nothing without --yes, one instance with it, and leaves none behind."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.aws import REGION, moto_or_skip
from tests.support.stories import offer

from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.offers import Bar, Offer
from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.providers.gcp import GcpOptions
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.providers.registry import ProviderOptions
from gpu_autoscaler_services.cli.doctor_live import by_hand, chosen
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.main import run

if TYPE_CHECKING:
    from gpu_autoscaler.simcloud.aws.fake import AwsFake

pytestmark = pytest.mark.timeout(240)
UID = "5d1f6c0e-0000-4000-8000-000000000001"
LIVE = ["doctor", "--live", "--installation", UID, "-o", "json"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator["AwsFake"]:
    """A served region whose machines begin and end within seconds, and settings that lead there."""
    moto_or_skip()
    from gpu_autoscaler.simcloud.aws.fake import AwsFake  # noqa: PLC0415 - moto loads slowly
    from gpu_autoscaler.simcloud.aws.server import serving  # noqa: PLC0415 - as the fake

    made = AwsFake(REGION)
    made.machines.boot_seconds = 0.5
    subnets = made.offer_template("gpu")
    with serving(made) as url:
        for name, value in {
            "PROVIDER_NAME": "aws",
            "PROVIDER_URL": url,
            "AWS_REGION": REGION,
            "AWS_LAUNCH_TEMPLATE": "gpu",
            "AWS_SUBNETS": ",".join(subnets),
            "AWS_INSTANCE_TYPES": "g4dn.xlarge,p4d.*",
        }.items():
            monkeypatch.setenv(f"GPU_AUTOSCALER_{name}", value)
        yield made


def test_without_yes_it_says_what_it_would_buy(fake: "AwsFake", capsys: pytest.CaptureFixture[str]) -> None:
    """The cheapest offer with its price by the hour; nothing is made, and the exit code is as without --live."""
    assert run(LIVE) == 0
    said = capsys.readouterr()
    assert "would buy one instance of g4dn.xlarge/eu-west-1" in said.err
    assert "/spot for pool default, at $0." in said.err
    assert "add --yes" in said.err
    assert {one["level"] for one in json.loads(said.out)} == {"ok"}
    assert fake.launches_count == 0


def test_with_yes_one_is_bought_walked_and_ended(fake: "AwsFake", capsys: pytest.CaptureFixture[str]) -> None:
    """The offer that was named; each step is told as it ends, and once more with the findings."""
    assert run([*LIVE, "--yes", "--offer", "g4dn.xlarge/eu-west-1b/on-demand"]) == 0
    said = capsys.readouterr()
    steps = [one for one in json.loads(said.out) if one["subject"].startswith("live: ")]
    assert [one["subject"] for one in steps][-2:] == ["live: told as ended", "live: nothing left"]
    assert {one["level"] for one in steps} == {"ok"}
    assert "buying one instance of g4dn.xlarge/eu-west-1b/on-demand" in said.err
    assert f"of installation {UID}" in said.err
    assert "live: same token again: the same instance" in said.err
    assert fake.launches_count == 1
    assert not [seen for seen in fake.machines.seen() if seen.is_alive]


def test_faults_of_the_set_up_come_first(
    fake: "AwsFake", capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is bought where doctor knows already that it would not work."""
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_LAUNCH_TEMPLATE", "gone")
    assert run([*LIVE, "--yes"]) == 1
    assert "live: " not in capsys.readouterr().out
    assert fake.launches_count == 0


async def test_ctrl_c_in_the_middle_ends_it(fake: "AwsFake") -> None:
    """A process that waits for its instance to be listed is interrupted: it ends the instance, then itself with 130."""
    fake.machines.shown_after_seconds = 30.0
    walk = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_autoscaler_services.cli.main", *LIVE, "--yes"),
        env=os.environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert walk.stderr is not None
    async with asyncio.timeout(200):
        heard = ""
        while "live: same token again" not in heard:
            line = (await walk.stderr.readline()).decode()
            assert line, heard
            heard += line
        walk.send_signal(signal.SIGINT)
        _, rest = await walk.communicate()
    heard += rest.decode()
    assert walk.returncode == 130, heard
    assert "live: ended" in heard
    assert "NOT ENDED" not in heard
    assert fake.launches_count == 1
    assert not [seen for seen in fake.machines.seen() if seen.is_alive]


def test_it_needs_to_know_whose_the_instance_is(fake: "AwsFake", capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the command that tells."""
    assert run(["doctor", "--live", "--yes"]) == Exit.USAGE
    assert "kubectl get namespace kube-system" in capsys.readouterr().err
    assert fake.launches_count == 0


def test_karpenters_machines_are_not_tried_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by name, before anything is asked."""
    monkeypatch.setenv("GPU_AUTOSCALER_PROVIDER_NAME", "karpenter")
    assert run([*LIVE, "--yes"]) == Exit.USAGE
    assert "set it to one of aws, azure, gcp, sim" in capsys.readouterr().err


def priced(price: float | None, zone: str, barred: str | None = None) -> Offer:
    """An offer at this price."""
    made = offer(usd_per_hour=price, zone=zone)
    return made if barred is None else msgspec.structs.replace(made, barred_because=barred, barred_by=Bar.QUOTA)


def test_what_is_bought_is_the_cheapest_that_can_be_had() -> None:
    """Neither what is barred nor what has no price; named, each says why not."""
    offers = [priced(5, "a"), priced(3, "b"), priced(None, "c"), priced(1, "d", "quota L-1 is 0")]
    assert chosen(offers, None).zone == "b"
    assert chosen(offers, offers[0].key) is offers[0]
    with pytest.raises(Stop, match="price is not known"):
        chosen(offers, offers[2].key)
    with pytest.raises(Stop, match="quota L-1 is 0"):
        chosen(offers, offers[3].key)
    with pytest.raises(Stop, match="is not offered"):
        chosen(offers, "p9.large/x/spot")
    with pytest.raises(Stop, match="has a price"):
        chosen(offers[2:], None)


@pytest.mark.parametrize(
    ("cloud", "left", "command"),
    [
        ("aws", "aws:///eu-west-1a/i-0abc", "aws ec2 terminate-instances --region eu-west-1 --instance-ids i-0abc"),
        ("aws", None, "Name=tag:gpu-autoscaler.io/action-id,Values=a1"),
        ("gcp", "gce://p1/europe-west4-a/gpu-1", "--project p1 --zone europe-west4-a --instances gpu-1"),
        ("gcp", None, "gcloud compute instances list --project p1 --filter='name~^gpu-"),
        ("azure", "azure:///subscriptions/s/vm", "az resource delete --ids /subscriptions/s/vm"),
        ("azure", None, "az resource list --tag gpu-autoscaler.io_action-id=a1"),
        ("sim", "sim:///z/i-1", "curl -X DELETE 'http://sim/cloud/instances/i-1?installation=ours'"),
        ("sim", None, "curl 'http://sim/cloud/instances?installation=ours'"),
    ],
)
def test_an_end_by_hand_is_told_as_a_command(cloud: str, left: str | None, command: str) -> None:
    """Of an instance that is known by name, or of one that may be there."""
    options = ProviderOptions(
        installation="ours", url="http://sim", aws=AwsOptions(region="eu-west-1"), gcp=GcpOptions(project="p1")
    )
    wanted = Order(action_id=ActionId("a1"), installation="ours", pool="default", offer=offer(), labels=(), taints=())
    assert command in by_hand(cloud, options, wanted, None if left is None else ProviderId(left))
