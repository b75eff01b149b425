"""Cancellation of a job that is not accepted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.stories import MINUTE, T0, TimedFact, policy, record, request

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.job import JobCancelRequested, JobQueued, JobRejected
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.connection import Connection
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.scheduler.binder import Binder
from gpu_autoscaler_services.scheduler.service import ACCEPTANCE_SECONDS, Scheduler

JOB = JobId("train")
ASKED = TimedFact(request(job_id=JOB), T0)
CANCEL = TimedFact(JobCancelRequested(job_id=JOB, requested_by="ann", note="wrong image"), T0)


class Bench:
    """A scheduler with some known facts and a settable clock."""

    def __init__(self, store: SqliteStore, *known: TimedFact) -> None:
        self.now = T0
        self.known = record([*known, CANCEL])
        kube = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=lambda: self.now)  # never called
        view = StateView(fold(EMPTY_STATE, self.known))
        self.scheduler = Scheduler(view, policy(), store, Binder(kube, "default"), lambda: self.now)

    async def cancel(self, after: timedelta) -> object:
        """Pass the cancellation to the scheduler this long after the first time."""
        self.now = T0 + after
        return await self.scheduler.on_fact(self.known[-1])


@asynccontextmanager
async def bench(folder: Path, *known: TimedFact) -> AsyncIterator[Bench]:
    """A bench with an empty store."""
    store = await SqliteStore.open(folder / "store.db")
    try:
        yield Bench(store, *known)
    finally:
        await store.close()


async def test_cancel_waits_for_its_request_up_to_a_limit(tmp_path: Path) -> None:
    """The request may be in progress elsewhere; a dead letter is never answered."""
    async with bench(tmp_path, ASKED) as bench_:
        waits = Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
        assert await bench_.cancel(timedelta()) == waits
        assert await bench_.cancel(MINUTE - timedelta(seconds=1)) == waits
        with pytest.raises(PermanentError, match="job_id: cancellation of 'train' failed: no such job was accepted"):
            await bench_.cancel(MINUTE)


async def test_cancel_of_unknown_job_fails_at_once(tmp_path: Path) -> None:
    """The job was never requested, or was rejected."""
    refused = TimedFact(JobRejected(request_id="e", violations=(Violation("members", "is 0"),), job_id=JOB), T0)
    for known in ((), (ASKED, refused)):
        async with bench(tmp_path, *known) as bench_:
            with pytest.raises(PermanentError, match="no such job was accepted"):
                await bench_.cancel(timedelta())


async def test_job_accepted_meanwhile_is_cancelled(tmp_path: Path) -> None:
    """The redelivered cancellation finds the job."""
    async with bench(tmp_path, ASKED) as bench_:
        await bench_.cancel(timedelta())
        await bench_.scheduler.on_fact(bench_.known[0])
        finished = await bench_.cancel(timedelta(seconds=1))
        assert [fact.outcome for fact in finished] == ["cancelled"]  # type: ignore[attr-defined]


async def test_job_accepted_after_its_cancellation_was_refused_is_cancelled(tmp_path: Path) -> None:
    """The store was slow for more than a minute. The cancellation stays known, so nothing would ever create the job."""
    async with bench(tmp_path, ASKED) as bench_:
        await bench_.cancel(timedelta())
        with pytest.raises(PermanentError, match="no such job was accepted"):
            await bench_.cancel(MINUTE)
        (queued,) = await bench_.scheduler.on_fact(bench_.known[0])  # type: ignore[misc]
        assert isinstance(queued, JobQueued)
        (accepted,) = record([TimedFact(queued, bench_.now)])
        finished = await bench_.scheduler.on_fact(accepted)
        assert [(fact.outcome, fact.message) for fact in finished] == [  # type: ignore[union-attr]
            ("cancelled", "cancelled by ann: wrong image")
        ]
