"""Registration and lookup of providers by name."""

from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from tests.support.karpenter import options_in

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws.options import AwsOptions
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.providers.registry import PROVIDERS, ProviderOptions, open_provider

GCP = GcpOptions(project="p", groups=("*=europe-west4-a/l4",))
AWS = AwsOptions(region="eu-west-1", launch_template="gpu", subnets=("subnet-1",))
AZURE = AzureOptions(subscription="s", resource_group="gpu", region="westeurope", scale_sets=("default=t4",))
needs_boto3 = pytest.mark.skipif(find_spec("boto3") is None, reason="NOT RUN: boto3 is not installed (extra `aws`)")


@needs_boto3
async def test_a_provider_has_its_registered_name(tmp_path: Path) -> None:
    """Its `name` is the name that it is opened by."""
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


def test_missing_aws_settings_are_reported_together() -> None:
    """By name, before any call to the cloud."""
    with pytest.raises(ConfigError) as refused:
        open_provider("aws", ProviderOptions(installation="ours"))
    assert [mistake.partition(":")[0] for mistake in refused.value.violations] == [
        "aws.region",
        "aws.launch_template",
        "aws.subnets",
    ]


def test_missing_azure_settings_are_reported_together() -> None:
    """By name, before any call to the cloud."""
    with pytest.raises(ConfigError) as refused:
        open_provider("azure", ProviderOptions(installation="ours"))
    assert [mistake.partition(":")[0] for mistake in refused.value.violations] == [
        "azure.subscription",
        "azure.resource_group",
        "azure.region",
        "azure.scale_set",
    ]


@pytest.mark.parametrize(
    "of_aks", [{"scale_sets": ("default=aks-gpu-12345678-vmss",)}, {"resource_group": "MC_group_cluster_westeurope"}]
)
def test_a_scale_set_of_aks_is_refused_by_name(of_aks: dict[str, object]) -> None:
    """Only AKS may change its capacity; the message has the alternative."""
    options = msgspec.structs.replace(AZURE, **of_aks)
    with pytest.raises(ConfigError, match=r"belongs to AKS.*create a scale set of your own"):
        open_provider("azure", ProviderOptions(installation="ours", azure=options))


def test_missing_gcp_settings_are_reported_together() -> None:
    """By name, before any call to the cloud."""
    wrong = GcpOptions(groups=("l4", "*=europe-west4/l4"))
    with pytest.raises(ConfigError) as refused:
        open_provider("gcp", ProviderOptions(installation="ours", gcp=wrong))
    assert [mistake.partition(": ")[0] for mistake in refused.value.violations] == [
        "gcp.project",
        "gcp.groups",
        "gcp.groups",
    ]
    assert "is not a zone; regional groups are not supported" in refused.value.violations[2]


@pytest.mark.parametrize(
    ("cloud", "ceiling", "words"),
    [
        ("aws", "g5.*", r"aws\.spot_ceilings: 'g5\.\*' is not type=US dollars"),
        ("aws", "=0.6", "is not type=US dollars"),
        ("aws", "g5.*=inf", "is not type=US dollars"),
        ("azure", "Standard_NC*=-1", "below 0.00100"),
        ("gcp", "g2-standard-4=0.5", "gcp.spot_ceilings: Compute Engine accepts no ceiling"),
    ],
)
def test_an_invalid_spot_ceiling_is_refused_by_name(cloud: str, ceiling: str, words: str) -> None:
    """Not a number, out of the cloud's range, or a cloud without spot ceilings."""
    given = {
        name: msgspec.structs.replace(one, spot_ceilings=(ceiling,))
        for name, one in (("aws", AWS), ("azure", AZURE), ("gcp", GCP))
    }
    with pytest.raises(ConfigError, match=words):
        open_provider(cloud, ProviderOptions(installation="ours", **{cloud: given[cloud]}))  # type: ignore[arg-type]


def test_an_unknown_provider_is_refused_by_name() -> None:
    """The message lists the known names."""
    with pytest.raises(ConfigError, match="'ibm' is not one of aws, azure, gcp, karpenter, sim"):
        open_provider("ibm", ProviderOptions(installation="ours"))


def test_a_missing_option_is_refused_by_name() -> None:
    """The simulated cloud has no default address."""
    with pytest.raises(ConfigError, match="url"):
        open_provider("sim", ProviderOptions(installation="ours"))
