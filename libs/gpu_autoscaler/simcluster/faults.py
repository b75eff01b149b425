"""Faults of the API server: dropped watches, compacted history, refusals, slow answers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_autoscaler.simcluster.store import Store

REFUSALS_MAX = 100  # entries at once; each counts down to nothing
LATENCY_SECONDS_MAX = 60.0


@dataclass(slots=True, kw_only=True)
class Refusal:
    """The next `left_count` requests of this method and path prefix get this HTTP status."""

    method: str  # "*" for every method
    path_prefix: str
    status: int
    left_count: int
    performed: bool = False  # execute the request, then lose the answer
    retry_after_seconds: int | None = None


@dataclass(slots=True, kw_only=True)
class Latency:
    """Every request of this path prefix waits this long first, in wall seconds, until it is removed."""

    path_prefix: str
    wait_seconds: float


@dataclass(slots=True)
class Faults:
    """Active faults."""

    store: Store
    refusals: list[Refusal] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    watches: set[Callable[[], None]] = field(default_factory=set)  # callbacks that cut open watches

    def drop_watches(self) -> int:
        """Cut every open watch in the middle of its answer. Return their number."""
        cuts = list(self.watches)
        for cut in cuts:
            cut()
        return len(cuts)

    def compact(self) -> int:
        """Compact all history: older watches are too old. Return the version."""
        self.store.compact()
        return self.store.version

    def refuse(self, refusal: Refusal) -> None:
        """Add a refusal. Raises ValueError at the limit."""
        if len(self.refusals) >= REFUSALS_MAX:
            raise ValueError(f"{REFUSALS_MAX} refusals are set already: clear them first")
        self.refusals.append(refusal)

    def slow(self, latency: Latency) -> None:
        """Add a latency, replacing one for the same path prefix."""
        self.latencies = [entry for entry in self.latencies if entry.path_prefix != latency.path_prefix]
        self.latencies.append(latency)

    def clear(self) -> None:
        """Clear refusals and latencies. Dropped watches and lost history stay as they are."""
        self.refusals.clear()
        self.latencies.clear()

    def take_refusal(self, method: str, path: str) -> Refusal | None:
        """Return the refusal for this request, counted down; None if there is none."""
        for refusal in self.refusals:
            if refusal.method in ("*", method) and path.startswith(refusal.path_prefix):
                refusal.left_count -= 1
                if refusal.left_count <= 0:
                    self.refusals.remove(refusal)
                return refusal
        return None

    async def wait(self, path: str) -> None:
        """Wait for the longest latency of this path."""
        waits = [entry.wait_seconds for entry in self.latencies if path.startswith(entry.path_prefix)]
        if waits:
            await asyncio.sleep(min(max(waits), LATENCY_SECONDS_MAX))
