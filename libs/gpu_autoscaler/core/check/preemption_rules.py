"""Rules of the plan check on requests to save before a preemption, and on requeues. Shares no code with the choice."""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from gpu_autoscaler.core.check.quota_rules import lost_placements
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import RequestPreemptionCheckpoint, RequeueJob
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted, QuotaReclaimed

_NEXT_MIN = timedelta(minutes=5)  # a job keeps its turn that long


def unjustified_preemption(
    decision: RequestPreemptionCheckpoint, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    """Return what the state or the policy shows against the request; None: nothing."""
    job, other = state.jobs.get(decision.job_id), state.jobs.get(decision.reason.for_job)
    if job is None or job.queued is None or job.placed is None or not _runs(job):
        return "no such running job is known"
    if job.placed.attempt != decision.attempt:
        return f"its attempt is {job.placed.attempt}"
    if not job.queued.spec.is_preemptible:
        return "the job is not preemptible"
    if other is None or other.queued is None or other.finished is not None or _runs(other):
        return f"job {decision.reason.for_job} does not wait"
    time_to_save = timedelta(seconds=policy.quotas.checkpoint_seconds_max)
    if decision.requested_at != as_of or decision.deadline_at != as_of + time_to_save:
        return f"its pods have {time_to_save.total_seconds():g} s from now on to save"
    saving = {
        pod.node_name
        for pod in state.pods.values()
        if pod.job_id == decision.job_id and pod.phase == "running" and pod.deleting_since is None
        and any(key == labels.CHECKPOINTED_AT for key, _ in pod.annotations)
    }  # fmt: skip
    if not decision.node_names or not saving.issuperset(decision.node_names):
        return "these are not the nodes of its pods that save on request"
    match decision.reason:
        case QuotaReclaimed() as reason:
            return _borrows_nothing(reason, job.queued.spec, other.queued.spec, state, policy)
        case PriorityPreempted() as reason:
            return _matters_no_more(reason, job.queued.spec, other.queued.spec, policy)


def unjustified_requeue(decision: RequeueJob, as_of: datetime, state: ClusterState) -> str | None:
    """Return what the state shows against the requeue; None: nothing."""
    job, other = state.jobs.get(decision.job_id), state.jobs.get(decision.reason.waiting_job)
    if job is None or not _waits(job):
        return "the job does not wait"
    if other is job or other is None or not _waits(other):
        return f"job {decision.reason.waiting_job} does not wait"
    if decision.attempt != (0 if job.placed is None else job.placed.attempt):
        return f"its last attempt is not {decision.attempt}"
    if as_of - decision.reason.waits_since < _NEXT_MIN:
        return f"it has waited since {decision.reason.waits_since.isoformat()} only"
    return None


def _waits(job: JobRecord) -> bool:
    return job.queued is not None and job.finished is None and job.cancel_requested is None and not _runs(job)


def _runs(job: JobRecord) -> bool:
    """True from the placement of the job until the attempt or the job ends."""
    if job.placed is None or job.finished is not None or job.cancel_requested is not None:
        return False
    return job.preempted is None or job.preempted.attempt < job.placed.attempt


def _has_quota(job: JobRecord, lost: Collection[JobId]) -> bool:
    """True from the placement until the end, also after the loss of a node; false if it ends for another job. `lost`:
    jobs whose placement no fact tells any more."""
    if job.queued is None or job.finished is not None or (job.placed is None and job.queued.job_id not in lost):
        return False
    last, attempt = job.preempted, 0 if job.placed is None else job.placed.attempt
    return last is None or last.preemption is None or last.attempt < attempt


def _borrows_nothing(
    reason: QuotaReclaimed, spec: JobSpec, other: JobSpec, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    nominal = {quota.name: quota.nominal_gpu_count for quota in policy.quotas.projects}
    mine, owner = nominal.get(spec.project_id), nominal.get(other.project_id)
    if not policy.quotas.is_reclaim_on or mine is None or owner is None or spec.project_id == other.project_id:
        return "the policy lets no quota be reclaimed from its project"
    if owner != reason.nominal_gpu_count or _gpus([other]) > owner:
        return f"project {other.project_id} has a nominal quota of {owner} GPUs"
    lost = lost_placements(state)
    using = (job.queued.spec for job in state.jobs.values() if job.queued is not None and _has_quota(job, lost))
    used = _gpus(other_spec for other_spec in using if other_spec.project_id == spec.project_id)
    return None if used > mine else f"project {spec.project_id} borrows nothing"


def _matters_no_more(reason: PriorityPreempted, spec: JobSpec, other: JobSpec, policy: ScalingPolicy) -> str | None:
    if not policy.quotas.is_priority_preemption_on:
        return "the policy lets no job be preempted for its priority"
    is_higher = other.priority == reason.for_priority > reason.priority == spec.priority
    return None if is_higher else f"job {other.job_id} has no higher priority"


def _gpus(specs: Iterable[JobSpec]) -> int:
    return sum(
        spec.member_count * (spec.member_resources.gpu_count + sum(count for _, count in spec.member_resources.slices))
        for spec in specs
    )
