"""Objects over HTTP: versions, conflicts, patches, finalizers, and what is refused."""

import pytest
from tests.support.kube_http import MERGE, STRATEGIC, Json, KubeHttp
from tests.support.kube_objects import binding, job, node, pod


def pods(namespace: str, name: str = "") -> str:
    """The path of a namespace's pods, or of one."""
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")


async def test_a_new_object_gets_an_identity(kube: KubeHttp, namespace: str) -> None:
    """The server gives uid, version, generation and time; versions only grow."""
    first = await kube.made(pods(namespace), pod("a"))
    second = await kube.made(pods(namespace), pod("b"))

    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    assert int(first["metadata"]["resourceVersion"]) < int(second["metadata"]["resourceVersion"])
    assert first["metadata"]["generation"] == 1
    assert first["metadata"]["creationTimestamp"].endswith("Z")


async def test_a_generated_name_starts_with_its_prefix(kube: KubeHttp, namespace: str) -> None:
    """GenerateName is completed by the server, differently each time."""
    body = pod("x") | {"metadata": {"generateName": "worker-"}}
    names = {(await kube.made(pods(namespace), body))["metadata"]["name"] for _ in range(3)}

    assert len(names) == 3
    assert all(name.startswith("worker-") and len(name) == len("worker-") + 5 for name in names)


async def test_a_taken_name_is_a_conflict(kube: KubeHttp, namespace: str) -> None:
    """Creating twice is 409 AlreadyExists, and names the object."""
    await kube.made(pods(namespace), pod("a"))
    answer = await kube.send("POST", pods(namespace), pod("a"))

    assert (answer.status, answer.body["reason"]) == (409, "AlreadyExists")
    assert answer.body["details"] == {"name": "a", "kind": "pods"}


async def test_a_stale_version_is_a_conflict(kube: KubeHttp, namespace: str) -> None:
    """PUT and PATCH with a version that is no longer current change nothing."""
    old = await kube.made(pods(namespace), pod("a"))
    await kube.patched(pods(namespace, "a"), {"metadata": {"labels": {"step": "1"}}})
    put = await kube.send("PUT", pods(namespace, "a"), old)
    stale = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"], "labels": {"step": "2"}}}
    patch = await kube.send("PATCH", pods(namespace, "a"), stale, content_type="application/merge-patch+json")

    assert (put.status, put.body["reason"]) == (409, "Conflict")
    assert (patch.status, patch.body["reason"]) == (409, "Conflict")
    assert (await kube.read(pods(namespace, "a")))["metadata"]["labels"]["step"] == "1"


async def test_another_uid_is_another_object(kube: KubeHttp, namespace: str) -> None:
    """A PUT with a uid of another object is a conflict; in a patch the uid is a field that may not change: 422."""
    item = await kube.made(pods(namespace), pod("a", schedulingGates=[{"name": "example.invalid/hold"}]))
    name = f"uid-{namespace}"
    await kube.made("/api/v1/nodes", node(name))
    other = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000", "labels": {"step": "1"}}}
    for path in (pods(namespace, "a"), f"/api/v1/nodes/{name}"):
        for content_type in (MERGE, STRATEGIC):
            answer = await kube.send("PATCH", path, other, content_type=content_type)
            assert (answer.status, answer.body["reason"]) == (422, "Invalid"), path
            assert answer.body["details"]["causes"][0]["field"] == "metadata.uid"
    put = await kube.send("PUT", pods(namespace, "a"), item | {"metadata": item["metadata"] | other["metadata"]})
    await kube.send("DELETE", f"/api/v1/nodes/{name}")

    assert (put.status, put.body["reason"]) == (409, "Conflict")
    assert "labels" not in (await kube.read(pods(namespace, "a")))["metadata"]


async def test_a_current_version_is_taken(kube: KubeHttp, namespace: str) -> None:
    """PUT of what was just read, changed, is stored under a new version."""
    item = await kube.made(pods(namespace), pod("a", schedulingGates=[{"name": "example.invalid/hold"}]))
    item["metadata"]["annotations"] = {"note": "kept"}
    answer = await kube.send("PUT", pods(namespace, "a"), item)

    assert answer.status == 200
    assert answer.body["metadata"]["annotations"] == {"note": "kept"}
    assert int(answer.body["metadata"]["resourceVersion"]) > int(item["metadata"]["resourceVersion"])


async def test_a_change_of_nothing_keeps_the_version(kube: KubeHttp, namespace: str) -> None:
    """A patch without effect is no change: watchers hear nothing."""
    await kube.made(pods(namespace), pod("a", labels={"x": "1"}, schedulingGates=[{"name": "example.invalid/hold"}]))
    before = await kube.read(pods(namespace, "a"))
    after = await kube.patched(pods(namespace, "a"), {"metadata": {"labels": {"x": "1"}}})

    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_null_in_a_merge_patch_removes(kube: KubeHttp, namespace: str) -> None:
    """RFC 7386: null removes the key, the others stay."""
    await kube.made(pods(namespace), pod("a", labels={"x": "1", "y": "2"}))
    after = await kube.patched(pods(namespace, "a"), {"metadata": {"labels": {"x": None}}})

    assert after["metadata"]["labels"] == {"y": "2"}


async def test_a_strategic_patch_merges_conditions_by_type(kube: KubeHttp, namespace: str) -> None:
    """Two writers of two conditions do not lose each other's."""
    name = f"strategic-{namespace}"
    await kube.made("/api/v1/nodes", node(name))
    path = f"/api/v1/nodes/{name}"
    for kind in ("Own", "Other"):
        condition = {"type": kind, "status": "True", "reason": "Test", "message": ""}
        await kube.patched(f"{path}/status", {"status": {"conditions": [condition]}}, STRATEGIC)
    item = await kube.read(path)
    await kube.send("DELETE", path)

    assert {"Own", "Other"} <= {entry["type"] for entry in item["status"]["conditions"]}


async def test_taints_are_replaced_whole(kube: KubeHttp, namespace: str) -> None:
    """Node taints have no merge key: a strategic patch with one taint drops the others of its author."""
    name = f"taints-{namespace}"
    await kube.made("/api/v1/nodes", node(name))
    item: Json = {}
    for key in ("example.invalid/a", "example.invalid/b"):
        item = await kube.patched(
            f"/api/v1/nodes/{name}", {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}, STRATEGIC
        )
    await kube.send("DELETE", f"/api/v1/nodes/{name}")

    keys = {taint["key"] for taint in item["spec"]["taints"]}
    assert "example.invalid/b" in keys
    assert "example.invalid/a" not in keys


async def test_status_and_spec_are_written_separately(kube: KubeHttp, namespace: str) -> None:
    """A patch of the object leaves the status alone; a patch of /status leaves the spec alone."""
    name = f"doors-{namespace}"
    await kube.made("/api/v1/nodes", node(name, gpus=0))
    path, gpus = f"/api/v1/nodes/{name}", {"allocatable": {"nvidia.com/gpu": "8"}}
    plain = await kube.patched(path, {"spec": {"unschedulable": True}, "status": gpus})
    status = await kube.patched(f"{path}/status", {"spec": {"unschedulable": None}, "status": gpus})
    await kube.send("DELETE", path)

    assert "nvidia.com/gpu" not in plain["status"]["allocatable"]
    assert status["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert status["status"]["allocatable"]["cpu"] == "48"
    assert status["spec"]["unschedulable"] is True


async def test_generation_moves_with_the_spec_only(kube: KubeHttp, namespace: str) -> None:
    """Labels and status are no new generation; suspending a job is."""
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    await kube.made(path, job("j", suspend=True))
    labeled = await kube.patched(f"{path}/j", {"metadata": {"labels": {"x": "1"}}})
    released = await kube.patched(f"{path}/j", {"spec": {"parallelism": 0}})

    assert labeled["metadata"]["generation"] == 1
    assert released["metadata"]["generation"] == 2


async def test_a_finalizer_holds_a_deleted_object(kube: KubeHttp, namespace: str) -> None:
    """The deletion starts, is visible, and completes when the finalizer is removed."""
    name = f"held-{namespace}"
    path = f"/api/v1/nodes/{name}"
    await kube.made("/api/v1/nodes", node(name))
    await kube.patched(path, {"metadata": {"finalizers": ["example.invalid/hold"]}})
    deleted = await kube.send("DELETE", path)
    held = await kube.read(path)
    await kube.patched(path, {"metadata": {"finalizers": None}})

    assert deleted.status == 200
    assert "deletionTimestamp" in held["metadata"]
    assert (await kube.send("GET", path)).status == 404


async def test_deletion_asks_for_the_right_object(kube: KubeHttp, namespace: str) -> None:
    """A uid precondition that does not hold is 409, and nothing is deleted."""
    await kube.made(pods(namespace), pod("a"))
    options = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    answer = await kube.send("DELETE", pods(namespace, "a"), options)

    assert (answer.status, answer.body["reason"]) == (409, "Conflict")
    assert (await kube.send("GET", pods(namespace, "a"))).status == 200


async def test_a_pod_that_runs_nowhere_goes_at_once(kube: KubeHttp, namespace: str) -> None:
    """Without a node, DELETE removes it at once."""
    await kube.made(pods(namespace), pod("a", schedulingGates=[{"name": "example.invalid/hold"}]))
    answer = await kube.send("DELETE", pods(namespace, "a"))

    assert answer.status == 200
    assert (await kube.send("GET", pods(namespace, "a"))).status == 404


async def test_a_lease_is_fenced_by_its_version(kube: KubeHttp, namespace: str) -> None:
    """A PUT of a lease must carry the current version: two leaders cannot both renew."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    lease = await kube.made(path, {"metadata": {"name": "l"}, "spec": {"holderIdentity": "a"}})
    lease["spec"]["holderIdentity"] = "b"
    first = await kube.send("PUT", f"{path}/l", lease)
    second = await kube.send("PUT", f"{path}/l", lease)

    assert first.status == 200
    assert (second.status, second.body["reason"]) == (409, "Conflict")


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/api/v1/namespaces/{ns}/pods/nobody", 404, "NotFound"),
        ("/api/v1/nodes/nobody", 404, "NotFound"),
        ("/api/v1/namespaces/{ns}/pods?fieldSelector=spec.image%3Dx", 400, "BadRequest"),
        ("/api/v1/namespaces/{ns}/pods?labelSelector=a%3D%3D%3Db", 400, "BadRequest"),
    ],
)
async def test_a_bad_question_is_refused(kube: KubeHttp, namespace: str, path: str, status: int, reason: str) -> None:
    """Reads of what is not there, or cannot be asked, are refused with a Status."""
    answer = await kube.send("GET", path.format(ns=namespace))

    assert (answer.status, answer.body["kind"], answer.body["reason"]) == (status, "Status", reason)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{no json", 400, "BadRequest"),
        ({"kind": "Job", "apiVersion": "batch/v1"}, 400, "BadRequest"),
        ({"metadata": {"name": "x"}, "spec": {"containers": "no"}}, 400, "BadRequest"),
        ({"metadata": {"name": "x"}, "spec": {"containers": []}}, 422, "Invalid"),
        (pod("Not_A_Name"), 422, "Invalid"),
        (pod("x") | {"metadata": {}}, 422, "Invalid"),
        (pod("x", priorityClassName="nobody-made-this"), 403, "Forbidden"),
    ],
)
async def test_a_bad_pod_is_refused(kube: KubeHttp, namespace: str, body: object, status: int, reason: str) -> None:
    """What no server would take is refused, and nothing is stored."""
    answer = await kube.send("POST", pods(namespace), body)

    assert (answer.status, answer.body["reason"]) == (status, reason), answer.body
    assert (await kube.read(pods(namespace)))["items"] == []


async def test_nothing_is_made_in_a_namespace_that_is_not_there(kube: KubeHttp) -> None:
    """Namespaces come first: 404 names the namespace."""
    answer = await kube.send("POST", pods("nowhere-at-all"), pod("a"))

    assert (answer.status, answer.body["details"]["kind"]) == (404, "namespaces")


async def test_pod_specs_do_not_change(kube: KubeHttp, namespace: str) -> None:
    """A pod keeps the node selector that it was made with: 422."""
    await kube.made(pods(namespace), pod("a"))
    patch = {"spec": {"nodeSelector": {"x": "y"}}}
    answer = await kube.send("PATCH", pods(namespace, "a"), patch, content_type="application/merge-patch+json")

    assert (answer.status, answer.body["reason"]) == (422, "Invalid")


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"target": {"kind": "Node", "name": ""}}, 500, "target.name: Required value"),
        ({"target": None}, 500, "target.name: Required value"),
        ({"target": {"kind": "Pod", "name": "n"}}, 500, "target.kind: Unsupported value"),
        ({"metadata": {"name": "b"}}, 400, "name in URL does not match name in Binding object"),
    ],
)
async def test_a_binding_names_its_node(kube: KubeHttp, namespace: str, changes: Json, status: int, said: str) -> None:
    """Without a node it is refused, with a bare 500 as its author did not think of it; and it names the pod."""
    await kube.made(pods(namespace), pod("a", schedulerName="nobody"))
    answer = await kube.send("POST", pods(namespace, "a") + "/binding", binding("a", "n") | changes)

    assert answer.status == status
    assert answer.body["message"].startswith(said)
    assert "nodeName" not in (await kube.read(pods(namespace, "a")))["spec"]
