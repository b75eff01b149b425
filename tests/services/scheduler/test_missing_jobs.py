"""Jobs of a kind that cannot be suspended, while the scheduler recreates them: a list without them is no end."""

import pytest
from tests.support.stories import MINUTE, T0, Story, TimedFact, given, job, policy

from gpu_autoscaler.events.job import JobPreempted, JobStarted
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import Runtime
from gpu_autoscaler_services.scheduler.missing_jobs import is_recreated

TRAIN = JobId("train")


def lost(attempt: int) -> Story:
    """Return the loss of this attempt."""
    return (TimedFact(JobPreempted(job_id=TRAIN, attempt=attempt, cause="gone", preempted_at=T0), T0),)


def started(minutes: int) -> Story:
    """Return a start this many minutes after the placement."""
    at = T0 + minutes * MINUTE
    return (TimedFact(JobStarted(job_id=TRAIN, kube_job="default/train", started_at=at, epoch=1, version=1), at),)


@pytest.mark.parametrize(
    ("attempt", "since", "expected"),
    [
        (3, lost(3), True),  # on its way off spot
        (1, lost(1), False),  # Volcano starts it again by itself
        (4, (), True),  # placed, and not made yet
        (4, started(1), False),  # it was, so somebody deleted it
        (1, (), False),
    ],
)
def test_only_jobs_that_we_delete_are_recreated(attempt: int, since: Story, expected: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Only of Volcano's kind: the other kinds are suspended and always exist."""
    for runtime in Runtime:
        state = given(job("train", runtime=runtime, placed_on=("n1",), attempt=attempt), since)
        assert is_recreated(state.jobs[TRAIN], policy(), T0) is (expected and runtime is Runtime.VOLCANO)
