"""Step `prepare`: capacity that is wanted before anybody waits for it: the minimum, headroom, demand that is foreseen.

What is kept free stays free: its nodes do not go, and nothing is moved there to empty another.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec

from gpu_autoscaler.core.demand.history_samples import ANY_KIND
from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.placement.shapes import Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
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
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ANY_TAINTS = NodeDemands(tolerations=(Toleration(operator="Exists"),))
# Any node with a GPU, whatever its taints.
_ANY_GPU_NODE = Shape(resources=Resources(gpu_count=1), demands=_ANY_TAINTS)
# A sample that is older says nothing about now.
_SAMPLE_AGE_MAX = timedelta(minutes=5)


class _Want(msgspec.Struct, frozen=True, kw_only=True):
    """So many GPUs of a kind are to be free: below the least some are bought, up to enough."""

    key: str
    gpu_model: str | None
    min_count: int
    target_count: int
    doubt: ForecastUncertain | None = None  # why it is told and not acted on


def apply_scheduled_limits(policy: ScalingPolicy, as_of: datetime) -> ScalingPolicy:
    """Return the policy with the bounds of the hour: of all that hold, the narrowest; a most goes before a least."""
    if not policy.scheduled_limits:
        return policy
    most = [policy.nodes_count_max]
    least = [policy.nodes_count_min]
    for size in policy.scheduled_limits:
        if size.nodes_count_max is not None and size.is_active(as_of):
            most.append(size.nodes_count_max)
        if size.nodes_count_min is not None and size.is_active(as_of, timedelta(seconds=size.lead_seconds)):
            least.append(size.nodes_count_min)
    bound = min(most)
    return msgspec.structs.replace(policy, nodes_count_max=bound, nodes_count_min=min(bound, max(least)))


def prepare(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """The policy's least nodes are there, and so many GPUs are free as headroom and forecast want; the cheapest are
    bought, within the limits."""
    return _keep_free(_keep_nodes(draft, state, policy), state, policy)


def _keep_nodes(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """There are at least `nodes_count_min` nodes of ours, those that leave not counted."""
    if not policy.nodes_count_min:
        return draft
    basket = Basket(draft, OfferCatalog(draft, state, policy), policy)
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
    reason: DeferReason | None = stale_watch(state, policy, draft.as_of)
    for _ in range(missing_count):
        if reason is None:
            _, reason = basket.buy(item, 1)
    held = [] if reason is None else [Deferred(step=_STEP, subject=item.key, reason=reason)]
    return draft.adding(purchases=basket.purchases(), deferred=held)


def _keep_free(draft: Draft, state: ClusterState, policy: ScalingPolicy) -> Draft:
    """Free room is set aside for each want, and bought where too little is there or on its way."""
    wants = [want for want in (*_headroom(policy, draft.as_of), *_foreseen(state, policy, draft.as_of))
             if want.target_count > 0]  # fmt: skip
    if not wants:
        return draft
    basket = Basket(draft, OfferCatalog(draft, state, policy), policy)
    stale = stale_watch(state, policy, draft.as_of)
    held: list[Deferred] = []
    ahead: dict[str, str] = {}
    kept_counts: dict[str | None, int] = {}  # by model: a forecast may use the headroom of its kind
    for want in wants:
        shape = msgspec.structs.replace(_ANY_GPU_NODE, gpu_models=() if want.gpu_model is None else (want.gpu_model,))
        shared_count = kept_counts.get(want.gpu_model, 0)
        placed = draft.free_capacity.place_most(shape, want.target_count - shared_count) if want.doubt is None else ()
        free_count = shared_count + len(placed)
        if want.doubt is not None:
            free_count = shared_count + draft.free_capacity.count_places(shape, want.target_count - shared_count)
        ahead |= dict.fromkeys((key for key in placed if key not in ahead), want.key)
        reason: DeferReason | None = None
        if free_count < want.min_count:
            why = CapacityBuffer(demand=(want.key,), free_gpu_count=free_count, wanted_gpu_count=want.target_count)
            reason = want.doubt or stale
            if reason is None:
                covered, reason = basket.buy(_item(want, shape, why, draft), want.target_count - free_count)
                bought = draft.free_capacity.place_most(shape, covered)
                ahead |= dict.fromkeys((key for key in bought if key not in ahead), want.key)
                free_count += len(bought)
        if reason is not None:
            held.append(Deferred(step=_STEP, subject=want.key, reason=reason))
        if want.doubt is None:
            kept_counts[want.gpu_model] = free_count
    bought_more = draft.adding(purchases=basket.purchases(), deferred=held)
    return msgspec.structs.replace(bought_more, ahead={**draft.ahead, **ahead})


def _headroom(policy: ScalingPolicy, as_of: datetime) -> Iterator[_Want]:
    for free_capacity in policy.headrooms:
        if free_capacity.is_active(as_of, timedelta(seconds=free_capacity.lead_seconds)):
            yield _Want(
                key=f"headroom/{free_capacity.name}",
                gpu_model=free_capacity.gpu_model,
                min_count=free_capacity.free_gpu_count,
                target_count=free_capacity.free_gpu_count,
            )


def _foreseen(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Iterator[_Want]:
    """What the forecast of each kind wants; nothing where nothing was sampled lately."""
    if not policy.forecast.is_on:
        return
    for kind, history in sorted(state.demand_history.items()):
        if not history.levels or as_of - _at(history.levels[-1][0]) > _SAMPLE_AGE_MAX:
            continue
        forecast = forecast_rises(history.hours, hour(as_of), policy.forecast)
        free = free_target(forecast, history.levels[-1][1], peak_count(history))
        confidence = confidence_ratio(state.forecast_scores.get(kind, ()), hour(as_of), policy.forecast)
        least = policy.forecast.confidence_ratio_min
        is_sure = confidence is not None and confidence >= least
        yield _Want(
            key=f"forecast/{kind}",
            gpu_model=None if kind == ANY_KIND else kind,
            min_count=free.min_count,
            target_count=free.target_count,
            doubt=None if is_sure else ForecastUncertain(confidence_ratio=confidence, confidence_ratio_min=least),
        )


def _item(want: _Want, shape: Shape, why: CapacityBuffer, draft: Draft) -> DemandItem:
    return DemandItem(
        key=want.key,
        source=DemandSource.AHEAD,
        shape=shape,
        member_count=1,
        priority=0,
        since=draft.as_of,
        ahead=why,
    )


def _at(minute: int) -> datetime:
    return _EPOCH + timedelta(minutes=minute)


# What the forecast says in two figures: how full the cluster is to be in half an hour, and how sure that is.
# For screens and metrics alone; what is decided by a forecast stands in `core/provisioning/forecast_step.py`.

# A sample that is older says nothing about now.


class ForecastGauges(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Unknown is None: no forecast is on, nothing was sampled lately, or this hour was never seen."""

    utilization_ratio: float | None = None  # GPUs asked for then, of those there or on their way; above 1: more
    confidence_ratio: float | None = None  # of the kind that is foreseen worst; None: too few hours were scored


NO_FORECAST = ForecastGauges()


def foresight(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> ForecastGauges:
    """Return what is foreseen for the half hour to come, all kinds of GPU together."""
    if not policy.forecast.is_on:
        return NO_FORECAST
    wanted_count: int | None = None
    confidences: list[float | None] = []
    for kind, history in state.demand_history.items():
        if not history.levels or as_of - (_EPOCH + timedelta(minutes=history.levels[-1][0])) > _SAMPLE_AGE_MAX:
            continue
        made = forecast_rises(history.hours, hour(as_of), policy.forecast)
        level = history.levels[-1][1]
        if made is None and level:
            return NO_FORECAST  # a part that is not foreseen makes the sum a guess
        if made is not None:
            wanted_count = (wanted_count or 0) + level + made.long_rise_count
            confidences.append(confidence_ratio(state.forecast_scores.get(kind, ()), hour(as_of), policy.forecast))
    views = node_views(state, as_of)
    there_count = sum(view.allocatable.gpu_count for view in views if view.is_usable or view.is_booting)
    known = [each for each in confidences if each is not None]
    return ForecastGauges(
        utilization_ratio=None if wanted_count is None or not there_count else wanted_count / there_count,
        confidence_ratio=min(known) if known and len(known) == len(confidences) else None,
    )
