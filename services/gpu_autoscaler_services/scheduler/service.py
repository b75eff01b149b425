"""The scheduler: admits jobs, decides when each may start, and ends attempts that lost a member."""

from collections.abc import Awaitable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

import msgspec
import structlog

from gpu_autoscaler.core.demand.quotas import queue_violations
from gpu_autoscaler.core.demand.resource_quotas import quota_violation
from gpu_autoscaler.core.intake.admission import supply
from gpu_autoscaler.core.intake.reported_demand import violations_of
from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.placement.measured_use import LEAST_UTILIZED
from gpu_autoscaler.core.policy.documents import effective_policy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.spot_waits import must_leave_spot
from gpu_autoscaler.core.queueing.deadlines import deadline_violations, with_start_deadline
from gpu_autoscaler.core.queueing.job_budgets import budget_violation
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.queueing.scoring import estimates_due
from gpu_autoscaler.core.state.queries import is_waiting, queue
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import STATE_FACTS
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarized
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
    JobResynced,
)
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.kube.pod_templates.admission import FIELD, Admitted, admit
from gpu_autoscaler.kube.protocol import Now
from gpu_autoscaler.model.errors import PermanentError, RequestRefused, TransientError
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec, Runtime, Violation, template_digest
from gpu_autoscaler.model.scheduling import all_terms
from gpu_autoscaler.runtime.digests import request_digest
from gpu_autoscaler.runtime.metrics import package_version
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scheduler.attempts import losses, preempted_attempts
from gpu_autoscaler_services.scheduler.binder import Binder, InvalidJob, NotInstalled, not_installed
from gpu_autoscaler_services.scheduler.job_budgets import JobBudgets
from gpu_autoscaler_services.scheduler.missing_jobs import is_recreated, missing_jobs, was_created
from gpu_autoscaler_services.scheduler.namespaces import ProjectNamespaces
from gpu_autoscaler_services.scheduler.recovery import JobRecovery, StoredEnds, no_ends
from gpu_autoscaler_services.scheduler.suspension import Suspension

# A job that is being accepted is soon in the store: redelivery interval in wall time, and its limit in cluster time.
ACCEPTANCE_SECONDS = 0.5
ACCEPTANCE_SECONDS_MAX = 60.0
# The gateway commits its row milliseconds after the request: the row of a request this young may be missing yet.
PROMISE_AGE_MAX = timedelta(seconds=10)
log = structlog.get_logger()


class Scheduler:
    """Admits and releases jobs. Two concurrent schedulers publish the same facts under the same ids."""

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
    folds: ClassVar[tuple[type[Fact], ...]] = STATE_FACTS
    publishes: ClassVar[tuple[type[Fact], ...]] = (
        JobQueued,
        JobRejected,
        JobPlaced,
        JobPreempted,
        JobEstimated,
        JobEstimateScored,
        JobFinished,
        JobResynced,
    )
    resyncs: ClassVar[tuple[type[Fact], ...]] = (JobResynced,)
    urgent: ClassVar[tuple[type[Fact], ...]] = (JobQueued, JobPreempted, JobFinished, NodeObserved, PodGone)
    tick_seconds: ClassVar[float | None] = 2.0
    concurrency_max: ClassVar[int] = 8  # one slow call to Kubernetes must not delay the queue

    def __init__(
        self,
        view: StateView,
        policy: ScalingPolicy,
        store: Store,
        binder: Binder,
        now: Now,
        seed: ClusterState = EMPTY_STATE,
        ends: StoredEnds = no_ends,
    ) -> None:
        """`now`: cluster time. `seed`: the last snapshot of streams that are lost. `ends`: of jobs, in the stream."""
        self._view = view
        self._file = policy
        self._store = store
        self._binder = binder
        self._namespaces = ProjectNamespaces(binder.kube, now)
        self._now = now
        self._recovery = JobRecovery(store, binder, seed, ends)
        self._job_budgets = JobBudgets(store, binder)
        self._suspension = Suspension(binder)
        self._cancels_since: dict[JobId, datetime] = {}  # cancellations of jobs that may still be accepted

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Use this policy file from now on."""
        if not issubclass(type(self), scheduler_for(policy)):
            log.warning("gpu use not measured before a restart", placement=policy.placement)
        self._file = policy

    def living(self) -> Iterator[Fact]:
        """Yield every job that has not ended."""
        for job_id, job in self._view.state.jobs.items():
            if job.queued is not None and job.finished is None:
                yield JobResynced(
                    job_id=job_id,
                    requested=job.requested,
                    requested_at=job.requested_at,
                    queued=job.queued,
                    cancel_requested=job.cancel_requested,
                    placed=job.placed,
                    preempted=job.preempted,
                    started=job.started,
                    estimated=job.estimated,
                    scored=job.scored,
                    completed_pods=job.completed_pods,
                )

    @property
    def _policy(self) -> ScalingPolicy:
        return effective_policy(self._file, self._view.state.policy_documents)

    # ---- placing

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the end of each attempt that lost a member, and a placement for each job that may start now.

        Until the stream has all accepted jobs, return those that it lacks instead.
        """
        if missing := await self._recovery.jobs(self._view.state, now):
            return missing
        as_of = TrackedInstant.of(now)
        scheduled = schedule(self._view.state, self._policy, as_of)
        placed = [
            JobPlaced(
                job_id=placement.job_id,
                attempt=placement.attempt,
                retries_used_count=placement.retries_used_count,
                node_uids=placement.node_uids,
                node_names=placement.node_names,
                placed_at=now,
                gpu_use_ratios=placement.gpu_use_ratios,
            )
            for placement in scheduled.placements
        ]
        spent = await self._job_budgets.ends(self._view.state, as_of, self._is_ending)
        ended = {finished.job_id for finished in spent}
        unsuspended = await self._suspension.not_suspended(
            self._view.state, self._policy, as_of, {placement.job_id for placement in placed}
        )
        placed = [placement for placement in placed if placement.job_id not in ended | unsuspended]
        estimates = estimates_due(self._view.state, self._policy, now)
        lost = await self._lost_attempts(as_of)
        ending = {fact.job_id for fact in (*spent, *lost) if isinstance(fact, JobPreempted | JobFinished)}
        preempted = preempted_attempts(self._view.state, self._policy, as_of, scheduled, ending)
        facts = (*lost, *spent, *preempted, *placed, *estimates)
        return Outcome(facts=facts, next_change_at=as_of.next_change_at)

    async def _lost_attempts(self, as_of: TrackedInstant) -> list[Fact]:
        """Return the ends of attempts; pods that end with their own Job are no loss."""
        ends: list[Fact] = []
        for job_id, facts in losses(self._view.state, self._policy, as_of).items():
            try:
                if not await self._binder.is_ending(job_id, *await self._place_of(job_id)):
                    ends += facts
            except TransientError as exc:
                # Retried with the next tick; other jobs are placed meanwhile.
                log.warning("job lookup for a lost member failed, retried", job_id=job_id, error=str(exc))
                break
        return ends

    # ---- facts

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Admit, create, release, cancel or withdraw a job. Raises TransientError, PermanentError."""
        match recorded.fact:
            case JobRequested() as request:
                return await self._admit(request, recorded)
            case JobQueued() as queued:
                return await self._create(queued)
            case JobPlaced() as placed:
                return await self._release(placed)
            case JobCancelRequested() as request:
                return await self._cancel(request)
            case JobFinished() as finished:
                return await self._end(finished)
            case JobListed() as listed:
                return await self._reconcile(listed)
            case DemandReported() as report:
                return _checked(report, recorded)
            case other:
                raise PermanentError(f"unexpected fact {other.type_name()}: narrow the consumer's filter")

    async def _admit(self, request: JobRequested, recorded: Recorded) -> Outputs:
        """Store the job, then publish it: a queued job is never lost."""
        envelope = recorded.envelope
        admitted = admit(
            request,
            event_id=envelope.id,
            at=envelope.time,
            now=self._now(),
            policy=self._policy,
            supply=supply(self._view.state, self._policy),
        )
        unknown = _unknown_fields(envelope)
        if not isinstance(admitted, Admitted):
            return _refused(request, envelope.id, (*unknown, *admitted))
        row = await self._store.job(admitted.spec.job_id)
        if row is None and unknown:
            return _refused(request, envelope.id, unknown)
        spec = await self._with_volumes(admitted)
        if row is None and not isinstance(spec, JobSpec):
            return _refused(request, envelope.id, (spec,))
        # With a row the job is accepted already, or the gateway has promised it (202): never refused for a claim, for a
        # full queue.
        spec = spec if isinstance(spec, JobSpec) else admitted.spec
        # Where its objects are: recorded, so that the job stays there whatever the policy says later.
        spec = msgspec.structs.replace(spec, namespace=spec.namespace or self._binder.namespace)
        state = self._view.state
        both = budget_violation(spec, state), quota_violation(spec, state, self._policy)
        never = [violation for violation in both if violation is not None]
        never += deadline_violations(spec, state, self._policy, self._now()) if row is None else ()
        if row is None and never:
            return _refused(request, envelope.id, tuple(never))
        if row is None and not await self._binder.serves(spec.runtime):
            return _refused(request, envelope.id, (Violation("runtime", not_installed(spec.runtime)),))
        if row is None and (full := self._queue_violations(spec)):
            if abs(self._now() - envelope.time) < PROMISE_AGE_MAX:
                return Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
            return _refused(request, envelope.id, full)
        now = self._now()
        acceptance = await self._store.accept_job(
            spec, request_digest=request_digest(request), accepted_at=now, template=admitted.template_bytes
        )
        if acceptance == "conflict":
            reason = f"{spec.job_id!r} is taken by a request with another body; choose another id"
            return _refused(request, envelope.id, (Violation("job_id", reason),))
        if row is not None and row.outcome is not None:
            return ()  # a late repeat: the state may have forgotten the job and would run it once more
        return (JobQueued(job_id=spec.job_id, spec=with_start_deadline(spec, state), queued_at=now),)

    def _queue_violations(self, spec: JobSpec) -> tuple[Violation, ...]:
        """Return why the queue takes no more jobs, or none of these owners; empty: it does."""
        state, policy = self._view.state, self._policy
        waiting_count = len(queue(state))
        over_quota = queue_violations(spec, state, policy)
        if waiting_count < policy.queue_count_max:
            return over_quota
        reason = f"is full: {waiting_count} jobs wait, queue_count_max is {policy.queue_count_max}; retry later"
        return (Violation("queue", reason), *over_quota)

    async def _with_volumes(self, admitted: Admitted) -> JobSpec | Violation:
        """Return the job with the nodes that its volumes demand, or the volume that no node can have."""
        spec = admitted.spec
        if admitted.template is None:
            return spec
        related = await self._binder.volumes(admitted.template, spec.namespace)
        if related.problem:
            return Violation(f"{FIELD}.spec.volumes", f"{related.problem}; create it, then submit the job again")
        terms = all_terms(spec.demands.node_affinity, related.alternatives)
        demands = msgspec.structs.replace(spec.demands, node_affinity=terms)
        return msgspec.structs.replace(spec, demands=demands)

    async def _template_of(self, spec: JobSpec) -> dict[str, Any] | None:
        """Return the job's pod template; None for the short form. Raises InvalidJob if the store lost it."""
        if spec.template_digest is None:
            return None
        text = await self._store.job_template(spec.job_id)
        template = None if text is None else msgspec.json.decode(text, type=dict[str, Any])
        if template is None or template_digest(template) != spec.template_digest:
            raise InvalidJob("the store does not have its pod template; submit the job again")
        return template

    async def _create(self, queued: JobQueued) -> Sequence[Fact]:
        job = self._view.state.jobs.get(queued.job_id)
        if job is not None and job.finished is None and job.cancel_requested is not None:
            # Where acceptance took very long, the request was refused, and it is not delivered again.
            return (self._cancelled(job.cancel_requested),)
        if self._is_ending(queued.job_id):
            return ()

        async def create() -> None:
            template = await self._template_of(queued.spec)
            await self._namespaces.ensure(queued.spec, self._policy)
            await self._binder.create(queued.spec, self._view.state, template)

        return await self._unless_impossible(queued.job_id, create())

    async def _release(self, placed: JobPlaced) -> Sequence[Fact]:
        job = self._view.state.jobs.get(placed.job_id)
        if self._is_ending(placed.job_id) or job is None or job.queued is None:
            return ()
        if job.preempted is not None and job.preempted.attempt >= placed.attempt:
            return ()  # delivered or published again: its Job may be suspended, and its capacity another job's
        spec = job.queued.spec
        if must_leave_spot(job, self._policy, placed.placed_at):
            # Non-preemptible to Kubernetes, so that it binds no member to free spot capacity.
            spec = msgspec.structs.replace(spec, is_preemptible=False)

        async def release() -> None:
            await self._namespaces.ensure(spec, self._policy)
            await self._binder.release(spec, placed, self._view.state, await self._template_of(spec))
            self._suspension.note_released(spec.job_id)

        return await self._unless_impossible(placed.job_id, release())

    async def _unless_impossible(self, job_id: JobId, effect: Awaitable[None]) -> Sequence[Fact]:
        """Await the effect; return the end of the job if its kind is not installed, or its Job is invalid."""
        try:
            await effect
        except (InvalidJob, NotInstalled) as exc:
            return (JobFinished(job_id=job_id, outcome="failed", finished_at=self._now(), message=str(exc)),)
        return ()

    async def _place_of(self, job_id: JobId) -> tuple[Runtime, str]:
        """Return the job's runtime and namespace, from the store if the state has forgotten the job."""
        job = self._view.state.jobs.get(job_id)
        if job is not None and job.queued is not None:
            return job.queued.spec.runtime, job.queued.spec.namespace
        row = await self._store.job(job_id)
        return (Runtime.JOB, "") if row is None else (row.spec.runtime, row.spec.namespace)

    async def _cancel(self, request: JobCancelRequested) -> Outputs:
        """Publish the end of the job; that fact deletes its Kubernetes Job."""
        row = await self._store.job(request.job_id)
        if row is None and self._may_be_accepted(request.job_id):
            return Outcome(redeliver_after_seconds=ACCEPTANCE_SECONDS)
        self._cancels_since.pop(request.job_id, None)
        if row is None:
            raise RequestRefused(f"job_id: cancellation of {request.job_id!r} failed: no such job was accepted")
        if row.outcome is not None:
            return ()
        return (self._cancelled(request),)

    def _cancelled(self, request: JobCancelRequested) -> JobFinished:
        by = f" by {request.requested_by}" if request.requested_by else ""
        note = f": {request.note}" if request.note else ""
        message = f"cancelled{by}{note}"
        return JobFinished(job_id=request.job_id, outcome="cancelled", finished_at=self._now(), message=message)

    def _may_be_accepted(self, job_id: JobId) -> bool:
        """Return True for a request without an answer, for ACCEPTANCE_SECONDS_MAX: dead letters are never answered."""
        job = self._view.state.jobs.get(job_id)
        if job is None or job.requested is None or job.rejected is not None:
            return False
        now = self._now()
        since = self._cancels_since.setdefault(job_id, now)
        return now - since < timedelta(seconds=ACCEPTANCE_SECONDS_MAX)

    async def _end(self, finished: JobFinished) -> Outputs:
        await self._store.finish_job(finished.job_id, outcome=finished.outcome, finished_at=finished.finished_at)
        if finished.outcome != "completed":
            await self._binder.withdraw(finished.job_id, *await self._place_of(finished.job_id))
        return ()

    async def _reconcile(self, listed: JobListed) -> Outputs:
        """Create Jobs that were never created, and end jobs whose Job was deleted unseen."""
        ended: list[Fact] = []
        for queued, job in missing_jobs(self._view.state, listed):
            if await self._binder.has(queued.job_id, queued.spec.runtime, queued.spec.namespace):
                continue  # created since the list was read
            if is_recreated(job, self._policy, self._now()):
                if job.placed is not None and not is_waiting(job):
                    ended += await self._release(job.placed)
            elif was_created(self._view.state, job):
                message = "its Kubernetes Job was deleted while unwatched; how it ended is unknown"
                now = self._now()
                ended.append(JobFinished(job_id=queued.job_id, outcome="cancelled", finished_at=now, message=message))
            elif job.placed is None:
                ended += await self._create(queued)
            else:
                ended += await self._release(job.placed)
        return ended

    def _is_ending(self, job_id: JobId) -> bool:
        """Return True for a job that is finished or to be cancelled: nothing more is created for it."""
        job = self._view.state.jobs.get(job_id)
        return job is not None and (job.finished is not None or job.cancel_requested is not None)


class MeasuringScheduler(Scheduler):
    """Reads the use of GPUs, too, which other placement policies do not need."""

    folds: ClassVar[tuple[type[Fact], ...]] = (*Scheduler.folds, GpuNodeSummarized)


def scheduler_for(policy: ScalingPolicy) -> type[Scheduler]:
    """Return the scheduler that reads what the policy needs."""
    return MeasuringScheduler if policy.placement == LEAST_UTILIZED else Scheduler


def _checked(report: DemandReported, recorded: Recorded) -> Outputs:
    """Return a dead letter for an invalid demand report; a valid one is in the state already."""
    violations = violations_of(report, recorded.envelope.time)
    reason = "; ".join(f"{violation.field}: {violation.reason}" for violation in violations)
    return Outcome(set_aside_reason=f"demand report of {report.source!r} refused: {reason}") if violations else ()


def _unknown_fields(envelope: Envelope) -> tuple[Violation, ...]:
    """Return a violation for each unknown field, with the version of this scheduler: later ones may know it."""
    named = (text.partition(": ") for text in envelope.unknown_fields)
    return tuple(Violation(field, f"{reason} (this scheduler is {package_version()})") for field, _, reason in named)


def _refused(request: JobRequested, event_id: str, violations: tuple[Violation, ...]) -> Outcome:
    """Return the rejection, and the request as a dead letter."""
    reason = "; ".join(f"{violation.field}: {violation.reason}" for violation in violations)
    rejected = JobRejected(
        request_id=event_id,
        violations=violations,
        # A taken id belongs to another job, which is not rejected.
        job_id=None if any(violation.field == "job_id" for violation in violations) else request.job_id,
        job_name=request.job_name,
    )
    return Outcome(facts=(rejected,), set_aside_reason=f"job refused: {reason}")
