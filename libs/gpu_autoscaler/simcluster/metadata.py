"""Instance metadata of simulated machines, as EC2's IMDSv2 answers: `/nodes/<name>/latest/...`.

Without a token 401; 404 where there is nothing to say, which for notices means "none". Token times are wall time.
Source: EC2 User Guide, "Use the Instance Metadata Service", "Spot Instance interruption notices" and "EC2 instance
rebalance recommendations" (read 2026-11-21).
"""

import secrets
from datetime import timedelta

import msgspec
from aiohttp import web

from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.simcluster.cloud import Cloud
from gpu_autoscaler.simcluster.instances import Machine
from gpu_autoscaler.simcluster.objects import stamp

TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - the header's name, no secret
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TTL_SECONDS_MAX = 21_600
TOKENS_MAX = 100  # per machine; the oldest is dropped


def add_metadata_routes(app: web.Application, cloud: Cloud) -> None:
    """Serve /nodes/<name>/latest in this application."""

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
        text = _value(machine, request.match_info["path"].rstrip("/"))
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


def _value(machine: Machine, path: str) -> str | None:
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
