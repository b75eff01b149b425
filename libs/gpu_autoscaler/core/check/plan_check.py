"""The plan check: an independent check of a plan before it is published. It shares no code with `plan`.

It reports only certain violations. Where it cannot know, it checks what no arrangement could satisfy.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from gpu_autoscaler.core.check.brake_rules import brake_violations
from gpu_autoscaler.core.check.directive_rules import directive_violations
from gpu_autoscaler.core.check.idle_rules import idle_violations
from gpu_autoscaler.core.check.placement_rules import UNBOUND, pod_constraint_violations
from gpu_autoscaler.core.check.provisioning_rules import provisioning_violations
from gpu_autoscaler.core.check.purchase_rules import (
    batching_violations,
    cooldown_violations,
    elastic_member_violations,
    is_unavailable,
    launch_group_violations,
    preference_violations,
    selection_violations,
    spot_wait_violations,
    wait_violations,
)
from gpu_autoscaler.core.check.quota_rules import quota_violations
from gpu_autoscaler.core.check.removal_rules import removal_violations, utilization_violations
from gpu_autoscaler.core.check.resource_quota_rules import resource_quota_violations
from gpu_autoscaler.core.check.spend_rules import spend_violations
from gpu_autoscaler.core.check.upkeep_rules import upkeep_violations
from gpu_autoscaler.core.check.violation import Violation, attributed
from gpu_autoscaler.core.policy.cron import parse_schedule
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.events.scaling import ScalingNodeOrdered
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.money import HOURS_PER_MONTH
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.buy import BelowOverride, CapacityBuffer, RejectionCause
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.resources import Resources

_MINIMA = {*labels.POD_GROUP_MIN_AVAILABLE, labels.POD_GROUP_TOTAL_COUNT}
# Capacity without work: what a limit allows of it is bought, the rest is deferred under the same key.
_BOUGHT_IN_PART = (CapacityBuffer, BelowOverride)


def check(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> tuple[Violation, ...]:
    """Return the violations in the plan, each a sentence that names the decisions or the demand; empty: none."""
    rules: tuple[Callable[[Plan, ClusterState, ScalingPolicy], Iterator[str]], ...] = (
        _identity,
        _offers,
        _limits,
        _spread_limit,
        spend_violations,
        quota_violations,
        cooldown_violations,
        _gangs,
        elastic_member_violations,
        selection_violations,
        preference_violations,
        _volumes,
        _gang_domains,
        _all_demand_accounted,
        directive_violations,
        wait_violations,
        spot_wait_violations,
        batching_violations,
        removal_violations,
        idle_violations,
        brake_violations,
        pod_constraint_violations,
        resource_quota_violations,
        utilization_violations,
        launch_group_violations,
        upkeep_violations,
        provisioning_violations,
    )
    return tuple(attributed(sentence) for rule in rules for sentence in rule(plan, state, policy))


def _identity(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield duplicate or reused action ids, and a wrong parent plan."""
    every = (*plan.decisions, *plan.upkeep_decisions)
    counts = Counter(decision.action_id for decision in every)
    for decision in every:
        action_id = decision.action_id
        if counts[action_id] > 1:
            yield Violation(f"{counts[action_id]} decisions share the action id {action_id}", decision)
        if action_id in state.orders or action_id in state.drains:
            yield Violation(f"action id {action_id} belongs to a decision of an earlier plan", decision)
    if plan.parent_sequence != state.last_plan_sequence:
        yield f"the plan follows plan {plan.parent_sequence}, but the last one is {state.last_plan_sequence}"


# ---- purchases


def _offers(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield purchases of offers that are unavailable, unpriced, not allowed in their pool, or were refused recently."""
    bought = plan.purchases
    if bought and policy.is_frozen:
        yield Violation(f"{len(bought)} nodes are bought while the policy is frozen", *bought)
    offered = set() if state.offers is None else {_offer_identity(offer) for offer in state.offers.offers}
    pools = {pool.name: pool for pool in policy.pools}
    for decision in bought:
        offer, pool = decision.offer, pools.get(decision.pool)
        if _offer_identity(offer) not in offered:
            yield Violation(f"{offer.key} is bought, but is not an available offer", decision)
        if offer.paid_from is not None and plan.as_of < offer.paid_from:
            yield Violation(f"{offer.key} is bought before its reservation period begins", decision)
        if offer.paid_until is not None and plan.as_of >= offer.paid_until - timedelta(
            seconds=policy.reservation_drain_seconds
        ):
            yield Violation(f"{offer.key} is bought after its reservation period, or too close to its end", decision)
        if offer.price_micro_usd_per_hour is None:
            yield Violation(f"{offer.key} is bought at an unknown price", decision)
        yield from _barred_offer(decision)
        yield from _stale_price(decision, plan, state, policy)
        if pool is None:
            yield Violation(f"{offer.key} is bought for pool {decision.pool}, which the policy does not have", decision)
            continue
        yield from _pool_filters(decision, pool)
        ordered_taints = (decision.taints, decision.startup_taints)
        if ordered_taints != (pool.taints, pool.startup_taints) or not set(pool.labels) <= {
            key for key, _ in decision.labels
        }:
            yield Violation(f"{offer.key} is bought without the labels and taints of pool {pool.name}", decision)
        if is_unavailable(offer, plan, state):
            yield Violation(f"{offer.key} is bought, but was refused and must not be requested yet", decision)


def _pool_filters(decision: BuyNode, pool: NodePool) -> Iterator[Violation]:
    """Yield filters of the pool that the offer does not pass."""
    offer = decision.offer
    if pool.gpu_memory_gib_min and round((offer.gpu_memory_bytes or 0) / 2**30) < pool.gpu_memory_gib_min:
        yield Violation(
            f"{offer.key} is bought for pool {pool.name}, which requires {pool.gpu_memory_gib_min} GiB a GPU", decision
        )
    for wanted, value in (
        (pool.instance_types, offer.instance_type),
        (pool.gpu_models, offer.gpu_model),
        (pool.zones, offer.zone),
        (pool.capacity_types, offer.capacity_type),
    ):
        if wanted and value not in wanted:
            yield Violation(
                f"{offer.key} is bought for pool {pool.name}, which allows only {', '.join(wanted)}", decision
            )


def _barred_offer(decision: BuyNode) -> Iterator[str]:
    offer = decision.offer
    if offer.unavailable_because is not None:
        yield Violation(f"{offer.key} is bought, although {offer.unavailable_because}", decision)


def _stale_price(decision: BuyNode, plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    if policy.prices.is_stale_price_allowed or state.offers is None:
        return
    offer = decision.offer
    reported_at = min(offer.priced_at or state.offers.sampled_at, state.offers.sampled_at)
    if (plan.as_of - reported_at).total_seconds() > policy.prices.age_seconds_max:
        yield Violation(f"{offer.key} is bought at a price that is older than the policy allows", decision)


def _offer_identity(offer: Offer) -> tuple[str, str, str, int | None, Resources]:
    return (offer.instance_type, offer.zone, offer.capacity_type, offer.price_micro_usd_per_hour, offer.resources)


class _CountedCapacity:
    """What counts against limits: what was bought and is not known to have ended, counted from the orders."""

    def __init__(self, state: ClusterState) -> None:
        self._nodes: Counter[tuple[tuple[str, ...], int]] = Counter()  # by limited owners, and GPUs of each
        self.nodes_of_unknown = self.gpus_of_unknown = 0  # bought for a pool and project that are unknown
        self.price_micro_usd_per_hour = self.spread_micro_usd_per_hour = 0
        ended_records = [record.terminated for record in state.drains.values()]
        ended = {record.provider_id for record in ended_records if record is not None}
        instances = {instance.action_id: instance for instance in state.instances.values()}
        self._count_orphans(state, ended)
        for action_id, order in state.orders.items():
            decided = order.decision or order.ordered
            instance = instances.get(action_id)
            launched = None if order.launched is None else order.launched.provider_id
            if launched is not None:
                instance = state.instances.get(launched, instance)
            provider_id = launched if instance is None else instance.provider_id
            # A report that nothing was launched is void if the instance appears after all.
            is_over = (provider_id is not None and provider_id in ended) or (
                order.terminated is not None and (order.terminated.provider_id is not None or instance is None)
            )
            never_was = order.refused is not None and instance is None
            if is_over or never_was or (instance is not None and instance.state == "terminated") or decided is None:
                continue
            parts = (instance, order.launched, decided.offer)  # the cloud's price precedes the list price
            prices = (part.price_micro_usd_per_hour for part in parts if part is not None)
            self.add(decided, next((price for price in prices if price is not None), None))

    def _count_orphans(self, state: ClusterState, ended: set[ProviderId | None]) -> None:
        """Count instances and nodes with our tag whose order has expired from the state: they still cost money."""
        orders = {key: order for key, order in state.orders.items() if order.decision or order.ordered}
        known = {*ended, *(order.launched.provider_id for order in orders.values() if order.launched is not None)}
        known |= {order.terminated.provider_id for order in state.orders.values() if order.terminated is not None}
        nodes = {node.provider_id: node for node in state.nodes.values()}
        orphans: list[tuple[NodeInstanceObserved | NodeObserved, NodeObserved | None]] = [
            (instance, nodes.get(instance.provider_id))
            for instance in state.instances.values()
            if instance.action_id is not None and instance.action_id not in orders and instance.state != "terminated"
        ]
        orphans += [
            (node, node)
            for node in state.nodes.values()
            if node.action_id is not None and node.action_id not in orders and node.provider_id not in state.instances
        ]
        offers = () if state.offers is None else state.offers.offers
        for seen, node in orphans:
            if seen.provider_id in known:
                continue
            of_type = (offer.resources.gpu_count for offer in offers if offer.instance_type == seen.instance_type)
            gpus = max(of_type, default=0)
            if isinstance(seen, NodeInstanceObserved):
                self.price_micro_usd_per_hour += seen.price_micro_usd_per_hour or 0
            if node is None:
                self.nodes_of_unknown += 1
                self.gpus_of_unknown += gpus
            else:
                gpus = max(gpus, node.allocatable.gpu_count)
            self._nodes[_orphan_owners(seen.zone, node), gpus] += 1

    def add(self, decided: BuyNode | ScalingNodeOrdered, price_micro_usd_per_hour: int | None) -> None:
        """Count one more node."""
        self._nodes[_limit_owners(decided), decided.offer.resources.gpu_count] += 1
        self.price_micro_usd_per_hour += price_micro_usd_per_hour or 0
        self.spread_micro_usd_per_hour += _spread_cost(decided)

    def of(self, owner: str) -> tuple[int, int]:
        """Return the nodes and GPUs that may be the owner's, of all for "": those of an unknown pool and project may be
        any's."""
        mine = [(gpus, count) for (owners, gpus), count in self._nodes.items() if owner in ("", *owners)]
        is_any = owner.startswith(("pool ", "project "))
        return (
            sum(count for _, count in mine) + (self.nodes_of_unknown if is_any else 0),
            sum(gpus * count for gpus, count in mine) + (self.gpus_of_unknown if is_any else 0),
        )


def _spread_cost(decided: BuyNode | ScalingNodeOrdered) -> int:
    """Return what the node costs more an hour than the offer that the share of capacity pools excluded; 0: unknown."""
    rejected = getattr(getattr(decided, "reason", None), "instead_of", None)
    if rejected is None or rejected.because is not RejectionCause.CAPACITY_POOL_SHARE:
        return 0
    return (decided.offer.price_micro_usd_per_hour or 0) - int(rejected.price_micro_usd_per_hour)


def _orphan_owners(zone: str | None, node: NodeObserved | None) -> tuple[str, ...]:
    if node is None:
        return (f"zone {zone}",)
    return (f"pool {dict(node.labels).get(labels.POOL)}", f"zone {zone}", _project_owner(node.labels))


def _limit_owners(bought: BuyNode | ScalingNodeOrdered) -> tuple[str, ...]:
    return (f"pool {bought.pool}", f"zone {bought.offer.zone}", _project_owner(bought.labels))


def _project_owner(node_labels: tuple[tuple[str, str], ...]) -> str:
    return f"project {dict(node_labels).get(labels.PROJECT_ID, '')}"


def _limits(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield limits that the purchases exceed. A limit that was lowered below the running fleet is no violation."""
    bought = plan.purchases
    if not bought:
        return
    count = _CountedCapacity(state)
    for decision in bought:
        count.add(decision, decision.offer.price_micro_usd_per_hour)
    bounds: list[tuple[str, int | None, int | None]] = [("", _nodes_max(plan, policy), policy.gpu_count_max)]
    for kind, parts in (("pool", policy.pools), ("zone", policy.limits.zones), ("project", policy.limits.projects)):
        bounds += [(f"{kind} {part.name}", part.nodes_count_max, part.gpu_count_max) for part in parts]
    for owner, nodes_max, gpus_max in bounds:
        where = owner or "the cluster"
        mine = [purchase for purchase in bought if owner in ("", *_limit_owners(purchase))]
        if not mine:
            continue
        nodes_count, gpu_count = count.of(owner)
        if nodes_max is not None and nodes_count > nodes_max:
            what = f"{nodes_count} nodes of at most {nodes_max}"
            yield Violation(f"{where} would have {what}, including orders in flight", *mine)
        with_gpus = [purchase for purchase in mine if purchase.offer.resources.gpu_count]
        if gpus_max is not None and with_gpus and gpu_count > gpus_max:
            what = f"{gpu_count} GPUs of at most {gpus_max}"
            yield Violation(f"{where} would have {what}, including orders in flight", *with_gpus)
    price, price_max = count.price_micro_usd_per_hour, policy.price_micro_usd_per_hour_max
    if price_max is not None and price > price_max:
        yield Violation(f"the fleet would cost {price} micro-dollars an hour of at most {price_max}", *bought)


def _spread_limit(plan: Plan, state: ClusterState, policy: ScalingPolicy) -> Iterator[str]:
    """Yield purchases for the share of capacity pools after that costs what the policy allows.

    One of them may exceed the limit: the last one is bought while there is something left.
    """
    most = policy.spot.capacity_pool_month_micro_usd_max
    costs = {bought: cost for bought in plan.purchases if (cost := _spread_cost(bought))}
    if most is None or not costs:
        return
    before = _CountedCapacity(state).spread_micro_usd_per_hour + sum(costs.values()) - max(costs.values())
    if before * HOURS_PER_MONTH >= most:
        yield Violation(
            f"{len(costs)} nodes are bought for the share of capacity pools, which costs {before * HOURS_PER_MONTH} "
            f"micro-dollars a month without one of them, of at most {most}",
            *costs,
        )


def _nodes_max(plan: Plan, policy: ScalingPolicy) -> int:
    """Return the policy's maximum, or a lower one of an active schedule."""
    bounds = [policy.nodes_count_max]
    for size in policy.scheduled_limits:
        if size.nodes_count_max is None:
            continue
        if size.schedule is not None and size.duration_seconds is not None:
            since = plan.as_of - timedelta(seconds=size.duration_seconds)
            if parse_schedule(size.schedule, size.time_zone).last_start(plan.as_of, since) is None:
                continue
        bounds.append(size.nodes_count_max)
    return min(bounds)


def _volumes(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield purchases for pods that no node would help, or of which the fitting node is unknown."""
    unbound = UNBOUND.of(state).items()
    waiting = {f"pod/{uid}": pod for uid, pod in unbound if pod.volume_trouble or pod.device_trouble}
    for decision in plan.purchases if waiting else ():
        for key in getattr(decision.reason, "demand", ()):
            if key in waiting:
                why = waiting[key].volume_trouble or waiting[key].device_trouble
                yield Violation(
                    f"{decision.offer.key} is bought for pod {waiting[key].name}: {why}", decision, demand=(key,)
                )


def _gang_domains(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield gangs whose nodes are bought in more than one domain though they must share one."""
    values: dict[tuple[str, str], set[str | None]] = {}
    for decision in plan.purchases:
        key = None if decision.gang is None else _domain_of(decision.gang, state)
        if key is not None and decision.gang is not None:
            marks = decision.offer.marks_in(decision.pool)
            carried = {**dict(marks.labels), **dict(decision.labels), labels.ZONE: decision.offer.zone}
            values.setdefault((decision.gang, key), set()).add(carried.get(key))
    for (gang, key), domains in values.items():
        if len(domains) > 1 or None in domains:
            yield Violation(
                f"nodes for gang {gang} are bought in {len(domains)} domains; all must share one {key}", demand=(gang,)
            )


def _domain_of(gang: str, state: ClusterState) -> str | None:
    if gang.startswith("provisioning/"):
        request = state.provisioning.get(gang.removeprefix("provisioning/"))
        return None if request is None else request.within
    job = state.jobs.get(JobId(gang.removeprefix("job/")))
    if job is not None:
        return None if job.queued is None else job.queued.spec.within
    _, namespace, name = gang.split("/", 2)
    names = {*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION}
    for pod in state.pods.values():
        marks = pod.labels + pod.annotations
        if pod.namespace == namespace and any(key in names and value == name for key, value in marks):
            keys = [value for key, value in pod.annotations if key in labels.GANG_WITHIN]
            if keys:
                return keys[0]
    return None


def _gangs(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield gangs of which only a part is bought: every member must have capacity, bought or existing."""
    bought = plan.purchases
    held = {
        deferral.subject: deferral.reason
        for deferral in plan.deferred
        if not isinstance(deferral.reason, CapacityExpected)
    }
    for decision in bought:
        for key in getattr(decision.reason, "demand", ()):
            if key in held and not isinstance(decision.reason, _BOUGHT_IN_PART):
                yield Violation(
                    f"{decision.offer.key} is bought for {key}, which {held[key].tag()} defers", demand=(key,)
                )
    for key in sorted({decision.gang for decision in bought if decision.gang is not None}):
        if key.startswith("group/"):
            yield from _group(key, state, held)
            continue
        if key.startswith("provisioning/"):
            yield from _request(key, plan, state)
            continue
        job = state.jobs.get(JobId(key.removeprefix("job/")))
        if job is None or job.queued is None or job.finished is not None:
            yield Violation(f"nodes are bought for gang {key}, which is not waiting", demand=(key,))
            continue
        spec = job.queued.spec
        members_count = job.completed_count
        members_count += sum(1 for pod in state.pods.values() if pod.job_id == spec.job_id and pod.phase != "failed")
        least = spec.member_count if spec.member_count_min is None else spec.member_count_min
        places = members_count + _all_places(spec.member_resources, least - members_count, plan, state)
        if places < least:
            yield Violation(
                f"gang {key} of {least} would have capacity for {places}: part of a gang is never bought", demand=(key,)
            )


def _group(gang: str, state: ClusterState, held: Mapping[str, DeferReason]) -> Iterator[str]:
    """Yield pod groups with purchases but without capacity for their declared minimum, or for all pods without one."""
    _, namespace, name = gang.split("/", 2)
    names = {*labels.POD_GROUP_LABELS, labels.POD_GROUP_ANNOTATION}
    members = [
        pod
        for pod in state.pods.values()
        if pod.namespace == namespace
        and any(key in names and value == name for key, value in pod.labels + pod.annotations)
    ]
    if not members:
        yield Violation(f"nodes are bought for gang {gang}, which is not waiting", demand=(gang,))
    requested = {value for pod in members for key, value in pod.labels + pod.annotations if key in _MINIMA}
    minima = [member.group_count_min for member in members if member.group_count_min is not None]
    least = max(minima or [int(value) for value in requested if value.isdigit()], default=len(members))
    left_out = [pod for pod in members if f"pod/{pod.pod_uid}" in held]
    if len(members) - len(left_out) < least:
        for pod in left_out:
            yield Violation(
                f"nodes are bought for gang {gang}, and its pod {pod.name} has none: part of a gang is never bought",
                demand=(gang,),
            )


def _request(gang: str, plan: Plan, state: ClusterState) -> Iterator[str]:
    """Yield pod sets of a ProvisioningRequest with purchases that would not have capacity for all their pods."""
    request = state.provisioning.get(gang.removeprefix("provisioning/"))
    for pods in () if request is None else request.pod_sets:
        places = _all_places(pods.requests, pods.count, plan, state)
        if places < pods.count:
            sentence = f"gang {gang} of {pods.count} would have capacity for {places}: part of a gang is never bought"
            yield Violation(sentence, demand=(gang,))


def _all_places(member: Resources, wanted_count: int, plan: Plan, state: ClusterState) -> int:
    """Return for how many members there is capacity; other nodes count if the bought ones do not have enough."""
    places = sum(_places(member, decision.promised) for decision in plan.purchases)
    if places < wanted_count:
        places += sum(_places(member, capacity) for capacity in _capacities_there(plan, state))
    return places


def _capacities_there(plan: Plan, state: ClusterState) -> Iterator[Resources]:
    """Yield the free capacity of nodes, and of orders without a node."""
    # The promised amounts exclude the node's own pods, so on a booting node those are not subtracted again.
    booting = {node.name for uid, node in state.nodes.items() if uid not in state.usable}
    requested: dict[str | None, Resources] = {}
    for pod in state.pods.values():
        is_promised = pod.node_name in booting and pod.owner_kind in ("DaemonSet", "Node")
        if pod.node_name is not None and pod.phase in ("pending", "running", "unknown") and not is_promised:
            requested[pod.node_name] = requested.get(pod.node_name, Resources()) + pod.requests
    registered = {node.action_id for node in state.nodes.values()}
    for node in state.nodes.values():
        order = None if node.action_id is None else state.orders.get(node.action_id)
        promised = node.allocatable if order is None or order.decision is None else order.decision.promised
        # A booting node shows fewer GPUs than were bought; the larger amount is the capacity to come.
        whole = node.allocatable if promised.gpus_fit_in(node.allocatable) else promised
        yield whole - requested.get(node.name, Resources())
    for action_id, order in state.orders.items():
        is_open = order.refused is None and order.terminated is None and action_id not in registered
        if is_open and order.decision is not None and order.decision.deadline_at > plan.as_of:
            yield order.decision.promised


def _places(member: Resources, capacity: Resources) -> int:
    """Return how many members the capacity could take at most, by its scarcest amount."""
    amounts = (
        (member.gpu_count, capacity.gpu_count),
        (member.cpu_milli, capacity.cpu_milli),
        (member.memory_bytes, capacity.memory_bytes),
        (member.ephemeral_storage_bytes, capacity.ephemeral_storage_bytes),
        *((count, dict(capacity.slices).get(name, 0)) for name, count in member.slices),
    )
    return max(0, min((have // need for need, have in amounts if need > 0), default=capacity.pod_count))


def _all_demand_accounted(plan: Plan, state: ClusterState, _: ScalingPolicy) -> Iterator[str]:
    """Yield waiting work that is neither bought for nor deferred with a reason."""
    accounted = {held.subject for held in plan.deferred}
    for decision in plan.purchases:
        accounted.update(getattr(decision.reason, "demand", ()))
    with_pods = {pod.job_id for pod in state.pods.values()} if state.jobs else set()
    for job_id, job in state.jobs.items():
        over = job.finished is not None or job.cancel_requested is not None or job.placed is not None
        over = over or (job.queued is not None and job.completed_count >= job.queued.spec.member_count)
        if job.queued is not None and not over and job_id not in with_pods and f"job/{job_id}" not in accounted:
            yield Violation(
                f"job {job_id} waits, and the plan neither buys for it nor defers it", demand=(f"job/{job_id}",)
            )
    forgotten: list[PodObserved] = []
    for pod in UNBOUND.of(state).values():
        waits = pod.phase == "pending" and pod.unschedulable_since is not None
        is_wanted = not pod.is_gated and pod.deleting_since is None and pod.owner_kind not in ("DaemonSet", "Node")
        if waits and is_wanted and f"pod/{pod.pod_uid}" not in accounted:
            forgotten.append(pod)
    for pod in sorted(forgotten, key=lambda pod: pod.pod_uid):
        yield Violation(
            f"pod {pod.namespace}/{pod.name} waits, and the plan neither buys for it nor defers it",
            demand=(f"pod/{pod.pod_uid}",),
        )
