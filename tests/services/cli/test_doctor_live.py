"""`gpu-autoscaler doctor --live` buys nothing without --yes, one instance with it, and leaves none running."""

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
from gpu_autoscaler.model.offers import Offer, UnavailabilityCause
from gpu_autoscaler.providers.aws.options import AwsOptions
from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.providers.registry import ProviderOptions
from gpu_autoscaler_services.cli.doctor_live import choose_offer, manual_command
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.main import run

if TYPE_CHECKING:
    from gpu_autoscaler.simcloud.aws.fake import AwsFake

pytestmark = pytest.mark.timeout(240)
UID = "5d1f6c0e-0000-4000-8000-000000000001"
LIVE = ["doctor", "--live", "--installation", UID, "-o", "json"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator["AwsFake"]:
    """A served region with fast machines, and settings for it in the environment."""
    moto_or_skip()
    from gpu_autoscaler.simcloud.aws.fake import AwsFake  # noqa: PLC0415 - moto loads slowly
    from gpu_autoscaler.simcloud.aws.server import serving  # noqa: PLC0415 - moto loads slowly

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


def test_without_yes_it_prints_what_it_would_buy(fake: "AwsFake", capsys: pytest.CaptureFixture[str]) -> None:
    """The cheapest offer with its price; nothing is bought, and the exit code is as without --live."""
    assert run(LIVE) == 0
    captured = capsys.readouterr()
    assert "would buy 1 instance of g4dn.xlarge/eu-west-1" in captured.err
    assert "/spot for pool default at $0." in captured.err
    assert "add --yes" in captured.err
    assert {finding["level"] for finding in json.loads(captured.out)} == {"ok"}
    assert fake.launches_count == 0


def test_with_yes_one_instance_is_bought_tested_and_terminated(
    fake: "AwsFake", capsys: pytest.CaptureFixture[str]
) -> None:
    """The given offer; each step is printed as it ends, and listed with the findings."""
    assert run([*LIVE, "--yes", "--offer", "g4dn.xlarge/eu-west-1b/on-demand"]) == 0
    captured = capsys.readouterr()
    steps = [finding for finding in json.loads(captured.out) if finding["subject"].startswith("live: ")]
    assert [step["subject"] for step in steps][-2:] == ["live: reported as terminated", "live: no instance left"]
    assert {step["level"] for step in steps} == {"ok"}
    assert "buying 1 instance of g4dn.xlarge/eu-west-1b/on-demand" in captured.err
    assert f"installation {UID}" in captured.err
    assert "live: repeat with the same token: same instance" in captured.err
    assert fake.launches_count == 1
    assert not [seen for seen in fake.machines.seen() if seen.is_alive]


def test_configuration_errors_prevent_the_purchase(
    fake: "AwsFake", capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is bought if doctor has found errors."""
    monkeypatch.setenv("GPU_AUTOSCALER_AWS_LAUNCH_TEMPLATE", "gone")
    assert run([*LIVE, "--yes"]) == 1
    assert "live: " not in capsys.readouterr().out
    assert fake.launches_count == 0


async def test_an_interruption_terminates_the_instance(fake: "AwsFake") -> None:
    """Interrupted while waiting for the listing, the process terminates the instance and exits with 130."""
    fake.machines.shown_after_seconds = 30.0
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_autoscaler_services.cli.main", *LIVE, "--yes"),
        env=os.environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(200):
        output = ""
        while "live: repeat with the same token" not in output:
            line = (await process.stderr.readline()).decode()
            assert line, output
            output += line
        process.send_signal(signal.SIGINT)
        _, rest = await process.communicate()
    output += rest.decode()
    assert process.returncode == 130, output
    assert "live: terminated" in output
    assert "NOT TERMINATED" not in output
    assert fake.launches_count == 1
    assert not [seen for seen in fake.machines.seen() if seen.is_alive]


def test_the_installation_is_required(fake: "AwsFake", capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the command that prints it."""
    assert run(["doctor", "--live", "--yes"]) == Exit.USAGE
    assert "kubectl get namespace kube-system" in capsys.readouterr().err
    assert fake.launches_count == 0


def test_live_checks_do_not_apply_to_karpenter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before any call."""
    monkeypatch.setenv("GPU_AUTOSCALER_PROVIDER_NAME", "karpenter")
    assert run([*LIVE, "--yes"]) == Exit.USAGE
    assert "set it to one of aws, azure, gcp, sim" in capsys.readouterr().err


def priced_offer(price: float | None, zone: str, barred: str | None = None) -> Offer:
    """Return an offer with this price."""
    made = offer(usd_per_hour=price, zone=zone)
    return (
        made
        if barred is None
        else msgspec.structs.replace(made, unavailable_because=barred, unavailable_by=UnavailabilityCause.QUOTA)
    )


def test_the_cheapest_available_offer_is_choose_offer() -> None:
    """Unavailable offers and offers without a price are excluded; named, each is refused with the reason."""
    offers = [
        priced_offer(5, "a"),
        priced_offer(3, "b"),
        priced_offer(None, "c"),
        priced_offer(1, "d", "quota L-1 is 0"),
    ]
    assert choose_offer(offers, None).zone == "b"
    assert choose_offer(offers, offers[0].key) is offers[0]
    with pytest.raises(Stop, match="price is unknown"):
        choose_offer(offers, offers[2].key)
    with pytest.raises(Stop, match="quota L-1 is 0"):
        choose_offer(offers, offers[3].key)
    with pytest.raises(Stop, match="is not offered"):
        choose_offer(offers, "p9.large/x/spot")
    with pytest.raises(Stop, match="no available offer has a known price"):
        choose_offer(offers[2:], None)


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
def test_manual_termination_is_a_command(cloud: str, left: str | None, command: str) -> None:
    """For an instance with a known id, or to find one that may exist."""
    options = ProviderOptions(
        installation="ours", url="http://sim", aws=AwsOptions(region="eu-west-1"), gcp=GcpOptions(project="p1")
    )
    order = Order(action_id=ActionId("a1"), installation="ours", pool="default", offer=offer(), labels=(), taints=())
    assert command in manual_command(cloud, options, order, None if left is None else ProviderId(left))
