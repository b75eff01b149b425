"""Jobs over HTTP: held, moved, released, counted, deleted."""

from tests.contract.kube.conftest import Nodes
from tests.support.kube_http import Json, KubeHttp
from tests.support.kube_objects import job

SOMEWHERE = {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": "somewhere"}}}}


def jobs(namespace: str, name: str = "") -> str:
    """The path of a namespace's jobs, or of one."""
    return f"/apis/batch/v1/namespaces/{namespace}/jobs" + (f"/{name}" if name else "")


def pods_of(namespace: str, name: str) -> str:
    """The path that lists a job's pods."""
    return f"/api/v1/namespaces/{namespace}/pods?labelSelector=batch.kubernetes.io%2Fjob-name%3D{name}"


def conditions(item: Json) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    entries = item.get("status", {}).get("conditions") or ()
    return {entry["type"]: (entry["status"], entry["reason"]) for entry in entries}


async def test_a_suspended_job_makes_no_pods(kube: KubeHttp, namespace: str) -> None:
    """The job reports it and waits."""
    await kube.made(jobs(namespace), job("j", suspend=True))
    item = await kube.until(jobs(namespace, "j"), conditions)

    assert conditions(item)["Suspended"] == ("True", "JobSuspended")
    assert "startTime" not in item["status"]
    assert (await kube.read(pods_of(namespace, "j")))["items"] == []


async def test_a_held_job_can_be_sent_somewhere(kube: KubeHttp, namespace: str) -> None:
    """While it never ran, node selector and node affinity may be set; its pods get them on release."""
    await kube.made(jobs(namespace), job("j", suspend=True, completions=2, parallelism=2))
    await kube.until(jobs(namespace, "j"), conditions)
    moved = await kube.patched(jobs(namespace, "j"), {"spec": SOMEWHERE})
    await kube.patched(jobs(namespace, "j"), {"spec": {"suspend": False}})
    answer = await kube.until(pods_of(namespace, "j"), lambda answer: len(answer.get("items", ())) == 2)

    assert moved["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "somewhere"}
    for index, item in enumerate(answer["items"]):
        metadata = item["metadata"]
        assert metadata["name"].startswith(f"j-{index}-")
        assert metadata["annotations"]["batch.kubernetes.io/job-completion-index"] == str(index)
        assert metadata["labels"]["batch.kubernetes.io/job-completion-index"] == str(index)
        assert metadata["ownerReferences"][0]["kind"] == "Job"
        assert item["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "somewhere"}


async def test_a_released_job_stays_where_it_was_sent(kube: KubeHttp, namespace: str) -> None:
    """Once it has started its template is immutable: 422."""
    await kube.made(jobs(namespace), job("j"))
    await kube.until(jobs(namespace, "j"), lambda item: item.get("status", {}).get("startTime"))
    content_type = "application/merge-patch+json"
    answer = await kube.send("PATCH", jobs(namespace, "j"), {"spec": SOMEWHERE}, content_type=content_type)

    assert (answer.status, answer.body["reason"]) == (422, "Invalid")
    assert answer.body["details"]["causes"][0]["field"] == "spec.template"
    assert answer.body["details"]["causes"][0]["message"].endswith("field is immutable")


async def test_suspending_takes_the_pods_away(kube: KubeHttp, namespace: str) -> None:
    """A job that is held again loses its pods, and none of them counts as failed."""
    far = {"nodeSelector": {"kubernetes.io/hostname": "no-such-node"}}
    await kube.made(jobs(namespace), job("j", template=far))
    await kube.until(pods_of(namespace, "j"), lambda answer: answer.get("items"))
    await kube.patched(jobs(namespace, "j"), {"spec": {"suspend": True}})
    await kube.until(pods_of(namespace, "j"), lambda answer: not answer.get("items"))
    item = await kube.until(jobs(namespace, "j"), lambda item: conditions(item).get("Suspended", ("",))[0] == "True")

    assert item["status"].get("active", 0) == 0
    assert item["status"].get("failed", 0) == 0


async def test_a_job_that_is_held_again_can_be_sent_elsewhere(kube: KubeHttp, namespace: str) -> None:
    """Once its pods are gone its status knows no start, and node affinity may be set as if it never ran."""
    far = {"nodeSelector": {"kubernetes.io/hostname": "no-such-node"}}
    await kube.made(jobs(namespace), job("j", template=far))
    await kube.until(pods_of(namespace, "j"), lambda answer: answer.get("items"))
    await kube.patched(jobs(namespace, "j"), {"spec": {"suspend": True}})
    await kube.until(
        jobs(namespace, "j"),
        lambda item: (
            conditions(item).get("Suspended", ("",))[0] == "True"
            and not item["status"].get("active")
            and not item["status"].get("terminating")
        ),
    )
    await kube.patched(jobs(namespace, "j"), {"spec": SOMEWHERE | {"suspend": False}})
    answer = await kube.until(pods_of(namespace, "j"), lambda answer: answer.get("items"))

    assert answer["items"][0]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "somewhere"}


async def test_a_finished_job_has_a_condition(kube: KubeHttp, namespace: str, nodes: Nodes) -> None:
    """All indexes succeed: Complete, with times and counts."""
    place = {"nodeSelector": {"kubernetes.io/hostname": await nodes.ready()}}
    await kube.made(jobs(namespace), job("j", run_seconds=0.5, template=place, completions=3, parallelism=2))
    item = await kube.until(jobs(namespace, "j"), lambda item: "Complete" in conditions(item))

    assert conditions(item)["Complete"] == ("True", "CompletionsReached")
    assert item["status"]["succeeded"] == 3
    assert item["status"]["completedIndexes"] == "0-2"
    assert item["status"]["completionTime"] >= item["status"]["startTime"]
    assert "active" not in item["status"]


async def test_deleting_a_job_in_the_background_takes_its_pods(kube: KubeHttp, namespace: str) -> None:
    """propagationPolicy=Background: the job is gone at once, its pods soon."""
    far = {"nodeSelector": {"kubernetes.io/hostname": "no-such-node"}}
    await kube.made(jobs(namespace), job("j", template=far))
    await kube.until(pods_of(namespace, "j"), lambda answer: answer.get("items"))
    answer = await kube.send("DELETE", jobs(namespace, "j") + "?propagationPolicy=Background")
    await kube.until(pods_of(namespace, "j"), lambda answer: not answer.get("items"))

    assert answer.status == 200
    assert (await kube.send("GET", jobs(namespace, "j"))).status == 404


def is_ownerless(pods: list[Json]) -> bool:
    """Whether it is one pod, and nobody's."""
    (pod,) = pods
    return "ownerReferences" not in pod["metadata"]


async def test_deleting_a_job_without_a_policy_leaves_its_pods(kube: KubeHttp, namespace: str) -> None:
    """The API's old default for jobs: the pods lose their owner and stay, with a warning."""
    far = {"nodeSelector": {"kubernetes.io/hostname": "no-such-node"}}
    await kube.made(jobs(namespace), job("j", template=far))
    await kube.until(jobs(namespace, "j"), lambda item: item.get("status", {}).get("active") == 1)
    answer = await kube.send("DELETE", jobs(namespace, "j"))
    await kube.until(jobs(namespace, "j"), lambda item: not item)
    assert "child pods are preserved" in answer.headers["warning"]
    # The garbage collector takes the owner away in its own time.
    await kube.until(pods_of(namespace, "j"), lambda left: is_ownerless(left["items"]))


async def test_a_job_that_could_never_run_is_refused(kube: KubeHttp, namespace: str) -> None:
    """Pods of a job may not restart for ever, and an indexed job says how many."""
    always = await kube.send("POST", jobs(namespace), job("j", template={"restartPolicy": "Always"}))
    endless = await kube.send("POST", jobs(namespace), job("j", completions=None))

    assert (always.status, always.body["reason"]) == (422, "Invalid")
    assert (endless.status, endless.body["details"]["causes"][0]["field"]) == (422, "spec.completions")
