"""The Job controller: replacement of evicted pods, failure limits, completion and deletion."""

from tests.support.kube_objects import PREFIX, Json, eviction, job
from tests.unit.simcluster.conftest import Cluster

from gpu_autoscaler.simcluster.api import DeleteOptions
from gpu_autoscaler.simcluster.controllers.jobs import indexes_text
from gpu_autoscaler.simcluster.kinds import JOBS, NODES, PODS
from gpu_autoscaler.simcluster.objects import condition, is_true, key_of
from gpu_autoscaler.simcluster.subresources import evict

DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
IGNORE_DISRUPTION = {"rules": [{"action": "Ignore", "onPodConditions": DISRUPTED}]}


def failing(name: str, exit_code: int, **spec: object) -> Json:
    """A job whose pods end after one second with this exit code."""
    body = job(name, run_seconds=1)
    body["spec"].update(spec)
    body["spec"]["template"]["metadata"]["annotations"][f"{PREFIX}exit-code"] = str(exit_code)
    return body


def evict_all(cluster: Cluster) -> None:
    """Evict every pod that runs."""
    for item in cluster.pods():
        if item["status"]["phase"] == "Running":
            evict(cluster.api, key_of(item), eviction(item["metadata"]["name"]))


def test_an_evicted_pod_is_replaced_without_counting(cluster: Cluster) -> None:
    """With a policy that ignores disruption, a job survives more evictions than its back-off limit."""
    cluster.node("n")
    cluster.make(JOBS, job("j", podFailurePolicy=IGNORE_DISRUPTION, backoffLimit=0))
    seen: set[str] = set()
    for _ in range(3):
        cluster.settle(5)
        seen.update(item["metadata"]["uid"] for item in cluster.pods() if item["status"]["phase"] == "Running")
        evict_all(cluster)
    cluster.settle(5)

    assert len(seen) == 3
    assert list(cluster.phases().values()) == ["Running"]
    assert "failed" not in cluster.job("j")["status"]


def test_an_eviction_counts_without_a_policy(cluster: Cluster) -> None:
    """Without a failure policy the eviction is a failure, and the next pod waits for the back-off."""
    cluster.node("n")
    cluster.make(JOBS, job("j"))
    cluster.settle(5)
    evict_all(cluster)
    cluster.settle(5)
    waiting = cluster.phases()
    cluster.settle(10)

    assert waiting == {}
    assert cluster.job("j")["status"]["failed"] == 1
    assert list(cluster.phases().values()) == ["Running"]


def test_only_the_evicted_index_is_replaced(cluster: Cluster) -> None:
    """A gang's other pods keep running, and the new pod has the old one's index."""
    cluster.node("n")
    cluster.make(JOBS, job("j", podFailurePolicy=IGNORE_DISRUPTION, completions=3, parallelism=3))
    cluster.settle(5)
    before = {item["spec"]["hostname"]: item["metadata"]["uid"] for item in cluster.pods()}
    victim = next(item for item in cluster.pods() if item["spec"]["hostname"] == "j-1")
    evict(cluster.api, key_of(victim), eviction(victim["metadata"]["name"]))
    cluster.settle(5)
    running = [item for item in cluster.pods() if item["status"]["phase"] == "Running"]
    after = {item["spec"]["hostname"]: item["metadata"]["uid"] for item in running}

    assert set(after) == {"j-0", "j-1", "j-2"}
    assert [name for name in sorted(after) if after[name] != before[name]] == ["j-1"]


def test_a_failing_job_fails_at_its_limit(cluster: Cluster) -> None:
    """Each retry waits longer; after the last allowed one the job is Failed."""
    cluster.node("n")
    cluster.make(JOBS, failing("j", 1, backoffLimit=1))
    cluster.settle(60)

    failed = condition(cluster.job("j"), "Failed")
    assert failed is not None
    assert failed["reason"] == "BackoffLimitExceeded"
    assert cluster.job("j")["status"]["failed"] == 2
    assert not is_true(cluster.job("j"), "Complete")


def test_an_exit_code_can_end_a_job_at_once(cluster: Cluster) -> None:
    """FailJob on an exit code spends no retries."""
    cluster.node("n")
    policy = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}]}
    cluster.make(JOBS, failing("j", 42, podFailurePolicy=policy, backoffLimit=5))
    cluster.settle(10)

    failed = condition(cluster.job("j"), "Failed")
    assert failed is not None
    assert failed["reason"] == "PodFailurePolicy"
    assert "exit code 42" in failed["message"]


def test_a_finished_job_is_deleted_after_its_ttl(cluster: Cluster) -> None:
    """The field ttlSecondsAfterFinished deletes the job and its pods, not earlier."""
    cluster.node("n")
    cluster.make(JOBS, job("j", run_seconds=1, ttlSecondsAfterFinished=30))
    cluster.settle(20)
    kept = is_true(cluster.job("j"), "Complete")
    cluster.settle(30)

    assert kept
    assert cluster.api.find(JOBS, "default/j") is None
    assert cluster.pods() == []


def test_a_job_past_its_deadline_fails(cluster: Cluster) -> None:
    """ActiveDeadlineSeconds ends the job and stops its pods."""
    cluster.node("n")
    cluster.make(JOBS, job("j", activeDeadlineSeconds=20))
    cluster.settle(30)

    failed = condition(cluster.job("j"), "Failed")
    assert failed is not None
    assert failed["reason"] == "DeadlineExceeded"
    assert "Running" not in cluster.phases().values()


def test_a_resumed_job_starts_again(cluster: Cluster) -> None:
    """Suspending a running job deletes its pods; resuming creates new ones with a new start time."""
    cluster.node("n")
    cluster.make(JOBS, job("j", completions=2, parallelism=2))
    cluster.settle(5)
    first_start = cluster.job("j")["status"]["startTime"]
    cluster.api.patch(JOBS, "default/j", {"spec": {"suspend": True}}, "application/merge-patch+json")
    cluster.settle(5)
    held = dict(cluster.phases()), cluster.job("j")["status"]
    cluster.api.patch(JOBS, "default/j", {"spec": {"suspend": False}}, "application/merge-patch+json")
    cluster.settle(5)

    assert held[0] == {}
    assert "startTime" not in held[1]
    assert "failed" not in cluster.job("j")["status"]
    assert cluster.job("j")["status"]["startTime"] > first_start
    assert list(cluster.phases().values()) == ["Running", "Running"]


def test_changes_of_parallelism_are_applied(cluster: Cluster) -> None:
    """Less parallelism deletes the youngest pods; more creates the missing indexes."""
    cluster.node("n")
    cluster.make(JOBS, job("j", completions=4, parallelism=4))
    cluster.settle(5)
    counts = []
    for parallelism in (2, 4):
        patch = {"spec": {"parallelism": parallelism}}
        cluster.api.patch(JOBS, "default/j", patch, "application/merge-patch+json")
        cluster.settle(5)
        counts.append(len(cluster.phases()))

    assert counts == [2, 4]
    assert cluster.job("j")["status"]["active"] == 4


def test_a_job_of_a_deleted_node_runs_elsewhere(cluster: Cluster) -> None:
    """Its pods are collected and replaced."""
    cluster.node("n1")
    cluster.make(JOBS, job("j", gpus=8, podFailurePolicy=IGNORE_DISRUPTION, backoffLimit=0))
    cluster.settle(5)
    cluster.world.kubelets.power_off("n1")
    cluster.heartbeats.discard("n1")
    cluster.api.delete(NODES, "n1")
    cluster.node("n2")
    cluster.settle(45)

    assert list(cluster.where().values()) == ["n2"]
    assert list(cluster.phases().values()) == ["Running"]


def test_foreground_deletion_waits_for_the_pods(cluster: Cluster) -> None:
    """With propagationPolicy=Foreground the job exists until its last pod is deleted."""
    cluster.node("n")
    cluster.make(JOBS, job("j"))
    cluster.settle(5)
    cluster.api.delete(JOBS, "default/j", DeleteOptions(propagation="Foreground"))
    cluster.settle()
    during = cluster.api.find(JOBS, "default/j"), len(cluster.pods())
    cluster.settle(5)

    assert during[0] is not None
    assert during[1] == 1
    assert cluster.api.find(JOBS, "default/j") is None
    assert cluster.api.objects(PODS) == []


def test_consecutive_indexes_are_ranges() -> None:
    """Three in a row become a range, two do not."""
    assert indexes_text([7, 1, 3, 4, 5, 0]) == "0,1,3-5,7"
