"""`gpu-autoscaler doctor` on a cluster with Karpenter, with half of it, and without."""

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
    """An environment of settings for this plane."""
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
    """What the command found, by subject; it must end with this code."""
    assert run(["doctor", "-o", "json"]) == code
    return {one["subject"]: one for one in json.loads(capsys.readouterr().out)}


def overlay(key: str, value: str) -> str:
    """A price for what has this label."""
    asked = {"key": key, "operator": "In", "values": [value]}
    item = {"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay", "metadata": {"name": "cheap"}}
    return json.dumps(item | {"spec": {"requirements": [asked], "price": "0.5"}})


def install(plane: ControlPlane, *more: str) -> None:
    """Karpenter's definitions, without Karpenter."""
    for name in ("nodepools", "nodeclaims", "kwoknodeclasses", *more):
        plane.kubectl("apply", "--server-side", "-f", str(KARPENTER.folder() / f"{name}.yaml"))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")


@pytest.mark.usefixtures("settings")
def test_what_is_missing_is_named_until_nothing_is(plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    """No Karpenter, no class, a pool that buys as well; then all is fine, and no claim was made."""
    bare = findings(capsys, 1)
    assert bare.keys() == {"NodeClaims"}
    assert "install Karpenter 1.0 or newer" in bare["NodeClaims"]["next_step"]

    install(plane)
    found = findings(capsys, 1)
    assert found[CLASS]["level"] == "error"
    assert "there is no karpenter.kwok.sh/KWOKNodeClass/default" in found[CLASS]["message"]
    assert found["a trial claim"]["level"] == "ok"

    plane.kubectl("apply", "-f", "-", text=node_class())
    plane.kubectl("apply", "-f", "-", text=node_pool({}))
    found = findings(capsys, 0)
    assert (found["NodePools"]["level"], "default: Karpenter itself buys" in found["NodePools"]["message"]) == (
        "warning",
        True,
    )

    plane.kubectl("apply", "-f", "-", text=node_pool({"nvidia.com/gpu": "0"}))
    assert "NodeOverlays" not in findings(capsys, 0), "nobody has to have them"
    install(plane, "nodeoverlays")
    plane.kubectl("apply", "-f", "-", text=overlay("node.kubernetes.io/instance-type", "gpu-4x"))
    found = findings(capsys, 0)
    assert found["NodeOverlays"]["message"] == "1 of 5 offers are changed by them"
    assert {one["level"] for one in found.values()} == {"ok"}, found
    assert {"rights on nodeclaims", "rights on events", "offers"} <= found.keys()
    assert plane.kubectl("get", "nodeclaims", "-o", "name") == ""

    plane.kubectl("apply", "-f", "-", text=overlay("karpenter.k8s.aws/instance-family", "g5"))
    found = findings(capsys, 0)
    assert "cheap: nothing is known of karpenter.k8s.aws/instance-family" in found["NodeOverlays"]["message"]
    plane.kubectl("delete", "nodeoverlay", "cheap")


@pytest.mark.usefixtures("settings")
def test_a_right_that_is_missing_comes_with_the_command_that_grants_it(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as it stands, it is enough."""
    install(plane, "nodeoverlays")
    plane.kubectl("apply", "-f", "-", text=node_class())
    plane.kubectl("create", "serviceaccount", "buyer")
    token = plane.kubectl("create", "token", "buyer").strip()
    monkeypatch.setenv("GPU_AUTOSCALER_KUBE_KUBECONFIG_PATH", str(plane.kubeconfig("buyer", {"token": token})))
    found = findings(capsys, 1)
    assert "may not create, get, list, patch, delete" in found["rights on nodeclaims"]["message"]
    for subject in ("rights on nodeclaims", "rights on events", "NodeOverlays"):
        for command in found[subject]["next_step"].split(" && "):
            plane.kubectl(*command.split()[1:])
    found = findings(capsys, 0)
    assert {subject for subject, one in found.items() if one["level"] != "ok"} == {CLASS}
    assert "get kwoknodeclasses" in found[CLASS]["message"]


@pytest.mark.usefixtures("settings")
def test_the_printed_role_is_enough(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is bound to it misses nothing but to see NodePools, of which nothing is said then."""
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
    assert {one["level"] for one in found.values()} == {"ok"}, found
    assert "NodePools" not in found


@pytest.mark.usefixtures("settings")
def test_pools_that_are_to_be_ours_are_looked_at(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode limits: one that is missing, one that makes several types, one that is not handed over; then one that is."""
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
    assert "there is no NodePool gone" in found["NodePool gone"]["message"]
    assert "makes gpu-1x/zone-a/on-demand, gpu-1x/zone-a/spot; its machines have" in found["NodePool any"]["message"]
    assert (
        'may have 8 GPUs and has 0: to hand its limits to us, set spec.limits["nvidia.com/gpu"] to "0"'
        in (found["NodePool gpu"]["message"])
    )

    monkeypatch.setenv("GPU_AUTOSCALER_KARPENTER_NODE_POOLS", "gpu")
    plane.kubectl("delete", "nodepool", "any")
    plane.kubectl("apply", "-f", "-", text=json.dumps(handed))
    found = findings(capsys, 0)
    assert {one["level"] for one in found.values()} == {"ok"}, found
    assert found["NodePool gpu"]["message"].startswith("makes gpu-4x/zone-a/on-demand for pods that wait, 0 GPUs are")
    assert "rights on nodepools" in found
    assert "a trial claim" not in found

    handed["spec"]["disruption"] = {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "30s"}
    plane.kubectl("apply", "-f", "-", text=json.dumps(handed))
    assert "set spec.disruption.consolidateAfter to Never" in findings(capsys, 0)["NodePool gpu"]["next_step"]
