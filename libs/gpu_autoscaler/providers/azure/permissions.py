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

COMPUTE = "Microsoft.Compute"
_VERSION = "2024-11-01"
_OF_GROUP = f"/subscriptions/{{subscription}}/resourceGroups/{{resource_group}}/providers/{COMPUTE}"
_OF_SUBSCRIPTION = f"/subscriptions/{{subscription}}/providers/{COMPUTE}"


class Permission(msgspec.Struct, frozen=True, kw_only=True):
    """A call: its request, its permissions, the purchase method that needs it, and the effect of its absence."""

    operation: str  # as Azure's specification names it
    method: str
    path: str
    version: str = _VERSION
    rate_limit: RateLimitName = "reads"
    actions: tuple[str, ...]  # including those on dependent resources
    way: Way
    without: str  # effect if not allowed
    is_launch: bool = False


CALLS: Mapping[str, Permission] = {
    one.operation: one
    for one in (
        Permission(
            operation="VirtualMachines_List",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachines",
            actions=(f"{COMPUTE}/virtualMachines/read",),
            way="always",
            without="machines cannot be listed: nothing is launched or terminated",
        ),
        Permission(
            operation="VirtualMachines_Get",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachines/{{name}}",
            actions=(f"{COMPUTE}/virtualMachines/read",),
            way="machines",
            without="a machine cannot be verified to be gone",
        ),
        Permission(
            operation="VirtualMachines_CreateOrUpdate",
            method="PUT",
            path=f"{_OF_GROUP}/virtualMachines/{{name}}",
            rate_limit="writes",
            actions=(
                f"{COMPUTE}/virtualMachines/write",
                f"{COMPUTE}/virtualMachineScaleSets/write",
                f"{COMPUTE}/disks/write",
                "Microsoft.Network/networkInterfaces/write",
                "Microsoft.Network/networkInterfaces/join/action",
                "Microsoft.Network/networkSecurityGroups/join/action",
                "Microsoft.Network/virtualNetworks/subnets/join/action",
                "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
            ),
            way="machines",
            without="nothing is launched into the flexible scale set",
            is_launch=True,
        ),
        Permission(
            operation="VirtualMachines_Delete",
            method="DELETE",
            path=f"{_OF_GROUP}/virtualMachines/{{name}}",
            rate_limit="ends",
            actions=(
                f"{COMPUTE}/virtualMachines/delete",
                f"{COMPUTE}/disks/delete",
                "Microsoft.Network/networkInterfaces/delete",
            ),
            way="machines",
            without="machines of the flexible scale set are never terminated",
        ),
        Permission(
            operation="VirtualMachineScaleSets_Get",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}",
            actions=(f"{COMPUTE}/virtualMachineScaleSets/read",),
            way="always",
            without="scale sets are unknown, so there are no offers",
        ),
        Permission(
            operation="VirtualMachineScaleSets_Update",
            method="PATCH",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}",
            rate_limit="writes",
            actions=(
                f"{COMPUTE}/virtualMachineScaleSets/write",
                "Microsoft.Network/virtualNetworks/subnets/join/action",
            ),
            way="always",
            without="nothing is launched: orders are recorded on the scale set",
            is_launch=True,
        ),
        Permission(
            operation="VirtualMachineScaleSets_DeleteInstances",
            method="POST",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}/delete",
            rate_limit="ends",
            actions=(f"{COMPUTE}/virtualMachineScaleSets/delete/action",),
            way="groups",
            without="machines of uniform scale sets are never terminated",
        ),
        Permission(
            operation="VirtualMachineScaleSetVMs_List",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}/virtualMachines",
            actions=(f"{COMPUTE}/virtualMachineScaleSets/virtualMachines/read",),
            way="groups",
            without="machines of uniform scale sets cannot be listed",
        ),
        Permission(
            operation="Operations_Get",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/locations/{{region}}/operations/{{name}}",
            actions=(f"{COMPUTE}/locations/operations/read",),
            way="always",
            without="late launch failures have no reason",
        ),
        Permission(
            operation="ActivityLogs_List",
            method="GET",
            path="/subscriptions/{subscription}/providers/Microsoft.Insights/eventtypes/management/values",
            version="2015-04-01",
            actions=("Microsoft.Insights/eventtypes/values/read",),
            way="always",
            without="an evicted machine is dated when it is first missed, some seconds late",
        ),
        Permission(
            operation="ResourceSkus_List",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/skus",
            version="2021-07-01",
            actions=(f"{COMPUTE}/skus/read",),
            way="always",
            without="the built-in table of sizes is used, and each size is offered in each zone",
        ),
        Permission(
            operation="Usage_List",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/locations/{{region}}/usages",
            actions=(f"{COMPUTE}/locations/usages/read",),
            way="prices",
            without="exhausted quotas surface as launch refusals",
        ),
        Permission(
            operation="VirtualMachineImages_List",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/locations/{{region}}/publishers/{{name}}/versions",
            actions=(f"{COMPUTE}/locations/publishers/artifacttypes/offers/skus/versions/read",),
            way="machines",
            without="an image that is not offered in the region shows with the first order",
        ),
        Permission(
            operation="Permissions_ListForResourceGroup",
            method="GET",
            path=(
                "/subscriptions/{subscription}/resourceGroups/{resource_group}/providers/Microsoft.Authorization/"
                "permissions"
            ),
            version="2022-04-01",
            actions=("Microsoft.Authorization/permissions/read",),
            way="always",
            without="a missing permission shows with the first order",
        ),
        Permission(
            operation="AutoscaleSettings_ListByResourceGroup",
            method="GET",
            path=(
                "/subscriptions/{subscription}/resourceGroups/{resource_group}/providers/Microsoft.Insights/"
                "autoscalesettings"
            ),
            version="2022-10-01",
            actions=("Microsoft.Insights/autoscaleSettings/read",),
            way="groups",
            without="an Azure autoscale setting on the same scale set is not detected",
        ),
    )
}
# On another host, without permission: Azure documentation, "Azure Retail Prices overview".
PRICES_PATH = "/api/retail/prices"
PRICES_CALL = "RetailPrices_List"


def actions_of(operation: str) -> tuple[str, ...]:
    """Return the actions that this call needs; none for public calls."""
    return CALLS[operation].actions if operation in CALLS else ()


def is_allowed(action: str, granted: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the caller's permissions include the action.

    Source: Azure documentation, "Understand Azure role definitions", actions and notActions (read 2026-11-22).
    """

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
