"""Pods over HTTP: waiting, running, bound by hand, evicted, gone."""

from tests.contract.kube.conftest import Nodes
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import binding, budget, eviction, pod


def condition(item: Json, name: str) -> Json:
    """The pod's condition of that type, {} where it has none."""
    found = [entry for entry in item.get("status", {}).get("conditions") or () if entry["type"] == name]
    return dict(found[0]) if found else {}


def runs(item: Json) -> bool:
    """Return whether the pod runs and is ready."""
    return item.get("status", {}).get("phase") == "Running" and condition(item, "Ready").get("status") == "True"


def on(node_name: str) -> Json:
    """A node selector for exactly this node."""
    return {"kubernetes.io/hostname": node_name}


async def running(kube: KubeHttp, namespace: str, node_name: str, name: str = "p") -> Json:
    """A running pod labeled app=p on that node."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    await kube.made(path, pod(name, gpus=1, labels={"app": "p"}, nodeSelector=on(node_name)))
    return await kube.until(f"{path}/{name}", runs)


async def test_an_unschedulable_pod_has_a_condition(kube: KubeHttp, namespace: str) -> None:
    """PodScheduled is False, with reason Unschedulable and a message; an event has the same message."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    await kube.made(path, pod("p", gpus=8, nodeSelector=on("no-such-node")))
    item = await kube.until(f"{path}/p", lambda item: condition(item, "PodScheduled").get("message"))
    events = f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name%3Dp"
    seen = await kube.until(events, lambda answer: answer.get("items"))

    scheduled = condition(item, "PodScheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert item["status"]["phase"] == "Pending"
    assert {event["reason"] for event in seen["items"]} == {"FailedScheduling"}


async def test_a_pod_too_big_for_the_node_names_what_is_missing(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """The message counts nodes by reason, as `1 Insufficient nvidia.com/gpu`."""
    node_name = await nodes.ready(gpus=4)
    path = f"/api/v1/namespaces/{namespace}/pods"
    await kube.made(path, pod("p", gpus=8, nodeSelector=on(node_name)))
    item = await kube.until(f"{path}/p", lambda item: condition(item, "PodScheduled").get("message"))

    message = condition(item, "PodScheduled")["message"]
    assert message.startswith("0/")
    assert "nodes are available: " in message
    assert "1 Insufficient nvidia.com/gpu" in message


async def test_a_waiting_pod_runs_once_its_gpus_are_there(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """A node is ready before its device plugin is: the pod waits for the GPUs, then runs on it."""
    node_name = await nodes.ready(gpus=0)
    path = f"/api/v1/namespaces/{namespace}/pods"
    await kube.made(path, pod("p", gpus=8, nodeSelector=on(node_name)))
    await kube.until(f"{path}/p", lambda item: condition(item, "PodScheduled").get("reason") == "Unschedulable")
    gpus = {"nvidia.com/gpu": "8"}
    await kube.patched(f"/api/v1/nodes/{node_name}/status", {"status": {"capacity": gpus, "allocatable": gpus}})
    item = await kube.until(f"{path}/p", runs)

    assert item["spec"]["nodeName"] == node_name
    assert item["metadata"]["labels"]["topology.kubernetes.io/zone"] == "us-west-2a"
    assert item["status"]["startTime"]


async def test_a_cordoned_node_takes_no_pods(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """Cordon shows as a taint too, and the pod waits until it is lifted."""
    node_name = await nodes.ready()
    path = f"/api/v1/namespaces/{namespace}/pods/p"
    await kube.patched(f"/api/v1/nodes/{node_name}", {"spec": {"unschedulable": True}})
    await kube.until(f"/api/v1/nodes/{node_name}", lambda item: item["spec"].get("taints"))
    await kube.made(f"/api/v1/namespaces/{namespace}/pods", pod("p", gpus=1, nodeSelector=on(node_name)))
    waiting = await kube.until(path, lambda item: condition(item, "PodScheduled").get("message"))
    await kube.patched(f"/api/v1/nodes/{node_name}", {"spec": {"unschedulable": None}})

    assert "node(s) were unschedulable" in condition(waiting, "PodScheduled")["message"]
    assert runs(await kube.until(path, runs))


async def test_a_gated_pod_waits_for_its_gate(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """Schedulers leave it alone until the gate is removed."""
    node_name = await nodes.ready()
    path = f"/api/v1/namespaces/{namespace}/pods"
    gates = [{"name": "example.invalid/gang"}]
    made = await kube.made(path, pod("p", gpus=1, nodeSelector=on(node_name), schedulingGates=gates))
    await kube.patched(f"{path}/p", {"spec": {"schedulingGates": None}})

    assert condition(made, "PodScheduled")["reason"] == "SchedulingGated"
    assert runs(await kube.until(f"{path}/p", runs))


async def test_a_binding_places_a_pod_once(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """A scheduler of one's own binds; the second binding is a conflict that names the node."""
    node_name = await nodes.ready()
    path = f"/api/v1/namespaces/{namespace}/pods"
    await kube.made(path, pod("p", gpus=1, schedulerName="own"))
    first = await kube.send("POST", f"{path}/p/binding", binding("p", node_name))
    second = await kube.send("POST", f"{path}/p/binding", binding("p", node_name))

    assert (first.status, first.body["status"]) == (201, "Success")
    assert (second.status, second.body["reason"]) == (409, "Conflict")
    assert node_name in second.body["message"]
    assert runs(await kube.until(f"{path}/p", runs))


async def test_an_evicted_pod_gets_a_condition_and_is_removed(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """201 begins a graceful deletion; watchers see the reason before the pod is gone."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    item = await running(kube, namespace, await nodes.ready())
    version = item["metadata"]["resourceVersion"]
    answer = await kube.send("POST", f"{pods}/p/eviction", eviction("p", item["metadata"]["uid"]))
    lines = await kube.watch(f"{pods}?watch=1&resourceVersion={version}&timeoutSeconds=6")

    assert (answer.status, answer.body["status"]) == (201, "Success")
    assert lines[-1]["type"] == "DELETED"
    marks = [condition(line["object"], "DisruptionTarget").get("reason") for line in lines]
    assert "EvictionByEvictionAPI" in marks
    assert any(line["object"]["metadata"].get("deletionGracePeriodSeconds") == 5 for line in lines)
    # Its kubelet lets it go by a deletion without grace, which moves the end to the moment when it was asked for.
    asked = next(line["object"]["metadata"] for line in lines if "deletionTimestamp" in line["object"]["metadata"])
    last = lines[-1]["object"]["metadata"]
    assert (last["deletionGracePeriodSeconds"], last["generation"]) == (0, asked["generation"])
    assert last["deletionTimestamp"] < asked["deletionTimestamp"]


async def test_a_budget_refuses_an_eviction(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """429 with the cause DisruptionBudget and no Retry-After; the pod stays."""
    await running(kube, namespace, await nodes.ready())
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    await kube.made(budgets, budget("b", "p"))
    counted = await kube.until(f"{budgets}/b", lambda item: item.get("status", {}).get("currentHealthy") == 1)
    answer = await kube.send("POST", f"/api/v1/namespaces/{namespace}/pods/p/eviction", eviction("p"))

    assert counted["status"]["disruptionsAllowed"] == 0
    assert (answer.status, answer.body["reason"]) == (429, "TooManyRequests")
    assert answer.body["details"]["causes"][0]["reason"] == "DisruptionBudget"
    assert "retry-after" not in answer.headers
    assert "deletionTimestamp" not in (await kube.read(f"/api/v1/namespaces/{namespace}/pods/p"))["metadata"]


async def test_a_budget_is_spent_by_an_eviction(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """With one pod to spare, the first of two evictions is accepted and the second refused."""
    node_name = await nodes.ready()
    for name in ("p", "q"):
        await running(kube, namespace, node_name, name)
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    await kube.made(budgets, budget("b", "p"))
    await kube.until(f"{budgets}/b", lambda item: item.get("status", {}).get("disruptionsAllowed") == 1)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    first = await kube.send("POST", f"{pods}/p/eviction", eviction("p"))
    second = await kube.send("POST", f"{pods}/q/eviction", eviction("q"))

    assert (first.status, second.status) == (201, 429)


async def test_eviction_under_two_disruption_budgets_is_an_error(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """500: nothing to retry, something to report."""
    await running(kube, namespace, await nodes.ready())
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    for name in ("b", "c"):
        await kube.made(budgets, budget(name, "p"))
    answer = await kube.send("POST", f"/api/v1/namespaces/{namespace}/pods/p/eviction", eviction("p"))

    assert answer.status == 500
    assert "more than one PodDisruptionBudget" in answer.body["message"]


async def test_an_eviction_of_another_pod_is_refused(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """404 for an unknown name, 409 for a name that now belongs to another pod."""
    await running(kube, namespace, await nodes.ready())
    pods = f"/api/v1/namespaces/{namespace}/pods"
    unknown = await kube.send("POST", f"{pods}/nobody/eviction", eviction("nobody"))
    other = await kube.send("POST", f"{pods}/p/eviction", eviction("p", "00000000-0000-0000-0000-000000000000"))

    assert (unknown.status, unknown.body["reason"]) == (404, "NotFound")
    assert (other.status, other.body["reason"]) == (409, "Conflict")
