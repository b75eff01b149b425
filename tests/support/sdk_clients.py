"""Both clients of the SDK behind one interface, and a proxy that breaks single connections."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from gpu_manager_sdk import AsyncGPUJobClient, GPUJobClient

ClientKind = Literal["blocking", "asynchronous"]
HERE = "127.0.0.1"

# before: closed as soon as the request has come. after: closed when the gateway has answered. unavailable: 503.
Fault = Literal["before", "after", "unavailable"]
_LATER = b'{"title":"Service Unavailable","status":503,"detail":"the store is locked; retry"}'
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s"
) % (len(_LATER), _LATER)


class Sdk:
    """A client of either kind; the blocking one runs in threads."""

    def __init__(self, client: GPUJobClient | AsyncGPUJobClient) -> None:
        self.client = client

    async def do(self, method: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as the methods take and return them
        """Call a method and return its answer."""
        call = getattr(self.client, method)
        if isinstance(self.client, GPUJobClient):
            return await asyncio.to_thread(call, *arguments, **options)
        return await call(*arguments, **options)

    async def take(self, count: int | None, method: str, *arguments: Any, **options: Any) -> list[Any]:  # noqa: ANN401 - as above
        """Return the first items that a method yields; None: all."""
        items = getattr(self.client, method)(*arguments, **options)
        if isinstance(self.client, GPUJobClient):
            return await asyncio.to_thread(lambda: list(itertools.islice(items, count)))
        taken: list[Any] = []
        async with contextlib.aclosing(items):
            async for item in items:
                taken.append(item)
                if len(taken) == count:
                    break
        return taken


@contextlib.asynccontextmanager
async def sdk(kind: ClientKind, url: str, **options: Any) -> AsyncIterator[Sdk]:  # noqa: ANN401 - as the clients take them
    """Open a client."""
    if kind == "blocking":
        yield Sdk(GPUJobClient(url, **options))
        return
    async with AsyncGPUJobClient(url, **options) as client:
        yield Sdk(client)


class BreakingProxy:
    """Forwards connections to a gateway; each fault strikes the next connection, once."""

    def __init__(self) -> None:
        self.url = ""
        self.faults: deque[Fault] = deque()
        self.requests: list[str] = []  # the first line of the first request of each connection


@contextlib.asynccontextmanager
async def breaking_proxy(port: Callable[[], int]) -> AsyncIterator[BreakingProxy]:
    """Serve a proxy to the port."""
    proxy = BreakingProxy()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _serve(proxy, port(), reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, HERE, 0)
    proxy.url = f"http://{HERE}:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()


async def _serve(proxy: BreakingProxy, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    proxy.requests.append(head.partition(b"\r\n")[0].decode())
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    request = head + (await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b"")
    fault = proxy.faults.popleft() if proxy.faults else None
    if fault == "before":
        return
    if fault == "unavailable":
        writer.write(_UNAVAILABLE)
        await writer.drain()
        return
    gateway, to_gateway = await asyncio.open_connection(HERE, port)
    try:
        to_gateway.write(request)
        if fault == "after":
            await gateway.readuntil(b"\r\n\r\n")
            return
        await asyncio.gather(_copy(reader, to_gateway), _copy(gateway, writer))
    finally:
        to_gateway.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(65536):
            writer.write(block)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def cutting_proxy(url: str, sizes: Sequence[int]) -> AsyncIterator[str]:
    """Serve a proxy that breaks each connection after the next of `sizes` bytes of the body; later ones stay whole."""
    left, port = deque(sizes), urlsplit(url).port

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = left.popleft() if left else None
        gateway, to_gateway = await asyncio.open_connection(HERE, port)
        sending = asyncio.create_task(_copy(reader, to_gateway))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await gateway.readuntil(b"\r\n\r\n"))
            while block := await gateway.read(4096 if size is None else min(4096, size)):
                writer.write(block)
                await writer.drain()
                size = None if size is None else size - len(block)
                if size == 0:
                    writer.transport.abort() if len(left) % 2 else writer.close()
                    break
        writer.close()
        to_gateway.close()
        sending.cancel()

    server = await asyncio.start_server(serve, HERE, 0)
    try:
        yield f"http://{HERE}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
