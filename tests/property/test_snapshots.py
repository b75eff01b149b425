"""Snapshots: decoding gives an equal state, and folding continues from it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.histories import histories
from tests.support.stories import T0

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.runtime.snapshot_codec import (
    STREAM_OF_FIELD,
    Label,
    Refusal,
    StreamMark,
    decode_label,
    decode_snapshot,
    encode_snapshot,
    restrict_to_streams,
)

History = tuple[Recorded, ...]

LABEL = Label(
    core_digest="c",
    fact_types=("job.queued.v1",),
    marks=(StreamMark(stream="JOB", created_at=T0, last_sequence=7, stored_at=T0),),
    set_aside=(("JOB", 3),),
)
_SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def stored(state: ClusterState) -> ClusterState:
    """The state as decoded by another process."""
    sealed, body = encode_snapshot(LABEL, state)
    assert isinstance(decode_label(sealed), Label)
    result = decode_snapshot(sealed, body)
    assert isinstance(result, ClusterState)
    return result


@_SETTINGS
@given(history=histories(), data=st.data())
def test_folding_continues_from_a_snapshot(history: History, data: st.DataObject) -> None:
    """Wherever it was taken."""
    place = data.draw(st.integers(0, len(history)))
    half = fold(EMPTY_STATE, history[:place])

    assert stored(half) == half
    assert fold(stored(half), history[place:]) == fold(EMPTY_STATE, history)


@_SETTINGS
@given(history=histories(), streams=st.sets(st.sampled_from(("POD", "NODE", "GPU", "SPOT", "JOB", "SCALING"))))
def test_a_partial_state_equals_folding_its_streams(history: History, streams: set[str]) -> None:
    """For services that fold fewer streams."""
    own = [each for each in history if each.stream in streams]

    assert restrict_to_streams(fold(EMPTY_STATE, history), streams) == fold(EMPTY_STATE, own)


def test_every_field_of_the_state_has_a_stream() -> None:
    """A new field needs one more line."""
    assert STREAM_OF_FIELD.keys() | {"newest"} == set(ClusterState.__struct_fields__)


def test_a_label_has_its_sequences() -> None:
    """Also after it was stored."""
    label = decode_label(encode_snapshot(LABEL, EMPTY_STATE)[0])

    assert isinstance(label, Label)
    assert (label.cut.last_sequences, label.cut.set_aside) == ((("JOB", 7),), (("JOB", 3),))


@pytest.mark.parametrize("position", range(0, 100, 7))
def test_a_corrupt_body_is_detected(position: int) -> None:
    """Nothing is decoded from it."""
    sealed, body = encode_snapshot(LABEL, EMPTY_STATE)
    place = position * len(body) // 100
    broken = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]

    assert _reason(sealed, broken) == "corrupt"
    assert _reason(sealed, body[:place]) == "corrupt"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"last_sequence":7', b'"last_sequence":8', "corrupt"),
        (b'"core_digest":"c"', b'"core_digest":"d"', "corrupt"),
        (b'"core_digest"', b'"core_digesd"', "corrupt"),
        (b"{", b"", "corrupt"),
        (b'"format_version":1', b'"format_version":2', "format_changed"),
    ],
)
def test_a_corrupt_label_is_detected(old: bytes, new: bytes, reason: str) -> None:
    """The checksum covers the label."""
    sealed, body = encode_snapshot(LABEL, EMPTY_STATE)
    assert old in sealed

    assert _reason(sealed.replace(old, new, 1), body) == reason


def _reason(sealed: bytes, body: bytes) -> Any:  # noqa: ANN401 - compared with a word
    label = decode_label(sealed)
    result = label if isinstance(label, Refusal) else decode_snapshot(sealed, body)
    assert isinstance(result, Refusal)
    return result.reason
