"""Nodes as bins: existing nodes, nodes on their way, and offered nodes, in the terms of the placement engine."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, PodsByNode, Selected, Table, bin_key
from gpu_autoscaler.core.placement.bin_columns import Bins
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness
from gpu_autoscaler.core.policy.gpu_slices import sharing_labels, slices_of
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.core.state.queries import is_workload
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import Resources, Slices


class _CurrentBins(Table[Bins]):
    """A bin for each node on which work may be planned: usable nodes, and ordered ones until their deadline.

    The node of a canceled drain has a bin, and one that takes no pods now a closed bin for those that it has. Nodes
    under notice have none, nor those that are being removed.
    """

    def build(self, nodes: NodeIndex) -> Bins:
        """Return the bins in the order of their nodes."""
        return Bins(filter(None, (_current_bin(view, nodes.pods) for view in nodes)))

    def update(self, table: Bins, removed: Sequence[NodeView], added: Sequence[NodeView], nodes: NodeIndex) -> Bins:
        """Replace the bins of these nodes; new ones come last."""
        now = (_current_bin(view, nodes.pods) for view in added)
        return table.replaced(map(bin_key, removed), [entry for entry in now if entry is not None])


CURRENT_BINS = _CurrentBins()


def _current_bin(view: NodeView, pods: PodsByNode) -> Bin | None:
    if view.notice is not None or (view.drain is not None and view.drain.cancel is None):
        return None
    if view.is_usable:
        return node_bin(view, pods, BinReadiness.READY)
    if view.drain is not None or (view.is_booting and view.order is not None):
        return node_bin(view, pods, BinReadiness.COMING)
    is_staying = view.node is not None and view.node.deleting_since is None and view.phase is not NodePhase.FAILED
    has_staying_pods = is_staying and view.name in pods
    return node_bin(view, pods, BinReadiness.CLOSED) if has_staying_pods else None


def node_bin(view: NodeView, pods: PodsByNode, readiness: BinReadiness) -> Bin:
    """Return the node's bin with what its pods leave free."""
    bound = pods.get(view.name, ())
    return Bin(
        key=bin_key(view),
        name=view.name,
        free=_free_resources(view, bound),
        has_gpus=view.allocatable.has_gpus or view.gpu_model is not None,
        readiness=readiness,
        labels=view.labels if view.zone is None else {labels.ZONE: view.zone, **view.labels},
        pods=bound,
        taints=tuple(taint for taint in view.taints if taint.key != labels.AVOID_TAINT),
        gpu_model=view.gpu_model,
        gpu_memory_bytes=view.gpu_memory_bytes,
        capacity_type=view.capacity_type,
        expected_at=view.expected_at,
    )


def free_resources(view: NodeView, pods: PodsByNode) -> Resources:
    """Return allocatable less the requests of the node's pods.

    An offer's amounts exclude what DaemonSets take, so on a booting node only workloads are subtracted.
    """
    return _free_resources(view, pods.get(view.name, ()))


def _free_resources(view: NodeView, bound: tuple[PodObserved, ...]) -> Resources:
    return _less(view.allocatable, [pod for pod in bound if is_workload(pod)] if view.is_booting else bound)


def requested_ratio(view: NodeView, pods: PodsByNode) -> float:
    """Return the requested share of the node: of its GPUs if it has any, else the larger of CPU and memory.

    Source: cluster-autoscaler FAQ, "How does scale-down work?" (read 2026-11-21).
    """
    total, free = view.allocatable, free_resources(view, pods)
    if total.has_gpus:
        return max(1 - _count(free, name) / count for name, count in ((None, total.gpu_count), *total.slices) if count)
    shares = ((total.cpu_milli, free.cpu_milli), (total.memory_bytes, free.memory_bytes))
    return max((1 - left / whole for whole, left in shares if whole), default=1.0)


class _LowRequests(Selected):
    """Our usable nodes with work, of which at most this share is requested."""

    def __init__(self, ratio_max: float) -> None:
        super().__init__(lambda view: view.is_ours and view.is_usable and view.empty_since is None)
        self._ratio_max = ratio_max

    def selects(self, view: NodeView, nodes: NodeIndex) -> bool:
        """Return True for a selected view."""
        return super().selects(view, nodes) and requested_ratio(view, nodes.pods) <= self._ratio_max


low_requests = lru_cache(16)(_LowRequests)  # by ratio: the tables of one policy


def _count(amounts: Resources, kind: str | None) -> int:
    """Return the number of slices of the kind; None: of whole GPUs."""
    return amounts.gpu_count if kind is None else dict(amounts.slices).get(kind, 0)


def allocatable_for_work(view: NodeView, pods: PodsByNode) -> Resources:
    """Return allocatable less the requests of the node's own pods."""
    return _less(view.allocatable, [pod for pod in pods.get(view.name, ()) if not is_workload(pod)])


def _less(whole: Resources, pods: Sequence[PodObserved]) -> Resources:
    cpu_milli = memory_bytes = gpu_count = ephemeral_storage_bytes = 0
    slices: Counter[str] = Counter()
    for pod in pods:  # added up by hand: the only loop over all running pods in a planning run
        requests = pod.requests
        cpu_milli += requests.cpu_milli
        memory_bytes += requests.memory_bytes
        gpu_count += requests.gpu_count
        ephemeral_storage_bytes += requests.ephemeral_storage_bytes
        if requests.slices:
            slices.update(dict(requests.slices))
    return whole - Resources(
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        gpu_count=gpu_count,
        ephemeral_storage_bytes=ephemeral_storage_bytes,
        pod_count=len(pods),
        slices=tuple(sorted(slices.items())),
    )


def offered_bin(pool: NodePool, offer: Offer, action_id: ActionId) -> Bin:
    """Return the bin of a new node of this offer."""
    marks = offer.marks_in(pool.name)
    return Bin(
        key=f"action/{action_id}",
        name=action_id,
        free=offer.cut_into(slices_in(pool, offer)),
        has_gpus=offer.resources.gpu_count > 0,
        readiness=BinReadiness.BOUGHT,
        labels={
            **dict(marks.labels),
            **ordered_labels(pool, offer, action_id),
            labels.INSTANCE_TYPE: offer.instance_type,
            labels.ZONE: offer.zone,
        },
        taints=(*pool.taints, *(taint for taint in marks.taints if taint not in pool.taints)),
        gpu_model=offer.gpu_model,
        gpu_memory_bytes=offer.gpu_memory_bytes,
        capacity_type=offer.capacity_type,
    )


def slices_in(pool: NodePool, offer: Offer) -> Slices:
    """Return the slices into which the pool partitions the GPUs of such a node; empty: they stay whole."""
    return (slices_of(pool.sharing, offer) or ()) if pool.sharing is not None else ()


def ordered_labels(pool: NodePool, offer: Offer, action_id: ActionId, project: str | None = None) -> dict[str, str]:
    """Return the labels that the node must carry when it registers."""
    ours = {labels.ACTION_ID: action_id, labels.POOL: pool.name, labels.CAPACITY_TYPE: str(offer.capacity_type)}
    model = {} if offer.gpu_model is None else {labels.GPU_MODEL: offer.gpu_model}
    payer = {} if project is None else {labels.PROJECT_ID: project}
    shared = {} if pool.sharing is None else sharing_labels(pool.sharing, offer)
    return {**pool.labels, **ours, **model, **payer, **shared}
