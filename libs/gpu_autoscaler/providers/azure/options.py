"""Settings of the Azure driver ([azure]), validated before any call."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.files import read_text
from gpu_autoscaler.providers.spot_ceilings import ceiling_violations

OWNER = "provider azure"
# Set by the driver, so the file of `machine_path` may not set them.
DRIVER_FIELDS = ("hardwareProfile", "virtualMachineScaleSet", "priority", "evictionPolicy", "billingProfile")
# AKS's own scale sets: AKS manages their size and would undo machines added or removed by us (AKS documentation,
# "Support policies for Azure Kubernetes Service", read 2026-11-22).
_OF_AKS = re.compile(r"aks-.+-vmss")
_AKS_RESOURCES = re.compile(r"MC_.+_.+_.+", re.IGNORECASE)


class AzureOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and from what machines are created."""

    subscription: str | None = None  # id
    resource_group: str | None = None
    region: str | None = None  # e.g. westeurope
    # Name of the flexible scale set into which the machines of all pools without a set are created.
    scale_set: str | None = None
    machine_path: str | None = None  # JSON, `properties` of a virtual machine: image, disk, network, OS
    instance_types: tuple[str, ...] = ("Standard_NC*", "Standard_ND*", "Standard_NV*")
    # `pool=name` of uniform scale sets that provide the pool's machines. A pool may have several.
    scale_sets: tuple[str, ...] = ()
    # `size=US dollars per hour`, sizes may be patterns: maximum spot price; the lowest match applies. Without one
    # machines are never evicted for their price. Machines of uniform sets use the set's own profile.
    spot_ceilings: tuple[str, ...] = ()
    user_data_path: str | None = None  # text with {labels} and {taints}; None: the image joins by itself
    prices_path: str | None = None  # JSON, US dollars per hour by offer key or `type/*/capacity type`


def validate_options(options: AzureOptions) -> None:
    """Raise ConfigError with all violations."""
    required = {
        "subscription": "the subscription's id",
        "resource_group": "the resource group of the scale sets",
        "region": "the region of the cluster, e.g. westeurope",
    }
    violations = [
        f"azure.{name}: is required; set it to {description}"
        for name, description in required.items()
        if not getattr(options, name)
    ]
    violations += [
        f"azure.scale_sets: {scale_set!r} is not pool=name"
        for scale_set in options.scale_sets
        if not scale_set.partition("=")[2]
    ]
    violations += ceiling_violations("azure.spot_ceilings", options.spot_ceilings)
    if not options.scale_set and not options.scale_sets:
        violations.append("azure.scale_set: is required without azure.scale_sets; name a flexible scale set")
    if options.scale_set and not options.machine_path:
        violations.append("azure.machine_path: is required with azure.scale_set; a file with `properties` of a machine")
    if options.scale_set and not options.instance_types:
        violations.append("azure.instance_types: is empty; name types or patterns, e.g. Standard_NC*_T4_v3")
    names = [scale_set.partition("=")[2].strip() for scale_set in options.scale_sets] + [options.scale_set or ""]
    is_of_aks = _AKS_RESOURCES.fullmatch(options.resource_group or "") is not None
    violations += [
        f"azure scale set {name}: belongs to AKS, which manages its size; create a scale set of your own outside of the"
        " resource group MC_..., whose nodes join the cluster"
        for name in names
        if name and (_OF_AKS.fullmatch(name) or is_of_aks)
    ]
    if violations:
        raise ConfigError(OWNER, violations)


def machine_of(path: str) -> dict[str, Any]:
    """Return the machine properties in the file. Raises ConfigError."""
    try:
        machine = msgspec.json.decode(read_text(OWNER, path), type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(OWNER, [f"{path}: is not a JSON object: {exc}"]) from exc
    violations = [f"{path}: {name} is set by the driver; remove it" for name in DRIVER_FIELDS if name in machine]
    violations += [
        f"{path}: {name} is missing; see `properties` of Virtual Machines - Create Or Update"
        for name in ("storageProfile", "networkProfile")
        if name not in machine
    ]
    if violations:
        raise ConfigError(OWNER, violations)
    return machine


def names_by_pool(scale_sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the scale set names of each pool."""
    names: dict[str, tuple[str, ...]] = {}
    for pool, _, name in (scale_set.partition("=") for scale_set in scale_sets):
        names[pool.strip()] = (*names.get(pool.strip(), ()), name.strip())
    return names
