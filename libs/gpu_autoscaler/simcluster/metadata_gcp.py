"""Instance metadata of simulated machines in Google's form: `/nodes/<name>/computeMetadata/v1/...`.

Without `Metadata-Flavor: Google` 403; with `wait_for_change` an answer waits for another ETag than `last_etag`. A
notice shows from when it is given: who gives it says how long ahead.
Source: Compute Engine, "View and query VM metadata", "Preemptible VM instances" (read 2026-11-21).
"""

import asyncio
import hashlib

from aiohttp import web

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.instances import Machine

LOOKED_SECONDS = 0.05  # wall time between polls
WAITED_SECONDS_MAX = 60.0
_FLAVOR = {"Metadata-Flavor": "Google"}


def add_gcp_metadata_routes(app: web.Application, cloud: Cloud) -> None:
    """Serve /nodes/<name>/computeMetadata in this application."""

    async def read(request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            raise web.HTTPForbidden(text="Missing Metadata-Flavor:Google header.")
        path, last = request.match_info["path"], request.query.get("last_etag")
        loop = asyncio.get_running_loop()
        waited_seconds = min(float(request.query.get("timeout_sec", WAITED_SECONDS_MAX)), WAITED_SECONDS_MAX)
        until = loop.time() + (waited_seconds if request.query.get("wait_for_change") == "true" else 0.0)
        while True:
            text = _value(_machine(cloud, request), path)
            if text is None:
                raise web.HTTPNotFound(headers=_FLAVOR)
            etag = hashlib.sha256(text.encode()).hexdigest()[:16]
            if etag != last or loop.time() >= until:
                return web.Response(text=text, headers={**_FLAVOR, "ETag": etag})
            await asyncio.sleep(LOOKED_SECONDS)

    app.router.add_get("/nodes/{node}/computeMetadata/v1/{path:.*}", read)


def _machine(cloud: Cloud, request: web.Request) -> Machine:
    """Return the running machine at the address; one that is gone does not answer."""
    machine = cloud.machine_of(request.match_info["node"])
    if machine is None or machine.state not in ("running", "terminating"):
        raise web.HTTPBadGateway(text="no machine answers at this address")
    return machine


def _value(machine: Machine, path: str) -> str | None:
    """Return the text at a metadata path, None where there is none."""
    notice, provider_id = machine.notice, machine.provider_id.removeprefix("gce://")
    is_maintained = notice is not None and notice.kind == "maintenance"
    plain: dict[str, str] = {
        "instance/preempted": "TRUE" if notice is not None and not is_maintained else "FALSE",
        "instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE" if is_maintained else "NONE",
        "instance/scheduling/preemptible": "TRUE" if machine.offer.capacity_type is CapacityType.SPOT else "FALSE",
        "instance/zone": f"projects/123456789012/zones/{machine.offer.zone}",
        "instance/name": machine.instance_id,
        "project/project-id": provider_id.partition("/")[0],
    }
    return plain.get(path)
