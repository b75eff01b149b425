"""Our nodes with whole GPUs free, and what they cost for each workload: the price of keeping them for one more."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_autoscaler.core.nodes.views import NodeIndex, NodeView, Table
from gpu_autoscaler.core.placement.bins import free_resources
from gpu_autoscaler.core.state.queries import counts_for_idleness


class KeptNode(NamedTuple):
    """A node with free GPUs."""

    view: NodeView
    micro_usd_per_hour: int  # its price
    jobs_count: int  # that run there; a pod without a job is one
    free_gpu_count: int

    def shared_micro_usd_per_hour(self, overhead_micro_usd_per_hour: int) -> float:
        """Return its price and overhead, divided by the jobs that would share its end with one more."""
        return (self.micro_usd_per_hour + overhead_micro_usd_per_hour) / (self.jobs_count + 1)


class _WithFreeGpus(Table[Mapping[str, KeptNode]]):
    """Our nodes of known price that have whole GPUs free, by name."""

    def build(self, nodes: NodeIndex) -> Mapping[str, KeptNode]:
        """Look at all nodes."""
        return {kept.view.name: kept for view in nodes if (kept := _kept(view, nodes)) is not None}

    def update(
        self, table: Mapping[str, KeptNode], removed: Sequence[NodeView], added: Sequence[NodeView], nodes: NodeIndex
    ) -> Mapping[str, KeptNode]:
        """Replace the changed nodes."""
        new = {kept.view.name: kept for view in added if (kept := _kept(view, nodes)) is not None}
        out = {view.name for view in removed} & table.keys()
        return table if not new and not out else {name: table[name] for name in table.keys() - out} | new


WITH_FREE_GPUS = _WithFreeGpus()


def _kept(view: NodeView, nodes: NodeIndex) -> KeptNode | None:
    price = view.price_micro_usd_per_hour
    if not price or not view.is_ours or not view.is_schedulable:
        return None
    free_gpu_count = free_resources(view, nodes.pods).gpu_count
    if free_gpu_count <= 0:
        return None
    running = {pod.job_id or pod.pod_uid for pod in nodes.pods.get(view.name, ()) if counts_for_idleness(pod)}
    return KeptNode(view, price, len(running), free_gpu_count)
