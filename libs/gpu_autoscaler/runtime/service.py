"""What a service is: a small class with doors and a list of what goes in and out.

Doors return facts; they never sleep, spawn, or read the clock. The runner (`runtime/runner.py`) does the rest, and the
simulator drives the same class. A door may raise TransientError (again later), PermanentError (dead letter);
anything else is a bug.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a door says when a list of facts is not enough."""

    facts: tuple[Fact, ...] = ()
    # Publish only if the subject's last sequence is still this one (one fact only); else StalePlan, nothing is lost.
    expected_last_sequence: int | None = None
    # The fact is not done with: publish `facts`, then deliver it again after this long (wall time).
    again_after_seconds: float | None = None
    # Of a tick: nothing is to be done for so long (cluster time), instead of `tick_seconds`, but for what is urgent.
    next_tick_seconds: float | None = None
    # The fact is refused: publish `facts` (which say so), then set it aside as a dead letter with this reason.
    set_aside_reason: str | None = None


Outputs = Sequence[Fact] | Outcome


class Service(Protocol):
    """Declarations that every service makes. Doors are the protocols below; a service has those it needs.

    Facts are handled one at a time, unless the class says `handles_at_once: ClassVar[int]`: then so many at once, in no
    promised order.

    A service of which one process at a time is to be active carries a `lease` (`runtime/lease.py`): ticks and facts
    wait for it, the state is folded all the same.

    The state is folded from the oldest facts on at every start, unless the class says `starts_from_snapshot:
    ClassVar[bool] = True`: then from the last snapshot on, where there is one that can be used. Not for a service that
    sees facts on their way into the state (FoldDoor), nor for one that folds only some of what the state is made of.
    """

    name: ClassVar[str]
    consumes: ClassVar[tuple[type[Fact], ...]]  # effect: each handled once in effect, shared between replicas
    folds: ClassVar[tuple[type[Fact], ...]]  # projection: kept as state in every replica
    publishes: ClassVar[tuple[type[Fact], ...]]
    urgent: ClassVar[tuple[type[Fact], ...]]  # folded facts that bring the next tick forward (`runtime/urgency.py`)
    tick_seconds: ClassVar[float | None]  # cluster time; None: no ticks


@runtime_checkable
class FactDoor(Protocol):
    """Handles consumed facts, one at a time for each domain."""

    async def on_fact(self, recorded: Recorded) -> Outputs:
        """Give the fact its effect and return what came of it. Called again with the same fact after a crash."""
        ...


@runtime_checkable
class TickDoor(Protocol):
    """Does something every `tick_seconds`, and at once after an urgent fact."""

    async def on_tick(self, now: datetime) -> Outputs:
        """Return what is to be said now. `now` is cluster time."""
        ...


@runtime_checkable
class UrgencyDoor(Protocol):
    """Says which facts of the types in `urgent` are; without it all are."""

    def is_urgent(self, fact: Fact) -> bool:
        """True when the next tick is not to wait for its time. Looks at the fact alone."""
        ...


def urgency_of(service: Service) -> Callable[[Fact], bool]:
    """Return whether a fact brings the service's next tick forward."""
    types, door = frozenset(service.urgent), service if isinstance(service, UrgencyDoor) else None
    return lambda fact: type(fact) in types and (door is None or door.is_urgent(fact))


@runtime_checkable
class FoldDoor(Protocol):
    """Sees what goes into the state, for memory that the state does not keep. No effects: nothing is published here."""

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Take note of facts of one stream, in its order, each once: from the oldest on, again after every start."""
        ...


@runtime_checkable
class WatchDoor(Protocol):
    """Turns a watched outside source into facts."""

    def sources(self) -> Sequence[AsyncIterator[Any]]:
        """Open the sources; each yields items until it is closed. A source restarts itself; its end is a bug."""
        ...

    async def on_item(self, item: Any) -> Outputs:  # noqa: ANN401 - each service knows its own items
        """Return the facts that the item stands for."""
        ...
