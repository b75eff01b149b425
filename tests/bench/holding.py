"""What the pod watcher's process takes to hold a real cluster of full size: real API server, KWOK's nodes and pods.

A thousand nodes, ten thousand pods: known from a start, held while nothing happens, and deleted all at once.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from nats.aio.client import Client
from nats.js.errors import NotFoundError
from tests.bench.line import Line
from tests.bench.scaler_process import process, processor_seconds
from tests.controlplane.plane import ControlPlane, Part, running_plane
from tests.controlplane.programs import CONTROL_PLANE
from tests.support.kube_http import KubeHttp
from tests.support.kube_objects import node, pod

from gpu_autoscaler.bus.server import NatsServer
from gpu_autoscaler.runtime.config import (
    HttpSettings,
    KubeSettings,
    LogSettings,
    NatsSettings,
    Settings,
    to_environment,
)
from gpu_autoscaler_services.local.child import free_port

NODES_COUNT, PODS_COUNT = 1_000, 10_000
QUIET_SECONDS = 30.0
MEBIBYTES_MAX = 300.0  # our own aim: a pod that asks for half a gibibyte is not for watching
_AT_ONCE_COUNT = 48
_FILL_SECONDS_MAX = 900.0
_LOOK_SECONDS = 0.5
_PARTS: tuple[Part, ...] = ("kwok",)
PODS = "/api/v1/namespaces/default/pods"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    known_seconds: float
    known_cpu_seconds: float
    mebibytes: float
    quiet_cpu_ratio: float  # of one core
    gone_seconds: float
    gone_cpu_seconds: float


def measure() -> list[Line]:
    """One run on its own control plane; None if none is built."""
    if not CONTROL_PLANE.folder().is_dir():
        return [Line(case="HELD", value=0.0, unit="-", against="no control plane: `make controlplane`")]
    with tempfile.TemporaryDirectory(prefix="plane-") as folder, running_plane(Path(folder) / "plane", _PARTS) as plane:
        held = asyncio.run(_measure(Path(folder), plane))
    size = f"{NODES_COUNT:,} nodes and {PODS_COUNT:,} pods on a real API server"
    return [
        Line(case="HELD known", value=held.known_seconds, unit="s", against=f"from start: {size}"),
        Line(case="HELD known, processor", value=held.known_cpu_seconds, unit="s", against="of one core"),
        Line(case="HELD quiet, processor", value=100 * held.quiet_cpu_ratio, unit="%", against="of one core"),
        Line(case="HELD gone", value=held.gone_seconds, unit="s", against="all pods deleted at once, each told"),
        Line(case="HELD gone, processor", value=held.gone_cpu_seconds, unit="s", against="of one core"),
        Line(
            case="HELD memory", value=held.mebibytes, unit="MiB", against="holding all of it",
            target=f"<= {MEBIBYTES_MAX:g}", met=held.mebibytes <= MEBIBYTES_MAX,
        ),
    ]  # fmt: skip


async def _measure(folder: Path, plane: ControlPlane) -> Held:
    async with _filled(plane) as kube, _broker(folder) as (server, told):
        settings = Settings(
            nats=NatsSettings(url=server.url),
            kube=KubeSettings(kubeconfig_path=str(plane.kubeconfig())),
            http=HttpSettings(port=free_port()),
            log=LogSettings(format="json", level="warning"),
            instance="pod-watcher",
        )
        command = [sys.executable, "-m", "gpu_autoscaler_services.serve", "pod_watcher"]
        url, log = f"http://127.0.0.1:{settings.http.port}", folder / "pod-watcher.log"
        began = time.perf_counter()
        async with process(command, to_environment(settings), url, log) as watcher:
            await _until(lambda: told("POD", "pod.observed"), PODS_COUNT)
            await _until(lambda: told("NODE", "node.observed"), NODES_COUNT)
            known_seconds, known_cpu = time.perf_counter() - began, processor_seconds(watcher.pid)
            mebibytes = _mebibytes(watcher.pid)
            await asyncio.sleep(QUIET_SECONDS)
            quiet_cpu, deleted = processor_seconds(watcher.pid), time.perf_counter()
            # One request may take a minute at the server, and on a busy machine ten thousand pods take longer.
            while (answer := await kube.send("DELETE", f"{PODS}?gracePeriodSeconds=0")).status == 504:
                pass
            assert answer.status == 200, answer.body
            await _until(lambda: told("POD", "pod.gone"), PODS_COUNT)
            return Held(
                known_seconds=known_seconds,
                known_cpu_seconds=known_cpu,
                mebibytes=mebibytes,
                quiet_cpu_ratio=(quiet_cpu - known_cpu) / QUIET_SECONDS,
                gone_seconds=time.perf_counter() - deleted,
                gone_cpu_seconds=processor_seconds(watcher.pid) - quiet_cpu,
            )


@asynccontextmanager
async def _filled(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Nodes that are ready and pods that run on them, ten a node."""
    timeout = aiohttp.ClientTimeout(total=_FILL_SECONDS_MAX)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        kube = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
        gate = asyncio.Semaphore(_AT_ONCE_COUNT)

        async def made(path: str, body: object) -> None:
            async with gate:
                await kube.made(path, body)

        nodes = [node(f"node-{number:04}") for number in range(NODES_COUNT)]
        await asyncio.gather(*(made("/api/v1/nodes", one) for one in nodes))
        pods = (pod(f"pod-{n:05}", gpus=n % 2, nodeName=f"node-{n % NODES_COUNT:04}") for n in range(PODS_COUNT))
        await asyncio.gather(*(made(PODS, one) for one in pods))
        pending = f"{PODS}?limit=1&fieldSelector=status.phase%21%3DRunning"
        await kube.until(pending, lambda answer: answer.get("items") == [], _FILL_SECONDS_MAX)
        yield kube


@asynccontextmanager
async def _broker(folder: Path) -> AsyncIterator[tuple[NatsServer, Callable[[str, str], Coroutine[Any, Any, int]]]]:
    """A broker, and how many messages of a subject a stream holds."""
    (folder / "nats").mkdir()
    server = NatsServer(folder / "nats")
    await server.start()
    connection = Client()
    await connection.connect(server.url)

    async def told(stream: str, subject: str) -> int:
        try:
            info = await connection.jetstream().stream_info(stream, subjects_filter=subject)
        except NotFoundError:
            return 0
        return sum((info.state.subjects or {}).values())

    try:
        yield server, told
    finally:
        await connection.close()
        await server.stop()


async def _until(count: Callable[[], Coroutine[Any, Any, int]], wanted: int) -> None:
    async with asyncio.timeout(_FILL_SECONDS_MAX):
        while await count() < wanted:
            await asyncio.sleep(_LOOK_SECONDS)


def _mebibytes(pid: int) -> float:
    """RSS now. Source: Linux `proc(5)`, /proc/<pid>/status."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the process has no memory; it is gone")
