"""Which pods held a part of which node, and when: the state forgets a pod with its object, its cost comes later."""

from collections.abc import Iterable
from datetime import datetime

import msgspec

from gpu_autoscaler.core.folding.graves import tombstone_of
from gpu_autoscaler.core.spending.accrual import Allocation, Owner
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.views import is_finished, is_workload
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import PodUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler_services.cost_tracker.bills import NodeShape


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    """A pod's last word, and since when it holds its room: a pod holds it from its binding, not from its start."""

    pod: PodObserved
    seen_at: Instant  # when its last word was said
    from_at: Instant


class Holdings:
    """The pods of every node, also those that are gone but not charged yet."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[PodUid, _Held]] = {}

    def note(self, recorded: Iterable[Recorded]) -> None:
        """Take in what was said. Pods that belong to their node (DaemonSets) hold nothing."""
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
            on_node[pod.pod_uid] = _Held(pod=pod, seen_at=at, from_at=from_at)

    def on_node(self, shape: NodeShape, state: ClusterState) -> list[Allocation]:
        """Return who held what of this node: GPUs, or parts of GPUs, where it has some, else CPU."""
        return [
            Allocation(
                owner=_owner(held.pod, state),
                units=shape.units_of(held.pod.requests),
                from_at=held.from_at,
                until_at=_until(held, state),
            )
            for held in self._by_node.get(shape.name, {}).values()
        ]

    def forget(self, node_name: str, before: datetime, state: ClusterState) -> None:
        """Drop pods of the node that ended before: they are charged."""
        on_node = self._by_node.get(node_name, {})
        for uid, held in list(on_node.items()):
            until_at = _until(held, state)
            if until_at is not None and until_at <= before:
                del on_node[uid]
        if not on_node:
            self._by_node.pop(node_name, None)

    def nodes(self) -> tuple[str, ...]:
        """Return the names of all nodes that something is known to have held a part of."""
        return tuple(self._by_node)


def _until(held: _Held, state: ClusterState) -> datetime | None:
    """When the pod gave its room back; None: it still holds it.

    A pod that the state has forgotten altogether ended at the latest hours ago; its last word is all there is.
    """
    if is_finished(held.pod):
        return held.pod.finished_at or held.seen_at
    if held.pod.pod_uid in state.pods:
        return None
    gone = tombstone_of(state.pods_gone, held.pod.pod_uid)
    return held.seen_at if gone is None else gone.gone_at


def _owner(pod: PodObserved, state: ClusterState) -> Owner:
    record = None if pod.job_id is None else state.jobs.get(pod.job_id)
    project_id = dict(pod.labels).get(labels.PROJECT_ID, "")
    if record is not None and record.queued is not None:
        project_id = record.queued.spec.project_id
    return Owner(project_id=project_id, namespace=pod.namespace, job_id=pod.job_id or "")
