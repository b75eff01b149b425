"""The order of queued jobs by the scheduling policies of their queues."""

from datetime import datetime, timedelta
from typing import Any

from tests.support.stories import HOUR, MINUTE, T0, Story, TimedFact, given, job, policy

from gpu_autoscaler.core.demand.queue_order import ordered_queue, recent_uses
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import DEFAULT_QUEUE, QueuePolicy, SchedulingPolicy, queue_of
from gpu_autoscaler.core.state.queries import queue
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.model.ids import JobId, NodeUid


def of(scheduling_policy: SchedulingPolicy, **settings: Any) -> ScalingPolicy:  # noqa: ANN401 - fields of QueuePolicy
    """A policy with one queue for all projects."""
    return policy(queues=(QueuePolicy(name="all", scheduling_policy=scheduling_policy, **settings),))


def order(state: ClusterState, rules: ScalingPolicy, as_of: datetime = T0) -> list[str]:
    """The ids of the queued jobs as they are served."""
    return [each.queued.job_id for each in ordered_queue(state, rules, as_of) if each.queued is not None]


def ran(name: str, *, project: str, user: str = "", gpus: int, start: datetime, hours: float) -> Story:
    """A job that held this many GPUs for some hours."""
    job_id, end = JobId(name), start + timedelta(hours=hours)
    placed = JobPlaced(job_id=job_id, attempt=1, node_uids=(NodeUid("n"),), node_names=("n",), placed_at=start)
    finished = JobFinished(job_id=job_id, outcome="completed", finished_at=end)
    return (
        *job(name, gpus=gpus, at=start, project_id=project, submitted_by=user),
        TimedFact(placed, start),
        TimedFact(finished, end),
    )


def test_without_queues_the_order_is_by_priority_deadline_and_waiting_time() -> None:
    """Nothing changes without asking; a queue with the default policy has the same order."""
    state = given(
        job("late"),
        job("soon", start_by_at=T0 + HOUR),
        job("first", at=T0 - HOUR),
        job("high", priority=1000),
        as_of=T0,
    )

    assert order(state, policy()) == ["high", "soon", "first", "late"]
    assert ordered_queue(state, policy(), T0) == queue(state)
    assert ordered_queue(state, of("priority"), T0) == queue(state)


def test_first_come_first_served_knows_no_priority() -> None:
    """Neither priority nor start deadline, strict or not."""
    state = given(job("old", priority=100, at=T0 - HOUR), job("high", priority=1000, start_by_at=T0), as_of=T0)

    assert order(state, of("fcfs-strict")) == order(state, of("fcfs-best-effort")) == ["old", "high"]


def test_waiting_raises_the_priority_up_to_the_highest() -> None:
    """100 points an hour: after four hours low is above medium; after nine it goes before a new one of 1000."""
    rules = of("priority", aging_hourly_priority=100.0)

    def state(hours: int) -> ClusterState:
        now = T0 + hours * HOUR
        return given(
            job("low", priority=100, at=T0), job("medium", priority=500, at=now), job("high", priority=1000, at=now),
            as_of=now,
        )  # fmt: skip

    assert order(state(3), rules, T0 + 3 * HOUR) == ["high", "medium", "low"]
    assert order(state(5), rules, T0 + 5 * HOUR) == ["high", "low", "medium"]
    assert order(state(9), rules, T0 + 9 * HOUR) == ["low", "high", "medium"]
    assert order(state(90), of("priority"), T0 + 90 * HOUR) == ["high", "medium", "low"]


def test_the_project_with_less_recent_gpu_time_goes_first() -> None:
    """Whoever came first, and whatever its priority."""
    used = ran("past", project="vision", gpus=8, start=T0 - 5 * HOUR, hours=4)
    waiting = (*job("v", priority=1000, at=T0 - HOUR, project_id="vision"), *job("l", priority=100, project_id="lang"))
    state = given(used, waiting, as_of=T0)

    assert order(state, of("fair-share")) == ["l", "v"]
    assert order(state, of("priority")) == ["v", "l"]


def test_within_a_project_the_user_with_less_gpu_time_goes_first() -> None:
    """The same among the users of one project."""
    used = ran("past", project="vision", user="ada", gpus=8, start=T0 - 5 * HOUR, hours=4)
    waiting = (
        *job("a", at=T0 - HOUR, project_id="vision", submitted_by="ada"),
        *job("b", project_id="vision", submitted_by="bob"),
    )

    assert order(given(used, waiting, as_of=T0), of("fair-share")) == ["b", "a"]


def test_gpu_time_counts_half_after_a_half_life() -> None:
    """16 GPU-hours of two half-lives ago count less than 6 of today."""
    old = ran("old", project="vision", gpus=8, start=T0 - 50 * HOUR, hours=2)
    new = ran("new", project="lang", gpus=6, start=T0 - 3 * HOUR, hours=1)
    waiting = (*job("v", project_id="vision"), *job("l", at=T0 - HOUR, project_id="lang"))
    state = given(old, new, waiting, as_of=T0)

    assert order(state, of("fair-share", half_life_hours=24.0)) == ["v", "l"]
    assert order(state, of("fair-share", half_life_hours=336.0)) == ["l", "v"]


def test_a_burst_of_one_project_takes_turns_with_others() -> None:
    """Each job that goes first counts for an hour of its GPUs."""
    burst = tuple(each for number in range(3) for each in job(f"a{number}", at=T0 - HOUR, project_id="a"))
    state = given(burst, job("b0", project_id="b"), job("b1", project_id="b"), as_of=T0)

    assert order(state, of("fair-share")) == ["a0", "b0", "a1", "b1", "a2"]


def test_running_jobs_count_from_their_placement() -> None:
    """At least for an hour, so that the next tick does not forget a start."""
    running = (
        *job("r", at=T0 - MINUTE, project_id="a"),
        TimedFact(
            JobPlaced(job_id=JobId("r"), attempt=1, node_uids=(NodeUid("n"),), node_names=("n",), placed_at=T0), T0
        ),
    )
    waiting = (*job("a", at=T0 - HOUR, project_id="a"), *job("b", project_id="b"))
    state = given(running, waiting, as_of=T0)

    assert order(state, of("fair-share")) == ["b", "a"]
    uses = recent_uses(state, of("fair-share"), T0)
    assert {name: (use.used_gpu_hours, use.average_gpu_hours) for name, use in uses.items()} == {
        "a": (8.0, 4.0),
        "b": (0.0, 4.0),
    }
    assert recent_uses(state, of("priority"), T0) == recent_uses(state, policy(), T0) == {}


def test_a_job_that_waited_long_goes_before_all_others() -> None:
    """Of every queue, by waiting time; a preempted job waits since its preemption."""
    lost = JobPreempted(job_id=JobId("lost"), attempt=1, cause="gone", preempted_at=T0 - MINUTE)
    state = given(
        job("high", priority=1000, at=T0 - HOUR), job("old", priority=100, at=T0 - 3 * HOUR),
        job("lost", priority=100, at=T0 - 9 * HOUR), (TimedFact(lost, T0 - MINUTE),), as_of=T0,
    )  # fmt: skip

    assert order(state, of("priority", reserve_after_seconds=7200.0)) == ["old", "high", "lost"]
    assert order(state, of("priority")) == ["high", "lost", "old"]


def test_the_first_jobs_of_the_queues_compete_by_priority() -> None:
    """A queue keeps its own order all the same: in `a` nobody passes the old job."""
    queues = (QueuePolicy(name="a", projects=("a",), scheduling_policy="fcfs-strict"), QueuePolicy(name="rest"))
    state = given(
        job("a-old", priority=100, at=T0 - HOUR, project_id="a"), job("a-high", priority=1000, project_id="a"),
        job("b", project_id="b"), as_of=T0,
    )  # fmt: skip

    assert order(state, policy(queues=queues)) == ["b", "a-old", "a-high"]


def test_projects_that_no_queue_names_have_the_one_without_projects() -> None:
    """Else the default queue, with today's order."""
    named, rest = QueuePolicy(name="a", projects=("a",)), QueuePolicy(name="rest")

    assert queue_of((named, rest), "a") is named
    assert queue_of((named, rest), "b") is rest
    assert queue_of((named,), "b") is DEFAULT_QUEUE
