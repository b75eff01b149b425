"""`plan`: what the cluster should become, step by step as the policy reads. Called by the scaler and by recompute."""

from datetime import datetime

from gpu_autoscaler.core import bounds, forecast, limits, scale_down, scale_up, spot, use
from gpu_autoscaler.core.buying import overriding
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.removing import cheaper, deleted, renewal, solvency
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.model.decisions import Plan


def plan(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Plan:
    """What the cluster should become, and why. Nothing has happened yet.

    Equal state, policy and `as_of` give an equal plan, byte for byte, in whichever order the state's mappings came.
    """
    policy = forecast.apply_scheduled_limits(policy, as_of)
    draft = Draft.start(state, as_of, policy)
    policy = bounds.cap_minimum(policy, draft.directives)
    draft = spot.spare_the_worn(draft, state, policy)
    draft = spot.avoid_hinted(draft, state, policy)
    draft = spot.replace_doomed(draft, state, policy)
    draft = deleted.empty_deleted(draft, state, policy)
    draft = solvency.keep_solvent(draft, state, policy)
    draft = scale_up.cover_demand(draft, state, policy)
    draft = overriding.keep_overrides(draft, state, policy)
    draft = forecast.prepare(draft, state, policy)
    draft = use.answer_use(draft, state, policy)
    draft = renewal.renew(draft, state, policy)
    draft = scale_down.release_idle(draft, state, policy)
    draft = scale_down.consolidate(draft, state, policy)
    draft = cheaper.replace_dear(draft, state, policy)
    return limits.trim(draft, policy).finished()
