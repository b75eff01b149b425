"""Rules of the plan check on requests to save before an attempt ends, and on requeues; independent of the choice."""

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from gpu_autoscaler.core.check.quota_rules import FOR_ANOTHER, lost_placements
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import RequestPreemptionCheckpoint, RequeueJob
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobSpec
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.preempt import MovedToSpot, PriorityPreempted, QuotaReclaimed

_NEXT_MIN = timedelta(minutes=5)  # a job keeps its turn that long
_FINISHED = ("succeeded", "failed")  # phases of pods


def unjustified_preemption(
    decision: RequestPreemptionCheckpoint, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    """Return what the state or the policy shows against the request; None: nothing."""
    job = state.jobs.get(decision.job_id)
    if job is None or job.queued is None or job.placed is None or not _runs(job):
        return "no such running job is known"
    if job.placed.attempt != decision.attempt:
        return f"its attempt is {job.placed.attempt}"
    if not job.queued.spec.is_preemptible:
        return "the job is not preemptible"
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
    if isinstance(decision.reason, MovedToSpot):
        return _moves_in_vain(decision.reason, job, job.queued.spec, as_of, state, policy)
    other = state.jobs.get(decision.reason.for_job)
    if other is None or other.queued is None or other.finished is not None or _runs(other):
        return f"job {decision.reason.for_job} does not wait"
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
    return last is None or not isinstance(last.preemption, FOR_ANOTHER) or last.attempt < attempt


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


def _moves_in_vain(
    reason: MovedToSpot, job: JobRecord, spec: JobSpec, as_of: datetime, state: ClusterState, policy: ScalingPolicy
) -> str | None:
    """Return why the job should stay: the policy, its pods, the age of its nodes, too little free spot, or the cost."""
    if policy.is_frozen or not policy.is_consolidation_on:
        return "the policy moves no work by choice"
    if job.preempted is not None and _is_kept_off_spot(job.preempted, as_of, policy):
        return "it was interrupted on spot as often as the policy allows"
    pods = [pod for pod in state.pods.values() if pod.job_id == spec.job_id and pod.phase not in _FINISHED]
    for pod in pods:
        marks = dict(pod.annotations)
        if pod.phase != "running" or labels.CHECKPOINTED_AT not in marks:
            return f"pod {pod.name} does not run, or does not save on request"
        if "true" in (marks.get(labels.KARPENTER_DO_NOT_DISRUPT), marks.get(labels.DO_NOT_DISRUPT)):
            return f"pod {pod.name} must not be disrupted"
    views = {view.name: view for view in node_views(state, as_of) if view.node is not None}
    on_demand = {name for name, view in views.items() if view.capacity_type is CapacityType.ON_DEMAND}
    moving_count = sum(1 for pod in pods if pod.node_name in on_demand)
    if not on_demand.issuperset(reason.node_names) or not moving_count:
        return "it does not leave on-demand nodes"
    if _free_on_spot(spec.member_resources.gpu_count, views.values(), state) < moving_count:
        return f"fewer than {moving_count} members fit on free spot nodes"
    return _saves_too_little(reason, [views[name] for name in reason.node_names], as_of, policy)


def _is_kept_off_spot(last: JobPreempted, as_of: datetime, policy: ScalingPolicy) -> bool:
    is_often = last.retries_used >= min(policy.spot.interruptions_count_max, policy.job_retries_count_max)
    return is_often and as_of - last.preempted_at < timedelta(seconds=policy.spot.on_demand_wait_seconds)


def _saves_too_little(
    reason: MovedToSpot, left: Iterable[NodeView], as_of: datetime, policy: ScalingPolicy
) -> str | None:
    least, before = timedelta(seconds=policy.spot.return_to_spot_seconds_min), 0
    for view in left:
        if view.usable_since is None or as_of - view.usable_since < least:
            return f"node {view.name} is younger than {least.total_seconds():g} s"
        before += (view.price_micro_usd_per_hour or 0) + policy.node_overhead_micro_usd_per_hour
    if reason.saving_micro_usd_per_hour > before:
        return f"its nodes cost {before} micro-dollars an hour, less than the saving"
    if reason.saving_micro_usd_per_hour * reason.remaining_seconds / 3600.0 < reason.move_micro_usd:
        return "the move costs more than it saves"
    return None


def _free_on_spot(gpu_count: int, views: Iterable[NodeView], state: ClusterState) -> int:
    """Return how many members with this number of GPUs fit on usable spot nodes, by their GPUs alone."""
    used: Counter[str] = Counter()
    for pod in state.pods.values():
        if pod.node_name is not None and pod.phase not in _FINISHED:
            used[pod.node_name] += pod.requests.gpu_count
    return sum(
        max(0, view.allocatable.gpu_count - used[view.name]) // max(1, gpu_count)
        for view in views
        if view.is_usable and view.notice is None and view.capacity_type is CapacityType.SPOT
    )


def _gpus(specs: Iterable[JobSpec]) -> int:
    return sum(
        spec.member_count * (spec.member_resources.gpu_count + sum(count for _, count in spec.member_resources.slices))
        for spec in specs
    )
