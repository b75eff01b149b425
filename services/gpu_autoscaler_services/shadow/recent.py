"""The state at a recent cut, from which a plan was made.

Streams arrive in any order relative to each other, so the state may hold more or less than the plan was made from.
"""

from collections.abc import Sequence

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.runtime.projection import StateView

GENERATION_COUNT = 2000  # facts; a minute of a large cluster


class _Generation:
    def __init__(self, state: ClusterState, cut: Cut) -> None:
        self.state = state
        self.last = dict(cut.last_sequences)
        self.since: list[Recorded] = []

    def is_contained_in(self, cut: Cut) -> bool:
        """Return True if the cut contains everything that is in the state."""
        last = dict(cut.last_sequences)
        return all(sequence <= last.get(stream, 0) for stream, sequence in self.last.items() if stream in last)


class RecentStates:
    """Remembers two generations, each a state and the facts since; facts are folded again only for a requested cut."""

    def __init__(self, view: StateView) -> None:
        self._view = view
        self._older = self._newer = _Generation(view.state, view.cut)

    def folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember facts that were just folded into the view."""
        self._newer.since += recorded
        if len(self._newer.since) >= GENERATION_COUNT:
            self._older, self._newer = self._newer, _Generation(self._view.state, self._view.cut)

    def has(self, cut: Cut) -> bool:
        """Return True once everything in the cut was folded here."""
        return all(self._view.last_sequence(stream) >= sequence for stream, sequence in cut.last_sequences)

    def at(self, cut: Cut) -> ClusterState | None:
        """Return the state at the cut; None if it is no longer remembered."""
        generations = [self._newer] if self._older is self._newer else [self._older, self._newer]
        for number in range(len(generations) - 1, -1, -1):
            if generations[number].is_contained_in(cut):
                since = [recorded for generation in generations[number:] for recorded in generation.since]
                last, excluded = dict(cut.last_sequences), frozenset(cut.set_aside)
                known = [
                    recorded
                    for recorded in since
                    if recorded.sequence <= last.get(recorded.stream, 0)
                    and (recorded.stream, recorded.sequence) not in excluded
                ]
                return fold(generations[number].state, known)
        return None
