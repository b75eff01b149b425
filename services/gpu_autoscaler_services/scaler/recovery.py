"""Restores open decisions from the store after the loss of a stream, once, before the first plan, and from the last
snapshot what the ledger still needs."""

from datetime import datetime, timedelta
from itertools import islice

import structlog

from gpu_autoscaler.core.limits.order_recovery import open_decisions
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.scaler.living import uncharged_ends

PLANS_COUNT_MAX = 5000  # more than one plan per tick for an hour
ENDS_COUNT_MAX = 500  # per tick
_PAGE_COUNT = 200

log = structlog.get_logger()


class DecisionRecovery:
    """Restores the decisions of a lost stream."""

    def __init__(self, store: Store, policy: ScalingPolicy, lost_state: ClusterState = EMPTY_STATE) -> None:
        """`lost_state`: the last snapshot of streams that are lost."""
        self._store = store
        self._policy = policy
        self._lost_state = lost_state

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Use this policy from now on."""
        self._policy = policy

    async def before_first_plan(self, state: ClusterState, now: datetime) -> Outcome | None:
        """Return what must precede the first plan on this stream; None if planning may begin.

        An outcome without facts means "not yet": orders of a lost stream show in the cloud and in Kubernetes, so
        nothing is planned before both are listed. Raises TransientError while the store is unreachable.
        """
        if state.restored_at is not None or state.last_plan_sequence > 0:
            return None
        newest = (await self._store.plans(count_max=1)).rows
        if not newest:
            return None  # a new installation
        stale = stale_watch(state, self._policy, now) or stale_instances(state, self._policy, now)
        if stale is not None:
            log.info("planning deferred until resources are listed on the new stream", missing=stale.source)
            return Outcome()
        if ends := tuple(islice(uncharged_ends(self._lost_state, state, now), ENDS_COUNT_MAX)):
            return Outcome(facts=ends)  # with the next tick the state has them
        self._lost_state = EMPTY_STATE
        past = open_decisions(await self._plans(newest[0].fact.plan.as_of), state, self._policy, now)
        log.warning("decisions restored after stream loss", decisions_count=len(past))
        restored = ScalingDecisionsRestored(past=past, restored_at=now, brake=newest[0].fact.plan.brake)
        # Fenced: of two scalers only one publishes it.
        return Outcome(facts=(restored,), expected_last_sequence=0)

    async def _plans(self, newest_at: datetime) -> list[ScalingPlanMade]:
        """Return plans whose decisions may be open, oldest first: purchases and removals end within a bounded time.

        Counted back from the last plan, not from now: without a scaler no decision progresses.
        """
        policy = self._policy
        since = newest_at - timedelta(seconds=2 * max(policy.boot_seconds_max, policy.drain_seconds_max))
        plans: list[ScalingPlanMade] = []
        cursor: str | None = None
        while len(plans) < PLANS_COUNT_MAX:
            page = await self._store.plans(cursor=cursor, count_max=_PAGE_COUNT)
            plans += [row.fact for row in page.rows if row.fact.plan.as_of >= since]
            cursor = page.next_cursor
            if cursor is None or page.rows[-1].fact.plan.as_of < since:
                break
        return plans[::-1]
