"""What the fake offers: sizes and SKUs, the retail price list, and vCPU quotas.

Prices are fixtures, not quotes: those of comparable machines in the simulated catalog, by GPU.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpu_autoscaler.providers.azure.catalog import KNOWN_INSTANCE_TYPES
from gpu_autoscaler.simcloud.azure.machines import Machine
from gpu_autoscaler.simcloud.azure.wire import rejected
from gpu_autoscaler.simcloud.rest import RestCall
from gpu_autoscaler.simcluster.offers import (
    GPU_USD_PER_HOUR,
    SPOT_RATIO_BY_ZONE,
    VCPU_USD_PER_HOUR,
    VCPUS_WITH_GPU,
    InstanceType,
)

ZONES = ("1", "2", "3")
PAGE_PRICES_COUNT = 100
QUOTA_UNSET = 100_000
_GIBIBYTE = 2**30
_SPOT_RATIO = SPOT_RATIO_BY_ZONE["sim-a"]
# name, vCPUs, memory GiB, GPUs, boot seconds (a fixture: larger machines take longer)
_ROWS = (
    ("Standard_NC4as_T4_v3", 4, 28, 1, 90.0),
    ("Standard_NC8as_T4_v3", 8, 56, 1, 90.0),
    ("Standard_NC16as_T4_v3", 16, 110, 1, 100.0),
    ("Standard_NC64as_T4_v3", 64, 440, 4, 120.0),
    ("Standard_NC6s_v3", 6, 112, 1, 100.0),
    ("Standard_NC24s_v3", 24, 448, 4, 120.0),
    ("Standard_NC24ads_A100_v4", 24, 220, 1, 150.0),
    ("Standard_NC48ads_A100_v4", 48, 440, 2, 150.0),
    ("Standard_NC96ads_A100_v4", 96, 880, 4, 180.0),
    ("Standard_ND96asr_v4", 96, 900, 8, 210.0),
    ("Standard_ND96amsr_A100_v4", 96, 1900, 8, 210.0),
    ("Standard_ND96isr_H100_v5", 96, 1900, 8, 240.0),
    ("Standard_ND96isr_H200_v5", 96, 1850, 8, 240.0),
    ("Standard_NV36ads_A10_v5", 36, 440, 1, 100.0),
)


def _catalogue_row(name: str, vcpus: int, gib: float, gpus: int, boot_seconds: float) -> InstanceType:
    kind = KNOWN_INSTANCE_TYPES[name]
    gpu_gib = None if kind.gpu_memory_bytes is None else kind.gpu_memory_bytes // _GIBIBYTE
    usd = gpus * GPU_USD_PER_HOUR.get((kind.gpu_model or "", gpu_gib or 0), 1.5)
    usd += max(0, vcpus - gpus * VCPUS_WITH_GPU) * VCPU_USD_PER_HOUR
    return InstanceType(
        name=name,
        vcpu_count=vcpus,
        memory_gib=gib,
        gpu_count=gpus,
        gpu_model=kind.gpu_model,
        gpu_memory_gib=gpu_gib,
        price_usd_per_hour=round(usd, 4),
        boot_seconds=boot_seconds,
    )


INSTANCE_CATALOG = tuple(_catalogue_row(*row) for row in _ROWS)
SIZES = {instance_type.name: instance_type for instance_type in INSTANCE_CATALOG}
# Machine properties: the file of `azure.machine_path`.
_SUBNET = (
    "/subscriptions/00000000-0000-4000-8000-000000000000/resourceGroups/gpu/providers/Microsoft.Network"
    "/virtualNetworks/cluster/subnets/nodes"
)
_INTERFACE: dict[str, Any] = {
    "name": "node",
    "properties": {
        "primary": True,
        "deleteOption": "Delete",
        "ipConfigurations": [{"name": "node", "properties": {"subnet": {"id": _SUBNET}}}],
    },
}
MACHINE: dict[str, Any] = {
    "storageProfile": {
        "imageReference": {"publisher": "microsoft-dsvm", "offer": "ubuntu-hpc", "sku": "2204", "version": "latest"},
        "osDisk": {
            "createOption": "FromImage",
            "deleteOption": "Delete",
            "diskSizeGB": 100,
            "managedDisk": {"storageAccountType": "Premium_LRS"},
        },
    },
    "osProfile": {
        "adminUsername": "node",
        "linuxConfiguration": {"disablePasswordAuthentication": True, "provisionVMAgent": True},
    },
    "networkProfile": {"networkInterfaceConfigurations": [_INTERFACE]},
}
FLEXIBLE: dict[str, Any] = {
    "orchestrationMode": "Flexible",
    "platformFaultDomainCount": 1,
    "singlePlacementGroup": False,
}


def skus(region: str) -> list[dict[str, Any]]:
    """Return the list of SKUs. Source: Azure REST API, "Resource Skus - List"."""
    return [
        {
            "resourceType": "virtualMachines",
            "name": size.name,
            "family": KNOWN_INSTANCE_TYPES[size.name].family,
            "locations": [region],
            "locationInfo": [{"location": region, "zones": list(ZONES)}],
            "capabilities": [
                {"name": "vCPUs", "value": str(int(size.vcpu_count))},
                {"name": "MemoryGB", "value": str(size.memory_gib)},
                {"name": "GPUs", "value": str(size.gpu_count)},
                {"name": "LowPriorityCapable", "value": "True"},
            ],
            "restrictions": [],
        }
        for size in INSTANCE_CATALOG
    ]


def image_versions(own_region: str, region: str, publisher: str, offer: str, sku: str) -> list[dict[str, Any]]:
    """Return the versions of a marketplace image. Source: "Virtual Machine Images - List"."""
    image = MACHINE["storageProfile"]["imageReference"]
    if (region, publisher, offer, sku) != (own_region, image["publisher"], image["offer"], image["sku"]):
        raise rejected(404, "NotFound", f"Artifact: VMImage was not found for {publisher}/{offer}/{sku} in {region}.")
    return [{"name": name, "location": region} for name in ("22.04.2026050101", "22.04.2026100101")]


def usages(quota_vcpus: Mapping[str, int], alive: Sequence[Machine]) -> list[dict[str, Any]]:
    """Return quotas and usage; unset quotas are large. Source: "Usage - List"."""
    families = {kind.family for kind in KNOWN_INSTANCE_TYPES.values()}
    return [
        {
            "unit": "Count",
            "name": {"value": name, "localizedValue": name},
            "limit": quota_vcpus.get(name, QUOTA_UNSET),
            "currentValue": sum(int(SIZES[vm.size].vcpu_count) for vm in alive if name in _quotas_of(vm)),
        }
        for name in ("cores", "lowPriorityCores", *sorted(families))
    ]


def _quotas_of(machine: Machine) -> tuple[str, ...]:
    """Return the quotas of a machine: spot has one for all families, others have the region's and their family's."""
    return ("lowPriorityCores",) if machine.is_spot else ("cores", KNOWN_INSTANCE_TYPES[machine.size].family)


def exceeded_quota(quota_vcpus: Mapping[str, int], alive: Iterable[Machine], wanted: Iterable[Machine]) -> str | None:
    """Return the name of a quota that the launch would exceed, None if it fits."""
    new = list(wanted)
    every = [*alive, *new]
    for name, limit in quota_vcpus.items():
        counted = [machine for machine in every if name in _quotas_of(machine)]
        vcpus = sum(SIZES[machine.size].vcpu_count for machine in counted)
        if any(name in _quotas_of(machine) for machine in new) and vcpus > limit:
            return name
    return None


def see_ceiling(machine: Machine, ratio_of: Callable[[str], float]) -> None:
    """Reject a spot machine whose price exceeds its ceiling. Source: Azure REST API, `BillingProfile`."""
    if is_above_ceiling(machine, ratio_of):
        why = (
            f"The max price {_ceiling(machine)} USD is lower than the spot price {_spot_price(machine, ratio_of)} USD."
        )
        raise rejected(409, "MaxPriceTooLow", why)


def is_above_ceiling(machine: Machine, ratio_of: Callable[[str], float]) -> bool:
    """Return whether spot costs more than the machine's ceiling; -1 is no ceiling."""
    most = _ceiling(machine)
    return machine.is_spot and most != -1 and most < _spot_price(machine, ratio_of)


def _ceiling(machine: Machine) -> float:
    return float(machine.properties.get("billingProfile", {}).get("maxPrice", -1))


def _spot_price(machine: Machine, ratio_of: Callable[[str], float]) -> float:
    return usd_per_hour(machine.size, is_spot=True) * ratio_of(machine.offer_key)


def usd_per_hour(size: str, *, is_spot: bool) -> float:
    """Return the fixture price."""
    usd = SIZES[size].price_usd_per_hour or 0.0
    return round(usd * _SPOT_RATIO, 6) if is_spot else usd


def retail_prices(call: RestCall, host: str, spot_ratio_of: Callable[[str], float]) -> dict[str, Any]:
    """Return a page of the price list for the sizes in the filter, including Windows prices. `spot_ratio_of`: factor of
    an offer's usual spot price. The list has no zones: the highest factor applies."""
    wanted = call.parameters.get("$filter", "")
    names = re.findall(r"armSkuName eq '([^']+)'", wanted)
    region = re.search(r"armRegionName eq '([^']+)'", wanted)
    where = region[1] if region else ""
    items = [
        item
        for name in names
        if name in SIZES
        for item in _items(name, where, max(spot_ratio_of(f"{name}/{where}-{zone}/spot") for zone in ZONES))
    ]
    start = int(call.parameters.get("$skip", "0"))
    page = items[start : start + PAGE_PRICES_COUNT]
    more = start + len(page) < len(items)
    version = call.parameters["api-version"]
    link = f"{host}/api/retail/prices?api-version={version}&$filter={wanted}&$skip={start + len(page)}"
    return {"BillingCurrency": "USD", "Items": page, "NextPageLink": link if more else None, "Count": len(page)}


def _items(name: str, region: str, spot_ratio: float) -> Iterable[dict[str, Any]]:
    for product in (f"Virtual Machines {name} Series", f"Virtual Machines {name} Series Windows"):
        for suffix, is_spot in (("", False), (" Spot", True), (" Low Priority", True)):
            usd = usd_per_hour(name, is_spot=is_spot) * (2.0 if product.endswith("Windows") else 1.0)
            usd *= spot_ratio if is_spot else 1.0
            yield {
                "currencyCode": "USD",
                "retailPrice": usd,
                "unitPrice": usd,
                "armRegionName": region,
                "armSkuName": name,
                "skuName": name.removeprefix("Standard_").replace("_", " ") + suffix,
                "productName": product,
                "serviceName": "Virtual Machines",
                "unitOfMeasure": "1 Hour",
                "type": "Consumption",
            }
