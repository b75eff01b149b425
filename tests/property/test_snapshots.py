"""A snapshot of any state is that state again, and folding goes on from it as if it had never been stored."""

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
    part_of,
    encode_snapshot,
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
    """The state as another process reads it."""
    sealed, body = encode_snapshot(LABEL, state)
    label = decode_label(sealed)
    assert isinstance(label, Label)
    found = decode_snapshot(label, body)
    assert isinstance(found, ClusterState)
    return found


@_SETTINGS
@given(history=histories(), data=st.data())
def test_folding_on_from_a_snapshot_gives_the_state_of_everything(history: History, data: st.DataObject) -> None:
    """Wherever it was taken: what is decoded is equal, and so is all that comes after."""
    place = data.draw(st.integers(0, len(history)))
    half = fold(EMPTY_STATE, history[:place])

    assert stored(half) == half
    assert fold(stored(half), history[place:]) == fold(EMPTY_STATE, history)


@_SETTINGS
@given(history=histories(), streams=st.sets(st.sampled_from(("POD", "NODE", "GPU", "SPOT", "JOB", "SCALING"))))
def test_a_part_of_a_state_is_what_its_streams_say(history: History, streams: set[str]) -> None:
    """Who folds fewer streams finds in a snapshot just what they would have folded."""
    own = [each for each in history if each.stream in streams]

    assert part_of(fold(EMPTY_STATE, history), streams) == fold(EMPTY_STATE, own)


def test_every_part_of_the_state_has_its_stream() -> None:
    """A new field of the state is one more line there."""
    assert STREAM_OF_FIELD.keys() | {"newest"} == set(ClusterState.__struct_fields__)


def test_a_label_says_the_cut_that_it_stands_for() -> None:
    """Also after it was stored."""
    label = decode_label(encode_snapshot(LABEL, EMPTY_STATE)[0])

    assert isinstance(label, Label)
    assert (label.cut.last_sequences, label.cut.set_aside) == ((("JOB", 7),), (("JOB", 3),))


@pytest.mark.parametrize("position", range(0, 100, 7))
def test_a_flipped_bit_of_the_body_is_noticed(position: int) -> None:
    """Wherever it is: nothing is decoded from it."""
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
def test_a_label_that_was_changed_is_noticed(old: bytes, new: bytes, reason: str) -> None:
    """The checksum is over the label as well: a wrong cut would be worse than a wrong state."""
    sealed, body = encode_snapshot(LABEL, EMPTY_STATE)
    assert old in sealed

    assert _reason(sealed.replace(old, new, 1), body) == reason


def _reason(sealed: bytes, body: bytes) -> Any:  # noqa: ANN401 - compared with a word
    label = decode_label(sealed)
    found = label if isinstance(label, Refusal) else decode_snapshot(label, body)
    assert isinstance(found, Refusal)
    return found.reason
