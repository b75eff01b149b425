"""A proxy to an API server with realistic faults: refusals, cuts, partial lines, silence."""

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import aiohttp
import msgspec
from aiohttp import web
from tests.support.small_servers import serving

_CHUNK_BYTES = 64 * 1024
_HOP_HEADERS = frozenset({"transfer-encoding", "content-length", "connection", "content-encoding"})


FaultKind = Literal["refused", "half_a_line", "half_a_line_in_good_order", "closed_at_once", "garbage"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one request.

    `refused`: the status is answered. `half_a_line`: the next thing that the server says is cut in its middle, in good
    order or not. `closed_at_once`: 200 and nothing. `garbage`: a line that is no JSON.
    """

    kind: FaultKind
    is_watch: bool = True  # whose turn it is: a watch's, or a list's
    status: int = 0
    retry_after_seconds: int | None = None


class FaultyProxy:
    """Forwards to the server, unless a fault is due; each strikes the next request that it fits, once."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str, tls: ssl.SSLContext) -> None:
        self.faults: deque[Fault] = deque()
        self.watches_at: list[float] = []  # when each came, by a clock that only goes forward
        self.lists_count = 0
        self.between_pages: Callable[[], Awaitable[None]] | None = None  # called once, before a second page
        self._session, self._url = session, url
        self._headers = {"Authorization": f"Bearer {token}"}
        self._tls = tls
        self._open: set[asyncio.Event] = set()

    @property
    def open_count(self) -> int:
        """Watches that are open now."""
        return len(self._open)

    def cut(self) -> int:
        """Break every watch that is open now; returns how many that were."""
        for one in self._open:
            one.set()
        return len(self._open)

    async def take(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        is_watch = "watch" in request.query
        if is_watch:
            self.watches_at.append(time.monotonic())
        self.lists_count += not is_watch and "continue" not in request.query
        if "continue" in request.query and self.between_pages is not None:
            act, self.between_pages = self.between_pages, None
            await act()
        fault = next((one for one in self.faults if one.is_watch == is_watch), None)
        if fault is not None:
            self.faults.remove(fault)
            if fault.kind == "refused":
                wait = fault.retry_after_seconds
                headers = {} if wait is None else {"Retry-After": str(wait)}
                return web.Response(status=fault.status, headers=headers, text="the proxy says no")
            if fault.kind in ("closed_at_once", "garbage"):
                return web.Response(text="" if fault.kind == "closed_at_once" else "<html>gateway</html>\n")
        return await self._forward(request, fault)

    async def _forward(self, request: web.Request, fault: Fault | None) -> web.StreamResponse:
        try:
            async with self._session.request(
                request.method,
                self._url + request.path_qs,
                data=await request.read(),
                headers=self._headers | {"Content-Type": request.headers.get("Content-Type", "application/json")},
                ssl=self._tls,
            ) as answer:
                headers = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP_HEADERS}
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                if fault is not None:
                    return await self._halve(request, response, await answer.content.readany(), fault)
                if "watch" in request.query:
                    await self._pump_until_cut(request, response, answer)
                else:
                    await response.write(await answer.read())
                return response
        except aiohttp.ClientError:  # the server is away; so is what it had not said yet
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    async def _halve(
        self, request: web.Request, response: web.StreamResponse, chunk: bytes, fault: Fault
    ) -> web.StreamResponse:
        await response.write(chunk[: len(chunk) // 2])
        if fault.kind == "half_a_line":
            await asyncio.sleep(0.05)  # let it arrive
            assert request.transport is not None
            request.transport.abort()
        return response

    async def _pump_until_cut(
        self, request: web.Request, response: web.StreamResponse, answer: aiohttp.ClientResponse
    ) -> None:
        cut = asyncio.Event()
        self._open.add(cut)
        pumping = asyncio.create_task(_pump(answer, response))
        cutting = asyncio.create_task(cut.wait())
        try:
            await asyncio.wait((pumping, cutting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.discard(cut)
            for task in (pumping, cutting):
                task.cancel()
            ended, _ = await asyncio.gather(pumping, cutting, return_exceptions=True)
        if request.transport is not None and (cut.is_set() or isinstance(ended, aiohttp.ClientError)):
            request.transport.abort()


async def _pump(answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
    async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
        await response.write(chunk)


@contextlib.asynccontextmanager
async def faulty_proxy(url: str, token: str, tls: ssl.SSLContext) -> AsyncIterator[tuple[str, FaultyProxy]]:
    """A proxy before this server; yields its own address, plain HTTP, which asks for no token."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=2)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        proxy = FaultyProxy(session, url, token, tls)
        async with serving(proxy.take) as address:
            yield address, proxy
