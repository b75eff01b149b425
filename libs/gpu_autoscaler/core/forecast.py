"""Step `prepare`: capacity that is wanted before anybody waits for it. So far that is the policy's minimum."""

from gpu_autoscaler.core.basket import Basket
from gpu_autoscaler.core.demand import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.freshness import stale_watch
from gpu_autoscaler.core.market import Market
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.shapes import Shape
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import HeldBack
from gpu_autoscaler.model.reasons import HoldReason
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NodeDemands, Toleration

# Any node with a GPU, whatever its taints.
_ANY_GPU_NODE = Shape(
    resources=Resources(gpu_count=1),
    demands=NodeDemands(tolerations=(Toleration(operator="Exists"),)),
)


def prepare(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """There are at least `nodes_count_min` nodes of ours, those that leave not counted; the cheapest are bought."""
    if not policy.nodes_count_min:
        return draft
    basket = Basket(draft, Market(draft, state, policy), policy)
    missing_count = policy.nodes_count_min - basket.nodes_count + len(draft.leaving())
    if missing_count <= 0:
        return draft
    item = DemandItem(
        key="cluster",
        source=DemandSource.MINIMUM,
        shape=_ANY_GPU_NODE,
        member_count=1,
        priority=0,
        since=draft.as_of,
    )
    reason: HoldReason | None = stale_watch(state, policy, draft.as_of)
    for _ in range(missing_count):
        if reason is None:
            _, reason = basket.buy(item, 1)
    held = [] if reason is None else [HeldBack(step="prepare", subject=item.key, reason=reason)]
    return draft.adding(purchases=basket.purchases(), held_back=held)
