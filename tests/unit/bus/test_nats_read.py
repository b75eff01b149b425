"""What the acknowledgement subject of a delivery says."""

from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.bus.nats_read import place


def test_both_forms_of_the_subject_say_the_same() -> None:
    """With and without a domain. Source: NATS ADR-15 (read 2026-11-21)."""
    short = place(b"$JS.ACK.JOB.scaler-job-act.2.17.9.1795260553254666470.3")
    long = place(b"$JS.ACK.hub.4fXq.JOB.scaler-job-act.2.17.9.1795260553254666470.3.x7")

    assert short == long
    assert (short.stream, short.consumer, short.delivered_count) == ("JOB", "scaler-job-act", 2)
    assert (short.sequence, short.consumer_sequence, short.pending_count) == (17, 9, 3)


def test_both_ways_to_read_a_message_agree_on_its_time() -> None:
    """One gives nanoseconds, the other RFC 3339: rounded alike, also across a second."""
    for nanoseconds in (1795260553_254666470, 1795260553_254666500, 1795260553_254666999, 1795260553_999999600):
        fraction = f"{nanoseconds % 1_000_000_000:09d}"
        text = f"{datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC):%Y-%m-%dT%H:%M:%S}.{fraction}Z"

        assert place(b"$JS.ACK.S.c.1.1.1.%d.0" % nanoseconds).stored_at == msgspec.convert(text, datetime)
