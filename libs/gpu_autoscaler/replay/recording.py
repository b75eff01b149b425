"""What happened in an interval? A history as a file: policy, initial state, and facts in the order stored.

Read from a file or from the running system; no stream is ever written. The file is JSON lines, compressed if its name
ends in `.xz`: a head, then one line per fact with its position. Facts are CloudEvents, so later versions read old
histories as they read old streams.
"""

import lzma
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.envelope import encode, recorded
from gpu_autoscaler.events.ingress import read
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.errors import ConfigError, InvalidFact
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.replay.recompute import Start, folded_facts, from_snapshot, is_contained_in
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.digests import policy_digest
from gpu_autoscaler.runtime.history import History, Stored
from gpu_autoscaler.runtime.snapshot_codec import Label, decode_label
from gpu_autoscaler.store.protocol import Store

FORMAT_VERSION = 1
COMPRESSED = ".xz"
# Streams that the state is folded from. Charges and shadow plans influence no decision.
STREAMS = tuple(sorted({fact.stream() for fact in FACTS if folded_facts(fact.stream())} - {"COST", "SHADOW"}))


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    format_version: int = FORMAT_VERSION
    about: str = ""  # short description
    policy: ScalingPolicy
    # As computed by the version that wrote the file: an added policy field changes the digest of an equal policy.
    policy_digest: str = ""
    from_at: Instant
    to_at: Instant
    # Initial state, and the sequences it contains, if the facts do not start at the first one of their streams.
    sequences: dict[str, int] = {}
    state: ClusterState = EMPTY_STATE


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    at: Instant
    stream: str
    sequence: int
    subject: str
    event: msgspec.Raw


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Facts from `head.from_at` to `head.to_at`, and earlier ones as far as needed."""

    head: Head
    facts: Sequence[Stored]  # in the order in which they were stored

    def plans(self) -> list[Stored]:
        """Return the plans made in the interval, in their stream's order."""
        return [
            stored
            for stored in self.facts
            if isinstance(stored.recorded.fact, ScalingPlanMade) and self.head.from_at <= stored.at <= self.head.to_at
        ]


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is nothing to replay."""

    sentence: str
    is_expired: bool = False  # facts existed, but have expired


def save(recording: Recording, path: Path) -> None:
    """Write the history to a file."""
    lines = [msgspec.json.encode(recording.head)]
    for stored in recording.facts:
        recorded = stored.recorded
        line = _Line(
            at=stored.at,
            stream=recorded.stream,
            sequence=recorded.sequence,
            subject=recorded.fact.subject(),
            event=msgspec.Raw(encode(recorded.envelope)),
        )
        lines.append(msgspec.json.encode(line))
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(lzma.compress(content, preset=9) if path.suffix == COMPRESSED else content)


def load(path: Path) -> Recording:
    """Return the history of a file. Raises ConfigError that names the file and the invalid line."""
    try:
        content = path.read_bytes()
        head, *lines = (lzma.decompress(content) if path.suffix == COMPRESSED else content).splitlines()
    except OSError as exc:
        raise ConfigError(str(path), [f"cannot be read ({exc.strerror}); give an existing file"]) from exc
    except (lzma.LZMAError, ValueError) as exc:
        raise ConfigError(
            str(path), [f"is not a history: {str(exc) or 'it is empty'}; create one with: gpu-autoscaler replay --save"]
        ) from exc
    return Recording(head=_head(head, path), facts=tuple(_facts(lines, path)))


def _head(line: bytes, path: Path) -> Head:
    try:
        head = msgspec.json.decode(line, type=Head)
    except msgspec.MsgspecError as exc:
        error = f"line 1 is not the head of a history ({exc}); create one with: gpu-autoscaler replay --save"
        raise ConfigError(str(path), [error]) from exc
    if head.format_version != FORMAT_VERSION:
        error = f"it has format {head.format_version}, but this version reads format {FORMAT_VERSION}"
        raise ConfigError(str(path), [error])
    return head


def _facts(lines: Iterable[bytes], path: Path) -> Iterable[Stored]:
    decoder = msgspec.json.Decoder(_Line)
    for number, text in enumerate(lines, start=2):
        try:
            yield _stored(decoder.decode(text))
        except (msgspec.MsgspecError, InvalidFact) as exc:
            raise ConfigError(str(path), [f"line {number} is not a recorded fact: {exc}"]) from exc


def _stored(line: _Line) -> Stored:
    envelope = read(line.subject, bytes(line.event), message_id=None, arrived_at=lambda: line.at)
    return Stored(at=line.at, recorded=recorded(envelope, line.stream, line.sequence, line.at))


async def collect(
    bus: Bus, store: Store | None, clock: Clock, policy: ScalingPolicy, *, from_at: datetime, to_at: datetime
) -> Recording | Missing:
    """Return the running system's history of the interval, from the nearest snapshot that the streams continue, else
    from the oldest facts. Raises TransientError if broker or store are unreachable."""
    history = History(bus, clock)
    first = await history.first_plan(lambda _, at: from_at <= at <= to_at)
    if first is None:
        interval = f"{from_at.isoformat()} and {to_at.isoformat()}"
        return Missing(sentence=f"no plan between {interval}; list plans with: gpu-autoscaler plans")
    start = await _start(history, store, first.cut)
    if isinstance(start, Missing):
        return start
    facts: list[Stored] = []
    for stream in STREAMS:
        async for batch in history.read(stream, folded_facts(stream), after=start.sequences.get(stream, 0)):
            facts += [stored for stored in batch if stored.at <= to_at]
    facts.sort(key=lambda stored: (stored.at, stored.recorded.stream, stored.recorded.sequence))
    head = Head(
        policy=policy,
        policy_digest=policy_digest(policy),
        from_at=from_at,
        to_at=to_at,
        sequences=start.sequences,
        state=start.state,
    )
    return Recording(head=head, facts=tuple(facts))


async def _start(history: History, store: Store | None, first: Cut) -> Start | Missing:
    spans = {stream: await history.span(stream) for stream in STREAMS}
    for row in [] if store is None else await store.snapshots():
        label = decode_label(row.label)
        if isinstance(label, Label) and is_contained_in(label.cut, first) and store is not None:
            start = await from_snapshot(history, store, row, label, spans)
            if isinstance(start, Start):
                return start
    # GPU is excluded: the state holds only the latest window per node, and raw samples expire within hours.
    expired = "; ".join(
        f"{name}: the first sequence kept is {span.first_sequence}"
        for name, span in spans.items()
        if span.last_sequence and name != "GPU" and span.first_sequence > 1
    )
    if expired:
        error = f"facts have expired ({expired}), and no snapshot in the store replaces them"
        return Missing(sentence=f"{error}; use a later --from, or set store.url", is_expired=True)
    return Start()
