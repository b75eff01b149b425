"""Gives plans their effect, one tiny step at a time: one fact in, one call out, one fact back. Chooses nothing.

A crash anywhere resumes by redelivery: the plan holds the offer, the deadline and the token that make a second try
harmless, and each step looks first whether it was taken already.
"""

from collections.abc import Sequence
from datetime import datetime
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
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError, TransientError
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scaler.drains import Drains
from gpu_autoscaler_services.scaler.farewells import Farewells
from gpu_autoscaler_services.scaler.guards import Guards
from gpu_autoscaler_services.scaler.leftovers import Leftovers
from gpu_autoscaler_services.scaler.purchases import Purchases

RETRY_WALL_SECONDS = 1.0  # until a plan is taken up again of which a part could not be carried out

log = structlog.get_logger()


class Executor:
    """The row of steps."""

    def __init__(
        self,
        purchases: Purchases,
        drains: Drains,
        store: Store,
        guards: Guards,
        farewells: Farewells,
        leftovers: Leftovers,
    ) -> None:
        self._purchases = purchases
        self._drains = drains
        self._store = store
        # No steps of a plan: how nodes are held, who is told that others end them, and which objects are left of nodes
        # that are no more, follows from the state alone.
        self.guards = guards
        self.farewells = farewells
        self.leftovers = leftovers

    async def step(self, recorded: Recorded) -> Outputs:
        """Take the step that follows from this fact. Raises TransientError, PermanentError."""
        match recorded.fact:
            case ScalingPlanMade() as made:
                return await self._begin(made, made_at=recorded.envelope.time)
            case ScalingDecisionsRestored() as restored:
                return await self._resume(restored)
            case ScalingNodeOrdered() as ordered:
                return await self._purchases.launch(ordered)
            case ScalingDrainStarted() as started:
                outcome = await self._drains.proceed(started)
                await self._purchases.leave_group(started)
                return outcome
            case ScalingNodeDrained() as drained:
                return await self._purchases.terminate(drained)
            case other:
                raise PermanentError(f"{other.type_name()} is no step of a plan: the consumer's filter is too wide")

    async def _begin(self, made: ScalingPlanMade, *, made_at: datetime) -> Outcome:
        """Put the plan on record, and begin every decision of it.

        On record first: what has begun must be known to whoever goes on after all streams are lost.
        """
        failures: list[AutoscalerError] = []
        try:
            await self._store.record_plan(made, made_at=made_at)
        except TransientError as exc:
            failures.append(exc)  # holds up no decision: a notice does not wait for a full disk
        return await self._begin_all([(one, made.plan_id) for one in made.plan.decisions], failures)

    async def _resume(self, restored: ScalingDecisionsRestored) -> Outcome:
        """Begin again what was open when the stream was lost; each step looks first whether it was taken."""
        open_ones = (past for past in restored.past if not past.is_only_counted)
        return await self._begin_all([(past.decision, past.plan_id) for past in open_ones], [])

    async def _begin_all(
        self, decisions: Sequence[tuple[AnyDecision, PlanId]], failures: list[AutoscalerError]
    ) -> Outcome:
        """Begin each decision. What fails does not hold up the rest: that is published first, then all is taken up
        again. A failure that lasts is raised only when nothing else is left to say. Raises PermanentError,
        TransientError.
        """
        facts: list[Fact] = []
        for decision, plan_id in decisions:
            try:
                facts += await self._begin_one(decision, plan_id)
            except (TransientError, PermanentError) as exc:
                log.warning("decision not begun, tried again", action_id=decision.action_id, error=str(exc))
                failures.append(exc)
        if failures and not facts:
            # What may pass comes first: a plan is given up only when all that is left of it never can be done.
            raise min(failures, key=lambda failure: isinstance(failure, PermanentError))
        return Outcome(facts=tuple(facts), again_after_seconds=RETRY_WALL_SECONDS if failures else None)

    async def _begin_one(self, decision: AnyDecision, plan_id: PlanId) -> list[Fact]:
        match decision:
            case BuyNode():
                return self._purchases.order(decision, plan_id)
            case DrainNode():
                return await self._drains.start(decision, plan_id)
            case CancelDrain():
                return await self._drains.cancel(decision, plan_id)
            case ReleaseInstance():
                spared = await self._drains.spare(decision, plan_id)
                return await self._purchases.release(decision, plan_id) if spared is None else spared
            case _:
                assert_never(decision)
