"""`gpu-autoscaler doctor` on a cluster with Karpenter, with parts of it, and without."""

import json
from pathlib import Path

import pytest
from tests.bench.peers.real import KARPENTER, node_class, node_pool
from tests.controlplane.fixtures import plane
from tests.controlplane.plane import ControlPlane
from tests.support.karpenter import needed_karpenter, options_in
from tests.support.karpenter_pools import node_pool as limited_pool

from gpu_autoscaler_services.cli.main import run

__all__ = ["plane"]
pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(180)]

CLASS = "karpenter.kwok.sh/KWOKNodeClass/default"


@pytest.fixture
def settings(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for this control plane in the environment."""
    needed_karpenter()
    options = options_in(tmp_path)
    for name, value in {
        "PROVIDER_NAME": "karpenter",
        "KUBE_KUBECONFIG_PATH": str(plane.kubeconfig()),
        "KARPENTER_NODE_CLASS": CLASS,
        "KARPENTER_OFFERS_PATH": str(options.offers_path),
    }.items():
        monkeypatch.setenv(f"GPU_AUTOSCALER_{name}", value)


def findings(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, str]]:
    """Run doctor, check its exit code, return findings by subject."""
    assert run(["doctor", "-o", "json"]) == code
    return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}


def overlay(key: str, value: str) -> str:
    """Return a NodeOverlay with a price for a label."""
    requirement = {"key": key, "operator": "In", "values": [value]}
    item = {"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay", "metadata": {"name": "cheap"}}
    return json.dumps(item | {"spec": {"requirements": [requirement], "price": "0.5"}})


def install(plane: ControlPlane, *more: str) -> None:
    """Install Karpenter's CRDs without Karpenter."""
    for name in ("nodepools", "nodeclaims", "kwoknodeclasses", *more):
        plane.kubectl("apply", "--server-side", "-f", str(KARPENTER.folder() / f"{name}.yaml"))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")


@pytest.mark.usefixtures("settings")
def test_missing_objects_are_named(plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    """No Karpenter, no class, a NodePool that also launches nodes; then no errors, and no NodeClaim was created."""
    bare = findings(capsys, 1)
    assert bare.keys() == {"NodeClaims"}
    assert "install Karpenter 1.0 or newer" in bare["NodeClaims"]["next_step"]

    install(plane)
    found = findings(capsys, 1)
    assert found[CLASS]["level"] == "error"
    assert "node class karpenter.kwok.sh/KWOKNodeClass/default" in found[CLASS]["message"]
    assert found["NodeClaim dry run"]["level"] == "ok"

    plane.kubectl("apply", "-f", "-", text=node_class())
    plane.kubectl("apply", "-f", "-", text=node_pool({}))
    found = findings(capsys, 0)
    assert (found["NodePools"]["level"], "default: Karpenter also launches" in found["NodePools"]["message"]) == (
        "warning",
        True,
    )

    plane.kubectl("apply", "-f", "-", text=node_pool({"nvidia.com/gpu": "0"}))
    assert "NodeOverlays" not in findings(capsys, 0), "NodeOverlays are optional"
    install(plane, "nodeoverlays")
    plane.kubectl("apply", "-f", "-", text=overlay("node.kubernetes.io/instance-type", "gpu-4x"))
    found = findings(capsys, 0)
    assert found["NodeOverlays"]["message"] == "change 1 of 5 offers"
    assert {finding["level"] for finding in found.values()} == {"ok"}, found
    assert {"permissions on nodeclaims", "permissions on events", "offers"} <= found.keys()
    assert plane.kubectl("get", "nodeclaims", "-o", "name") == ""

    plane.kubectl("apply", "-f", "-", text=overlay("karpenter.k8s.aws/instance-family", "g5"))
    found = findings(capsys, 0)
    assert "cheap: unknown labels karpenter.k8s.aws/instance-family" in found["NodeOverlays"]["message"]
    plane.kubectl("delete", "nodeoverlay", "cheap")


@pytest.mark.usefixtures("settings")
def test_a_missing_permission_comes_with_the_command_that_grants_it(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands suffice without changes."""
    install(plane, "nodeoverlays")
    plane.kubectl("apply", "-f", "-", text=node_class())
    plane.kubectl("create", "serviceaccount", "buyer")
    token = plane.kubectl("create", "token", "buyer").strip()
    monkeypatch.setenv("GPU_AUTOSCALER_KUBE_KUBECONFIG_PATH", str(plane.kubeconfig("buyer", {"token": token})))
    found = findings(capsys, 1)
    assert "may not create, get, list, patch, delete" in found["permissions on nodeclaims"]["message"]
    for subject in ("permissions on nodeclaims", "permissions on events", "NodeOverlays"):
        for command in found[subject]["next_step"].split(" && "):
            plane.kubectl(*command.split()[1:])
    found = findings(capsys, 0)
    assert {subject for subject, finding in found.items() if finding["level"] != "ok"} == {CLASS}
    assert "get kwoknodeclasses" in found[CLASS]["message"]


@pytest.mark.usefixtures("settings")
def test_the_printed_role_is_enough(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service account bound to it lacks only read access to NodePools, which are then not checked."""
    install(plane)
    plane.kubectl("apply", "-f", "-", text=node_class())
    assert run(["doctor", "--policy"]) == 0
    plane.kubectl("apply", "-f", "-", text=capsys.readouterr().out)
    plane.kubectl("create", "serviceaccount", "bound")
    role = ("--clusterrole=gpu-autoscaler-karpenter", "--serviceaccount=default:bound")
    plane.kubectl("create", "clusterrolebinding", "bound", *role)
    token = plane.kubectl("create", "token", "bound").strip()
    monkeypatch.setenv("GPU_AUTOSCALER_KUBE_KUBECONFIG_PATH", str(plane.kubeconfig("bound", {"token": token})))
    found = findings(capsys, 0)
    assert {finding["level"] for finding in found.values()} == {"ok"}, found
    assert "NodePools" not in found


@pytest.mark.usefixtures("settings")
def test_managed_node_pools_are_checked(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode limits: a missing pool, one with several types, one with limits of its own; then a valid one."""
    install(plane)
    plane.kubectl("apply", "-f", "-", text=node_class())
    plane.kubectl("delete", "nodepool", "--all")
    monkeypatch.setenv("GPU_AUTOSCALER_KARPENTER_MODE", "limits")
    monkeypatch.setenv("GPU_AUTOSCALER_KARPENTER_NODE_POOLS", "gpu, any, gone")
    handed = limited_pool("gpu", "gpu-4x", "zone-a")
    kept = limited_pool("gpu", "gpu-4x", "zone-a", limits={"nvidia.com/gpu": "8"})
    wide = limited_pool("any", "gpu-1x", "zone-a")
    wide["spec"]["template"]["spec"]["requirements"].pop()
    for pool in (kept, wide):
        plane.kubectl("apply", "-f", "-", text=json.dumps(pool))
    found = findings(capsys, 1)
    assert "NodePool gone not found" in found["NodePool gone"]["message"]
    assert (
        "offers gpu-1x/zone-a/on-demand, gpu-1x/zone-a/spot; it needs exactly one" in found["NodePool any"]["message"]
    )
    assert (
        'allows 8 GPUs and has 0: to hand its limits over, set spec.limits["nvidia.com/gpu"] to "0"'
        in (found["NodePool gpu"]["message"])
    )

    monkeypatch.setenv("GPU_AUTOSCALER_KARPENTER_NODE_POOLS", "gpu")
    plane.kubectl("delete", "nodepool", "any")
    plane.kubectl("apply", "-f", "-", text=json.dumps(handed))
    found = findings(capsys, 0)
    assert {finding["level"] for finding in found.values()} == {"ok"}, found
    assert found["NodePool gpu"]["message"].startswith("offers gpu-4x/zone-a/on-demand for pending pods, limited to 0")
    assert "permissions on nodepools" in found
    assert "NodeClaim dry run" not in found

    handed["spec"]["disruption"] = {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "30s"}
    plane.kubectl("apply", "-f", "-", text=json.dumps(handed))
    assert "set spec.disruption.consolidateAfter to Never" in findings(capsys, 0)["NodePool gpu"]["next_step"]
