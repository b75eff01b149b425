"""Providers are found by name."""

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from tests.support.karpenter import options_in

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.providers.azure import AzureOptions
from gpu_autoscaler.providers.gcp import GcpOptions
from gpu_autoscaler.providers.registry import PROVIDERS, ProviderOptions, open_provider

GCP = GcpOptions(project="p", groups=("*=europe-west4-a/l4",))
AWS = AwsOptions(region="eu-west-1", launch_template="gpu", subnets=("subnet-1",))
AZURE = AzureOptions(subscription="s", resource_group="gpu", region="westeurope", scale_sets=("default=t4",))
needs_boto3 = pytest.mark.skipif(find_spec("boto3") is None, reason="NOT RUN: boto3 is not installed (extra `aws`)")


@needs_boto3
async def test_a_provider_knows_its_registered_name(tmp_path: Path) -> None:
    """What is opened under a name says that name of itself."""
    options = ProviderOptions(
        installation="ours",
        url="http://127.0.0.1:1",
        aws=AWS,
        azure=AZURE,
        gcp=GCP,
        karpenter=options_in(tmp_path),
        kube=lambda: Connection(base_url="http://127.0.0.1:1"),
    )
    for name in PROVIDERS:
        provider = open_provider(name, options)
        assert provider.name == name
        await provider.close()


def test_what_aws_lacks_is_told_at_once() -> None:
    """Every missing setting by its name, before anything is asked of the cloud."""
    with pytest.raises(ConfigError) as refused:
        open_provider("aws", ProviderOptions(installation="ours"))
    assert [mistake.partition(":")[0] for mistake in refused.value.mistakes] == [
        "aws.region",
        "aws.launch_template",
        "aws.subnets",
    ]


def test_what_azure_lacks_is_told_at_once() -> None:
    """Every missing setting by its name; a scale set of AKS by its name, with what to do."""
    with pytest.raises(ConfigError) as refused:
        open_provider("azure", ProviderOptions(installation="ours"))
    assert [mistake.partition(":")[0] for mistake in refused.value.mistakes] == [
        "azure.subscription",
        "azure.resource_group",
        "azure.region",
        "azure.scale_set",
    ]


@pytest.mark.parametrize(
    "of_aks",
    [{"scale_sets": ("default=aks-gpu-12345678-vmss",)}, {"resource_group": "MC_group_cluster_westeurope"}],
)
def test_a_scale_set_of_aks_is_refused_by_name(of_aks: dict[str, object]) -> None:
    """Its number is AKS's alone to change; the message says what to make instead."""
    options = msgspec.structs.replace(AZURE, **of_aks)
    with pytest.raises(ConfigError, match=r"is AKS's own.*make a scale set of your own"):
        open_provider("azure", ProviderOptions(installation="ours", azure=options))


def test_what_google_cloud_lacks_is_told_at_once() -> None:
    """Every missing or wrong setting by its name, before anything is asked of the cloud."""
    wrong = GcpOptions(groups=("l4", "*=europe-west4/l4"))
    with pytest.raises(ConfigError) as refused:
        open_provider("gcp", ProviderOptions(installation="ours", gcp=wrong))
    assert [mistake.partition(": ")[0] for mistake in refused.value.mistakes] == [
        "gcp.project",
        "gcp.groups",
        "gcp.groups",
    ]
    assert "is no zone; regional groups are not bought from" in refused.value.mistakes[2]


@pytest.mark.parametrize(
    ("cloud", "ceiling", "words"),
    [
        ("aws", "g5.*", r"aws\.spot_ceilings: 'g5\.\*' is not type=US dollars"),
        ("aws", "=0.6", "is not type=US dollars"),
        ("aws", "g5.*=inf", "is not type=US dollars"),
        ("azure", "Standard_NC*=-1", "below 0.00100"),
        ("gcp", "g2-standard-4=0.5", "gcp.spot_ceilings: Compute Engine takes no ceiling"),
    ],
)
def test_a_ceiling_that_no_cloud_takes_is_refused_by_name(cloud: str, ceiling: str, words: str) -> None:
    """What is no amount, what is none that a cloud takes, and any where the cloud has no ceilings."""
    given = {
        name: msgspec.structs.replace(one, spot_ceilings=(ceiling,))
        for name, one in (("aws", AWS), ("azure", AZURE), ("gcp", GCP))
    }
    with pytest.raises(ConfigError, match=words):
        open_provider(cloud, ProviderOptions(installation="ours", **{cloud: given[cloud]}))  # type: ignore[arg-type]


def test_an_unknown_provider_is_refused_by_name() -> None:
    """With the names that there are."""
    with pytest.raises(ConfigError, match="'ibm' is none of aws, azure, gcp, karpenter, sim"):
        open_provider("ibm", ProviderOptions(installation="ours"))


def test_a_missing_option_is_refused_by_name() -> None:
    """The simulated cloud has no address of its own."""
    with pytest.raises(ConfigError, match="url"):
        open_provider("sim", ProviderOptions(installation="ours"))
