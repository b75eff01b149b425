"""Serves the GPUs of a node as a DCGM exporter does: `python -m gpu_autoscaler_services.nvml_exporter --port 9400`.

For nodes without DCGM: it runs on each of them, and needs neither broker nor API server
(docs/designs/013-nvml-exporter.md).
"""

import argparse
import asyncio
import math
import socket
import sys
import time
from collections.abc import Callable

import pynvml
from aiohttp import web

from gpu_autoscaler.dcgm.nvml import NvmlReader
from gpu_autoscaler.dcgm.pod_resources import read_holders
from gpu_autoscaler.runtime.signals import stop_event

PAGE_SECONDS_MIN = 1.0  # a page serves this long, so that the cost does not grow with the number of readers
READ_SECONDS_MAX = 30.0  # afterwards the driver hangs
CONTENT_TYPE = "text/plain; version=0.0.4"


class Exporter:
    """Reads a page when it is asked for, in a thread: calls of the driver block, some for 20 ms."""

    def __init__(
        self,
        read: Callable[[], str | None],
        *,
        now: Callable[[], float] = time.monotonic,
        read_seconds_max: float = READ_SECONDS_MAX,
    ) -> None:
        """`read` returns None if no GPU answers."""
        self._read = read
        self._now = now
        self._read_seconds_max = read_seconds_max
        self._page: str | None = ""
        self._began_at = -math.inf  # of the last read
        self._reading: asyncio.Future[str | None] | None = None

    async def metrics(self, _: web.Request) -> web.Response:
        """Answer the page; 503 if no GPU answered."""
        now = self._now()
        if self._reading is None and now - self._began_at >= PAGE_SECONDS_MIN:
            self._began_at = now
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
            self._reading.add_done_callback(self._store)
        if self._reading is not None:  # asyncio.wait: the read goes on, also when a client leaves
            await asyncio.wait([self._reading], timeout=self._read_seconds_max)
        if self._reading is not None or self._page is None:
            return web.Response(status=503, text="no GPU answers\n")
        return web.Response(text=self._page, headers={"Content-Type": CONTENT_TYPE})

    async def healthz(self, _: web.Request) -> web.Response:
        """Answer 503 if no GPU answered the last read, or it hangs: a restart opens the driver again."""
        is_hanging = self._reading is not None and self._now() - self._began_at > self._read_seconds_max
        if is_hanging or self._page is None:
            return web.Response(status=503, text="the driver hangs\n" if is_hanging else "no GPU answers\n")
        return web.Response(text="ok\n")

    def _store(self, reading: asyncio.Future[str | None]) -> None:
        self._reading = self._page = None
        self._page = reading.result()


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raise SystemExit where it cannot start."""
    parser = argparse.ArgumentParser(prog="nvml_exporter", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=9400, help="0 is a free one, printed on stdout")
    parser.add_argument(
        "--hostname", default=socket.gethostname(), help="label Hostname (default: this machine's name)"
    )
    parser.add_argument("--pod-resources", metavar="SOCKET", help="of the kubelet; adds the labels of pods")
    options = parser.parse_args(arguments)
    try:
        reader = NvmlReader(options.hostname)
        asyncio.run(_serve(reader, options))
    except pynvml.NVMLError as exc:
        raise SystemExit(
            f"nvml_exporter was not started: NVML: {exc}; give it an NVIDIA driver and its devices"
        ) from exc
    except OSError as exc:
        raise SystemExit(f"nvml_exporter was not started: {exc}; choose another --host or --port") from exc


async def _serve(reader: NvmlReader, options: argparse.Namespace) -> None:
    socket_path: str | None = options.pod_resources
    is_known = True

    def read() -> str | None:
        nonlocal is_known
        try:
            holders = {} if socket_path is None else read_holders(socket_path)
        except (ConnectionError, ValueError) as exc:
            if is_known:
                sys.stderr.write(f"pods unknown: {socket_path}: {exc}\n")
            holders, is_known = {}, False
        else:
            is_known = True
        return reader.page(holders)

    exporter = Exporter(read)
    app = web.Application()
    app.add_routes([web.get("/metrics", exporter.metrics), web.get("/healthz", exporter.healthz)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    sys.stdout.write(f"http://{options.host}:{runner.addresses[0][1]}/metrics\n")
    sys.stdout.flush()
    await stop_event().wait()
    await runner.cleanup()


if __name__ == "__main__":
    main()
