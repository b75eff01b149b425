"""Job states, and the order of the queue."""

import msgspec
import pytest
from tests.support.stories import EPOCH, MINUTE, T0, Story, TimedFact, bought, given, job, node, pod, purchase

from gpu_autoscaler.core.state.queries import job_pods, job_state, pods_by_node, queue
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobRejected, JobStarted
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobState, Violation
from gpu_autoscaler.model.reasons.buy import UnmetDemand

TRAIN = JobId("train")
ACCEPTED = job("train")
PLACED = job("train", placed_on=("n1",))
RUNNING = job("train", placed_on=("n1",), is_running=True)
PREEMPTED: Story = (
    TimedFact(JobPreempted(job_id=TRAIN, attempt=1, cause="notice", preempted_at=T0 + MINUTE), T0 + MINUTE),
)
PLACED_AGAIN = job("train", placed_on=("n2",), attempt=2, at=T0 + 2 * MINUTE)[-1:]
STARTED_AGAIN: Story = (
    TimedFact(
        JobStarted(epoch=EPOCH, version=2, job_id=TRAIN, kube_job="jobs/train", started_at=T0 + 3 * MINUTE),
        T0 + 3 * MINUTE,
    ),
)
REJECTED: Story = (
    TimedFact(JobRejected(request_id="r", job_id=TRAIN, violations=(Violation("job_id", "is taken"),)), T0 + MINUTE),
)
CANCEL: Story = (TimedFact(JobCancelRequested(job_id=TRAIN), T0),)
FOR_TRAIN = purchase(
    "buy-n1", reason=UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=1)
)


def finished(outcome: str) -> Story:
    """The end of the job."""
    return (TimedFact(msgspec.convert({"job_id": "train", "outcome": outcome, "finished_at": T0}, JobFinished), T0),)


@pytest.mark.parametrize(
    ("story", "state"),
    [
        (ACCEPTED[:1], JobState.PENDING),
        (ACCEPTED, JobState.QUEUED),
        (ACCEPTED + bought(FOR_TRAIN), JobState.PROVISIONING),
        (ACCEPTED + bought(FOR_TRAIN, is_refused=True), JobState.QUEUED),
        (ACCEPTED + bought(FOR_TRAIN) + node("n1", gpus_allocatable=8)[-1:], JobState.QUEUED),
        (ACCEPTED + bought(FOR_TRAIN) + node("n1", gpus_allocatable=0)[-1:], JobState.PROVISIONING),
        (PLACED, JobState.PROVISIONING),
        (RUNNING, JobState.RUNNING),
        (RUNNING + PREEMPTED, JobState.PREEMPTED),
        (RUNNING + PREEMPTED + PLACED_AGAIN, JobState.PROVISIONING),
        (RUNNING + PREEMPTED + PLACED_AGAIN + STARTED_AGAIN, JobState.RUNNING),
        (RUNNING + finished("completed"), JobState.COMPLETED),
        (RUNNING + finished("failed"), JobState.FAILED),
        (ACCEPTED + CANCEL + finished("cancelled"), JobState.CANCELLED),
        (finished("cancelled") + ACCEPTED, JobState.CANCELLED),
        (RUNNING + REJECTED, JobState.RUNNING),
        (ACCEPTED[:1] + REJECTED, None),
        ((), None),
    ],
)
def test_every_job_state(story: Story, state: JobState | None) -> None:
    """A rejected or unknown job has no state."""
    assert job_state(given(story), TRAIN) is state


def test_the_queue_order() -> None:
    """Accepted and preempted jobs, not placed, canceled or finished ones; by priority, time and id."""
    state = given(
        job("late", at=T0 + MINUTE),
        job("b"),
        job("a"),
        job("urgent", priority=1000, at=T0 + 2 * MINUTE),
        job("placed", placed_on=("n1",)),
        job("asked")[:1],
        RUNNING,
        PREEMPTED,
    )
    names = [record.queued.job_id for record in queue(state) if record.queued is not None]

    assert names == ["urgent", "a", "b", "train", "late"]


@pytest.mark.parametrize("leaving", [CANCEL, finished("failed")])
def test_a_finished_job_leaves_the_queue(leaving: Story) -> None:
    """Nothing is bought for it."""
    assert queue(given(ACCEPTED, leaving)) == ()


def test_pods_by_node_and_by_job() -> None:
    """Finished pods use no capacity but belong to their job."""
    state = given(
        pod("b", on="n1", job_id="train"),
        pod("a", on="n1"),
        pod("done", on="n1", phase="succeeded", job_id="train"),
        pod("waits"),
    )

    assert {name: [each.name for each in pods] for name, pods in pods_by_node(state).items()} == {"n1": ["a", "b"]}
    assert [each.name for each in job_pods(state, TRAIN)] == ["b", "done"]
