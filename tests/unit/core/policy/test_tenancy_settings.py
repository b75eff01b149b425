"""Projects and their namespaces: where jobs go, what they carry, and which settings are refused."""

from typing import Any

import pytest
from tests.support.stories import T0, policy, request

from gpu_autoscaler.core.intake.admission import UNKNOWN_SUPPLY, admit
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.model.jobs import JobSpec, Violation


def under(**tenancy: Any) -> ScalingPolicy:  # noqa: ANN401 - fields of the policy
    """A policy with this tenancy."""
    return policy(tenancy=tenancy)


def admitted(given: ScalingPolicy, **changes: Any) -> JobSpec | tuple[Violation, ...]:  # noqa: ANN401 - fields
    """The job of a request of project research."""
    return admit(request(**changes), event_id="e", at=T0, now=T0, policy=given, supply=UNKNOWN_SUPPLY)


def spec(given: ScalingPolicy, **changes: Any) -> JobSpec:  # noqa: ANN401 - fields
    """The accepted job."""
    job = admitted(given, **changes)
    assert isinstance(job, JobSpec), job
    return job


def test_by_default_all_jobs_share_one_namespace() -> None:
    """Nothing of a project but its name."""
    job = spec(policy())
    assert (job.namespace, job.tenant, job.cost_center, job.priority_class, job.service_account) == ("",) * 5


def test_a_mapped_project_uses_an_existing_namespace() -> None:
    """With the default service account, as gpu-autoscaler creates nothing there; other projects share one."""
    given = under(projects=[{"name": "research", "namespace": "team-r", "cost_center": "cc-42"}])
    job = spec(given)
    assert (job.namespace, job.tenant, job.cost_center, job.service_account) == ("team-r", "research", "cc-42", "")
    assert spec(given, project_id="vision").namespace == ""


def test_a_template_names_the_namespace_of_each_project() -> None:
    """An explicit namespace takes precedence."""
    given = under(namespace_template="gpu-{project}", projects=[{"name": "vision", "namespace": "team-v"}])
    job = spec(given)
    assert (job.namespace, job.tenant, job.service_account) == ("gpu-research", "research", "gpu-jobs")
    assert spec(given, project_id="vision").namespace == "team-v"


@pytest.mark.parametrize("project", ["Team_A", "p" * 60])
def test_a_project_without_a_possible_namespace_is_refused(project: str) -> None:
    """The violation names project, namespace and next step."""
    refused = admitted(under(namespace_template="gpu-{project}"), project_id=project)
    assert isinstance(refused, tuple)
    (violation,) = refused
    assert violation.field == "project_id"
    assert f"'gpu-{project}' is not a DNS label" in violation.reason
    assert "tenancy.projects" in violation.reason


@pytest.mark.parametrize(
    ("priority", "name"),
    [(0, "low"), (100, "low"), (499, "low"), ("medium", "medium"), (700, "medium"), ("high", "high")],
)
def test_the_priority_class_is_that_of_the_next_lower_name(priority: int | str, name: str) -> None:
    """Only where the policy names the classes."""
    given = under(priority_class_prefix="gpu-autoscaler")
    assert spec(given, priority=priority).priority_class == f"gpu-autoscaler-{name}"


@pytest.mark.parametrize(
    ("tenancy", "words"),
    [
        ({"namespace_template": "gpu"}, "'gpu' must have {project} once"),
        ({"namespace_template": "{project}"}, "use gpu-{project}"),
        ({"namespace_template": "GPU-{project}"}, "'GPU-p' is not a DNS label"),
        ({"namespace_template": "kube-{project}"}, "'kube-p' belongs to Kubernetes"),
        ({"admitted_namespaces": ["No"]}, "tenancy.admitted_namespaces: 'No' is not a namespace"),
        ({"quota": {"requests.cpu": "many"}}, "tenancy.quota: requests.cpu: not a Kubernetes quantity: 'many'"),
        ({"quota": {"requests.cpu": "-1"}}, "tenancy.quota: requests.cpu: -1 is negative"),
        ({"projects": [{"name": "a", "namespace": "kube-system"}]}, "of project a, 'kube-system' belongs"),
        ({"projects": [{"name": "a", "namespace": "A b"}]}, "of project a, 'A b' is not a DNS label"),
        ({"projects": [{"name": "a", "cost_center": "c c"}]}, "'c c' of project a is not a label value"),
        ({"projects": [{"name": "a"}, {"name": "a"}]}, "'a'"),
        (
            {"projects": [{"name": "a", "namespace": "team-a", "quota": {"pods": "4"}}]},
            "tenancy.projects[0].quota: has no effect in namespace team-a of project a, which is left as it is",
        ),
    ],
)
def test_settings_that_kubernetes_would_refuse_are_violations(tenancy: dict[str, Any], words: str) -> None:
    """One sentence each, with the field and the project."""
    (violation,) = policy_violations(under(**tenancy))
    assert words in violation


def test_valid_settings_have_no_violations() -> None:
    """All of them at once."""
    given = under(
        namespace_template="gpu-{project}",
        quota={"requests.nvidia.com/gpu": "16", "requests.memory": "1Ti"},
        admitted_namespaces=["monitoring"],
        priority_class_prefix="gpu-autoscaler",
        projects=[
            {"name": "research", "namespace": "team-r", "cost_center": "cc-42"},
            {"name": "vision", "quota": {"requests.nvidia.com/gpu": "32"}},
        ],
    )
    assert policy_violations(given) == ()
