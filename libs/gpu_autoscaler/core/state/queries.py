"""Pods, jobs and orders, derived from the state. Nodes are derived in `core/nodes/views.py`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from typing import NamedTuple

from gpu_autoscaler.core.state.lineage import Changes, Derivation, part_of
from gpu_autoscaler.core.state.state import ClusterState, JobRecord, OrderRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId, PodUid, ProviderId
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.reasons.preempt import beneficiary
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


class PodIndex(NamedTuple):
    """The pods of a state in the ways in which plans read them. An update keeps the parts that no change concerns."""

    pods: Mapping[PodUid, PodObserved]
    by_node: Mapping[str, tuple[PodObserved, ...]]
    unbound: Mapping[PodUid, PodObserved]  # without a node
    members: Mapping[JobId, int]  # pods of each job that count as members
    with_rules: Mapping[PodUid, PodObserved]  # with pod affinity or preferences, finished ones too
    may_end: Mapping[str, tuple[PodObserved, ...]]  # by node name: those of `by_node` whose end may be certain

    @classmethod
    def of(cls, state: ClusterState) -> "PodIndex":
        """Return the index of the state, built from nothing."""
        pods = state.pods
        bound: dict[str, list[PodObserved]] = {}
        for pod in pods.values():
            if pod.node_name is not None and pod.phase not in _FINISHED_PHASES:
                bound.setdefault(pod.node_name, []).append(pod)
        by_node = {name: tuple(sorted(on_node, key=_by_uid)) for name, on_node in bound.items()}
        return cls(
            pods=pods,
            by_node=by_node,
            unbound={uid: pod for uid, pod in pods.items() if pod.node_name is None},
            members=Counter(pod.job_id for pod in pods.values() if pod.job_id is not None and is_member(pod)),
            with_rules={uid: pod for uid, pod in pods.items() if _has_rules(pod)},
            may_end={name: ending for name, on_node in by_node.items() if (ending := tuple(filter(_may_end, on_node)))},
        )

    def updated(self, state: ClusterState, changes: Changes) -> "PodIndex":
        """Return the index of the state."""
        uids: frozenset[PodUid] = changes["pods"]
        before = {uid: pod for uid in uids if (pod := self.pods.get(uid)) is not None}
        now = {uid: pod for uid in uids if (pod := state.pods.get(uid)) is not None}
        by_node = self._by_node_after(before, now)
        return PodIndex(
            pods=state.pods,
            by_node=by_node,
            unbound=_replaced(self.unbound, before, now, lambda pod: pod.node_name is None),
            members=self._members_after(before, now),
            with_rules=_replaced(self.with_rules, before, now, _has_rules),
            may_end=self._may_end_after({*node_names_of(uids, before, now)}, by_node),
        )

    def _by_node_after(
        self, before: Mapping[PodUid, PodObserved], now: Mapping[PodUid, PodObserved]
    ) -> Mapping[str, tuple[PodObserved, ...]]:
        bound: dict[str, list[PodObserved]] = {}
        for pod in (*before.values(), *now.values()):
            if pod.node_name is not None and pod.node_name not in bound:
                here = self.by_node.get(pod.node_name, ())
                bound[pod.node_name] = [kept for kept in here if kept.pod_uid not in before]
        if not bound:
            return self.by_node
        for pod in now.values():
            if pod.node_name is not None and pod.phase not in _FINISHED_PHASES:
                bound[pod.node_name].append(pod)
        by_node = dict(self.by_node)
        for name, on_node in bound.items():
            if on_node:
                by_node[name] = tuple(sorted(on_node, key=_by_uid))
            else:
                by_node.pop(name, None)
        return by_node

    def _may_end_after(
        self, names: Iterable[str], by_node: Mapping[str, tuple[PodObserved, ...]]
    ) -> Mapping[str, tuple[PodObserved, ...]]:
        ending = {name: tuple(filter(_may_end, by_node.get(name, ()))) for name in names}
        if all(pods == self.may_end.get(name, ()) for name, pods in ending.items()):
            return self.may_end
        return {name: pods for name, pods in {**self.may_end, **ending}.items() if pods}

    def _members_after(
        self, before: Mapping[PodUid, PodObserved], now: Mapping[PodUid, PodObserved]
    ) -> Mapping[JobId, int]:
        changes = Counter(pod.job_id for pod in now.values() if pod.job_id is not None and is_member(pod))
        changes.subtract(pod.job_id for pod in before.values() if pod.job_id is not None and is_member(pod))
        if not any(changes.values()):
            return self.members
        members = dict(self.members)
        for job_id, count in changes.items():
            members[job_id] = members.get(job_id, 0) + count
            if not members[job_id]:
                del members[job_id]
        return members


def _replaced(
    table: Mapping[PodUid, PodObserved],
    before: Mapping[PodUid, PodObserved],
    now: Mapping[PodUid, PodObserved],
    is_in: Callable[[PodObserved], bool],
) -> Mapping[PodUid, PodObserved]:
    added = {uid: pod for uid, pod in now.items() if is_in(pod)}
    removed = [uid for uid in before if uid in table and uid not in added]
    if not added and not removed:
        return table
    replaced = {**table, **added}
    for uid in removed:
        del replaced[uid]
    return replaced


def _has_rules(pod: PodObserved) -> bool:
    return pod.pod_affinity is not None or pod.preferences is not None


def _may_end(pod: PodObserved) -> bool:
    """True for a pod that is being deleted or runs for a job."""
    is_ending = pod.deleting_since is not None or (pod.job_id is not None and pod.started_at is not None)
    return is_ending and counts_for_idleness(pod)


def is_member(pod: PodObserved) -> bool:
    """True for a pod that counts as a member of its job: pending, running, or succeeded."""
    return pod.deleting_since is None and pod.phase != "failed"


_by_uid = attrgetter("pod_uid")
_PODS = Derivation(("pods",), PodIndex.of, PodIndex.updated)


def pod_index(state: ClusterState) -> PodIndex:
    """Return the index of the state's pods."""
    return _PODS.of(state)


def pods_by_node(state: ClusterState) -> Mapping[str, tuple[PodObserved, ...]]:
    """Return the unfinished pods by node name, ordered by uid, including DaemonSet and mirror pods; only of nodes with
    pods."""
    return pod_index(state).by_node


def node_names_of(
    uids: Iterable[PodUid], before: Mapping[PodUid, PodObserved], now: Mapping[PodUid, PodObserved]
) -> Iterator[str]:
    """Yield the names of the nodes that these pods were or are bound to."""
    for uid in uids:
        for pod in (before.get(uid), now.get(uid)):
            if pod is not None and pod.node_name is not None:
                yield pod.node_name


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


def is_ended_whole(job: JobRecord) -> bool:
    """True for a queued job whose attempt was ended as a whole: its Job is suspended until it is placed again."""
    return is_waiting(job) and job.preempted is not None and job.preempted.preemption is not None


def is_moving(job: JobRecord) -> bool:
    """True for a queued job whose attempt was ended so that it goes on elsewhere."""
    return is_ended_whole(job) and job.preempted is not None and beneficiary(job.preempted.preemption) is None


def is_preempted_for_another(job: JobRecord) -> bool:
    """True for a queued job whose attempt was ended so that another job can start."""
    return is_ended_whole(job) and not is_moving(job)


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


_WAITING: Derivation[Mapping[JobId, JobRecord]] = part_of("jobs", is_waiting)


def queue(state: ClusterState) -> tuple[JobRecord, ...]:
    """Return the queued jobs by priority, start deadline, waiting time and id."""
    waiting = [(job.queued, job) for job in _WAITING.of(state).values() if job.queued is not None]
    waiting.sort(
        key=lambda entry: (
            -entry[0].spec.priority,
            entry[0].spec.start_by_at or NO_START_DEADLINE,
            entry[0].queued_at,
            entry[0].job_id,
        )
    )
    return tuple(job for _, job in waiting)


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
