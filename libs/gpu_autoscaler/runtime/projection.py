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
        self._cut = Cut() if cut is None else cut

    @property
    def state(self) -> ClusterState:
        """Everything that is known now."""
        return self._state

    @property
    def cut(self) -> Cut:
        """The facts that `state` was folded from."""
        return self._cut

    def advance(
        self,
        state: ClusterState,
        last_sequences: Mapping[str, int],
        set_aside: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Replace the state by the one that is folded up to these sequences (stream to sequence, others stay)."""
        sequences = dict(self._cut.last_sequences)
        for stream, sequence in last_sequences.items():
            sequences[stream] = max(sequence, sequences.get(stream, 0))
        aside = sorted({*self._cut.set_aside, *set_aside}, key=lambda entry: (entry[1], entry[0]))
        self._state = state
        self._cut = Cut(
            last_sequences=tuple(sorted(sequences.items())),
            set_aside=tuple(sorted(aside[-SET_ASIDE_COUNT_MAX:])),
        )

    def last_sequence(self, stream: str) -> int:
        """Sequence of the last message of this stream that is in the state; 0: none yet."""
        return dict(self._cut.last_sequences).get(stream, 0)
