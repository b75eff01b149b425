"""Step `prepare`: capacity ahead of demand: minimum of nodes, headroom, forecast.

Nodes kept as buffer are not removed, and no pod is moved to them by consolidation.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.history_samples import ANY_KIND
from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import plain
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.forecast_gauges import is_recent
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.state.demand_history import confidence_ratio, forecast_rises, free_target, peak_count
from gpu_autoscaler.core.state.freshness import stale_watch
from gpu_autoscaler.core.state.hours import hour
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Deferred
from gpu_autoscaler.model.reasons.buy import CapacityBuffer
from gpu_autoscaler.model.reasons.defer import DeferReason, ForecastUncertain
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import NodeDemands, Toleration

_STEP = "prepare"
_ANY_TAINTS = NodeDemands(tolerations=(Toleration(operator="Exists"),))
# Any node with a GPU, whatever its taints.
_ANY_GPU_NODE = Shape(resources=Resources(gpu_count=1), demands=_ANY_TAINTS)


class _BufferTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Target of free GPUs of one kind: below `min_count` nodes are bought, up to `target_count`."""

    key: str
    gpu_model: str | None
    min_count: int
    target_count: int
    uncertain: ForecastUncertain | None = None  # why it is only reported


def apply_scheduled_limits(policy: ScalingPolicy, as_of: datetime) -> ScalingPolicy:
    """Return the policy with the narrowest of all active limits; the maximum takes precedence over the minimum."""
    if not policy.scheduled_limits:
        return policy
    most = [policy.nodes_count_max]
    least = [policy.nodes_count_min]
    for limit in policy.scheduled_limits:
        if limit.nodes_count_max is not None and limit.is_active(as_of):
            most.append(limit.nodes_count_max)
        if limit.nodes_count_min is not None and limit.is_active(as_of, timedelta(seconds=limit.lead_seconds)):
            least.append(limit.nodes_count_min)
    bounds = min(*most, max(least)), min(most)
    if bounds == (policy.nodes_count_min, policy.nodes_count_max):
        return policy
    known = _policies_within(policy)
    if bounds not in known:
        known[bounds] = msgspec.structs.replace(policy, nodes_count_min=bounds[0], nodes_count_max=bounds[1])
    return known[bounds]


@cached_by_identity(4)
def _policies_within(_: ScalingPolicy) -> dict[tuple[int, int], ScalingPolicy]:
    """Return the place of the policy with other bounds: the same object for the same ones, as what is derived from a
    policy is found by its identity. There are at most a few per scheduled limit.
    """
    return {}


def prepare(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Buy the minimum of nodes and the free GPUs of headroom and forecast: the cheapest, within the limits."""
    return _keep_free(_keep_nodes(draft, state, policy), state, policy)


def _keep_nodes(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Buy up to `nodes_count_min` managed nodes, without those being removed."""
    if not policy.nodes_count_min:
        return draft
    basket = Basket(draft, OfferCatalog(draft.views, state, policy, draft.as_of), policy)
    missing_count = policy.nodes_count_min - basket.nodes_count + len(draft.leaving_nodes())
    if missing_count <= 0:
        return draft
    item = DemandItem(
        key="cluster",
        source=DemandSource.MINIMUM,
        shape=_ANY_GPU_NODE,
        member_count=1,
        priority=0,
        since=plain(draft.as_of),
    )
    reason: DeferReason | None = stale_watch(state, policy, draft.as_of)
    for _ in range(missing_count):
        if reason is None:
            _, reason = basket.buy(item, 1)
    deferred = [] if reason is None else [Deferred(step=_STEP, subject=item.key, reason=reason)]
    return draft.adding(purchases=basket.purchases(), deferred=deferred)


def _keep_free(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Reserve free GPUs for each target, and buy what is missing."""
    targets = (*_headroom_targets(policy, draft.as_of), *forecast_targets(state, policy, draft.as_of))
    targets = tuple(target for target in targets if target.target_count > 0)
    if not targets:
        return draft
    basket = Basket(draft, OfferCatalog(draft.views, state, policy, draft.as_of), policy)
    stale = stale_watch(state, policy, draft.as_of)
    deferred: list[Deferred] = []
    buffers: dict[str, str] = {}
    free_counts: dict[str | None, int] = {}  # by model: a forecast may use the headroom of its model
    for target in targets:
        model = target.gpu_model
        shape = msgspec.structs.replace(_ANY_GPU_NODE, gpu_models=() if model is None else (model,))
        shared_count = free_counts.get(model, 0)
        wanted_count = target.target_count - shared_count
        placed = draft.free_capacity.place_most(shape, wanted_count) if target.uncertain is None else ()
        free_count = shared_count + len(placed)
        if target.uncertain is not None:
            free_count = shared_count + draft.free_capacity.count_places(shape, wanted_count)
        buffers |= dict.fromkeys((key for key in placed if key not in buffers), target.key)
        reason: DeferReason | None = None
        if free_count < target.min_count:
            reason = target.uncertain or stale
            if reason is None:
                covered, reason = basket.buy(_item(target, shape, free_count, draft), target.target_count - free_count)
                bought = draft.free_capacity.place_most(shape, covered)
                buffers |= dict.fromkeys((key for key in bought if key not in buffers), target.key)
                free_count += len(bought)
        if reason is not None:
            deferred.append(Deferred(step=_STEP, subject=target.key, reason=reason))
        if target.uncertain is None:
            free_counts[model] = free_count
    bought_more = draft.adding(purchases=basket.purchases(), deferred=deferred)
    return msgspec.structs.replace(bought_more, buffers={**draft.buffers, **buffers})


def _headroom_targets(policy: ScalingPolicy, as_of: datetime) -> Iterator[_BufferTarget]:
    for headroom in policy.headrooms:
        if headroom.is_active(as_of, timedelta(seconds=headroom.lead_seconds)):
            yield _BufferTarget(
                key=f"headroom/{headroom.name}",
                gpu_model=headroom.gpu_model,
                min_count=headroom.free_gpu_count,
                target_count=headroom.free_gpu_count,
            )


def forecast_targets(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Iterator[_BufferTarget]:
    """Yield the targets of the forecasts, by GPU model; none without recent samples."""
    if not policy.forecast.is_on:
        return
    for kind, history in sorted(state.demand_history.items()):
        if not is_recent(history, as_of):
            continue
        forecast = forecast_rises(history.hours, hour(as_of), policy.forecast)
        free = free_target(
            forecast, history.levels[-1][1], peak_count(history), policy.forecast.prewarm_utilization_ratio_max
        )
        confidence = confidence_ratio(state.forecast_scores.get(kind, ()), hour(as_of), policy.forecast)
        least = policy.forecast.confidence_ratio_min
        is_certain = confidence is not None and confidence >= least
        yield _BufferTarget(
            key=f"forecast/{kind}",
            gpu_model=None if kind == ANY_KIND else kind,
            min_count=free.min_count,
            target_count=free.target_count,
            uncertain=None
            if is_certain
            else ForecastUncertain(confidence_ratio=confidence, confidence_ratio_min=least),
        )


def _item(target: _BufferTarget, shape: Shape, free_count: int, draft: Draft) -> DemandItem:
    return DemandItem(
        key=target.key,
        source=DemandSource.BUFFER,
        shape=shape,
        member_count=1,
        priority=0,
        since=plain(draft.as_of),
        buy_reason=CapacityBuffer(
            demand=(target.key,), free_gpu_count=free_count, wanted_gpu_count=target.target_count
        ),
    )
