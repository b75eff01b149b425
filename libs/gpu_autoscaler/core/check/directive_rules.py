"""The second opinion on what people overrule: read from the records again, counted from the orders and nodes up."""

from collections.abc import Iterator

from gpu_autoscaler.core.nodes.views import NodeView, node_views
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.directives import AnyDirective, Freeze, Override, PausePool
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.drain import NodeDeleted, SpendExhausted, SpotReclaim


def directive_violations(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield a sentence for each purchase and each removal that somebody does not want now."""
    records = (record for record in state.directives.values() if record.lifted is None)
    words = [record.given for record in records if record.given.until > plan.as_of]
    given: list[tuple[AnyDirective, str]] = [(word.directive, word.given_by) for word in words]
    given += _pool_directives(policy, [word.directive for word in words])
    if not given:
        return
    bought = [each for each in plan.decisions if isinstance(each, BuyNode)]
    drains = [each for each in plan.decisions if isinstance(each, DrainNode)]
    chosen = [each for each in drains if not isinstance(each.reason, SpotReclaim | NodeDeleted)]
    # A hard limit of money goes before a least, of a pool as of all nodes: nobody can have what nothing pays for.
    unforced = [each for each in chosen if not isinstance(each.reason, SpendExhausted)]
    views = [view for view in node_views(state, plan.as_of) if view.is_ours and view.is_counted]
    going = {each.node_uid for each in drains}
    for directive, given_by in given:
        match directive:
            case Freeze():
                if bought or chosen:
                    yield f"{len(bought)} nodes are bought and {len(chosen)} removed under {given_by}'s freeze"
            case PausePool(pool=pool):
                touched = [one.offer.key for one in bought if one.pool == pool]
                pool_of = {view.node_uid: view.pool for view in views}
                # What goes for want of money goes by nobody's choice.
                touched += [one.node_name for one in unforced if pool_of.get(one.node_uid) == pool]
                yield from (f"{one} is bought or removed in pool {pool}, which {given_by} paused" for one in touched)
            case Override() as override:
                yield from _above_maximum(override, override.key, bought, views)
                yield from _below_minimum(override, override.key, bought, unforced, views, going)


def _pool_directives(policy: ScalingPolicy, said: list[AnyDirective]) -> Iterator[tuple[AnyDirective, str]]:
    """What the policy's pools want always; a person's most for a pool, or for all of them, goes before its least."""
    for pool in policy.pools:
        if pool.is_paused:
            yield PausePool(pool=pool.name), "the policy"
        lower = [
            each.nodes_count_max
            for each in said
            if isinstance(each, Override) and each.nodes_count_max is not None and each.gpu_model is None
            if each.pool in (None, pool.name)
        ]
        if least := min([pool.nodes_count_min, *lower]):
            yield Override(pool=pool.name, nodes_count_min=least), "the policy"


def _above_maximum(override: Override, key: str, bought: list[BuyNode], views: list[NodeView]) -> Iterator[str]:
    own = [each for each in bought if _is_in_scope(override, each.pool, each.offer.gpu_model)]
    there = [view for view in views if _is_in_scope(override, view.pool, view.gpu_model)]
    nodes_count = len(own) + len(there)
    gpu_count = sum(each.offer.resources.gpu_count for each in own) + sum(map(_gpus, there))
    buys_gpus = any(each.offer.resources.gpu_count for each in own)
    if own and override.nodes_count_max is not None and nodes_count > override.nodes_count_max:
        yield f"{key} allows {override.nodes_count_max} nodes, there would be {nodes_count}"
    if buys_gpus and override.gpu_count_max is not None and gpu_count > override.gpu_count_max:
        yield f"{key} allows {override.gpu_count_max} GPUs, there would be {gpu_count}"


def _below_minimum(
    override: Override,
    key: str,
    bought: list[BuyNode],
    chosen: list[DrainNode],
    views: list[NodeView],
    going: set[NodeUid],
) -> Iterator[str]:
    removed = {each.node_uid for each in chosen}
    there = [view for view in views if _is_in_scope(override, view.pool, view.gpu_model)]
    if not any(view.node_uid in removed for view in there):
        return
    own = [each for each in bought if _is_in_scope(override, each.pool, each.offer.gpu_model)]
    stays = [view for view in there if view.node_uid not in going and not view.is_leaving]
    gpu_count = sum(each.offer.resources.gpu_count for each in own) + sum(map(_gpus, stays))
    if override.nodes_count_min is not None and len(stays) + len(own) < override.nodes_count_min:
        yield f"{key} wants {override.nodes_count_min} nodes, {len(stays) + len(own)} would be left"
    took_gpus = any(_gpus(view) for view in there if view.node_uid in removed)
    if took_gpus and override.gpu_count_min is not None and gpu_count < override.gpu_count_min:
        yield f"{key} wants {override.gpu_count_min} GPUs, {gpu_count} would be left"


def _is_in_scope(override: Override, pool: str | None, gpu_model: str | None) -> bool:
    return (override.pool is None or override.pool == pool) and (
        override.gpu_model is None or override.gpu_model == gpu_model
    )


def _gpus(view: NodeView) -> int:
    """What was bought, also while some of its GPUs are not there."""
    said = None if view.order is None else view.order.decision
    return view.allocatable.gpu_count if said is None else said.offer.resources.gpu_count
