"""JobSet's own controller with its webhooks, as a process for a control plane. Built by `make controlplane`.

Sources: `main.go`, `api/config/v1alpha1` and `config/components/webhook/manifests.yaml` of sigs.k8s.io/jobset v0.8.0
(read 2026-11-22). `jobset/go.mod` pins it.
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
from tests.controlplane.definitions import needed_definition
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

_READY_SECONDS_MAX = 60.0
JOBSET = Recipe(
    name="jobset-controller",
    words="JobSet's controller",
    module=Path(__file__).parent / "jobset",
    programs={"jobset": "sigs.k8s.io/jobset"},
)


def needed() -> Path:
    """Return the program. Skips the test if it is not built."""
    program = JOBSET.folder() / "jobset"
    if not program.is_file():
        pytest.skip(f"no controller of JobSet: {JOBSET.missing() or 'it is not built yet'}; `make controlplane`")
    return program


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definition, controller and webhooks on this plane."""
    program = needed()
    plane.kubectl("apply", "--server-side", "-f", str(needed_definition("jobsets.jobset.x-k8s.io")))
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while plane.ask("/apis/jobset.x-k8s.io/v1alpha2/jobsets")[0] != 200:
        assert time.monotonic() < deadline, "JobSets were defined and are not served"
        time.sleep(0.1)
    webhook, health = free_port(), free_port()
    certificates = plane.folder / "jobset"
    certificates.mkdir(exist_ok=True)
    shutil.copyfile(plane.authority.server_certificate, certificates / "tls.crt")
    shutil.copyfile(plane.authority.server_key, certificates / "tls.key")
    settings = plane.folder / "jobset.json"
    settings.write_text(json.dumps(_settings(webhook, health, certificates)), encoding="utf-8")
    environment = {"KUBECONFIG": str(plane.kubeconfig()), "HOME": str(plane.folder)}
    with (plane.folder / "logs" / "jobset.log").open("ab") as log:
        process = subprocess.Popen([str(program), f"--config={settings}"], env=environment, stdout=log, stderr=log)
    try:
        _until_ready(process, health, plane)
        for document in _webhooks(webhook, plane):
            plane.kubectl("apply", "-f", "-", text=json.dumps(document))
        yield
    finally:
        process.kill()
        process.wait()


def _settings(webhook: int, health: int, certificates: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health}"},
        "webhook": {"host": LOOPBACK, "port": webhook, "certDir": str(certificates)},
    }


def _webhooks(port: int, plane: ControlPlane) -> Iterator[dict[str, Any]]:
    """Webhook configurations of its manifests, with an address instead of a Service."""
    authority = base64.b64encode(plane.authority.certificate.read_bytes()).decode()
    groups: dict[str, Any] = {"apiGroups": ["jobset.x-k8s.io"], "apiVersions": ["v1alpha2"], "resources": ["jobsets"]}
    for kind, word in (("MutatingWebhookConfiguration", "mutate"), ("ValidatingWebhookConfiguration", "validate")):
        yield {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": "jobset"},
            "webhooks": [
                {
                    "name": f"{word}.jobset.kb.io",
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "failurePolicy": "Fail",
                    "rules": [{**groups, "operations": ["CREATE", "UPDATE"]}],
                    "clientConfig": {
                        "url": f"https://{LOOPBACK}:{port}/{word}-jobset-x-k8s-io-v1alpha2-jobset",
                        "caBundle": authority,
                    },
                }
            ],
        }


def _until_ready(process: subprocess.Popen[bytes], health: int, plane: ControlPlane) -> None:
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while True:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"http://{LOOPBACK}:{health}/readyz", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        assert process.poll() is None, f"JobSet's controller ended:\n{plane.log_end('jobset')}"
        assert time.monotonic() < deadline, f"JobSet's controller is not ready:\n{plane.log_end('jobset')}"
        time.sleep(0.1)


if __name__ == "__main__":
    reason = JOBSET.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{JOBSET.build()}\n")
