"""The facts that the pod watcher publishes. Items are built from JSON as the API server sends it."""

from datetime import timedelta
from typing import Any

import pytest
from tests.support.kube_objects import budget, job, node, pod
from tests.support.watch_items import T0, changed, decoded, listed, new_watcher, thing

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobListed, JobStarted
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodBudgetListed, PodGone, PodListed, PodObserved, PodWatched
from gpu_autoscaler.kube.protocol import (
    BUDGETS,
    CLAIMS,
    CLASSES,
    GROUPS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    VOLCANO_GROUPS,
    VOLUMES,
    Bookmark,
    Deleted,
)
from gpu_autoscaler.kube.wire.core import Object
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.labels import END_IDLE_WORKLOADS
from gpu_autoscaler_services.pod_watcher.service import OPTED_IN_COUNT_MAX, PodWatcher

JOB_LABELS = {"gpu-autoscaler.io/job-id": "train"}


@pytest.fixture
def watcher() -> PodWatcher:
    """A watcher that gets its items from the test."""
    return new_watcher()


def types(facts: Any) -> list[type[Fact]]:  # noqa: ANN401 - whatever the door returned
    """Return the types of the facts."""
    return [type(fact) for fact in facts]


async def test_list_publishes_new_objects_then_the_list(watcher: PodWatcher) -> None:
    """Each pod, then the list by uid; the same list again publishes only the list."""
    pods = [decoded(PODS, pod("b"), 5), decoded(PODS, pod("a"), 6)]
    facts = await watcher.on_item(listed(PODS, *pods))
    assert types(facts) == [PodObserved, PodObserved, PodListed]
    assert facts[-1] == PodListed(epoch=7, version=100, pod_uids=("a", "b"), listed_at=T0)  # type: ignore[arg-type]
    assert types(await watcher.on_item(listed(PODS, *pods, version=101))) == [PodListed]


async def test_living_objects_and_the_last_lists_are_kept_to_publish_again(watcher: PodWatcher) -> None:
    """As they were published: a reader takes the repeat for what it has."""
    facts = await watcher.on_item(listed(PODS, decoded(PODS, pod("a"), 5), decoded(PODS, pod("b"), 6)))
    await watcher.on_item(changed(PODS, decoded(PODS, pod("a"), 7)))
    assert list(watcher.living()) == list(facts)
    await watcher.on_item(Deleted(kind=PODS, object=decoded(PODS, pod("b"), 9), seen_at=T0))
    assert types(watcher.living()) == [PodObserved, PodListed]


async def test_irrelevant_change_is_not_published(watcher: PodWatcher) -> None:
    """A heartbeat changes only the version; a cordon is published."""
    await watcher.on_item(listed(NODES, decoded(NODES, node("n"), 5)))
    assert await watcher.on_item(changed(NODES, decoded(NODES, node("n"), 6))) == []
    cordoned = {**node("n"), "spec": {"unschedulable": True}}
    facts = await watcher.on_item(changed(NODES, decoded(NODES, cordoned, 7)))
    assert types(facts) == [NodeObserved]
    assert facts[0].version == 7  # type: ignore[attr-defined]


async def test_repeated_item_returns_the_same_facts(watcher: PodWatcher) -> None:
    """The broker may be unreachable when the facts are stored."""
    item = changed(PODS, decoded(PODS, pod("a"), 5))
    first = await watcher.on_item(item)
    assert types(first) == [PodObserved, PodWatched]
    assert await watcher.on_item(item) == first


async def test_quiet_watch_publishes_heartbeats(watcher: PodWatcher) -> None:
    """At most every ten seconds, from bookmarks and from events."""
    await watcher.on_item(listed(PODS))
    soon, later = T0 + timedelta(seconds=9), T0 + timedelta(seconds=10)
    assert await watcher.on_item(Bookmark(kind=PODS, version=110, seen_at=soon)) == []
    facts = await watcher.on_item(Bookmark(kind=PODS, version=111, seen_at=later))
    assert facts == [PodWatched(epoch=7, version=111, watched_at=later)]
    much_later = T0 + timedelta(seconds=30)
    assert types(await watcher.on_item(changed(PODS, decoded(PODS, pod("a"), 112), much_later))) == [
        PodObserved,
        PodWatched,
    ]


def namespace(name: str, version: int, value: str = "true") -> Object:
    """A namespace with the label that ends idle workloads."""
    return thing(NAMESPACES, name, version, metadata={"labels": {END_IDLE_WORKLOADS: value}})


async def opted_in(watcher: PodWatcher, version: int) -> tuple[str, ...] | None:
    """Return which namespaces the next event of a pod publishes as opted in."""
    *_, fact = await watcher.on_item(changed(PODS, decoded(PODS, pod("a"), version)))
    assert isinstance(fact, PodWatched)
    return fact.opted_in_namespaces


async def test_namespaces_that_opt_in_are_published_with_the_next_pod(watcher: PodWatcher) -> None:
    """With every list and heartbeat of the pods; unknown until they are listed. Only the value true opts in."""
    (first,) = await watcher.on_item(listed(PODS))
    assert isinstance(first, PodListed)
    assert first.opted_in_namespaces is None
    assert await watcher.on_item(listed(NAMESPACES, namespace("b", 3), namespace("off", 4, "false"))) == []
    assert await opted_in(watcher, 110) == ("b",)
    await watcher.on_item(changed(NAMESPACES, namespace("a", 120)))
    assert await opted_in(watcher, 121) == ("a", "b")
    await watcher.on_item(changed(NAMESPACES, namespace("a", 130, "false")))
    assert await opted_in(watcher, 131) == ("b",)
    await watcher.on_item(Deleted(kind=NAMESPACES, object=namespace("b", 140), seen_at=T0))
    (fact,) = await watcher.on_item(listed(PODS, version=150))
    assert isinstance(fact, PodListed)
    assert fact.opted_in_namespaces == ()


async def test_so_many_namespaces_may_opt_in(watcher: PodWatcher) -> None:
    """The first by name; one that leaves makes place for the next."""
    await watcher.on_item(listed(PODS))
    names = [f"n{number:04}" for number in range(OPTED_IN_COUNT_MAX + 1)]
    await watcher.on_item(listed(NAMESPACES, *(namespace(name, 1) for name in names)))
    assert await opted_in(watcher, 110) == tuple(names[:-1])
    await watcher.on_item(Deleted(kind=NAMESPACES, object=namespace(names[0], 140), seen_at=T0))
    assert await opted_in(watcher, 141) == tuple(names[1:])


def test_only_labeled_namespaces_are_watched() -> None:
    """One more watch, where the setting of the composition asks for it."""
    kinds = (len(new_watcher().sources()), len(new_watcher(are_namespaces_watched=True).sources()))
    assert kinds[1] == kinds[0] + 1


async def test_budget_list_is_repeated_as_heartbeat(watcher: PodWatcher) -> None:
    """PodDisruptionBudgets have no heartbeat fact. No decision depends on the age of the list, so it is a rare one."""
    await watcher.on_item(listed(BUDGETS, decoded(BUDGETS, budget("one", "train"), 5)))
    assert await watcher.on_item(Bookmark(kind=BUDGETS, version=110, seen_at=T0 + timedelta(seconds=299))) == []
    later = T0 + timedelta(seconds=300)
    facts = await watcher.on_item(Bookmark(kind=BUDGETS, version=111, seen_at=later))
    assert facts == [PodBudgetListed(epoch=7, version=111, budget_uids=("one",), listed_at=later)]


async def test_deleted_pod_has_version_and_phase_of_deletion(watcher: PodWatcher) -> None:
    """So that no older fact brings the pod back."""
    await watcher.on_item(listed(PODS, decoded(PODS, pod("a"), 5)))
    last = {**pod("a", labels=JOB_LABELS), "status": {"phase": "Succeeded"}}
    facts = await watcher.on_item(Deleted(kind=PODS, object=decoded(PODS, last, 9), seen_at=T0))
    assert [(type(fact), fact.version, fact.phase, fact.job_id) for fact in facts if isinstance(fact, PodGone)] == [
        (PodGone, 9, "succeeded", "train")
    ]


async def test_undecodable_object_is_ignored_but_listed(watcher: PodWatcher) -> None:
    """A pod with an invalid quantity is no fact, but the list has it."""
    broken = pod("a")
    broken["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "much"
    facts = await watcher.on_item(listed(PODS, decoded(PODS, broken, 5)))
    assert facts == [PodListed(epoch=7, version=100, pod_uids=("a",), listed_at=T0)]  # type: ignore[arg-type]


def kube_job(version: int, **status: Any) -> Object:  # noqa: ANN401 - any field of a Job's status
    """Return a Job of the binder with two members."""
    item = {**job("train", completions=2, parallelism=2), "status": status}
    return decoded(JOBS, item, version, labels=JOB_LABELS)


async def test_job_starts_when_all_members_run(watcher: PodWatcher) -> None:
    """Published once while they run; a replaced member is a new start."""
    assert types(await watcher.on_item(listed(JOBS, kube_job(5, ready=1)))) == [JobListed]
    started = await watcher.on_item(changed(JOBS, kube_job(6, ready=2)))
    assert types(started) == [JobStarted]
    assert await watcher.on_item(changed(JOBS, kube_job(7, ready=2))) == []
    assert await watcher.on_item(changed(JOBS, kube_job(8, ready=1))) == []
    assert types(await watcher.on_item(changed(JOBS, kube_job(9, ready=2)))) == [JobStarted]
    assert await watcher.on_item(changed(JOBS, kube_job(10, ready=1, succeeded=1))) == []


async def test_a_job_that_runs_at_the_first_list_was_found_running(watcher: PodWatcher) -> None:
    """A restarted watcher does not know since when; of a later list it knows what ran before."""
    found, _ = await watcher.on_item(listed(JOBS, kube_job(5, ready=2)))
    assert isinstance(found, JobStarted)
    assert found.is_found_running
    assert types(await watcher.on_item(listed(JOBS, kube_job(6, ready=1)))) == [JobListed]
    started, _ = await watcher.on_item(listed(JOBS, kube_job(7, ready=2)))
    assert isinstance(started, JobStarted)
    assert not started.is_found_running


async def test_job_list_publishes_ends_before_the_list(watcher: PodWatcher) -> None:
    """So that no reader takes a finished job for a running one."""
    ends = [{"type": "Complete", "status": "True"}]
    facts = await watcher.on_item(listed(JOBS, kube_job(5, conditions=ends), decoded(JOBS, job("other"), 6)))
    assert types(facts) == [JobFinished, JobListed]
    assert facts[1] == JobListed(epoch=7, version=100, job_ids=(JobId("train"),), listed_at=T0)


@pytest.mark.parametrize(("condition", "outcome"), [("Complete", "completed"), ("Failed", "failed")])
async def test_job_end_follows_its_condition(watcher: PodWatcher, condition: str, outcome: str) -> None:
    """Also if only the deletion shows the end."""
    ends = [{"type": condition, "status": "True", "reason": "Why", "message": "because"}]
    for item in (
        changed(JOBS, kube_job(5, conditions=ends)),
        Deleted(kind=JOBS, object=kube_job(6, conditions=ends), seen_at=T0),
    ):
        (end,) = await watcher.on_item(item)
        assert isinstance(end, JobFinished)
        assert end.outcome == outcome


async def test_deleted_job_is_cancelled(watcher: PodWatcher) -> None:
    """Every accepted job ends; foreign Jobs are ignored."""
    (end,) = await watcher.on_item(Deleted(kind=JOBS, object=kube_job(6, ready=2), seen_at=T0))
    assert isinstance(end, JobFinished)
    assert end.outcome == "cancelled"
    assert "default/train" in end.message
    assert await watcher.on_item(changed(JOBS, decoded(JOBS, job("other"), 7))) == []


# ---- volumes and groups

CLAIMED: dict[str, Any] = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
BOUND = {"metadata": {"name": "data"}, "spec": {"volumeName": "v1"}, "status": {"phase": "Bound"}}
IN_ZONE = {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}]}
VOLUME = {"metadata": {"name": "v1"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [IN_ZONE]}}}}


async def observed_pods(watcher: PodWatcher, item: Any) -> list[PodObserved]:  # noqa: ANN401 - an item of a watch
    """Return the pods for which the item publishes a fact."""
    return [fact for fact in await watcher.on_item(item) if isinstance(fact, PodObserved)]


async def test_pod_with_claim_is_published_once_volumes_are_listed(watcher: PodWatcher) -> None:
    """Before, a node might be bought in another zone. Then with the zone, at the volumes' version."""
    claimed = decoded(PODS, pod("a", **CLAIMED), 5)
    assert await observed_pods(watcher, listed(PODS, claimed, decoded(PODS, pod("b"), 6))) != []
    assert await observed_pods(watcher, listed(CLAIMS, decoded(CLAIMS, BOUND, 50))) == []
    assert await observed_pods(watcher, listed(VOLUMES, decoded(VOLUMES, VOLUME, 60, namespace=""))) == []
    (observed,) = await observed_pods(watcher, listed(CLASSES))
    assert (observed.name, observed.version, observed.volume_trouble) == ("a", 100, "")
    assert [term.requirements[0].values for term in observed.demands.node_affinity] == [("a",)]
    assert await observed_pods(watcher, listed(CLASSES, version=101)) == []


async def test_deleted_claim_changes_its_pod(watcher: PodWatcher) -> None:
    """In any order of the watches, the pod's end has the latest version."""
    for item in (listed(CLAIMS, decoded(CLAIMS, BOUND, 50)), listed(VOLUMES), listed(CLASSES)):
        await watcher.on_item(item)
    last = decoded(PODS, pod("a", **CLAIMED), 5)
    await watcher.on_item(listed(PODS, last))
    (observed,) = await observed_pods(watcher, Deleted(kind=CLAIMS, object=decoded(CLAIMS, BOUND, 120), seen_at=T0))
    assert (observed.version, observed.volume_trouble) == (120, "claim default/data does not exist")
    (gone, *_) = await watcher.on_item(Deleted(kind=PODS, object=last, seen_at=T0))
    assert isinstance(gone, PodGone)
    assert gone.version == 120


async def test_group_gives_minimum_of_its_pods(watcher: PodWatcher) -> None:
    """Of each kind of group that is installed; a pod is published again when its group changes."""
    member = decoded(PODS, pod("a", labels={"scheduling.x-k8s.io/pod-group": "train"}), 5)
    (observed,) = await observed_pods(watcher, listed(PODS, member))
    assert observed.group_count_min is None
    for kind, minimum in ((GROUPS, 3), (VOLCANO_GROUPS, 4)):
        group = {"metadata": {"name": "train"}, "spec": {"minMember": minimum}}
        (observed,) = await observed_pods(watcher, changed(kind, decoded(kind, group, 100 * minimum)))
        assert observed.group_count_min == minimum
        gone = Deleted(kind=kind, object=decoded(kind, group, 100 * minimum + 1), seen_at=T0)
        (observed,) = await observed_pods(watcher, gone)
        assert observed.group_count_min is None
