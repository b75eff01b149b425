"""Executes plans step by step: one fact in, one call out, one fact back. Decides nothing.

After a crash redelivery resumes the work, so each step first checks whether it was already taken.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import assert_never

import structlog

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import (
    ScalingDecisionsRestored,
    ScalingDrainResynced,
    ScalingDrainStarted,
    ScalingNodeDrained,
    ScalingNodeOrdered,
    ScalingPlanMade,
)
from gpu_autoscaler.model.decisions import (
    AnyDecision,
    BuyNode,
    CancelDrain,
    DrainNode,
    ReleaseInstance,
    RequestCheckpoints,
)
from gpu_autoscaler.model.errors import PermanentError, TransientError
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.service import Outcome, Outputs, Step
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.purchases import Purchases
from gpu_autoscaler_services.scaler.upkeep import UpkeepSteps

# Nodes of one plan that are cordoned, asked or released at once. A hundred nodes of a storm take three rounds of calls
# to the API server; more at once would only queue there. Source: our own.
NODES_CONCURRENT_MAX = 32

log = structlog.get_logger()


class Executor:
    """Dispatches each fact to its step."""

    def __init__(self, purchases: Purchases, drains: Drains, store: Store, upkeep: UpkeepSteps) -> None:
        self._purchases = purchases
        self._drains = drains
        self._store = store
        self._upkeep = upkeep

    async def step(self, recorded: Recorded) -> Outputs:
        """Take the step that this fact calls for. Raises TransientError, PermanentError."""
        match recorded.fact:
            case ScalingPlanMade() as made:
                return self._begin(made, made_at=recorded.envelope.time)
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
            case ScalingDrainResynced() as repeated:
                return await self._resume(repeated)
            case other:
                raise PermanentError(
                    f"unexpected fact {other.type_name()}: no execution step; narrow the consumer's filter"
                )

    async def _resume(self, removal: ScalingDrainResynced) -> Outputs:
        """Take the step that an open removal is at: the fact that led to it is about to leave the stream.

        Until then both may take it.
        """
        if removal.terminated is not None or removal.cancelled is not None:
            return ()
        if removal.cancel is not None:
            return await self._drains.cancel(removal.cancel, removal.plan_id)
        if removal.drained is not None:
            return await self._purchases.terminate(removal.drained)
        if removal.started is not None:
            return await self._drains.proceed(removal.started)
        return self._begin_all([(removal.decision, removal.plan_id)] if removal.decision is not None else [])

    def _begin(self, made: ScalingPlanMade, *, made_at: datetime) -> Outcome:
        """Store the plan and begin each of its decisions.

        Stored before whatever can wait, so that a decision that has begun is known even after the loss of all streams.
        Nodes under notice, and pods that Karpenter evicts, do not wait for the store.
        """
        record = _PlanRecord(self._store, made, made_at)
        decisions = [(decision, made.plan_id) for decision in made.plan.decisions]
        urgent: list[Step] = []
        upkeep: list[Step] = []
        for act in made.plan.upkeep_decisions:
            take = partial(self._upkeep.take, act, made.plan_id)
            if isinstance(act, RequestCheckpoints):
                urgent.append(take)  # the pods are being evicted
            else:
                upkeep.append(record.before(take))
        return self._begin_all(decisions, record.before, *upkeep, record.confirm, first=urgent)

    def _begin_all(
        self,
        decisions: Sequence[tuple[AnyDecision, PlanId]],
        recorded: Callable[[Step], Step] = lambda step: step,
        *more: Step,
        first: Sequence[Step] = (),
    ) -> Outcome:
        """Return a step for each decision, and one for all orders. Redelivery continues with those not yet begun.

        Nodes that leave come first: nothing of the cloud may delay a cordon. Releases, which wait for the cloud, and
        upkeep last.
        """
        forced: list[Step] = []
        removals: list[Step] = []
        releases: list[Step] = []
        orders: list[tuple[BuyNode, PlanId]] = []
        for decision, plan_id in decisions:
            if isinstance(decision, BuyNode):
                orders.append((decision, plan_id))
                continue
            begin = partial(self._begin_one, decision, plan_id)
            if isinstance(decision, DrainNode) and not decision.is_voluntary:
                forced.append(begin)
            else:
                (releases if isinstance(decision, ReleaseInstance) else removals).append(recorded(begin))
        purchases = [recorded(partial(self._order_all, orders))] if orders else []
        return Outcome(
            steps=(*first, *forced, *removals, *purchases, *releases, *more), steps_concurrent_max=NODES_CONCURRENT_MAX
        )

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


class _PlanRecord:
    """The plan's row in the store, written once, before the first step that waits for it."""

    def __init__(self, store: Store, made: ScalingPlanMade, made_at: datetime) -> None:
        self._store = store
        self._made = made
        self._made_at = made_at
        self._lock = asyncio.Lock()
        self._has_tried = False
        self._failure: TransientError | None = None

    def before(self, step: Step) -> Step:
        """Return the step as one that waits until the plan is stored, or has failed to be: a full disk stops none."""

        async def take() -> Sequence[Fact]:
            await self._write()
            return await step()

        return take

    async def confirm(self) -> Sequence[Fact]:
        """Raise why the plan could not be stored, so that it is handled again."""
        await self._write()
        if self._failure is not None:
            raise self._failure
        return ()

    async def _write(self) -> None:
        async with self._lock:
            if self._has_tried:
                return
            try:
                await self._store.record_plan(self._made, made_at=self._made_at)
            except TransientError as exc:
                self._failure = exc
            self._has_tried = True
