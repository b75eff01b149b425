"""Providers are found by name."""

import pytest

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.registry import PROVIDERS, ProviderOptions, open_provider


async def test_a_provider_knows_its_registered_name() -> None:
    """What is opened under a name says that name of itself."""
    for name in PROVIDERS:
        provider = open_provider(name, ProviderOptions(installation="ours", url="http://127.0.0.1:1"))
        assert provider.name == name
        await provider.close()


def test_an_unknown_provider_is_refused_by_name() -> None:
    """With the names that there are."""
    with pytest.raises(ConfigError, match="'ibm' is none of sim"):
        open_provider("ibm", ProviderOptions(installation="ours"))


def test_a_missing_option_is_refused_by_name() -> None:
    """The simulated cloud has no address of its own."""
    with pytest.raises(ConfigError, match="url"):
        open_provider("sim", ProviderOptions(installation="ours"))
