"""Kueue's controller with its webhooks, as a process for a control plane. Built by `make controlplane`.

Sources: `cmd/kueue/main.go`, `apis/config/v1beta1`, `config/components/crd` and `config/components/webhook` of
sigs.k8s.io/kueue v0.9.0, and the definition of ProvisioningRequests in the module of the API that it is built with
(k8s.io/autoscaler/cluster-autoscaler/apis; read 2026-11-27). `kueue/go.mod` pins both.
"""

import base64
import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

_READY_SECONDS_MAX = 60.0
_MODULE = "sigs.k8s.io/kueue"
_PLURALS = (
    "admissionchecks", "clusterqueues", "cohorts", "localqueues", "multikueueclusters", "multikueueconfigs",
    "provisioningrequestconfigs", "resourceflavors", "topologies", "workloadpriorityclasses", "workloads",
)  # fmt: skip
KUEUE = Recipe(
    name="kueue-controller",
    words="Kueue's controller",
    module=Path(__file__).parent / "kueue",
    programs={"kueue": f"{_MODULE}/cmd/kueue"},
    files={
        **{f"{name}.yaml": (_MODULE, f"config/components/crd/bases/kueue.x-k8s.io_{name}.yaml") for name in _PLURALS},
        "provisioningrequests.yaml": (
            "k8s.io/autoscaler/cluster-autoscaler/apis",
            "config/crd/autoscaling.x-k8s.io_provisioningrequests.yaml",
        ),
        "webhooks.yaml": (_MODULE, "config/components/webhook/manifests.yaml"),
    },
)
_DISCOVERED = {
    "kueue.x-k8s.io/v1alpha1": ("cohorts", "topologies"),
    "kueue.x-k8s.io/v1beta1": tuple(name for name in _PLURALS if name not in ("cohorts", "topologies")),
    "autoscaling.x-k8s.io/v1beta1": ("provisioningrequests",),
}
# Both serve on fixed ports, or need its namespace; neither is used here.
_OFF = "VisibilityOnDemand=false,MultiKueue=false"
_GROUPS = ("kueue.x-k8s.io", "batch")  # of the kinds whose webhooks are registered; others are not installed


def needed() -> Path:
    """Return the program. Skips the test if it is not built."""
    program = KUEUE.folder() / "kueue"
    if not program.is_file():
        pytest.skip(f"no controller of Kueue: {KUEUE.missing() or 'it is not built yet'}; `make controlplane`")
    return program


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definitions, controllers and webhooks on this plane."""
    program = needed()
    for name in (*_PLURALS, "provisioningrequests"):
        plane.kubectl("apply", "--server-side", "-f", str(KUEUE.folder() / f"{name}.yaml"))
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while not all(_is_discovered(plane, group, kinds) for group, kinds in _DISCOVERED.items()):
        assert time.monotonic() < deadline, "Kueue's kinds were defined and are not served"
        time.sleep(0.1)
    webhook, health = free_port(), free_port()
    certificates = plane.folder / "kueue"
    certificates.mkdir(exist_ok=True)
    shutil.copyfile(plane.authority.server_certificate, certificates / "tls.crt")
    shutil.copyfile(plane.authority.server_key, certificates / "tls.key")
    settings = plane.folder / "kueue.json"
    settings.write_text(json.dumps(_settings(webhook, health, certificates)), encoding="utf-8")
    environment = {"KUBECONFIG": str(plane.kubeconfig()), "HOME": str(plane.folder)}
    command = [str(program), f"--config={settings}", f"--feature-gates={_OFF}"]
    with (plane.folder / "logs" / "kueue.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _until_ready(process, health, plane)
        for document in _webhooks(webhook, plane):
            plane.kubectl("apply", "-f", "-", text=json.dumps(document))
        yield
        assert process.poll() is None, f"Kueue's controller ended:\n{plane.log_end('kueue')}"
    finally:
        process.kill()
        process.wait()


def _is_discovered(plane: ControlPlane, group: str, kinds: tuple[str, ...]) -> bool:
    """True once discovery lists these kinds: Kueue ends without its own, and goes without ProvisioningRequests."""
    status, body = plane.ask(f"/apis/{group}")
    if status != 200:
        return False
    resources = {resource["name"] for resource in json.loads(body)["resources"]}
    groups = json.loads(plane.ask("/apis")[1])["groups"]
    return resources.issuperset(kinds) and group.partition("/")[0] in {known["name"] for known in groups}


def _settings(webhook: int, health: int, certificates: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health}"},
        "webhook": {"host": LOOPBACK, "port": webhook, "certDir": str(certificates)},
        "integrations": {"frameworks": ["batch/job"]},
    }


def _webhooks(port: int, plane: ControlPlane) -> Iterator[dict[str, Any]]:
    """Its own webhook configurations, with an address instead of a Service."""
    authority = base64.b64encode(plane.authority.certificate.read_bytes()).decode()
    documents = yaml.safe_load_all((KUEUE.folder() / "webhooks.yaml").read_text(encoding="utf-8"))
    for document in documents:
        hooks = [
            {
                **hook,
                "clientConfig": {
                    "url": f"https://{LOOPBACK}:{port}{hook['clientConfig']['service']['path']}",
                    "caBundle": authority,
                },
            }
            for hook in document["webhooks"]
            if all(rule["apiGroups"][0] in _GROUPS for rule in hook["rules"])
        ]
        yield {**document, "metadata": {"name": "kueue"}, "webhooks": hooks}


def _until_ready(process: subprocess.Popen[bytes], health: int, plane: ControlPlane) -> None:
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while True:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"http://{LOOPBACK}:{health}/readyz", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        assert process.poll() is None, f"Kueue's controller ended:\n{plane.log_end('kueue')}"
        assert time.monotonic() < deadline, f"Kueue's controller is not ready:\n{plane.log_end('kueue')}"
        time.sleep(0.1)


if __name__ == "__main__":
    reason = KUEUE.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{KUEUE.build()}\n")
