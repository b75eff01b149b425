"""A folded state as bytes, with a label that says what it stands for. Pure: reads no store, no broker, no clock.

A snapshot only saves time: whatever is doubtful about one is a refusal with its reason, and the streams are read
instead. Called by `runtime/snapshots.py` and by `recompute`.
"""

import hashlib
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from gpu_autoscaler.core.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import Cut
from gpu_autoscaler.model.observed import Instant

# Counts up with every change of label or body; a change of the state itself is a change of the core's digest.
FORMAT_VERSION = 1
_COMPRESSION_LEVEL = 1  # states repeat themselves: a thirtieth of the size already, and higher levels gain little

RefusalReason = Literal["corrupt", "format_changed", "core_changed", "fact_types_changed", "stream_changed", "ahead", "gap"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)

# Whose word each part of the state is. `newest` has an entry for each of them.
STREAM_OF_FIELD: Mapping[str, str] = {
    **dict.fromkeys(("pods", "pods_gone", "pods_synced", "busy_until"), "POD"),
    **dict.fromkeys(("budgets", "budgets_gone", "budgets_synced"), "POD"),
    **dict.fromkeys(("nodes", "nodes_gone", "nodes_synced", "usable", "unhealthy_since", "observed_allocatable"), "NODE"),
    **dict.fromkeys(("instances", "instances_seen_at", "instances_listed_at", "spot_terminations"), "NODE"),
    **dict.fromkeys(("telemetry", "telemetry_history"), "GPU"),
    **dict.fromkeys(("notices", "offers", "rebalance_recommended_at"), "SPOT"),
    "jobs": "JOB",
    "reported_demand": "DEMAND",
    **dict.fromkeys(("directives", "policy_changed", "policy_documents"), "POLICY"),
    **dict.fromkeys(("spent", "charges", "spent_by_job", "ledger_reported_at"), "COST"),
    **dict.fromkeys(("orders", "drains", "gangs", "last_plan_sequence", "last_plan_at", "restored_at"), "SCALING"),
    **dict.fromkeys(("demand_history", "forecast_scores"), "SCALING"),
}


class StreamMark(msgspec.Struct, frozen=True, kw_only=True):
    """How far a stream is in the state, and which stream that was."""

    stream: str
    created_at: Instant  # when the broker made it
    last_sequence: int  # 0: nothing of it is in the state
    # When that message was stored. A broker that lost its last messages gives their numbers to others. None: there is
    # no such message any more.
    stored_at: Instant | None = None


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """What a state stands for."""

    core_digest: str  # of the code that folded it
    fact_types: tuple[str, ...]  # what was folded, sorted; other facts of the streams were left out
    marks: tuple[StreamMark, ...]  # sorted by stream
    set_aside: tuple[tuple[str, int], ...] = ()
    format_version: int = FORMAT_VERSION
    checksum: str = ""  # over the rest of the label and the body

    @property
    def cut(self) -> Cut:
        """The facts that are in the state."""
        sequences = tuple((mark.stream, mark.last_sequence) for mark in self.marks)
        return Cut(last_sequences=sequences, set_aside=self.set_aside)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a snapshot is not used; the streams say the same, and take longer."""

    reason: RefusalReason
    detail: str


class _Version(msgspec.Struct):
    format_version: int


_label_decoder = msgspec.json.Decoder(Label)
_version_decoder = msgspec.json.Decoder(_Version)
_state_decoder = msgspec.msgpack.Decoder(ClusterState)


def seal(label: Label, state: ClusterState) -> tuple[bytes, bytes]:
    """Return label and body as they are kept. Takes a tenth of a second for 10,000 pods and jobs: call it in a thread.

    Parts are encoded one by one, so that the thread lets others run between two of them.
    """
    encode = msgspec.msgpack.encode
    parts: dict[str, Any] = {name: msgspec.Raw(encode(getattr(state, name))) for name in state.__struct_fields__}
    body = zlib.compress(encode(parts), _COMPRESSION_LEVEL)
    return msgspec.json.encode(replace(label, checksum=_checksum(label, body))), body


def decode_label(kept: bytes) -> Label | Refusal:
    """Return what a kept label says. Its checksum is proved together with the body, by `decode_snapshot`."""
    try:
        version = _version_decoder.decode(kept).format_version
        if version != FORMAT_VERSION:
            return Refusal(
                reason="format_changed", detail=f"it has format {version}, this version reads {FORMAT_VERSION}"
            )
        return _label_decoder.decode(kept)
    except msgspec.MsgspecError as exc:
        return Refusal(reason="corrupt", detail=f"its label cannot be read: {exc}")


def decode_snapshot(label: Label, body: bytes) -> ClusterState | Refusal:
    """Return the state, or why it is not to be trusted."""
    if _checksum(label, body) != label.checksum:
        return Refusal(reason="corrupt", detail="its checksum is another one")
    try:
        return _state_decoder.decode(zlib.decompress(body))
    except (msgspec.MsgspecError, zlib.error) as exc:
        return Refusal(reason="corrupt", detail=f"it cannot be decoded: {exc}")


def fact_types(folds: Iterable[type[Fact]]) -> tuple[str, ...]:
    """Return the names of these facts as a label has them."""
    return tuple(sorted(fact.type_name() for fact in folds))


def part_of(state: ClusterState, streams: Collection[str]) -> ClusterState:
    """Return what these streams say of the state; the rest is as if nobody had said anything."""
    left_out = {name: getattr(EMPTY_STATE, name) for name, stream in STREAM_OF_FIELD.items() if stream not in streams}
    newest = {domain: at for domain, at in state.newest.items() if domain.upper() in streams}
    return replace(state, **left_out, newest=newest)


def _checksum(label: Label, body: bytes) -> str:
    digest = hashlib.blake2b(msgspec.json.encode(replace(label, checksum="")), digest_size=16)
    digest.update(body)
    return digest.hexdigest()
