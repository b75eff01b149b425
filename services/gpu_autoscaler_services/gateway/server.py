"""HTTP server of the gateway: routes, web page, and the tail of recent facts. Opened by the wiring."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.config import GatewaySettings
from gpu_autoscaler.runtime.health import Readiness
from gpu_autoscaler_services.background import background
from gpu_autoscaler_services.gateway import openapi
from gpu_autoscaler_services.gateway.access import NO_ACCESS_RULES, AccessRules
from gpu_autoscaler_services.gateway.api import ROUTES
from gpu_autoscaler_services.gateway.api.logs import LOGS, LogSource
from gpu_autoscaler_services.gateway.audit import AUDIT, audited
from gpu_autoscaler_services.gateway.auth import Authenticator, guard
from gpu_autoscaler_services.gateway.problems import TYPES, Problem, problems
from gpu_autoscaler_services.gateway.problems_page import problem_page
from gpu_autoscaler_services.gateway.read_model import READ_MODEL, SECURITY_HEADERS, ReadModel
from gpu_autoscaler_services.gateway.routes import BODY_BYTES_MAX, answer
from gpu_autoscaler_services.gateway.tls import Certificate

STATE_CONDITION = "state"  # the runtime's readiness condition for the replayed state
STATE_RETRY_SECONDS = 1.0
SHUTDOWN_SECONDS_MAX = 5.0
NO_LOGS = LogSource(None, "it has no settings of the Kubernetes API")

_WEB = "gpu_autoscaler_services.gateway.web"
_CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def make_app(
    model: ReadModel,
    *,
    authenticators: Sequence[Authenticator] = (),
    rules: AccessRules = NO_ACCESS_RULES,
    readiness: Readiness | None = None,
    logs: LogSource = NO_LOGS,
) -> web.Application:
    """Return the app with all routes, the page and what explains problems. Without `readiness`, requests never wait for
    the state."""
    page = _page_files()
    page |= {kind.uri: (problem_page(kind).encode(), "text/markdown") for kind in TYPES}
    open_paths = frozenset({*page, "/openapi.json"})
    middlewares = [add_security_headers, problems, audited, guard(authenticators, rules, open_paths=open_paths)]
    if readiness is not None:
        middlewares.append(require_state(readiness, open_paths))
    app = web.Application(middlewares=middlewares, client_max_size=BODY_BYTES_MAX)
    app[READ_MODEL] = model
    app[AUDIT] = model.audit
    app[LOGS] = logs
    for route in ROUTES:
        for path in (route.path, *route.aliases):
            if route.method == "GET":
                app.router.add_get(path, route.answered)
            else:
                app.router.add_route(route.method, path, route.answered)
    for path, (body, content_type) in page.items():
        app.router.add_get(path, _serve(body, content_type))
    app.router.add_get("/openapi.json", _document())
    app.on_shutdown.append(_end_streams)
    return app


async def _end_streams(app: web.Application) -> None:
    app[READ_MODEL].tail.close("the gateway is stopping")


@web.middleware
async def add_security_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Add headers that restrict browsers: load from this gateway only, no framing."""
    response = await handler(request)
    if not response.prepared:
        response.headers.update(SECURITY_HEADERS)
    return response


def require_state(readiness: Readiness, open_paths: frozenset[str]) -> Middleware:
    """Return a middleware that answers 503 until the state is complete: an incomplete answer would be wrong."""
    is_complete = False

    @web.middleware
    async def waiting(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal is_complete
        is_complete = is_complete or readiness.conditions.get(STATE_CONDITION, "not started") is None
        if not is_complete and request.path not in open_paths:
            detail = "the gateway is still reading the recorded facts; retry in a few seconds"
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after_seconds=STATE_RETRY_SECONDS)
        return await handler(request)

    return waiting


def _page_files() -> dict[str, tuple[bytes, str]]:
    """Return path -> (body, content type) of each file of the page."""
    page = {}
    for file in files(_WEB).iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _CONTENT_TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            page[path] = (file.read_bytes(), _CONTENT_TYPES[suffix])
    return page


def _serve(body: bytes, content_type: str) -> Handler:
    async def page_handler(_: web.Request) -> web.Response:
        headers = {"Cache-Control": "no-cache"}
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)

    return page_handler


def _document() -> Handler:
    document = openapi.document()

    async def openapi_handler(request: web.Request) -> web.Response:
        return answer(request, document)

    return openapi_handler


@asynccontextmanager
async def serving(app: web.Application, settings: GatewaySettings) -> AsyncIterator[str]:
    """Serve the app and follow the streams until the context ends. Yields the address. Raises ConfigError if the port
    is taken, or certificate and key cannot be used."""
    certificate = None
    if settings.tls_certificate_path is not None and settings.tls_key_path is not None:
        certificate = Certificate(Path(settings.tls_certificate_path), Path(settings.tls_key_path))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS_MAX)
    await runner.setup()
    try:
        async with background(app[READ_MODEL].tail.run(), "tail"):
            try:
                tls = None if certificate is None else certificate.context
                await web.TCPSite(runner, settings.host, settings.port, ssl_context=tls).start()
            except OSError as error:
                raise ConfigError(
                    "gateway",
                    [f"port: cannot listen on {settings.host}:{settings.port} ({error}); free it or set gateway.port"],
                ) from error
            async with nullcontext() if certificate is None else background(certificate.follow(), "certificate"):
                scheme = "http" if certificate is None else "https"
                yield f"{scheme}://{settings.host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
