"""What the state means for pods and jobs, computed when read. Nodes are read in `core/nodes/life.py`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from operator import attrgetter

from gpu_autoscaler.core.remembered import Kept, changed, remembered
from gpu_autoscaler.core.state import ClusterState, JobRecord, OrderRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.model.reasons import ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.resources import NO_RESOURCES

# Controllers whose pods belong to a node and not to a workload: they come and go with it.
_NODE_BOUND_OWNERS = frozenset({"DaemonSet", "Node"})  # "Node" owns mirror pods, the shadows of static pods
_FINISHED_PHASES = frozenset({"succeeded", "failed"})
_OUTCOMES = {
    "completed": JobState.COMPLETED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}


# ---- pods

# After all that are to start by some time: work that does not say.
NO_START_DEADLINE = datetime.max.replace(tzinfo=UTC)


def is_workload(pod: PodObserved) -> bool:
    """True unless the pod belongs to its node, as those of DaemonSets and static pods do."""
    return pod.owner_kind not in _NODE_BOUND_OWNERS


def is_finished(pod: PodObserved) -> bool:
    """True when the pod has ended and holds no room any more, though its object may still be there."""
    return pod.phase in _FINISHED_PHASES


def counts_for_idleness(pod: PodObserved) -> bool:
    """True for a pod that keeps its node from being empty: a workload that has not ended."""
    return is_workload(pod) and not is_finished(pod)


def pods_by_node(state: ClusterState) -> Mapping[str, tuple[PodObserved, ...]]:
    """Return the unfinished pods bound to each node name, in order of uid; DaemonSet and mirror pods included.

    A node without pods has no entry.
    """
    return _by_node(state.pods)


# Of equal pods on a node the tuple is the same object, so that what is read from it can be remembered as well. So is
# the mapping while those on every node are equal: a pod that waits changes nothing there.
_on_node: Kept[tuple[PodObserved, ...]] = Kept(4096)
_on_nodes: Kept[Mapping[str, tuple[PodObserved, ...]]] = Kept(2)
_by_uid = attrgetter("pod_uid")


@remembered(4)
def _by_node(pods: Mapping[PodUid, PodObserved]) -> Mapping[str, tuple[PodObserved, ...]]:
    by_node = _moved(pods) if _last else _from_scratch(pods)
    _last[:] = [(pods, by_node)]
    return by_node


# The pods that were asked for last: the next ones differ from them in few. Any others give the same, and take longer.
_last: list[tuple[Mapping[PodUid, PodObserved], Mapping[str, tuple[PodObserved, ...]]]] = []


def _moved(pods: Mapping[PodUid, PodObserved]) -> Mapping[str, tuple[PodObserved, ...]]:
    """The pods by node, put together anew only where a pod came, went, or changed."""
    before, by_node = _last[0]
    uids = changed(before, pods)
    if len(uids) > len(pods) // 4:
        return _from_scratch(pods)
    bound: dict[str, list[PodObserved]] = {}
    for pod in (source[uid] for source in (before, pods) for uid in uids if uid in source):
        if pod.node_name is not None and pod.node_name not in bound:
            bound[pod.node_name] = [each for each in by_node.get(pod.node_name, ()) if each.pod_uid not in uids]
    for pod in (pods[uid] for uid in uids if uid in pods):
        if pod.node_name is not None and pod.phase not in _FINISHED_PHASES:
            bound[pod.node_name].append(pod)
    moved = {name: _kept(sorted(each, key=_by_uid)) if each else None for name, each in bound.items()}
    if all(each is by_node.get(name) for name, each in moved.items()):
        return by_node
    return {name: each for name, each in {**by_node, **moved}.items() if each is not None}


def _from_scratch(pods: Mapping[PodUid, PodObserved]) -> Mapping[str, tuple[PodObserved, ...]]:
    bound: dict[str, list[PodObserved]] = {}
    for pod in pods.values():
        if pod.node_name is not None and pod.phase not in _FINISHED_PHASES:
            bound.setdefault(pod.node_name, []).append(pod)
    by_node = {name: _kept(sorted(each, key=_by_uid)) for name, each in bound.items()}
    key = tuple(map(id, by_node.values()))
    kept = _on_nodes.get(key)
    if kept is None:
        kept = by_node
        _on_nodes.put(key, kept)
    return kept


def _kept(pods: list[PodObserved]) -> tuple[PodObserved, ...]:
    key = tuple(map(id, pods))
    found = _on_node.get(key)
    if found is None:
        found = tuple(pods)
        _on_node.put(key, found)
    return found


def job_pods(state: ClusterState, job_id: JobId) -> tuple[PodObserved, ...]:
    """Return the job's pods that exist, ended ones too, in order of uid."""
    return tuple(sorted((pod for pod in state.pods.values() if pod.job_id == job_id), key=lambda pod: pod.pod_uid))


# ---- jobs


def is_waiting(job: JobRecord) -> bool:
    """True for a job in the queue: accepted, and neither placed (or preempted since), ending, nor ended."""
    return (
        job.queued is not None
        and job.finished is None
        and job.cancel_requested is None
        and (job.placed is None or is_preempted(job))
    )


def is_preempted(job: JobRecord) -> bool:
    """True from the loss of a placement until the next one."""
    if job.preempted is None:
        return False
    return job.placed is None or job.preempted.attempt >= job.placed.attempt


def job_state(state: ClusterState, job_id: JobId) -> JobState | None:
    """Return the job's state by the eight names; None for a job that is not known or was refused.

    A placed job whose members do not all run yet is provisioning: its room is being made ready.
    """
    job = state.jobs.get(job_id)
    if job is None:
        return None
    said = _state_said(job)
    if said is JobState.QUEUED and has_nodes_in_flight(state, job_id):
        return JobState.PROVISIONING
    return said


def job_states(state: ClusterState) -> Mapping[JobId, JobState]:
    """Return the state of every job that has one, as `job_state` does, in one pass over the orders."""
    said = {job_id: _state_said(job) for job_id, job in state.jobs.items()}
    queued = {f"job/{job_id}" for job_id, each in said.items() if each is JobState.QUEUED}
    expecting = {
        key
        for order in state.orders.values()
        if (keys := queued.intersection(_demand_of(order))) and is_in_flight(state, order)
        for key in keys
    }
    return {
        job_id: JobState.PROVISIONING if f"job/{job_id}" in expecting else each
        for job_id, each in said.items()
        if each is not None
    }


def _state_said(job: JobRecord) -> JobState | None:
    """The state by the job's own facts alone, without a look at the nodes that come for it."""
    if job.finished is not None:
        return _OUTCOMES[job.finished.outcome]
    if job.queued is None:
        # Facts about a job whose acceptance has aged out, or a request that nobody has answered yet.
        is_answered_no = job.rejected is not None or job.requested is None
        return None if is_answered_no else JobState.PENDING
    if is_preempted(job):
        return JobState.PREEMPTED
    if job.placed is not None:
        return JobState.RUNNING if _runs_since_placement(job) else JobState.PROVISIONING
    return JobState.QUEUED


def _runs_since_placement(job: JobRecord) -> bool:
    if job.started is None:
        return False
    return job.preempted is None or job.started.started_at > job.preempted.preempted_at


def queue(state: ClusterState) -> tuple[JobRecord, ...]:
    """Return the jobs that wait for a place: highest priority first, then who is to start earliest, then who waits
    longest, then by id."""
    waiting = (
        (
            (
                -job.queued.spec.priority,
                job.queued.spec.start_by_at or NO_START_DEADLINE,
                job.queued.queued_at,
                job.queued.job_id,
            ),
            job,
        )
        for job in state.jobs.values()
        if job.queued is not None and is_waiting(job)
    )
    return tuple(job for _, job in sorted(waiting, key=lambda keyed: keyed[0]))


def queue_position(state: ClusterState, job_id: JobId) -> int | None:
    """Return the job's place in the queue, 1 for the next one; None for a job that does not wait."""
    positions = (
        position
        for position, job in enumerate(queue(state), start=1)
        if job.queued is not None and job.queued.job_id == job_id
    )
    return next(positions, None)


# ---- orders


def has_nodes_in_flight(state: ClusterState, job_id: JobId) -> bool:
    """True while a node that was bought for this job is neither usable yet nor given up."""
    key = f"job/{job_id}"
    return any(key in _demand_of(order) and is_in_flight(state, order) for order in state.orders.values())


def is_in_flight(state: ClusterState, order: OrderRecord) -> bool:
    """True from the decision to buy until the node is usable, the launch refused, or the instance gone."""
    if order.refused is not None or order.terminated is not None:
        return False
    said = order.decision or order.ordered
    promised = NO_RESOURCES if said is None else said.promised
    provider_id = None if order.launched is None else order.launched.provider_id
    usable = (
        state.nodes[node_uid]
        for node_uid, offered in state.usable.items()
        if promised.gpus_fit_in(offered.gpus) and node_uid in state.nodes
    )
    return not any(
        node.action_id == order.action_id or (provider_id is not None and node.provider_id == provider_id)
        for node in usable
    )


def _demand_of(order: OrderRecord) -> tuple[str, ...]:
    reason = None if order.decision is None else order.decision.reason
    return reason.demand if isinstance(reason, UnmetDemand | ReplacesAtRiskNode) else ()
