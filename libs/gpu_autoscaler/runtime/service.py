"""The interface of a service: the inputs that it implements, and the facts that it consumes, folds and publishes.

A handler (a method of an input) returns facts; it never sleeps, spawns tasks or reads the clock. The runner
(`runtime/runner.py`) does the rest, and the simulator drives the same class. A handler may raise TransientError (the
call is retried) or PermanentError (dead letter); any other exception is a bug.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from gpu_autoscaler.bus.streams import ConsumerSpec, Lane, consumers_of_process
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a handler where a list of facts is not enough."""

    facts: tuple[Fact, ...] = ()
    # Publish only if the subject's last sequence is still this one (one fact only); otherwise StalePlan.
    expected_last_sequence: int | None = None
    # Of a fenced outcome: the stream's last sequence that it takes into account, see `publisher.is_parent_discarded`.
    folded_sequence: int = 0
    # The fact is not finished: publish `facts`, then deliver it again after this long (wall time).
    redeliver_after_seconds: float | None = None
    # Of a tick: time to the next regular tick (cluster time), instead of `tick_seconds`; urgent facts bring it forward.
    next_tick_seconds: float | None = None
    # Of a tick: when time alone may change its result, with its facts folded; None: not before the next fact, and with
    # facts: unknown.
    next_change_at: datetime | None = None
    # Of a fact: independent parts of the effect, begun in this order, at most `steps_concurrent_max` at a time;
    # the facts of each are published when it ends (`runtime/steps.py`). Each of these facts has a condition.
    steps: tuple["Step", ...] = ()
    steps_concurrent_max: int = 1
    # Published in place of `facts` if the broker refuses those as too large.
    facts_if_too_large: tuple[Fact, ...] = ()
    # The client's request is refused: publish `facts`, which report it, then store a dead letter with this reason.
    set_aside_reason: str | None = None


Outputs = Sequence[Fact] | Outcome
Step = Callable[[], Awaitable[Sequence[Fact]]]


class Service(Protocol):
    """The declarations of a service. A service also implements those of the input protocols below that it needs.

    Facts are handled one at a time, unless the class declares `concurrency_max: ClassVar[int]`: then up to that many
    concurrently, in no guaranteed order. Facts that must not wait for others are declared in lanes of their own, as
    `lanes: ClassVar[tuple[Lane, ...]]` (`bus/streams.py: Lane`).

    A service with a `lease` (`runtime/lease.py`) has one active process at a time: only the holder ticks and handles
    facts, while every process folds the state.

    Every start folds the state from the latest usable snapshot. A service folds all facts of its streams that the
    scaler folds, because the scaler saves the snapshots. What a FoldInput keeps besides the state must be the last fact
    of the types in `remembers: ClassVar[tuple[type[Fact], ...]]`, which it gets at the start; or the service implements
    MemoryInput and has snapshots of its own.
    """

    name: ClassVar[str]
    consumes: ClassVar[tuple[type[Fact], ...]]  # effects: each fact handled once in effect, shared between replicas
    folds: ClassVar[tuple[type[Fact], ...]]  # projection: folded into the state of every replica
    publishes: ClassVar[tuple[type[Fact], ...]]
    urgent: ClassVar[tuple[type[Fact], ...]]  # folded facts that bring the next tick forward (`runtime/urgency.py`)
    tick_seconds: ClassVar[float | None]  # cluster time; None: no ticks


def lanes_of(service: Service | type[Service]) -> tuple[Lane, ...]:
    """Return the lanes that the service declares."""
    lanes: tuple[Lane, ...] = getattr(service, "lanes", ())
    return lanes


def consumers_of(service: Service | type[Service]) -> tuple[ConsumerSpec, ...]:
    """Return the durable consumers of the service's process."""
    return consumers_of_process(service.name, service.consumes, lanes_of(service))


@runtime_checkable
class FactInput(Protocol):
    """Handles consumed facts, one at a time per domain."""

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Apply the effect of the fact and return the resulting facts. Repeated with the same fact after a crash."""


@runtime_checkable
class TickInput(Protocol):
    """Acts every `tick_seconds`, and at once after an urgent fact."""

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the facts to publish now. `now` is cluster time."""


@runtime_checkable
class TickFilter(Protocol):
    """Selects the ticks that have something to do; without it, every tick runs."""

    def needs_tick(self, now: datetime) -> bool:
        """Return whether `on_tick` may do something that its last call has not done. Reads no clock and no cloud."""


@runtime_checkable
class UrgencyFilter(Protocol):
    """Selects the urgent facts among the types in `urgent`; without it, all of them are urgent."""

    def is_urgent(self, fact: Fact) -> bool:
        """Return whether the next tick must not wait for its regular time. Depends on the fact alone."""


def urgency_filter(service: Service) -> Callable[[Fact], bool]:
    """Return a predicate: whether a fact brings the service's next tick forward."""
    types, selects = frozenset(service.urgent), service if isinstance(service, UrgencyFilter) else None
    return lambda fact: type(fact) in types and (selects is None or selects.is_urgent(fact))


@runtime_checkable
class FoldInput(Protocol):
    """Observes the facts that are folded, for data that the state does not keep. No effects: nothing is published."""

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Record facts of one stream, in stream order, each once; repeated after every start.

        From the oldest, or from the snapshot that the process started from.
        """


@runtime_checkable
class MemoryInput(FoldInput, Protocol):
    """Observes folded facts into a memory that the service's own snapshots keep.

    Facts that the memory has seen may be folded again: noting a fact twice, or after later ones, changes nothing.
    """

    def encode_memory(self) -> bytes:
        """Return the memory, which belongs to the state of the same moment."""

    def restore_memory(self, encoded: bytes) -> None:
        """Start from this memory; ignore one that another version wrote and this one cannot read."""


@runtime_checkable
class WatchInput(Protocol):
    """Turns items of a watched external source into facts."""

    def sources(self) -> Sequence[AsyncIterator[Any]]:
        """Open the sources. Each yields items until it is closed and restarts itself; a source that ends is a bug."""

    async def on_item(self, item: Any) -> Outputs:  # noqa: ANN401 - each service knows its own items
        """Return the facts that the item represents.

        An item is repeated when its facts were not stored, or when the call was canceled at the handler's time limit.
        A long item gives way with `asyncio.sleep(0)`; one item is handled at a time, whatever its source.
        """


@runtime_checkable
class ResyncInput(Protocol):
    """Publishes facts about living objects, which must never age out of their stream (`runtime/loops/resync.py`)."""

    resyncs: ClassVar[tuple[type[Fact], ...]]  # among `publishes`; folding them again changes nothing

    def living(self) -> Iterable[Fact]:
        """Yield the current fact of each living object, of the types in `resyncs`."""
