"""A way to a server that can swallow everything: nothing is forwarded, nothing is refused, no socket is closed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gpu_autoscaler.bus.server import LOOPBACK

_CHUNK_BYTES = 64 * 1024


class BlackHole:
    """Forwards both ways until `swallow`, again after `restore`. Who connects meanwhile gets no word."""

    def __init__(self, port: int) -> None:
        """`port` is the server's."""
        self.url = ""
        self._port = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def swallow(self) -> None:
        """From here on nothing comes through."""
        self._flows.clear()

    def restore(self) -> None:
        """Everything comes through again, also what was on its way: so it is with packets that are sent again."""
        self._flows.set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._flows.wait()
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, far_writer))
                    group.create_task(self._pump(far_reader, writer))
            except* OSError:
                pass
            finally:
                far_writer.close()
        writer.close()
        self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._flows.wait()
            chunk = await reader.read(_CHUNK_BYTES)
            await self._flows.wait()
            if not chunk:
                raise ConnectionResetError
            writer.write(chunk)
            await writer.drain()

    async def close(self) -> None:
        """Drop every connection."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def black_hole(port: int) -> AsyncIterator[BlackHole]:
    """A way to the server that listens on `port` of the loopback address."""
    way = BlackHole(port)
    # A short buffer, as on a real line: what is swallowed is soon felt.
    listener = await asyncio.start_server(way.take, LOOPBACK, 0, limit=_CHUNK_BYTES)
    way.url = f"nats://{LOOPBACK}:{listener.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        listener.close()
        await way.close()
