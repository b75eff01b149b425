"""The state as it was at a recent cut: what a plan that has just come was made from.

Streams arrive in any order among each other, so by the time a plan is seen the state holds a little more or a little
less than the plan knew. Two generations are kept, each a state and what was folded since: nothing is folded twice until
a cut is asked for.
"""

from collections.abc import Sequence

from gpu_autoscaler.core.fold import fold
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.runtime.projection import StateView

GENERATION_COUNT = 2000  # facts; a minute of a large cluster


class _Generation:
    def __init__(self, state: ClusterState, cut: Cut) -> None:
        self.state = state
        self.last = dict(cut.last_sequences)
        self.since: list[Recorded] = []

    def is_below(self, cut: Cut) -> bool:
        """True when all that is in the state is in the cut."""
        last = dict(cut.last_sequences)
        return all(sequence <= last.get(stream, 0) for stream, sequence in self.last.items() if stream in last)


class Recent:
    """Remembers what a view has folded lately."""

    def __init__(self, view: StateView) -> None:
        self._view = view
        self._older = self._newer = _Generation(EMPTY_STATE, Cut())

    def folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember facts that have just gone into the view."""
        self._newer.since += recorded
        if len(self._newer.since) >= GENERATION_COUNT:
            self._older, self._newer = self._newer, _Generation(self._view.state, self._view.cut)

    def has(self, cut: Cut) -> bool:
        """True once everything of the cut was folded here as well."""
        return all(self._view.last_sequence(stream) >= sequence for stream, sequence in cut.last_sequences)

    def at(self, cut: Cut) -> ClusterState | None:
        """Return the state at the cut; None where that is no longer remembered."""
        generations = [self._newer] if self._older is self._newer else [self._older, self._newer]
        for number in range(len(generations) - 1, -1, -1):
            if generations[number].is_below(cut):
                since = [each for one in generations[number:] for each in one.since]
                last, aside = dict(cut.last_sequences), frozenset(cut.set_aside)
                known = [
                    each
                    for each in since
                    if each.sequence <= last.get(each.stream, 0) and (each.stream, each.sequence) not in aside
                ]
                return fold(generations[number].state, known)
        return None
