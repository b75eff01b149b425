"""The way back to spot: which nodes only stand in for it, and whether it is calm there. Used by `replace_dear`."""

from datetime import datetime

from gpu_autoscaler.core.demand import job_spec, pod_shape
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.interruptions import ends_by_place, rate_of
from gpu_autoscaler.core.nodes.life import NodeView
from gpu_autoscaler.core.placing.company import rules_of
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.removing.moving import moving_pods
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.offers import CapacityType


def stands_in_for_spot(view: NodeView, draft: Draft, state: ClusterState) -> bool:
    """True for an on-demand node all of whose work may be on spot: it was bought while spot was not to be had."""
    if view.capacity_type is not CapacityType.ON_DEMAND:
        return False
    rules = rules_of(state.pods)
    shapes = (pod_shape(pod, job_spec(state, pod.job_id), rules) for pod in moving_pods(view, draft))
    return all(shape.is_spot_allowed for shape in shapes)


def leaves_for_a_storm(
    group: tuple[NodeView, ...],
    purchases: tuple[Purchase, ...],
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
) -> bool:
    """True where work would leave a node that nobody takes for spot that is taken too often still."""
    if not any(view.capacity_type is CapacityType.ON_DEMAND for view in group):
        return False
    ends = ends_by_place(state, as_of)
    return any(rate_of(each.decision.offer, ends) > policy.spot.interruption_ratio_max for each in purchases)
