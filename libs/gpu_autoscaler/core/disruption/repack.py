"""Where the work of a node could move, and what replacement it takes. Nothing here decides to move it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from gpu_autoscaler.core.demand.items import DemandItem, DemandSource
from gpu_autoscaler.core.demand.sources import job_spec, pod_priority, pod_shape
from gpu_autoscaler.core.disruption.eligibility import reason_to_wait
from gpu_autoscaler.core.disruption.protection import covering_budgets, node_protection, pod_protection
from gpu_autoscaler.core.draft import Draft, Purchase
from gpu_autoscaler.core.identity_cache import cached_by_identity
from gpu_autoscaler.core.next_change import has_lasted
from gpu_autoscaler.core.nodes.views import NodeView, bin_key
from gpu_autoscaler.core.placement.pod_affinity import rules_of
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.basket import Basket
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.core.provisioning.spot_waits import exclude_interrupted_from_spot, is_spot_excluded
from gpu_autoscaler.core.provisioning.topology_domains import MissingMembers
from gpu_autoscaler.core.state.queries import counts_for_idleness
from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, OrderRecord
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.decisions import ReleaseInstance
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.defer import DeferReason, NodeProtected, PodProtected, PodsFitNowhere
from gpu_autoscaler.model.reasons.defer_limits import Cooldown


class Relocation(NamedTuple):
    """Where a node's pods would move."""

    placed: tuple[tuple[PodObserved, str], ...]  # pods that usable bins take, with the keys of the bins
    coming: tuple[Bin, ...]  # bins on their way that take others
    unplaced: tuple[PodObserved, ...]  # no bin takes these

    @property
    def hosts(self) -> frozenset[str]:
        """Keys of the usable bins that take pods."""
        return frozenset(key for _, key in self.placed)

    @property
    def fits(self) -> bool:
        """True if usable bins take all pods."""
        return not self.unplaced and not self.coming


def moving_pods(view: NodeView, draft: Draft) -> tuple[PodObserved, ...]:
    """Return the pods that would have to move: neither finished pods, nor pods being deleted, nor those of the node."""
    pods = draft.pods.get(view.name, ())
    return tuple(pod for pod in pods if counts_for_idleness(pod) and pod.deleting_since is None)


def place_elsewhere(
    group: tuple[NodeView, ...], pods: Iterable[PodObserved], draft: Draft, state: ClusterState
) -> Relocation:
    """Place all pods on the free capacity without these nodes; the caller rolls back."""
    free_capacity = draft.free_capacity
    for view in group:
        free_capacity.remove(bin_key(view))
    there: list[tuple[PodObserved, str]] = []
    coming: list[Bin] = []
    unplaced: list[PodObserved] = []
    for pod in sorted(pods, key=lambda pod: (-pod.requests.gpu_count, -pod.requests.cpu_milli, pod.pod_uid)):
        placed = free_capacity.place_gang(pod_shape(pod, job_spec(state, pod.job_id), rules_of(state)), 1)
        if placed is None:
            unplaced.append(pod)
        elif free_capacity[placed[0]].readiness is BinReadiness.READY:
            there.append((pod, placed[0]))
        else:
            coming.append(free_capacity[placed[0]])
    return Relocation(tuple(there), tuple(coming), tuple(unplaced))


def protected_node(view: NodeView, draft: Draft) -> NodeProtected | None:
    """Return the annotation that protects the node itself."""
    mark = None if view.node is None else node_protection(view.node, draft.as_of)
    return None if mark is None else NodeProtected(protection=mark)


def protected_pod(
    pods: Iterable[PodObserved],
    state: ClusterState,
    policy: ScalingPolicy,
    as_of: datetime,
    *,
    beside: Iterable[PodObserved] = (),
) -> PodProtected | None:
    """Return the first pod that may not be moved by choice now. PodDisruptionBudgets must allow all moves together,
    including those of the pods `beside`, which the same plan moves."""
    budgets = state.budgets.values()
    moved = Counter(budget.budget_uid for pod in beside for budget in covering_budgets(pod, budgets))
    for pod in pods:
        spec = job_spec(state, pod.job_id)
        protection = pod_protection(pod, budgets, as_of)
        if protection is None and spec is not None and not spec.is_preemptible:
            protection = "its job is not preemptible"
        if protection is None:
            job = None if pod.job_id is None else state.jobs.get(pod.job_id)
            protection = reason_to_wait(pod, job, policy.removal.protection, policy.job_retries_count_max, as_of)
            if protection is None and is_spot_excluded(job, policy, as_of):
                protection = "its job was interrupted too often"
        for budget in covering_budgets(pod, budgets):
            moved[budget.budget_uid] += 1
            if protection is None and moved[budget.budget_uid] > budget.disruptions_allowed:
                protection = f"disruption budget {budget.namespace}/{budget.name} allows fewer disruptions"
        if protection is not None:
            return PodProtected(pod_uid=pod.pod_uid, pod=f"{pod.namespace}/{pod.name}", protection=protection)
    return None


# ---- replacements that are ready before the drain


class Replacement(NamedTuple):
    """The last purchase made to replace a node."""

    planned_at: Instant
    action_ids: tuple[ActionId, ...]  # of one plan, in order
    cause: str
    node_uids: tuple[NodeUid, ...]  # all that it was bought for


@cached_by_identity(2)
def replacements(orders: Mapping[ActionId, OrderRecord]) -> Mapping[NodeUid, Replacement]:
    """Return the last purchase for each node that is to be replaced by choice."""
    replacements: dict[NodeUid, Replacement] = {}
    for order in orders.values():
        if order.decision is None or order.planned_at is None or not isinstance(order.decision.reason, ReplacesNodes):
            continue
        reason = order.decision.reason
        for node_uid in reason.node_uids:
            last = replacements.get(node_uid)
            if last is not None and last.planned_at > order.planned_at:
                continue
            others = last.action_ids if last is not None and last.planned_at == order.planned_at else ()
            actions = tuple(sorted((*others, order.action_id)))
            replacements[node_uid] = Replacement(order.planned_at, actions, reason.cause, reason.node_uids)
    return replacements


def retry_cooldown(view: NodeView, state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> Cooldown | None:
    """Return how long a node is not tried again after a canceled drain or release; None: it may be tried."""
    ends = (
        record.cancelled.cancelled_at + timedelta(seconds=policy.removal.drain_retry_seconds)
        for record in state.drains.values()
        if record.cancelled is not None and (record.cancelled.node_uid == view.node_uid or _is_release_of(record, view))
    )
    end = max(ends, default=None)
    return None if end is None or as_of >= end else Cooldown(remaining_seconds=(end - as_of).total_seconds())


def _is_release_of(record: DrainRecord, view: NodeView) -> bool:
    """True for the release of this very order; its node came up, and may not be known yet."""
    released = record.decision
    return isinstance(released, ReleaseInstance) and released.order_action_id == view.action_id


def buy_replacement(
    view: NodeView,
    cause: RemovalCause,
    relocation: Relocation,
    draft: Draft,
    state: ClusterState,
    policy: ScalingPolicy,
) -> tuple[tuple[Purchase, ...], DeferReason | None]:
    """Return the cheapest nodes for the unplaced pods, or why there are none; after a failed replacement a cooldown."""
    last = replacements(state.orders).get(view.node_uid) if view.node_uid is not None else None
    cooldown_seconds = policy.removal.replacement_cooldown_seconds
    if last is not None and not has_lasted(last.planned_at, cooldown_seconds, draft.as_of):
        waited_seconds = (draft.as_of - last.planned_at).total_seconds()
        return (), Cooldown(remaining_seconds=cooldown_seconds - waited_seconds)
    return replacement_fleet(relocation.unplaced, (view,), cause, draft, state, policy)


def replacement_fleet(
    pods: tuple[PodObserved, ...],
    group: tuple[NodeView, ...],
    cause: RemovalCause,
    draft: Draft,
    state: ClusterState,
    policy: ScalingPolicy,
) -> tuple[tuple[Purchase, ...], DeferReason | None]:
    """Return the cheapest nodes for these pods of a group to remove, or why there are none; capacity is rolled back."""
    basket = Basket(draft, OfferCatalog(draft.views, state, policy, draft.as_of), policy)
    items = exclude_interrupted_from_spot(tuple(_item(pod, state) for pod in pods), state, policy, draft.as_of)
    mark = draft.free_capacity.mark()
    bought = basket.buy_together([MissingMembers(item=item, sinces=(item.since,)) for item in items])
    left = [item for item, keys in zip(items, bought, strict=True) if not keys]
    if left:
        # One after the other: the first failure is the reason.
        refusals = (refusal for item in left if (refusal := basket.buy(item, 1)[1]) is not None)
        refused = next(refusals, PodsFitNowhere.of(pod.pod_uid for pod in pods))
        draft.free_capacity.rollback(mark)
        return (), refused
    draft.free_capacity.rollback(mark)
    reason = ReplacesNodes(
        cause=cause,
        node_uids=tuple(view.node_uid for view in group if view.node_uid is not None),
        node_names=tuple(view.name for view in group),
        demand=tuple(item.key for item in items),
    )
    return tuple(_as_replacement(purchase, reason) for purchase in basket.purchases()), None


def _as_replacement(purchase: Purchase, reason: ReplacesNodes) -> Purchase:
    decision = msgspec.structs.replace(purchase.decision, reason=reason)
    return msgspec.structs.replace(purchase, decision=decision, transaction=f"replace/{reason.node_uids[0]}")


def _item(pod: PodObserved, state: ClusterState) -> DemandItem:
    spec = job_spec(state, pod.job_id)
    return DemandItem(
        key=f"pod/{pod.pod_uid}",
        source=DemandSource.MOVING_POD,
        shape=pod_shape(pod, spec, rules_of(state)),
        member_count=1,
        priority=pod_priority(pod, spec),
        since=pod.created_at,
        job_id=pod.job_id,
        project=None if spec is None else spec.project_id,
        work_seconds_max=None if spec is None else spec.duration_seconds_max,
    )
