"""Accepted jobs that a new stream does not have are published again, and nothing runs twice."""

from collections.abc import Mapping

import pytest
from tests.services.scheduler.test_service import TRAIN, Bench, bench
from tests.support.stories import MINUTE, T0, TimedFact, given, job, request

from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted, JobQueued, JobStarted
from gpu_autoscaler.model.ids import JobId, NodeUid
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler.runtime.publisher import as_outcome
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.recovery import JobRecovery

__all__ = ["bench"]
PLACED = JobPlaced(job_id=TRAIN, attempt=2, node_uids=(NodeUid("uid-n1"),), node_names=("n1",), placed_at=T0)


def recovery(bench: Bench, seed: ClusterState = EMPTY_STATE, *ends: JobFinished) -> JobRecovery:
    """Return the scheduler's recovery with this seed, and the ends of jobs that the stream has."""

    async def stored_ends() -> Mapping[JobId, JobFinished]:
        return {end.job_id: end for end in ends}

    return JobRecovery(bench.store, Binder(bench.here.kube, "default"), seed, stored_ends)


async def test_stored_job_is_published_until_stream_has_it(bench: Bench) -> None:
    """Queued again, as of its acceptance; nothing once it is known."""
    queued = await bench.accepted()
    before = recovery(bench)
    assert await before.jobs(EMPTY_STATE, T0 + MINUTE) == [queued]
    assert await before.jobs(EMPTY_STATE, T0 + MINUTE) == [queued], "the stream did not take it"
    assert await before.jobs(bench.view.state, T0 + MINUTE) == []


async def test_a_tick_restores_a_limited_number_of_jobs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest follows with the next ticks."""
    monkeypatch.setattr("gpu_autoscaler_services.scheduler.recovery.SAID_COUNT_MAX", 2)
    queued = [(await bench.handle(request(name))).facts[0] for name in ("a", "b", "c")]
    before = recovery(bench)
    assert await before.jobs(EMPTY_STATE, T0) == queued[:2]
    known = given(tuple(TimedFact(fact, T0) for fact in queued[:2]))
    assert await before.jobs(known, T0) == queued[2:]


async def test_finished_job_is_not_published_again(bench: Bench) -> None:
    """Its end is stored."""
    await bench.accepted()
    await bench.store.finish_job(TRAIN, outcome="completed", finished_at=T0)
    assert await recovery(bench).jobs(EMPTY_STATE, T0 + MINUTE) == []


async def test_attempts_continue_after_recovery(bench: Bench) -> None:
    """The last snapshot has the attempt, and whether it was lost since."""
    queued = await bench.accepted()
    placed = given((TimedFact(queued, T0), TimedFact(PLACED, T0)))
    assert await recovery(bench, placed).jobs(EMPTY_STATE, T0) == [queued, PLACED]
    preempted = JobPreempted(job_id=TRAIN, attempt=2, cause="its node went", preempted_at=T0)
    lost = given((TimedFact(queued, T0), TimedFact(PLACED, T0), TimedFact(preempted, T0)))
    await bench.handle(queued)  # its Kubernetes Job is there
    assert await recovery(bench, lost).jobs(EMPTY_STATE, T0) == [queued, PLACED, preempted]


async def test_started_job_deleted_unseen_is_cancelled(bench: Bench) -> None:
    """It had started by the last snapshot: its end is published before its acceptance."""
    queued = await bench.accepted()
    started = JobStarted(epoch=1, version=1, job_id=TRAIN, kube_job="default/train", started_at=T0)
    ran = given((TimedFact(queued, T0), TimedFact(PLACED, T0), TimedFact(started, T0)))
    ended, again = await recovery(bench, ran).jobs(EMPTY_STATE, T0)
    assert isinstance(ended, JobFinished)
    assert (ended.outcome, again) == ("cancelled", queued)
    await bench.handle(queued)  # there it is
    assert await recovery(bench, ran).jobs(EMPTY_STATE, T0) == [queued, PLACED]


async def test_a_job_that_ended_after_the_backup_is_not_run_again(bench: Bench) -> None:
    """The state has forgotten it hours after its end, last night's store takes it for unfinished, the stream has its
    end."""
    await bench.accepted()
    end = JobFinished(job_id=TRAIN, outcome="completed", finished_at=T0)

    assert await recovery(bench, EMPTY_STATE, end).jobs(EMPTY_STATE, T0 + MINUTE) == []

    row = await bench.store.job(TRAIN)
    assert row is not None
    assert (row.outcome, row.finished_at) == ("completed", T0)


async def test_rows_of_an_older_store_are_restored_from_the_stream(bench: Bench) -> None:
    """Accepted and ended after the backup, or before it with a database that is new; those that are there stay."""
    queued = await bench.accepted()
    ended = JobFinished(job_id=JobId("ended"), outcome="failed", finished_at=T0 + MINUTE)
    later = (*job("later", at=T0 + MINUTE), *job("ended", at=T0), TimedFact(ended, T0 + MINUTE))
    bench.record_story((TimedFact(queued, T0), *later))

    assert await recovery(bench).jobs(bench.view.state, T0 + MINUTE) == []

    rows = {row.spec.job_id: row.outcome for row in (await bench.store.jobs()).rows}
    assert rows == {TRAIN: None, "later": None, "ended": "failed"}
    again = await bench.store.accept_job(
        queued.spec, request_digest=request_digest(request("train")), accepted_at=T0 + MINUTE
    )
    assert again == "same"


async def test_nothing_is_placed_before_all_jobs_are_restored(bench: Bench) -> None:
    """A later job would take the place of an earlier one."""
    await bench.handle(request("train"))
    bench.record_story(job("late"))
    (queued,) = as_outcome(await bench.scheduler.on_tick(T0)).facts
    assert isinstance(queued, JobQueued)
    assert queued.job_id == TRAIN
