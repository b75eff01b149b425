"""Bounds that active directives set for purchases and removals.

Nodes that we bought count from the plan that decided them until the cloud confirms their end, as for limits.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.intake.directives import ActiveDirectives
from gpu_autoscaler.core.nodes.views import Counted, NodeView, table_of
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.directives import Attribution, Override
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.defer_limits import Frozen, KeptByOverride, OverrideReached, PoolPaused
from gpu_autoscaler.model.reasons.drain import AboveOverride

Kind = tuple[str | None, str | None]  # pool and GPU model
Unit = Literal["node", "GPU"]


class Count(NamedTuple):
    """Number of nodes and of their GPUs."""

    nodes: int = 0
    gpus: int = 0


class Bound(NamedTuple):
    """Minimum or maximum of an override, in one unit."""

    override: Override
    attribution: Attribution
    unit: Unit
    limit: int


def attribution_of(given: PolicyDirectiveGiven) -> Attribution:
    """Return who gave the directive, why, and until when."""
    return Attribution(key=given.directive.key, by=given.given_by, why=given.reason, until=given.until)


def frozen_by(directives: ActiveDirectives, policy: ScalingPolicy) -> Frozen | None:
    """Return the freeze of a directive or of the policy; None: not frozen."""
    if directives.freeze is not None:
        return Frozen(attribution=attribution_of(directives.freeze))
    return Frozen() if policy.is_frozen else None


def maxima(directives: ActiveDirectives) -> Iterator[Bound]:
    """Yield every active maximum."""
    for override, given in directives.overrides:
        if override.nodes_count_max is not None:
            yield Bound(override, attribution_of(given), "node", override.nodes_count_max)
        if override.gpu_count_max is not None:
            yield Bound(override, attribution_of(given), "GPU", override.gpu_count_max)


def minima(directives: ActiveDirectives) -> Iterator[Bound]:
    """Yield every active minimum."""
    for override, given in directives.overrides:
        if override.nodes_count_min is not None:
            yield Bound(override, attribution_of(given), "node", override.nodes_count_min)
        if override.gpu_count_min is not None:
            yield Bound(override, attribution_of(given), "GPU", override.gpu_count_min)


def applies_to(override: Override, kind: Kind) -> bool:
    """True if the override applies to this pool and GPU model."""
    pool, gpu_model = kind
    return override.pool in (None, pool) and override.gpu_model in (None, gpu_model)


def kind_of(view: NodeView) -> Kind:
    """Return pool and GPU model of a node."""
    return view.pool, view.gpu_model


_COUNTED = Counted(lambda view: (kind_of(view), view.gpu_count) if view.is_ours and view.is_counted else None)


def counted(views: Sequence[NodeView]) -> Mapping[Kind, Count]:
    """Return the counted nodes by pool and GPU model."""
    counts: dict[Kind, Count] = {}
    for (kind, gpu_count), count in table_of(views, _COUNTED).items():
        before = counts.get(kind, Count())
        counts[kind] = Count(before.nodes + count, before.gpus + count * gpu_count)
    return counts


def count_of(views: Iterable[NodeView]) -> Mapping[Kind, Count]:
    """Return the nodes by pool and GPU model."""
    nodes: Counter[Kind] = Counter()
    gpus: Counter[Kind] = Counter()
    for view in views:
        nodes[kind_of(view)] += 1
        gpus[kind_of(view)] += view.gpu_count
    return {kind: Count(nodes[kind], gpus[kind]) for kind in nodes}


class OverrideUsage:
    """Nodes and GPUs by pool and model while a plan is made, against maximums of overrides. Mutable."""

    def __init__(self, views: Sequence[NodeView], directives: ActiveDirectives) -> None:
        self._paused = directives.paused
        self._maxima = tuple(maxima(directives))
        self._counts = dict(counted(views)) if self._maxima else {}

    def add(self, pool: str, offer: Offer, count: int) -> None:
        """Add nodes of the offer; a negative count takes them back."""
        if not self._maxima:
            return
        kind = (pool, offer.gpu_model)
        before = self._counts.get(kind, Count())
        self._counts[kind] = Count(before.nodes + count, before.gpus + count * offer.resources.gpu_count)

    def excess(self, pool: str, offer: Offer) -> PoolPaused | OverrideReached | None:
        """Return the directive that forbids one more node of the offer; None: none does."""
        if (pause := self._paused.get(pool)) is not None:
            return PoolPaused(pool=pool, attribution=attribution_of(pause))
        for bound in self._maxima:
            more = 1 if bound.unit == "node" else offer.resources.gpu_count
            count = in_scope(bound, self._counts)
            # A node without GPUs exceeds no GPU limit, even if the limit is exceeded already.
            if more and applies_to(bound.override, (pool, offer.gpu_model)) and count + more > bound.limit:
                return OverrideReached(
                    attribution=bound.attribution, unit=bound.unit, count=count, count_max=bound.limit
                )
        return None


def in_scope(bound: Bound, counts: Mapping[Kind, Count]) -> int:
    """Return the nodes or GPUs that the override applies to."""
    within = (count for kind, count in counts.items() if applies_to(bound.override, kind))
    return sum(count.nodes if bound.unit == "node" else count.gpus for count in within)


def remaining(draft: Draft) -> Mapping[Kind, Count]:
    """Return the counted nodes that are not being removed, without purchases of this plan, which may be dropped."""
    leaving = draft.leaving_nodes()
    return count_of(view for view in draft.views if view.is_ours and view.is_counted and view.name not in leaving)


def with_purchases(before: Mapping[Kind, Count], draft: Draft) -> Mapping[Kind, Count]:
    """Return the counts with purchases of this plan so far."""
    counts = dict(before)
    for purchase in draft.purchases:
        kind, offer = (purchase.decision.pool, purchase.decision.offer.gpu_model), purchase.decision.offer
        known = counts.get(kind, Count())
        counts[kind] = Count(known.nodes + 1, known.gpus + offer.resources.gpu_count)
    return counts


def protecting_directive(view: NodeView, draft: Draft) -> PoolPaused | KeptByOverride | None:
    """Return the directive that forbids a voluntary removal of the node; None: none does."""
    if (pause := draft.directives.paused.get(view.pool or "")) is not None:
        return PoolPaused(pool=view.pool or "", attribution=attribution_of(pause))
    for bound in minima(draft.directives):
        if not applies_to(bound.override, kind_of(view)):
            continue
        count = in_scope(bound, remaining(draft))
        less = 1 if bound.unit == "node" else view.gpu_count
        if less and count - less < bound.limit:
            return KeptByOverride(attribution=bound.attribution, unit=bound.unit, count=count, count_min=bound.limit)
    return None


def exceeded_override(view: NodeView, draft: Draft) -> AboveOverride | None:
    """Return the maximum that is exceeded while this node remains; None: none."""
    for bound in maxima(draft.directives):
        if applies_to(bound.override, kind_of(view)) and (bound.unit == "node" or view.gpu_count):
            count = in_scope(bound, remaining(draft))
            if count > bound.limit:
                return AboveOverride(attribution=bound.attribution, unit=bound.unit, count=count, count_max=bound.limit)
    return None


def cap_minimum(policy: ScalingPolicy, directives: ActiveDirectives) -> ScalingPolicy:
    """Return the policy with its minimum number of nodes lowered to the maximum of overrides of the whole cluster."""
    cluster_maxima = (bound for bound in maxima(directives) if bound.override.key == Override().key)
    bounds = [bound.limit for bound in cluster_maxima if bound.unit == "node"]
    if not bounds or min(bounds) >= policy.nodes_count_min:
        return policy
    return msgspec.structs.replace(policy, nodes_count_min=min(bounds))
