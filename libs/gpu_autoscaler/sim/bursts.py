"""The first of a burst waits for the rest no longer than the policy says. Part of the witness."""

from collections.abc import Callable
from datetime import timedelta

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.waits import BurstArriving

PROMISE = "work is served"
SKEW = timedelta(seconds=10)  # between the clocks of two who plan, twice over, and the tick that comes after the wait


class Bursts:
    """Knows since which plan each piece of work waits for others."""

    def __init__(self, breaks: Callable[[str, str], None]) -> None:
        self._breaks = breaks
        self._since: dict[str, Instant] = {}  # by what waits

    def planned(self, plan: Plan, policy: ScalingPolicy) -> None:
        """A plan was made, under this policy."""
        waiting = [held.subject for held in plan.held_back if isinstance(held.reason, BurstArriving)]
        self._since = {subject: self._since.get(subject, plan.as_of) for subject in waiting}
        longest = timedelta(seconds=policy.burst.wait_seconds_max)
        for subject, since in self._since.items():
            if plan.as_of - since > longest + SKEW:
                waited_seconds = (plan.as_of - since).total_seconds()
                what = f"{subject} has waited for {waited_seconds:.0f} s for the rest of a burst"
                self._breaks(PROMISE, f"{what}, the policy allows {longest.total_seconds():g} s")
                return
