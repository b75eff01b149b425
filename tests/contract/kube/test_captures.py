"""Recorded answers of a real kube-apiserver, compared with what a server answers to the same requests.

One story replays the recordings in the order in which they were made, so that each meets the state it needs.
"""

from collections.abc import Awaitable, Callable

from tests.support.kube_captures import CAPTURES, Replay, needs_captures, recorded
from tests.support.kube_http import MERGE, STRATEGIC, Json, KubeHttp
from tests.support.kube_objects import READY, budget

# Recordings that are not replayed here, each with the reason.
NOT_REPLAYED = {
    "401": "needs a server with tokens: tests/unit/simcluster/test_server.py compares it",
    "403": "needs a server with tokens: tests/unit/simcluster/test_server.py compares it",
    "continue-token-after-compaction-still-cached": "an apiserver cache's memory after an etcd compaction: left out",
    "continue-token-expired": "needs lost history: tests/unit/simcluster/test_server.py compares it",
    "watch-410-too-old": "needs lost history: tests/unit/simcluster/test_server.py compares it",
    "list-exact-version-gone": "needs lost history: tests/unit/simcluster/test_server.py compares it",
    "crd-create": "CustomResourceDefinitions are not served: a custom kind is a row in kinds.py",
    "crd-object-422-rule": "rules of a CRD's schema are not evaluated",
    "crd-object-defaulted": "defaults of a CRD's schema are not applied",
    "crd-status-patch": "needs the CRD above",
    "dra-resources": "resource.k8s.io is not served",
}

PODS, NODES = "/api/v1/namespaces/default/pods", "/api/v1/nodes"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"


def _scheduled_message(item: Json) -> object:
    return (item.get("status", {}).get("conditions") or [{}])[0].get("message")


async def waiting_pods(replay: Replay) -> None:
    """An empty cluster: pods that wait."""
    await replay.request("version")
    await replay.request("node-list-empty")
    await replay.request("pod-create")
    await replay.until("pod-unschedulable", _scheduled_message)
    await replay.until("event-failed-scheduling", lambda answer: answer.get("items"))
    await replay.request("pod-suspended-by-gate")


async def a_node(replay: Replay) -> None:
    """A node whose GPUs come late, its cordon, its conflicts, its finalizer."""
    await replay.request("node-create")
    await replay.kube.patched(f"{NODES}/gpu-a/status", READY, STRATEGIC)
    await replay.until("node-ready-without-gpus", lambda item: not item["spec"].get("taints"))
    await replay.request("node-status-patch-gpus", MERGE)
    await replay.until("pod-running", lambda item: item["status"]["phase"] == "Running")
    await replay.request("node-with-pod")
    await replay.request("node-cordon", MERGE)
    await replay.request("node-put-conflict")
    await replay.request("node-taint-strategic", STRATEGIC)
    await replay.request("node-finalizer", MERGE)


async def evictions(replay: Replay) -> None:
    """Every answer of the eviction subresource."""
    kube = replay.kube
    await kube.patched(f"{PODS}/train-0", {"metadata": {"labels": {"app": "train"}}})
    await replay.request("pdb-create")
    await replay.until("pdb-status", lambda item: item["status"].get("expectedPods") == 1)
    await replay.request("eviction-429-pdb")
    await kube.made(BUDGETS, budget("train-2", "train"))
    await replay.request("eviction-500-two-pdbs")
    for name in ("train", "train-2"):
        await kube.send("DELETE", f"{BUDGETS}/{name}")
    await replay.request("eviction-409-other-uid")
    await replay.request("eviction-404")
    await replay.request("eviction-201")
    await replay.request("node-delete-with-finalizer")
    await replay.request("node-terminating")


async def bindings_and_jobs(replay: Replay) -> None:
    """A scheduler of one's own, and a job from held to done."""
    kube = replay.kube
    await replay.request("node-create-b")
    await kube.patched(f"{NODES}/gpu-b/status", READY, STRATEGIC)
    await replay.request("pod-create-own-scheduler")
    await replay.request("binding-201")
    await replay.request("binding-409")
    # The one change to a recorded request: KWOK ends a job's pods at once, here the pods say how long they work.
    template = '"template": {"metadata": {"annotations": {"simcluster.gpu-autoscaler.io/run-seconds": "0.1"}}, '
    await replay.request("job-create-suspended", **{'"template": {': template})
    job = "/apis/batch/v1/namespaces/default/jobs/gang"
    await kube.until(job, lambda item: item["status"].get("conditions"))
    await replay.request("job-set-affinity-while-suspended", MERGE)
    await replay.request("job-release", MERGE)
    await replay.until("job-status", lambda item: item["status"].get("completionTime"))
    await replay.request("job-pods")
    await replay.request("job-set-affinity-when-running", MERGE)


async def lists_and_watches(replay: Replay) -> None:
    """Pages, selections, and watches of all kinds."""
    kube = replay.kube
    page = await replay.request("pod-list-first-page")
    capture = recorded("pod-list-second-page")
    second = await kube.send("GET", f"{PODS}?limit=2&continue={page.body['metadata']['continue']}")
    replay.compare("pod-list-second-page", capture["response"], second)
    await replay.request("pod-list-field-selector")
    await replay.request("continue-token-bad")
    version = (await replay.request("pod-list")).body["metadata"]["resourceVersion"]
    for name in ("watch-initial-events-bookmark", "watch-too-old", "watch-future"):
        await replay.watch(name, recorded(name)["request"]["path"])
    await replay.watch("watch-timeout-closes", f"{PODS}?watch=1&resourceVersion={version}&timeoutSeconds=1")
    await kube.send("DELETE", f"{PODS}/own-0")
    query = f"watch=1&resourceVersion={version}&fieldSelector=metadata.name%3Down-0&timeoutSeconds=3"
    # One more: a kubelet says how the containers ended, and the one of the recording did not.
    await replay.watch("watch-deletion", f"{PODS}?{query}", more_count=1)


async def refusals(replay: Replay) -> None:
    """What is refused, and a lease."""
    names = ("404-object", "404-api", "409-exists", "422-fraction-of-a-gpu", "422-gpu-request-without-limit")
    for name in (*names, "400-broken-json-type", "415-patch-type", "lease-create"):
        await replay.request(name)


STORY: tuple[Callable[[Replay], Awaitable[None]], ...] = (
    waiting_pods,
    a_node,
    evictions,
    bindings_and_jobs,
    lists_and_watches,
    refusals,
)


@needs_captures
async def test_the_answers_are_those_of_a_real_server(fresh_kube: KubeHttp) -> None:
    """Every replayed request gets the recorded status code, reason and shape."""
    replay = Replay(fresh_kube)
    for chapter in STORY:
        await chapter(replay)

    assert not replay.wrong, "\n".join(replay.wrong)
    everything = {path.stem for path in CAPTURES.glob("*.json")}
    assert everything - replay.done == set(NOT_REPLAYED), "a recording is neither replayed nor listed with a reason"
