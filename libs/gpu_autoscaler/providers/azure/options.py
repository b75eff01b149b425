"""What the Azure driver is told: the settings under [azure], checked before anything is asked of the cloud."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.providers.ceilings import ceiling_violations
from gpu_autoscaler.providers.files import read_text

OWNER = "provider azure"
# What is ours to say of a machine, so that the file of `machine_path` may not say it.
OURS_TO_SAY = ("hardwareProfile", "virtualMachineScaleSet", "priority", "evictionPolicy", "billingProfile")
# AKS's own groups: their number belongs to AKS's API, and a machine that is added or removed by us would be undone
# (AKS documentation, "Support policies for Azure Kubernetes Service", read 2026-11-22).
_OF_AKS = re.compile(r"aks-.+-vmss")
_AKS_RESOURCES = re.compile(r"MC_.+_.+_.+", re.IGNORECASE)


class AzureOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and from what machines are made."""

    subscription: str | None = None  # id
    resource_group: str | None = None
    region: str | None = None  # e.g. westeurope
    # Name of the flexible scale set that all other pools' machines are made into, one by one.
    scale_set: str | None = None
    machine_path: str | None = None  # JSON, `properties` of a virtual machine: image, disk, network, system
    instance_types: tuple[str, ...] = ("Standard_NC*", "Standard_ND*", "Standard_NV*")
    # `pool=name` of uniform scale sets: such a pool's machines come from there. A pool may have several.
    scale_sets: tuple[str, ...] = ()
    # `size=US dollars an hour`, patterns among the sizes: what spot costs at most; the least of those that match. None:
    # never taken for its price. Machines of uniform sets carry what the set's own profile says.
    spot_ceilings: tuple[str, ...] = ()
    user_data_path: str | None = None  # a text with {labels} and {taints}; None: the image joins by itself
    prices_path: str | None = None  # JSON, US dollars an hour by offer key or `type/*/capacity type`


def validate_options(options: AzureOptions) -> None:
    """Raise ConfigError with every mistake at once."""
    wanted = {
        "subscription": "the subscription's id",
        "resource_group": "the resource group of the scale sets",
        "region": "the region of the cluster, e.g. westeurope",
    }
    mistakes = [
        f"azure.{name}: is needed; set it to {what}" for name, what in wanted.items() if not getattr(options, name)
    ]
    mistakes += [
        f"azure.scale_sets: {scale_set!r} is not pool=name"
        for scale_set in options.scale_sets
        if not scale_set.partition("=")[2]
    ]
    mistakes += ceiling_violations("azure.spot_ceilings", options.spot_ceilings)
    if not options.scale_set and not options.scale_sets:
        mistakes.append("azure.scale_set: is needed where there are no azure.scale_sets; name a flexible scale set")
    if options.scale_set and not options.machine_path:
        mistakes.append("azure.machine_path: is needed with azure.scale_set; a file with `properties` of a machine")
    if options.scale_set and not options.instance_types:
        mistakes.append("azure.instance_types: is empty; name types or patterns, e.g. Standard_NC*_T4_v3")
    names = [scale_set.partition("=")[2].strip() for scale_set in options.scale_sets] + [options.scale_set or ""]
    is_of_aks = _AKS_RESOURCES.fullmatch(options.resource_group or "") is not None
    mistakes += [
        f"azure scale set {name}: is AKS's own, whose number only AKS may change; make a scale set of your own, whose"
        " nodes join the cluster, outside of the resource group MC_..."
        for name in names
        if name and (_OF_AKS.fullmatch(name) or is_of_aks)
    ]
    if mistakes:
        raise ConfigError(OWNER, mistakes)


def machine_of(path: str) -> dict[str, Any]:
    """Return what stands in the file of a machine. Raises ConfigError."""
    try:
        told = msgspec.json.decode(read_text(OWNER, path), type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(OWNER, [f"{path}: is no JSON object: {exc}"]) from exc
    mistakes = [f"{path}: {name} is said by us; leave it out" for name in OURS_TO_SAY if name in told]
    mistakes += [
        f"{path}: {name} is missing; see `properties` of Virtual Machines - Create Or Update"
        for name in ("storageProfile", "networkProfile")
        if name not in told
    ]
    if mistakes:
        raise ConfigError(OWNER, mistakes)
    return told


def names_by_pool(scale_sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the scale sets by pool."""
    found: dict[str, tuple[str, ...]] = {}
    for pool, _, name in (scale_set.partition("=") for scale_set in scale_sets):
        found[pool.strip()] = (*found.get(pool.strip(), ()), name.strip())
    return found
