"""What a cancel of a job that is not accepted comes to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.stories import MINUTE, T0, Told, policy, record, request

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.job import JobCancelRequested, JobRejected
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
ASKED = Told(request(job_id=JOB), T0)
CANCEL = Told(JobCancelRequested(job_id=JOB), T0)


class Desk:
    """A scheduler that knows some facts, with a clock to be set."""

    def __init__(self, store: SqliteStore, *known: Told) -> None:
        self.now = T0
        self.known = record([*known, CANCEL])
        kube = KubeClient(Connection(base_url="http://127.0.0.1:9"), now=lambda: self.now)  # never called
        view = StateView(fold(EMPTY_STATE, self.known))
        self.scheduler = Scheduler(view, policy(), store, Binder(kube, "default"), lambda: self.now)

    async def cancel(self, after: timedelta) -> object:
        """What the scheduler says to the cancel when it is given it this long after the first time."""
        self.now = T0 + after
        return await self.scheduler.on_fact(self.known[-1])


@asynccontextmanager
async def desk(folder: Path, *known: Told) -> AsyncIterator[Desk]:
    """A desk with an empty store."""
    store = await SqliteStore.open(folder / "store.db")
    try:
        yield Desk(store, *known)
    finally:
        await store.close()


async def test_a_cancel_waits_for_the_answer_to_its_request_and_not_for_ever(tmp_path: Path) -> None:
    """The request may be in another hand at this moment; one that was set aside is never answered."""
    async with desk(tmp_path, ASKED) as front:
        waits = Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
        assert await front.cancel(timedelta()) == waits
        assert await front.cancel(MINUTE - timedelta(seconds=1)) == waits
        with pytest.raises(PermanentError, match="job_id: 'train' was never accepted: there is nothing to cancel"):
            await front.cancel(MINUTE)


async def test_a_cancel_of_nothing_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody asked for such a job, or it was refused."""
    refused = Told(JobRejected(request_id="e", mistakes=(Violation("members", "is 0"),), job_id=JOB), T0)
    for known in ((), (ASKED, refused)):
        async with desk(tmp_path, *known) as front:
            with pytest.raises(PermanentError, match="never accepted"):
                await front.cancel(timedelta())


async def test_a_job_that_is_accepted_meanwhile_is_cancelled(tmp_path: Path) -> None:
    """The wait was worth it."""
    async with desk(tmp_path, ASKED) as front:
        await front.cancel(timedelta())
        await front.scheduler.on_fact(front.known[0])
        finished = await front.cancel(timedelta(seconds=1))
        assert [fact.outcome for fact in finished] == ["cancelled"]  # type: ignore[attr-defined]
