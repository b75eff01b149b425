"""`admit`: valid requests, and violations of the others."""

import math
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stories import T0, policy, request

from gpu_autoscaler.core.intake.admission import Supply, admit, job_id_of
from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, JobSpec, ResourceRequest, Violation

MODELS = frozenset({"A100", "H100", "L40S", "T4"})


def ask(job_request: JobRequested, models: frozenset[str] = MODELS) -> JobSpec | tuple[Violation, ...]:
    """Admission in a cluster of these models, with at most 8 GPUs on a node."""
    return admit(
        job_request,
        event_id="event-1",
        at=T0,
        now=T0,
        policy=policy(),
        supply=Supply(gpu_models=models, gpus_per_node_max=8),
    )


def test_a_request_is_converted_to_a_job() -> None:
    """Every default is filled in; money, memory and time are in the units of decisions."""
    job_request = request(
        job_id=None,
        gpu_requirements=GpuRequirements(gpu_count=4, gpu_type="nvidia-l40s", gpu_memory_gb=40.5),
        resources=ResourceRequest(cpu="500m", memory="64Gi", ephemeral_storage="0"),
        priority="High",
        budget_limit_usd=12.34,
        max_duration_hours=1.5,
        members=2,
    )
    spec = ask(job_request)

    assert isinstance(spec, JobSpec)
    assert spec.job_id == job_id_of(None, "event-1")
    assert (spec.gpu_model, spec.gpu_memory_bytes_min) == ("L40S", int(40.5 * GIBIBYTE))
    assert (spec.priority, spec.budget_limit_micro_usd, spec.duration_seconds_max) == (1000, 12_340_000, 5400.0)
    assert (spec.member_resources.cpu_milli, spec.member_resources.memory_bytes) == (500, 64 * GIBIBYTE)
    assert (spec.member_resources.gpu_count, spec.member_resources.pod_count, spec.member_count) == (4, 1, 2)


def test_pod_labels_and_annotations_are_copied() -> None:
    """Allowed annotations of this project, and keys of others."""
    marks = {
        "gpu-autoscaler.io/checkpointed-at": "",
        "gpu-autoscaler.io/checkpoint-hook": ":8080/save",
        "gpu-autoscaler.io/eviction-priority": "low",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "prometheus.io/scrape": "true",
    }
    spec = ask(request(pod_annotations=marks, pod_labels={"team": "vision", "example.com/tier": ""}))

    assert isinstance(spec, JobSpec)
    assert (spec.pod_annotations, spec.pod_labels) == (marks, {"team": "vision", "example.com/tier": ""})


def test_the_same_event_is_the_same_job() -> None:
    """Without a requested id it is derived from the event and valid as a Kubernetes name."""
    assert job_id_of(None, "a") == job_id_of(None, "a") != job_id_of(None, "b")
    assert job_id_of(JobId("mine"), "a") == "mine"
    assert ask(request(job_id=job_id_of(None, "a"))) == ask(request(job_id=str(job_id_of(None, "a"))))


@pytest.mark.parametrize(
    ("field", "part", "changes"),
    [
        ("job_name", "is empty", {"job_name": "  "}),
        ("job_name", "at most 128", {"job_name": "x" * 129}),
        ("job_name", "unprintable", {"job_name": "a\x00b"}),
        ("project_id", "is empty", {"project_id": ""}),
        ("project_id", "not a label value", {"project_id": "a b"}),
        ("workload_type", "not a label value", {"workload_type": "-x"}),
        ("job_id", "not a DNS label", {"job_id": "Train_1"}),
        ("job_id", "not a DNS label", {"job_id": "x" * 51}),
        ("members", "must be at least 1", {"members": 0}),
        ("members", "may have 10000", {"members": 10**30, "gpu_requirements": GpuRequirements(gpu_count=0)}),
        ("priority", "low, medium, high, or 0 to 1000", {"priority": "urgent"}),
        ("priority", "is 1001", {"priority": 1001}),
        ("priority", "is -1", {"priority": -1}),
        ("budget_limit_usd", "above zero", {"budget_limit_usd": 0.0}),
        ("budget_limit_usd", "nan", {"budget_limit_usd": math.nan}),
        ("budget_limit_usd", "inf", {"budget_limit_usd": math.inf}),
        ("max_duration_hours", "at most 48", {"max_duration_hours": 48.5}),
        ("max_duration_hours", "above zero", {"max_duration_hours": -1.0}),
        ("max_duration_hours", "nan", {"max_duration_hours": math.nan}),
        ("run_seconds", "zero or more", {"run_seconds": -0.5}),
        ("run_seconds", "at most 3.16224e+07", {"run_seconds": 1e308}),
        ("container.image", "is empty", {"container": ContainerRequest(image="")}),
        ("container.image", "not an image reference", {"container": ContainerRequest(image="a b")}),
        ("container.env", "'1X'", {"container": ContainerRequest(image="i", env={"1X": "", "OK": ""})}),
        ("resources.cpu", "'many' is not a Kubernetes quantity", {"resources": ResourceRequest(cpu="many")}),
        ("resources.cpu", "above zero", {"resources": ResourceRequest(cpu="-1")}),
        ("resources.memory", "above zero", {"resources": ResourceRequest(memory="0")}),
        ("resources.memory", "more than any node has", {"resources": ResourceRequest(memory="64Pi")}),
        ("resources.ephemeral_storage", "quantity", {"resources": ResourceRequest(ephemeral_storage="")}),
        ("gpu_requirements.gpu_count", "must be 0 or more", {"gpu_requirements": GpuRequirements(gpu_count=-1)}),
        ("gpu_requirements.gpu_count", "is -3", {"gpu_requirements": GpuRequirements(gpu_count=-3)}),
        ("gpu_requirements.gpu_count", "more than 8 GPUs", {"gpu_requirements": GpuRequirements(gpu_count=9)}),
        ("gpu_requirements.gpu_count", "1600 GPUs", {"gpu_requirements": GpuRequirements(gpu_count=8), "members": 200}),
        (
            "gpu_requirements.gpu_type",
            "known: A100, H100, L40S, T4); did you mean H100?",
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_type="H1000")},
        ),
        (
            "gpu_requirements.gpu_type",
            "did you mean H100?",
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_type=("A100", "H1000"))},
        ),
        (
            "gpu_requirements.gpu_type",
            "is an empty list",
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_type=())},
        ),
        (
            "gpu_requirements.gpu_type",
            "has 17 models; at most 16",
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_type=("A100",) * 17)},
        ),
        (
            "gpu_requirements.gpu_memory_gb",
            "one T4 has 16 GiB",
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_type="T4", gpu_memory_gb=24)},
        ),
        (
            "gpu_requirements.gpu_memory_gb",
            "nan",
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_memory_gb=math.nan)},
        ),
        (
            "gpu_requirements.gpu_memory_gb",
            "is 1e+308",
            {"gpu_requirements": GpuRequirements(gpu_count=1, gpu_type="A100", gpu_memory_gb=1e308)},
        ),
        ("pod_labels", "'a b' is not a key", {"pod_labels": {"a b": "c"}}),
        ("pod_labels", "which is not a label value", {"pod_labels": {"team": "a b"}}),
        ("pod_labels", "reserved for Kubernetes", {"pod_labels": {"batch.kubernetes.io/job-name": "x"}}),
        ("pod_labels", "reserved for Kubernetes", {"pod_labels": {"kueue.x-k8s.io/pod-group-name": "x"}}),
        ("pod_labels", "written by gpu-autoscaler", {"pod_labels": {"gpu-autoscaler.io/job-id": "x"}}),
        ("pod_annotations", "is not a key", {"pod_annotations": {"/a": ""}}),
        ("pod_annotations", "another pod group", {"pod_annotations": {"scheduling.k8s.io/group-name": "x"}}),
        ("pod_annotations", "has its own field", {"pod_annotations": {"gpu-autoscaler.io/start-by": "x"}}),
        ("pod_annotations", "its own field", {"pod_annotations": {"simcluster.gpu-autoscaler.io/run-seconds": "1"}}),
        ("pod_annotations", ":8080/checkpoint", {"pod_annotations": {"gpu-autoscaler.io/checkpoint-hook": "http://x"}}),
        ("pod_annotations", "low, medium", {"pod_annotations": {"gpu-autoscaler.io/eviction-priority": "last"}}),
        ("pod_annotations", "20 KiB with the labels; at most 16", {"pod_annotations": {"note": "x" * 20 * 1024}}),
        ("container", "of 129 KiB; at most 128", {"container": ContainerRequest(image="i", command=("x" * 132_000,))}),
        (
            "container",
            "into the image or a volume",
            {"container": ContainerRequest(image="i", env={"A": "ä" * 99_000})},
        ),
    ],
)
def test_a_violation_names_field_and_reason(field: str, part: str, changes: dict[str, Any]) -> None:
    """One violation with the path of the field and what is valid."""
    violations = ask(request(**changes))

    assert isinstance(violations, tuple)
    assert [violation.field for violation in violations] == [field]
    assert part in violations[0].reason


def test_all_violations_are_returned_at_once() -> None:
    """Five violations need one request."""
    violations = ask(request(job_name="", project_id="", members=0, priority="x", budget_limit_usd=-1.0))

    assert isinstance(violations, tuple)
    assert {violation.field for violation in violations} == {
        "job_name",
        "project_id",
        "members",
        "priority",
        "budget_limit_usd",
    }


def test_every_quota_that_a_job_can_never_keep_is_a_violation_of_its_own_kind() -> None:
    """GPUs of the user, time of the project, GPU-hours a month and the reach of the cohort, beside invalid fields."""
    projects = [{"name": "research", "nominal_gpu_count": 4, "job_duration_hours_max": 2, "month_gpu_hours_max": 20}]
    rules = policy(quotas={"projects": projects, "user_default": {"gpu_count_max": 6}})
    asked = request(gpu_requirements=GpuRequirements(gpu_count=8), max_duration_hours=3.0, job_name="")
    known = Supply(gpus_per_node_max=8)
    violations = admit(asked, event_id="event-1", at=T0, now=T0, policy=rules, supply=known)

    assert isinstance(violations, tuple)
    assert [(violation.field, violation.kind) for violation in violations] == [
        ("job_name", "invalid"),
        ("max_duration_hours", "quota"),
        ("max_duration_hours", "quota"),
        ("gpu_requirements.gpu_count", "quota"),
        ("gpu_requirements.gpu_count", "quota"),
    ]
    parts = ("at most 2 hours", "24 GPU-hours; project research may use 20", "may use 6 at once", "may use 4 with all")
    for violation, part in zip(violations[1:], parts, strict=True):
        assert part in violation.reason


def test_the_default_time_limit_is_within_the_quota() -> None:
    """A job that requests no time limit gets the largest that its project may have."""
    rules = policy(quotas={"project_default": {"job_duration_hours_max": 2}})
    spec = admit(request(), event_id="event-1", at=T0, now=T0, policy=rules, supply=Supply())

    assert isinstance(spec, JobSpec)
    assert spec.duration_seconds_max == 2 * 3600.0


@pytest.mark.parametrize(("days", "part"), [(2, "more than a day ahead"), (-31, "more than 30 days ago")])
def test_a_request_with_a_wrong_clock_is_rejected(days: int, part: str) -> None:
    """A clock that is wrong by days would distort waiting times and order."""
    at = T0 + timedelta(days=days)
    supply = Supply(gpu_models=MODELS, gpus_per_node_max=8)
    violations = admit(request(), event_id="event-1", at=at, now=T0, policy=policy(), supply=supply)

    assert isinstance(violations, tuple)
    assert [violation.field for violation in violations] == ["time"]
    assert part in violations[0].reason


def test_memory_above_every_model_is_rejected_and_an_unknown_size_is_not() -> None:
    """A100 has two sizes, so its name proves nothing; of T4 and L40S, 48 GiB is the maximum."""
    job_request = request(gpu_requirements=GpuRequirements(gpu_count=1, gpu_memory_gb=64))

    assert isinstance(ask(job_request, frozenset({"A100", "T4"})), JobSpec)
    assert isinstance(ask(job_request, frozenset({"L40S", "T4"})), tuple)


def test_before_offers_are_known_every_known_model_is_accepted() -> None:
    """No offers yet is not a cloud without GPUs: a known model waits, an unknown one is rejected."""
    known = request(gpu_requirements=GpuRequirements(gpu_count=1, gpu_type="V100"))
    unknown = request(gpu_requirements=GpuRequirements(gpu_count=1, gpu_type="Voodoo2"))

    assert isinstance(ask(known, frozenset()), JobSpec)
    assert isinstance(ask(unknown, frozenset()), tuple)


_TEXTS = st.text(max_size=70)
_NUMBERS = st.floats() | st.integers().map(float)


@settings(deadline=None)
@given(
    job_request=st.builds(
        JobRequested,
        job_name=_TEXTS,
        project_id=_TEXTS,
        gpu_requirements=st.builds(
            GpuRequirements,
            gpu_count=st.integers(),
            gpu_type=st.none() | _TEXTS | st.lists(_TEXTS, max_size=3).map(tuple),
            gpu_memory_gb=st.none() | _NUMBERS,
        ),
        container=st.builds(ContainerRequest, image=_TEXTS, env=st.dictionaries(_TEXTS, _TEXTS, max_size=3)),
        priority=_TEXTS | st.integers(),
        resources=st.builds(ResourceRequest, cpu=_TEXTS, memory=_TEXTS, ephemeral_storage=_TEXTS),
        budget_limit_usd=st.none() | _NUMBERS,
        max_duration_hours=st.none() | _NUMBERS,
        members=st.integers(),
        job_id=st.none() | _TEXTS.map(JobId),
        run_seconds=st.none() | _NUMBERS,
    )
)
def test_no_request_breaks_admission(job_request: JobRequested) -> None:
    """Every request gives a job that can be encoded, or violations."""
    answer = ask(job_request)

    assert answer
    assert msgspec.json.encode(answer)
