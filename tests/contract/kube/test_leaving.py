"""What a drain relies on: nodes and pods that finalizers hold, graces that only get shorter, volumes, Events."""

import asyncio

from tests.contract.kube.test_pods import running, runs
from tests.support.kube_http import MERGE, KubeHttp
from tests.support.kube_objects import eviction, pod

from .conftest import Nodes

HOLD = {"metadata": {"finalizers": ["example.invalid/hold"]}}
LET_GO = {"metadata": {"finalizers": None}}


async def test_a_deleted_node_that_is_held_goes_on(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """Its pods run, and it even takes new ones: only a cordon keeps them off. No finalizer can be added any more."""
    name = await nodes.ready()
    await running(kube, namespace, name)
    path = f"/api/v1/nodes/{name}"
    await kube.patched(path, HOLD)
    await kube.send("DELETE", path)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    await kube.made(pods, pod("late", gpus=1, nodeSelector={"kubernetes.io/hostname": name}))
    assert runs(await kube.until(f"{pods}/late", runs))
    assert "deletionTimestamp" not in (await kube.read(f"{pods}/p"))["metadata"]
    more = {"metadata": {"finalizers": ["example.invalid/hold", "example.invalid/more"]}}
    refused = await kube.send("PATCH", path, more, content_type=MERGE)
    assert (refused.status, refused.body["reason"]) == (422, "Invalid")
    cordoned = await kube.patched(path, {"spec": {"unschedulable": True}})
    assert cordoned["spec"]["unschedulable"]
    await kube.patched(path, LET_GO)
    assert (await kube.send("GET", path)).status == 404


async def test_a_node_is_deleted_in_the_version_that_was_seen(kube: KubeHttp, nodes: Nodes) -> None:
    """Another version or uid is a conflict, and the node stays; removing a finalizer makes a new version."""
    path = f"/api/v1/nodes/{await nodes.ready()}"
    seen = (await kube.patched(path, HOLD))["metadata"]
    await kube.patched(path, {"spec": {"unschedulable": True}})
    for stale in (
        {"uid": seen["uid"], "resourceVersion": seen["resourceVersion"]},
        {"uid": "11111111-2222-3333-4444-555555555555"},
    ):
        refused = await kube.send("DELETE", path, {"preconditions": stale})
        assert (refused.status, refused.body["reason"]) == (409, "Conflict")
    assert "deletionTimestamp" not in (await kube.read(path))["metadata"]

    async with asyncio.timeout(60):
        while True:  # kubelet and controllers write it as well
            now = (await kube.patched(path, LET_GO))["metadata"]
            condition = {"uid": now["uid"], "resourceVersion": now["resourceVersion"]}
            if (await kube.send("DELETE", path, {"preconditions": condition})).status == 200:
                break
    assert (await kube.send("GET", path)).status == 404


async def test_an_evicted_pod_that_is_held_has_ended_and_is_still_there(
    kube: KubeHttp, namespace: str, nodes: Nodes
) -> None:
    """Its containers have ended; the object is removed with the finalizer."""
    item = await running(kube, namespace, await nodes.ready())
    path = f"/api/v1/namespaces/{namespace}/pods/p"
    await kube.patched(path, HOLD)
    answer = await kube.send("POST", f"{path}/eviction", eviction("p", item["metadata"]["uid"]))
    held = await kube.until(path, lambda one: one["status"]["phase"] in ("Failed", "Succeeded"))

    assert answer.status == 201
    assert "deletionTimestamp" in held["metadata"]
    await kube.patched(path, LET_GO)
    await kube.until(path, lambda one: one == {})


async def test_a_grace_is_shortened_and_never_lengthened(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """A second deletion with less moves the end forward, one with more moves nothing."""
    item = await running(kube, namespace, await nodes.ready())
    path = f"/api/v1/namespaces/{namespace}/pods/p"
    await kube.patched(path, HOLD)  # so that it stays to be looked at
    graces = []
    for seconds in (60, 20, 40):
        options = {"gracePeriodSeconds": seconds, "preconditions": {"uid": item["metadata"]["uid"]}}
        await kube.send("DELETE", path, options)
        graces.append((await kube.read(path))["metadata"]["deletionGracePeriodSeconds"])
    assert graces[0] == 60
    assert graces[1] <= 20
    assert graces[2] <= graces[1]
    await kube.patched(path, LET_GO)


async def test_volumes_say_on_which_node_they_are(kube: KubeHttp, namespace: str) -> None:
    """Until the attachment is deleted."""
    path = "/apis/storage.k8s.io/v1/volumeattachments"
    spec = {"attacher": "csi.example.com", "nodeName": namespace, "source": {"persistentVolumeName": "pv"}}
    await kube.made(path, {"metadata": {"name": namespace}, "spec": spec})
    there = [one["spec"]["nodeName"] for one in (await kube.read(path))["items"]]
    await kube.send("DELETE", f"{path}/{namespace}")
    left = [one["spec"]["nodeName"] for one in (await kube.read(path))["items"]]

    assert (namespace in there, namespace in left) == (True, False)


async def test_an_event_is_found_by_what_it_is_about_and_counts(kube: KubeHttp, namespace: str) -> None:
    """By kind, name, uid and reason; a name that is taken is a conflict, and then it is counted by a patch."""
    path = f"/api/v1/namespaces/{namespace}/events"
    event = {
        "metadata": {"name": "p.1"},
        "involvedObject": {"kind": "Pod", "namespace": namespace, "name": "p", "uid": "u-1"},
        "reason": "Evicted",
        "message": "m",
        "type": "Normal",
        "count": 1,
    }
    await kube.made(path, event)
    again = await kube.send("POST", path, event)
    counted = await kube.patched(f"{path}/p.1", {"count": 2, "message": "n"})
    selector = "involvedObject.kind%3DPod,involvedObject.uid%3Du-1,reason%3DEvicted"
    found = (await kube.read(f"{path}?fieldSelector={selector}"))["items"]

    assert (again.status, again.body["reason"]) == (409, "AlreadyExists")
    assert counted["count"] == 2
    assert [one["metadata"]["name"] for one in found] == ["p.1"]
    assert (await kube.read(f"{path}?fieldSelector=involvedObject.uid%3Du-2"))["items"] == []
