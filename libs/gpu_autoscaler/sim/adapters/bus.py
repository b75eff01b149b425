"""The bus of a run: the memory broker's rules (order, ids, fences, redelivery), with facts kept decoded.

Encoding and decoding each fact would take most of a run's time and change nothing; with `is_coded` it is done, so that
a test can prove that.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta

from gpu_autoscaler.bus.memory_broker import MemoryBroker, MemoryConsumer
from gpu_autoscaler.bus.protocol import Ack, Message, Publication, StreamSpan
from gpu_autoscaler.bus.streams import ConsumerSpec, StreamLimits, streams
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Envelope, Recorded, encode, recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.ingress import read
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.sim.virtual_time import VirtualLoop

Cursors = Mapping[str, int]

# As if every fact had this size: the limits by size hold without encoding it.
_PAYLOAD = bytes(1000)
# Much shorter than the life of a node, much longer than the pause between two resyncs.
SHORT_LIMITS: Mapping[str, StreamLimits] = {
    "NODE": StreamLimits(max_age_seconds=2400, max_bytes=1500 * len(_PAYLOAD)),
    "POD": StreamLimits(max_age_seconds=86400, max_bytes=1500 * len(_PAYLOAD)),
    **{
        name: StreamLimits(max_age_seconds=2400, max_bytes=3000 * len(_PAYLOAD))
        for name in ("JOB", "SPOT", "SCALING", "POLICY")
    },
}
# Only the sizes are short: several times what is alive, and a fraction of what a run publishes. Orders to do something
# stay for longer than that takes: a stream that discards a plan within a minute loses drains that take two.
OVERFLOWING_LIMITS: Mapping[str, StreamLimits] = {
    name: StreamLimits(max_age_seconds=30 * 86400, max_bytes=count * len(_PAYLOAD))
    for name, count in (("NODE", 600), ("POD", 400), ("JOB", 3000), ("SPOT", 100), ("SCALING", 3000), ("POLICY", 300))
}


class DeadLetter:
    """A dead-lettered message and its error."""

    __slots__ = ("at_sequence", "error", "recorded", "service")

    def __init__(self, recorded: Recorded, service: str, error: Exception) -> None:
        self.recorded = recorded
        self.service = service
        self.error = error


class SimBus:
    """All published facts in order, and their listeners."""

    def __init__(
        self, loop: VirtualLoop, *, is_coded: bool = False, limits: Mapping[str, StreamLimits] | None = None
    ) -> None:
        """`limits`: streams reach them within the run, such as SHORT_LIMITS; None: the declared ones."""
        self.facts: dict[str, list[Recorded]] = {spec.name: [] for spec in streams()}  # discarded ones included
        self.discards = limits is not None
        self._limits = limits
        self.lost: list[dict[str, list[Recorded]]] = []  # streams before each loss of the broker
        self.published: list[Recorded] = []  # over all streams, lost ones included
        self.dead_letters: list[DeadLetter] = []
        self.skipped: list[Cursors] = []  # where processes began to read that found facts discarded
        self.unread_discarded: list[tuple[str, str]] = []  # role and stream: each end of a process for that reason
        self.is_away = False
        self._loop = loop
        self._is_coded = is_coded
        self._broker = self._new_broker()
        self._listeners: list[Callable[[Recorded], None]] = []
        self._folded: dict[frozenset[type[Fact]], tuple[dict[str, int], ClusterState]] = {}

    def _new_broker(self) -> MemoryBroker:
        broker = MemoryBroker()
        for spec in streams(self._limits):
            broker.make_stream(spec, self._loop.now())
        return broker

    def lose_streams(self) -> None:
        """Lose every stream and consumer; new streams of the same names are created."""
        self.lost.append(self.facts)
        self.facts = {name: [] for name in self.facts}
        self._broker = self._new_broker()
        self._folded.clear()

    def discard_plans(self, older_than: timedelta) -> bool:
        """Discard all stored plans if the last one is so old, as the stream does after a quiet month. Return if so.

        Not those of a stream that reaches its limits: there plans go with all older facts, and what is alive stays.
        """
        if self.discards:
            return False
        plans = self._broker.stream(ScalingPlanMade.stream())
        last = plans.last_on(ScalingPlanMade.subject_root(), self._loop.now())
        if last is None or self._loop.now() - last.stored_at < older_than:
            return False
        plans.discard(last.subject)
        return True

    def all_facts(self, stream: str) -> Iterator[Recorded]:
        """Yield every fact ever published to this stream, before losses included."""
        for facts in (*self.lost, self.facts):
            yield from facts[stream]

    def listen(self, listener: Callable[[Recorded], None]) -> None:
        """Call the listener for each stored fact."""
        self._listeners.append(listener)

    def publish(self, envelope: Envelope, *, expected_last_sequence: int | None = None) -> Ack:
        """Store the fact. Raises StalePlan, and TransientError while the broker is unavailable."""
        if self.is_away:
            raise TransientError("the broker is unavailable")
        fact = envelope.fact
        ack = self._broker.stream(fact.stream()).store(
            Publication(
                subject=fact.subject(),
                payload=_PAYLOAD,
                message_id=envelope.id,
                expected_last_subject_sequence=expected_last_sequence,
            ),
            self._loop.now(),
        )
        if not ack.is_duplicate:
            stored = self._through_the_codec(envelope) if self._is_coded else envelope
            entry = recorded(stored, ack.stream, ack.sequence, self._loop.now())
            self.facts[ack.stream].append(entry)
            self.published.append(entry)
            for listener in tuple(self._listeners):
                listener(entry)
        return ack

    def consumer(self, spec: ConsumerSpec) -> MemoryConsumer:
        """Return the durable consumer; create it if missing."""
        self._broker.make_consumer(spec, self._loop.now())
        return self._broker.consumers[spec.stream, spec.durable]

    def span(self, stream: str) -> StreamSpan:
        """Return the identity of the stream and the sequences that it retains."""
        return self._broker.stream(stream).span(self._loop.now())

    def message_at(self, stream: str, sequence: int) -> Message | None:
        """Return the message at this sequence, as the broker dates it."""
        return self._broker.stream(stream).at(sequence, self._loop.now())

    def at(self, stream: str, sequence: int) -> Recorded:
        """Return the fact at this sequence."""
        return self.facts[stream][sequence - 1]

    def since(self, cursors: Cursors, folds: Collection[type[Fact]]) -> list[Recorded]:
        """Return stored facts of these types after the cursors, stream by stream."""
        names = sorted({fact.stream() for fact in folds})
        read_up_to = {name: max(cursors.get(name, 0), self.span(name).first_sequence - 1) for name in names}
        if any(read_up_to[name] > cursors.get(name, 0) for name in names) and read_up_to not in self.skipped:
            self.skipped.append(read_up_to)
        return [
            recorded
            for name in names
            for recorded in self.facts[name][read_up_to[name] :]
            if type(recorded.envelope.fact) in folds
        ]

    def ends(self, folds: Collection[type[Fact]]) -> Cursors:
        """Return the last sequence of each stream of these facts."""
        return {stream: len(self.facts[stream]) for stream in sorted({fact.stream() for fact in folds})}

    def folded(self, folds: Iterable[type[Fact]]) -> ClusterState:
        """Return the fold of all facts, discarded ones included. Cached from one call to the next."""
        wanted = frozenset(folds)
        cursors, state = self._folded.get(wanted, ({}, EMPTY_STATE))
        reached = dict(cursors)
        for stream in sorted({fact.stream() for fact in wanted}):
            facts = self.facts[stream]
            unread = facts[reached.get(stream, 0) :]
            new_facts = [recorded for recorded in unread if type(recorded.envelope.fact) in wanted]
            state = fold(state, new_facts) if new_facts else state
            reached[stream] = len(facts)
        self._folded[wanted] = (reached, state)
        return state

    @staticmethod
    def _through_the_codec(envelope: Envelope) -> Envelope:
        return read(envelope.fact.subject(), encode(envelope), message_id=envelope.id, arrived_at=lambda: envelope.time)
