"""Schedules under the scheduling policies of queues: strict order, reservations and backfill."""

from datetime import datetime, timedelta

from tests.support.stories import HOUR, MINUTE, T0, Story, given, job, node, pod, policy

from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy, SchedulingPolicy
from gpu_autoscaler.core.queueing.backfill import START_SECONDS_MAX
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_waits import CapacityReserved, GangIncomplete, QueueHeadWaits, ReservationHeld

_START = timedelta(seconds=START_SECONDS_MAX)


def of(scheduling_policy: SchedulingPolicy, *, reserve_after: timedelta | None = None) -> ScalingPolicy:
    """A policy with one queue for all projects."""
    seconds = None if reserve_after is None else reserve_after.total_seconds()
    queue = QueuePolicy(name="all", scheduling_policy=scheduling_policy, reserve_after_seconds=seconds)
    return policy(queues=(queue,), watch_age_seconds_max=1e6)


def started(state: ClusterState, rules: ScalingPolicy, as_of: datetime = T0) -> list[str]:
    """The jobs that start, in order."""
    return [placement.job_id for placement in schedule(state, rules, as_of).placements]


def waits(state: ClusterState, rules: ScalingPolicy, job_id: str) -> DeferReason:
    """Why this job does not start at T0."""
    (reason,) = [held.reason for held in schedule(state, rules, T0).deferred if held.subject == f"job/{job_id}"]
    return reason


def running(job_id: str, on: str, *, gpus: int, since: datetime, hours: float) -> Story:
    """A job that runs on a node since then, with this time limit."""
    return (
        *job(job_id, gpus=gpus, at=since, placed_on=(on,), is_running=True, duration_seconds_max=hours * 3600.0),
        *pod(f"{job_id}-0", on=on, gpus=gpus, at=since, owner_kind="Job", job_id=job_id, started_at=since),
    )


# One node of eight GPUs is half used until two hours from now; a gang that needs it whole has waited for an hour.
_HALF_USED = (*node("n1"), *running("r", "n1", gpus=4, since=T0 - HOUR, hours=3))
_GANG = job("gang", gpus=8, at=T0 - HOUR)
_ENDS_AT = T0 + 2 * HOUR
_RESERVING = of("fcfs-best-effort", reserve_after=30 * MINUTE)


def small(name: str = "small", *, gpus: int = 4, hours: float) -> Story:
    """A later job that fits now."""
    return job(name, gpus=gpus, at=T0, duration_seconds_max=hours * 3600.0)


def test_in_a_strict_queue_none_passes() -> None:
    """A job that fits waits behind one that does not; under best effort it starts."""
    state = given(_HALF_USED, _GANG, small(hours=1), as_of=T0)

    assert started(state, of("fcfs-strict")) == []
    assert isinstance(waits(state, of("fcfs-strict"), "gang"), GangIncomplete)
    assert waits(state, of("fcfs-strict"), "small") == QueueHeadWaits(queue="all", job_id="gang")  # type: ignore[arg-type]
    assert started(state, of("fcfs-best-effort")) == ["small"]


def test_a_strict_queue_holds_no_other_queue() -> None:
    """The head uses no capacity that it cannot use now."""
    queues = (QueuePolicy(name="strict", projects=("a",), scheduling_policy="fcfs-strict"), QueuePolicy(name="rest"))
    gang = job("gang", gpus=8, at=T0 - HOUR, project_id="a")
    behind = job("behind", gpus=1, project_id="a")
    state = given(_HALF_USED, gang, behind, small(hours=40), as_of=T0)

    assert started(state, policy(queues=queues)) == ["small"]


def test_without_a_reservation_small_jobs_pass_for_ever() -> None:
    """Today's order: what fits starts."""
    state = given(_HALF_USED, _GANG, small(hours=40), as_of=T0)

    assert started(state, policy()) == started(state, of("fcfs-best-effort")) == ["small"]


def test_a_job_that_waited_long_reserves_what_running_jobs_release() -> None:
    """A job that may run longer waits; the reason names the job, its GPUs and the instant."""
    state = given(_HALF_USED, _GANG, small(hours=40), as_of=T0)

    assert started(state, _RESERVING) == []
    assert waits(state, _RESERVING, "gang") == ReservationHeld(job_id="gang", gpu_count=8, until=_ENDS_AT)  # type: ignore[arg-type]
    reason = waits(state, _RESERVING, "small")
    assert reason == CapacityReserved(job_id="gang", gpu_count=8, until=_ENDS_AT)  # type: ignore[arg-type]
    assert "Job gang has waited longer and reserves 8 GPUs" in reason.sentence()


def test_a_job_that_ends_before_the_reservation_passes() -> None:
    """By its time limit and the time to start; the schedule notes when it no longer does."""
    limit = (2 * HOUR - _START).total_seconds() / 3600.0
    fits = given(_HALF_USED, _GANG, small(hours=limit), as_of=T0)
    too_long = given(_HALF_USED, _GANG, small(hours=limit + 0.001), as_of=T0)
    as_of = TrackedInstant.of(T0 - MINUTE)

    assert started(fits, _RESERVING) == ["small"]
    assert started(fits, _RESERVING, T0 + timedelta(microseconds=1)) == []
    assert started(too_long, _RESERVING) == []
    schedule(fits, _RESERVING, as_of)
    assert as_of.next_change_at == T0


def test_a_job_passes_on_capacity_that_the_reservation_leaves() -> None:
    """Whatever its time limit: another node, or the rest of the same one."""
    other = given(_HALF_USED, node("n2"), running("q", "n2", gpus=6, since=T0, hours=40), _GANG,
                  small(gpus=2, hours=40), small("large", gpus=4, hours=40), as_of=T0)  # fmt: skip
    rest = given(_HALF_USED, job("gang", gpus=6, at=T0 - HOUR), small("fits", gpus=2, hours=40),
                 small("later", gpus=1, hours=40), as_of=T0)  # fmt: skip

    assert started(other, _RESERVING) == ["small"]
    assert started(rest, _RESERVING) == ["fits"]


def test_nobody_reserves_before_its_time() -> None:
    """The wait counts from the acceptance; the schedule notes its end."""
    state = given(_HALF_USED, job("gang", gpus=8, at=T0 - 20 * MINUTE), small(hours=40), as_of=T0)
    as_of = TrackedInstant.of(T0)

    assert [placed.job_id for placed in schedule(state, _RESERVING, as_of).placements] == ["small"]
    assert as_of.next_change_at == T0 + 10 * MINUTE


def test_a_job_that_fits_on_no_empty_node_reserves_nothing() -> None:
    """The next one that waited long does."""
    never = job("never", gpus=16, at=T0 - 2 * HOUR)
    state = given(_HALF_USED, never, _GANG, small(hours=40), as_of=T0)

    assert isinstance(waits(state, _RESERVING, "never"), GangIncomplete)
    assert isinstance(waits(state, _RESERVING, "gang"), ReservationHeld)


def test_capacity_of_jobs_that_have_just_started_counts() -> None:
    """Else each tick would find no reservation while the last passing job has no pods, and let another pass."""
    placed = job("r", gpus=4, at=T0 - HOUR, placed_on=("n1",), duration_seconds_max=3600.0)
    state = given(node("n1"), placed, _GANG, small(hours=40), as_of=T0)

    held = waits(state, _RESERVING, "gang")
    assert isinstance(held, ReservationHeld)
    assert held.until == T0 + HOUR + _START
    assert started(state, _RESERVING) == []


def test_a_reservation_holds_against_other_queues() -> None:
    """Also against jobs of higher priority, and of queues without reservations."""
    queues = (QueuePolicy(name="gangs", projects=("a",), reserve_after_seconds=60.0), QueuePolicy(name="rest"))
    gang = job("gang", gpus=8, priority=100, at=T0 - HOUR, project_id="a")
    high = job("high", gpus=4, priority=1000, at=T0)
    state = given(_HALF_USED, gang, high, as_of=T0)

    assert started(state, policy(queues=queues)) == []
    assert isinstance(waits(state, policy(queues=queues), "high"), CapacityReserved)
