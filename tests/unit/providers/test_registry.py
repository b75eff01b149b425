"""Providers are found by name."""

from importlib.util import find_spec

import pytest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.aws import AwsOptions
from gpu_autoscaler.providers.registry import PROVIDERS, ProviderOptions, open_provider

AWS = AwsOptions(region="eu-west-1", launch_template="gpu", subnets=("subnet-1",))
needs_boto3 = pytest.mark.skipif(find_spec("boto3") is None, reason="NOT RUN: boto3 is not installed (extra `aws`)")


@needs_boto3
async def test_a_provider_knows_its_registered_name() -> None:
    """What is opened under a name says that name of itself."""
    for name in PROVIDERS:
        provider = open_provider(name, ProviderOptions(installation="ours", url="http://127.0.0.1:1", aws=AWS))
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


def test_an_unknown_provider_is_refused_by_name() -> None:
    """With the names that there are."""
    with pytest.raises(ConfigError, match="'ibm' is none of aws, sim"):
        open_provider("ibm", ProviderOptions(installation="ours"))


def test_a_missing_option_is_refused_by_name() -> None:
    """The simulated cloud has no address of its own."""
    with pytest.raises(ConfigError, match="url"):
        open_provider("sim", ProviderOptions(installation="ours"))
