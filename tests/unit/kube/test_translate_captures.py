"""The decoder and the translation, held against what a real kube-apiserver answered."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.kube.api_errors import HistoryLost, error_from_status, read_status
from gpu_autoscaler.kube.protocol import BUDGETS, JOBS, NODES, PODS, Conflict, NotFound, Rejected
from gpu_autoscaler.kube.translate.job import job_finished, job_removed
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.kube.translate.related_objects import budget_observed
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.resources import Resources

ROOT = Path(__file__).resolve().parents[3]
CAPTURES = Path(os.environ.get("GPU_AUTOSCALER_CAPTURES", ROOT.parent / "shared" / "captures")) / "k8s-1.36"
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def answer(name: str) -> Any:  # noqa: ANN401 - JSON
    """The recorded response; the test is skipped by name where recordings are absent."""
    path = CAPTURES / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no recording {path}; set GPU_AUTOSCALER_CAPTURES")
    return json.loads(path.read_text(encoding="utf-8"))["response"]


def body(name: str) -> bytes:
    """The recorded body, as bytes."""
    return json.dumps(answer(name)["body"]).encode()


def pod(name: str) -> PodObserved:
    """The recorded pod as a fact."""
    return pod_observed(PODS.decode(body(name), "read"), epoch=7)


def test_a_running_pod_shows_its_node_start_and_devices() -> None:
    """Phase, node, requests, tolerations and start come out in our units."""
    seen = pod("pod-running")
    assert (seen.phase, seen.node_name, seen.is_ready, seen.grace_seconds) == ("running", "gpu-a", True, 5.0)
    assert seen.requests == Resources(cpu_milli=100, memory_bytes=64 * 2**20, gpu_count=8, pod_count=1)
    assert seen.started_at == datetime(2026, 11, 21, 10, 43, 56, tzinfo=UTC)
    assert {toleration.key for toleration in seen.demands.tolerations} == {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    }
    assert (seen.epoch, seen.version) == (7, 257)


def test_an_unschedulable_pod_shows_since_when_and_why() -> None:
    """The condition's transition is the start of the wait."""
    seen = pod("pod-unschedulable")
    assert seen.unschedulable_since == datetime(2026, 11, 21, 10, 43, 51, tzinfo=UTC)
    assert seen.unschedulable_message == "no nodes available to schedule pods"
    assert seen.node_name is None


def test_a_gated_pod_is_no_demand_yet() -> None:
    """Scheduling gates are seen."""
    assert pod("pod-suspended-by-gate").is_gated


def test_a_ready_node_may_have_no_gpus_yet() -> None:
    """Readiness and GPUs are two things."""
    seen = node_observed(NODES.decode(body("node-ready-without-gpus"), "read"), epoch=7)
    assert seen.is_ready
    assert seen.ready_since is not None
    assert seen.allocatable.gpu_count == 0
    assert seen.instance_type == "g5.48xlarge"
    assert seen.zone == "us-west-2a"
    assert seen.provider_id == "aws:///us-west-2a/i-00837176536875935"
    assert seen.annotations == ()  # other people's


def test_a_cordoned_node_is_seen_as_such() -> None:
    """`spec.unschedulable` is the cordon."""
    assert node_observed(NODES.decode(body("node-cordon"), "read"), epoch=7).is_cordoned


def test_a_disruption_budget_shows_its_allowed_disruptions() -> None:
    """Status and selector of a disruption budget."""
    seen = budget_observed(BUDGETS.decode(body("pdb-status"), "read"), epoch=7)
    assert (seen.disruptions_allowed, seen.pods_healthy_count, seen.pods_healthy_count_min) == (0, 1, 1)
    assert [(one.key, one.operator, one.values) for one in seen.match_labels] == [("app", "In", ("train",))]


def test_a_budget_whose_status_lags_allows_nothing() -> None:
    """A budget that was just made has no status of its own generation."""
    assert budget_observed(BUDGETS.decode(body("pdb-create"), "read"), epoch=7).disruptions_allowed == 0


def test_a_complete_job_is_finished_at_its_completion() -> None:
    """Complete, and when."""
    end = job_finished(JOBS.decode(body("job-status"), "read"), JobId("j"), seen_at=NOW)
    assert end is not None
    assert (end.outcome, end.finished_at) == ("completed", datetime(2026, 11, 21, 10, 43, 59, tzinfo=UTC))


def test_a_job_that_goes_on_is_not_finished() -> None:
    """A suspended Job has conditions, and none of them is an end."""
    job = JOBS.decode(body("job-create-suspended"), "read")
    assert job_finished(job, JobId("j"), seen_at=NOW) is None
    assert job_removed(job, JobId("j"), seen_at=NOW).outcome == "cancelled"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("404-object", NotFound),
        ("409-exists", Conflict),
        ("node-put-conflict", Conflict),
        ("eviction-409-other-uid", Conflict),
        ("continue-token-expired", HistoryLost),
        ("list-exact-version-gone", HistoryLost),
        ("401", TransientError),
        ("403", PermanentError),
        ("422-fraction-of-a-gpu", Rejected),
        ("eviction-500-two-pdbs", TransientError),
    ],
)
def test_refusals_are_sorted_into_later_and_never(name: str, error: type[Exception]) -> None:
    """Each recorded error_from_status becomes one error of ours, with the server's reason in its words."""
    recorded = answer(name)
    status = read_status(recorded["status"], json.dumps(recorded["body"]).encode())
    found = error_from_status(recorded["status"], status, {}, "patch nodes x")
    assert type(found) is error
    assert "patch nodes x" in str(found)
    assert recorded["body"]["message"] in str(found)
