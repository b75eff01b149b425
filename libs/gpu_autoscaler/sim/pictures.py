"""Invariant: no voluntary removal on stale data. A plan is checked against the latest observation in its own cut.

Faults excuse nothing, as faults are what makes data stale.
"""

from bisect import bisect_right
from collections.abc import Callable
from datetime import datetime
from operator import itemgetter

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.node import NodeListed, NodeWatched
from gpu_autoscaler.events.pod import PodListed, PodWatched
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import DrainNode, ReleaseInstance
from gpu_autoscaler.sim.policies import Policies

NO_VOLUNTARY_REMOVAL = "no voluntary removal"


class Pictures:
    """Tracks the observation time at each sequence of a stream."""

    def __init__(self, policies: Policies, breaks: Callable[[str, str], None]) -> None:
        self._policies = policies
        self._breaks = breaks
        self._seen: dict[str, list[tuple[int, datetime]]] = {}
        self.lost()

    def lost(self) -> None:
        """The streams restart."""
        self._seen = {PodListed.stream(): [], NodeListed.stream(): []}

    def heard(self, recorded: Recorded) -> None:
        """A fact was stored."""
        fact = recorded.fact
        if isinstance(fact, PodListed | NodeListed):
            self._see(recorded, fact.listed_at)
        elif isinstance(fact, PodWatched | NodeWatched):
            self._see(recorded, fact.watched_at)
        elif isinstance(fact, ScalingPlanMade):
            self._judge(fact)

    def _see(self, recorded: Recorded, at: datetime) -> None:
        seen = self._seen[recorded.stream]
        seen.append((recorded.sequence, max(at, seen[-1][1]) if seen else at))

    def _judge(self, made: ScalingPlanMade) -> None:
        chosen = [
            one
            for one in made.plan.decisions
            if isinstance(one, ReleaseInstance) or (isinstance(one, DrainNode) and one.is_voluntary)
        ]
        if not chosen:
            return
        cut, seconds_max = dict(made.cut.last_sequences), self._policies.by_digest[made.policy_digest].watch_age_seconds_max
        for stream, seen in self._seen.items():
            place = bisect_right(seen, cut.get(stream, 0), key=itemgetter(0))
            seconds = (made.plan.as_of - seen[place - 1][1]).total_seconds() if place else float("inf")
            if seconds > seconds_max:
                what = (
                    f"plan {made.plan_id} decides {chosen[0].action_id} on a picture of {seconds:.0f} s ago ({stream})"
                )
                self._breaks(NO_VOLUNTARY_REMOVAL, what)
                return
