"""Queues under random streams of jobs: nobody starves, and each scheduling policy keeps its promise."""

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from hypothesis import Phase, settings
from hypothesis import given as for_all
from hypothesis import strategies as st
from tests.support.job_streams import NODE_GPUS, STARTING, TICK, Run, Submitted, job_streams
from tests.support.stories import T0, job, policy
from tests.support.stories import given as given_facts

from gpu_autoscaler.core.demand.fair_share import ASSUMED_HOURS
from gpu_autoscaler.core.demand.queue_order import ordered_queue
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy, SchedulingPolicy
from gpu_autoscaler.core.queueing.backfill import START_SECONDS_MAX
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.usage_history import WHOLE, weight, weighted

NODES_COUNT = 3
RESERVE_AFTER = timedelta(hours=3)
POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs-strict", "fcfs-best-effort", "priority", "fair-share")
# A failure is reported as it was found: to make a stream smaller takes minutes.
_SETTINGS = settings(
    max_examples=20, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)


def one_queue(scheduling_policy: SchedulingPolicy, reserve_after: timedelta | None = RESERVE_AFTER) -> ScalingPolicy:
    """One queue for all projects."""
    seconds = None if reserve_after is None else reserve_after.total_seconds()
    queue = QueuePolicy(name="all", scheduling_policy=scheduling_policy, reserve_after_seconds=seconds)
    return policy(queues=(queue,), watch_age_seconds_max=1e9)


def ended(jobs: tuple[Submitted, ...], rules: ScalingPolicy) -> Run:
    """The finished run of a stream."""
    run = Run(jobs, NODES_COUNT, rules)
    run.run()
    return run


def wait_bound(each: Submitted, run: Run) -> timedelta:
    """The bound of docs/concepts/queues.md: R + (k + 1) x (L + S), the scheduler's ticks included."""
    longest = max(other.limit for other in run.jobs.values())
    ahead = [
        other
        for other in run.jobs.values()
        if (other.submitted_at, other.job_id) < (each.submitted_at, each.job_id)
        and run.placed_at[other.job_id] >= each.submitted_at
    ]
    turn = longest + timedelta(seconds=START_SECONDS_MAX) + 2 * TICK
    return RESERVE_AFTER + (len(ahead) + 1) * turn


@pytest.mark.parametrize("scheduling_policy", POLICIES)
@_SETTINGS
@for_all(jobs=job_streams(NODES_COUNT))
def test_waits_are_bounded_and_nodes_never_overcommitted(
    scheduling_policy: SchedulingPolicy, jobs: tuple[Submitted, ...]
) -> None:
    """Under every policy, with gangs that need every node: no job waits longer than the bound, and running jobs never
    hold more GPUs than the nodes have, backfill included."""
    run = ended(jobs, one_queue(scheduling_policy))
    for each in jobs:
        wait = run.placed_at[each.job_id] - each.submitted_at
        assert wait <= wait_bound(each, run), (each, wait)
    for at in run.placed_at.values():
        held = sum(
            each.gpus * each.members
            for each in jobs
            if run.placed_at[each.job_id] <= at < run.placed_at[each.job_id] + STARTING + each.runs
        )
        assert held <= NODES_COUNT * NODE_GPUS


@_SETTINGS
@for_all(jobs=job_streams(NODES_COUNT))
def test_a_reservation_is_never_delayed(jobs: tuple[Submitted, ...]) -> None:
    """Once overdue, the job that waits longest starts when all jobs that ran then have reached their limits."""
    run = ended(jobs, one_queue("priority"))
    for each in jobs:
        overdue_at = each.submitted_at + RESERVE_AFTER
        before = [other for other in jobs if (other.submitted_at, other.job_id) < (each.submitted_at, each.job_id)]
        is_first_at = max([overdue_at, *(run.placed_at[other.job_id] for other in before)])
        if run.placed_at[each.job_id] <= is_first_at:
            continue
        running = [
            run.placed_at[other.job_id] + timedelta(seconds=START_SECONDS_MAX) + other.limit
            for other in jobs
            if other is not each and run.placed_at[other.job_id] <= is_first_at < run.ended_at[other.job_id]
        ]
        assert run.placed_at[each.job_id] <= max([is_first_at, *running]) + 2 * TICK, each


@_SETTINGS
@for_all(jobs=job_streams(NODES_COUNT))
def test_strict_order_is_the_order_of_submission(jobs: tuple[Submitted, ...]) -> None:
    """No job starts before one that was submitted earlier."""
    run = ended(jobs, one_queue("fcfs-strict", None))
    in_order = sorted(jobs, key=lambda each: (each.submitted_at, each.job_id))
    starts = [run.placed_at[each.job_id] for each in in_order]

    assert starts == sorted(starts)


# ---- fair share


@st.composite
def _usage(draw: st.DrawFn) -> tuple[ClusterState, dict[str, int]]:
    """Waiting jobs of projects with different recent GPU time, in quarters of a day."""
    projects = draw(st.lists(st.sampled_from("abcdef"), min_size=2, max_size=5, unique=True))
    used = {project: draw(st.integers(0, 40)) for project in projects}
    story = [
        job(
            f"{project}-{number}", gpus=draw(st.integers(1, 4)), priority=draw(st.sampled_from((100, 500, 1000))),
            at=T0 - timedelta(minutes=draw(st.integers(0, 600))), project_id=project,
        )
        for project in projects
        for number in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    state = given_facts(*story, as_of=T0)
    part = int(T0.timestamp()) // (6 * 3600)
    hour = 3_600_000_000
    gpu_time = {f"project/{project}": {part: hours * hour} for project, hours in used.items() if hours}
    return _with_usage(state, gpu_time), used


def _with_usage(state: ClusterState, gpu_time: dict[str, dict[int, int]]) -> ClusterState:
    return ClusterState(**{**{name: getattr(state, name) for name in state.__struct_fields__}, "gpu_time": gpu_time})


def _projects(state: ClusterState, at: datetime) -> Iterator[str]:
    for each in ordered_queue(state, one_queue("fair-share", None), at):
        if each.queued is not None:
            yield each.queued.spec.project_id


@settings(max_examples=200, deadline=None)
@for_all(situation=_usage())
def test_below_average_use_goes_first(situation: tuple[ClusterState, dict[str, int]]) -> None:
    """Whatever priorities and waiting times: the first job of a project with less use goes before that of one with
    more, so one below the average before one above it."""
    state, used = situation
    order = list(_projects(state, T0))
    for one in used:
        for other in used:
            if used[one] < used[other]:
                assert order.index(one) < order.index(other)
    assert used[order[0]] <= sum(used.values()) / len(used)


@settings(max_examples=100, deadline=None)
@for_all(st.integers(1, 20), st.integers(1, 20))
def test_a_burst_does_not_delay_others_by_more_than_its_starts(burst: int, others: int) -> None:
    """With equal use, of n jobs that go first each project has at most one more than the other, while both wait."""
    story = [job(f"a{number:02}", gpus=1, at=T0 - timedelta(hours=1), project_id="a") for number in range(burst)]
    story += [job(f"b{number:02}", gpus=1, at=T0, project_id="b") for number in range(others)]
    order = list(_projects(given_facts(*story, as_of=T0), T0))
    for count in range(1, 2 * min(burst, others) + 1):
        first = order[:count]
        assert abs(first.count("a") - first.count("b")) <= ASSUMED_HOURS


@settings(max_examples=200, deadline=None)
@for_all(st.floats(24, 336), st.floats(0, 3000), st.floats(0, 3000))
def test_gpu_time_decays_by_half_per_half_life(half_life: float, age: float, other: float) -> None:
    """Halves exactly, never grows with age, and is a sum of its parts."""
    halved = weight(age + half_life, half_life)

    assert abs(2 * halved - weight(age, half_life)) <= 4
    assert (weight(age, half_life) <= weight(other, half_life)) or age <= other
    assert weight(0, half_life) == WHOLE
    parts = {82_000: 7_000_000, 82_003: 5_000_000}
    at = T0
    assert weighted(parts, at, half_life) == sum(
        weighted({part: amount}, at, half_life) for part, amount in parts.items()
    )
