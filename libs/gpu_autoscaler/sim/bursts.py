"""Invariant: the first of a burst waits for the rest no longer than the policy says."""

from collections.abc import Callable
from datetime import timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.waits import BatchWindowOpen

WORK_SERVED = "work is served"
SKEW = timedelta(seconds=10)  # twice the clock skew between two planners, and the tick after the wait


class Bursts:
    """Tracks since which plan each subject waits for a burst."""

    def __init__(self, breaks: Callable[[str, str], None]) -> None:
        self._breaks = breaks
        self._since: dict[str, Instant] = {}  # by subject

    def planned(self, plan: Plan, policy: ScalingPolicy) -> None:
        """A plan was published under this policy."""
        waiting = [held.subject for held in plan.deferred if isinstance(held.reason, BatchWindowOpen)]
        self._since = {subject: self._since.get(subject, plan.as_of) for subject in waiting}
        longest = timedelta(seconds=policy.batching.wait_seconds_max)
        for subject, since in self._since.items():
            if plan.as_of - since > longest + SKEW:
                waited_seconds = (plan.as_of - since).total_seconds()
                what = f"{subject} has waited for {waited_seconds:.0f} s for the rest of a burst"
                self._breaks(WORK_SERVED, f"{what}, the policy allows {longest.total_seconds():g} s")
                return
