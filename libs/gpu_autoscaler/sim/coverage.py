"""Which reasons a run came to: those of plans, and those for which the queue waits, which no fact carries."""

from collections import Counter
from collections.abc import Callable

from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.schedule import schedule
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.views import queue
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.sim.timeline import VirtualLoop

LOOKED_SECONDS = 300.0  # between two looks at the queue: the scheduler's own answers are not told


class Coverage:
    """Counts reasons."""

    def __init__(
        self, loop: VirtualLoop, seen: Callable[[], ClusterState | None], policy: Callable[[], ScalingPolicy]
    ) -> None:
        """`seen`: what the scheduler knows, None while there is none."""
        self.reasons: Counter[str] = Counter()
        self.plans_count = 0
        self._loop = loop
        self._seen = seen
        self._policy = policy

    def begin(self) -> None:
        """Look at the queue now and then."""
        self._loop.call_later(LOOKED_SECONDS, self._look)

    def heard(self, recorded: Recorded) -> None:
        """A fact was stored."""
        if isinstance(recorded.fact, ScalingPlanMade):
            self.plans_count += 1
            plan = recorded.fact.plan
            self.reasons.update(each.reason.tag() for each in (*plan.decisions, *plan.held_back))

    def _look(self) -> None:
        state = self._seen()
        if state is not None and queue(state):
            held = schedule(state, self._policy(), self._loop.now()).held_back
            self.reasons.update(each.reason.tag() for each in held)
        self._loop.call_later(LOOKED_SECONDS, self._look)
