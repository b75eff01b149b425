"""The executor's half that deals with the cloud: launch, terminate, release.

Chooses nothing; every call bears repeating.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec
import structlog

from gpu_autoscaler.core.state import ClusterState, DrainRecord, OrderRecord
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
from gpu_autoscaler.model.reasons import SpotReclaim
from gpu_autoscaler.providers.protocol import (
    CapacityProvider,
    HealsItself,
    Instance,
    LaunchesTogether,
    LaunchRefused,
    Order,
)
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome

log = structlog.get_logger()

# Until an instance that was made shows up everywhere: seconds as a rule, minutes at worst (EC2 Developer Guide,
# "Eventual consistency in the Amazon EC2 API", which has waits of up to five minutes; read 2026-11-22).
SHOWN_LATE = timedelta(minutes=5)
ENDING_WALL_SECONDS = 1.0  # between two looks at an instance that is ending


# A cloud that says "at once" is asked again with the next plans all the same, and would be with each of them.
RETRY_SECONDS_MIN = 10.0


class Purchases:
    """Orders become instances, and instances end."""

    def __init__(self, view: StateView, provider: CapacityProvider, installation: str, now: Now) -> None:
        """`installation` is the UID that our instances are tagged with."""
        self._view = view
        self._provider = provider
        self._installation = installation
        self._now = now
        self._left_groups: set[ActionId] = set()  # by drain; forgotten with a restart, as a second try is harmless

    def order(self, decision: BuyNode, plan_id: PlanId) -> list[Fact]:
        """Return the order as a fact: from here on the launch resumes by redelivery, whatever crashes."""
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
        """Make the instance, or return the one that this order has made already. Raises TransientError.

        Nothing is launched for an order that is settled, given back, or past its deadline: the next plan knows.
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
                f"order {ordered.action_id}: plan {ordered.plan_id} has aged out, its taints are unknown; nothing is"
                " launched, and the next plan releases the order"
            )
        try:
            instance = await self._provider.launch(self._order_of(record.decision))
        except LaunchRefused as refused:
            return [self._refused(record.decision, ordered.plan_id, refused)]
        return [await self._launched(ordered.action_id, ordered.plan_id, instance)]

    def _makes_together(self, ordered: ScalingNodeOrdered) -> bool:
        provider = self._provider
        return isinstance(provider, LaunchesTogether) and provider.makes_together(ordered.pool, ordered.offer)

    async def _launch_together(self, action_id: ActionId, transaction: ActionId) -> list[Fact]:
        """Make all that is wanted of the transaction, in one call. Its first order stands for all of them: the others
        wait for what is said of them with it, and go ahead only where it is over. Raises TransientError."""
        first = self._view.state.orders.get(transaction)
        if action_id != transaction and first is not None and first.ordered is not None and not is_settled(first):
            return []
        all_of_it = members_of(self._view.state, transaction)
        said = next((record.refused for record, _ in all_of_it if record.refused is not None), None)
        open_ones = [
            (record, decision)
            for record, decision in all_of_it
            if not is_settled(record) and self._is_wanted(record.action_id, decision.deadline_at)
        ]
        provider = self._provider
        if not open_ones or not isinstance(provider, LaunchesTogether):
            return []
        if said is not None:  # of one of them, so of all: what was not published is said again
            return _said_of_each(open_ones, said)
        orders = [self._order_of(decision) for _, decision in open_ones]
        try:
            instances = await provider.launch_together(transaction, orders)
        except LaunchRefused as refused:
            record, decision = open_ones[0]
            return _said_of_each(open_ones, self._refused(decision, record.plan_id, refused))
        pairs = zip(open_ones, instances, strict=True)
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
        """False for an order that is given back, or past its deadline."""
        return release_of(self._view.state, action_id) is None and self._now() < deadline_at

    async def _launched(self, action_id: ActionId, plan_id: PlanId, instance: Instance) -> ScalingNodeLaunched:
        """The fact. An order that was given back while its instance was being made ends it: nobody else found it."""
        if release_of(self._view.state, action_id) is not None:
            await self._provider.terminate(instance.provider_id, now=self._now())
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
        """End the instance of an order, heard of or not. Raises TransientError until it is gone."""
        provider_id = decision.provider_id or await self._find(decision.order_action_id)
        ended = await self._ended(provider_id, decision.action_id, plan_id, decision.order_action_id, None)
        if ended is None:
            raise TransientError(f"instance {provider_id} is still ending, asked again")
        return [ended]

    async def leave_group(self, started: ScalingDrainStarted) -> None:
        """See that the cloud's own group makes no successor of an instance that it takes: the plan buys one.

        A failure holds up no drain: it is told, and tried again with the next pass.
        """
        record = self._view.state.drains.get(started.action_id)
        decision = None if record is None else record.decision
        is_taken = isinstance(decision, DrainNode) and isinstance(decision.reason, SpotReclaim)
        if not is_taken or started.provider_id is None or started.action_id in self._left_groups:
            return
        if not isinstance(self._provider, HealsItself):
            return
        try:
            await self._provider.detach(started.provider_id)
        except AutoscalerError as exc:
            log.warning("instance left in its group, which may replace it as well; tried again", error=str(exc))
        else:
            self._left_groups.add(started.action_id)

    async def terminate(self, drained: ScalingNodeDrained) -> Outcome:
        """End the instance of a node that is empty now; asked again until the cloud says that it is gone."""
        record = self._view.state.drains.get(drained.action_id)
        if record is not None and (record.cancel or record.cancelled):
            return Outcome()
        if drained.provider_id is None:
            return Outcome()  # not ours to end
        ended = await self._ended(drained.provider_id, drained.action_id, drained.plan_id, None, drained.node_name)
        return Outcome(again_after_seconds=ENDING_WALL_SECONDS) if ended is None else Outcome(facts=(ended,))

    async def _find(self, order_action_id: ActionId) -> ProviderId | None:
        record = self._view.state.orders.get(order_action_id)
        if record is not None and record.launched is not None:
            return record.launched.provider_id
        listed = await self._provider.instances(self._installation)
        return next((one.provider_id for one in listed if one.action_id == order_action_id), None)

    async def _ended(
        self,
        provider_id: ProviderId | None,
        action_id: ActionId,
        plan_id: PlanId,
        order_action_id: ActionId | None,
        node_name: str | None,
    ) -> ScalingNodeTerminated | None:
        """Terminate, and say so once the cloud does; None while the instance is still ending."""
        now = self._now()
        instance = None if provider_id is None else await self._provider.terminate(provider_id, now=now)
        if instance is not None and instance.state != "terminated":
            return None
        if instance is None and provider_id is not None and self._may_be_unseen(provider_id, now):
            return None  # it was made moments ago: a cloud that knows nothing of it does not know of it yet
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
        return any(one.provider_id == provider_id and now - one.launched_at < SHOWN_LATE for one in launches)


def is_settled(record: OrderRecord) -> bool:
    """True for an order of which the cloud's word is on record."""
    return record.launched is not None or record.refused is not None or record.terminated is not None


def members_of(state: ClusterState, transaction: ActionId) -> list[tuple[OrderRecord, BuyNode]]:
    """Return the purchases of a transaction, by their names."""
    found = [
        (record, record.decision)
        for record in state.orders.values()
        if record.decision is not None and record.decision.transaction == transaction
    ]
    return sorted(found, key=lambda each: each[0].action_id)


def _said_of_each(records: Iterable[tuple[OrderRecord, BuyNode]], said: ScalingLaunchRefused) -> list[Fact]:
    return [msgspec.structs.replace(said, action_id=record.action_id, plan_id=record.plan_id) for record, _ in records]


def release_of(state: ClusterState, order_action_id: ActionId) -> DrainRecord | None:
    """Return the decision to give this order back, None where there is none, or its node was spared."""
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
