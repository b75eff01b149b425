"""A real API server behind a proxy that misbehaves on demand."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from tests.controlplane.plane import ControlPlane
from tests.support.kube_http import Json

_HOP_BY_HOP = {"transfer-encoding", "content-encoding", "content-length", "connection"}


class KubeProxy:
    """Passes on what is asked, with the administrator's token; `url` is where it listens."""

    def __init__(self, plane: ControlPlane, session: aiohttp.ClientSession) -> None:
        self._plane = plane
        self._session = session
        self.url = ""
        self.status: int | None = None  # every call is answered so; None: by the server
        self.is_next_answer_lost = False  # of the next call that changes something
        self.rewrite: Callable[[str, Json], Json] = lambda _path, body: body  # of what is created
        self.changes: list[tuple[str, str, bytes]] = []  # what changed something: method, path, body

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass it on, or misbehave."""
        if self.status is not None:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        body = await request.read()
        if request.method != "GET":
            self.changes.append((request.method, request.path, body))
        if request.method == "POST":
            body = json.dumps(self.rewrite(request.path, json.loads(body))).encode()
        headers = {key: value for key, value in request.headers.items() if key in ("Content-Type", "Accept")}
        headers["Authorization"] = f"Bearer {self._plane.admin_token}"
        async with self._session.request(
            request.method, self._plane.url + request.path_qs, data=body, headers=headers, ssl=self._plane.tls
        ) as answer:
            content = await answer.read()
        if self.is_next_answer_lost and request.method != "GET":
            self.is_next_answer_lost = False
            return web.json_response({"kind": "Status", "code": 504}, status=504)
        told = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP_BY_HOP}
        return web.Response(status=answer.status, body=content, headers=told)


@asynccontextmanager
async def proxied(plane: ControlPlane) -> AsyncIterator[KubeProxy]:
    """A proxy before this plane, for lists and single calls; watches are not passed on."""
    async with aiohttp.ClientSession() as session:
        proxy = KubeProxy(plane, session)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield proxy
        finally:
            await runner.cleanup()
