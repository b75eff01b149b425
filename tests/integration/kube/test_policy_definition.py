"""The definition of `AutoscalingPolicy` on a real API server: defaults, rules, columns, and what it refuses."""

import json
from typing import Any

import pytest
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.kube_policies import defined, policy
from tests.support.sources import autoscaling_policy

from gpu_autoscaler.model.labels import CAPACITY_TYPE

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def ready(plane: ControlPlane) -> ControlPlane:
    """The plane with the definition in `deploy/`, and served."""
    defined(plane)
    return plane


def applied(plane: ControlPlane, body: dict[str, Any]) -> dict[str, Any]:
    """What the server makes of it."""
    answer: dict[str, Any] = json.loads(plane.kubectl("apply", "-f", "-", "-o", "json", text=json.dumps(body)))
    return answer


def refused(plane: ControlPlane, body: dict[str, Any]) -> str:
    """Why the server does not take it."""
    with pytest.raises(AssertionError) as caught:
        plane.kubectl("apply", "-f", "-", text=json.dumps(body))
    return str(caught.value)


def test_what_is_left_out_has_a_default_or_is_not_there(ready: ControlPlane) -> None:
    """The server sets the defaults of a pool, but no thresholds that would override the policy file."""
    spec = applied(ready, policy("least", nodePools=[{"name": "a100"}]))["spec"]
    (pool,) = spec.pop("nodePools")
    assert spec == {"enabled": True, "minNodes": 0, "enableSpotInstances": True}
    assert pool == {
        "name": "a100", "minSize": 0, "capacityType": "mixed", "priority": 0,
        "instanceTypes": [], "availabilityZones": [], "labels": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"minNodes": 5, "maxNodes": 4}, "minNodes is above maxNodes"),
        ({"scaleUpThreshold": 0.2, "scaleDownThreshold": 0.8}, "scaleDownThreshold is not below scaleUpThreshold"),
        ({"scaleUpThreshold": 80}, "should be less than or equal to 1"),
        ({"provider": "abacus"}, "Unsupported value"),
        ({"maxNodes": 3, "nodePools": [{"name": "a", "minSize": 2}, {"name": "b", "minSize": 2}]}, "adds up to more"),
        ({"nodePools": [{"name": "a", "minSize": 3, "maxSize": 2}]}, "minSize is above maxSize"),
        ({"nodePools": [{"name": "a", "maxSize": 0}]}, "maxSize is 0"),
        ({"nodePools": [{"name": "a"}, {"name": "a"}]}, "Duplicate value"),
        ({"nodePools": [{"name": "a", "capacityType": "spot", "spotPercentage": 50}]}, "contradicts capacityType"),
        ({"nodePools": [{"name": "a", "capacityType": "on-demand", "spotPercentage": 1}]}, "contradicts capacityType"),
        ({"nodePools": [{"name": "a", "spotPercentage": 101}]}, "should be less than or equal to 100"),
        (
            {"nodePools": [{"name": "a", "capacityType": "spot", "labels": {CAPACITY_TYPE: "on-demand"}}]},
            "or contradicts capacityType",
        ),
        ({"nodePools": [{"name": "a", "labels": {CAPACITY_TYPE: "cheap"}}]}, "is not spot, on-demand or reserved"),
        ({"spotInstancePercentage": 0.5, "enableSpotInstances": False}, "spotInstancePercentage is above 0"),
        (
            {"nodePools": [{"name": "a", "capacityType": "spot"}], "enableSpotInstances": False},
            "a pool has capacityType spot",
        ),
        ({"nodePools": [{"name": "a", "labels": {"gpu-autoscaler.io/pool": "b"}}]}, "written by the autoscaler"),
        ({"nodePools": []}, "should have at least 1 items"),
        ({"scaleUpTreshold": 0.5}, "unknown field"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(ready: ControlPlane, changes: dict[str, Any], said: str) -> None:
    """Each contradiction, in a sentence that names the fields."""
    assert said in refused(ready, policy("wrong", **changes))


@pytest.mark.parametrize("pool", [{"spotPercentage": 0}, {"capacityType": "spot", "spotPercentage": 1.0}])
def test_shares_may_agree_with_the_capacity_type(ready: ControlPlane, pool: dict[str, Any]) -> None:
    """Fractions, and 0 or 1 beside the capacity type that they name."""
    body = policy("shares", spotInstancePercentage=0.6, nodePools=[{"name": "shares"} | pool])
    assert applied(ready, body)["spec"]["spotInstancePercentage"] == 0.6


def test_the_policy_of_the_autoscaling_guide_is_accepted_unchanged(ready: ControlPlane) -> None:
    """Each of its fields is kept as written."""
    body = autoscaling_policy()
    assert applied(ready, body)["spec"] == body["spec"]


def test_every_field_of_the_definition_is_accepted(ready: ControlPlane) -> None:
    """A policy that sets every field of the CRD is returned unchanged."""
    pool = {
        "name": "h100", "minSize": 1, "maxSize": 4, "gpuType": "H100", "instanceTypes": ["p5.48xlarge"],
        "capacityType": "mixed", "spotPercentage": 40, "priority": 10, "labels": {"team": "vision"},
        "availabilityZones": ["us-east-1a"],
    }  # fmt: skip
    said: dict[str, Any] = {
        "enabled": True, "provider": "aws", "scaleUpThreshold": 0.8, "scaleDownThreshold": 0.2,
        "scaleUpCooldownSeconds": 180, "scaleDownCooldownSeconds": 600, "pendingPodTimeoutSeconds": 120,
        "minNodes": 1, "maxNodes": 10, "spotInstancePercentage": 60, "enableSpotInstances": True,
        "enableMultiTierScaling": True, "enablePredictiveScaling": False, "nodePools": [pool],
    }  # fmt: skip
    assert applied(ready, policy("full", **said))["spec"] == said


def test_the_table_shows_what_people_look_for(ready: ControlPlane) -> None:
    """By the short name, with columns; those of the status are empty until a policy watcher sets it."""
    applied(ready, policy("shown", provider="sim", nodePools=[{"name": "shown"}]))
    head, *rows = ready.kubectl("get", "asp").splitlines()
    assert head.split() == ["NAME", "PROVIDER", "NODES", "DESIRED", "PENDING", "SPOT%", "READY", "AGE"]
    (row,) = (row for row in rows if row.startswith("shown"))
    assert row.split()[:2] == ["shown", "sim"]


def test_the_status_is_a_subresource(ready: ControlPlane) -> None:
    """Who writes the spec cannot write the status, and the other way round; the generation counts specs alone."""
    made = applied(ready, policy("status", nodePools=[{"name": "status"}]) | {"status": {"nodes": 3}})
    assert "status" not in made
    patch = json.dumps({"status": {"nodes": 3, "observedGeneration": 1}, "spec": {"maxNodes": 1}})
    ready.kubectl("patch", "asp", "status", "--subresource=status", "--type=merge", "-p", patch)
    seen = json.loads(ready.kubectl("get", "autoscalingpolicy", "status", "-o", "json"))
    assert (seen["status"]["nodes"], seen["spec"].get("maxNodes"), seen["metadata"]["generation"]) == (3, None, 1)
