"""The README's installation and first job on a real API server, by the commands of the page alone."""

import json
import os
import re
import shutil
import subprocess
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Any

import pytest
from tests.chart.charting import NAMESPACE, ROOT, tool
from tests.controlplane.plane import EVERYTHING, ControlPlane, needed_programs, running_plane
from tests.support.cluster import until
from tests.support.kube_objects import node

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]

README = ROOT / "README.md"
COMMANDS_SECONDS_MAX = 420
# The machines of the control plane run no container, so a job of the chart needs an end; everything else is the page's.
ENDING = r"services.migrate.podAnnotations.simcluster\.gpu-autoscaler\.io/run-seconds=1"
HELM = r"""#!/bin/bash
case $1 in upgrade) end=(--set-string '{ending}') ;; esac
exec {helm} "$@" "${{end[@]}}"
"""


def commands(title: str) -> str:
    """Return the commands of a section of the README, as they stand there."""
    section = README.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return "".join(re.findall(r"(?ms)^```\n(.*?)^```", section))


def disk(name: str) -> dict[str, object]:
    """A volume for any claim."""
    spec = {"capacity": {"storage": "50Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": f"/disks/{name}"}}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


def run(text: str, folder: Path, plane: ControlPlane) -> str:
    """Run commands in a checkout, as a person does whose kubectl reaches the cluster; return their output."""
    programs = folder / ".programs"
    if not programs.is_dir():
        programs.mkdir()
        (programs / "helm").write_text(HELM.format(helm=tool("helm"), ending=ENDING), encoding="utf-8")
        (programs / "helm").chmod(0o755)
        (programs / "kubectl").symlink_to(needed_programs() / "kubectl")
    path = f"{programs}:{os.environ['PATH']}"
    environment = {"HOME": str(folder), "PATH": path, "KUBECONFIG": str(plane.kubeconfig())}
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", text],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=COMMANDS_SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{plane.kubectl('get', 'pods,pvc', '-A')}"
    return done.stdout


def items(plane: ControlPlane, kind: str, *where: str) -> list[dict[str, Any]]:
    """Return objects of the cluster."""
    found: list[dict[str, Any]] = json.loads(plane.kubectl("get", kind, *where, "--output", "json"))["items"]
    return found


async def test_the_readme_installs_it_and_submits_a_first_job(tmp_path: Path) -> None:
    """Every service becomes ready; the job's pod waits for a GPU; policies are a kind of the cluster."""
    checkout = tmp_path / "checkout"
    for name in ("deploy", "examples"):
        shutil.copytree(ROOT / name, checkout / name)
    with running_plane(tmp_path / "plane", EVERYTHING, with_service_accounts=True) as plane:
        for number in range(3):
            plane.kubectl("create", "--filename", "-", text=json.dumps(node(f"machine-{number}", gpus=0)))
        for number in range(5):
            plane.kubectl("create", "--filename", "-", text=json.dumps(disk(f"disk-{number}")))
        notes = run(commands("Install"), checkout, plane)
        assert "STATUS: deployed" in notes
        deployments = items(plane, "deployments", "--namespace", NAMESPACE)
        assert len(deployments) >= 9
        assert all(one["status"].get("readyReplicas") == one["spec"]["replicas"] for one in deployments)

        access = [line for line in notes.splitlines() if "gpu-admin" in line]
        token = run("\n".join((*access, "echo $GPU_AUTOSCALER_TOKEN")), checkout, plane).splitlines()[-1]
        claims = json.loads(urlsafe_b64decode(f"{token.split('.')[1]}=="))
        assert (claims["aud"], claims["sub"]) == (
            ["gpu-autoscaler.io"], f"system:serviceaccount:{NAMESPACE}:gpu-admin"
        )  # fmt: skip
        roles = {item["roleRef"]["name"] for item in items(plane, "clusterrolebindings")}
        assert "gpu-autoscaler-admin" in roles & {item["metadata"]["name"] for item in items(plane, "clusterroles")}

        run(commands("First job"), checkout, plane)
        pods = await until(lambda: items(plane, "pods", "--selector", "job-name=finetune"))
        assert [pod["status"]["phase"] for pod in pods] == ["Pending"]
        kinds = plane.kubectl("api-resources", "--api-group=gpu-autoscaler.io", "--output", "name")
        assert "autoscalingpolicies.gpu-autoscaler.io" in kinds


def test_the_commands_are_found_on_the_page() -> None:
    """A renamed section would leave nothing to run."""
    assert "helm upgrade --install gpu-autoscaler deploy/charts/gpu-autoscaler" in commands("Install")
    assert "kubectl apply -f examples/" in commands("First job")
    assert commands("No such section") == ""
