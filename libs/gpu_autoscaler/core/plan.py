"""`plan`: decisions from the state, step by step. Used by the scaler and by recompute."""

from collections.abc import Mapping
from datetime import datetime

from gpu_autoscaler.core.disruption import (
    deleted_nodes,
    drift,
    emptiness,
    interruption,
    replacement,
    spend_enforcement,
    spot_returns,
    utilization,
)
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits import limits, override_bounds
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning import forecast_step, override_minimums, scale_up
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.upkeep import decide_upkeep
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.defer import PlanRejected


def plan(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, rejected: Mapping[str, PlanRejected] | None = None
) -> Plan:
    """Return the decisions and deferrals with their reasons. Nothing is executed.

    Equal state, policy and `as_of` give an equal plan, byte for byte, whatever the order of the mappings.
    `rejected`: what the plan check refused just now, by subject; it is deferred like what the state has set aside.
    """
    policy = forecast_step.apply_scheduled_limits(policy, as_of)
    draft = Draft.start(state, as_of, policy, rejected)
    policy = override_bounds.cap_minimum(policy, draft.directives)
    draft = interruption.exclude_spot(draft, state, policy)
    draft = interruption.avoid_rebalance_candidates(draft, state, policy)
    draft = interruption.drain_at_risk_nodes(draft, state, policy)
    draft = deleted_nodes.drain_deleted_nodes(draft, state, policy)
    draft = spend_enforcement.enforce_spend_budgets(draft, state, policy)
    draft = scale_up.cover_demand(draft, state, policy)
    draft = override_minimums.keep_overrides(draft, state, policy)
    draft = forecast_step.prepare(draft, state, policy)
    draft = utilization.react_to_utilization(draft, state, policy)
    draft = drift.replace_drifted(draft, state, policy)
    draft = spot_returns.return_to_spot(draft, state, policy)
    draft = emptiness.release_idle(draft, state, policy)
    draft = emptiness.consolidate(draft, state, policy)
    draft = replacement.replace_expensive(draft, state, policy)
    draft = limits.cut_to_one_plan(limits.trim(draft, policy))
    return decide_upkeep(draft, state, policy).to_plan()
