"""Instance metadata of simulated machines as EC2's IMDSv2, Azure's and Google's services answer, under `/nodes/<name>`.

EC2 (`/latest`): without a token 401; 404 where there is nothing to say, which for notices means "none". Google
(`/computeMetadata/v1`): with `wait_for_change` an answer waits for another ETag than `last_etag`; a notice shows from
when it is given. Azure (`/metadata`): notices are Scheduled Events. Token times are wall time.
Sources: EC2 User Guide, "Use the Instance Metadata Service", "Spot Instance interruption notices", "EC2 instance
rebalance recommendations"; Compute Engine, "View and query VM metadata", "Preemptible VM instances" (read 2026-11-21);
Azure documentation, "Azure Metadata Service: Scheduled Events for Linux VMs" (read 2026-11-22).
"""

import asyncio
import hashlib
import secrets
from datetime import timedelta
from email.utils import format_datetime

import msgspec
from aiohttp import web

from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.instances import Machine, Notice
from gpu_autoscaler.simcluster.objects import stamp

TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - the header's name, no secret
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TTL_SECONDS_MAX = 21_600
TOKENS_MAX = 100  # per machine; the oldest is dropped
_AZURE_EVENT_TYPES = {"maintenance": "Redeploy"}
LOOKED_SECONDS = 0.05  # wall time between polls
WAITED_SECONDS_MAX = 60.0
_FLAVOR = {"Metadata-Flavor": "Google"}


def add_metadata_routes(app: web.Application, cloud: Cloud) -> None:
    """Serve the metadata of each cloud in this application."""
    _add_aws_routes(app, cloud)
    _add_azure_routes(app, cloud)
    _add_gcp_routes(app, cloud)


def _add_aws_routes(app: web.Application, cloud: Cloud) -> None:
    async def token(request: web.Request) -> web.Response:
        machine = _machine(cloud, request)
        ttl = request.headers.get(TTL_HEADER, "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= TTL_SECONDS_MAX:
            raise web.HTTPBadRequest(text="400 - Bad Request")
        return web.Response(text=_new_token(machine, int(ttl)), headers={TTL_HEADER: ttl})

    async def read(request: web.Request) -> web.Response:
        machine = _machine(cloud, request)
        valid_until = machine.metadata_tokens.get(request.headers.get(TOKEN_HEADER, ""))
        if valid_until is None or valid_until <= Clock.wall_now():
            raise web.HTTPUnauthorized(text="401 - Unauthorized")
        text = _aws_value(machine, request.match_info["path"].rstrip("/"))
        if text is None:
            raise web.HTTPNotFound(text="404 - Not Found")
        return web.Response(text=text)

    app.router.add_put("/nodes/{node}/latest/api/token", token)
    app.router.add_get("/nodes/{node}/latest/meta-data/{path:.*}", read)


def _machine(cloud: Cloud, request: web.Request) -> Machine:
    """Return the running machine at the address; one that is gone does not answer."""
    machine = cloud.machine_of(request.match_info["node"])
    if machine is None or machine.state not in ("running", "terminating"):
        raise web.HTTPBadGateway(text="no machine answers at this address")
    return machine


def _new_token(machine: Machine, ttl_seconds: int) -> str:
    token = secrets.token_urlsafe(40)
    machine.metadata_tokens[token] = Clock.wall_now() + timedelta(seconds=ttl_seconds)
    while len(machine.metadata_tokens) > TOKENS_MAX:
        del machine.metadata_tokens[next(iter(machine.metadata_tokens))]
    return token


def _aws_value(machine: Machine, path: str) -> str | None:
    """Return the text at a metadata path, None where there is none."""
    notice, offer = machine.notice, machine.offer
    if path == "spot/instance-action":
        return None if notice is None else _json({"action": notice.kind, "time": stamp(notice.at)})
    if path == "spot/termination-time":
        return None if notice is None or notice.kind != "terminate" else stamp(notice.at)
    if path == "events/recommendations/rebalance":
        at = machine.rebalance_at
        return None if at is None else _json({"noticeTime": stamp(at)})
    plain: dict[str, str] = {
        "instance-id": machine.instance_id,
        "instance-type": offer.instance_type,
        "instance-life-cycle": str(offer.capacity_type),
        "local-ipv4": machine.internal_ip,
        "placement/availability-zone": offer.zone,
        "placement/region": machine.region,
    }
    return plain.get(path)


def _json(body: dict[str, str]) -> str:
    return msgspec.json.encode(body).decode()


def _add_azure_routes(app: web.Application, cloud: Cloud) -> None:
    async def events(request: web.Request) -> web.Response:
        machine = _azure_machine(cloud, request)
        scheduled = [] if machine.notice is None else [_event(machine, machine.notice)]
        return web.json_response({"DocumentIncarnation": len(scheduled), "Events": scheduled})

    async def release(request: web.Request) -> web.Response:
        """Start an approved event at once; the machine still ends at the notice's time."""
        _azure_machine(cloud, request)
        body = await request.json()
        if not isinstance(body.get("StartRequests"), list):
            raise web.HTTPBadRequest(text="StartRequests: is missing")
        return web.Response()

    async def compute(request: web.Request) -> web.Response:
        machine = _azure_machine(cloud, request)
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


def _azure_machine(cloud: Cloud, request: web.Request) -> Machine:
    machine = _machine(cloud, request)
    if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
        raise web.HTTPBadRequest(text="Bad request. Required metadata header or api-version is missing.")
    return machine


def _event(machine: Machine, notice: Notice) -> dict[str, object]:
    return {
        "EventId": f"{machine.instance_id}/{notice.at.isoformat()}",
        "EventType": _AZURE_EVENT_TYPES.get(notice.kind, "Preempt"),
        "EventStatus": "Scheduled",
        "ResourceType": "VirtualMachine",
        "Resources": [machine.provider_id.rpartition("/")[2]],
        "NotBefore": format_datetime(notice.at, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def _add_gcp_routes(app: web.Application, cloud: Cloud) -> None:
    async def read(request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            raise web.HTTPForbidden(text="Missing Metadata-Flavor:Google header.")
        path, last = request.match_info["path"], request.query.get("last_etag")
        loop = asyncio.get_running_loop()
        waited_seconds = min(float(request.query.get("timeout_sec", WAITED_SECONDS_MAX)), WAITED_SECONDS_MAX)
        until = loop.time() + (waited_seconds if request.query.get("wait_for_change") == "true" else 0.0)
        while True:
            text = _gcp_value(_machine(cloud, request), path)
            if text is None:
                raise web.HTTPNotFound(headers=_FLAVOR)
            etag = hashlib.sha256(text.encode()).hexdigest()[:16]
            if etag != last or loop.time() >= until:
                return web.Response(text=text, headers={**_FLAVOR, "ETag": etag})
            await asyncio.sleep(LOOKED_SECONDS)

    app.router.add_get("/nodes/{node}/computeMetadata/v1/{path:.*}", read)


def _gcp_value(machine: Machine, path: str) -> str | None:
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
