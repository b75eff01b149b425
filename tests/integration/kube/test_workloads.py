"""Gangs in the kinds that others bring, made by their published definitions on a real API server.

Their controllers do not run here: what they would write into the status is written by the test, as their sources do.
"""

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.controlplane.definitions import needed_definition
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.stories import T0, given, job, node

from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobListed, JobPlaced, JobQueued, JobStarted
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import Changed, Cluster, Listed, NotFound
from gpu_autoscaler.kube.translate.workload_progress import KINDS
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.model.jobs import JobSpec, Runtime
from gpu_autoscaler.model.labels import CHECKPOINT_HOOK, CHECKPOINTED_AT, JOB_ID
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scheduler import job_kinds
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.manifest import affinity

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

ESTABLISHED_SECONDS_MAX = 60.0
NODES = tuple(node(f"n{number}", labels={"rack": "r1"}) for number in (1, 2, 3))
WHERE = ("n1", "n2", "n3")
OTHERS = tuple(runtime for runtime in Runtime if runtime is not Runtime.JOB)

# What each controller writes while all members run, and at each end.
RUNNING: dict[Runtime, Json] = {
    Runtime.JOBSET: {
        "replicatedJobsStatus": [{"name": "gang", "ready": 1, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}]
    },
    Runtime.PYTORCHJOB: {"conditions": [], "replicaStatuses": {"Master": {"active": 1}, "Worker": {"active": 2}}},
    Runtime.RAYJOB: {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"},
    Runtime.VOLCANO: {"state": {"phase": "Running"}, "running": 3, "minAvailable": 3},
}
PARTLY: dict[Runtime, Json] = {
    Runtime.JOBSET: {
        "replicatedJobsStatus": [{"name": "gang", "ready": 0, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}]
    },
    Runtime.PYTORCHJOB: {"conditions": [], "replicaStatuses": {"Master": {"active": 1}, "Worker": {"active": 1}}},
    Runtime.RAYJOB: {"jobStatus": "PENDING", "jobDeploymentStatus": "Initializing"},
    Runtime.VOLCANO: {"state": {"phase": "Pending"}, "running": 2, "minAvailable": 3},
}


def condition(kind: str) -> Json:
    """A condition as controllers write it."""
    at = "2026-11-21T09:30:00Z"
    return {"conditions": [{"type": kind, "status": "True", "reason": kind, "message": "m", "lastTransitionTime": at}]}


COMPLETED: dict[Runtime, Json] = {
    Runtime.JOBSET: condition("Completed"),
    Runtime.PYTORCHJOB: {**condition("Succeeded"), "completionTime": "2026-11-21T09:30:00Z"},
    Runtime.RAYJOB: {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete", "endTime": "2026-11-21T09:30:00Z"},
    Runtime.VOLCANO: {"state": {"phase": "Completed", "lastTransitionTime": "2026-11-21T09:30:00Z"}, "running": 0},
}
FAILED: dict[Runtime, Json] = {
    Runtime.JOBSET: condition("Failed"),
    Runtime.PYTORCHJOB: condition("Failed"),
    Runtime.RAYJOB: {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": "m"},
    Runtime.VOLCANO: {"state": {"phase": "Terminated", "reason": "PodFailed", "message": "m"}, "running": 0},
}


class Bench:
    """The binder, the watcher, and the server between them."""

    def __init__(self, kube: KubeClient, outside: KubeHttp) -> None:
        self.kube = kube
        self.outside = outside
        self.binder = Binder(kube, "default")
        self.watcher = PodWatcher(kube, Cluster(installation="i", epoch=7))

    def path(self, spec: JobSpec) -> str:
        """Where the job's object is."""
        return KINDS[spec.runtime].path("default", spec.job_id)

    async def seen(self, spec: JobSpec) -> list[Fact]:
        """Return the watcher's facts of the current object."""
        thing = await self.kube.get(KINDS[spec.runtime], "default", spec.job_id)
        return list(await self.watcher.on_item(Changed(kind=KINDS[spec.runtime], object=thing, seen_at=T0)))

    async def becomes(self, spec: JobSpec, status: Json) -> list[Fact]:
        """Write a status as the controller would; return the watcher's facts."""
        await self.outside.patched(f"{self.path(spec)}/status", {"status": status}, MERGE)
        return await self.seen(spec)


@pytest.fixture
async def bench(plane: ControlPlane) -> AsyncIterator[Bench]:
    """A bench at a real API server."""
    kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
    async with aiohttp.ClientSession() as session:
        yield Bench(kube, KubeHttp(session, plane.url, plane.admin_token, plane.tls))
    await kube.close()


async def test_marks_of_a_request_stand_on_the_pods_and_not_instead_of_ours(bench: Bench) -> None:
    """Checkpoint support, the checkpoint notice, and the labels of its team."""
    marks = {CHECKPOINTED_AT: "", CHECKPOINT_HOOK: ":8080/save"}
    state = given(*NODES, job("marked", pod_labels={"team": "vision"}, pod_annotations=marks))
    queued = state.jobs[JobId("marked")].queued
    assert queued is not None
    await bench.binder.create(queued.spec, state)
    made = await bench.outside.read(bench.path(queued.spec))
    template = made["spec"]["template"]["metadata"]
    assert {key: template["annotations"].get(key) for key in marks} == marks
    assert (template["labels"]["team"], template["labels"][JOB_ID]) == ("vision", "marked")


@pytest.fixture(params=OTHERS)
def runtime(request: pytest.FixtureRequest, plane: ControlPlane) -> Runtime:
    """A kind that others bring, installed."""
    runtime = Runtime(request.param)
    kind = KINDS[runtime]
    if plane.ask(kind.path())[0] != 200:
        # On the server's side: what `apply` notes of these by default is larger than an annotation may be.
        plane.kubectl("apply", "--server-side", "-f", str(needed_definition(kind.crd)))
    deadline = time.monotonic() + ESTABLISHED_SECONDS_MAX
    while plane.ask(kind.path())[0] != 200:
        assert time.monotonic() < deadline, f"{kind.crd} was applied and is not served"
        time.sleep(0.1)
    return runtime


def gang(name: str, runtime: Runtime, *, members: int = 3) -> tuple[JobSpec, ClusterState]:
    """A job of three members, and the state that it is in."""
    state = given(*NODES, job(name, members=members, gpus=8))
    queued = state.jobs[JobId(name)].queued
    assert isinstance(queued, JobQueued)
    return msgspec.structs.replace(queued.spec, runtime=runtime, command=("python", "train.py")), state


def made_as(spec: JobSpec, state: ClusterState) -> Json:
    """What the binder sends."""
    if spec.runtime is Runtime.VOLCANO:
        return job_kinds.volcano_job(spec, state, WHERE)
    makers = {
        Runtime.JOBSET: job_kinds.jobset,
        Runtime.PYTORCHJOB: job_kinds.pytorchjob,
        Runtime.RAYJOB: job_kinds.rayjob,
    }
    return makers[spec.runtime](spec, state)


def placed(spec: JobSpec) -> JobPlaced:
    """Its place."""
    uids = tuple(NodeUid(name) for name in WHERE)
    return JobPlaced(job_id=spec.job_id, attempt=1, node_uids=uids, node_names=WHERE, placed_at=T0)


def templates(thing: Any) -> list[Json]:  # noqa: ANN401 - JSON
    """Every pod template in an object, wherever its kind has it."""
    if isinstance(thing, list):
        return [found for each in thing for found in templates(each)]
    if not isinstance(thing, dict):
        return []
    inside = [found for each in thing.values() for found in templates(each)]
    return [thing, *inside] if "containers" in thing.get("spec", {}) else inside


def is_held(item: Json) -> bool:
    """Whether its controller may make no pod yet."""
    return bool({**item["spec"], **item["spec"].get("runPolicy", {})}.get("suspend"))


async def test_a_gang_is_made_as_its_definition_wants_it_and_held_until_it_may_run(
    bench: Bench, runtime: Runtime
) -> None:
    """The schema knows every field; every member names its job; released with its placement."""
    spec, state = gang("held", runtime)
    await bench.binder.create(spec, state)
    await bench.binder.create(spec, state)
    if runtime is Runtime.VOLCANO:  # has no such field: it is made when it may run
        with pytest.raises(NotFound):
            await bench.kube.get(KINDS[runtime], "default", "held")
    else:
        assert is_held(await bench.outside.read(bench.path(spec)))
    await bench.binder.release(spec, placed(spec), state)
    await bench.binder.release(spec, placed(spec), state)
    item = await bench.outside.read(bench.path(spec))
    item["metadata"] = {"name": "again", "labels": item["metadata"]["labels"]}
    strictly = f"{KINDS[runtime].path('default')}?fieldValidation=Strict&dryRun=All"
    checked = await bench.outside.send("POST", strictly, item)

    assert not is_held(item)
    assert checked.status == 201, checked.body
    members = templates(item["spec"])
    assert {each["metadata"]["labels"]["gpu-autoscaler.io/job-id"] for each in members} == {"held"}
    if runtime is not Runtime.JOBSET:  # whose webhook lets nobody change it
        assert all(each["spec"]["affinity"] == affinity(spec, state, WHERE) for each in members)


async def test_a_manifest_has_nothing_that_its_definition_does_not_know(bench: Bench, runtime: Runtime) -> None:
    """The server would drop it silently: asked to be strict it takes every field, for one member as for three."""
    strictly = f"{KINDS[runtime].path('default')}?fieldValidation=Strict&dryRun=All"
    for count in (1, 3):
        spec, state = gang("strict", runtime, members=count)
        answer = await bench.outside.send("POST", strictly, made_as(spec, state))
        assert answer.status == 201, answer.body


async def test_how_far_a_gang_is_becomes_facts(bench: Bench, runtime: Runtime) -> None:
    """Nothing while some run; the start once all do; the end with its outcome and time."""
    spec, state = gang("told", runtime)
    await bench.binder.create(spec, state)
    await bench.binder.release(spec, placed(spec), state)

    assert await bench.seen(spec) == []
    assert await bench.becomes(spec, PARTLY[runtime]) == []
    assert not await bench.binder.is_ending(spec.job_id, runtime)
    (started,) = await bench.becomes(spec, RUNNING[runtime])
    assert isinstance(started, JobStarted)
    assert started.job_id == "told"
    (finished,) = await bench.becomes(spec, COMPLETED[runtime])
    assert isinstance(finished, JobFinished)
    assert (finished.outcome, finished.finished_at.isoformat()) == ("completed", "2026-11-21T09:30:00+00:00")
    assert await bench.binder.is_ending(spec.job_id, runtime)
    await bench.binder.withdraw(spec.job_id, runtime)
    assert await bench.binder.has(spec.job_id, runtime), "what ended by itself is kept to be looked at"


async def test_work_that_fails_ends_the_job_with_its_reason(bench: Bench, runtime: Runtime) -> None:
    """The message of the observer."""
    spec, state = gang("fails", runtime)
    await bench.binder.create(spec, state)
    await bench.binder.release(spec, placed(spec), state)
    (finished,) = await bench.becomes(spec, FAILED[runtime])

    assert isinstance(finished, JobFinished)
    assert finished.outcome == "failed"
    assert finished.message.endswith(": m")


async def test_a_gang_is_taken_back(bench: Bench, runtime: Runtime) -> None:
    """Cancelled by us: the object goes. The list that a watcher starts with says of which kind it is."""
    spec, state = gang("taken", runtime)
    await bench.binder.create(spec, state)
    await bench.binder.release(spec, placed(spec), state)
    kind = KINDS[runtime]
    thing = await bench.kube.get(kind, "default", "taken")
    (listed,) = await bench.watcher.on_item(Listed(kind=kind, objects=(thing,), version=9, seen_at=T0))
    await bench.binder.withdraw(spec.job_id, runtime)

    assert isinstance(listed, JobListed)
    assert (listed.runtime, listed.job_ids) == (runtime, ("taken",))
    assert not await bench.binder.has(spec.job_id, runtime)
