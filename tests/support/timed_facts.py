"""Published facts, and the conversion of a story into a record. The base of `tests/support/stories.py`."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import msgspec

from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import FactId
from gpu_autoscaler.model.resources import Resources

T0 = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)

EPOCH = 1_700_000_000
# Kubernetes objects in stories have version 1 by default; lists have a higher version than all of them.
LIST_VERSION = 1_000_000


class TimedFact(msgspec.Struct, frozen=True):
    """A fact and the instant of its publication."""

    fact: Fact
    at: datetime


Story = tuple[TimedFact, ...]


def record(stories: Iterable[TimedFact]) -> tuple[Recorded, ...]:
    """Return the facts as the streams would hold them: numbered by stream, in the given order."""
    sequences: dict[str, int] = {}
    recorded = []
    for number, told in enumerate(stories):
        stream = told.fact.stream()
        sequences[stream] = sequences.get(stream, 0) + 1
        envelope = Envelope(
            id=FactId(told.fact.condition() or f"told-{number}"), source="/story", time=told.at, fact=told.fact
        )
        recorded.append(Recorded(envelope=envelope, stream=stream, sequence=sequences[stream]))
    return tuple(recorded)


def resources(*, gpus: int = 0, cpu: float = 1, memory_gib: float = 4, pods: int = 0) -> Resources:
    """Amounts in people's units."""
    return Resources(cpu_milli=int(cpu * 1000), memory_bytes=int(memory_gib * GIBIBYTE), gpu_count=gpus, pod_count=pods)
