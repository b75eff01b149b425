"""Counts the reasons of a run: those in plans, and those of the queue, which no fact carries."""

from collections import Counter
from collections.abc import Callable, Mapping

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.views import queue
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.sim.timeline import VirtualLoop

LOOKED_SECONDS = 300.0  # between samples of the queue, whose deferrals are not published
LOST_SECONDS = 3.0  # after a preemption, while the job's last pods terminate
# Why a sweep may not reach these reasons; printed with the report.
_RESERVED = "what is bought reserves all that it may cost, so money runs out where people lower a limit, in few worlds"
SELDOM: Mapping[str, str] = {
    "spend_enforcement_blocked": f"{_RESERVED}, and protected work runs on",
    "spend_exhausted": _RESERVED,
    "spot_excluded": "for seconds only, while the last pods of a job go that spot lost too often",
    "too_many_unhealthy": "more nodes have to be sick at a time than the policy replaces unasked",
}


class Coverage:
    """Counts reasons."""

    def __init__(
        self, loop: VirtualLoop, seen: Callable[[], ClusterState | None], policy: Callable[[], ScalingPolicy]
    ) -> None:
        """`seen`: the scheduler's state, None while it does not run."""
        self.reasons: Counter[str] = Counter()
        self.plans_count = 0
        self._loop = loop
        self._seen = seen
        self._policy = policy

    def begin(self) -> None:
        """Sample the queue periodically."""
        self._loop.call_later(LOOKED_SECONDS, self._look)

    def heard(self, recorded: Recorded) -> None:
        """A fact was stored."""
        if isinstance(recorded.fact, ScalingPlanMade):
            self.plans_count += 1
            plan = recorded.fact.plan
            self.reasons.update(each.reason.tag() for each in (*plan.decisions, *plan.deferred))
        elif isinstance(recorded.fact, JobPreempted):
            self._loop.call_later(LOST_SECONDS, self._count)

    def _look(self) -> None:
        self._count()
        self._loop.call_later(LOOKED_SECONDS, self._look)

    def _count(self) -> None:
        state = self._seen()
        if state is not None and queue(state):
            held = schedule(state, self._policy(), self._loop.now()).deferred
            self.reasons.update(each.reason.tag() for each in held)
