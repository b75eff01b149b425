"""Accepted jobs that the stream does not have are said again, and nothing runs twice for it."""

from tests.services.scheduler.test_service import TRAIN, Desk, desk
from tests.support.stories import MINUTE, T0, Told, given, job, request

from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted, JobQueued, JobStarted
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.recovery import JobRecovery

__all__ = ["desk"]
PLACED = JobPlaced(job_id=TRAIN, attempt=2, node_uids=(NodeUid("uid-n1"),), node_names=("n1",), placed_at=T0)


def past(desk: Desk, seed: ClusterState = EMPTY_STATE) -> JobRecovery:
    """What the scheduler has of before."""
    return JobRecovery(desk.store, Binder(desk.here.kube, "default"), seed)


async def test_a_job_of_the_store_is_said_again_until_the_stream_has_it(desk: Desk) -> None:
    """Accepted before: queued again, as of then. Nothing more is said once it is known."""
    queued = await desk.accepted()
    before = past(desk)
    assert await before.jobs(EMPTY_STATE, T0 + MINUTE) == [queued]
    assert await before.jobs(EMPTY_STATE, T0 + MINUTE) == [queued], "the stream did not take it"
    assert await before.jobs(desk.view.state, T0 + MINUTE) == []


async def test_a_job_that_is_over_is_not_said_again(desk: Desk) -> None:
    """Its end is on record."""
    await desk.accepted()
    await desk.store.finish_job(TRAIN, outcome="completed", finished_at=T0)
    assert await past(desk).jobs(EMPTY_STATE, T0 + MINUTE) == []


async def test_attempts_are_counted_on(desk: Desk) -> None:
    """The last snapshot knows the attempt, and whether it was lost since."""
    queued = await desk.accepted()
    placed = given((Told(queued, T0), Told(PLACED, T0)))
    assert await past(desk, placed).jobs(EMPTY_STATE, T0) == [queued, PLACED]
    preempted = JobPreempted(job_id=TRAIN, attempt=2, cause="its node went", preempted_at=T0)
    lost = given((Told(queued, T0), Told(PLACED, T0), Told(preempted, T0)))
    await desk.hear(queued)  # its Kubernetes Job is there
    assert await past(desk, lost).jobs(EMPTY_STATE, T0) == [queued, PLACED, preempted]


async def test_a_job_that_ran_and_whose_kubernetes_job_went_unseen_is_not_run_again(desk: Desk) -> None:
    """It had started by the last snapshot: it is cancelled, and its end comes before its acceptance."""
    queued = await desk.accepted()
    started = JobStarted(epoch=1, version=1, job_id=TRAIN, kube_job="default/train", started_at=T0)
    ran = given((Told(queued, T0), Told(PLACED, T0), Told(started, T0)))
    ended, again = await past(desk, ran).jobs(EMPTY_STATE, T0)
    assert isinstance(ended, JobFinished)
    assert (ended.outcome, again) == ("cancelled", queued)
    await desk.hear(queued)  # there it is
    assert await past(desk, ran).jobs(EMPTY_STATE, T0) == [queued, PLACED]


async def test_the_scheduler_places_nothing_before_all_jobs_are_known(desk: Desk) -> None:
    """A job that came after the loss would take the place of one that was there before."""
    await desk.hear(request("train"))
    desk.knows(job("late"))
    (said,) = as_outcome(await desk.scheduler.on_tick(T0)).facts
    assert isinstance(said, JobQueued)
    assert said.job_id == TRAIN
