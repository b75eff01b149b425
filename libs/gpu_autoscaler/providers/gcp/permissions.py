"""All calls of the driver with the permissions they need: source of the custom role and of error texts.

Tests compare this table with the calls that the fake received, and its paths with Google's API description. Sources:
Compute Engine API v1 (discovery document) and its reference, "IAM permissions" of each method; Cloud Billing API,
"services.skus.list"; Cloud Resource Manager API v3, "projects.testIamPermissions"; read 2026-11-21. The roles
compute.instanceAdmin.v1 and compute.viewer include all of them.
"""

import json
from collections.abc import Mapping
from typing import Literal

import msgspec

Api = Literal["compute", "cloudbilling", "cloudresourcemanager"]
RateLimitName = Literal["reads", "launches", "ends"]
ROLES = ("roles/compute.instanceAdmin.v1", "roles/compute.viewer")


class Permission(msgspec.Struct, frozen=True):
    """A call: its request, its permissions, and the effect of their absence."""

    method: str
    path: str
    without: str  # effect if not allowed
    permissions: tuple[str, ...] = ()  # in the table: if not the call's own. Empty: none, once the API is enabled
    rate_limit: RateLimitName = "reads"
    api: Api = "compute"
    is_optional: bool = False  # the rest works without it
    operation: str = ""  # as the API's description names it; in the table: by the key


REQUESTS = "instanceGroupManagerResizeRequests"  # needed for gcp.resize_request_groups only
_ZONE = "projects/{project}/zones/{zone}"
_GROUP = f"{_ZONE}/instanceGroupManagers/{{instanceGroupManager}}"
_UPDATE = "compute.instanceGroupManagers.update"
_COMPUTE_SKUS = "services/6F81-5844-456A/skus"  # of Compute Engine

_CALLS: Mapping[str, Permission] = {
    "instances.aggregatedList": Permission(
        "GET",
        "projects/{project}/aggregated/instances",
        "instances cannot be listed: nothing is launched or terminated",
        ("compute.instances.list",),
    ),
    "instances.get": Permission(
        "GET", _ZONE + "/instances/{instance}", "owners of instances are unknown, so nothing is terminated"
    ),
    "instances.delete": Permission(
        "DELETE",
        _ZONE + "/instances/{instance}",
        "an instance that somebody removed from its group is never terminated",
        rate_limit="ends",
        is_optional=True,
    ),
    "instanceGroupManagers.list": Permission(
        "GET", _ZONE + "/instanceGroupManagers", "groups are unknown, so there are no offers"
    ),
    "instanceGroupManagers.listManagedInstances": Permission(
        "POST",
        _GROUP + "/listManagedInstances",
        "launch outcomes are unknown, so nothing is launched",
        ("compute.instanceGroupManagers.get",),
    ),
    "instanceGroupManagers.createInstances": Permission(
        "POST", _GROUP + "/createInstances", "nothing is launched", (_UPDATE,), rate_limit="launches"
    ),
    "instanceGroupManagers.deleteInstances": Permission(
        "POST",
        _GROUP + "/deleteInstances",
        "nothing is terminated, and refused launches cannot be deleted",
        (_UPDATE,),
        rate_limit="ends",
    ),
    **{
        f"{REQUESTS}.{name}": Permission(
            method,
            f"{_GROUP}/resizeRequests{path}",
            "nothing is launched from groups of gcp.resize_request_groups",
            ("compute.instanceGroupManagers.get" if method == "GET" else _UPDATE,),
            rate_limit="reads" if method == "GET" else "launches" if name == "insert" else "ends",
            is_optional=True,
        )
        for name, method, path in (
            ("insert", "POST", ""),
            ("get", "GET", "/{resizeRequest}"),
            ("list", "GET", ""),
            ("cancel", "POST", "/{resizeRequest}/cancel"),
            ("delete", "DELETE", "/{resizeRequest}"),
        )
    },
    "zoneOperations.get": Permission(
        "GET", _ZONE + "/operations/{operation}", "rejections of launch requests have no reason"
    ),
    "zoneOperations.list": Permission(
        "GET", _ZONE + "/operations", "ends of instances are unknown, so nothing is launched"
    ),
    "instanceTemplates.get": Permission(
        "GET",
        "projects/{project}/global/instanceTemplates/{instanceTemplate}",
        "groups have no known machine type, so no offers",
    ),
    "regionInstanceTemplates.get": Permission(
        "GET",
        "projects/{project}/regions/{region}/instanceTemplates/{instanceTemplate}",
        "groups with a regional template have no known machine type, so no offers",
        ("compute.instanceTemplates.get",),
        is_optional=True,
    ),
    "machineTypes.get": Permission(
        "GET",
        _ZONE + "/machineTypes/{machineType}",
        "the built-in table of machine types is used; types it lacks are not offered",
        is_optional=True,
    ),
    "regions.get": Permission(
        "GET",
        "projects/{project}/regions/{region}",
        "exhausted quotas surface as launch refusals, and groups named without a zone are not found",
        is_optional=True,
    ),
    "advice.capacityHistory": Permission(
        "POST",
        "projects/{project}/regions/{region}/advice/capacityHistory",
        "spot prices come from the billing catalog, and interruption risk from the default prior",
        is_optional=True,
    ),
    "reservations.get": Permission(
        "GET",
        _ZONE + "/reservations/{reservation}",
        "a used-up reservation surfaces as launch refusals",
        is_optional=True,
    ),
    "projects.get": Permission(
        "GET", "projects/{project}", "a GPU quota of zero for the project surfaces as launch refusals", is_optional=True
    ),
    "projects.testIamPermissions": Permission(
        "POST",
        "projects/{project}:testIamPermissions",
        "a missing permission shows with the first order",
        api="cloudresourcemanager",
        is_optional=True,
    ),
    "services.skus.list": Permission(
        "GET",
        _COMPUTE_SKUS,
        "on-demand prices come from the price file only; offers without a price are not used",
        api="cloudbilling",
    ),
}
CALLS: Mapping[str, Permission] = {
    operation: msgspec.structs.replace(
        call,
        operation=operation,
        permissions=call.permissions or ((f"compute.{operation}",) if call.api == "compute" else ()),
    )
    for operation, call in _CALLS.items()
}


def permissions_of(operation: str) -> tuple[str, ...]:
    """Return the permissions that this call needs."""
    return CALLS[operation].permissions


def role_text() -> str:
    """Return the custom role of the driver, as JSON for `gcloud iam roles create --file`."""
    permissions = sorted({permission for call in CALLS.values() for permission in call.permissions})
    role = {"title": "gpu-autoscaler", "stage": "GA", "includedPermissions": permissions}
    return json.dumps(role, indent=2)
