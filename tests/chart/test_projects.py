"""Projects in namespaces of their own: the policy and the rights that the values give, and none without them."""

import tomllib
from typing import Any

import msgspec
import pytest
from tests.chart.charting import NAMESPACE, RELEASE, Json, of_kind, pods, rendered, template

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.tenancy_settings import ProjectSettings, TenancyPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler_services.registry import spec_of
from gpu_autoscaler_services.service_spec import rules_of

SCHEDULER = f"{RELEASE}-scheduler"
TEMPLATE = "jobs.namespaceTemplate=gpu-{project}"
MAPPED = ("jobs.projects.research.namespace=team-r", "jobs.projects.research.costCenter=cc-42")


def tenancy(found: list[Json]) -> TenancyPolicy:
    """The tenancy of the rendered policy, which must be valid."""
    (text,) = (
        one["data"]["policy.toml"] for one in of_kind(found, "ConfigMap").values() if "policy.toml" in one["data"]
    )
    policy = msgspec.convert(tomllib.loads(text), ScalingPolicy)
    assert policy_violations(policy) == ()
    return policy.tenancy


def rules(found: list[Json], name: str) -> list[Any]:
    """The rules of a ClusterRole."""
    return list(of_kind(found, "ClusterRole")[name]["rules"])


def test_without_values_nothing_is_added() -> None:
    """No tenancy, no right, one namespace."""
    found = rendered("cluster")
    assert tenancy(found) == TenancyPolicy()
    assert rules(found, SCHEDULER) == spec_of("scheduler").rules(is_for_jobs=False)
    assert [one for one in rules(found, f"{RELEASE}-pod-watcher") if "resourcequotas" in one["resources"]] == []
    roles = [one for one in found if one["kind"] == "Role" and one["metadata"]["name"] == SCHEDULER]
    assert len(roles) == 1


def test_a_template_gives_the_right_to_create_namespaces() -> None:
    """And the rights for jobs in all of them; checkpoint hooks of the release reach the pods."""
    found = rendered("cluster", TEMPLATE, r"jobs.quota.requests\.memory=512Gi", "jobs.priorityClasses=true")
    given = tenancy(found)
    assert given.namespace_template == "gpu-{project}"
    assert given.quota == {"requests.memory": "512Gi"}
    assert given.admitted_namespaces == (NAMESPACE,)
    assert {f"{given.priority_class_prefix}-{name}" for name in ("low", "medium", "high")} <= of_kind(
        found, "PriorityClass"
    ).keys()
    spec = spec_of("scheduler")
    wanted = [*spec.rules(is_for_jobs=False), *rules_of(spec.rights_with_namespaces), *spec.rules(is_for_jobs=True)]
    assert rules(found, SCHEDULER) == wanted


def test_a_mapped_namespace_gets_a_role() -> None:
    """The scheduler's rights for jobs there, and no right to create namespaces."""
    found = rendered("cluster", *MAPPED, "jobs.projects.vision.costCenter=cc-7")
    assert tenancy(found).projects == (
        ProjectSettings(name="research", namespace="team-r", cost_center="cc-42"),
        ProjectSettings(name="vision", cost_center="cc-7"),
    )
    assert rules(found, SCHEDULER) == spec_of("scheduler").rules(is_for_jobs=False)
    for kind in ("Role", "RoleBinding"):
        there = [
            one["metadata"]["name"]
            for one in found
            if one["kind"] == kind and one["metadata"].get("namespace") == "team-r"
        ]
        assert there == [SCHEDULER]


def test_a_project_never_gets_the_namespace_of_the_release() -> None:
    """Its jobs could use the Secrets there."""
    told = template("cluster", f"jobs.projects.research.namespace={NAMESPACE}")
    assert told.returncode != 0
    assert "jobs.projects.research.namespace: gpu-autoscaler-system is the namespace of this release" in told.stderr


@pytest.mark.parametrize("is_watched", [True, False])
def test_quotas_are_watched_on_request(is_watched: bool) -> None:  # noqa: FBT001
    """The setting of the pod watcher, and its right."""
    found = rendered("cluster", f"jobs.watchQuotas={str(is_watched).lower()}")
    (container,) = pods(found)[f"{RELEASE}-pod-watcher"]["containers"]
    variables = {one["name"] for one in container["env"]}
    assert ("GPU_AUTOSCALER_KUBE_ARE_QUOTAS_WATCHED" in variables) is is_watched
    right = [one for one in rules(found, f"{RELEASE}-pod-watcher") if one["resources"] == ["resourcequotas"]]
    assert right == (rules_of(spec_of("pod_watcher").rights_with_quotas) if is_watched else [])


@pytest.mark.parametrize("is_served", [True, False])
def test_provisioning_requests_are_served_on_request(is_served: bool) -> None:  # noqa: FBT001
    """The setting of the pod watcher, and the rights of watcher and controller."""
    found = rendered("cluster", f"jobs.serveProvisioningRequests={str(is_served).lower()}")
    (container,) = pods(found)[f"{RELEASE}-pod-watcher"]["containers"]
    variables = {entry["name"] for entry in container["env"]}
    assert ("GPU_AUTOSCALER_KUBE_ARE_PROVISIONING_REQUESTS_SERVED" in variables) is is_served
    for service, account, count in (("pod_watcher", "pod-watcher", 3), ("scaler", "controller", 2)):
        wanted = rules_of(spec_of(service).rights_with_provisioning)
        assert len(wanted) == count
        given = [rule for rule in rules(found, f"{RELEASE}-{account}") if rule in wanted]
        assert given == (wanted if is_served else [])
