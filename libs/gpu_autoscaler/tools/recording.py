"""A recorded history that can be carried about: the policy in force, what the state began with, and facts in the order
in which they were stored. Read from a file or from the running system; nothing is ever written to either stream.

The file is JSON lines, compressed where its name ends in `.xz`: a head, then one line a fact with its place. Facts
stand there as CloudEvents, so a later version reads an old history as it reads an old stream.
"""

import lzma
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalogue import FACTS
from gpu_autoscaler.events.door import read
from gpu_autoscaler.events.envelope import Recorded, encode
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.errors import ConfigError, InvalidFact
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.snapshot_codec import Label, decode_label
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler.tools.history import History, Stored
from gpu_autoscaler.tools.replay import Start, folded_of, from_snapshot, is_below

FORMAT_VERSION = 1
COMPRESSED = ".xz"
# What the state is folded from. Money and raw samples decide nothing.
STREAMS = tuple(sorted({fact.stream() for fact in FACTS if folded_of(fact.stream())} - {"COST", "SHADOW"}))


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    format_version: int = FORMAT_VERSION
    about: str = ""  # what happened, in a few words
    policy: ScalingPolicy
    # Of the policy as the version that wrote this computes it: a field more gives an equal policy another digest.
    policy_digest: str = ""
    from_at: Instant
    to_at: Instant
    # What the facts are folded onto, where they do not begin with the first one ever: up to where, and the state.
    sequences: dict[str, int] = {}
    state: ClusterState = EMPTY_STATE


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    at: Instant
    stream: str
    sequence: int
    subject: str
    event: msgspec.Raw


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What happened from `head.from_at` to `head.to_at`, and what came before it as far as that is needed."""

    head: Head
    facts: Sequence[Stored]  # in the order in which they were stored

    def plans(self) -> list[Stored]:
        """Return the plans that were made within the time asked for, in their stream's order."""
        return [
            each
            for each in self.facts
            if isinstance(each.recorded.fact, ScalingPlanMade) and self.head.from_at <= each.at <= self.head.to_at
        ]


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is nothing to replay."""

    sentence: str
    is_aged_out: bool = False  # there was something, and it is no longer kept


def save(recording: Recording, path: Path) -> None:
    """Write the history to a file."""
    lines = [msgspec.json.encode(recording.head)]
    for each in recording.facts:
        recorded = each.recorded
        line = _Line(
            at=each.at,
            stream=recorded.stream,
            sequence=recorded.sequence,
            subject=recorded.fact.subject(),
            event=msgspec.Raw(encode(recorded.envelope)),
        )
        lines.append(msgspec.json.encode(line))
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(lzma.compress(content, preset=9) if path.suffix == COMPRESSED else content)


def load(path: Path) -> Recording:
    """Return the history of a file. Raises ConfigError naming the file and the line that cannot be read."""
    try:
        content = path.read_bytes()
        head, *lines = (lzma.decompress(content) if path.suffix == COMPRESSED else content).splitlines()
    except OSError as exc:
        raise ConfigError(str(path), [f"cannot be read ({exc.strerror}); name an existing file"]) from exc
    except (lzma.LZMAError, ValueError) as exc:
        raise ConfigError(
            str(path), [f"is no history: {str(exc) or 'it is empty'}; `replay --save` makes one"]
        ) from exc
    return Recording(head=_head(head, path), facts=tuple(_facts(lines, path)))


def _head(line: bytes, path: Path) -> Head:
    try:
        head = msgspec.json.decode(line, type=Head)
    except msgspec.MsgspecError as exc:
        raise ConfigError(str(path), [f"line 1 is no head of a history: {exc}"]) from exc
    if head.format_version != FORMAT_VERSION:
        told = f"it has format {head.format_version}, this version reads {FORMAT_VERSION}"
        raise ConfigError(str(path), [told])
    return head


def _facts(lines: Iterable[bytes], path: Path) -> Iterable[Stored]:
    decoder = msgspec.json.Decoder(_Line)
    for number, text in enumerate(lines, start=2):
        try:
            yield _stored(decoder.decode(text))
        except (msgspec.MsgspecError, InvalidFact) as exc:
            raise ConfigError(str(path), [f"line {number} is no recorded fact: {exc}"]) from exc


def _stored(line: _Line) -> Stored:
    envelope = read(line.subject, bytes(line.event), message_id=None, arrived_at=lambda: line.at)
    return Stored(at=line.at, recorded=Recorded(envelope=envelope, stream=line.stream, sequence=line.sequence))


async def collect(
    bus: Bus, store: Store | None, clock: Clock, policy: ScalingPolicy, *, from_at: datetime, to_at: datetime
) -> Recording | Missing:
    """Return what the running system has of this time. Raises TransientError when broker or store are away.

    What came before is folded from the nearest snapshot that the streams go on from, else from the oldest facts.
    """
    history = History(bus, clock)
    first = await _first_plan(history, from_at, to_at)
    if first is None:
        told = f"no plan between {from_at.isoformat()} and {to_at.isoformat()}"
        return Missing(sentence=f"{told}; `gpu-autoscaler plans` lists the last ones")
    start = await _begin(bus, store, first)
    if isinstance(start, Missing):
        return start
    facts: list[Stored] = []
    for stream in STREAMS:
        async for batch in history.stored(stream, folded_of(stream), after=start.sequences.get(stream, 0)):
            facts += [each for each in batch if each.at <= to_at]
    facts.sort(key=lambda each: (each.at, each.recorded.stream, each.recorded.sequence))
    head = Head(
        policy=policy,
        policy_digest=policy_digest(policy),
        from_at=from_at,
        to_at=to_at,
        sequences=start.sequences,
        state=start.state,
    )
    return Recording(head=head, facts=tuple(facts))


async def _first_plan(history: History, from_at: datetime, to_at: datetime) -> Cut | None:
    async for batch in history.stored(ScalingPlanMade.stream(), [ScalingPlanMade]):
        for each in batch:
            if isinstance(each.recorded.fact, ScalingPlanMade) and from_at <= each.at <= to_at:
                return each.recorded.fact.cut
    return None


async def _begin(bus: Bus, store: Store | None, first: Cut) -> Start | Missing:
    spans = {stream: await bus.span(stream) for stream in STREAMS}
    for row in [] if store is None else await store.snapshots():
        label = decode_label(row.label)
        # Another core may have folded it: what it kept is all that there is of that time, so the check of the core
        # that a service's start makes is not made here.
        if isinstance(label, Label) and is_below(label.cut, first) and store is not None:
            found = await from_snapshot(bus, store, row, label, label.core_digest, spans)
            if isinstance(found, Start):
                return found
    # Of telemetry only the latest window of each node is in the state, and raw samples leave their stream by the hour.
    aged = _aged({name: span.first_sequence for name, span in spans.items() if span.last_sequence and name != "GPU"})
    if aged:
        told = f"facts have aged out ({aged}), and no snapshot in the store stands for them"
        return Missing(sentence=f"{told}; ask for a later time, or name the store with store.url", is_aged_out=True)
    return Start()


def _aged(first_sequences: Mapping[str, int]) -> str:
    return "; ".join(
        f"{stream}: the first one kept is {first}" for stream, first in first_sequences.items() if first > 1
    )
