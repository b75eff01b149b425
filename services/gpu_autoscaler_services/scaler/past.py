"""What was decided before the stream began anew. Read from the store of record, once, before the first plan."""

from datetime import datetime, timedelta

import structlog

from gpu_autoscaler.core.freshness import stale_instances, stale_watch
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.restoring import open_decisions
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingDecisionsRestored, ScalingPlanMade
from gpu_autoscaler.runtime.service import Outcome
from gpu_autoscaler.store.protocol import Store

PLANS_COUNT_MAX = 5000  # one each tick of a busy hour are fewer
_PAGE_COUNT = 200

log = structlog.get_logger()


class Past:
    """The decisions that a lost stream leaves behind."""

    def __init__(self, store: Store, policy: ScalingPolicy) -> None:
        self._store = store
        self._policy = policy

    def use_policy(self, policy: ScalingPolicy) -> None:
        """Read the past by this policy from now on."""
        self._policy = policy

    async def before_first_plan(self, state: ClusterState, now: datetime) -> Outcome | None:
        """Return what is to be said before any plan is made on this stream; None where a plan may be made.

        An outcome without facts: not yet. What a lost stream had ordered shows in the cloud and in Kubernetes, so
        nothing is decided before both were listed. Raises TransientError while the store is away.
        """
        if state.restored_at is not None or state.last_plan_sequence > 0:
            return None
        newest = (await self._store.plans(count_max=1)).rows
        if not newest:
            return None  # the very first plan
        stale = stale_watch(state, self._policy, now) or stale_instances(state, self._policy, now)
        if stale is not None:
            log.info("stream began anew, no plan before the world is listed again", missing=stale.source)
            return Outcome()
        past = open_decisions(await self._plans(newest[0].fact.plan.as_of), state, self._policy, now)
        log.warning("stream began anew, decisions of before are carried on", decisions_count=len(past))
        # Behind a fence: of two scalers one says it.
        return Outcome(facts=(ScalingDecisionsRestored(past=past, restored_at=now),), expected_last_sequence=0)

    async def _plans(self, newest_at: datetime) -> list[ScalingPlanMade]:
        """Plans whose decisions may be open, oldest first: a purchase and a removal both end within a known time.

        Counted from the last plan and not from now: while nobody was there to plan, nothing went on either.
        """
        policy = self._policy
        since = newest_at - timedelta(seconds=2 * max(policy.boot_seconds_max, policy.drain_seconds_max))
        found: list[ScalingPlanMade] = []
        cursor: str | None = None
        while len(found) < PLANS_COUNT_MAX:
            page = await self._store.plans(cursor=cursor, count_max=_PAGE_COUNT)
            found += [row.fact for row in page.rows if row.fact.plan.as_of >= since]
            cursor = page.next_cursor
            if cursor is None or page.rows[-1].fact.plan.as_of < since:
                break
        return found[::-1]
