"""Translation of Azure errors, machines and sizes. The only module that knows Azure's formats.

Sources: Azure REST API, "Virtual Machines", "Virtual Machine Scale Set VMs", "Resource Skus" (2024-11-01, 2021-07-01);
Azure documentation, "Troubleshoot allocation failures", "Error codes for Spot Virtual Machines" and "Common error codes
in Azure Resource Manager"; cloud-provider-azure (provider ids, zones); read 2026-11-22.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from gpu_autoscaler.cloudmeta.azure import PROVIDER_ID_PREFIX, provider_id_of
from gpu_autoscaler.events.node import InstanceState
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.gpu import GIBIBYTE, GPU_TABLE, GpuModel, gpu_sizes
from gpu_autoscaler.model.ids import ActionId, ProviderId
from gpu_autoscaler.model.labels import ACTION_ID, INSTALLATION, POOL, PREFIX
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.providers.allocatable import machine_resources
from gpu_autoscaler.providers.azure.permissions import actions_of
from gpu_autoscaler.providers.market import MachineKind
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order, RefusalKind, RefusalScope

THROTTLED_SECONDS = 5.0
REGIONAL_ZONE = "0"  # zone label of nodes outside of zones in cloud-provider-azure: their fault domain


def _tag(label: str) -> str:
    """Return the label as a tag name: without slashes (Azure documentation, "Use tags to organize your resources")."""
    return label.replace("/", "_")


INSTALLATION_TAG, ACTION_TAG, POOL_TAG = _tag(INSTALLATION), _tag(ACTION_ID), _tag(POOL)
LEDGER_TAG = _tag(f"{PREFIX}/orders-")  # on uniform scale sets, with a number: orders of their machines
LAUNCH_LOG_TAG = _tag(f"{PREFIX}/begun-")  # on flexible scale sets, with a number: their launch log
PRICE_TAG = _tag(f"{PREFIX}/price-micro-usd-per-hour")  # the agreed price, which no call returns later

_REFUSED: Mapping[str, tuple[RefusalKind, RefusalScope]] = {
    "AllocationFailed": ("capacity", "offer"),
    "ZonalAllocationFailed": ("capacity", "offer"),
    "OverconstrainedAllocationRequest": ("capacity", "offer"),
    "OverconstrainedZonalAllocationRequest": ("capacity", "offer"),
    "SkuNotAvailable": ("capacity", "offer"),
    "NotAvailableForSubscription": ("capacity", "offer"),
    "MaxPriceTooLow": ("capacity", "offer"),
    "SubnetIsFull": ("capacity", "region"),
    "QuotaExceeded": ("quota", "region"),
    "AuthorizationFailed": ("permission", "region"),
    "LinkedAuthorizationFailed": ("permission", "region"),
    "RequestDisallowedByPolicy": ("permission", "region"),
    "ReadOnlyDisabledSubscription": ("permission", "region"),
    "MarketplacePurchaseEligibilityFailed": ("permission", "region"),
    "InvalidParameter": ("configuration", "offer"),
    "InvalidRequestContent": ("configuration", "offer"),
    "ResourceNotFound": ("configuration", "offer"),
    "ResourceGroupNotFound": ("configuration", "region"),
    "SubscriptionNotFound": ("configuration", "region"),
    "NotFound": ("configuration", "offer"),
    "BadRequest": ("configuration", "offer"),
    "PropertyChangeNotAllowed": ("configuration", "offer"),
    "LocationNotAvailableForResourceType": ("configuration", "region"),
}
_CREDENTIALS = frozenset({"ExpiredAuthenticationToken", "InvalidAuthenticationToken", "AuthenticationFailed"})
_CONTENTION = frozenset({"Conflict", "AnotherOperationInProgress", "ConcurrentAllocationRequest", "PreconditionFailed"})
KNOWN_ERRORS = frozenset(_REFUSED) | _CREDENTIALS | _CONTENTION | {"TooManyRequests", "OperationNotAllowed"}
_STATES: Mapping[str, InstanceState] = {"creating": "pending", "deleting": "terminating"}
# Memory of a size that its operating system does not see (karpenter-provider-azure, `VM_MEMORY_OVERHEAD_PERCENT`, its
# default).
_MEMORY_UNSEEN_RATIO = 0.075


class Denied(TransientError):
    """A read is not allowed: it fails until its permission is granted."""


def refusal_of(code: str, message: str) -> tuple[RefusalKind, RefusalScope] | None:
    """Return kind and scope of a launch error; None if a retry may help."""
    # One code with two meanings (Azure documentation, "Resolve errors for resource quotas").
    if code == "OperationNotAllowed":
        return ("quota", "region") if "quota" in message.lower() else ("configuration", "offer")
    return _REFUSED.get(code) or (("configuration", "offer") if code.startswith(("Invalid", "Image")) else None)


def failure(
    call: str, code: str, message: str, *, of_launch: bool, retry_after_seconds: float | None = None
) -> AutoscalerError:
    """Return our error for a refused call. Refusals of reads are never final: reads are retried."""
    text = f"{call}: {code}: {message}"
    if code in _CREDENTIALS:
        return TransientError(f"{text}; check the credentials and this machine's clock")
    if code == "TooManyRequests" or code in _CONTENTION:
        return TransientError(text, retry_after_seconds=retry_after_seconds or THROTTLED_SECONDS)
    refused = refusal_of(code, message)
    if refused is None:
        return TransientError(f"{text}; safe to retry", retry_after_seconds=retry_after_seconds)
    kind, scope = refused
    if kind == "permission":
        text += f"; allow {', '.join(actions_of(call))} (`gpu-autoscaler doctor --policy` prints the whole role)"
    elif kind == "configuration":
        text += "; check scale sets and machine_path in the settings under [azure]"
    if of_launch:
        return LaunchRefused(text, code=code, kind=kind, scope=scope)
    return Denied(text) if kind == "permission" else TransientError(text)


def zone_name(region: str, zones: object) -> str:
    """Return the zone in the form of node labels: `westeurope-1`."""
    return f"{region}-{zones[0]}" if isinstance(zones, list | tuple) and zones else REGIONAL_ZONE


def zones_of(zone: str) -> list[str]:
    """Return the zone in the form of Azure requests; empty outside of zones."""
    return [] if zone == REGIONAL_ZONE else [zone.rpartition("-")[2]]


def resource_id_of(provider_id: ProviderId) -> str:
    """Return Azure's id in `azure:///subscriptions/...`. Raises PermanentError for another cloud's id."""
    if not provider_id.startswith(f"{PROVIDER_ID_PREFIX}/subscriptions/"):
        raise PermanentError(
            f"{provider_id} is not an instance of this cloud ({PROVIDER_ID_PREFIX}/subscriptions/...): left untouched"
        )
    return provider_id.removeprefix(PROVIDER_ID_PREFIX)


def tags_of(order: Order) -> dict[str, str]:
    """Return the tags that identify a machine as ours and as the order's."""
    tags = {INSTALLATION_TAG: order.installation, ACTION_TAG: order.action_id, POOL_TAG: order.pool}
    if order.offer.price_micro_usd_per_hour is not None:
        tags[PRICE_TAG] = str(order.offer.price_micro_usd_per_hour)
    return tags


def read_tags(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a machine or scale set; Azure returns names in any case."""
    known = {name.lower(): name for name in (INSTALLATION_TAG, ACTION_TAG, POOL_TAG, PRICE_TAG)}
    return {known.get(name.lower(), name): value for name, value in (data.get("tags") or {}).items()}


def instance_of(data: Mapping[str, Any], *, now: datetime, is_spot: bool | None = None) -> Instance:
    """Return the machine that Azure describes. `is_spot`: of its scale set, as its machines do not report it."""
    tags, properties = read_tags(data), data["properties"]
    price, action_id = tags.get(PRICE_TAG, ""), tags.get(ACTION_TAG)
    size = properties.get("hardwareProfile", {}).get("vmSize") or data.get("sku", {}).get("name", "")
    created = properties.get("timeCreated")
    if is_spot is None:
        is_spot = properties.get("priority") in ("Spot", "Low")
    return Instance(
        provider_id=provider_id_of(data["id"]),
        action_id=None if action_id is None else ActionId(action_id),
        state=_STATES.get(properties.get("provisioningState", "").lower(), "running"),
        instance_type=size,
        zone=zone_name(data["location"], data.get("zones")),
        capacity_type=CapacityType.SPOT if is_spot else CapacityType.ON_DEMAND,
        price_micro_usd_per_hour=int(price) if price.isdigit() else None,
        launched_at=now if created is None else msgspec.convert(created, datetime),
    )


class InstanceType(MachineKind, frozen=True, kw_only=True):
    """A size, and the quota that it counts against."""

    family: str  # of quotas, e.g. standardNCADSA100v4Family
    is_spot_sold: bool = True


# No call reports a GPU's model or memory: the size's name contains the model (Azure's "naming conventions"), or, for
# older sizes, its family determines it.


def gpus_by_name_part(table: Iterable[GpuModel] = GPU_TABLE) -> dict[str, tuple[str, int]]:
    """Return GPU model and memory in bytes by the part of a size's name."""
    return {
        size.azure_name_part: (model.name, size.memory_gib * GIBIBYTE)
        for model, size in gpu_sizes(table)
        if size.azure_name_part is not None
    }


def gpus_by_family(table: Iterable[GpuModel] = GPU_TABLE) -> dict[str, tuple[str, int]]:
    """Return GPU model and memory in bytes by family, in lower case."""
    return {
        family: (model.name, size.memory_gib * GIBIBYTE)
        for model, size in gpu_sizes(table)
        for family in size.azure_families
    }


_GPU_BY_NAME_PART, _GPU_BY_FAMILY = gpus_by_name_part(), gpus_by_family()
# AMD's, which our pods cannot use.
_NOT_NVIDIA = frozenset({"MI300X", "V620", "V710", "MI25"})
_AMD_FAMILIES = frozenset({"standardnvsv4family"})


def gpu_of(name: str, family: str) -> tuple[str, int] | None:
    """Return model and memory of a size's GPUs; None if it has none of NVIDIA's."""
    parts = name.split("_")
    if _NOT_NVIDIA & set(parts) or family.lower() in _AMD_FAMILIES:
        return None
    by_part = next((_GPU_BY_NAME_PART[part] for part in parts if part in _GPU_BY_NAME_PART), None)
    return _GPU_BY_FAMILY.get(family.lower()) or by_part


def parse_instance_type(sku: Mapping[str, Any]) -> InstanceType | None:
    """Return the size that the list of SKUs describes; None without a whole GPU of a known NVIDIA model. Azure counts a
    share of a GPU as no GPU, so such sizes are left out."""
    capabilities = {capability["name"]: capability["value"] for capability in sku.get("capabilities", ())}
    gpu_count = int(float(capabilities.get("GPUs", "0")))
    gpu = gpu_of(sku["name"], sku.get("family", ""))
    if gpu_count == 0 or gpu is None:
        return None
    return build_instance_type(
        sku["name"],
        family=sku.get("family", ""),
        vcpu_count=int(capabilities.get("vCPUsAvailable") or capabilities["vCPUs"]),
        memory_gib=float(capabilities["MemoryGB"]),
        gpu_count=gpu_count,
        is_spot_sold=capabilities.get("LowPriorityCapable", "True") == "True",
    )


def build_instance_type(
    name: str, *, family: str, vcpu_count: int, memory_gib: float, gpu_count: int, is_spot_sold: bool = True
) -> InstanceType:
    """Return the size with its allocatable resources."""
    gpu = gpu_of(name, family)
    return InstanceType(
        name=name,
        family=family,
        vcpu_count=vcpu_count,
        resources=machine_resources(vcpu_count, memory_gib * GIBIBYTE * (1 - _MEMORY_UNSEEN_RATIO), gpu_count),
        gpu_model=None if gpu is None else gpu[0],
        gpu_memory_bytes=None if gpu is None else gpu[1],
        is_spot_sold=is_spot_sold,
    )
