"""Admission of pod templates: every violation at once, and what the job needs of a node."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.support.pod_templates import admitted, answer, changed, lacking, template, templated, violations
from tests.support.stories import request

from gpu_autoscaler.core.demand.sources import GPU_TOLERATIONS, job_shape
from gpu_autoscaler.kube.pod_templates.admission import TEMPLATE_BYTES_MAX, VIOLATIONS_COUNT_MAX, Admitted
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, ResourceRequest, template_digest
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeSelectorTerm, Toleration

GIBIBYTE = 2**30


def test_placement_gets_the_largest_need_of_init_containers_sidecars_and_containers() -> None:
    """The first init container needs 12 CPUs; the sidecar started after it does not add to that."""
    spec = admitted().spec
    assert spec.member_resources == Resources(
        cpu_milli=12_000, memory_bytes=33 * GIBIBYTE, gpu_count=1, ephemeral_storage_bytes=10 * GIBIBYTE, pod_count=1
    )


def test_placement_gets_selector_affinity_and_tolerations() -> None:
    """Beside our own toleration of the GPU taint."""
    shape = job_shape(admitted().spec)
    assert shape.demands.node_selector == (("disk", "nvme"),)
    assert shape.demands.node_affinity == (NodeSelectorTerm((LabelRequirement("rack", "In", ("r1", "r2")),)),)
    assert shape.demands.tolerations == (Toleration(key="team", value="vision", effect="NoSchedule"), *GPU_TOLERATIONS)


def test_the_job_keeps_a_digest_and_no_template() -> None:
    """Neither command nor environment is in facts of the accepted job; releases without templates cannot run it."""
    job = admitted()
    assert job.template is not None
    assert job.spec.template_digest == template_digest(job.template)
    assert (job.spec.image, job.spec.command, job.spec.env) == ("", (), {})


def test_the_short_form_is_as_before() -> None:
    """A request without a template has no digest and no demands of its own."""
    job = answer(templated().without_template())
    assert not isinstance(job, Admitted), "the digest is ours to set"
    short = answer(request())
    assert isinstance(short, Admitted)
    assert (short.template, short.spec.template_digest, short.spec.image) == (None, None, "registry.example/train:1")


def test_containers_have_limits_for_memory_and_requests_for_limits() -> None:
    """CPU stays as it is asked for: more than its request may be used where it is free."""
    full = admitted().template
    assert full is not None
    main, logs = full["spec"]["containers"]
    assert main["resources"] == {
        "requests": {"cpu": "4", "memory": "32Gi", "ephemeral-storage": "10Gi"},
        "limits": {"cpu": "8", "memory": "32Gi"},
    }
    assert logs["resources"] == {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}


REFUSED: dict[str, tuple[str, object, str, str]] = {
    "unknown field": ("spec.volums", [], "spec.volums", "did you mean volumes?"),
    "unknown field of a container": ("spec.containers.0.comand", [], "spec.containers[0].comand", "command"),
    "wrong type": ("spec.containers.0.args", "train.py", "spec.containers[0].args", "expects an array"),
    "boolean for a number": ("spec.terminationGracePeriodSeconds", True, "spec.terminationGracePeriodSeconds", "int"),
    "null": ("spec.nodeSelector", None, "spec.nodeSelector", "remove it"),
    "missing": ("spec.volumes.0", {"hostname": "x"}, "spec.volumes[0].name", "is missing"),
    "quantity": (
        "spec.containers.0.resources.requests.cpu",
        "four",
        "spec.containers[0].resources.requests.cpu",
        "quantity",
    ),
    "negative": (
        "spec.containers.0.resources.requests.cpu",
        "-1",
        "spec.containers[0].resources.requests.cpu",
        "negative",
    ),
    "restart policy": ("spec.restartPolicy", "Always", "spec.restartPolicy", "must be Never"),
    "priority class": ("spec.priorityClassName", "urgent", "spec.priorityClassName", "set priority"),
    "node": ("spec.nodeName", "n1", "spec.nodeName", "use nodeSelector"),
    "gates": ("spec.schedulingGates", [{"name": "wait"}], "spec.schedulingGates", "start together"),
    "device claims": ("spec.resourceClaims", [{"name": "gpu"}], "spec.resourceClaims", "gpu_requirements"),
    "time limit": ("spec.activeDeadlineSeconds", 60, "spec.activeDeadlineSeconds", "max_duration_hours"),
    "scheduler": ("spec.schedulerName", "mine", "spec.schedulerName", "default-scheduler"),
    "no container": ("spec.containers", [], "spec.containers", "add the container"),
    "no image": ("spec.containers.1.image", " ", "spec.containers[1].image", "set the image"),
    "name": ("spec.containers.1.name", "Logs", "spec.containers[1].name", "DNS label"),
    "name twice": ("spec.containers.1.name", "main", "spec.containers[1].name", "another container"),
    "mount": (
        "spec.containers.1.volumeMounts",
        [{"name": "no", "mountPath": "/"}],
        "spec.containers[1].volumeMounts[0].name",
        "none of the volumes",
    ),
    "operator": ("spec.tolerations.0.operator", "Is", "spec.tolerations[0].operator", "Is"),
    "no term": (
        "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        [],
        "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        "no node matches",
    ),
    "own label": ("metadata.labels", {"gpu-autoscaler.io/job-id": "x"}, "metadata.labels", "written by gpu-autoscaler"),
    "annotation": ("metadata.annotations", {"gpu-autoscaler.io/x": ""}, "metadata.annotations", "gpu-autoscaler"),
    "finalizers": ("metadata.finalizers", ["x/y"], "metadata.finalizers", "remove it"),
    "more GPUs": (
        "spec.containers.0.resources.limits",
        {"nvidia.com/gpu": "2"},
        "spec.containers",
        "request 2 nvidia.com/gpu, but gpu_requirements is 1 nvidia.com/gpu",
    ),
    "GPUs before": (
        "spec.initContainers.0.resources.limits",
        {"nvidia.com/gpu": "2"},
        "spec.containers",
        "request 2 nvidia.com/gpu",
    ),
    "claims": (
        "spec.volumes",
        [{"name": f"v{number}", "persistentVolumeClaim": {"claimName": "c"}} for number in range(33)],
        "spec.volumes",
        "at most 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_violation_has_its_field_and_remedy(case: str) -> None:
    """Of Kubernetes' schema, of ours, and of both together."""
    path, value, field, words = REFUSED[case]
    refused = violations(changed(path, value))
    assert words in refused[f"pod_template.{field}"]


def test_violations_of_request_and_template_are_reported_together() -> None:
    """A person corrects all of them before the next attempt."""
    own = changed("spec.containers.0.comand", ["python"])
    own["spec"]["hostPID"] = True
    own["spec"]["priority"] = 7
    refused = violations(own, priority="urgent", container=ContainerRequest(image="x"), job_name="")
    assert set(refused) == {
        "job_name",
        "priority",
        "container",
        "pod_template.spec.containers[0].comand",
        "pod_template.spec.hostPID",
        "pod_template.spec.priority",
    }


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"resources": ResourceRequest(cpu="7")}, "resources.cpu"),
        ({"resources": ResourceRequest(memory="33Gi")}, "resources.memory"),
        ({"pod_labels": {"team": "speech"}}, "pod_labels"),
        ({"pod_annotations": {"example.com/owner": "speech"}}, "pod_annotations"),
        ({"container": ContainerRequest(image="train:2")}, "container"),
        ({"runtime": "pytorchjob"}, "pod_template.spec.containers"),
    ],
)
def test_contradictions_between_request_and_template_are_violations(changes: dict[str, Any], field: str) -> None:
    """The same value twice is none."""
    assert list(violations(**changes)) == [field]


def test_a_rayjob_needs_a_command() -> None:
    """Ray submits command and arguments of the first container."""
    own = template()
    del own["spec"]["containers"][0]["command"], own["spec"]["containers"][0]["args"]
    assert list(violations(own, runtime="rayjob")) == ["pod_template.spec.containers[0].command"]


def test_equal_values_are_no_contradiction() -> None:
    """As one may write both."""
    job = admitted(pod_labels={"team": "vision"}, resources=ResourceRequest(cpu="4000m", memory="32Gi"))
    assert job.spec.member_resources.memory_bytes == 33 * GIBIBYTE


def test_gpus_may_be_written_in_the_template_as_well() -> None:
    """Distributed over its containers, if their sum is that of the request; then they stay where they are."""
    own = changed("spec.containers.0.resources.limits", {"nvidia.com/gpu": 3})
    own["spec"]["containers"][1]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    job = admitted(own, gpu_requirements=GpuRequirements(gpu_count=4))
    assert job.spec.member_resources.gpu_count == 4
    assert job.template is not None
    assert job.template["spec"]["containers"][1]["resources"]["requests"] == {"nvidia.com/gpu": "1"}


def test_a_template_may_have_so_many_bytes_and_no_more() -> None:
    """A ConfigMap holds the rest."""
    own = template()
    own["spec"]["containers"][0]["args"] = ["x" * (TEMPLATE_BYTES_MAX - 4000)]
    assert admitted(own).template is not None
    own["spec"]["containers"][0]["args"] = ["x" * TEMPLATE_BYTES_MAX]
    assert list(violations(own)) == ["pod_template"]
    assert "at most 128 are allowed" in violations(own)["pod_template"]


def test_more_violations_than_a_person_reads_are_counted() -> None:
    """The answer has a bound as the request has one."""
    own = changed("spec.containers.0.ports", [{"containerPort": "x"} for _ in range(200)])
    result = answer(templated(own))
    assert not isinstance(result, Admitted)
    assert len(result) == VIOLATIONS_COUNT_MAX
    assert result[-1].reason.startswith("has 151 more")


JSON = some.recursive(
    some.none() | some.booleans() | some.integers(-9, 9) | some.text(max_size=3),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
PLACES = sorted({path for path, *_ in REFUSED.values()} | {"spec", "metadata", "spec.affinity", "spec.containers.0"})


@settings(max_examples=300, deadline=None)
@given(path=some.sampled_from(PLACES), value=JSON, runtime=some.sampled_from(["job", "pytorchjob", "rayjob", "?"]))
def test_anything_is_accepted_whole_or_refused_with_reasons(path: str, value: object, runtime: str) -> None:
    """No value at any place raises; an accepted template lost nothing; a refusal names fields, each with a reason."""
    own = changed(path, value)
    result = answer(templated(own, runtime=runtime))
    if isinstance(result, Admitted):
        assert lacking(result.template, own) == []
        assert result.spec.member_resources.gpu_count == 1
    else:
        assert result
        assert all(violation.field and violation.reason for violation in result)
