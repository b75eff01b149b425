"""What a bought node waited for when its time was over: the first step of its boot that never came. Read by scale-down
and told by its reason, so that people know where to look."""

from gpu_autoscaler.core.life import NodeView
from gpu_autoscaler.model.boot_reasons import BootStep
from gpu_autoscaler.model.resources import GPU_RESOURCE, Resources
from gpu_autoscaler.model.scheduling import is_startup


def missing_step(view: NodeView) -> tuple[BootStep, str]:
    """Return the step, and what is there instead of it."""
    node = view.node
    if node is None:
        return "node", ""
    if not node.is_ready:
        return "kubelet", ""
    decision = None if view.order is None else view.order.decision or view.order.ordered
    if decision is not None and not decision.promised.gpus_fit_in(node.allocatable):
        return "gpus", _told(node.allocatable, decision.promised)
    starting = sorted(taint.key for taint in node.taints if is_startup(taint))
    return ("startup_taint", ", ".join(starting)) if starting else ("kubelet", "")


def _told(there: Resources, promised: Resources) -> str:
    """`0 of 8 nvidia.com/gpu`, of each kind of which some are missing."""
    counts = {GPU_RESOURCE: promised.gpu_count, **dict(promised.slices)}
    have = {GPU_RESOURCE: there.gpu_count, **dict(there.slices)}
    return ", ".join(
        f"{have.get(name, 0)} of {count} {name}" for name, count in counts.items() if have.get(name, 0) < count
    )
