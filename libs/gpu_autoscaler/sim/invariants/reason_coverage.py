"""Counts the reasons of a run: those in plans, and those of the queue, which no fact carries."""

from collections import Counter
from collections.abc import Callable, Mapping

from gpu_autoscaler.core.deferred_groups import reason_counts
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.queries import queue
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.sim.virtual_time import VirtualLoop

CHECK_SECONDS = 300.0  # between samples of the queue, whose deferrals are not published
LOST_SECONDS = 3.0  # after a preemption, while the job's last pods terminate
# Why a sweep may not reach these reasons; printed with the report.
_RESERVED = "purchases reserve their full cost, so only a lowered limit is exceeded, in few runs"
RARE_REASONS: Mapping[str, str] = {
    "plan_full": "one plan holds thousands of decisions, more than the nodes of a simulated cluster",
    "spend_enforcement_blocked": f"{_RESERVED}, while protected work keeps running",
    "spend_exhausted": _RESERVED,
    "spot_excluded": "for seconds only, while the last pods of a job excluded from spot terminate",
    "too_many_unhealthy": "more nodes must be unhealthy at a time than the policy replaces automatically",
}


class ReasonCoverage:
    """Counts reasons."""

    def __init__(
        self, loop: VirtualLoop, state: Callable[[], ClusterState | None], policy: Callable[[], ScalingPolicy]
    ) -> None:
        """`seen`: the scheduler's state, None while it does not run."""
        self.reasons: Counter[str] = Counter()
        self.plans_count = 0
        self._loop = loop
        self._state = state
        self._policy = policy

    def begin(self) -> None:
        """Sample the queue periodically."""
        self._loop.call_later(CHECK_SECONDS, self._sample)

    def on_fact(self, recorded: Recorded) -> None:
        """A fact was stored."""
        if isinstance(recorded.fact, ScalingPlanMade):
            self.plans_count += 1
            plan = recorded.fact.plan
            self.reasons.update(decision.reason.tag() for decision in (*plan.decisions, *plan.upkeep_decisions))
            self.reasons.update(reason_counts(plan))
        elif isinstance(recorded.fact, JobPreempted):
            self._loop.call_later(LOST_SECONDS, self._count)

    def _sample(self) -> None:
        self._count()
        self._loop.call_later(CHECK_SECONDS, self._sample)

    def _count(self) -> None:
        state = self._state()
        if state is not None and queue(state):
            deferred = schedule(state, self._policy(), self._loop.now()).deferred
            self.reasons.update(item.reason.tag() for item in deferred)
