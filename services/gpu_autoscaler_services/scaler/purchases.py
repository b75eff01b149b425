"""The executor's calls to the cloud: launch, terminate, release. Decides nothing; every call is idempotent."""

import asyncio
from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec
import structlog

from gpu_autoscaler.core.state.state import ClusterState, DrainRecord, OrderRecord
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import (
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
)
from gpu_autoscaler.kube.protocol import Now
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import ActionId, PlanId, ProviderId
from gpu_autoscaler.model.reasons.drain import SpotReclaim
from gpu_autoscaler.providers.protocol import (
    CapacityProvider,
    Instance,
    LaunchesGroups,
    LaunchRefused,
    Order,
    ReplacesInstances,
)
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome

log = structlog.get_logger()

# How long the cloud may not know a new instance: seconds as a rule, five minutes at most (EC2 Developer Guide,
# "Eventual consistency in the Amazon EC2 API", read 2026-11-22).
SHOWN_LATE = timedelta(minutes=5)
ENDING_WALL_SECONDS = 1.0  # between two polls of an instance that is terminating
# Of all of them together: half of the slowest cloud's reads per second are left to launches and lists. Source: our own.
ENDING_POLLS_PER_SECOND_MAX = 5.0
# Of a drain's pass over its node: a cloud that hangs must not keep other drains from their evictions. Source: our own.
DETACH_WALL_SECONDS_MAX = 3.0
RETRY_SECONDS_MIN = 10.0  # after a refusal; with a cloud's 0 every plan would retry the offer


class Purchases:
    """Launches and terminates instances."""

    def __init__(self, view: StateView, provider: CapacityProvider, installation: str, now: Now) -> None:
        """`installation` is the UID that our instances are tagged with."""
        self._view = view
        self._provider = provider
        self._installation = installation
        self._now = now
        self._left_groups: set[ActionId] = set()  # by drain; a restart repeats the detach, which is harmless

    def order(self, decision: BuyNode, plan_id: PlanId) -> list[Fact]:
        """Return the order as a fact: from then on redelivery resumes the launch after any crash."""
        record = self._view.state.orders.get(decision.action_id)
        if record is not None and record.ordered is not None:
            return []
        ordered = ScalingNodeOrdered(
            action_id=decision.action_id,
            plan_id=plan_id,
            pool=decision.pool,
            offer=decision.offer,
            deadline_at=decision.deadline_at,
            labels=decision.labels,
            gang=decision.gang,
            slices=decision.slices,
        )
        return [ordered]

    async def launch(self, ordered: ScalingNodeOrdered) -> list[Fact]:
        """Launch the instance, or return the one that this order has already launched. Raises TransientError.

        Nothing is launched for an order that is settled, released, or past its deadline.
        """
        record = self._view.state.orders.get(ordered.action_id)
        transaction = None if record is None or record.decision is None else record.decision.transaction
        if transaction is not None and self._makes_together(ordered):
            return await self._launch_together(ordered.action_id, transaction)
        if record is not None and is_settled(record):
            return []
        if not self._is_wanted(ordered.action_id, ordered.deadline_at):
            return []
        if record is None or record.decision is None:
            raise PermanentError(
                f"launch of order {ordered.action_id} skipped: plan {ordered.plan_id} with its taints is no longer in"
                " the state; the next plan releases the order"
            )
        try:
            instance = await self._provider.launch(self._order_of(record.decision))
        except LaunchRefused as refused:
            return [self._refused(record.decision, ordered.plan_id, refused)]
        return [await self._launched(ordered.action_id, ordered.plan_id, instance)]

    def _makes_together(self, ordered: ScalingNodeOrdered) -> bool:
        provider = self._provider
        return isinstance(provider, LaunchesGroups) and provider.can_launch_group(ordered.pool, ordered.offer)

    async def _launch_together(self, action_id: ActionId, transaction: ActionId) -> list[Fact]:
        """Launch all open orders of the transaction in one call. Raises TransientError.

        The step of the first order makes the call; the steps of the others do only if the first order is settled.
        """
        first = self._view.state.orders.get(transaction)
        if action_id != transaction and first is not None and first.ordered is not None and not is_settled(first):
            return []
        members = members_of(self._view.state, transaction)
        refused_before = next((record.refused for record, _ in members if record.refused is not None), None)
        open_orders = [
            (record, decision)
            for record, decision in members
            if not is_settled(record) and self._is_wanted(record.action_id, decision.deadline_at)
        ]
        provider = self._provider
        if not open_orders or not isinstance(provider, LaunchesGroups):
            return []
        if refused_before is not None:  # a refusal holds for all; some of its facts were not published
            return _refusal_of_each(open_orders, refused_before)
        orders = [self._order_of(decision) for _, decision in open_orders]
        try:
            instances = await provider.launch_group(transaction, orders)
        except LaunchRefused as refused:
            record, decision = open_orders[0]
            return _refusal_of_each(open_orders, self._refused(decision, record.plan_id, refused))
        pairs = zip(open_orders, instances, strict=True)
        return [await self._launched(record.action_id, record.plan_id, instance) for (record, _), instance in pairs]

    def _order_of(self, decision: BuyNode) -> Order:
        return Order(
            action_id=decision.action_id,
            installation=self._installation,
            pool=decision.pool,
            offer=decision.offer,
            labels=decision.labels,
            taints=(*decision.taints, *decision.startup_taints),
        )

    def _is_wanted(self, action_id: ActionId, deadline_at: datetime) -> bool:
        """Return False for an order that is released or past its deadline."""
        return release_of(self._view.state, action_id) is None and self._now() < deadline_at

    async def _launched(self, action_id: ActionId, plan_id: PlanId, instance: Instance) -> ScalingNodeLaunched:
        """Return the fact. An order that was released during the launch terminates its instance here."""
        if release_of(self._view.state, action_id) is not None:
            await self._provider.terminate(instance.provider_id, now=self._now())
        return _launch_of(action_id, plan_id, instance)

    def _refused(self, decision: BuyNode, plan_id: PlanId, refused: LaunchRefused) -> ScalingLaunchRefused:
        now = self._now()
        return ScalingLaunchRefused(
            action_id=decision.action_id,
            plan_id=plan_id,
            offer=decision.offer,
            code=refused.code,
            message=str(refused),
            scope=refused.scope,
            refused_at=now,
            retry_at=now + timedelta(seconds=max(refused.retry_after_seconds, RETRY_SECONDS_MIN)),
        )

    async def release(self, decision: ReleaseInstance, plan_id: PlanId) -> list[Fact]:
        """Terminate the instance of an order, recorded or not. Raises TransientError until it is gone."""
        provider_id = decision.provider_id or await self._find(decision.order_action_id)
        terminated = await self._terminate(provider_id, decision.action_id, plan_id, decision.order_action_id, None)
        if terminated is None:
            raise TransientError(f"instance {provider_id} is still terminating, retried")
        return [terminated]

    async def leave_group(self, started: ScalingDrainStarted) -> None:
        """Detach an interrupted instance from its group, so that the group does not replace it: the plan does.

        A failure does not delay the drain: it is logged and retried with the next pass.
        """
        record = self._view.state.drains.get(started.action_id)
        decision = None if record is None else record.decision
        is_reclaimed = isinstance(decision, DrainNode) and isinstance(decision.reason, SpotReclaim)
        if not is_reclaimed or started.provider_id is None or started.action_id in self._left_groups:
            return
        if not isinstance(self._provider, ReplacesInstances):
            return
        try:
            async with asyncio.timeout(DETACH_WALL_SECONDS_MAX):
                await self._provider.detach(started.provider_id)
        except (AutoscalerError, TimeoutError) as exc:
            why = str(exc) or f"no answer within {DETACH_WALL_SECONDS_MAX:g} s"
            log.warning("group detach failed, retried", provider_id=started.provider_id, error=why)
        else:
            self._left_groups.add(started.action_id)

    async def terminate(self, drained: ScalingNodeDrained) -> Outcome:
        """Terminate the instance of a drained node; repeated until the cloud reports it gone."""
        record = self._view.state.drains.get(drained.action_id)
        if record is not None and (record.cancel or record.cancelled):
            return Outcome()
        if drained.provider_id is None:
            return Outcome()  # not ours to terminate
        fact = await self._terminate(drained.provider_id, drained.action_id, drained.plan_id, None, drained.node_name)
        return Outcome(redeliver_after_seconds=self._ending_wall_seconds()) if fact is None else Outcome(facts=(fact,))

    def _ending_wall_seconds(self) -> float:
        drains = self._view.state.drains.values()
        ending_count = sum(record.drained is not None and record.terminated is None for record in drains)
        return max(ENDING_WALL_SECONDS, ending_count / ENDING_POLLS_PER_SECOND_MAX)

    async def _find(self, order_action_id: ActionId) -> ProviderId | None:
        record = self._view.state.orders.get(order_action_id)
        if record is not None and record.launched is not None:
            return record.launched.provider_id
        instances = await self._provider.instances(self._installation)
        return next((instance.provider_id for instance in instances if instance.action_id == order_action_id), None)

    async def _terminate(
        self,
        provider_id: ProviderId | None,
        action_id: ActionId,
        plan_id: PlanId,
        order_action_id: ActionId | None,
        node_name: str | None,
    ) -> ScalingNodeTerminated | None:
        """Terminate; return the fact once the cloud reports the end, None while the instance is terminating."""
        now = self._now()
        instance = None if provider_id is None else await self._provider.terminate(provider_id, now=now)
        if instance is not None and instance.state != "terminated":
            return None
        if instance is None and provider_id is not None and self._may_be_unseen(provider_id, now):
            return None  # launched moments ago: the cloud may not know it yet
        return ScalingNodeTerminated(
            action_id=action_id,
            plan_id=plan_id,
            provider_id=provider_id,
            order_action_id=order_action_id or (None if instance is None else instance.action_id),
            node_name=node_name,
            terminated_at=(None if instance is None else instance.terminated_at) or now,
        )

    def _may_be_unseen(self, provider_id: ProviderId, now: datetime) -> bool:
        launches = (order.launched for order in self._view.state.orders.values() if order.launched is not None)
        return any(launch.provider_id == provider_id and now - launch.launched_at < SHOWN_LATE for launch in launches)


def is_settled(record: OrderRecord) -> bool:
    """Return True for an order that was launched, refused or terminated."""
    return record.launched is not None or record.refused is not None or record.terminated is not None


def late_launch(instance: Instance, state: ClusterState, now: datetime) -> ScalingNodeLaunched | None:
    """Return the launch of an instance that appears past the deadline of its order, after which the cloud is not asked
    again; None for every other one.
    """
    record = None if instance.action_id is None else state.orders.get(instance.action_id)
    if record is None or record.ordered is None or is_settled(record) or now < record.ordered.deadline_at:
        return None
    return _launch_of(record.action_id, record.plan_id, instance)


def _launch_of(action_id: ActionId, plan_id: PlanId, instance: Instance) -> ScalingNodeLaunched:
    return ScalingNodeLaunched(
        action_id=action_id,
        plan_id=plan_id,
        provider_id=instance.provider_id,
        instance_type=instance.instance_type,
        zone=instance.zone,
        capacity_type=instance.capacity_type,
        price_micro_usd_per_hour=instance.price_micro_usd_per_hour,
        launched_at=instance.launched_at,
    )


def members_of(state: ClusterState, transaction: ActionId) -> list[tuple[OrderRecord, BuyNode]]:
    """Return the purchases of a transaction, by action id."""
    members = [
        (record, record.decision)
        for record in state.orders.values()
        if record.decision is not None and record.decision.transaction == transaction
    ]
    return sorted(members, key=lambda member: member[0].action_id)


def _refusal_of_each(orders: Iterable[tuple[OrderRecord, BuyNode]], refused: ScalingLaunchRefused) -> list[Fact]:
    return [msgspec.structs.replace(refused, action_id=order.action_id, plan_id=order.plan_id) for order, _ in orders]


def release_of(state: ClusterState, order_action_id: ActionId) -> DrainRecord | None:
    """Return the decision to release this order; None if there is none, or it was cancelled."""
    return next(
        (
            drain
            for drain in state.drains.values()
            if isinstance(drain.decision, ReleaseInstance)
            and drain.decision.order_action_id == order_action_id
            and drain.cancelled is None
        ),
        None,
    )
