"""Admin API of simcluster on loopback: cut watches, compact history, refuse or delay requests, end programs."""

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeVar

import msgspec
from aiohttp import web

from gpu_autoscaler.simcluster.answers import ApiRefusal, bad_request, failure
from gpu_autoscaler.simcluster.controllers.kubelet import Kubelets
from gpu_autoscaler.simcluster.faults import Faults, Latency, Refusal
from gpu_autoscaler.simcluster.rest import json_answer, refused

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _RefusalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    path: str
    status: int
    method: str = "*"
    count: int = 1
    performed: bool = False
    retry_after_seconds: int | None = None


class _LatencyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    seconds: float


def add_admin_routes(app: web.Application, faults: Faults, kubelets: Kubelets) -> None:
    """Serve /admin in this application."""

    async def drop_watches(_: web.Request) -> web.StreamResponse:
        return json_answer({"dropped": faults.drop_watches()})

    async def end_work(_: web.Request) -> web.StreamResponse:
        return json_answer({"ended": kubelets.end_work()})

    async def compact(_: web.Request) -> web.StreamResponse:
        return json_answer({"compactedThrough": faults.compact()})

    async def refuse(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _RefusalBody)
        if not 400 <= body.status <= 599 or body.count < 1:
            raise bad_request("status must be 400 to 599 and count at least 1")
        faults.refuse(
            Refusal(
                method=body.method.upper(),
                path_prefix=body.path,
                status=body.status,
                left_count=body.count,
                performed=body.performed,
                retry_after_seconds=body.retry_after_seconds,
            )
        )
        return await show(request)

    async def slow(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _LatencyBody)
        faults.slow(Latency(path_prefix=body.path, wait_seconds=body.seconds))
        return await show(request)

    async def show(_: web.Request) -> web.StreamResponse:
        refusals = [asdict(entry) for entry in faults.refusals]
        return json_answer({"refusals": refusals, "latencies": [asdict(entry) for entry in faults.latencies]})

    async def clear(request: web.Request) -> web.StreamResponse:
        faults.clear()
        return await show(request)

    app.router.add_post("/admin/watches/drop", guarded(drop_watches))
    app.router.add_post("/admin/programs/end", guarded(end_work))
    app.router.add_post("/admin/history/compact", guarded(compact))
    app.router.add_post("/admin/faults", guarded(refuse))
    app.router.add_post("/admin/latency", guarded(slow))
    app.router.add_get("/admin/faults", guarded(show))
    app.router.add_delete("/admin/faults", guarded(clear))


def guarded(handler: Handler) -> Handler:
    """Return the handler, restricted to loopback."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            if request.remote is None or not ipaddress.ip_address(request.remote).is_loopback:
                raise failure(403, "Forbidden", "the admin API of simcluster answers on loopback only")
            return await handler(request)
        except ApiRefusal as refusal:
            return refused(refusal)

    return answer


async def decode(request: web.Request, wanted: type[T]) -> T:
    """Return the body as `wanted`. Raises ApiRefusal 400 naming the field."""
    try:
        return msgspec.json.decode(await request.read(), type=wanted)
    except msgspec.DecodeError as exc:
        raise bad_request(f"{request.path}: {exc}") from exc
