"""Recorded answers of a real kube-apiserver, compared with what a server answers to the same requests.

One story replays the recordings in the order in which they were made, so that each meets the state it needs.
Compared are the status code and the shape: every field that the real server sent and that somebody reads, with its
JSON type; for refusals also reason, code and causes. Times, versions, uids and field managers differ by nature.

The recordings are found by GPU_AUTOSCALER_CAPTURES, else in `../shared/captures` beside the repository.
"""

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from tests.support.kube_http import MERGE, STRATEGIC, Answer, Json, KubeHttp
from tests.support.kube_objects import READY, budget

REPOSITORY = Path(__file__).resolve().parents[3]
CAPTURES = Path(os.environ.get("GPU_AUTOSCALER_CAPTURES", REPOSITORY.parent / "shared" / "captures")) / "k8s-1.36"

pytestmark = pytest.mark.skipif(
    not CAPTURES.is_dir(), reason=f"no recorded Kubernetes answers in {CAPTURES} (GPU_AUTOSCALER_CAPTURES)"
)

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

# What a real server sends and nobody here reads.
UNREAD = {
    "managedFields",
    "nodeInfo",
    "daemonEndpoints",
    "remainingItemCount",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "node.alpha.kubernetes.io/ttl",
    "kwok.x-k8s.io/node",
}


def recorded(name: str) -> Json:
    """One recording."""
    return dict(json.loads((CAPTURES / f"{name}.json").read_text()))


def differences(real: object, ours: object, at: str = "") -> list[str]:
    """Where `ours` lacks what `real` has, or has another JSON type. More than the real server sends is fine."""
    if isinstance(real, dict):
        if not isinstance(ours, dict):
            return [f"{at}: an object there, {ours!r} here"]
        if at.endswith(".state"):
            return []  # how far a container is depends on the moment, and KWOK never ends one
        kept = {key: value for key, value in real.items() if key not in UNREAD and not _is_empty(value)}
        missing = [f"{at}.{key}: missing here" for key in kept if key not in ours]
        return missing + [d for key in kept if key in ours for d in differences(kept[key], ours[key], f"{at}.{key}")]
    if isinstance(real, list):
        if not isinstance(ours, list):
            return [f"{at}: a list there, {ours!r} here"]
        if at.endswith(".conditions"):
            return _conditions(real, ours, at)
        if at.endswith((".items", ".taints", ".tolerations")):
            return differences(real[0], ours[0], at + "[0]") if real and ours else []
        pairs = enumerate(zip(real, ours, strict=False))
        return [line for index, (there, here) in pairs for line in differences(there, here, f"{at}[{index}]")]
    if type(real) is not type(ours):
        return [f"{at}: {type(real).__name__} there, {ours!r} here"]
    return []


def _is_empty(value: object) -> bool:
    return value in (None, "", {}, [])


def _conditions(real: list[Json], ours: list[Json], at: str) -> list[str]:
    """Conditions are compared by type; those of a kubelet's own housekeeping are nobody's business."""
    here = {entry["type"]: entry for entry in ours}
    unread = {"MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"}
    return [
        line
        for entry in real
        if entry["type"] not in unread
        for line in (
            differences({"status": entry["status"]}, here[entry["type"]], f"{at}[{entry['type']}]")
            if entry["type"] in here
            else [f"{at}: no {entry['type']} here"]
        )
    ]


class Replay:
    """Sends recorded requests to a server and collects where its answers differ."""

    def __init__(self, kube: KubeHttp) -> None:
        self.kube = kube
        self.done: set[str] = set()
        self.wrong: list[str] = []

    async def request(self, name: str, content_type: str = "application/json", **changes: str) -> Answer:
        """Replay one recorded request, with texts in path and body exchanged, and compare the answer."""
        capture = recorded(name)
        asked, real = capture["request"], capture["response"]
        text = json.dumps(asked["body"])
        path = asked["path"]
        for old, new in changes.items():
            text, path = text.replace(old, new), path.replace(old, new)
        body = None if asked["body"] is None else json.loads(text)
        answer = await self.kube.send(asked["method"], path, body, content_type=content_type)
        self.compare(name, real, answer)
        return answer

    def compare(self, name: str, real: Json, answer: Answer) -> None:
        """Note where status, shape or refusal differ."""
        self.done.add(name)
        if answer.status != real["status"]:
            self.wrong.append(f"{name}: {real['status']} there, {answer.status} here: {answer.body}")
            return
        body = real["body"]
        if isinstance(body, dict) and body.get("kind") == "Node":
            body["status"].pop("phase", None)  # KWOK's own: the field is deprecated and kubelets leave it out
        self.wrong += [f"{name}{line}" for line in differences(body, answer.body)]
        if isinstance(real["body"], dict) and real["body"].get("kind") == "Status":
            for field in ("status", "reason", "code"):
                if real["body"].get(field) != answer.body.get(field):
                    self.wrong.append(f"{name}.{field}: {real['body'].get(field)} there, {answer.body.get(field)} here")
            there, here = (_causes(body) for body in (real["body"], answer.body))
            if there != here:
                self.wrong.append(f"{name}: causes {there} there, {here} here")
        if ("retry-after" in real["headers"]) != ("retry-after" in answer.headers):
            self.wrong.append(f"{name}: Retry-After differs")

    async def until(self, name: str, holds: Callable[[Json], object]) -> Json:
        """Read the recorded path until it holds, then compare."""
        capture = recorded(name)
        body = await self.kube.until(capture["request"]["path"], holds)
        self.compare(name, capture["response"], Answer(200, body, {}))
        return body

    async def watch(self, name: str, path: str) -> None:
        """Replay a watch at this path and compare the types of its lines, and the shape of the first of each."""
        real = recorded(name)["response"]["lines"]
        ours = await self.kube.watch(path, lines=len(real) or 1)  # the recording stopped there, too
        self.done.add(name)
        kinds = [{line["type"] for line in lines} for lines in (real, ours)]
        if kinds[0] != kinds[1]:
            self.wrong.append(f"{name}: lines {sorted(kinds[0])} there, {sorted(kinds[1])} here")
        for kind in kinds[0] & kinds[1] - {"BOOKMARK"}:
            first = [next(line for line in lines if line["type"] == kind) for lines in (real, ours)]
            self.wrong += [f"{name}[{kind}]{line}" for line in differences(first[0], first[1])]


def _causes(body: Json) -> list[tuple[object, object]]:
    causes = body.get("details", {}).get("causes") or ()
    return [(cause.get("field"), cause["reason"]) for cause in causes]


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
    """Every answer of the eviction door."""
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
    await replay.watch("watch-deletion", f"{PODS}?{query}")


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


async def test_the_answers_are_those_of_a_real_server(fresh_cluster_url: str) -> None:
    """Every replayed request gets the recorded status code, reason and shape."""
    async with aiohttp.ClientSession() as session:
        replay = Replay(KubeHttp(session, fresh_cluster_url))
        for chapter in STORY:
            await chapter(replay)

    assert not replay.wrong, "\n".join(replay.wrong)
    everything = {path.stem for path in CAPTURES.glob("*.json")}
    assert everything - replay.done == set(NOT_REPLAYED), "a recording is neither replayed nor listed with a reason"
