"""Pods, jobs and orders, derived from the state. Nodes are derived in `core/nodes/views.py`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from operator import attrgetter

from gpu_autoscaler.core.identity_cache import IdentityCache, cached_by_identity, changed_keys
from gpu_autoscaler.core.state.state import ClusterState, JobRecord, OrderRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId, PodUid, ProviderId
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.resources import NO_RESOURCES

# Owners of pods that belong to a node, not to a workload.
_NODE_BOUND_OWNERS = frozenset({"DaemonSet", "Node"})  # "Node" owns mirror pods, the shadows of static pods
_FINISHED_PHASES = frozenset({"succeeded", "failed"})
_OUTCOMES = {"completed": JobState.COMPLETED, "failed": JobState.FAILED, "cancelled": JobState.CANCELLED}


# ---- instances


def listed_instances(seen_at: Mapping[ProviderId, datetime], listed_at: datetime) -> frozenset[ProviderId]:
    """Return the instances of the cloud's list of this time, and those observed since."""
    return frozenset(provider_id for provider_id, at in seen_at.items() if at >= listed_at)


# ---- pods

# Sorts after every start deadline.
NO_START_DEADLINE = datetime.max.replace(tzinfo=UTC)


def is_workload(pod: PodObserved) -> bool:
    """True unless the pod belongs to its node, like pods of DaemonSets and static pods."""
    return pod.owner_kind not in _NODE_BOUND_OWNERS


def is_finished(pod: PodObserved) -> bool:
    """True if the pod has ended and uses no capacity, even if its object still exists."""
    return pod.phase in _FINISHED_PHASES


def counts_for_idleness(pod: PodObserved) -> bool:
    """True for an unfinished workload pod: its node is not empty."""
    return is_workload(pod) and not is_finished(pod)


def pods_by_node(state: ClusterState) -> Mapping[str, tuple[PodObserved, ...]]:
    """Return the unfinished pods by node name, ordered by uid, including DaemonSet and mirror pods; only of nodes with
    pods."""
    return _by_node(state.pods)


# Unchanged pods of a node give the same tuple, and unchanged pods of all nodes the same mapping, so that results
# derived from them can be cached by identity.
_on_node: IdentityCache[tuple[PodObserved, ...]] = IdentityCache(4096)
_on_nodes: IdentityCache[Mapping[str, tuple[PodObserved, ...]]] = IdentityCache(2)
_by_uid = attrgetter("pod_uid")


@cached_by_identity(4)
def _by_node(pods: Mapping[PodUid, PodObserved]) -> Mapping[str, tuple[PodObserved, ...]]:
    by_node = _updated(pods) if _last else _from_scratch(pods)
    _last[:] = [(pods, by_node)]
    return by_node


# The last pods and their result: the next pods usually differ in few.
_last: list[tuple[Mapping[PodUid, PodObserved], Mapping[str, tuple[PodObserved, ...]]]] = []


def _updated(pods: Mapping[PodUid, PodObserved]) -> Mapping[str, tuple[PodObserved, ...]]:
    """Update the last result where a pod was added, removed, or changed."""
    before, by_node = _last[0]
    uids = changed_keys(before, pods)
    if len(uids) > len(pods) // 4:
        return _from_scratch(pods)
    bound: dict[str, list[PodObserved]] = {}
    for pod in (source[uid] for source in (before, pods) for uid in uids if uid in source):
        if pod.node_name is not None and pod.node_name not in bound:
            bound[pod.node_name] = [kept for kept in by_node.get(pod.node_name, ()) if kept.pod_uid not in uids]
    for pod in (pods[uid] for uid in uids if uid in pods):
        if pod.node_name is not None and pod.phase not in _FINISHED_PHASES:
            bound[pod.node_name].append(pod)
    updated = {name: _cached(sorted(on_node, key=_by_uid)) if on_node else None for name, on_node in bound.items()}
    if all(on_node is by_node.get(name) for name, on_node in updated.items()):
        return by_node
    return {name: on_node for name, on_node in {**by_node, **updated}.items() if on_node is not None}


def _from_scratch(pods: Mapping[PodUid, PodObserved]) -> Mapping[str, tuple[PodObserved, ...]]:
    bound: dict[str, list[PodObserved]] = {}
    for pod in pods.values():
        if pod.node_name is not None and pod.phase not in _FINISHED_PHASES:
            bound.setdefault(pod.node_name, []).append(pod)
    by_node = {name: _cached(sorted(on_node, key=_by_uid)) for name, on_node in bound.items()}
    key = tuple(map(id, by_node.values()))
    cached = _on_nodes.get(key)
    if cached is None:
        cached = by_node
        _on_nodes.put(key, cached)
    return cached


def _cached(pods: list[PodObserved]) -> tuple[PodObserved, ...]:
    key = tuple(map(id, pods))
    cached = _on_node.get(key)
    if cached is None:
        cached = tuple(pods)
        _on_node.put(key, cached)
    return cached


def job_pods(state: ClusterState, job_id: JobId) -> tuple[PodObserved, ...]:
    """Return the pods of the job, including finished ones, ordered by uid."""
    return tuple(sorted((pod for pod in state.pods.values() if pod.job_id == job_id), key=lambda pod: pod.pod_uid))


# ---- jobs


def is_waiting(job: JobRecord) -> bool:
    """True for a queued job: accepted and not placed since its last preemption, canceled, or finished."""
    return (
        job.queued is not None
        and job.finished is None
        and job.cancel_requested is None
        and (job.placed is None or is_preempted(job))
    )


def is_preempted(job: JobRecord) -> bool:
    """True from a preemption until the next placement."""
    if job.preempted is None:
        return False
    return job.placed is None or job.preempted.attempt >= job.placed.attempt


def job_state(state: ClusterState, job_id: JobId) -> JobState | None:
    """Return the state of the job, provisioning until all members run; None for an unknown or rejected job."""
    job = state.jobs.get(job_id)
    if job is None:
        return None
    state_of_job = _own_state(job)
    if state_of_job is JobState.QUEUED and has_nodes_in_flight(state, job_id):
        return JobState.PROVISIONING
    return state_of_job


def job_states(state: ClusterState) -> Mapping[JobId, JobState]:
    """Return the state of every job that has one, like `job_state`, in one pass over the orders."""
    states = {job_id: _own_state(job) for job_id, job in state.jobs.items()}
    queued = {f"job/{job_id}" for job_id, own in states.items() if own is JobState.QUEUED}
    expecting = {
        key
        for order in state.orders.values()
        if (keys := queued.intersection(demand_of(order))) and is_in_flight(state, order)
        for key in keys
    }
    return {
        job_id: JobState.PROVISIONING if f"job/{job_id}" in expecting else own
        for job_id, own in states.items()
        if own is not None
    }


def _own_state(job: JobRecord) -> JobState | None:
    """The state by the facts of the job only, without its orders."""
    if job.finished is not None:
        return _OUTCOMES[job.finished.outcome]
    if job.queued is None:
        # Rejected, or the acceptance has aged out; a request without an answer is pending.
        is_unknown = job.rejected is not None or job.requested is None
        return None if is_unknown else JobState.PENDING
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
    """Return the queued jobs by priority, start deadline, waiting time and id."""
    waiting = [(job.queued, job) for job in state.jobs.values() if job.queued is not None and is_waiting(job)]
    waiting.sort(
        key=lambda entry: (
            -entry[0].spec.priority,
            entry[0].spec.start_by_at or NO_START_DEADLINE,
            entry[0].queued_at,
            entry[0].job_id,
        )
    )
    return tuple(job for _, job in waiting)


def queue_position(state: ClusterState, job_id: JobId) -> int | None:
    """Return the position in the queue, 1 for the next job; None for a job that is not queued."""
    positions = (
        position
        for position, job in enumerate(queue(state), start=1)
        if job.queued is not None and job.queued.job_id == job_id
    )
    return next(positions, None)


# ---- orders


def has_nodes_in_flight(state: ClusterState, job_id: JobId) -> bool:
    """True while a node bought for this job is in flight."""
    key = f"job/{job_id}"
    return any(key in demand_of(order) and is_in_flight(state, order) for order in state.orders.values())


def is_in_flight(state: ClusterState, order: OrderRecord) -> bool:
    """True from the decision to buy until the node is usable, the launch refused, or the instance terminated."""
    if order.refused is not None or order.terminated is not None:
        return False
    purchase = order.decision or order.ordered
    promised = NO_RESOURCES if purchase is None else purchase.promised
    provider_id = None if order.launched is None else order.launched.provider_id
    usable = (
        state.nodes[node_uid]
        for node_uid, record in state.usable.items()
        if promised.gpus_fit_in(record.gpus) and node_uid in state.nodes
    )
    return not any(
        node.action_id == order.action_id or (provider_id is not None and node.provider_id == provider_id)
        for node in usable
    )


def demand_of(order: OrderRecord | None) -> tuple[str, ...]:
    """Return the keys of the waiting work that a node was bought for."""
    reason = None if order is None or order.decision is None else order.decision.reason
    return reason.demand if isinstance(reason, UnmetDemand | ReplacesAtRiskNode) else ()
