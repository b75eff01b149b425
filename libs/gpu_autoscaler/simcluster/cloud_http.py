"""The cloud over HTTP: capacity API (/cloud), what nodes serve (/nodes), and the admin API (/admin, loopback only).

No service reads /admin. Slow, failing and lost answers of the others are the matter of `faults`.

    GET, POST        /cloud/offers, /cloud/instances             refusals are 409
    POST             /cloud/instances/together                   a `GroupOrder`: all of them or none
    GET, DELETE      /cloud/instances/ID?installation=UID        404: it never existed; 403: not that installation's
    GET              /nodes/NAME/metrics                         DCGM exporter; instance metadata: see `metadata`
    GET              /admin/instances, /admin/invoice            the truth, and what it costs
    POST, DELETE     /admin/refusals, /admin/notices[/NODE]      set and clear
    POST             /admin/prices, /admin/rebalances, /admin/telemetry, /admin/sickness
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.providers.protocol import Instance, LaunchRefused, Order
from gpu_autoscaler.providers.sim.capacity import GroupOrder
from gpu_autoscaler.simcluster.admin import decode, guarded
from gpu_autoscaler.simcluster.answers import bad_request, failure
from gpu_autoscaler.simcluster.cloud import NOTICE_SECONDS, RETRY_AFTER_SECONDS, Cloud, NotOurs, RefusalRule
from gpu_autoscaler.simcluster.exporter import Sickness, TelemetryFault
from gpu_autoscaler.simcluster.instances import Machine, invoice
from gpu_autoscaler.simcluster.metadata import add_metadata_routes
from gpu_autoscaler.simcluster.offers import INSTANCE_CATALOG, InstanceType
from gpu_autoscaler.simcluster.server import Extension
from gpu_autoscaler.simcluster.world import World

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus, "Exposition formats" (read 2026-11-21)

PRICE_RATIOS_MAX = 100

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class _RefusalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offer: str = "*"  # pattern of `type/zone/capacity type`
    code: str = "InsufficientInstanceCapacity"
    times: Annotated[int, Meta(ge=1)] | None = None
    seconds: _Seconds | None = None  # of cluster time, from now; None and no times: until cleared
    retry_after_seconds: _Seconds = RETRY_AFTER_SECONDS
    passed: Annotated[int, Meta(ge=0)] = 0


class _PriceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offer: str  # pattern of `type/zone/capacity type`
    ratio: Annotated[float, Meta(gt=0, le=100)]


class _NoticeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str | None = None
    kind: Literal["terminate", "stop", "hibernate"] = "terminate"  # what EC2's metadata can say
    seconds: _Seconds = NOTICE_SECONDS  # of wall time: nobody answers a notice faster because the clock is fast
    after_seconds: _Seconds = 0.0


class _RebalanceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    after_seconds: _Seconds = 0.0


class _TelemetryBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    fault: TelemetryFault | None = None


class _SicknessBody(Sickness, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str
    gpu: int


class TrueInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as only the cloud itself knows it."""

    instance: Instance
    node_name: str
    installation: str | None
    has_notice: bool


def attach_cloud(
    world: World, types: tuple[InstanceType, ...] = INSTANCE_CATALOG, *, seed: int = 0
) -> tuple[Cloud, Extension]:
    """Let a cloud sell nodes to `world`; returns it and the routes to serve it with."""
    cloud = Cloud(world.api, types, seed=seed)
    # Heartbeats run before they are missed: after a pause of the process on a fast clock, nodes are not taken for dead.
    world.add_controller(cloud, is_first=True)
    return cloud, partial(_add_routes, cloud=cloud, world=world)


def _add_routes(app: web.Application, *, cloud: Cloud, world: World) -> None:
    add_metadata_routes(app, cloud)
    _add_capacity_routes(app, cloud)
    _add_exporter_route(app, cloud, world)
    _add_book_routes(app, cloud, world)
    _add_fate_routes(app, cloud, world)
    _add_telemetry_routes(app, cloud)


def _add_capacity_routes(app: web.Application, cloud: Cloud) -> None:
    async def offers(_: web.Request) -> web.Response:
        return _answer(cloud.offers())

    async def instances(request: web.Request) -> web.Response:
        installation = request.query.get("installation")
        if not installation:
            return _refused(400, "MissingParameter", "say whose instances: ?installation=UID")
        return _answer(cloud.instances(installation))

    async def instance(request: web.Request) -> web.Response:
        instance_id = request.match_info["instance"]
        act = cloud.terminate if request.method == "DELETE" else cloud.instance
        try:
            listed = act(instance_id, request.query.get("installation", ""))
        except NotOurs as exc:
            return _refused(403, "UnauthorizedOperation", str(exc))
        if listed is None:
            return _refused(404, "InvalidInstanceID.NotFound", f"the instance ID {instance_id!r} does not exist")
        return _answer(listed)

    async def launch(request: web.Request) -> web.Response:
        body = await request.read()
        return _launched(lambda: cloud.launch(msgspec.json.decode(body, type=Order)))

    async def launch_group(request: web.Request) -> web.Response:
        body = await request.read()

        def launched() -> tuple[Instance, ...]:
            group = msgspec.json.decode(body, type=GroupOrder)
            return cloud.launch_group(group.transaction, group.orders)

        return _launched(launched)

    app.router.add_get("/cloud/offers", offers)
    app.router.add_get("/cloud/instances", instances)
    app.router.add_get("/cloud/instances/{instance}", instance)
    app.router.add_delete("/cloud/instances/{instance}", instance)
    app.router.add_post("/cloud/instances", launch)
    app.router.add_post("/cloud/instances/together", launch_group)


def _launched(make: Callable[[], object]) -> web.Response:
    try:
        return _answer(make())
    except msgspec.DecodeError as exc:
        return _refused(400, "InvalidParameterValue", str(exc))
    except LaunchRefused as exc:
        how = {"kind": exc.kind, "scope": exc.scope, "retry_after_seconds": exc.retry_after_seconds}
        return _refused(409, exc.code, str(exc), **how)
    except PermanentError as exc:
        return _refused(400, "IdempotentParameterMismatch", str(exc))


def _add_exporter_route(app: web.Application, cloud: Cloud, world: World) -> None:
    async def metrics(request: web.Request) -> web.Response:
        machine = cloud.machine_of(request.match_info["node"])
        page = None
        if machine is not None and machine.state == "running" and machine.kind.gpu_count:
            page = machine.telemetry.page(world.api.pods_on(machine.node_name), world.clock.now())
        if page is None:
            raise web.HTTPBadGateway(text="no exporter answers at this address")
        return web.Response(body=page.encode(), headers={"Content-Type": EXPOSITION})

    app.router.add_get("/nodes/{node}/metrics", metrics)


def _add_book_routes(app: web.Application, cloud: Cloud, world: World) -> None:
    async def instances(_: web.Request) -> web.StreamResponse:
        return _answer(
            [
                TrueInstance(
                    instance=machine.shown(),
                    node_name=machine.node_name,
                    installation=machine.installation,
                    has_notice=machine.notice is not None,
                )
                for machine in cloud.machines
            ]
        )

    async def bill(_: web.Request) -> web.StreamResponse:
        return _answer(invoice(cloud.machines, world.clock.now()))

    app.router.add_get("/admin/instances", guarded(instances))
    app.router.add_get("/admin/invoice", guarded(bill))


def _add_fate_routes(app: web.Application, cloud: Cloud, world: World) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _RefusalBody)
        until = None if body.seconds is None else world.clock.now() + timedelta(seconds=body.seconds)
        rule = RefusalRule(
            pattern=body.offer,
            code=body.code,
            left_count=body.times,
            until=until,
            retry_after_seconds=body.retry_after_seconds,
            passed_count=body.passed,
        )
        try:
            cloud.refuse(rule)
        except ValueError as exc:
            raise failure(400, "BadRequest", str(exc)) from exc
        return _answer({"rules": len(cloud.rules)})

    async def refuse_nothing(_: web.Request) -> web.StreamResponse:
        cloud.rules.clear()
        return _answer({"rules": 0})

    async def give_notice(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _NoticeBody)
        machine = cloud.first_busy_spot() if body.node is None else cloud.machine_of(body.node)
        if machine is None or not machine.is_alive:
            raise failure(404, "NotFound", f"no living machine for {body.node or 'a spot node with running pods'}")
        reclaim_at, seconds = None, body.seconds * world.clock.factor
        if body.after_seconds:
            cloud.schedule(body.after_seconds, partial(cloud.give_notice, machine, body.kind, seconds))
        else:
            reclaim_at = cloud.give_notice(machine, body.kind, seconds)
        return _answer({"node": machine.node_name, "provider_id": machine.provider_id, "reclaim_at": reclaim_at})

    async def withdraw(request: web.Request) -> web.StreamResponse:
        machine = _known(cloud, request.match_info["node"])
        cloud.withdraw_notice(machine)
        return _answer({"node": machine.node_name})

    async def rebalance(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _RebalanceBody)
        cloud.schedule(body.after_seconds, partial(cloud.recommend_rebalance, _known(cloud, body.node)))
        return _answer({"node": body.node})

    async def reprice(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _PriceBody)
        cloud.price_ratios.pop(body.offer, None)
        if len(cloud.price_ratios) >= PRICE_RATIOS_MAX:
            raise failure(400, "BadRequest", f"{PRICE_RATIOS_MAX} prices are set already")
        cloud.price_ratios[body.offer] = body.ratio
        return _answer({"offer": body.offer, "ratio": body.ratio})

    app.router.add_post("/admin/prices", guarded(reprice))
    app.router.add_post("/admin/refusals", guarded(refuse))
    app.router.add_delete("/admin/refusals", guarded(refuse_nothing))
    app.router.add_post("/admin/notices", guarded(give_notice))
    app.router.add_delete("/admin/notices/{node}", guarded(withdraw))
    app.router.add_post("/admin/rebalances", guarded(rebalance))


def _add_telemetry_routes(app: web.Application, cloud: Cloud) -> None:
    async def break_telemetry(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _TelemetryBody)
        _known(cloud, body.node).telemetry.break_with(body.fault)
        return _answer({"node": body.node, "fault": body.fault})

    async def sicken(request: web.Request) -> web.StreamResponse:
        body = await decode(request, _SicknessBody)
        sickness = Sickness(**{name: getattr(body, name) for name in Sickness.__struct_fields__})
        try:
            _known(cloud, body.node).telemetry.sicken(body.gpu, None if sickness == Sickness() else sickness)
        except IndexError as error:
            raise bad_request(str(error)) from error
        return _answer({"node": body.node, "gpu": body.gpu})

    app.router.add_post("/admin/telemetry", guarded(break_telemetry))
    app.router.add_post("/admin/sickness", guarded(sicken))


def _known(cloud: Cloud, node_name: str) -> Machine:
    """Return the machine behind a node. Raises ApiRefusal 404."""
    machine = cloud.machine_of(node_name)
    if machine is None:
        raise failure(404, "NotFound", f"no machine stands behind a node named {node_name!r}")
    return machine


def _answer(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _refused(status: int, code: str, message: str, **more: object) -> web.Response:
    body = {"error": {"code": code, "message": message, **more}}
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
