"""Which pods were bound to which node, and when, and how busy its GPUs were: the state forgets both before the cost is
charged.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.limits.accrual import Allocation, Owner, busy_gpus
from gpu_autoscaler.core.state.queries import is_finished, is_workload
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.tables import tombstone_of
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import NodeUid, PodUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler_services.cost_tracker.bills import NodeShape


class BoundPod(msgspec.Struct, frozen=True, kw_only=True):
    """The last observation of a pod, and since when it is bound: it counts from its binding, not from its start."""

    pod: PodObserved
    seen_at: Instant  # of the last observation
    from_at: Instant


HeldPods = dict[str, dict[PodUid, BoundPod]]  # by the name of the node


class Holdings:
    """The pods of every node, including deleted ones that are not charged yet."""

    def __init__(self, memory: HeldPods | None = None) -> None:
        self.memory: HeldPods = {} if memory is None else memory
        self._by_node = self.memory

    def note(self, recorded: Iterable[Recorded]) -> None:
        """Take in facts. Pods that belong to their node (DaemonSets) are not charged."""
        for item in recorded:
            pod, at = item.fact, item.envelope.time
            if not isinstance(pod, PodObserved) or pod.node_name is None or not is_workload(pod):
                continue
            on_node = self._by_node.setdefault(pod.node_name, {})
            known = on_node.get(pod.pod_uid)
            if known is not None and (pod.epoch, pod.version) <= (known.pod.epoch, known.pod.version):
                continue
            began_at = min(at, pod.started_at or at)
            from_at = began_at if known is None else min(began_at, known.from_at)
            on_node[pod.pod_uid] = BoundPod(pod=pod, seen_at=at, from_at=from_at)

    def on_node(self, shape: NodeShape, state: ClusterState) -> list[Allocation]:
        """Return the allocations of this node: GPUs and slices if it has any, else CPU."""
        return [
            Allocation(
                owner=_owner(bound.pod, state),
                units=shape.units_of(bound.pod.requests),
                from_at=bound.from_at,
                until_at=_until(bound, state),
            )
            for bound in self._by_node.get(shape.name, {}).values()
        ]

    def forget(self, node_name: str, before: datetime, state: ClusterState) -> None:
        """Forget pods of the node that ended by then: they are charged."""
        on_node = self._by_node.get(node_name, {})
        for uid, bound in list(on_node.items()):
            until_at = _until(bound, state)
            if until_at is not None and until_at <= before:
                del on_node[uid]
        if not on_node:
            self._by_node.pop(node_name, None)

    def jobs(self) -> frozenset[str]:
        """Return the jobs of all remembered pods."""
        pods = (bound.pod for on_node in self._by_node.values() for bound in on_node.values())
        return frozenset(pod.job_id for pod in pods if pod.job_id is not None)

    def nodes(self) -> tuple[str, ...]:
        """Return the names of all nodes with remembered pods."""
        return tuple(self._by_node)


WINDOWS_COUNT_MAX = 30  # of a node: more than a span has, unless the cloud's lists fail; then the last ones count


class GpuWindow(msgspec.Struct, frozen=True, array_like=True):
    """How busy the GPUs of a node were for a minute or so."""

    from_at: Instant
    until_at: Instant
    gpus_count: int
    busy_count: float | None  # sum of their utilization; None: that of one is unknown


GpuWindows = dict[NodeUid, list[GpuWindow]]  # in order of time


class Utilization:
    """The telemetry of time that is not charged yet."""

    def __init__(self, memory: GpuWindows | None = None) -> None:
        self.memory: GpuWindows = {} if memory is None else memory

    def note(self, recorded: Iterable[Recorded]) -> None:
        """Take in facts."""
        for item in recorded:
            if isinstance(item.fact, GpuNodeSummarized):
                self._add(item.fact)

    def _add(self, fact: GpuNodeSummarized) -> None:
        from_at = fact.window_started_at
        until_at = from_at + timedelta(seconds=fact.window_seconds)
        windows = self.memory.setdefault(fact.node_uid, [])
        if windows and windows[-1].from_at >= from_at:
            return
        busy_count = busy_gpus(fact, from_at=from_at, to_at=until_at)
        windows.append(GpuWindow(from_at, until_at, len(fact.gpus), busy_count))
        del windows[:-WINDOWS_COUNT_MAX]

    def used_units(self, shape: NodeShape, from_at: datetime, to_at: datetime) -> float | None:
        """Return the average busy share of the node's GPUs in its units, by the windows with telemetry; None without
        any, or without GPUs.
        """
        used = [
            window.busy_count / window.gpus_count * shape.units if shape.gpus.slices else window.busy_count
            for window in self.memory.get(shape.node_uid, ())
            if window.busy_count is not None and window.until_at > from_at and window.from_at < to_at
        ]
        return sum(used) / len(used) if used and shape.gpus.has_gpus else None

    def keep(self, node_uids: Iterable[NodeUid]) -> None:
        """Forget all other nodes."""
        kept = frozenset(node_uids)
        self.memory = {node_uid: windows for node_uid, windows in self.memory.items() if node_uid in kept}


def _until(bound: BoundPod, state: ClusterState) -> datetime | None:
    """Return when the pod released its resources; None if it still holds them.

    Of a pod that the state has forgotten only the last observation is known.
    """
    if is_finished(bound.pod):
        return bound.pod.finished_at or bound.seen_at
    if bound.pod.pod_uid in state.pods:
        return None
    gone = tombstone_of(state.pods_gone, bound.pod.pod_uid)
    return bound.seen_at if gone is None else gone.gone_at


def _owner(pod: PodObserved, state: ClusterState) -> Owner:
    record = None if pod.job_id is None else state.jobs.get(pod.job_id)
    project_id = dict(pod.labels).get(labels.PROJECT_ID, "")
    if record is not None and record.queued is not None:
        project_id = record.queued.spec.project_id
    return Owner(project_id=project_id, namespace=pod.namespace, job_id=pod.job_id or "")
