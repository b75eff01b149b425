"""What tests of gangs under their kinds' controllers share: a whole control plane, nodes to run on, patience."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.controlplane.plane import EVERYTHING, ControlPlane, needed_programs, running_plane
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import node as node_json
from tests.support.stories import T0, given, job, node

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobPlaced, JobQueued
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import JobSpec, Runtime

PODS = "/api/v1/namespaces/default/pods"
SECONDS_MAX = 60.0
# The nodes, and what is sold there: two of them on spot.
SOLD_AS = {"spot-1": "spot", "spot-2": "spot", "lasting-1": "on-demand", "lasting-2": "on-demand"}


@contextlib.contextmanager
def whole_plane(
    needed: Callable[[], object], running: Callable[[ControlPlane], contextlib.AbstractContextManager[None]]
) -> Iterator[ControlPlane]:
    """A whole control plane with a kind's controllers on it; skips the test where they are not built."""
    needed_programs(), needed()
    with (
        tempfile.TemporaryDirectory(prefix="plane-") as folder,
        running_plane(Path(folder), EVERYTHING) as plane,
        running(plane),
    ):
        yield plane


@pytest.fixture
async def outside(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Users, and four nodes with GPUs."""
    async with aiohttp.ClientSession() as session:
        http = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
        for name, kind in SOLD_AS.items():
            await http.send("POST", "/api/v1/nodes", node_json(name, labels={labels.CAPACITY_TYPE: kind}))
        yield http
    await asyncio.sleep(0.5)  # connections under TLS close a moment later (aiohttp, "Graceful Shutdown")


async def until(holds: Callable[[], object]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(SECONDS_MAX):
        while not (await held if asyncio.iscoroutine(held := holds()) else held):
            await asyncio.sleep(0.1)


def gang(name: str, runtime: Runtime, *, gpus: int, run_seconds: float | None = None) -> tuple[JobSpec, ClusterState]:
    """Return a gang of two members with `gpus` GPUs each, and a state with the nodes."""
    nodes = (node(each, labels={labels.CAPACITY_TYPE: kind}) for each, kind in SOLD_AS.items())
    state = given(*nodes, job(name, members=2, gpus=gpus))
    queued = state.jobs[JobId(name)].queued
    assert isinstance(queued, JobQueued)
    run = {} if run_seconds is None else {labels.SIMULATED_RUN_SECONDS: f"{run_seconds:g}"}
    return msgspec.structs.replace(queued.spec, runtime=runtime, pod_annotations=run), state


def placed(spec: JobSpec, *names: str, attempt: int = 1) -> JobPlaced:
    """Its place."""
    uids = tuple(NodeUid(name) for name in names)
    return JobPlaced(job_id=spec.job_id, attempt=attempt, node_uids=uids, node_names=names, placed_at=T0)


async def members(outside: KubeHttp, name: str) -> list[Json]:
    """Return the pods of the job that are not terminating."""
    found = await outside.read(f"{PODS}?labelSelector=gpu-autoscaler.io/job-id%3D{name}")
    return [pod for pod in found["items"] if "deletionTimestamp" not in pod["metadata"]]
