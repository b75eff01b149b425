"""What directives say about one purchase or one removal. Asked by the steps of `plan` that buy and that remove.

Counted are nodes of ours, as limits count them: from the plan that buys one until the cloud confirms its end.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.intake.directives import ActiveDirectives
from gpu_autoscaler.core.nodes.views import NodeView
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model.directives import Attribution, Override
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.defer_limits import Frozen, KeptByOverride, OverrideReached, PoolPaused
from gpu_autoscaler.model.reasons.drain import AboveOverride

Kind = tuple[str | None, str | None]  # pool and GPU model
Unit = Literal["node", "GPU"]


class Count(NamedTuple):
    """Nodes and their GPUs."""

    nodes: int = 0
    gpus: int = 0


class Bound(NamedTuple):
    """One side of an override, in one unit."""

    override: Override
    word: Attribution
    unit: Unit
    limit: int


def word_of(given: PolicyDirectiveGiven) -> Attribution:
    """Who said it, why, and until when."""
    return Attribution(key=given.directive.key, by=given.given_by, why=given.reason, until=given.until)


def frozen_by(directives: ActiveDirectives, policy: ScalingPolicy) -> Frozen | None:
    """Return who wants nothing to be changed; None: nobody does."""
    if directives.freeze is not None:
        return Frozen(attribution=word_of(directives.freeze))
    return Frozen() if policy.is_frozen else None


def most(directives: ActiveDirectives) -> Iterator[Bound]:
    """Every most that holds."""
    for override, given in directives.overrides:
        if override.nodes_count_max is not None:
            yield Bound(override, word_of(given), "node", override.nodes_count_max)
        if override.gpu_count_max is not None:
            yield Bound(override, word_of(given), "GPU", override.gpu_count_max)


def least(directives: ActiveDirectives) -> Iterator[Bound]:
    """Every least that holds."""
    for override, given in directives.overrides:
        if override.nodes_count_min is not None:
            yield Bound(override, word_of(given), "node", override.nodes_count_min)
        if override.gpu_count_min is not None:
            yield Bound(override, word_of(given), "GPU", override.gpu_count_min)


def applies_to(override: Override, kind: Kind) -> bool:
    """True when nodes of this pool and GPU model are in the override's scope."""
    pool, gpu_model = kind
    return override.pool in (None, pool) and override.gpu_model in (None, gpu_model)


def kind_of(view: NodeView) -> Kind:
    """Pool and GPU model of a node."""
    return view.pool, view.gpu_model


def bought_gpu_count(view: NodeView) -> int:
    """GPUs that were paid for, also while some of them are not allocatable."""
    decision = None if view.order is None else view.order.decision
    return view.allocatable.gpu_count if decision is None else decision.offer.resources.gpu_count


@cached_by_identity(2)
def counted(views: tuple[NodeView, ...]) -> Mapping[Kind, Count]:
    """What counts, by pool and GPU model."""
    return count_of(view for view in views if view.is_ours and view.is_counted)


def count_of(views: Iterable[NodeView]) -> Mapping[Kind, Count]:
    """These nodes, by pool and GPU model."""
    nodes: Counter[Kind] = Counter()
    gpus: Counter[Kind] = Counter()
    for view in views:
        nodes[kind_of(view)] += 1
        gpus[kind_of(view)] += bought_gpu_count(view)
    return {kind: Count(nodes[kind], gpus[kind]) for kind in nodes}


class OverrideUsage:
    """Nodes and GPUs by pool and model while a plan buys: a scratch pad, asked what somebody's most leaves."""

    def __init__(self, views: tuple[NodeView, ...], directives: ActiveDirectives) -> None:
        self._paused = directives.paused
        self._most = tuple(most(directives))
        self._counts = dict(counted(views)) if directives.overrides else {}

    def add(self, pool: str, offer: Offer, count: int) -> None:
        """Count this many nodes of the offer more; a negative count takes them back."""
        kind = (pool, offer.gpu_model)
        before = self._counts.get(kind, Count())
        after = Count(before.nodes + count, before.gpus + count * offer.resources.gpu_count)
        self._counts[kind] = after

    def excess(self, pool: str, offer: Offer) -> PoolPaused | OverrideReached | None:
        """Return what stands against one more node of the offer; None: nothing."""
        if (pause := self._paused.get(pool)) is not None:
            return PoolPaused(pool=pool, attribution=word_of(pause))
        for bound in self._most:
            more = 1 if bound.unit == "node" else offer.resources.gpu_count
            count = in_scope(bound, self._counts)
            # A node without GPUs passes no limit of GPUs, not even one that is passed already.
            if more and applies_to(bound.override, (pool, offer.gpu_model)) and count + more > bound.limit:
                return OverrideReached(attribution=bound.word, unit=bound.unit, count=count, count_max=bound.limit)
        return None


def in_scope(bound: Bound, counts: Mapping[Kind, Count]) -> int:
    """How many nodes or GPUs the override counts among these."""
    within = (count for kind, count in counts.items() if applies_to(bound.override, kind))
    return sum(count.nodes if bound.unit == "node" else count.gpus for count in within)


def staying(draft: Draft) -> Mapping[Kind, Count]:
    """What stays of ours as far as is decided. What this plan buys is left out: it may still be trimmed."""
    leaving = draft.leaving()
    return count_of(each for each in draft.views if each.is_ours and each.is_counted and each.name not in leaving)


def with_purchases(before: Mapping[Kind, Count], draft: Draft) -> Mapping[Kind, Count]:
    """The same with what this plan buys so far."""
    counts = dict(before)
    for purchase in draft.purchases:
        kind, offer = (purchase.decision.pool, purchase.decision.offer.gpu_model), purchase.decision.offer
        known = counts.get(kind, Count())
        counts[kind] = Count(known.nodes + 1, known.gpus + offer.resources.gpu_count)
    return counts


def protecting_directive(view: NodeView, draft: Draft) -> PoolPaused | KeptByOverride | None:
    """Return the directive for which the node is not to go by our choice; None: none keeps it."""
    if (pause := draft.directives.paused.get(view.pool or "")) is not None:
        return PoolPaused(pool=view.pool or "", attribution=word_of(pause))
    for bound in least(draft.directives):
        if not applies_to(bound.override, kind_of(view)):
            continue
        count = in_scope(bound, staying(draft))
        less = 1 if bound.unit == "node" else bought_gpu_count(view)
        if less and count - less < bound.limit:
            return KeptByOverride(attribution=bound.word, unit=bound.unit, count=count, count_min=bound.limit)
    return None


def beyond(view: NodeView, draft: Draft) -> AboveOverride | None:
    """Return the most that there is more than while this node stays; None: none is passed."""
    for bound in most(draft.directives):
        if applies_to(bound.override, kind_of(view)) and (bound.unit == "node" or bought_gpu_count(view)):
            count = in_scope(bound, staying(draft))
            if count > bound.limit:
                return AboveOverride(attribution=bound.word, unit=bound.unit, count=count, count_max=bound.limit)
    return None


def cap_minimum(policy: ScalingPolicy, directives: ActiveDirectives) -> ScalingPolicy:
    """Return the policy with its least number of nodes no higher than the most that somebody allows in all."""
    of_all = (each for each in most(directives) if each.override.key == Override().key)
    bounds = [each.limit for each in of_all if each.unit == "node"]
    if not bounds or min(bounds) >= policy.nodes_count_min:
        return policy
    return msgspec.structs.replace(policy, nodes_count_min=min(bounds))
