"""Metadata in the acknowledgment subject of a delivery."""

from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.bus.nats.read import parse_ack_subject
from gpu_autoscaler.bus.protocol import microseconds_of


def test_both_forms_of_the_subject_say_the_same() -> None:
    """With and without a domain. Source: NATS ADR-15 (read 2026-11-21)."""
    short = parse_ack_subject(b"$JS.ACK.JOB.scaler-job-act.2.17.9.1795260553254666470.3")
    long = parse_ack_subject(b"$JS.ACK.hub.4fXq.JOB.scaler-job-act.2.17.9.1795260553254666470.3.x7")

    assert short == long
    assert (short.stream, short.delivered_count, short.sequence, short.consumer_sequence) == ("JOB", 2, 17, 9)


def test_both_ways_to_read_a_message_agree_on_its_time() -> None:
    """One gives nanoseconds, the other RFC 3339: rounded alike, also across a second."""
    for nanoseconds in (1795260553_254666470, 1795260553_254666500, 1795260553_254666999, 1795260553_999999600):
        fraction = f"{nanoseconds % 1_000_000_000:09d}"
        text = f"{datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC):%Y-%m-%dT%H:%M:%S}.{fraction}Z"

        at = parse_ack_subject(b"$JS.ACK.S.c.1.1.1.%d.0" % nanoseconds)

        assert at.stored_microseconds == microseconds_of(msgspec.convert(text, datetime))
