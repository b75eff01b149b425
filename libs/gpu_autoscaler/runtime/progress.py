"""How far the projection is, and waiting for it: a door that acts on a fact reads a state that already holds it."""

import asyncio
import time

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.projection import StateView


class FoldProgress:
    """Told by the folding loops, asked by the others."""

    def __init__(self, view: StateView, folds: tuple[type[Fact], ...]) -> None:
        self._view = view
        self._folds = frozenset(folds)
        self._advanced = asyncio.Event()
        self._behind = {fact.stream() for fact in folds}
        self.caught_up = asyncio.Event()
        if not self._behind:
            self.caught_up.set()

    def mark_advanced(self) -> None:
        """The state moved: wake those who wait."""
        self._advanced.set()
        self._advanced = asyncio.Event()

    def mark_caught_up(self, stream: str) -> None:
        """Everything that was stored of this stream is folded."""
        self._behind.discard(stream)
        if not self._behind:
            self.caught_up.set()

    @property
    def behind(self) -> tuple[str, ...]:
        """Streams that are not caught up since the start."""
        return tuple(sorted(self._behind))

    async def wait_for_fact(self, recorded: Recorded, seconds_max: float) -> None:
        """Return when the state holds the fact; at once for facts that are not folded. Raises TransientError."""
        if type(recorded.fact) in self._folds and not await self.wait_for(
            recorded.stream, recorded.sequence, seconds_max
        ):
            raise TransientError(f"the state has not reached {recorded.stream} #{recorded.sequence} yet")

    async def wait_for(self, stream: str, sequence: int, seconds_max: float) -> bool:
        """Wait until the state holds this sequence; False when it still does not after `seconds_max` of wall time."""
        deadline = time.monotonic() + seconds_max
        while self._view.last_sequence(stream) < sequence:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._advanced.wait()
            except TimeoutError:
                return False
        return True
