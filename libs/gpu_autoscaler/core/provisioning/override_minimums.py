"""Step `keep_overrides`: buy the nodes and GPUs that an override's minimum requires."""

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.limits.override_bounds import Bound, in_scope, minima, remaining, with_purchases
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.reasons.buy import BelowOverride
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NodeDemands, Toleration

_STEP = "keep_overrides"
_ANY_TAINT = (Toleration(operator="Exists"),)


def keep_overrides(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Buy what each override's minimum misses: the cheapest in its scope, within the limits."""
    for bound in minima(draft.directives):
        draft = _keep(bound, draft, state, policy)
    return draft


def _keep(bound: Bound, draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    count = in_scope(bound, with_purchases(remaining(draft), draft))
    if count >= bound.limit:
        return draft
    key = bound.attribution.key
    wants = BelowOverride(
        demand=(key,), attribution=bound.attribution, unit=bound.unit, count=count, count_min=bound.limit
    )
    item = DemandItem(
        key=key,
        source=DemandSource.OVERRIDE,
        shape=_shape(bound),
        member_count=1,
        priority=0,
        since=plain(draft.as_of),
        buy_reason=wants,
    )
    reason: DeferReason | None = stale_watch(state, policy, draft.as_of)
    if reason is not None:
        return draft.adding(deferred=[Deferred(step=_STEP, subject=key, reason=reason)])
    basket = Basket(draft, OfferCatalog(draft.views, state, policy, draft.as_of), policy)
    missing_count = bound.limit - count
    if bound.unit == "GPU":
        _, reason = basket.buy(item, missing_count)
    else:
        for _ in range(missing_count):
            if reason is None:
                _, reason = basket.buy(item, 1)
    held = [] if reason is None else [Deferred(step=_STEP, subject=key, reason=reason)]
    return draft.adding(purchases=basket.purchases(), deferred=held)


def _shape(bound: Bound) -> Shape:
    """Return the shape of one GPU in the override's scope. Minimum nodes are nodes with GPUs."""
    override = bound.override
    selector = () if override.pool is None else ((labels.POOL, override.pool),)
    return Shape(
        resources=Resources(gpu_count=1),
        gpu_models=() if override.gpu_model is None else (override.gpu_model,),
        demands=NodeDemands(node_selector=selector, tolerations=_ANY_TAINT),
    )
