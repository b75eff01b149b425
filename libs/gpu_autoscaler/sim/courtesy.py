"""Invariant: a refused offer is not requested before its retry time, and a refused order never again.

A plan is checked against the refusals in its own cut, a process against those that it has read.
"""

from collections.abc import Callable
from datetime import datetime

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingNodeLaunched, ScalingPlanMade
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.ids import ActionId

REFUSALS_RESPECTED = "a cloud that refused is left alone"


class Courtesy:
    """Tracks the last refusal and launch of each offer."""

    def __init__(self, breaks: Callable[[str, str], None]) -> None:
        self._breaks = breaks
        self._stream = ScalingLaunchRefused.stream()
        self._planned: dict[ActionId, tuple[str, datetime]] = {}  # offer key and time of the plan
        self._sold_at: dict[str, datetime] = {}  # by offer: time of the plan of the latest launch
        self._refused: dict[str, tuple[int, ScalingLaunchRefused]] = {}  # by offer, with the fact's sequence
        self._over: dict[ActionId, int] = {}  # refused orders, with the fact's sequence

    def lost(self) -> None:
        """The streams restart."""
        self._refused.clear()
        self._over.clear()

    def asked(self, action_id: ActionId, known_to: int) -> None:
        """A process that has read the stream up to this sequence launches the order."""
        if self._over.get(action_id, known_to + 1) <= known_to:
            self._breaks(REFUSALS_RESPECTED, f"{action_id} was refused, and is asked for again all the same")

    def heard(self, recorded: Recorded) -> None:
        """A fact was stored."""
        fact = recorded.fact
        if isinstance(fact, ScalingPlanMade):
            self._see(fact)
        elif isinstance(fact, ScalingLaunchRefused):
            self._over[fact.action_id] = recorded.sequence
            if fact.scope == "offer":
                self._refused[fact.offer.key] = (recorded.sequence, fact)
        elif isinstance(fact, ScalingNodeLaunched) and fact.action_id in self._planned:
            key, planned_at = self._planned[fact.action_id]
            self._sold_at[key] = max(planned_at, self._sold_at.get(key, planned_at))

    def _see(self, made: ScalingPlanMade) -> None:
        known_to = dict(made.cut.last_sequences).get(self._stream, 0)
        for decision in made.plan.decisions:
            if not isinstance(decision, BuyNode):
                continue
            key = decision.offer.key
            self._planned[decision.action_id] = (key, made.plan.as_of)
            sequence, refused = self._refused.get(key, (0, None))
            if refused is None or sequence > known_to or self._is_sold_since(refused):
                continue
            if made.plan.as_of < refused.retry_at:
                until = refused.retry_at.isoformat()
                self._breaks(REFUSALS_RESPECTED, f"plan {made.plan_id} asks for {key}, refused until {until}")

    def _is_sold_since(self, refused: ScalingLaunchRefused) -> bool:
        """True if an order planned at the same time or later was launched: the offer is available again."""
        key, planned_at = self._planned.get(refused.action_id, (refused.offer.key, None))
        sold_at = self._sold_at.get(key)
        return sold_at is not None and (planned_at is None or sold_at >= planned_at)
