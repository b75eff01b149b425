"""Schedule: gangs on usable nodes, by priority, with backfill."""

from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    job,
    node,
    notice,
    offer,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.demand.sources import demand
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.queueing.schedule import Schedule, schedule
from gpu_autoscaler.core.state.queries import queue
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer import DeferReason, WatchStale
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected, GangIncomplete, SpotExcluded
from gpu_autoscaler.model.scheduling import Taint


def now(state: ClusterState) -> Schedule:
    """The schedule at T0 under the default policy."""
    return schedule(state, policy(), T0)


def started(state: ClusterState) -> dict[str, tuple[str, ...]]:
    """Nodes by started job."""
    return {placement.job_id: placement.node_names for placement in now(state).placements}


def waits(state: ClusterState, job_id: str) -> DeferReason:
    """Why this job does not start."""
    (reason,) = [held.reason for held in now(state).deferred if held.subject == f"job/{job_id}"]
    return reason


def preempted(job_id: str, attempt: int = 1) -> Story:
    """The attempt lost its node."""
    return (TimedFact(JobPreempted(job_id=JobId(job_id), attempt=attempt, cause="gone", preempted_at=T0), T0),)


def test_a_job_starts_where_all_members_fit() -> None:
    """Two members of four GPUs share a node of eight."""
    (placement,) = now(given(node("n1"), job("train", gpus=4, members=2))).placements

    assert placement.attempt == 1
    assert placement.node_names == ("n1", "n1")
    assert placement.node_uids == ("uid-n1", "uid-n1")


def test_part_of_a_gang_never_starts() -> None:
    """Capacity for one of two members; the reason has the counts."""
    state = given(node("n1"), job("train", gpus=8, members=2))

    assert started(state) == {}
    assert waits(state, "train") == GangIncomplete(job_id=JobId("train"), members_placed=1, members_count=2)


def test_pods_use_capacity() -> None:
    """Bound pods, and pods about to be bound."""
    assert started(given(node("n1"), pod("a", on="n1"), job("train"))) == {}
    assert started(given(node("n1"), pod("a", priority=1), job("train"))) == {}


def test_a_placed_job_reserves_capacity_before_its_pods_exist() -> None:
    """Two ticks never assign the same GPUs."""
    assert started(given(node("n1"), job("first", placed_on=("n1",)), job("second"))) == {}


def test_a_placed_job_uses_the_nodes_of_its_placement() -> None:
    """Not those where it would fit best."""
    tighter = node("n2", offer(gpus=4))

    assert started(given(node("n1"), tighter, job("first", gpus=4, placed_on=("n1",)), job("second", gpus=8))) == {}


def test_higher_priority_goes_first() -> None:
    """Capacity for one of two jobs."""
    state = given(node("n1"), job("low", priority=100), job("high", priority=1000, at=T0))

    assert started(state) == {"high": ("n1",)}


def test_small_jobs_are_backfilled() -> None:
    """A gang without expected capacity reserves nothing."""
    state = given(node("n1"), job("large", members=4, priority=1000), job("small"))

    assert started(state) == {"small": ("n1",)}


def test_a_job_with_booting_nodes_reserves_its_ready_node() -> None:
    """A smaller job does not use it."""
    state = given(node("n1"), bought(purchase("order")), job("large", members=2, priority=1000), job("small"))

    assert started(state) == {}
    assert waits(state, "large") == CapacityExpected(node="order", expected_at=T0 + 2 * MINUTE)


def test_a_cordoned_or_unready_node_starts_nothing() -> None:
    """Only usable nodes count."""
    assert started(given(node("n1", is_cordoned=True), job("train"))) == {}
    assert started(given(node("n1", gpus_allocatable=4), job("train"))) == {}


def test_a_non_preemptible_job_does_not_start_on_spot() -> None:
    """It waits for on-demand."""
    on_demand = offer(capacity_type=CapacityType.ON_DEMAND)
    state = given(node("n1"), node("n2", on_demand), job("train", is_preemptible=False))

    assert started(state) == {"train": ("n2",)}


def test_members_tolerate_the_gpu_taint_and_no_other() -> None:
    """As Kubernetes adds it to pods with GPUs."""
    gpu = Taint(key="nvidia.com/gpu", effect="NoSchedule", value="true")
    other = Taint(key="team", effect="NoSchedule", value="vision")

    assert started(given(node("n1", taints=(gpu,)), job("train"))) == {"train": ("n1",)}
    assert started(given(node("n1", taints=(other,)), job("train"))) == {}


def test_a_preempted_job_starts_again_as_its_next_attempt() -> None:
    """It is queued again."""
    (placement,) = now(given(node("n2"), job("train", placed_on=("n1",)), preempted("train"))).placements

    assert (placement.attempt, placement.node_names) == (2, ("n2",))


def test_a_preempted_job_is_placed_where_its_pods_are() -> None:
    """Kubernetes bound them."""
    lost = (job("train", members=2, gpus=4, placed_on=("n1", "n1")), preempted("train"))
    first, second = pod("p0", on="n1", gpus=4, job_id="train"), pod("p1", on="n2", gpus=4, job_id="train")
    waiting = pod("p1", gpus=8, job_id="train")

    assert started(given(node("n1"), node("n2"), *lost, first, second)) == {"train": ("n1", "n2")}
    assert waits(given(node("n1"), *lost, first, waiting), "train") == GangIncomplete(
        job_id=JobId("train"), members_placed=1, members_count=2
    )


def test_two_members_lost_with_one_node_are_one_attempt() -> None:
    """The second one is still on the leaving node: no placement until both are gone."""
    lost = (job("train", members=2, gpus=4, placed_on=("n1", "n1")), preempted("train"))
    back, staying = pod("p0", on="n2", gpus=4, job_id="train"), pod("p1", on="n1", gpus=4, job_id="train")
    doomed = (node("n1"), notice("n1"), node("n2"))

    assert waits(given(*doomed, *lost, back, staying), "train") == GangIncomplete(
        job_id=JobId("train"), members_placed=1, members_count=2
    )
    moved = pod("p1", on="n2", gpus=4, job_id="train")
    assert started(given(*doomed, *lost, back, moved)) == {"train": ("n2", "n2")}


def test_a_job_with_a_deleted_pod_is_not_placed() -> None:
    """Its end would count as a loss of the new placement."""
    lost = (job("train", members=2, gpus=4, placed_on=("n1", "n1")), preempted("train"))
    going = pod("p1", on="n1", gpus=4, job_id="train", deleting_since=T0)

    assert waits(given(node("n1"), node("n2"), *lost, going), "train") == GangIncomplete(
        job_id=JobId("train"), members_placed=0, members_count=2
    )


def test_nothing_starts_on_stale_lists() -> None:
    """A deleted node would count as capacity."""
    late = schedule(given(node("n1"), job("train")), policy(), T0 + HOUR)

    assert late.placements == ()
    assert isinstance(late.deferred[0].reason, WatchStale)


def test_of_equal_priority_the_earliest_start_deadline_goes_first() -> None:
    """Before longer waiting jobs, after higher priority."""
    jobs = (
        *job("old", at=T0 - HOUR),
        *job("soon", start_by_at=T0 + HOUR),
        *job("sooner", start_by_at=T0 + MINUTE),
        *job("important", priority=900),
    )
    state = given(jobs, *(node(f"n{number}") for number in range(2)))
    assert [each.job_id for each in schedule(state, policy(), T0).placements] == ["important", "sooner"]
    waiting = [each.queued.job_id for each in queue(state) if each.queued is not None]
    assert waiting == ["important", "sooner", "soon", "old"]


def test_the_start_deadline_annotation_of_pods() -> None:
    """An invalid value is ignored."""
    hurry = {labels.START_BY: (T0 + MINUTE).isoformat()}
    state = given(
        pod("old", gpus=8, at=T0 - HOUR),
        pod("odd", gpus=8, at=T0 - MINUTE, annotations={labels.START_BY: "soon"}),
        pod("sooner", gpus=8, annotations=hurry),
    )
    result = [item.key for item in demand(state, node_views(state, T0), T0)]
    assert result == ["pod/uid-sooner", "pod/uid-old", "pod/uid-odd"]


def test_a_job_at_its_last_attempt_leaves_spot() -> None:
    """Its pods must stop first; then it is placed on other capacity."""
    worn = (job("train", placed_on=("n1",), attempt=3), preempted("train", 3))
    bound = pod("train-0", on="n1", gpus=8, job_id="train", owner_kind="Job")
    lasting = node("n2", offer(capacity_type=CapacityType.ON_DEMAND))

    assert waits(given(*worn, node("n1"), lasting, bound), "train") == SpotExcluded(
        interruptions_count=3, pods_remaining_count=1, until=T0 + 30 * MINUTE
    )
    assert started(given(*worn, node("n1"), lasting)) == {"train": ("n2",)}
    assert started(given(*worn, node("n1"))) == {}
    assert started(given(job("train", placed_on=("n1",), attempt=2), preempted("train", 2), node("n1"), bound)) == {
        "train": ("n1",)
    }


def test_a_suspended_job_with_a_succeeded_member_is_placed() -> None:
    """A suspended Job creates no pods, so waiting for them would never end."""
    worn = (job("train", members=3, gpus=4, placed_on=("n1", "n1", "n2"), attempt=3), preempted("train", 3))
    done = pod("train-0", on="n1", gpus=4, job_id="train", owner_kind="Job", phase="succeeded")
    lasting = node("n2", offer(capacity_type=CapacityType.ON_DEMAND))
    free = (*worn, done, node("n1"), lasting)

    assert started(given(*free)) == {"train": ("n1", "n2", "n2")}
    (late,) = schedule(given(*free, as_of=T0 + HOUR), policy(), T0 + HOUR).placements
    assert (late.attempt, len(late.node_uids)) == (4, 3)
    assert waits(given(*worn, done, node("n1")), "train") == GangIncomplete(
        job_id=JobId("train"), members_placed=0, members_count=2
    )


def test_a_succeeded_member_uses_no_capacity() -> None:
    """While another pod exists, Kubernetes creates and binds the rest."""
    lost = (job("train", members=3, gpus=4, placed_on=("n1", "n1", "n2")), preempted("train"))
    done = pod("train-0", on="n1", gpus=4, job_id="train", owner_kind="Job", phase="succeeded")
    bound = pod("train-1", on="n1", gpus=4, job_id="train", owner_kind="Job")

    assert waits(given(*lost, done, bound, node("n1"), node("n2")), "train") == GangIncomplete(
        job_id=JobId("train"), members_placed=2, members_count=3
    )
