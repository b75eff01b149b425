"""The scheduler: accepts jobs, finds out when each may start, and hears when one is lost."""

from collections.abc import Awaitable, Sequence
from datetime import datetime, timedelta
from typing import ClassVar

import msgspec
import structlog

from gpu_autoscaler.core.admission import admit, supply
from gpu_autoscaler.core.buying.sparing import is_to_leave_spot
from gpu_autoscaler.core.documents import effective_policy
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.job_budgets import budget_violation
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.queueing.scoring import estimates_due
from gpu_autoscaler.core.reports import mistakes_of
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.core.views import is_waiting, queue
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import (
    JobCancelRequested,
    JobEstimated,
    JobEstimateScored,
    JobFinished,
    JobListed,
    JobPlaced,
    JobPreempted,
    JobQueued,
    JobRejected,
    JobRequested,
)
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.kube.protocol import Now
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec, Mistake, Runtime
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scheduler.absent import is_made_anew, not_listed, was_made
from gpu_autoscaler_services.scheduler.attempts import losses
from gpu_autoscaler_services.scheduler.binder import Binder, NotInstalled, not_installed
from gpu_autoscaler_services.scheduler.budgets import Budgets
from gpu_autoscaler_services.scheduler.holding import Holding
from gpu_autoscaler_services.scheduler.past import Past

# A job that is being accepted is soon in the store: asked again after so much wall time, within so much cluster time.
ACCEPTANCE_SECONDS = 0.5
ACCEPTANCE_SECONDS_MAX = 60.0
# The gateway commits its row milliseconds after the request: one this young, in cluster time, may still get it.
PROMISE_AGE_MAX = timedelta(seconds=10)
_FOLDED_DOMAINS = frozenset({"pod", "node", "spot", "job", "demand", "policy", "scaling", "cost"})
log = structlog.get_logger()


class Scheduler:
    """Lets jobs in and lets them go. Of two of it both say the same under the same ids."""

    name: ClassVar[str] = "scheduler"
    consumes: ClassVar[tuple[type[Fact], ...]] = (
        JobRequested,
        JobCancelRequested,
        JobQueued,
        JobPlaced,
        JobFinished,
        JobListed,
        DemandReported,
    )
    folds: ClassVar[tuple[type[Fact], ...]] = tuple(fact for fact in FACTS if fact.domain() in _FOLDED_DOMAINS)
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        JobQueued,
        JobRejected,
        JobPlaced,
        JobPreempted,
        JobEstimated,
        JobEstimateScored,
        JobFinished,
    )
    urgent: ClassVar[tuple[type[Fact], ...]] = (JobQueued, JobPreempted, JobFinished, NodeObserved, PodGone)
    tick_seconds: ClassVar[float | None] = 2.0
    starts_from_snapshot: ClassVar[bool] = True
    concurrency_max: ClassVar[int] = 8  # one slow call to Kubernetes does not hold up the queue

    def __init__(
        self,
        view: StateView,
        policy: ScalingPolicy,
        store: Store,
        binder: Binder,
        now: Now,
        seed: ClusterState = EMPTY_STATE,
    ) -> None:
        """`now` is cluster time; `seed` the last state that was kept of streams that are lost."""
        self._view = view
        self._file = policy
        self._store = store
        self._binder = binder
        self._now = now
        self._past = Past(store, binder, seed)
        self._budgets = Budgets(store, binder)
        self._holding = Holding(binder)
        self._cancels_since: dict[JobId, datetime] = {}  # cancels of jobs that may still be accepted

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Let jobs in by this policy file from now on."""
        self._file = policy

    @property
    def _policy(self) -> ScalingPolicy:
        return effective_policy(self._file, self._view.state.policy_documents)

    # ---- placing

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the end of every attempt that lost a member, and a placement for every job that may start now.

        First of all, every accepted job that the stream lacks.
        """
        if lost := await self._past.jobs(self._view.state, now):
            return lost
        placed = [
            JobPlaced(
                job_id=placement.job_id,
                attempt=placement.attempt,
                node_uids=placement.node_uids,
                node_names=placement.node_names,
                placed_at=now,
            )
            for placement in schedule(self._view.state, self._policy, now).placements
        ]
        spent = await self._budgets.ends(self._view.state, now, self._is_ending)
        ended = {each.job_id for each in spent}
        unheld = await self._holding.unheld(self._view.state, self._policy, now, {each.job_id for each in placed})
        placed = [each for each in placed if each.job_id not in ended | unheld]
        return [*await self._lose(), *spent, *placed, *estimates_due(self._view.state, self._policy, now)]

    async def _lose(self) -> list[Fact]:
        """Attempts end, but not where pods went because their Job ends: that is no loss, and has its own fact."""
        lost: list[Fact] = []
        for job_id, facts in losses(self._view.state, self._policy).items():
            try:
                if not await self._binder.is_ending(job_id, await self._runtime_of(job_id)):
                    lost += facts
            except TransientError as exc:
                # Looked at again with the next tick; meanwhile other jobs are to be placed.
                log.warning("cannot ask whether a job lost a member or ends; asked again", error=str(exc))
                break
        return lost

    # ---- facts

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Accept, make, release, cancel, take back. Raises TransientError, PermanentError."""
        match recorded.fact:
            case JobRequested() as request:
                return await self._admit(request, recorded)
            case JobQueued() as queued:
                return await self._make(queued)
            case JobPlaced() as placed:
                return await self._release(placed)
            case JobCancelRequested() as request:
                return await self._cancel(request)
            case JobFinished() as finished:
                return await self._end(finished)
            case JobListed() as listed:
                return await self._heal(listed)
            case DemandReported() as wish:
                return _heard(wish, recorded)
            case other:
                raise PermanentError(f"{other.type_name()} is none of ours: the consumer's filter is too wide")

    async def _admit(self, request: JobRequested, recorded: Recorded) -> Outputs:
        """Put the job on record, then say so: a job that is queued is never lost."""
        envelope = recorded.envelope
        known = supply(self._view.state, self._policy)
        spec = admit(
            request,
            event_id=envelope.id,
            at=envelope.time,
            now=self._now(),
            policy=self._policy,
            gpu_models=known.gpu_models,
            gpus_per_node_max=known.gpus_per_node_max,
            shares=known.shares,
        )
        if not isinstance(spec, JobSpec):
            return _refused(request, envelope.id, spec)
        row = await self._store.job(spec.job_id)
        if row is None and (mistake := budget_violation(spec, self._view.state)) is not None:
            return _refused(request, envelope.id, (mistake,))
        if row is None and not await self._binder.serves(spec.runtime):
            return _refused(request, envelope.id, (Mistake("runtime", not_installed(spec.runtime)),))
        waiting_count = len(queue(self._view.state))
        # A row: the job is in already, or the gateway has promised it (202). No queue is too full for it.
        if row is None and waiting_count >= self._policy.queue_count_max:
            if abs(self._now() - envelope.time) < PROMISE_AGE_MAX:
                return Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
            reason = f"{waiting_count} jobs wait already, the policy allows {self._policy.queue_count_max}; try later"
            return _refused(request, envelope.id, (Mistake("queue", reason),))
        now = self._now()
        acceptance = await self._store.accept_job(spec, request_digest=request_digest(request), accepted_at=now)
        if acceptance == "conflict":
            reason = f"{spec.job_id!r} is taken by another request with another body"
            return _refused(request, envelope.id, (Mistake("job_id", reason),))
        if row is not None and row.outcome is not None:
            return ()  # a late repeat: the state may have forgotten the job, and would run it once more
        return (JobQueued(job_id=spec.job_id, spec=spec, queued_at=now),)

    async def _make(self, queued: JobQueued) -> Sequence[Fact]:
        if self._is_ending(queued.job_id):
            return ()
        return await self._unless_not_installed(queued.job_id, self._binder.create(queued.spec, self._view.state))

    async def _release(self, placed: JobPlaced) -> Sequence[Fact]:
        job = self._view.state.jobs.get(placed.job_id)
        if self._is_ending(placed.job_id) or job is None or job.queued is None:
            return ()
        spec = job.queued.spec
        if is_to_leave_spot(job, self._policy, placed.placed_at):
            # To Kubernetes it is what must not be interrupted, so that it binds no member to spot that is free.
            spec = msgspec.structs.replace(spec, is_preemptible=False)
        released = self._binder.release(spec, placed, self._view.state)
        return await self._unless_not_installed(placed.job_id, released)

    async def _unless_not_installed(self, job_id: JobId, effect: Awaitable[None]) -> Sequence[Fact]:
        """Carry it out. The end of a job whose kind went after it was accepted, or that somebody else accepted."""
        try:
            await effect
        except NotInstalled as exc:
            return (JobFinished(job_id=job_id, outcome="failed", finished_at=self._now(), message=str(exc)),)
        return ()

    async def _runtime_of(self, job_id: JobId) -> Runtime:
        """What the job is made of, also when the state has forgotten it."""
        job = self._view.state.jobs.get(job_id)
        if job is not None and job.queued is not None:
            return job.queued.spec.runtime
        row = await self._store.job(job_id)
        return Runtime.JOB if row is None else row.spec.runtime

    async def _cancel(self, request: JobCancelRequested) -> Outputs:
        """End the job on record; its Kubernetes Job goes as the effect of that."""
        row = await self._store.job(request.job_id)
        if row is None and self._may_be_accepted(request.job_id):
            return Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
        self._cancels_since.pop(request.job_id, None)
        if row is None:
            raise PermanentError(f"job_id: {request.job_id!r} was never accepted: there is nothing to cancel")
        if row.outcome is not None:
            return ()
        by = f" by {request.requested_by}" if request.requested_by else ""
        note = f": {request.note}" if request.note else ""
        message = f"cancelled{by}{note}"
        return (JobFinished(job_id=request.job_id, outcome="cancelled", finished_at=self._now(), message=message),)

    def _may_be_accepted(self, job_id: JobId) -> bool:
        """True for a request without an answer, for a while: what was set aside is never answered."""
        job = self._view.state.jobs.get(job_id)
        if job is None or job.requested is None or job.rejected is not None:
            return False
        now = self._now()
        since = self._cancels_since.setdefault(job_id, now)
        return now - since < timedelta(seconds=ACCEPTANCE_SECONDS_MAX)

    async def _end(self, finished: JobFinished) -> Outputs:
        await self._store.finish_job(finished.job_id, outcome=finished.outcome, finished_at=finished.finished_at)
        if finished.outcome != "completed":
            await self._binder.withdraw(finished.job_id, await self._runtime_of(finished.job_id))
        return ()

    async def _heal(self, listed: JobListed) -> Outputs:
        """Make what was never made, and end what somebody took away: both while nobody watched."""
        ended: list[Fact] = []
        for queued, job in not_listed(self._view.state, listed):
            if await self._binder.has(queued.job_id, queued.spec.runtime):
                continue  # made since
            if is_made_anew(job, self._policy, self._now()):
                if job.placed is not None and not is_waiting(job):
                    ended += await self._release(job.placed)
            elif was_made(self._view.state, job):
                message = "its Kubernetes Job is gone, and nobody saw how it ended"
                now = self._now()
                ended.append(JobFinished(job_id=queued.job_id, outcome="cancelled", finished_at=now, message=message))
            elif job.placed is None:
                ended += await self._make(queued)
            else:
                ended += await self._release(job.placed)
        return ended

    def _is_ending(self, job_id: JobId) -> bool:
        """True for a job that is over or to be cancelled: nothing more is made for it."""
        job = self._view.state.jobs.get(job_id)
        return job is not None and (job.finished is not None or job.cancel_requested is not None)


def _heard(wish: DemandReported, recorded: Recorded) -> Outputs:
    """A wish that can be meant is in the state already; one that cannot is kept where somebody can look at it."""
    mistakes = mistakes_of(wish, recorded.envelope.time)
    reason = "; ".join(f"{mistake.field}: {mistake.reason}" for mistake in mistakes)
    return Outcome(set_aside_reason=f"wish of {wish.source!r} refused: {reason}") if mistakes else ()


def _refused(request: JobRequested, event_id: str, mistakes: tuple[Mistake, ...]) -> Outcome:
    """Tell who asked, and keep the request where somebody can look at it."""
    reason = "; ".join(f"{mistake.field}: {mistake.reason}" for mistake in mistakes)
    rejected = JobRejected(
        request_id=event_id,
        mistakes=mistakes,
        # An id that is taken belongs to another job, about which this says nothing.
        job_id=None if any(mistake.field == "job_id" for mistake in mistakes) else request.job_id,
        job_name=request.job_name,
    )
    return Outcome(facts=(rejected,), set_aside_reason=f"job refused: {reason}")
