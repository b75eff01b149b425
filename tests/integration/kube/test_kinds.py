"""The examples of all kinds of work, applied as they are, under their kinds' own controllers and the real scheduler.

Each starts on a cluster without nodes: the controller makes the pods, the pod watcher reads them, the plan buys for
them, KWOK nodes of that number appear, all pods run, and deleting the owner ends them. Volcano's scheduler does not run
here: the test lets the group in and binds its pods, as that would.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from types import ModuleType

import aiohttp
import msgspec
import pytest
from tests.controlplane import jobset_controller, ray_controller, training_controller, volcano_controller
from tests.controlplane.definitions import needed_definition
from tests.controlplane.fixtures import kube
from tests.controlplane.plane import EVERYTHING, ControlPlane, needed_programs, running_plane
from tests.integration.kube.gangs import gang, members, placed, until
from tests.support.accepted import accepted_plan
from tests.support.kube_http import MERGE, Json, KubeHttp
from tests.support.kube_objects import node
from tests.support.stories import EPOCH, TimedFact, given, on_sale, policy

from gpu_autoscaler.core.demand.sources import group_of
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import from_kubeconfig
from gpu_autoscaler.kube.protocol import GROUPS, PODS, VOLCANO_GROUPS, Cluster
from gpu_autoscaler.kube.translate.workload_progress import KINDS
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.scheduler.binder import Binder

__all__ = ["kube"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]

EXAMPLES = Path(__file__).parents[3] / "examples"
CONTROLLERS = (jobset_controller, volcano_controller, training_controller, ray_controller)


class Example(msgspec.Struct, frozen=True):
    """An example and what is to be seen of it. `gang`: name of the group, empty without; `others`: pods beside it.

    `controller`: module of the controller outside Kubernetes.
    """

    file: str
    gang: str
    pods_count: int
    nodes_count: int
    owner_kind: str
    others_count: int = 0
    controller: ModuleType | None = None


WORK = (
    Example("gang", "gang", 4, 4, "Job"),
    Example("torchserve", "", 2, 1, "ReplicaSet"),
    Example("triton", "", 2, 1, "ReplicaSet"),
    # Kinds of others are later: the garbage collector learns of new ones every 30 s.
    Example("pytorchjob", "llama", 4, 4, "PyTorchJob", controller=training_controller),
    Example("tfjob", "resnet", 4, 4, "TFJob", controller=training_controller),
    Example("mpijob-horovod", "horovod", 2, 2, "MPIJob", others_count=1, controller=training_controller),
    Example("mpijob-deepspeed", "deepspeed", 2, 2, "MPIJob", others_count=1, controller=training_controller),
    Example("volcano-job", "diffusion-", 4, 4, "Job", controller=volcano_controller),  # followed by the UID of the Job
    Example("rayjob", "tune", 3, 3, "RayCluster", controller=ray_controller),
    Example("jobset", "pretrain", 4, 4, "Job", controller=jobset_controller),
)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One control plane for all kinds, with each controller on it that is built."""
    needed_programs()
    with (
        tempfile.TemporaryDirectory(prefix="plane-") as folder,
        running_plane(Path(folder), EVERYTHING) as plane,
        contextlib.ExitStack() as running,
    ):
        for controller in CONTROLLERS:
            with contextlib.suppress(pytest.skip.Exception):  # the examples of this controller are skipped
                running.enter_context(controller.running(plane))
        yield plane


@pytest.fixture
async def user(plane: ControlPlane) -> AsyncIterator[KubeHttp]:
    """Users, cloud, and Volcano's scheduler."""
    async with aiohttp.ClientSession() as session:
        yield KubeHttp(session, plane.url, plane.admin_token, plane.tls)


async def as_volcano(user: KubeHttp, namespace: str, nodes: tuple[str, ...] = ()) -> None:
    """Do one round of Volcano's scheduler: let groups in, report pods as unschedulable or bind one to each node."""
    groups = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{namespace}/podgroups"
    for group in (await user.read(groups))["items"]:
        if group.get("status", {}).get("phase") not in ("Inqueue", "Running"):
            await user.send("PATCH", f"{groups}/{group['metadata']['name']}", {"status": {"phase": "Inqueue"}},
                            content_type=MERGE)  # fmt: skip
    pods = f"/api/v1/namespaces/{namespace}/pods"
    waiting = [pod for pod in (await user.read(pods))["items"] if not pod["spec"].get("nodeName")]
    for number, pod in enumerate(pod for pod in waiting if pod["spec"]["schedulerName"] == "volcano"):
        name = pod["metadata"]["name"]
        if nodes:
            target = {"target": {"kind": "Node", "name": nodes[number]}, "metadata": {"name": name}}
            await user.send("POST", f"{pods}/{name}/binding", target)
        elif not pod["status"].get("conditions"):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nodes"}
            condition["lastTransitionTime"] = pod["metadata"]["creationTimestamp"]
            await user.patched(f"{pods}/{name}/status", {"status": {"conditions": [condition]}}, MERGE)


async def observed(kube: KubeClient, namespace: str) -> list[PodObserved]:
    """Return the pods of the namespace as a new pod watcher publishes them."""
    watcher, facts = PodWatcher(kube, Cluster(installation="i", epoch=EPOCH)), []
    for kind in (GROUPS, VOLCANO_GROUPS, PODS):
        async for item in kube.watch(kind):
            facts = list(await watcher.on_item(item))
            break
    return [fact for fact in facts if isinstance(fact, PodObserved) and fact.namespace == namespace]


def bought(pods: list[PodObserved], as_of: datetime, nodes_count_max: int) -> list[BuyNode]:
    """Return what the plan buys for these pods on a cluster without nodes; the plan check accepts it."""
    story = tuple(TimedFact(pod, as_of) for pod in pods)
    state, rules = given(story, on_sale(at=as_of), as_of=as_of), policy(nodes_count_max=nodes_count_max)
    result = accepted_plan(state, rules, as_of)
    return result.purchases


@contextlib.asynccontextmanager
async def nodes(user: KubeHttp, names: tuple[str, ...]) -> AsyncIterator[None]:
    """Ready nodes of the offered instance type, removed at the end."""
    for name in names:
        body = node(name)
        amounts = body["status"]["capacity"] | {"cpu": "96", "memory": "1100Gi"}
        await user.made("/api/v1/nodes", {**body, "status": {"capacity": amounts, "allocatable": amounts}})
    yield
    for name in names:
        await user.send("DELETE", f"/api/v1/nodes/{name}")


@pytest.mark.parametrize("example", WORK, ids=lambda example: example.file)
async def test_an_example_is_bought_for_and_runs(
    example: Example, plane: ControlPlane, user: KubeHttp, kube: KubeClient
) -> None:
    """One gang of the right size, bought for whole or not at all; all of it runs, and ends with its owner."""
    if example.controller is not None:
        example.controller.needed()
    namespace, path = example.file, str(EXAMPLES / f"{example.file}.yaml")
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("apply", "--validate=strict", "--namespace", namespace, "--filename", path)
    all_count = example.pods_count + example.others_count

    async def all_wait() -> bool:
        await as_volcano(user, namespace)
        found = await observed(kube, namespace)
        return len(found) == all_count and all(pod.unschedulable_since for pod in found)

    await until(all_wait)
    pods = await observed(kube, namespace)
    with_gpus = [pod for pod in pods if pod.requests.gpu_count]
    assert len(with_gpus) == example.pods_count
    assert {pod.owner_kind for pod in with_gpus} == {example.owner_kind}
    groups = {group_of(pod) for pod in with_gpus}
    wanted = f"group/{namespace}/{example.gang}" if example.gang else ""
    assert len(groups) == 1
    assert groups.pop().startswith(wanted) if wanted else groups == {""}
    assert all(group_of(pod) == "" for pod in pods if pod not in with_gpus)

    as_of, gang_name = Clock().now(), group_of(with_gpus[0]) or None
    purchases = bought(with_gpus, as_of, example.nodes_count)
    assert [decision.gang for decision in purchases] == [gang_name] * example.nodes_count
    if gang_name is not None:
        assert bought(with_gpus, as_of, example.nodes_count - 1) == []
        assert bought(with_gpus[1:], as_of, example.nodes_count) == []  # a member is missing

    names = tuple(f"{namespace}-{number}" for number in range(example.nodes_count))
    async with nodes(user, names):

        async def all_run() -> bool:
            await as_volcano(user, namespace, names)
            found = await observed(kube, namespace)
            return len(found) >= all_count and all(pod.phase == "running" for pod in found)

        await until(all_run)
        running = [pod for pod in await observed(kube, namespace) if pod.requests.gpu_count]
        assert {pod.node_name for pod in running} == set(names)
        assert {group_of(pod) or None for pod in running} == {gang_name}
        plane.kubectl("delete", "--wait=false", "--namespace", namespace, "--filename", path)

        async def none_left() -> bool:
            return not await observed(kube, namespace)

        await until(none_left)


@pytest.mark.parametrize("runtime", [Runtime.PYTORCHJOB, Runtime.RAYJOB])
async def test_a_job_of_the_queue_starts_and_is_canceled(runtime: Runtime, user: KubeHttp, kube: KubeClient) -> None:
    """No pod before it is released; then all members run; withdrawn, owner and pods are gone."""
    (training_controller if runtime is Runtime.PYTORCHJOB else ray_controller).needed()
    binder, (spec, state) = Binder(kube, "default"), gang(runtime.value, runtime, gpus=8)
    names = (f"{runtime.value}-1", f"{runtime.value}-2")
    async with nodes(user, names):
        await binder.create(spec, state)
        await asyncio.sleep(1.0)
        assert await members(user, runtime.value) == []
        await binder.release(spec, placed(spec, *names), state)

        async def all_run() -> bool:
            pods: list[Json] = await members(user, runtime.value)
            return len(pods) == 2 and all(pod["status"]["phase"] == "Running" for pod in pods)

        await until(all_run)
        await binder.withdraw(spec.job_id, runtime)

        async def is_gone() -> bool:
            answer = await user.send("GET", KINDS[runtime].path("default", spec.job_id))
            return answer.status == 404 and await members(user, runtime.value) == []

        await until(is_gone)


async def test_the_pod_group_of_the_training_operator_is_the_gang(tmp_path: Path) -> None:
    """Without labels of ours on the pods, the minimum of the operator's PodGroup counts."""
    needed_programs(), training_controller.needed()
    groups = needed_definition("podgroups.scheduling.volcano.sh")
    lines = (EXAMPLES / "pytorchjob.yaml").read_text(encoding="utf-8").splitlines()
    unlabeled = "\n".join(line for line in lines if "pod-group.scheduling" not in line)
    with running_plane(tmp_path) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(groups))
        kube = KubeClient(from_kubeconfig(str(plane.kubeconfig())), now=Clock().now)
        async with aiohttp.ClientSession() as session:
            user = KubeHttp(session, plane.url, plane.admin_token, plane.tls)
            await user.until(VOLCANO_GROUPS.path(), lambda body: "items" in body)
            with training_controller.running(plane, "--gang-scheduler-name=volcano"):
                plane.kubectl("apply", "--validate=strict", "-f", "-", text=unlabeled)

                async def all_wait() -> bool:
                    await as_volcano(user, "default")
                    found = await observed(kube, "default")
                    return len(found) == 4 and all(pod.unschedulable_since for pod in found)

                await until(all_wait)
                pods, as_of = await observed(kube, "default"), Clock().now()
        await kube.close()
    assert not any(key.startswith("pod-group") for pod in pods for key, _ in pod.labels)
    assert {(group_of(pod), pod.group_count_min) for pod in pods} == {("group/default/llama", 4)}
    assert len(bought(pods, as_of, 4)) == 4
    assert bought(pods[1:], as_of, 4) == []
