"""Every reader of the record sees the same fact, with an envelope or without."""

from datetime import UTC, datetime

import msgspec
import pytest

from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.ingress import PUBLIC, PUBLIC_SOURCE, read
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.errors import InvalidFact, UnknownType

T0 = datetime(2026, 11, 21, 12, tzinfo=UTC)
BODY = b'{"job_name":"t","project_id":"p","gpu_requirements":{"gpu_count":1},"container":{"image":"i"}}'


def opened(payload: bytes, message_id: str | None = None) -> Envelope:
    """Return what a reader makes of a message on the public door."""
    return read("job.requested", payload, message_id=message_id, arrived_at=lambda: T0)


def test_a_bare_body_takes_its_name_from_the_message() -> None:
    """Its time is its arrival, its source the public door."""
    envelope = opened(BODY, "mine-1")
    assert (envelope.id, envelope.time, envelope.source) == ("mine-1", T0, PUBLIC_SOURCE)
    assert isinstance(envelope.fact, JobRequested)


def test_without_a_name_the_content_is_the_name() -> None:
    """The same body again is the same request, another body another."""
    assert opened(BODY).id == opened(BODY).id
    assert opened(BODY).id != opened(BODY.replace(b'"t"', b'"u"')).id


def test_an_event_keeps_its_own_name_and_time() -> None:
    """The same fact with an envelope: what the event says of itself counts."""
    event = (
        b'{"specversion":"1.0","id":"e","source":"/x","type":"job.requested.v1","time":"2026-01-01T00:00:00Z","data":'
        + BODY
        + b"}"
    )
    envelope = opened(event, "mine-1")
    assert (envelope.id, envelope.source, envelope.time.year) == ("e", "/x", 2026)
    assert envelope.fact == opened(BODY).fact


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (b"", "neither a CloudEvent nor a bare body"),
        (b"\xff\xfe", "neither a CloudEvent nor a bare body"),
        (b'{"job_name":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "maximum recursion depth"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "maximum recursion depth"),
        (b'{"specversion":"1.0","id":"' + b"x" * 513 + b'","type":"job.requested.v1","data":{}}', "513 characters"),
        (b"[]", "neither a CloudEvent nor a bare body"),
        (b"{}", "job_name: missing; add it; project_id: missing; add it; gpu_requirements: missing; add it"),
        (BODY.replace(b"1", b"1.5"), "gpu_requirements.gpu_count: Expected `int`, got `float`"),
        (b'{"specversion":"1.0","id":"e","type":"job.requested.v1"}', "job_name: missing; add it"),
    ],
)
def test_a_broken_request_names_what_is_wrong(payload: bytes, told: str) -> None:
    """Field and reason, for people who publish without our package."""
    with pytest.raises(InvalidFact, match=told):
        opened(payload)


_LONG = b'"%b":1,' % (b"x" * 200)
MISSPELLED = b"{" + _LONG + BODY[1:].replace(b'"gpu_count":1', b'"gpu_count":1,"gpu_kind":"A100"')


def _event(source: str) -> bytes:
    head = f'"specversion":"1.0","id":"e","source":"{source}","type":"job.requested.v1","time":"2026-01-01T00:00:00Z"'
    return b"{" + head.encode() + b',"data":' + MISSPELLED + b"}"


@pytest.mark.parametrize("payload", [MISSPELLED, _event("/pipeline")])
def test_unknown_fields_of_a_request_are_named_and_it_stays_readable(payload: bytes) -> None:
    """For the queue's admission, with long names cut; the fact is the same as without them."""
    envelope = opened(payload)
    assert envelope.fact == opened(BODY).fact
    assert [error.partition(": ")[0] for error in envelope.unknown_fields] == [
        f"{'x' * 100}...", "gpu_requirements.gpu_kind",
    ]  # fmt: skip
    assert opened(BODY).unknown_fields == ()


def test_unknown_fields_of_our_own_services_are_of_a_newer_release() -> None:
    """A newer gateway has accepted the request; an older scheduler does not refuse it."""
    assert opened(_event("/gpu-autoscaler/gateway/gateway-0")).unknown_fields == ()


REPORT = (
    b'{"source":"kafka","shape":{"gpu_count":1,"gpu_kind":"A100"},"count":1,"until":"2026-11-21T13:00:00Z","nodes":1}'
)
_REPORTED = (
    b'{"specversion":"1.0","id":"e","source":"%b","type":"demand.reported.v1","time":"2026-11-21T12:00:00Z","data":%b}'
)


def reported(payload: bytes) -> Envelope:
    """Return what a reader makes of a demand report."""
    return read("demand.reported", payload, message_id=None, arrived_at=lambda: T0)


@pytest.mark.parametrize("payload", [REPORT, _REPORTED % (b"/pipeline", REPORT)])
def test_a_demand_report_with_unknown_fields_is_refused_by_every_reader(payload: bytes) -> None:
    """Reports have no admission: what a reader takes counts. One of a newer gateway stays readable."""
    with pytest.raises(InvalidFact, match=r"'kafka' refused: shape\.gpu_kind: unknown .*; nodes: unknown"):
        reported(payload)
    assert reported(_REPORTED % (b"/gpu-autoscaler/gateway/gateway-0", REPORT)).unknown_fields == ()


def test_the_named_unknown_fields_are_limited() -> None:
    """A request can have any number of them."""
    many = b"".join(b'"k%d":1,' % number for number in range(1_000))
    assert len(opened(b"{" + many + BODY[1:]).unknown_fields) == 50


def test_other_subjects_need_an_envelope() -> None:
    """Only the public door is open to bare bodies."""
    with pytest.raises(InvalidFact, match="not a CloudEvent"):
        read("job.cancel_requested", b'{"job_id":"a"}', message_id="x", arrived_at=lambda: T0)


def test_no_public_fact_looks_like_an_event() -> None:
    """A field called `data` or `specversion` would make a bare body ambiguous."""
    for fact in PUBLIC:
        assert not {"specversion", "data"} & {field.name for field in msgspec.structs.fields(fact)}


def test_a_subject_of_no_fact_is_unknown_whatever_it_carries() -> None:
    """A slip of the pen is not silence: the nearest subject is named."""
    with pytest.raises(UnknownType, match=r"'job\.request'; did you mean 'job\.requested'\?"):
        read("job.request", BODY, message_id=None, arrived_at=lambda: T0)
