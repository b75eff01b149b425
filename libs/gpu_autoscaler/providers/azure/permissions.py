"""Every call that the driver makes, with what each needs to be allowed: the source of the role and of its errors.

A test holds this table against what was asked of the fake. Sources: Azure REST API reference of each call; Azure
documentation, "Azure permissions for Compute" and "... for Networking" (read 2026-11-22).
"""

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

Way = Literal["always", "machines", "groups", "prices"]
Budget = Literal["writes", "ends", "reads"]

COMPUTE = "Microsoft.Compute"
_VERSION = "2024-11-01"
_OF_GROUP = f"/subscriptions/{{subscription}}/resourceGroups/{{resource_group}}/providers/{COMPUTE}"
_OF_SUBSCRIPTION = f"/subscriptions/{{subscription}}/providers/{COMPUTE}"


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """One call: how it is made, what it needs, on behalf of which way of buying, and what is lost without it."""

    operation: str  # as Azure's specification names it
    method: str
    path: str
    version: str = _VERSION
    budget: Budget = "reads"
    actions: tuple[str, ...]  # those of dependent resources included
    way: Way
    without: str  # what does not work then
    is_launch: bool = False


CALLS: Mapping[str, Allowed] = {
    one.operation: one
    for one in (
        Allowed(
            operation="VirtualMachines_List",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachines",
            actions=(f"{COMPUTE}/virtualMachines/read",),
            way="always",
            without="no machine is found again: nothing is bought or removed",
        ),
        Allowed(
            operation="VirtualMachines_Get",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachines/{{name}}",
            actions=(f"{COMPUTE}/virtualMachines/read",),
            way="machines",
            without="a machine cannot be seen to be gone",
        ),
        Allowed(
            operation="VirtualMachines_CreateOrUpdate",
            method="PUT",
            path=f"{_OF_GROUP}/virtualMachines/{{name}}",
            budget="writes",
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
            without="nothing is bought one by one",
            is_launch=True,
        ),
        Allowed(
            operation="VirtualMachines_Delete",
            method="DELETE",
            path=f"{_OF_GROUP}/virtualMachines/{{name}}",
            budget="ends",
            actions=(
                f"{COMPUTE}/virtualMachines/delete",
                f"{COMPUTE}/disks/delete",
                "Microsoft.Network/networkInterfaces/delete",
            ),
            way="machines",
            without="machines that were bought one by one are never removed",
        ),
        Allowed(
            operation="VirtualMachineScaleSets_Get",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}",
            actions=(f"{COMPUTE}/virtualMachineScaleSets/read",),
            way="always",
            without="no scale set is known, so nothing is for sale",
        ),
        Allowed(
            operation="VirtualMachineScaleSets_Update",
            method="PATCH",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}",
            budget="writes",
            actions=(
                f"{COMPUTE}/virtualMachineScaleSets/write",
                "Microsoft.Network/virtualNetworks/subnets/join/action",
            ),
            way="always",
            without="nothing is bought: orders are written on the scale set",
            is_launch=True,
        ),
        Allowed(
            operation="VirtualMachineScaleSets_DeleteInstances",
            method="POST",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}/delete",
            budget="ends",
            actions=(f"{COMPUTE}/virtualMachineScaleSets/delete/action",),
            way="groups",
            without="machines of uniform scale sets are never removed",
        ),
        Allowed(
            operation="VirtualMachineScaleSetVMs_List",
            method="GET",
            path=f"{_OF_GROUP}/virtualMachineScaleSets/{{scale_set}}/virtualMachines",
            actions=(f"{COMPUTE}/virtualMachineScaleSets/virtualMachines/read",),
            way="groups",
            without="no machine of a uniform scale set is found again",
        ),
        Allowed(
            operation="Operations_Get",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/locations/{{region}}/operations/{{name}}",
            actions=(f"{COMPUTE}/locations/operations/read",),
            way="always",
            without="why a launch failed later is not told",
        ),
        Allowed(
            operation="ActivityLogs_List",
            method="GET",
            path="/subscriptions/{subscription}/providers/Microsoft.Insights/eventtypes/management/values",
            version="2015-04-01",
            actions=("Microsoft.Insights/eventtypes/values/read",),
            way="always",
            without="a machine that was evicted is dated when it is first missed, some seconds late",
        ),
        Allowed(
            operation="ResourceSkus_List",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/skus",
            version="2021-07-01",
            actions=(f"{COMPUTE}/skus/read",),
            way="always",
            without="sizes come from the bundled table, and each is taken for sold in each zone",
        ),
        Allowed(
            operation="Usage_List",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/locations/{{region}}/usages",
            actions=(f"{COMPUTE}/locations/usages/read",),
            way="prices",
            without="a quota of zero shows only as a refusal",
        ),
        Allowed(
            operation="VirtualMachineImages_List",
            method="GET",
            path=f"{_OF_SUBSCRIPTION}/locations/{{region}}/publishers/{{name}}/versions",
            actions=(f"{COMPUTE}/locations/publishers/artifacttypes/offers/skus/versions/read",),
            way="machines",
            without="an image that is not sold in the region shows with the first order",
        ),
        Allowed(
            operation="Permissions_ListForResourceGroup",
            method="GET",
            path=(
                "/subscriptions/{subscription}/resourceGroups/{resource_group}/providers/Microsoft.Authorization/"
                "permissions"
            ),
            version="2022-04-01",
            actions=("Microsoft.Authorization/permissions/read",),
            way="always",
            without="a missing right to buy or remove shows with the first order",
        ),
        Allowed(
            operation="AutoscaleSettings_ListByResourceGroup",
            method="GET",
            path=(
                "/subscriptions/{subscription}/resourceGroups/{resource_group}/providers/Microsoft.Insights/"
                "autoscalesettings"
            ),
            version="2022-10-01",
            actions=("Microsoft.Insights/autoscaleSettings/read",),
            way="groups",
            without="an autoscaler of Azure's own on the same scale set is not noticed",
        ),
    )
}
# Asked of another host, and of nobody's permission: Azure documentation, "Azure Retail Prices overview".
PRICES_PATH = "/api/retail/prices"
PRICES_CALL = "RetailPrices_List"


def actions_of(operation: str) -> tuple[str, ...]:
    """Return what has to be allowed for this call; nothing for one that anybody may make."""
    return CALLS[operation].actions if operation in CALLS else ()


def is_allowed(action: str, granted: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether one of the caller's permissions has the action, and does not take it back.

    Source: Azure documentation, "Understand Azure role definitions", actions and notActions (read 2026-11-22).
    """

    def named(patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

    return any(named(one.get("actions") or ()) and not named(one.get("notActions") or ()) for one in granted)


def role_of(ways: Iterable[Way], scope: str, subscription: str) -> str:
    """Return a custom role, as JSON for `az role definition create`, for these ways of buying."""
    wanted = set(ways) | {"always"}
    actions = sorted({action for call in CALLS.values() if call.way in wanted for action in call.actions})
    role = {
        "Name": "GPU Autoscaler",
        "Description": f"What gpu-autoscaler asks for; assign it to its identity on {scope} and on the subnet.",
        "Actions": actions,
        "AssignableScopes": [f"/subscriptions/{subscription}"],
    }
    return json.dumps(role, indent=2)
