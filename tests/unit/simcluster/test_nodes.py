"""Unreachable nodes, eviction, pod termination, disruption budgets and garbage collection."""

import pytest
from tests.support.kube_objects import PREFIX, budget, job, pod
from tests.unit.simcluster.conftest import Cluster

from gpu_autoscaler.model import labels
from gpu_autoscaler.simcluster.api import DeleteOptions
from gpu_autoscaler.simcluster.kinds import BUDGETS, EVENTS, JOBS, NAMESPACES, NODES, PODS
from gpu_autoscaler.simcluster.objects import condition, is_terminating, is_true


def taints(cluster: Cluster, name: str) -> set[tuple[str, str]]:
    """The node's taints as (key, effect)."""
    found = cluster.api.record(NODES, name).object["spec"].get("taints") or ()
    return {(taint["key"], taint["effect"]) for taint in found}


def test_a_node_without_heartbeats_is_unreachable_after_40_s(cluster: Cluster) -> None:
    """Not earlier: then Ready is Unknown, it is tainted, and it gets no pods."""
    cluster.node("n")
    cluster.settle(60)
    cluster.heartbeats.clear()
    cluster.settle(38)
    early = is_true(cluster.api.record(NODES, "n").object, "Ready")
    cluster.settle(10)
    cluster.make(PODS, pod("p"))
    cluster.settle()

    ready = condition(cluster.api.record(NODES, "n").object, "Ready")
    assert early
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("Unknown", "NodeStatusUnknown")
    unreachable = "node.kubernetes.io/unreachable"
    assert taints(cluster, "n") == {(unreachable, "NoSchedule"), (unreachable, "NoExecute")}
    assert cluster.where() == {"p": None}


def test_a_node_with_heartbeats_again_is_ready(cluster: Cluster) -> None:
    """Its taints are removed with the next ready status."""
    cluster.node("n")
    cluster.heartbeats.clear()
    cluster.settle(60)
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    cluster.api.patch(NODES, "n", ready, "application/merge-patch+json", status=True)
    cluster.heartbeats.add("n")
    cluster.settle(10)

    assert taints(cluster, "n") == set()


def test_pods_of_a_dead_node_are_deleted_after_their_toleration(cluster: Cluster) -> None:
    """After 300 s; they stay terminating, as no kubelet stops them."""
    cluster.node("n")
    cluster.make(PODS, pod("p"))
    cluster.settle(5)
    cluster.world.kubelets.power_off("n")
    cluster.heartbeats.clear()
    cluster.settle(320, step_seconds=5)
    early = is_terminating(cluster.pod("p"))
    cluster.settle(60, step_seconds=5)

    assert not early
    assert is_terminating(cluster.pod("p"))
    mark = condition(cluster.pod("p"), "DisruptionTarget")
    assert mark is not None
    assert mark["reason"] == "DeletionByTaintManager"


def test_pods_of_a_deleted_node_are_collected(cluster: Cluster) -> None:
    """After the quarantine."""
    cluster.node("n")
    cluster.make(PODS, pod("p"))
    cluster.settle(5)
    cluster.heartbeats.clear()
    cluster.api.delete(NODES, "n")
    cluster.settle(35)
    early = dict(cluster.phases())
    cluster.settle(10)

    assert early == {"p": "Running"}
    assert cluster.phases() == {}


@pytest.mark.parametrize(
    ("stop_seconds", "grace", "gone_after"), [(None, 30, 1), (20, 30, 20), (60, 30, 30), (0, 30, 0)]
)
def test_a_pod_stops_within_its_grace_period(
    cluster: Cluster, stop_seconds: float | None, grace: int, gone_after: int
) -> None:
    """It takes its configured time, at most its grace period."""
    annotations = {} if stop_seconds is None else {f"{PREFIX}stop-seconds": str(stop_seconds)}
    cluster.node("n")
    cluster.make(PODS, pod("p", annotations=annotations, terminationGracePeriodSeconds=grace))
    cluster.settle(5)
    cluster.api.delete(PODS, "default/p")
    if gone_after:
        cluster.settle(gone_after - 0.5)
        assert cluster.phases() == {"p": "Running"}
    cluster.settle(0.5)

    assert cluster.phases() == {}


def test_a_pod_succeeds_when_its_work_is_done(cluster: Cluster) -> None:
    """After run-seconds of cluster time; its resources are free again."""
    cluster.node("n")
    cluster.make(PODS, pod("p", gpus=8, annotations={f"{PREFIX}run-seconds": "100"}))
    cluster.settle(90)
    early = dict(cluster.phases())
    cluster.settle(15)
    cluster.make(PODS, pod("q", gpus=8))
    cluster.settle()

    assert early == {"p": "Running"}
    assert cluster.phases()["p"] == "Succeeded"
    assert cluster.where()["q"] == "n"


def test_work_that_saves_on_request_resumes_from_its_save(cluster: Cluster) -> None:
    """The save is annotated when it ends; the Job's next pod repeats only what came after the request."""
    cluster.node("n")
    body = job("j", run_seconds=100)
    saves = {labels.CHECKPOINTED_AT: "", f"{PREFIX}save-seconds": "5"}
    body["spec"]["template"]["metadata"]["annotations"].update(saves)
    cluster.make(JOBS, body)
    cluster.settle(60)
    (name,) = cluster.phases()
    asked = {"metadata": {"annotations": {labels.CHECKPOINT_REQUESTED: "2026-11-21T13:00:00Z"}}}
    cluster.api.patch(PODS, f"default/{name}", asked, "application/merge-patch+json")
    cluster.settle(4)
    early = cluster.pod(name)["metadata"]["annotations"][labels.CHECKPOINTED_AT]
    cluster.settle(2)
    saved = cluster.pod(name)["metadata"]["annotations"][labels.CHECKPOINTED_AT]
    cluster.api.delete(PODS, f"default/{name}")
    cluster.settle(30)
    before = [phase for other, phase in cluster.phases().items() if other != name]
    cluster.settle(30)

    assert early == "" != saved
    assert before == ["Running"]
    assert "Succeeded" in cluster.phases().values()


def test_a_pod_on_a_machine_without_power_stays_pending(cluster: Cluster) -> None:
    """It starts once the power is back."""
    cluster.node("n")
    cluster.world.kubelets.power_off("n")
    cluster.make(PODS, pod("p"))
    cluster.settle(5)
    before = dict(cluster.phases())
    cluster.world.kubelets.power_on("n")
    cluster.settle(5)

    assert before == {"p": "Pending"}
    assert cluster.phases() == {"p": "Running"}


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({"minAvailable": 3}, 1),
        ({"minAvailable": "50%"}, 2),
        ({"minAvailable": "51%"}, 1),
        ({"maxUnavailable": 1}, 1),
        ({"maxUnavailable": "50%"}, 2),
        ({"minAvailable": 9}, 0),
    ],
)
def test_a_budget_counts_allowed_disruptions(cluster: Cluster, spec: dict[str, object], allowed: int) -> None:
    """Of four healthy pods; percentages round up."""
    cluster.node("n")
    cluster.make(PODS, *(pod(f"p{index}", labels={"app": "a"}) for index in range(4)), pod("other"))
    cluster.make(BUDGETS, budget("b", "a", **spec))
    cluster.settle(5)

    status = cluster.api.record(BUDGETS, "default/b").object["status"]
    assert (status["expectedPods"], status["currentHealthy"]) == (4, 4)
    assert status["disruptionsAllowed"] == allowed


def test_a_deleted_namespace_deletes_its_objects(cluster: Cluster) -> None:
    """It ends after its last object and accepts no new ones meanwhile."""
    cluster.node("n")
    cluster.api.create(NAMESPACES, None, {"metadata": {"name": "team"}})
    cluster.api.create(PODS, "team", pod("p"))
    cluster.settle(5)
    cluster.api.delete(NAMESPACES, "team")
    cluster.settle()
    during = cluster.api.record(NAMESPACES, "team").object["status"]["phase"]
    cluster.settle(5)

    assert during == "Terminating"
    assert cluster.api.find(NAMESPACES, "team") is None
    assert cluster.api.objects(PODS, "team") == []


def test_old_events_are_deleted(cluster: Cluster) -> None:
    """One hour after they were last observed."""
    cluster.make(PODS, pod("p", gpus=8))
    cluster.settle(10)
    fresh = len(cluster.api.objects(EVENTS, "default"))
    cluster.api.delete(PODS, "default/p", DeleteOptions(grace_seconds=0))
    cluster.settle(3700, step_seconds=30)

    assert fresh == 1
    assert cluster.api.objects(EVENTS, "default") == []
