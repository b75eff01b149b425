"""All providers by name. A new cloud adds one entry to PROVIDERS."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import msgspec

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.providers.aws import AwsCapacity, AwsOptions
from gpu_autoscaler.providers.azure import AzureCapacity, AzureOptions
from gpu_autoscaler.providers.gcp import GcpCapacity, GcpOptions
from gpu_autoscaler.providers.karpenter import KarpenterCapacity, KarpenterOptions, LimitsModeCapacity
from gpu_autoscaler.providers.preflight import Finding, error, ok
from gpu_autoscaler.providers.protocol import CapacityProvider, wall_clock
from gpu_autoscaler.providers.sim import SimCapacity


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


def _sim(options: ProviderOptions) -> CapacityProvider:
    if options.url is None:
        raise ConfigError("provider sim", ["url: is required; set it to the address of simcluster"])
    return SimCapacity(options.url, installation=options.installation, call_seconds_max=options.call_seconds_max)


def _cloud(
    driver: Callable[..., CapacityProvider], settings: Callable[[ProviderOptions], msgspec.Struct]
) -> Callable[[ProviderOptions], CapacityProvider]:
    """Return a factory of a cloud's driver with its own settings."""

    def open_driver(options: ProviderOptions) -> CapacityProvider:
        return driver(
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
    kind = LimitsModeCapacity if options.karpenter.mode == "limits" else KarpenterCapacity
    return kind(options.karpenter, options.kube(), installation=options.installation, now=options.now)


PROVIDERS: Mapping[str, Callable[[ProviderOptions], CapacityProvider]] = {
    "aws": _cloud(AwsCapacity, lambda options: options.aws),
    "azure": _cloud(AzureCapacity, lambda options: options.azure),
    "karpenter": _karpenter,
    "gcp": _cloud(GcpCapacity, lambda options: options.gcp),
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
        if isinstance(provider, AwsCapacity | AzureCapacity | GcpCapacity | KarpenterCapacity):
            return await provider.preflight()
        offers = await provider.offers()
    except TransientError as exc:
        return [error("offers", str(exc), f"check provider.url, {options.url}")]
    finally:
        await provider.close()
    return [ok("offers", f"{len(offers)} of {len({offer.instance_type for offer in offers})} types")]
