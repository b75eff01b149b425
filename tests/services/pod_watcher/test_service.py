"""What the pod watcher says of what it sees. Items are made of JSON as the API server sends it."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.support.kube_objects import Json, budget, job, node, pod

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobListed, JobStarted
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodBudgetListed, PodGone, PodListed, PodObserved, PodWatched
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.kube.protocol import (
    BUDGETS,
    CLAIMS,
    CLASSES,
    GROUPS,
    JOBS,
    NODES,
    PODS,
    VOLCANO_GROUPS,
    VOLUMES,
    Bookmark,
    Changed,
    Cluster,
    Deleted,
    Kind,
    Listed,
)
from gpu_autoscaler.kube.wire.core import Object
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler_services.pod_watcher.service import PodWatcher

T0 = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
JOB_LABELS = {"gpu-autoscaler.io/job-id": "train"}


@pytest.fixture
def watcher() -> PodWatcher:
    """A watcher that is handed its items; it never calls its client."""
    kube = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=lambda: T0)
    return PodWatcher(kube, Cluster(installation="uid", epoch=7))


def thing(kind: Kind[Any], item: Json, version: int, **metadata: Any) -> Object:  # noqa: ANN401 - any field of metadata
    """The object as it is decoded from the wire."""
    own = {"uid": item["metadata"]["name"], "namespace": "default", "creationTimestamp": "2026-11-21T11:00:00Z"}
    full = {**item, "metadata": {**item["metadata"], **own, "resourceVersion": str(version), **metadata}}
    return kind.decode(json.dumps(full).encode(), "read")  # type: ignore[no-any-return]


def listed(kind: Kind[Any], *objects: Object, version: int = 100, at: datetime = T0) -> Listed:
    """A whole list."""
    return Listed(kind=kind, objects=objects, version=version, seen_at=at)


def changed(kind: Kind[Any], one: Object, at: datetime = T0) -> Changed:
    """A change."""
    return Changed(kind=kind, object=one, seen_at=at)


def types(facts: Any) -> list[type[Fact]]:  # noqa: ANN401 - whatever the door returned
    """What kinds of facts these are."""
    return [type(fact) for fact in facts]


async def test_a_list_says_what_is_new_and_then_what_there_is(watcher: PodWatcher) -> None:
    """Each pod, then the list by uid; the same list again says only that it was read."""
    pods = [thing(PODS, pod("b"), 5), thing(PODS, pod("a"), 6)]
    facts = await watcher.on_item(listed(PODS, *pods))
    assert types(facts) == [PodObserved, PodObserved, PodListed]
    assert facts[-1] == PodListed(epoch=7, version=100, pod_uids=("a", "b"), listed_at=T0)  # type: ignore[arg-type]
    assert types(await watcher.on_item(listed(PODS, *pods, version=101))) == [PodListed]


async def test_a_change_that_nobody_reads_is_not_said(watcher: PodWatcher) -> None:
    """A heartbeat moves the version alone; a cordon is news."""
    await watcher.on_item(listed(NODES, thing(NODES, node("n"), 5)))
    assert await watcher.on_item(changed(NODES, thing(NODES, node("n"), 6))) == []
    cordoned = {**node("n"), "spec": {"unschedulable": True}}
    facts = await watcher.on_item(changed(NODES, thing(NODES, cordoned, 7)))
    assert types(facts) == [NodeObserved]
    assert facts[0].version == 7  # type: ignore[attr-defined]


async def test_an_item_that_is_given_again_says_the_same_again(watcher: PodWatcher) -> None:
    """The broker may be away when the facts are to be stored: nothing is forgotten over that."""
    item = changed(PODS, thing(PODS, pod("a"), 5))
    first = await watcher.on_item(item)
    assert types(first) == [PodObserved, PodWatched]
    assert await watcher.on_item(item) == first


async def test_quiet_is_not_deaf(watcher: PodWatcher) -> None:
    """A sign of life at most every ten seconds, from bookmarks and from events alike."""
    await watcher.on_item(listed(PODS))
    soon, later = T0 + timedelta(seconds=9), T0 + timedelta(seconds=10)
    assert await watcher.on_item(Bookmark(kind=PODS, version=110, seen_at=soon)) == []
    facts = await watcher.on_item(Bookmark(kind=PODS, version=111, seen_at=later))
    assert facts == [PodWatched(epoch=7, version=111, watched_at=later)]
    much_later = T0 + timedelta(seconds=30)
    assert types(await watcher.on_item(changed(PODS, thing(PODS, pod("a"), 112), much_later))) == [
        PodObserved,
        PodWatched,
    ]


async def test_budgets_are_listed_again_as_their_sign_of_life(watcher: PodWatcher) -> None:
    """They have no fact of their own for it."""
    await watcher.on_item(listed(BUDGETS, thing(BUDGETS, budget("one", "train"), 5)))
    later = T0 + timedelta(seconds=10)
    facts = await watcher.on_item(Bookmark(kind=BUDGETS, version=111, seen_at=later))
    assert facts == [PodBudgetListed(epoch=7, version=111, budget_uids=("one",), listed_at=later)]


async def test_a_deleted_pod_is_gone_at_its_last_version_and_phase(watcher: PodWatcher) -> None:
    """The end carries the version of the deletion, so that nothing older brings the pod back."""
    await watcher.on_item(listed(PODS, thing(PODS, pod("a"), 5)))
    last = {**pod("a", labels=JOB_LABELS), "status": {"phase": "Succeeded"}}
    facts = await watcher.on_item(Deleted(kind=PODS, object=thing(PODS, last, 9), seen_at=T0))
    assert [(type(one), one.version, one.phase, one.job_id) for one in facts if isinstance(one, PodGone)] == [
        (PodGone, 9, "succeeded", "train")
    ]


async def test_what_cannot_be_understood_is_left_out_but_not_gone(watcher: PodWatcher) -> None:
    """A pod with an unreadable quantity is no fact, yet the list still says that it is there."""
    broken = pod("a")
    broken["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "much"
    facts = await watcher.on_item(listed(PODS, thing(PODS, broken, 5)))
    assert facts == [PodListed(epoch=7, version=100, pod_uids=("a",), listed_at=T0)]  # type: ignore[arg-type]


def kube_job(version: int, **status: Any) -> Object:  # noqa: ANN401 - any field of a Job's status
    """A Job of the binder's with two members."""
    item = {**job("train", completions=2, parallelism=2), "status": status}
    return thing(JOBS, item, version, labels=JOB_LABELS)


async def test_a_job_starts_when_all_members_run_and_again_after_a_loss(watcher: PodWatcher) -> None:
    """Told once while they run; a member that is lost and replaced is a new start."""
    assert types(await watcher.on_item(listed(JOBS, kube_job(5, ready=1)))) == [JobListed]
    started = await watcher.on_item(changed(JOBS, kube_job(6, ready=2)))
    assert types(started) == [JobStarted]
    assert await watcher.on_item(changed(JOBS, kube_job(7, ready=2))) == []
    assert await watcher.on_item(changed(JOBS, kube_job(8, ready=1))) == []
    assert types(await watcher.on_item(changed(JOBS, kube_job(9, ready=2)))) == [JobStarted]
    assert await watcher.on_item(changed(JOBS, kube_job(10, ready=1, succeeded=1))) == []


async def test_a_list_of_jobs_says_what_it_shows_and_then_which_there_are(watcher: PodWatcher) -> None:
    """An end that nobody saw first, so that no reader of the list takes the job for one that goes on."""
    ends = [{"type": "Complete", "status": "True"}]
    facts = await watcher.on_item(listed(JOBS, kube_job(5, conditions=ends), thing(JOBS, job("other"), 6)))
    assert types(facts) == [JobFinished, JobListed]
    assert facts[1] == JobListed(epoch=7, version=100, job_ids=(JobId("train"),), listed_at=T0)


@pytest.mark.parametrize(("condition", "outcome"), [("Complete", "completed"), ("Failed", "failed")])
async def test_a_job_ends_as_its_condition_says(watcher: PodWatcher, condition: str, outcome: str) -> None:
    """Also where the end is seen in the deletion alone."""
    ends = [{"type": condition, "status": "True", "reason": "Why", "message": "because"}]
    for item in (
        changed(JOBS, kube_job(5, conditions=ends)),
        Deleted(kind=JOBS, object=kube_job(6, conditions=ends), seen_at=T0),
    ):
        (end,) = await watcher.on_item(item)
        assert isinstance(end, JobFinished)
        assert end.outcome == outcome


async def test_a_job_that_somebody_deletes_is_cancelled(watcher: PodWatcher) -> None:
    """No accepted job is without an end; Jobs of others are none of ours."""
    (end,) = await watcher.on_item(Deleted(kind=JOBS, object=kube_job(6, ready=2), seen_at=T0))
    assert isinstance(end, JobFinished)
    assert end.outcome == "cancelled"
    assert "default/train" in end.message
    assert await watcher.on_item(changed(JOBS, thing(JOBS, job("other"), 7))) == []


# ---- volumes and groups

CLAIMED: dict[str, Any] = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
BOUND = {"metadata": {"name": "data"}, "spec": {"volumeName": "v1"}, "status": {"phase": "Bound"}}
IN_ZONE = {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}]}
VOLUME = {"metadata": {"name": "v1"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [IN_ZONE]}}}}


async def observed_pods(watcher: PodWatcher, item: Any) -> list[PodObserved]:  # noqa: ANN401 - an item of a watch
    """The pods that an item says something of."""
    return [fact for fact in await watcher.on_item(item) if isinstance(fact, PodObserved)]


async def test_a_pod_with_a_claim_is_told_once_its_volume_is_known(watcher: PodWatcher) -> None:
    """Not before: a node might be bought where its volume is not. Then with the zone, at a version of its own."""
    claimed = thing(PODS, pod("a", **CLAIMED), 5)
    assert await observed_pods(watcher, listed(PODS, claimed, thing(PODS, pod("b"), 6))) != []
    assert await observed_pods(watcher, listed(CLAIMS, thing(CLAIMS, BOUND, 50))) == []
    assert await observed_pods(watcher, listed(VOLUMES, thing(VOLUMES, VOLUME, 60, namespace=""))) == []
    (told,) = await observed_pods(watcher, listed(CLASSES))
    assert (told.name, told.version, told.volume_trouble) == ("a", 100, "")
    assert [one.requirements[0].values for one in told.demands.node_affinity] == [("a",)]
    assert await observed_pods(watcher, listed(CLASSES, version=101)) == []


async def test_a_claim_that_goes_is_news_of_its_pod_and_the_pods_end_comes_after_it(watcher: PodWatcher) -> None:
    """Whatever order the watches have: nothing may be said of a pod under a later version than its end."""
    for item in (listed(CLAIMS, thing(CLAIMS, BOUND, 50)), listed(VOLUMES), listed(CLASSES)):
        await watcher.on_item(item)
    last = thing(PODS, pod("a", **CLAIMED), 5)
    await watcher.on_item(listed(PODS, last))
    (told,) = await observed_pods(watcher, Deleted(kind=CLAIMS, object=thing(CLAIMS, BOUND, 120), seen_at=T0))
    assert (told.version, told.volume_trouble) == (120, "claim default/data does not exist")
    (gone, *_) = await watcher.on_item(Deleted(kind=PODS, object=last, seen_at=T0))
    assert isinstance(gone, PodGone)
    assert gone.version == 120


async def test_a_group_says_how_many_of_its_pods_start_together(watcher: PodWatcher) -> None:
    """By whichever kind of group, where one is installed; a pod is told again when its group changes."""
    member = thing(PODS, pod("a", labels={"scheduling.x-k8s.io/pod-group": "train"}), 5)
    (told,) = await observed_pods(watcher, listed(PODS, member))
    assert told.group_count_min is None
    for kind, minimum in ((GROUPS, 3), (VOLCANO_GROUPS, 4)):
        group = {"metadata": {"name": "train"}, "spec": {"minMember": minimum}}
        (told,) = await observed_pods(watcher, changed(kind, thing(kind, group, 100 * minimum)))
        assert told.group_count_min == minimum
        gone = Deleted(kind=kind, object=thing(kind, group, 100 * minimum + 1), seen_at=T0)
        (told,) = await observed_pods(watcher, gone)
        assert told.group_count_min is None
