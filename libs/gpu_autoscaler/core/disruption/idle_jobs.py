"""Jobs, and workloads of opted-in namespaces, that hold GPUs and leave them idle, by reliable telemetry.

Off by default: it ends users' work. Each is announced on its pods, and ends after a grace time if it stays idle.
Exempt are pods with `do-not-disrupt` or `idle-allowed`, with a GPU that was not observed all the time, or on a node
whose GPUs all read zero: an idle sensor is not an idle job.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from gpu_autoscaler.core.disruption.protection import annotated_instant
from gpu_autoscaler.core.identity_cache import cached_by_identity, cached_until_change
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.nodes.fleet_utilization import fleet_utilization
from gpu_autoscaler.core.nodes.views import NodeIndex, node_views
from gpu_autoscaler.core.policy.disruption_settings import UtilizationPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.queries import counts_for_idleness, is_finished, pods_by_node
from gpu_autoscaler.core.state.state import ClusterState, JobRecord
from gpu_autoscaler.core.state.telemetry_history import GpuTelemetryHistory, NodeTelemetryHistory, since_at_most
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import JobId, NodeUid

HeldGpus = Mapping[str, list[GpuTelemetryHistory]]  # by namespace/name of the pod


class IdleJob(NamedTuple):
    """A job whose GPUs have all been idle for too long."""

    job_id: JobId
    pods: tuple[PodObserved, ...]  # with GPUs, ordered by uid
    idle_seconds: float
    announced_at: datetime | None  # None: not since they are idle
    ends_at: datetime | None  # as announced


class IdleWorkload(NamedTuple):
    """Pods of one owner outside of our queue, or a pod without an owner, whose GPUs have all been idle for too long."""

    pods: tuple[PodObserved, ...]  # ordered by uid
    idle_seconds: float
    announced_at: datetime | None  # None: not since they are idle
    ends_at: datetime | None  # as announced


@cached_by_identity(1)  # of one plan: announced and ended jobs are both among them
def idle_jobs(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[IdleJob, ...]:
    """Return each job that was idle for too long, by id; empty if telemetry is unreliable."""
    rules = policy.idle_jobs
    if not rules.is_on:
        return ()
    held_gpus = _held_gpus_now(state, policy, as_of)
    due: list[IdleJob] = []
    for job_id, pods in _pods_by_job(state).items():
        idle_since = _idle_since(pods, held_gpus, rules.busy_ratio_max)
        if idle_since is not None and has_lasted(idle_since, rules.idle_seconds, as_of):
            pods.sort(key=lambda pod: pod.pod_uid)
            idle_seconds = (as_of - idle_since).total_seconds()
            due.append(IdleJob(job_id, tuple(pods), idle_seconds, *_announcement(pods, idle_since)))
    return tuple(sorted(due, key=lambda job: job.job_id))


def idle_workloads(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> tuple[IdleWorkload, ...]:
    """Return each workload of the opted-in namespaces that was idle for too long; empty if telemetry is unreliable."""
    rules = policy.idle_jobs
    opted_in = {*rules.namespaces, *state.opted_in_namespaces}
    if not opted_in:
        return ()
    held_gpus = _held_gpus_now(state, policy, as_of)
    by_owner: dict[str, list[PodObserved]] = {}
    for pod in state.pods.values():
        is_workload = pod.job_id is None and pod.requests.has_gpus and counts_for_idleness(pod)
        if pod.namespace in opted_in and is_workload:
            by_owner.setdefault(_workload_of(pod), []).append(pod)
    due: list[IdleWorkload] = []
    for pods in by_owner.values():
        pods.sort(key=lambda pod: pod.pod_uid)
        idle_since = _idle_since(pods, held_gpus, rules.busy_ratio_max) if all(map(_may_end, pods)) else None
        if idle_since is None or not has_lasted(idle_since, rules.idle_seconds, as_of):
            continue
        idle_seconds = (as_of - idle_since).total_seconds()
        due.append(IdleWorkload(tuple(pods), idle_seconds, *_announcement(pods, idle_since)))
    return tuple(sorted(due, key=lambda workload: workload.pods[0].pod_uid))


def _announcement(pods: list[PodObserved], idle_since: datetime) -> tuple[datetime, datetime] | tuple[None, None]:
    """Return when the end of all pods was announced since they are idle, and for when; None: not that of all."""
    announced_at, ends_at = (
        [at for pod in pods if (at := annotated_instant(dict(pod.annotations), key)) is not None]
        for key in (labels.IDLE_ANNOUNCED_AT, labels.IDLE_ENDS_AT)
    )
    is_announced = len(announced_at) == len(ends_at) == len(pods) and min(announced_at) >= idle_since
    return (max(announced_at), max(ends_at)) if is_announced else (None, None)


def _workload_of(pod: PodObserved) -> str:
    """Return what the pod is ended with: its JobSet, else its owner, else itself."""
    jobset = dict(pod.labels).get(labels.JOBSET_NAME)
    return pod.owner_uid or pod.pod_uid if jobset is None else f"{pod.namespace}/{jobset}"


def _held_gpus_now(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> HeldGpus:
    views, histories = node_views(state, as_of), state.telemetry_history
    return _held_gpus(views, pods_by_node(state), state.telemetry, histories, policy.utilization, as_of)


@cached_until_change(4)
def _held_gpus(
    views: NodeIndex,
    pods: Mapping[str, tuple[PodObserved, ...]],
    telemetry: Mapping[NodeUid, GpuNodeSummarized],
    histories: Mapping[NodeUid, NodeTelemetryHistory],
    rules: UtilizationPolicy,
    as_of: datetime,
) -> HeldGpus:
    """Return GPUs by namespace/name of the pod that holds them, of nodes on which some GPU reads more than zero; none
    if telemetry as a whole is unreliable."""
    held_gpus: dict[str, list[GpuTelemetryHistory]] = {}
    utilization = fleet_utilization(views, pods, histories, rules, as_of)
    if utilization.fault is not None:
        return held_gpus
    for uid, history in utilization.trusted.items():
        window = telemetry.get(uid)
        reads = () if window is None else window.gpus
        if not any(gpu.memory_used_bytes_max or gpu.utilization_ratio_max for gpu in reads):
            continue
        for gpu in history.gpus:
            if gpu.pod is not None:
                held_gpus.setdefault(gpu.pod, []).append(gpu)
    return held_gpus


def _pods_by_job(state: ClusterState) -> dict[JobId, list[PodObserved]]:
    """Return the pods with GPUs of running jobs, if all of them run, or as many as are enough."""
    by_job: dict[JobId, list[PodObserved]] = {}
    for pod in state.pods.values():
        if pod.job_id is not None and pod.requests.has_gpus and not is_finished(pod) and not _is_spare(pod, state):
            by_job.setdefault(pod.job_id, []).append(pod)
    return {job_id: pods for job_id, pods in by_job.items() if _runs(state.jobs.get(job_id), pods)}


def _is_spare(pod: PodObserved, state: ClusterState) -> bool:
    """True for a waiting member that its job can do without."""
    job = None if pod.job_id is None else state.jobs.get(pod.job_id)
    return (
        pod.node_name is None
        and job is not None
        and job.queued is not None
        and (job.queued.spec.member_count_min is not None)
    )


def _runs(job: JobRecord | None, pods: list[PodObserved]) -> bool:
    if job is None or job.queued is None or job.finished is not None or job.cancel_requested is not None:
        return False
    spec = job.queued.spec
    return spec.gang_count <= len(pods) <= spec.member_count and all(_may_end(pod) for pod in pods)


def _may_end(pod: PodObserved) -> bool:
    marks = dict(pod.annotations)
    keys = (labels.DO_NOT_DISRUPT, labels.KARPENTER_DO_NOT_DISRUPT, labels.IDLE_ALLOWED)
    is_kept = any(marks.get(key) == "true" for key in keys)
    return pod.phase == "running" and pod.deleting_since is None and not is_kept


def _idle_since(pods: list[PodObserved], held_gpus: HeldGpus, busy_ratio_max: float) -> datetime | None:
    """Return since when every GPU of every pod has been idle; None: one was not, or was not observed."""
    instants: list[datetime] = []
    for pod in pods:
        gpus = held_gpus.get(f"{pod.namespace}/{pod.name}", [])
        if len(gpus) != pod.requests.gpu_count + sum(count for _, count in pod.requests.slices):
            return None
        for gpu in gpus:
            since = since_at_most(gpu.utilization, busy_ratio_max * 100)
            if since is None:
                return None
            instants.append(since)
    return max(instants, default=None)
