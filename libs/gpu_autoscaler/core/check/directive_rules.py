"""Rules of the plan check on directives: read again from the records, counted from orders and nodes."""

from collections.abc import Iterator

from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, DrainNode, Plan
from gpu_autoscaler.model.directives import AnyDirective, Freeze, Override, PausePool
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.drain import NodeDeleted, SpendExhausted, SpotReclaim


def directive_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each purchase and each removal that an active directive forbids."""
    records = (record for record in state.directives.values() if record.lifted is None)
    active = [record.given for record in records if record.given.until > plan.as_of]
    given: list[tuple[AnyDirective, str]] = [(entry.directive, entry.given_by) for entry in active]
    given += _pool_directives(policy, [entry.directive for entry in active])
    if not given:
        return
    bought = plan.purchases
    drains = plan.drains
    chosen = [drain for drain in drains if not isinstance(drain.reason, SpotReclaim | NodeDeleted)]
    # A hard spend limit precedes a minimum, of a pool as of all nodes.
    unforced = [drain for drain in chosen if not isinstance(drain.reason, SpendExhausted)]
    views = [view for view in node_views(state, plan.as_of) if view.is_ours and view.is_counted]
    removed_uids = {drain.node_uid for drain in drains}
    for directive, given_by in given:
        match directive:
            case Freeze():
                if bought or chosen:
                    yield Violation(
                        f"{len(bought)} nodes are bought and {len(chosen)} removed under {given_by}'s freeze",
                        *bought,
                        *chosen,
                    )
            case PausePool(pool=pool):
                touched: list[tuple[str, AnyDecision]] = [
                    (purchase.offer.key, purchase) for purchase in bought if purchase.pool == pool
                ]
                pool_of = {view.node_uid: view.pool for view in views}
                # A removal for a spend limit is not by choice.
                touched += [(drain.node_name, drain) for drain in unforced if pool_of.get(drain.node_uid) == pool]
                for name, decision in touched:
                    yield Violation(f"{name} is bought or removed in pool {pool}, which {given_by} paused", decision)
            case Override() as override:
                yield from _above_maximum(override, override.key, bought, views)
                yield from _below_minimum(override, override.key, bought, unforced, views, removed_uids)


def _pool_directives(policy: ScalingPolicy, given: list[AnyDirective]) -> Iterator[tuple[AnyDirective, str]]:
    """Yield the standing settings of the policy's pools as directives; a user's maximum precedes their minimum."""
    for pool in policy.pools:
        if pool.is_paused:
            yield PausePool(pool=pool.name), "the policy"
        lower = [
            directive.nodes_count_max
            for directive in given
            if isinstance(directive, Override) and directive.nodes_count_max is not None
            if directive.gpu_model is None and directive.pool in (None, pool.name)
        ]
        if nodes_count_min := min([pool.nodes_count_min, *lower]):
            yield Override(pool=pool.name, nodes_count_min=nodes_count_min), "the policy"


def _above_maximum(override: Override, key: str, bought: list[BuyNode], views: list[NodeView]) -> Iterator[str]:
    own = [purchase for purchase in bought if _is_in_scope(override, purchase.pool, purchase.offer.gpu_model)]
    there = [view for view in views if _is_in_scope(override, view.pool, view.gpu_model)]
    nodes_count = len(own) + len(there)
    gpu_count = sum(purchase.offer.resources.gpu_count for purchase in own) + sum(map(_gpus, there))
    buys_gpus = any(purchase.offer.resources.gpu_count for purchase in own)
    if own and override.nodes_count_max is not None and nodes_count > override.nodes_count_max:
        yield Violation(f"{key} allows {override.nodes_count_max} nodes, there would be {nodes_count}", *own)
    if buys_gpus and override.gpu_count_max is not None and gpu_count > override.gpu_count_max:
        yield Violation(f"{key} allows {override.gpu_count_max} GPUs, there would be {gpu_count}", *own)


def _below_minimum(
    override: Override,
    key: str,
    bought: list[BuyNode],
    chosen: list[DrainNode],
    views: list[NodeView],
    removed_uids: set[NodeUid],
) -> Iterator[str]:
    removed = {drain.node_uid for drain in chosen}
    there = [view for view in views if _is_in_scope(override, view.pool, view.gpu_model)]
    if not any(view.node_uid in removed for view in there):
        return
    own = [purchase for purchase in bought if _is_in_scope(override, purchase.pool, purchase.offer.gpu_model)]
    stays = [view for view in there if view.node_uid not in removed_uids and not view.is_leaving]
    gpu_count = sum(purchase.offer.resources.gpu_count for purchase in own) + sum(map(_gpus, stays))
    if override.nodes_count_min is not None and len(stays) + len(own) < override.nodes_count_min:
        yield Violation(
            f"{key} requires {override.nodes_count_min} nodes, {len(stays) + len(own)} would be left", *chosen
        )
    took_gpus = any(_gpus(view) for view in there if view.node_uid in removed)
    if took_gpus and override.gpu_count_min is not None and gpu_count < override.gpu_count_min:
        yield Violation(f"{key} requires {override.gpu_count_min} GPUs, {gpu_count} would be left", *chosen)


def _is_in_scope(override: Override, pool: str | None, gpu_model: str | None) -> bool:
    return override.pool in (None, pool) and override.gpu_model in (None, gpu_model)


def _gpus(view: NodeView) -> int:
    """Return the GPUs that were bought, including those not visible yet."""
    bought = None if view.order is None else view.order.decision
    return view.allocatable.gpu_count if bought is None else bought.offer.resources.gpu_count
