"""Base of fake REST clouds: requests are recorded, checked for faults, and answered as JSON.

A fake answers in the loop that serves it, one request at a time between two waits.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import msgspec
from aiohttp import web

from gpu_autoscaler.simcloud.faults import Faults, answer_admin

ASKED_MAX = 100_000
BODY_BYTES_MAX = 2**20


class RestCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request, named as in the cloud's API description."""

    name: str  # instanceGroupManagers.createInstances
    parameters: dict[str, str]  # of path and query
    body: Any = None  # decoded JSON; None: no body


class RestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    status: int = 200
    body: Any = None  # encoded as JSON; None: an empty body
    headers: Mapping[str, str] = {}


class Rejected(Exception):
    """The cloud would reject the request; carries the answer."""

    def __init__(self, answer: RestAnswer) -> None:
        super().__init__(str(answer.body))
        self.answer = answer


class RestFake(ABC):
    """A fake REST cloud. Set faults on `faults`; received calls are in `asked`."""

    def __init__(self, *, now: Callable[[], datetime] | None = None) -> None:
        self.now = now or (lambda: datetime.now(UTC))
        self.faults = Faults()
        self.clock_ahead_seconds = 0.0  # of the Date header, compared to the true time
        self.asked: deque[RestCall] = deque(maxlen=ASKED_MAX)

    @abstractmethod
    def read_call(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> RestCall:
        """Return the call. Raises Rejected if the cloud's API description does not allow it."""

    @abstractmethod
    def offer_of(self, call: RestCall) -> str:
        """Return `type/zone/capacity type` of a launch, empty for other calls."""

    @abstractmethod
    def perform(self, call: RestCall) -> RestAnswer:
        """Execute the call. Raises Rejected."""

    @abstractmethod
    def refuse(self, call: RestCall, code: str) -> RestAnswer:
        """Return this error without executing the call, or as a launch that fails later, where the cloud does that."""

    @abstractmethod
    def lost(self) -> RestAnswer:
        """Return what a caller sees of a lost answer."""

    def asked_of(self, name: str) -> list[RestCall]:
        """Return the calls of this name, oldest first."""
        return [call for call in self.asked if call.name == name]

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request."""
        content = await request.read()
        if request.path.startswith("/admin/"):
            status, body = answer_admin(request.method, request.path, content, self.faults, self.asked)
            return web.Response(status=status, body=body, content_type="application/json")
        headers = {name.lower(): value for name, value in request.headers.items()}
        try:
            call = self.read_call(request.method, request.path, dict(request.query), headers, content)
        except Rejected as rejected:
            return self._response(rejected.answer)
        self.asked.append(call)
        struck = list(self.faults.matching(call.name, self.offer_of(call)))
        refused = next((fault for fault in struck if fault.kind == "refused"), None)
        try:
            answer = self.refuse(call, refused.code) if refused else self.perform(call)
        except Rejected as rejected:
            answer = rejected.answer
        for fault in struck:
            await asyncio.sleep(fault.wait_seconds)
            if fault.kind == "lost":
                answer = self.lost()
        return self._response(answer)

    def _response(self, answer: RestAnswer) -> web.Response:
        dated = datetime.now(UTC) + timedelta(seconds=self.clock_ahead_seconds)
        headers = {"Date": format_datetime(dated, usegmt=True), **answer.headers}
        body = b"" if answer.body is None else msgspec.json.encode(answer.body)
        return web.Response(status=answer.status, body=body, headers=headers, content_type="application/json")


@asynccontextmanager
async def serving_rest(fake: RestFake, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve the fake until the block ends; yield the URL."""
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        taken: int = runner.addresses[0][1]
        yield f"http://{host}:{taken}"
    finally:
        await runner.cleanup()
