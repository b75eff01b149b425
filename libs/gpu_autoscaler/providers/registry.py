"""All providers by name. A new cloud adds one entry to PROVIDERS. A driver is loaded when it is opened."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import Protocol, runtime_checkable

import msgspec

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.providers.aws.options import AwsOptions
from gpu_autoscaler.providers.azure.options import AzureOptions
from gpu_autoscaler.providers.gcp.options import GcpOptions
from gpu_autoscaler.providers.karpenter.options import KarpenterOptions
from gpu_autoscaler.providers.preflight import Finding, error, ok
from gpu_autoscaler.providers.protocol import CapacityProvider, wall_clock


class ProviderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all providers."""

    installation: str  # UID of the kube-system namespace: owner of the instances
    url: str | None = None
    call_seconds_max: float = 30.0  # wall time
    now: Callable[[], datetime] = wall_clock  # cluster time
    aws: AwsOptions = AwsOptions()
    azure: AzureOptions = AzureOptions()
    karpenter: KarpenterOptions = KarpenterOptions()
    kube: Callable[[], Connection] | None = None  # to the cluster in which NodeClaims are made
    gcp: GcpOptions = GcpOptions()


@runtime_checkable
class _Checkable(Protocol):
    """A driver that can check access and configuration."""

    async def preflight(self) -> Sequence[Finding]: ...


def _sim(options: ProviderOptions) -> CapacityProvider:
    if options.url is None:
        raise ConfigError("provider sim", ["url: is required; set it to the address of simcluster"])
    return _driver("sim.capacity:SimCapacity")(
        options.url, installation=options.installation, call_seconds_max=options.call_seconds_max
    )


def _driver(target: str) -> Callable[..., CapacityProvider]:
    """Load a driver's class: only the driver that is opened, as each has a client of its own."""
    module, name = target.split(":")
    loaded: Callable[..., CapacityProvider] = getattr(import_module(f"{__package__}.{module}"), name)
    return loaded


def _cloud(
    target: str, settings: Callable[[ProviderOptions], msgspec.Struct]
) -> Callable[[ProviderOptions], CapacityProvider]:
    """Return a factory of a cloud's driver with its own settings."""

    def open_driver(options: ProviderOptions) -> CapacityProvider:
        return _driver(target)(
            settings(options),
            installation=options.installation,
            url=options.url,
            call_seconds_max=options.call_seconds_max,
            now=options.now,
        )

    return open_driver


def _karpenter(options: ProviderOptions) -> CapacityProvider:
    if options.kube is None:
        raise ConfigError("provider karpenter", ["kube: is required: NodeClaims are made in a cluster"])
    is_limits = options.karpenter.mode == "limits"
    driver = _driver(
        "karpenter.limits_mode:LimitsModeCapacity" if is_limits else "karpenter.capacity:KarpenterCapacity"
    )
    return driver(options.karpenter, options.kube(), installation=options.installation, now=options.now)


PROVIDERS: Mapping[str, Callable[[ProviderOptions], CapacityProvider]] = {
    "aws": _cloud("aws.capacity:AwsCapacity", lambda options: options.aws),
    "azure": _cloud("azure.capacity:AzureCapacity", lambda options: options.azure),
    "karpenter": _karpenter,
    "gcp": _cloud("gcp.capacity:GcpCapacity", lambda options: options.gcp),
    "sim": _sim,
}


def open_provider(name: str, options: ProviderOptions) -> CapacityProvider:
    """Return the provider. Raises ConfigError for an unknown name or missing options."""
    if name not in PROVIDERS:
        raise ConfigError("provider", [f"name: {name!r} is not one of {', '.join(sorted(PROVIDERS))}"])
    return PROVIDERS[name](options)


async def run_preflight(name: str, options: ProviderOptions) -> Sequence[Finding]:
    """Return the findings of a preflight check. Raises ConfigError as `open_provider`."""
    provider = open_provider(name, options)
    try:
        if isinstance(provider, _Checkable):
            return await provider.preflight()
        offers = await provider.offers()
    except TransientError as exc:
        return [error("offers", str(exc), f"check provider.url, {options.url}")]
    finally:
        await provider.close()
    return [ok("offers", f"{len(offers)} of {len({offer.instance_type for offer in offers})} types")]
