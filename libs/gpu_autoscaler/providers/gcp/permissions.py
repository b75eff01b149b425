"""Every call that the driver makes, with what each needs to be allowed: the source of the role and of its errors.

A test holds this table against what was asked of the fake, and its paths against Google's own description of the API.
Sources: Compute Engine API v1 (discovery document) and its reference, "IAM permissions" of each method; Cloud Billing
API, "services.skus.list"; Cloud Resource Manager API v3, "projects.testIamPermissions"; read 2026-11-21. All of it is
in the roles compute.instanceAdmin.v1 and compute.viewer.
"""

import json
from collections.abc import Mapping
from typing import Literal

import msgspec

Api = Literal["compute", "cloudbilling", "cloudresourcemanager"]
Pace = Literal["reads", "launches", "ends"]
ROLES = ("roles/compute.instanceAdmin.v1", "roles/compute.viewer")


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """One call: where it goes, what it needs, and what is lost without it."""

    operation: str  # as the API's description names it
    method: str
    path: str
    permissions: tuple[str, ...]  # empty: anybody may, once the API is enabled
    without: str  # what does not work then
    pace: Pace = "reads"
    api: Api = "compute"
    is_optional: bool = False  # something is lost without it, and the rest works


REQUESTS = "instanceGroupManagerResizeRequests"  # asked for gcp.together_groups alone
_ZONE = "projects/{project}/zones/{zone}"
_GROUP = f"{_ZONE}/instanceGroupManagers/{{instanceGroupManager}}"
_UPDATE = "compute.instanceGroupManagers.update"

CALLS: Mapping[str, Allowed] = {
    one.operation: one
    for one in (
        Allowed(
            operation="instances.aggregatedList",
            method="GET",
            path="projects/{project}/aggregated/instances",
            permissions=("compute.instances.list",),
            without="no instance is found again: nothing is bought or removed",
        ),
        Allowed(
            operation="instances.get",
            method="GET",
            path=f"{_ZONE}/instances/{{instance}}",
            permissions=("compute.instances.get",),
            without="nothing is removed, as whose it is cannot be seen",
        ),
        Allowed(
            operation="instances.delete",
            method="DELETE",
            path=f"{_ZONE}/instances/{{instance}}",
            permissions=("compute.instances.delete",),
            without="an instance that somebody took out of its group is never removed",
            pace="ends",
            is_optional=True,
        ),
        Allowed(
            operation="instanceGroupManagers.list",
            method="GET",
            path=f"{_ZONE}/instanceGroupManagers",
            permissions=("compute.instanceGroupManagers.list",),
            without="no group is known, so nothing is for sale",
        ),
        Allowed(
            operation="instanceGroupManagers.listManagedInstances",
            method="POST",
            path=f"{_GROUP}/listManagedInstances",
            permissions=("compute.instanceGroupManagers.get",),
            without="how a launch went cannot be seen, so nothing is bought",
        ),
        Allowed(
            operation="instanceGroupManagers.createInstances",
            method="POST",
            path=f"{_GROUP}/createInstances",
            permissions=("compute.instanceGroupManagers.update",),
            without="nothing is bought",
            pace="launches",
        ),
        Allowed(
            operation="instanceGroupManagers.deleteInstances",
            method="POST",
            path=f"{_GROUP}/deleteInstances",
            permissions=("compute.instanceGroupManagers.update",),
            without="nothing is removed, and a refused launch cannot be withdrawn",
            pace="ends",
        ),
        *(
            Allowed(
                operation=f"{REQUESTS}.{name}",
                method=method,
                path=f"{_GROUP}/resizeRequests{path}",
                permissions=("compute.instanceGroupManagers.get" if method == "GET" else _UPDATE,),
                without="groups of gcp.together_groups are not bought from",
                pace="reads" if method == "GET" else "launches" if name == "insert" else "ends",
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
        Allowed(
            operation="zoneOperations.get",
            method="GET",
            path=f"{_ZONE}/operations/{{operation}}",
            permissions=("compute.zoneOperations.get",),
            without="why a group took no launch cannot be seen",
        ),
        Allowed(
            operation="zoneOperations.list",
            method="GET",
            path=f"{_ZONE}/operations",
            permissions=("compute.zoneOperations.list",),
            without="when an instance ended cannot be seen, so nothing is bought",
        ),
        Allowed(
            operation="instanceTemplates.get",
            method="GET",
            path="projects/{project}/global/instanceTemplates/{instanceTemplate}",
            permissions=("compute.instanceTemplates.get",),
            without="what a group sells is not known, so nothing is for sale from it",
        ),
        Allowed(
            operation="regionInstanceTemplates.get",
            method="GET",
            path="projects/{project}/regions/{region}/instanceTemplates/{instanceTemplate}",
            permissions=("compute.instanceTemplates.get",),
            without="what a group with a regional template sells is not known, so nothing is for sale from it",
            is_optional=True,
        ),
        Allowed(
            operation="machineTypes.get",
            method="GET",
            path=f"{_ZONE}/machineTypes/{{machineType}}",
            permissions=("compute.machineTypes.get",),
            without="sizes come from the bundled table, and types that it lacks are not for sale",
            is_optional=True,
        ),
        Allowed(
            operation="regions.get",
            method="GET",
            path="projects/{project}/regions/{region}",
            permissions=("compute.regions.get",),
            without="a quota of zero shows only as a refusal",
            is_optional=True,
        ),
        Allowed(
            operation="advice.capacityHistory",
            method="POST",
            path="projects/{project}/regions/{region}/advice/capacityHistory",
            permissions=("compute.advice.capacityHistory",),
            without="spot has the catalogue's price, and its risk is our own prior",
            is_optional=True,
        ),
        Allowed(
            operation="reservations.get",
            method="GET",
            path=f"{_ZONE}/reservations/{{reservation}}",
            permissions=("compute.reservations.get",),
            without="a reservation that is used up shows only as a refusal",
            is_optional=True,
        ),
        Allowed(
            operation="projects.get",
            method="GET",
            path="projects/{project}",
            permissions=("compute.projects.get",),
            without="a quota of zero GPUs for the whole project shows only as a refusal",
            is_optional=True,
        ),
        Allowed(
            operation="projects.testIamPermissions",
            method="POST",
            path="projects/{project}:testIamPermissions",
            permissions=(),
            without="a missing right to buy or remove shows with the first order",
            api="cloudresourcemanager",
            is_optional=True,
        ),
        Allowed(
            operation="services.skus.list",
            method="GET",
            path="services/6F81-5844-456A/skus",  # Compute Engine
            permissions=(),
            without="on-demand has no price but the file's, so it is not bought",
            api="cloudbilling",
        ),
    )
}


def permissions_of(operation: str) -> tuple[str, ...]:
    """Return what has to be allowed for this call."""
    return CALLS[operation].permissions


def role_text() -> str:
    """Return the custom role, as JSON, that is all the driver needs: for `gcloud iam roles create --file`."""
    permissions = sorted({permission for call in CALLS.values() for permission in call.permissions})
    role = {"title": "gpu-autoscaler", "stage": "GA", "includedPermissions": permissions}
    return json.dumps(role, indent=2)
