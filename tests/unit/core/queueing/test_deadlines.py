"""Deadlines of jobs: accepted if the estimate meets them, refused with the estimate, and honored by order."""

from datetime import datetime, timedelta

import pytest
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, given, job, node, offer, on_sale, policy

from gpu_autoscaler.core.demand.queue_order import ordered_queue
from gpu_autoscaler.core.queueing.deadlines import deadline_violations, with_start_deadline
from gpu_autoscaler.core.queueing.estimates import START_SECONDS
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobQueued
from gpu_autoscaler.model.jobs import JobSpec

FREE: Story = node("n1")
SOLD: Story = on_sale(offer())
BOOT = timedelta(seconds=offer().boot_seconds + START_SECONDS)


def spec(**changes: object) -> JobSpec:
    """A job with eight GPUs, an hour of work and these deadlines."""
    (queued,) = [told.fact for told in job("train", **changes) if isinstance(told.fact, JobQueued)]  # type: ignore[arg-type]
    return queued.spec


def refused(state: ClusterState, **deadlines: datetime) -> list[str]:
    """Return the fields of a new job with an hour of work that are refused."""
    new = spec(duration_seconds_max=3600.0, **deadlines)
    return [violation.field for violation in deadline_violations(new, state, policy(), T0)]


def test_a_start_is_refused_that_comes_before_the_estimate() -> None:
    """Free capacity takes it in seconds, a node that is bought when it has booted."""
    assert refused(given(FREE), start_by_at=T0 + MINUTE) == []
    assert refused(given(SOLD), start_by_at=T0 + BOOT) == []
    assert refused(given(SOLD), start_by_at=T0 + BOOT - SECOND) == ["start_by_at"]


def test_an_end_is_refused_that_comes_before_start_and_work() -> None:
    """An hour of work that starts when the node has booted."""
    assert refused(given(SOLD), finish_by_at=T0 + BOOT + HOUR) == []
    assert refused(given(SOLD), finish_by_at=T0 + BOOT + HOUR - SECOND) == ["finish_by_at"]


def test_without_a_run_time_the_time_limit_has_to_fit() -> None:
    """It may run that long."""
    new = spec(finish_by_at=T0 + 23 * HOUR)
    (violation,) = deadline_violations(new, given(FREE), policy(), T0)
    assert "it runs for 24 h" in violation.reason
    assert "expected to start at 2026-11-21 12:00:10 UTC (usable nodes have free capacity)" in violation.reason


@pytest.mark.parametrize("field", ["start_by_at", "finish_by_at"])
def test_an_unknown_start_refuses_only_what_is_over(field: str) -> None:
    """Nothing is known of offers: the job may wait and start in time."""
    assert refused(EMPTY_STATE, **{field: T0 + 2 * HOUR}) == []
    assert refused(EMPTY_STATE, **{field: T0 - SECOND}) == [field]


def test_both_deadlines_are_refused_at_once() -> None:
    """Each with its own estimate."""
    assert refused(given(SOLD), start_by_at=T0, finish_by_at=T0 + HOUR) == ["start_by_at", "finish_by_at"]


def test_the_queue_goes_by_the_latest_start_that_both_deadlines_allow() -> None:
    """An end in two hours with an hour of work is a start within an hour."""
    ends = with_start_deadline(spec(duration_seconds_max=3600.0, finish_by_at=T0 + 2 * HOUR), EMPTY_STATE)
    assert ends.start_by_at == T0 + HOUR
    assert with_start_deadline(spec(start_by_at=T0 + MINUTE), EMPTY_STATE).start_by_at == T0 + MINUTE

    first = job("a", start_by_at=T0 + 90 * MINUTE)
    second = job("b", duration_seconds_max=3600.0, finish_by_at=T0 + 2 * HOUR, start_by_at=ends.start_by_at)
    state = given(first, second)
    order = [record.queued.job_id for record in ordered_queue(state, policy(), T0) if record.queued is not None]
    assert order == ["b", "a"]
