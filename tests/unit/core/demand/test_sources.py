"""Demand items: which work, what shape, and in which order."""

from typing import Any

import msgspec
import pytest
from tests.support.mixed_groups import spread
from tests.support.stories import MINUTE, T0, Story, drained, given, job, node, notice, pod, record

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.sources import demand, job_shape
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.scheduling import Toleration


def items(state: ClusterState) -> dict[str, DemandItem]:
    """The demand by key, in serving order."""
    return {item.key: item for item in demand(state, node_views(state, T0), T0)}


def with_fields(story: Story, **changes: Any) -> Story:  # noqa: ANN401 - fields of the fact
    """The story with changed fields of its last fact."""
    last = story[-1]
    return (*story[:-1], msgspec.structs.replace(last, fact=msgspec.structs.replace(last.fact, **changes)))


def test_a_queued_job_is_one_item_with_all_its_members() -> None:
    """A gang of three: shape, priority, project and time."""
    requested = job("train", gpus=4, members=3, priority=700, model="H100", gpu_memory_bytes_min=80 * GIBIBYTE)
    item = items(given(requested))["job/train"]

    assert (item.source, item.member_count, item.priority) == (DemandSource.QUEUED_JOB, 3, 700)
    assert (item.project, item.since) == ("research", T0)
    assert (item.shape.gpu_models, item.shape.gpu_memory_bytes_min) == (("H100",), 80 * GIBIBYTE)
    assert (item.shape.resources.gpu_count, item.shape.resources.pod_count) == (4, 1)


def test_a_pod_uses_one_pod_slot_of_a_node() -> None:
    """Whatever it requests."""
    assert items(given(pod("a")))["pod/uid-a"].shape.resources.pod_count == 1


def test_existing_pods_are_items_of_their_own() -> None:
    """Of three members one pod exists and one has succeeded: one is missing."""
    state = given(
        job("train", members=3, placed_on=("n1", "n1", "n1")),
        pod("p0", job_id="train"),
        with_fields(pod("p1", on="n1", job_id="train"), phase="succeeded"),
    )
    result = items(state)

    assert (result["job/train"].source, result["job/train"].member_count) == (DemandSource.PLACED_JOB, 1)
    assert result["pod/uid-p0"].source is DemandSource.PENDING_POD
    assert "pod/uid-p1" not in result


@pytest.mark.parametrize("is_running", [True, False])
def test_a_started_job_is_no_item(*, is_running: bool) -> None:
    """Before its pods exist it reserves capacity; after the start its pods do."""
    state = given(job("train", placed_on=("n1",), is_running=is_running))

    assert ("job/train" in items(state)) is not is_running


@pytest.mark.parametrize(
    "gone",
    [
        {"is_gated": True},
        {"deleting_since": T0},
        {"owner_kind": "DaemonSet"},
        {"owner_kind": "Node"},
        {"phase": "failed"},
    ],
)
def test_gated_deleted_finished_and_daemonset_pods_are_no_demand(gone: dict[str, Any]) -> None:
    """Gated, going, over, or the node's own."""
    assert items(given(with_fields(pod("a"), **gone))) == {}


def test_pods_on_leaving_nodes_are_demand() -> None:
    """Nodes are bought for pods under notice; pods of voluntary drains only reserve capacity."""
    state = given(
        node("n1"), pod("doomed", on="n1"), notice("n1"), node("n2"), pod("moving", on="n2"), drained("n2"), node("n3"),
        pod("staying", on="n3"),
    )  # fmt: skip
    result = items(state)

    assert result["pod/uid-doomed"].source is DemandSource.AT_RISK_POD
    assert result["pod/uid-doomed"].is_bought_for
    assert result["pod/uid-moving"].source is DemandSource.MOVING_POD
    assert not result["pod/uid-moving"].is_bought_for
    assert "pod/uid-staying" not in result


def test_the_serving_order() -> None:
    """Placed work, then priority, waiting time and key."""
    state = given(
        job("late", at=T0 + MINUTE),
        job("b"),
        job("a"),
        job("high", priority=1000, at=T0 + MINUTE),
        job("low", priority=100),
        job("placed", priority=0, placed_on=("n1",)),
    )

    assert list(items(state)) == ["job/placed", "job/high", "job/a", "job/b", "job/late", "job/low"]


@pytest.mark.parametrize(("of_kubernetes", "ours"), [(-10, 100), (0, 500), (1, 1000), (2_000_000_000, 1000)])
def test_the_priority_of_other_pods_is_low_medium_or_high(of_kubernetes: int, ours: int) -> None:
    """Only the sign of a Kubernetes priority is comparable."""
    assert items(given(pod("a", priority=of_kubernetes)))["pod/uid-a"].priority == ours


def test_a_pod_of_a_job_has_the_settings_of_the_job() -> None:
    """Priority, spot and GPU memory."""
    requested = job("train", priority=900, is_preemptible=False, gpu_memory_bytes_min=GIBIBYTE, placed_on=("n1",))
    item = items(given(requested, pod("a", job_id="train")))["pod/uid-a"]

    assert (item.priority, item.job_id, item.project) == (900, JobId("train"), "research")
    assert not item.shape.is_spot_allowed
    assert item.shape.gpu_memory_bytes_min == GIBIBYTE


def test_critical_pods_are_not_placed_on_spot() -> None:
    """Critical Kubernetes priorities start at 2,000,000,000."""
    assert not items(given(pod("a", priority=2_000_000_000)))["pod/uid-a"].shape.is_spot_allowed
    assert items(given(pod("a", priority=1_999_999_999)))["pod/uid-a"].shape.is_spot_allowed


def test_jobs_with_gpus_tolerate_the_taints_of_gpu_nodes() -> None:
    """Of the device plugin, of people, and of avoided nodes; jobs without GPUs tolerate none."""
    state = given(job("gpu"), job("cpu", gpus=0))
    gpu, cpu = (state.jobs[JobId(name)].queued for name in ("gpu", "cpu"))
    assert gpu is not None
    assert cpu is not None

    assert job_shape(gpu.spec).demands.tolerations == (
        Toleration(key="nvidia.com/gpu", operator="Exists"),
        Toleration(key="gpu", operator="Equal", value="true", effect="NoSchedule"),
        Toleration(key="gpu-autoscaler.io/avoid", operator="Exists", effect="PreferNoSchedule"),
    )
    assert job_shape(cpu.spec).demands.tolerations == ()


def test_the_demand_follows_changed_pods_and_jobs() -> None:
    """Read after each fact, it is that of the same facts read at once."""
    state = given(pod("a", job_id="train"), pod("web", labels={"app": "web"}))
    for change in (
        pod("a", job_id="train", unschedulable_since=T0 + MINUTE, version=2),
        job("train", priority=900),
        pod("b", job_id="train"),
        pod("c", labels={"app": "web"}, pod_affinity=spread("web")),
        pod("c", labels={"app": "web"}, pod_affinity=spread("web"), on="n1", version=2),
        pod("a", job_id="train", on="n1", version=3),
        (*node("n1"), *notice("n1")),
    ):
        before, state = items(state), fold(state, record(change))
        assert list(items(state).items()) == list(items(msgspec.structs.replace(state)).items())
        assert items(state) != before
