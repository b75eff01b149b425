"""The folded state and its cut (the facts it was folded from). The runner updates it, the service reads it.

Services get a StateView in their constructor. Folding continues while a handler awaits: a handler that needs state and
cut together reads both before its first `await`. The state itself is immutable.
"""

from collections.abc import Iterable, Mapping

from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.model.decisions import Cut

# A cut is part of every plan, so it lists only the newest messages that were set aside. A replay with this version
# finds the older ones again, as it cannot fold them either.
SET_ASIDE_COUNT_MAX = 1000


class StateView:
    """Holds the latest state and its cut; both always belong together."""

    def __init__(self, state: ClusterState = EMPTY_STATE, cut: Cut | None = None) -> None:
        self._state = state
        self._cut: Cut | None = Cut() if cut is None else cut  # None: to be rebuilt
        self._last_sequences = {} if cut is None else dict(cut.last_sequences)
        self._set_aside = () if cut is None else cut.set_aside
        self._base = "" if cut is None else cut.base

    @property
    def state(self) -> ClusterState:
        """The latest folded state."""
        return self._state

    @property
    def cut(self) -> Cut:
        """The facts that `state` was folded from."""
        if self._cut is None:
            self._cut = Cut(
                last_sequences=tuple(sorted(self._last_sequences.items())), set_aside=self._set_aside, base=self._base
            )
        return self._cut

    def restore(self, state: ClusterState, cut: Cut) -> None:
        """Continue from the state of a snapshot, before anything is folded."""
        self._base = cut.base
        self.advance(state, dict(cut.last_sequences), cut.set_aside)

    def advance(
        self, state: ClusterState, last_sequences: Mapping[str, int], set_aside: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Replace the state by one that is folded up to these sequences (by stream; other streams keep theirs)."""
        for stream, sequence in last_sequences.items():
            self._last_sequences[stream] = max(sequence, self._last_sequences.get(stream, 0))
        if more := frozenset(set_aside):
            aside = sorted({*self._set_aside, *more}, key=lambda entry: (entry[1], entry[0]))
            self._set_aside = tuple(sorted(aside[-SET_ASIDE_COUNT_MAX:]))
        self._state, self._cut = state, None

    def last_sequence(self, stream: str) -> int:
        """Return the sequence of this stream's last message in the state, 0 without one."""
        return self._last_sequences.get(stream, 0)
