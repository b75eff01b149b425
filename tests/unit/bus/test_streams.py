"""The one list that everything on the broker is derived from."""

import json

import pytest

from gpu_autoscaler.bus.differences import differences
from gpu_autoscaler.bus.streams import (
    BUCKETS,
    STREAMS,
    BusDeclaration,
    StreamLimits,
    consumers_for,
    covers,
    streams,
    streams_document,
    subject_filter,
)
from gpu_autoscaler.events.catalog import FACTS
from gpu_autoscaler.events.gpu import GpuNodeSampled, GpuNodeSummarized
from gpu_autoscaler.events.job import JobCancelRequested, JobRequested
from gpu_autoscaler.events.scaling import ScalingPlanMade

DECLARED = BusDeclaration(streams=STREAMS, buckets=BUCKETS)


def test_every_fact_has_one_stream() -> None:
    """The stream that its class names takes its subject, and no other does."""
    for fact_type in FACTS:
        takers = [spec.name for spec in STREAMS if any(covers(s, fact_type.subject_root()) for s in spec.subjects)]
        assert takers == [fact_type.stream()]


@pytest.mark.parametrize(
    ("pattern", "subject", "is_covered"),
    [
        ("job.>", "job.requested", True),
        ("job.>", "job", False),
        ("job.>", "jobs.requested", False),
        ("dead.*.resubmitted", "dead.scaler.resubmitted", True),
        ("dead.*", "dead.scaler.resubmitted", False),
        ("a.b", "a", False),
        ("a.b", "a.b", True),
    ],
)
def test_patterns_match_like_the_server(pattern: str, subject: str, is_covered: bool) -> None:  # noqa: FBT001
    """A star is one token, an arrow one or more."""
    assert covers(pattern, subject) is is_covered


def test_what_cannot_be_made_again_cannot_be_deleted() -> None:
    """What was asked for, and what was decided."""
    assert {spec.name for spec in STREAMS if spec.is_append_only} == {"JOB", "SCALING"}


def test_a_service_gets_one_consumer_for_each_domain() -> None:
    """Named after both, with the subjects of the facts it consumes and no others."""
    consumers = consumers_for("scheduler", [JobRequested, ScalingPlanMade, JobCancelRequested])

    assert [(spec.durable, spec.stream, spec.subjects) for spec in consumers] == [
        ("scheduler-job-act", "JOB", ("job.cancel_requested", "job.requested")),
        ("scheduler-scaling-act", "SCALING", ("scaling.plan_made",)),
    ]


def test_telemetry_is_a_family_of_subjects() -> None:
    """One subject a node; everything else has one for all."""
    assert subject_filter(GpuNodeSummarized) == "gpu.node_summarized.>"
    assert subject_filter(JobRequested) == "job.requested"


def test_raw_samples_leave_early() -> None:
    """Summaries stay as long as their stream."""
    gpu = DECLARED.stream_of(f"{GpuNodeSampled.subject_root()}.n1")

    assert gpu is not None
    assert gpu.ttl_seconds("gpu.node_sampled.n1") == 3600
    assert gpu.ttl_seconds("gpu.node_summarized.n1") is None
    assert gpu.config()["allow_msg_ttl"]


def test_limits_come_from_settings() -> None:
    """For the streams named; the others keep theirs."""
    changed = {spec.name: spec for spec in streams({"POD": StreamLimits(max_age_seconds=60, max_bytes=1)}, 3)}

    assert (changed["POD"].max_age_seconds, changed["POD"].max_bytes) == (60, 1)
    assert changed["NODE"].max_bytes == DECLARED.streams[2].max_bytes
    assert {spec.replicas_count for spec in changed.values()} == {3}


def test_a_difference_shows_both_values() -> None:
    """What the server leaves out is what is empty; what is not declared is not compared."""
    declared = {"max_age": 2_000_000_000, "deny_purge": True, "subjects": ["a"], "headers_only": False}
    actual = {"max_age": 1_000_000_000, "subjects": ["a"], "created_by": "somebody"}

    assert [found.sentence() for found in differences("stream", "stream X", declared, actual)] == [
        "stream X: max_age is 1 s on the broker, 2 s is declared",
        "stream X: deny_purge is not set on the broker, True is declared",
    ]


def test_the_document_is_plain_json() -> None:
    """For readers without our package."""
    document = json.loads(json.dumps(streams_document(consumers_for("scheduler", [JobRequested]))))

    assert [spec["name"] for spec in document["streams"]] == [spec.name for spec in STREAMS]
    assert document["consumers"][0]["durable"] == "scheduler-job-act"
