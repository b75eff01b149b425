"""All calls of the driver with the permissions they need: source of the custom role and of error texts.

A test compares this table with the calls that the fake received. Sources: Azure REST API reference of each call; Azure
documentation, "Azure permissions for Compute" and "... for Networking" (read 2026-11-22).
"""

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

Way = Literal["always", "machines", "groups", "prices"]
RateLimitName = Literal["writes", "ends", "reads"]

_SUBSCRIPTION = "/subscriptions/{subscription}/providers/"
_GROUP = "/subscriptions/{subscription}/resourceGroups/{resource_group}/providers/"
_LOCATION = _SUBSCRIPTION + "Microsoft.Compute/locations/{region}/"
_MACHINES = _GROUP + "Microsoft.Compute/virtualMachines"
_SET = _GROUP + "Microsoft.Compute/virtualMachineScaleSets/{scale_set}"


class Permission(msgspec.Struct, frozen=True, kw_only=True):
    """A call: its request, its permissions, the purchase method that needs it, and the effect of its absence."""

    operation: str = ""  # as Azure's specification names it; in the table: by the key
    method: str
    path: str
    version: str = "2024-11-01"
    rate_limit: RateLimitName = "reads"
    actions: tuple[str, ...]  # including those on dependent resources
    way: Way
    without: str  # effect if not allowed
    is_launch: bool = False


def _call(method: str, path: str, way: Way, without: str, *actions: str, **options: Any) -> Permission:  # noqa: ANN401 - fields of Permission
    """Return the call; actions without a provider are Compute's."""
    named = tuple(action if action.startswith("Microsoft.") else f"Microsoft.Compute/{action}" for action in actions)
    return Permission(method=method, path=path, way=way, without=without, actions=named, **options)


_CALLS: Mapping[str, Permission] = {
    "VirtualMachines_List": _call(
        "GET",
        _MACHINES,
        "always",
        "machines cannot be listed: nothing is launched or terminated",
        "virtualMachines/read",
    ),
    "VirtualMachines_Get": _call(
        "GET", _MACHINES + "/{name}", "machines", "a machine cannot be verified to be gone", "virtualMachines/read"
    ),
    "VirtualMachines_CreateOrUpdate": _call(
        "PUT",
        _MACHINES + "/{name}",
        "machines",
        "nothing is launched into the flexible scale set",
        "virtualMachines/write",
        "virtualMachineScaleSets/write",
        "disks/write",
        "Microsoft.Network/networkInterfaces/write",
        "Microsoft.Network/networkInterfaces/join/action",
        "Microsoft.Network/networkSecurityGroups/join/action",
        "Microsoft.Network/virtualNetworks/subnets/join/action",
        "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
        rate_limit="writes",
        is_launch=True,
    ),
    "VirtualMachines_Delete": _call(
        "DELETE",
        _MACHINES + "/{name}",
        "machines",
        "machines of the flexible scale set are never terminated",
        "virtualMachines/delete",
        "disks/delete",
        "Microsoft.Network/networkInterfaces/delete",
        rate_limit="ends",
    ),
    "VirtualMachineScaleSets_Get": _call(
        "GET", _SET, "always", "scale sets are unknown, so there are no offers", "virtualMachineScaleSets/read"
    ),
    "VirtualMachineScaleSets_Update": _call(
        "PATCH",
        _SET,
        "always",
        "nothing is launched: orders are recorded on the scale set",
        "virtualMachineScaleSets/write",
        "Microsoft.Network/virtualNetworks/subnets/join/action",
        rate_limit="writes",
        is_launch=True,
    ),
    "VirtualMachineScaleSets_DeleteInstances": _call(
        "POST",
        _SET + "/delete",
        "groups",
        "machines of uniform scale sets are never terminated",
        "virtualMachineScaleSets/delete/action",
        rate_limit="ends",
    ),
    "VirtualMachineScaleSetVMs_List": _call(
        "GET",
        _SET + "/virtualMachines",
        "groups",
        "machines of uniform scale sets cannot be listed",
        "virtualMachineScaleSets/virtualMachines/read",
    ),
    "Operations_Get": _call(
        "GET",
        _LOCATION + "operations/{name}",
        "always",
        "late launch failures have no reason",
        "locations/operations/read",
    ),
    "ActivityLogs_List": _call(
        "GET",
        _SUBSCRIPTION + "Microsoft.Insights/eventtypes/management/values",
        "always",
        "an evicted machine is dated when it is first missed, some seconds late",
        "Microsoft.Insights/eventtypes/values/read",
        version="2015-04-01",
    ),
    "ResourceSkus_List": _call(
        "GET",
        _SUBSCRIPTION + "Microsoft.Compute/skus",
        "always",
        "the built-in table of sizes is used, and each size is offered in each zone",
        "skus/read",
        version="2021-07-01",
    ),
    "Usage_List": _call(
        "GET", _LOCATION + "usages", "prices", "exhausted quotas surface as launch refusals", "locations/usages/read"
    ),
    "VirtualMachineImages_List": _call(
        "GET",
        _LOCATION + "publishers/{name}/versions",
        "machines",
        "an image that is not offered in the region shows with the first order",
        "locations/publishers/artifacttypes/offers/skus/versions/read",
    ),
    "Permissions_ListForResourceGroup": _call(
        "GET",
        _GROUP + "Microsoft.Authorization/permissions",
        "always",
        "a missing permission shows with the first order",
        "Microsoft.Authorization/permissions/read",
        version="2022-04-01",
    ),
    "AutoscaleSettings_ListByResourceGroup": _call(
        "GET",
        _GROUP + "Microsoft.Insights/autoscalesettings",
        "groups",
        "an Azure autoscale setting on the same scale set is not detected",
        "Microsoft.Insights/autoscaleSettings/read",
        version="2022-10-01",
    ),
}
CALLS: Mapping[str, Permission] = {
    operation: msgspec.structs.replace(call, operation=operation) for operation, call in _CALLS.items()
}
# On another host, without permission: Azure documentation, "Azure Retail Prices overview".
PRICES_PATH = "/api/retail/prices"
PRICES_CALL = "RetailPrices_List"


def actions_of(operation: str) -> tuple[str, ...]:
    """Return the actions that this call needs; none for public calls."""
    return CALLS[operation].actions if operation in CALLS else ()


def is_allowed(action: str, granted: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the caller's permissions include the action. Source: Azure documentation, "Understand Azure role
    definitions", actions and notActions (read 2026-11-22)."""

    def matches(patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

    return any(
        matches(permission.get("actions") or ()) and not matches(permission.get("notActions") or ())
        for permission in granted
    )


def role_of(ways: Iterable[Way], scope: str, subscription: str) -> str:
    """Return the custom role for these purchase methods, as JSON for `az role definition create`."""
    wanted = set(ways) | {"always"}
    actions = sorted({action for call in CALLS.values() if call.way in wanted for action in call.actions})
    role = {
        "Name": "GPU Autoscaler",
        "Description": f"Permissions of gpu-autoscaler; assign it to its identity on {scope} and on the subnet.",
        "Actions": actions,
        "AssignableScopes": [f"/subscriptions/{subscription}"],
    }
    return json.dumps(role, indent=2)
