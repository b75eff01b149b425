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


class Permission(msgspec.Struct, frozen=True, kw_only=True):
    """A call: its request, its permissions, and the effect of their absence."""

    operation: str  # as the API's description names it
    method: str
    path: str
    permissions: tuple[str, ...]  # empty: none, once the API is enabled
    without: str  # effect if not allowed
    rate_limit: RateLimitName = "reads"
    api: Api = "compute"
    is_optional: bool = False  # the rest works without it


REQUESTS = "instanceGroupManagerResizeRequests"  # needed for gcp.resize_request_groups only
_ZONE = "projects/{project}/zones/{zone}"
_GROUP = f"{_ZONE}/instanceGroupManagers/{{instanceGroupManager}}"
_UPDATE = "compute.instanceGroupManagers.update"

CALLS: Mapping[str, Permission] = {
    one.operation: one
    for one in (
        Permission(
            operation="instances.aggregatedList",
            method="GET",
            path="projects/{project}/aggregated/instances",
            permissions=("compute.instances.list",),
            without="instances cannot be listed: nothing is launched or terminated",
        ),
        Permission(
            operation="instances.get",
            method="GET",
            path=f"{_ZONE}/instances/{{instance}}",
            permissions=("compute.instances.get",),
            without="owners of instances are unknown, so nothing is terminated",
        ),
        Permission(
            operation="instances.delete",
            method="DELETE",
            path=f"{_ZONE}/instances/{{instance}}",
            permissions=("compute.instances.delete",),
            without="an instance that somebody removed from its group is never terminated",
            rate_limit="ends",
            is_optional=True,
        ),
        Permission(
            operation="instanceGroupManagers.list",
            method="GET",
            path=f"{_ZONE}/instanceGroupManagers",
            permissions=("compute.instanceGroupManagers.list",),
            without="groups are unknown, so there are no offers",
        ),
        Permission(
            operation="instanceGroupManagers.listManagedInstances",
            method="POST",
            path=f"{_GROUP}/listManagedInstances",
            permissions=("compute.instanceGroupManagers.get",),
            without="launch outcomes are unknown, so nothing is launched",
        ),
        Permission(
            operation="instanceGroupManagers.createInstances",
            method="POST",
            path=f"{_GROUP}/createInstances",
            permissions=("compute.instanceGroupManagers.update",),
            without="nothing is launched",
            rate_limit="launches",
        ),
        Permission(
            operation="instanceGroupManagers.deleteInstances",
            method="POST",
            path=f"{_GROUP}/deleteInstances",
            permissions=("compute.instanceGroupManagers.update",),
            without="nothing is terminated, and refused launches cannot be deleted",
            rate_limit="ends",
        ),
        *(
            Permission(
                operation=f"{REQUESTS}.{name}",
                method=method,
                path=f"{_GROUP}/resizeRequests{path}",
                permissions=("compute.instanceGroupManagers.get" if method == "GET" else _UPDATE,),
                without="nothing is launched from groups of gcp.resize_request_groups",
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
        ),
        Permission(
            operation="zoneOperations.get",
            method="GET",
            path=f"{_ZONE}/operations/{{operation}}",
            permissions=("compute.zoneOperations.get",),
            without="rejections of launch requests have no reason",
        ),
        Permission(
            operation="zoneOperations.list",
            method="GET",
            path=f"{_ZONE}/operations",
            permissions=("compute.zoneOperations.list",),
            without="ends of instances are unknown, so nothing is launched",
        ),
        Permission(
            operation="instanceTemplates.get",
            method="GET",
            path="projects/{project}/global/instanceTemplates/{instanceTemplate}",
            permissions=("compute.instanceTemplates.get",),
            without="groups have no known machine type, so no offers",
        ),
        Permission(
            operation="regionInstanceTemplates.get",
            method="GET",
            path="projects/{project}/regions/{region}/instanceTemplates/{instanceTemplate}",
            permissions=("compute.instanceTemplates.get",),
            without="groups with a regional template have no known machine type, so no offers",
            is_optional=True,
        ),
        Permission(
            operation="machineTypes.get",
            method="GET",
            path=f"{_ZONE}/machineTypes/{{machineType}}",
            permissions=("compute.machineTypes.get",),
            without="the built-in table of machine types is used; types it lacks are not offered",
            is_optional=True,
        ),
        Permission(
            operation="regions.get",
            method="GET",
            path="projects/{project}/regions/{region}",
            permissions=("compute.regions.get",),
            without="exhausted quotas surface as launch refusals",
            is_optional=True,
        ),
        Permission(
            operation="advice.capacityHistory",
            method="POST",
            path="projects/{project}/regions/{region}/advice/capacityHistory",
            permissions=("compute.advice.capacityHistory",),
            without="spot prices come from the billing catalog, and interruption risk from the default prior",
            is_optional=True,
        ),
        Permission(
            operation="reservations.get",
            method="GET",
            path=f"{_ZONE}/reservations/{{reservation}}",
            permissions=("compute.reservations.get",),
            without="a used-up reservation surfaces as launch refusals",
            is_optional=True,
        ),
        Permission(
            operation="projects.get",
            method="GET",
            path="projects/{project}",
            permissions=("compute.projects.get",),
            without="a GPU quota of zero for the project surfaces as launch refusals",
            is_optional=True,
        ),
        Permission(
            operation="projects.testIamPermissions",
            method="POST",
            path="projects/{project}:testIamPermissions",
            permissions=(),
            without="a missing permission shows with the first order",
            api="cloudresourcemanager",
            is_optional=True,
        ),
        Permission(
            operation="services.skus.list",
            method="GET",
            path="services/6F81-5844-456A/skus",  # Compute Engine
            permissions=(),
            without="on-demand prices come from the price file only; offers without a price are not used",
            api="cloudbilling",
        ),
    )
}


def permissions_of(operation: str) -> tuple[str, ...]:
    """Return the permissions that this call needs."""
    return CALLS[operation].permissions


def role_text() -> str:
    """Return the custom role of the driver, as JSON for `gcloud iam roles create --file`."""
    permissions = sorted({permission for call in CALLS.values() for permission in call.permissions})
    role = {"title": "gpu-autoscaler", "stage": "GA", "includedPermissions": permissions}
    return json.dumps(role, indent=2)
