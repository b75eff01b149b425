"""Encodes a folded state as bytes, with a label that describes it. Pure: reads no store, no broker, no clock.

A snapshot only saves time: a doubtful one is refused with a reason, and the streams are read instead. Used by
`runtime/snapshots.py` and by `recompute`.
"""

import hashlib
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.observed import Instant

# Of label, body and state. Incremented when earlier snapshots can no longer be decoded, or would mean something else;
# then the first start of the new version reads the whole streams. An added field with a default, and another core that
# folds into the same fields, need no new version: `tests/tidy/test_state_shape.py` compares the state with the recorded
# one.
FORMAT_VERSION = 1
_COMPRESSION_LEVEL = 1  # already a thirtieth of the size; higher levels gain little

RefusalReason = Literal["corrupt", "format_changed", "fact_types_changed", "stream_changed", "ahead", "gap"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)

# The stream that each field of the state is folded from. `newest` has an entry for each stream.
STREAM_OF_FIELD: Mapping[str, str] = {
    **dict.fromkeys(("pods", "pods_gone", "pods_synced", "opted_in_namespaces", "busy_until"), "POD"),
    **dict.fromkeys(("budgets", "budgets_gone", "budgets_synced"), "POD"),
    **dict.fromkeys(("quotas", "quotas_gone", "quotas_synced"), "POD"),
    **dict.fromkeys(("provisioning", "provisioning_gone", "provisioning_synced"), "POD"),
    **dict.fromkeys(
        ("nodes", "nodes_gone", "nodes_synced", "usable", "unhealthy_since", "observed_allocatable"), "NODE"
    ),
    **dict.fromkeys(("instances", "instances_seen_at", "instances_listed_at", "spot_terminations"), "NODE"),
    **dict.fromkeys(("telemetry", "telemetry_history"), "GPU"),
    **dict.fromkeys(("notices", "offers", "rebalance_recommended_at"), "SPOT"),
    **dict.fromkeys(("jobs", "gpu_time", "durations"), "JOB"),
    "reported_demand": "DEMAND",
    **dict.fromkeys(("directives", "brake_releases", "policy_changed", "policy_documents"), "POLICY"),
    **dict.fromkeys(("spent", "charges", "spent_by_job", "ledger_reported_at"), "COST"),
    **dict.fromkeys(("orders", "drains", "gangs", "last_plan_sequence", "last_plan_at", "restored_at"), "SCALING"),
    **dict.fromkeys(("demand_history", "forecast_scores", "rejections", "upkeep", "brake"), "SCALING"),
}


class StreamMark(msgspec.Struct, frozen=True, kw_only=True):
    """How far a stream is folded into the state, and which incarnation of the stream it was."""

    stream: str
    created_at: Instant  # when the broker created the stream
    last_sequence: int  # 0: no message of it is in the state
    # When that message was stored: a broker that lost its last messages reuses their sequences. None: the message no
    # longer exists.
    stored_at: Instant | None = None


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the state of a snapshot."""

    core_digest: str  # of the code that folded the state since `base`
    fact_types: tuple[str, ...]  # the folded types, sorted; other facts of the streams are not in the state
    marks: tuple[StreamMark, ...]  # sorted by stream
    set_aside: tuple[tuple[str, int], ...] = ()
    format_version: int = FORMAT_VERSION
    checksum: str = ""  # over the rest of the label and the body
    base: str = ""  # checksum of the snapshot of another core that this one continues; empty: none

    @property
    def cut(self) -> Cut:
        """The facts that are in the state."""
        sequences = tuple((mark.stream, mark.last_sequence) for mark in self.marks)
        return Cut(last_sequences=sequences, set_aside=self.set_aside, base=self.base)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a snapshot is not used; the streams hold the same facts and take longer to read."""

    reason: RefusalReason
    detail: str


class _Version(msgspec.Struct):
    format_version: int


class _Memory(msgspec.Struct):
    memory: bytes = b""


_memory_decoder = msgspec.msgpack.Decoder(_Memory)
_label_decoder = msgspec.json.Decoder(Label)
_version_decoder = msgspec.json.Decoder(_Version)
_state_decoder = msgspec.msgpack.Decoder(ClusterState)


def encode_snapshot(label: Label, state: ClusterState, memory: bytes = b"") -> tuple[bytes, bytes]:
    """Return label and body as bytes. Takes a tenth of a second for 10,000 pods and jobs: call it in a thread.

    Fields are encoded one by one, so that the thread releases the interpreter between two of them. `memory`: of the
    service that folded the state.
    """
    encode = msgspec.msgpack.encode
    parts: dict[str, Any] = {name: msgspec.Raw(encode(getattr(state, name))) for name in state.__struct_fields__}
    body = zlib.compress(encode(parts | {"memory": memory} if memory else parts), _COMPRESSION_LEVEL)
    checksum = _checksum(msgspec.json.encode(replace(label, checksum="")), body)
    return msgspec.json.encode(replace(label, checksum=checksum)), body


def decode_label(encoded: bytes) -> Label | Refusal:
    """Return a stored label. `decode_snapshot` verifies its checksum, together with the body."""
    try:
        version = _version_decoder.decode(encoded).format_version
        if version != FORMAT_VERSION:
            return Refusal(
                reason="format_changed",
                detail=f"format {version} differs from {FORMAT_VERSION}, which this version reads",
            )
        return _label_decoder.decode(encoded)
    except msgspec.MsgspecError as exc:
        return Refusal(reason="corrupt", detail=f"unreadable label: {exc}")


def decode_snapshot(label: bytes, body: bytes) -> ClusterState | Refusal:
    """Return the state, or why it cannot be trusted. `label` is encoded."""
    if not _is_intact(label, body):
        return Refusal(reason="corrupt", detail="checksum mismatch")
    try:
        return _state_decoder.decode(zlib.decompress(body))
    except (msgspec.MsgspecError, zlib.error) as exc:
        return Refusal(reason="corrupt", detail=f"undecodable body: {exc}")


def decode_memory(label: bytes, body: bytes) -> bytes:
    """Return the memory in a snapshot; empty if it has none or cannot be trusted. `label` is encoded."""
    if not _is_intact(label, body):
        return b""
    try:
        return _memory_decoder.decode(zlib.decompress(body)).memory
    except (msgspec.MsgspecError, zlib.error):
        return b""


def fact_types(folds: Iterable[type[Fact]]) -> tuple[str, ...]:
    """Return the type names of these facts, sorted as in a label."""
    return tuple(sorted(fact.type_name() for fact in folds))


def restrict_to_streams(state: ClusterState, streams: Collection[str]) -> ClusterState:
    """Return the part of the state that is folded from these streams; the other fields are empty."""
    left_out = {name: getattr(EMPTY_STATE, name) for name, stream in STREAM_OF_FIELD.items() if stream not in streams}
    newest = {domain: at for domain, at in state.newest.items() if domain.upper() in streams}
    return replace(state, **left_out, newest=newest)


def _is_intact(label: bytes, body: bytes) -> bool:
    """True if the checksum is right. It covers the label as stored: other versions may have other fields."""
    try:
        content = msgspec.json.decode(label, type=dict[str, Any])
    except msgspec.MsgspecError:
        return False
    checksum = content.get("checksum")
    return bool(checksum == _checksum(msgspec.json.encode(content | {"checksum": ""}), body))


def _checksum(label: bytes, body: bytes) -> str:
    """Return the checksum over an encoded label without one, and the body."""
    digest = hashlib.blake2b(label, digest_size=16)
    digest.update(body)
    return digest.hexdigest()
