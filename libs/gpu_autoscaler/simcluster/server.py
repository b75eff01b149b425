"""The HTTP server around a world: Kubernetes API, health, version, admin API; and its control loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gpu_autoscaler.simcluster.admin import add_admin_routes
from gpu_autoscaler.simcluster.answers import failure
from gpu_autoscaler.simcluster.rest import BODY_BYTES_MAX, RestApi, describe_version, json_answer, refused
from gpu_autoscaler.simcluster.world import World

Extension = Callable[[web.Application], None]

SHUTDOWN_SECONDS_MAX = 1.0  # open watches are cut

log = structlog.get_logger()


def create_app(world: World, *, token: str | None = None, extensions: Iterable[Extension] = ()) -> web.Application:
    """Return the application that serves `world` and steps it while it runs.

    With a `token` the Kubernetes API requires it as bearer token. Each extension may add routes of its own.
    """
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_fault_middleware(world)])
    rest = RestApi(world.api, world.faults, token)
    loop_ended = asyncio.Event()

    async def healthy(_: web.Request) -> web.Response:
        if loop_ended.is_set():
            return web.Response(status=500, text="the control loop has ended: see the log")
        return web.Response(text="ok")

    async def version(_: web.Request) -> web.Response:
        return json_answer(describe_version())

    async def run_world(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(world.run(), name="simcluster world")
        task.add_done_callback(lambda done: _report_end(done, loop_ended))
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    for path in ("/healthz", "/readyz", "/livez"):
        app.router.add_get(path, healthy)
    for path in ("/version", "/version/"):  # generated clients ask with the slash
        app.router.add_get(path, version)
    add_admin_routes(app, world.faults, world.kubelets)
    for extension in extensions:
        extension(app)
    for root in ("/api", "/apis"):
        app.router.add_route("*", root, rest.handle)
        app.router.add_route("*", root + "/{rest:.*}", rest.handle)
    app.cleanup_ctx.append(run_world)
    return app


def _report_end(task: "asyncio.Task[None]", ended: asyncio.Event) -> None:
    ended.set()
    if not task.cancelled() and task.exception() is not None:
        log.error("control loop failed", exc_info=task.exception())


def _fault_middleware(world: World) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/admin/"):
            return await handler(request)
        await world.faults.wait(request.path)
        refusal = world.faults.take_refusal(request.method, request.path)
        if refusal is None:
            return await handler(request)
        if refusal.performed:
            await handler(request)
        return refused(
            failure(
                refusal.status,
                "InternalError" if refusal.status >= 500 else "TooManyRequests",
                f"simcluster is configured to answer {refusal.status} here",
                {},
                retry_after_seconds=refusal.retry_after_seconds,
            )
        )

    return middleware


async def start(
    world: World,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    extensions: Iterable[Extension] = (),
) -> tuple[web.AppRunner, str]:
    """Serve `world`; return the runner to clean up with and the base URL. Port 0 takes a free one."""
    runner = web.AppRunner(
        create_app(world, token=token, extensions=extensions), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS_MAX
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    bound_port = runner.addresses[0][1]
    return runner, f"http://{host}:{bound_port}"
