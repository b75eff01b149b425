"""What a service knows: the folded state and the cut it stands for. The runner updates it, the service reads it.

Services get a StateView in their constructor. The fold goes on while a door waits for something: a door that needs
state and cut together reads both before its first `await`. The state itself is frozen and may be kept.
"""

from collections.abc import Iterable, Mapping

from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.model.decisions import Cut

# A cut is part of every plan, so what it lists is bounded: only the newest that were set aside. An older one
# cannot be folded by this version either; a replay that meets it finds that out again.
SET_ASIDE_COUNT_MAX = 1000


class StateView:
    """Holds the latest state and its cut; both always belong together."""

    def __init__(self, state: ClusterState = EMPTY_STATE, cut: Cut | None = None) -> None:
        self._state = state
        self._cut: Cut | None = Cut() if cut is None else cut  # None: to be put together again
        self._last_sequences = {} if cut is None else dict(cut.last_sequences)
        self._set_aside = () if cut is None else cut.set_aside

    @property
    def state(self) -> ClusterState:
        """Everything that is known now."""
        return self._state

    @property
    def cut(self) -> Cut:
        """The facts that `state` was folded from."""
        if self._cut is None:
            self._cut = Cut(last_sequences=tuple(sorted(self._last_sequences.items())), set_aside=self._set_aside)
        return self._cut

    def advance(
        self,
        state: ClusterState,
        last_sequences: Mapping[str, int],
        set_aside: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Replace the state by the one that is folded up to these sequences (stream to sequence, others stay)."""
        for stream, sequence in last_sequences.items():
            self._last_sequences[stream] = max(sequence, self._last_sequences.get(stream, 0))
        if more := frozenset(set_aside):
            aside = sorted({*self._set_aside, *more}, key=lambda entry: (entry[1], entry[0]))
            self._set_aside = tuple(sorted(aside[-SET_ASIDE_COUNT_MAX:]))
        self._state, self._cut = state, None

    def last_sequence(self, stream: str) -> int:
        """Sequence of the last message of this stream that is in the state; 0: none yet."""
        return self._last_sequences.get(stream, 0)
