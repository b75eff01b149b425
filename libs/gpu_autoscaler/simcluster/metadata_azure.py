"""Instance metadata of simulated machines in Azure's form: `/nodes/<name>/metadata/...`, with Scheduled Events.

Source: Azure documentation, "Azure Metadata Service: Scheduled Events for Linux VMs" (read 2026-11-22).
"""

from email.utils import format_datetime

from aiohttp import web

from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.instances import Machine

_TYPES = {"maintenance": "Redeploy"}


def add_azure_metadata_routes(app: web.Application, cloud: Cloud) -> None:
    """Serve /nodes/<name>/metadata in this application."""

    async def events(request: web.Request) -> web.Response:
        machine = _machine(cloud, request)
        told = [] if machine.notice is None else [_event(machine)]
        return web.json_response({"DocumentIncarnation": len(told), "Events": told})

    async def release(request: web.Request) -> web.Response:
        """Start an approved event at once; the machine still ends at the notice's time."""
        _machine(cloud, request)
        asked = await request.json()
        if not isinstance(asked.get("StartRequests"), list):
            raise web.HTTPBadRequest(text="StartRequests: is missing")
        return web.Response()

    async def compute(request: web.Request) -> web.Response:
        machine = _machine(cloud, request)
        return web.json_response(
            {
                "resourceId": machine.provider_id.removeprefix("azure://"),
                "name": machine.instance_id,
                "vmSize": machine.offer.instance_type,
            }
        )

    app.router.add_get("/nodes/{node}/metadata/scheduledevents", events)
    app.router.add_post("/nodes/{node}/metadata/scheduledevents", release)
    app.router.add_get("/nodes/{node}/metadata/instance/compute", compute)


def _machine(cloud: Cloud, request: web.Request) -> Machine:
    """Return the running machine at the address; one that is gone does not answer."""
    machine = cloud.machine_of(request.match_info["node"])
    if machine is None or machine.state not in ("running", "terminating"):
        raise web.HTTPBadGateway(text="no machine answers at this address")
    if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
        raise web.HTTPBadRequest(text="Bad request. Required metadata header or api-version is missing.")
    return machine


def _event(machine: Machine) -> dict[str, object]:
    notice = machine.notice
    return {
        "EventId": f"{machine.instance_id}/{notice.at.isoformat()}" if notice else "",
        "EventType": _TYPES.get(notice.kind, "Preempt") if notice else "",
        "EventStatus": "Scheduled",
        "ResourceType": "VirtualMachine",
        "Resources": [machine.provider_id.rpartition("/")[2]],
        "NotBefore": format_datetime(notice.at, usegmt=True) if notice else "",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
