"""Every reader of the record sees a message as the same fact."""

from datetime import UTC, datetime, timedelta

from gpu_autoscaler.bus.dead_letters import ORIGINAL_ID
from gpu_autoscaler.bus.protocol import Message, microseconds_of
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.runtime.decode import decode_message

T0 = datetime(2026, 11, 21, 12, tzinfo=UTC)
BODY = b'{"job_name":"t","project_id":"p","gpu_requirements":{"gpu_count":1},"container":{"image":"i"}}'


def stored(message_id: str, **headers: str) -> Recorded:
    """A bare body as the stream holds it ten seconds after the clock began, four times as fast as the wall."""
    message = Message(
        subject="job.requested",
        payload=BODY,
        message_id=message_id,
        stream="JOB",
        sequence=7,
        stored_microseconds=microseconds_of(T0 + timedelta(seconds=10)),
        headers=headers,
    )
    return decode_message(message, Clock(4.0, T0))


def test_a_message_that_was_sent_again_is_the_fact_that_it_was() -> None:
    """A body without an envelope is named by its first message, also when a dead letter is sent under another name."""
    again = stored("letter-1", **{ORIGINAL_ID: "mine"})

    assert again.envelope == stored("mine").envelope
    assert again.envelope.id == "mine"


def test_what_carries_no_time_happened_when_it_arrived() -> None:
    """In the time of the cluster, at its place in the stream."""
    recorded = stored("mine")

    assert recorded.envelope.time == T0 + timedelta(seconds=40)
    assert (recorded.stream, recorded.sequence) == ("JOB", 7)
