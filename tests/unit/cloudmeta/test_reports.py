"""Reports of nodes: one subject per instance, and bodies that can hold no more than a metadata service shows."""

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_autoscaler.bus.nats.wire import is_subject
from gpu_autoscaler.bus.streams import covers
from gpu_autoscaler.cloudmeta.reports import (
    ALL_REPORTS,
    NOTICES_COUNT_MAX,
    REPORT_BYTES_MAX,
    read_report,
    report_subject,
    reporting_instance,
)
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.model.ids import ProviderId

IDS = (
    "aws:///eu-west-1a/i-0abc",
    "gce://example.com:project/europe-west4-a/gpu.1",
    "azure:///subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/v/virtualMachines/0",
)
NOTICE = {"kind": "terminate", "provider_event": "e"}


@given(st.one_of(st.sampled_from(IDS), st.text(min_size=1, max_size=60).filter(lambda text: text.isprintable())))
def test_a_subject_names_one_instance(text: str) -> None:
    """Whatever the cloud names its machines, the subject is one token, and leads back to the instance."""
    subject = report_subject(ProviderId(text))
    assert is_subject(subject)
    assert covers(ALL_REPORTS, subject)
    assert reporting_instance(subject) == text


def test_another_spelling_of_an_instance_is_refused() -> None:
    """Credentials for one subject are no way to an instance by another one: base64 has several spellings."""
    subject = report_subject(ProviderId("aws:///a/i-1"))
    last = subject[-1]
    others = [subject[:-1] + chr(ord(last) + 1), subject + "=", subject + "==", f"{subject}.x", f"other.{subject}"]
    decoded = base64.urlsafe_b64decode(others[0].partition(".")[2] + "==")
    for other in (
        *others,
        "node_report.",
        "node_report.*",
        "node_report.!",
        "node_report",
        "node_report." + "YWFh" * 200,
    ):
        if other == others[0] and decoded != b"aws:///a/i-1":
            continue
        with pytest.raises(InvalidFact):
            reporting_instance(other)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"shown": [{"kind": "party", "provider_event": "e"}]}',
        b'{"shown": [{"kind": "terminate", "provider_event": ""}]}',
        b'{"shown": [{"kind": "terminate", "provider_event": "e", "reclaim_at": "2026-11-23T00:00:00"}]}',
        msgspec.json.encode({"shown": [NOTICE] * (NOTICES_COUNT_MAX + 1)}),
        msgspec.json.encode({"shown": [{**NOTICE, "provider_event": "e" * 129}]}),
        msgspec.json.encode({"shown": [], "padding": "x" * REPORT_BYTES_MAX}),
    ],
)
def test_an_invalid_report_is_refused(body: bytes) -> None:
    """Unknown kinds, naive times, and more than the limits."""
    with pytest.raises(InvalidFact):
        read_report(body)


def test_a_report_of_a_later_version_is_read() -> None:
    """Fields that this version does not know are ignored."""
    report = read_report(msgspec.json.encode({"shown": [{**NOTICE, "reason": "price"}], "weather": "fine"}))
    assert [notice.provider_event for notice in report.shown] == ["e"]
