"""All providers by name. A new cloud adds one entry to PROVIDERS."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.providers.aws import AwsCapacity, AwsOptions
from gpu_autoscaler.providers.azure import AzureCapacity, AzureOptions
from gpu_autoscaler.providers.gcp import GcpCapacity, GcpOptions
from gpu_autoscaler.providers.karpenter import KarpenterCapacity, KarpenterOptions, LimitedCapacity
from gpu_autoscaler.providers.preflight import Finding, error, ok
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler.providers.sim import SimCapacity


class ProviderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all providers."""

    installation: str  # UID of the kube-system namespace: owner of the instances
    url: str | None = None
    call_seconds_max: float = 30.0  # wall time
    now: Callable[[], datetime] = lambda: datetime.now(UTC)  # cluster time
    aws: AwsOptions = AwsOptions()
    azure: AzureOptions = AzureOptions()
    karpenter: KarpenterOptions = KarpenterOptions()
    kube: Callable[[], Connection] | None = None  # to the cluster in which NodeClaims are made
    gcp: GcpOptions = GcpOptions()


def _sim(options: ProviderOptions) -> CapacityProvider:
    if options.url is None:
        raise ConfigError("provider sim", ["url: is needed; set it to the address of simcluster"])
    return SimCapacity(options.url, installation=options.installation, call_seconds_max=options.call_seconds_max)


def _aws(options: ProviderOptions) -> CapacityProvider:
    return AwsCapacity(
        options.aws,
        installation=options.installation,
        url=options.url,
        call_seconds_max=options.call_seconds_max,
        now=options.now,
    )


def _azure(options: ProviderOptions) -> CapacityProvider:
    return AzureCapacity(
        options.azure,
        installation=options.installation,
        url=options.url,
        call_seconds_max=options.call_seconds_max,
        now=options.now,
    )


def _karpenter(options: ProviderOptions) -> CapacityProvider:
    if options.kube is None:
        raise ConfigError("provider karpenter", ["kube: is needed; it makes NodeClaims in a cluster"])
    kind = LimitedCapacity if options.karpenter.mode == "limits" else KarpenterCapacity
    return kind(options.karpenter, options.kube(), installation=options.installation, now=options.now)


def _gcp(options: ProviderOptions) -> CapacityProvider:
    return GcpCapacity(
        options.gcp,
        installation=options.installation,
        url=options.url,
        call_seconds_max=options.call_seconds_max,
        now=options.now,
    )


PROVIDERS: Mapping[str, Callable[[ProviderOptions], CapacityProvider]] = {
    "aws": _aws,
    "azure": _azure,
    "karpenter": _karpenter,
    "gcp": _gcp,
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
