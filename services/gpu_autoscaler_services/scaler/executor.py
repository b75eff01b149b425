"""Executes plans step by step: one fact in, one call out, one fact back. Decides nothing.

After a crash redelivery resumes the work, so each step first checks whether it was already taken.
"""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import assert_never

import structlog

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import (
    ScalingDecisionsRestored,
    ScalingDrainStarted,
    ScalingNodeDrained,
    ScalingNodeOrdered,
    ScalingPlanMade,
)
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, DrainNode, ReleaseInstance
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.service import Outcome, Outputs, Step
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scaler.checkpoint_notices import CheckpointNotices
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.finalizers import Finalizers
from gpu_autoscaler_services.scaler.orphaned_nodes import OrphanedNodes
from gpu_autoscaler_services.scaler.purchases import Purchases

# Nodes of one plan that are cordoned, asked or released at once. A hundred nodes of a storm take three rounds of calls
# to the API server; more at once would only queue there. Source: our own.
NODES_CONCURRENT_MAX = 32

log = structlog.get_logger()


class Executor:
    """Dispatches each fact to its step."""

    def __init__(
        self,
        purchases: Purchases,
        drains: Drains,
        store: Store,
        finalizers: Finalizers,
        checkpoint_notices: CheckpointNotices,
        orphaned_nodes: OrphanedNodes,
    ) -> None:
        self._purchases = purchases
        self._drains = drains
        self._store = store
        # Not part of a plan: finalizers, checkpoint notices and orphaned nodes follow from the state alone.
        self.finalizers = finalizers
        self.checkpoint_notices = checkpoint_notices
        self.orphaned_nodes = orphaned_nodes

    async def step(self, recorded: Recorded) -> Outputs:
        """Take the step that this fact calls for. Raises TransientError, PermanentError."""
        match recorded.fact:
            case ScalingPlanMade() as made:
                return await self._begin(made, made_at=recorded.envelope.time)
            case ScalingDecisionsRestored() as restored:
                open_decisions = (past for past in restored.past if not past.is_only_counted)
                return self._begin_all([(past.decision, past.plan_id) for past in open_decisions])
            case ScalingNodeOrdered() as ordered:
                return await self._purchases.launch(ordered)
            case ScalingDrainStarted() as started:
                outcome = await self._drains.proceed(started)
                await self._purchases.leave_group(started)
                return outcome
            case ScalingNodeDrained() as drained:
                return await self._purchases.terminate(drained)
            case other:
                raise PermanentError(
                    f"unexpected fact {other.type_name()}: no execution step; narrow the consumer's filter"
                )

    async def _begin(self, made: ScalingPlanMade, *, made_at: datetime) -> Outcome:
        """Store the plan, then begin each of its decisions.

        Stored first, so that a decision that has begun is known even after the loss of all streams.
        """
        decisions = [(decision, made.plan_id) for decision in made.plan.decisions]
        try:
            await self._store.record_plan(made, made_at=made_at)
        except TransientError as exc:  # does not delay the decisions: a notice must not wait for a full disk
            return self._begin_all(decisions, partial(_fail, exc))
        return self._begin_all(decisions)

    def _begin_all(self, decisions: Sequence[tuple[AnyDecision, PlanId]], *more: Step) -> Outcome:
        """Return a step for each decision, and one for all orders. Redelivery continues with those not yet begun.

        Nodes that leave come first: nothing of the cloud may delay a cordon. Releases, which wait for the cloud, last.
        """
        orders = [(decision, plan_id) for decision, plan_id in decisions if isinstance(decision, BuyNode)]
        others = [(decision, plan_id) for decision, plan_id in decisions if not isinstance(decision, BuyNode)]
        others.sort(key=lambda begun: isinstance(begun[0], ReleaseInstance))  # stable
        releases_count = sum(isinstance(decision, ReleaseInstance) for decision, _ in others)
        steps: list[Step] = [partial(self._begin_one, decision, plan_id) for decision, plan_id in others]
        if orders:
            steps.insert(len(others) - releases_count, partial(self._order_all, orders))
        return Outcome(steps=(*steps, *more), steps_concurrent_max=NODES_CONCURRENT_MAX)

    async def _order_all(self, orders: Sequence[tuple[BuyNode, PlanId]]) -> list[Fact]:
        return [fact for decision, plan_id in orders for fact in self._purchases.order(decision, plan_id)]

    async def _begin_one(self, decision: DrainNode | CancelDrain | ReleaseInstance, plan_id: PlanId) -> list[Fact]:
        try:
            match decision:
                case DrainNode():
                    return await self._drains.start(decision, plan_id)
                case CancelDrain():
                    return await self._drains.cancel(decision, plan_id)
                case ReleaseInstance():
                    cancelled = await self._drains.recheck_release(decision, plan_id)
                    return await self._purchases.release(decision, plan_id) if cancelled is None else cancelled
                case _:
                    assert_never(decision)
        except (TransientError, PermanentError) as exc:
            log.warning("decision start failed, retried", action_id=decision.action_id, error=str(exc))
            raise


async def _fail(error: TransientError) -> list[Fact]:
    """Have the plan handled again because of an earlier failure."""
    raise error
