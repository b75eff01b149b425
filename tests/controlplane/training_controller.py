"""Kubeflow's Training Operator with its webhooks, as a process for a control plane. Built by `make controlplane`.

Sources: `cmd/training-operator.v1/main.go`, `pkg/cert/cert.go` and `manifests/base/webhook` of
github.com/kubeflow/training-operator v1.8.1 (read 2026-11-24). `training/go.mod` pins it.
"""

import base64
import contextlib
import json
import os
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
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

_READY_SECONDS_MAX = 60.0
_MODULE = "github.com/kubeflow/training-operator"
_PLURALS = ("pytorchjobs", "tfjobs", "mpijobs")
_WITH_WEBHOOKS = ("pytorchjob", "tfjob")  # 1.8.1 validates no MPIJob on admission
TRAINING = Recipe(
    name="training-controller",
    words="Kubeflow's Training Operator",
    module=Path(__file__).parent / "training",
    programs={"training-operator": f"{_MODULE}/cmd/training-operator.v1"},
    files={f"{plural}.yaml": (_MODULE, f"manifests/base/crds/kubeflow.org_{plural}.yaml") for plural in _PLURALS},
)
# The operator waits for this file, which a Secret gives it in its pod; the webhook server reads below TMPDIR.
_MOUNTED = Path("/tmp/k8s-webhook-server/serving-certs/tls.crt")  # noqa: S108 - fixed by the operator
_ROTATED = "validator.training-operator.kubeflow.org"


def needed() -> Path:
    """Return the program. Skips the test if it is not built."""
    program = TRAINING.folder() / "training-operator"
    if not program.is_file():
        pytest.skip(f"no Training Operator: {TRAINING.missing() or 'it is not built yet'}; `make controlplane`")
    return program


@contextlib.contextmanager
def running(plane: ControlPlane, *flags: str) -> Iterator[None]:
    """Run definitions, controllers and webhooks on this plane. `flags`: further ones of the operator."""
    program = needed()
    for plural in _PLURALS:
        plane.kubectl("apply", "--server-side", "-f", str(TRAINING.folder() / f"{plural}.yaml"))
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while any(plane.ask(f"/apis/kubeflow.org/v1/{plural}")[0] != 200 for plural in _PLURALS):
        assert time.monotonic() < deadline, "Kubeflow's kinds were defined and are not served"
        time.sleep(0.1)
    certificates = plane.folder / "training" / "k8s-webhook-server" / "serving-certs"
    certificates.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(plane.authority.server_certificate, certificates / "tls.crt")
    shutil.copyfile(plane.authority.server_key, certificates / "tls.key")
    _MOUNTED.parent.mkdir(parents=True, exist_ok=True)
    _MOUNTED.touch()
    for document in _rotated():
        plane.kubectl("apply", "-f", "-", text=json.dumps(document))
    webhook, health = free_port(), free_port()
    command = [str(program), "--metrics-bind-address=0", f"--health-probe-bind-address={LOOPBACK}:{health}"]
    command += [f"--webhook-server-port={webhook}", *(f"--enable-scheme={plural[:-1]}" for plural in _PLURALS), *flags]
    environment = {
        "KUBECONFIG": str(plane.kubeconfig()),
        "HOME": str(plane.folder),
        "PATH": os.environ["PATH"],
        "TMPDIR": str(plane.folder / "training"),
        "MY_POD_NAMESPACE": "default",
    }
    with (plane.folder / "logs" / "training.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _until_ready(process, health, plane)
        plane.kubectl("apply", "-f", "-", text=json.dumps(_webhooks(webhook, plane)))
        yield
    finally:
        process.kill()
        process.wait()


def _rotated() -> Iterator[dict[str, Any]]:
    """What the operator writes its own certificates into. The webhooks here use the certificates of the plane."""
    yield {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "training-operator-webhook-cert"}}
    yield {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": _ROTATED},
    }


def _webhooks(port: int, plane: ControlPlane) -> dict[str, Any]:
    """Webhook configuration of its manifests, with an address instead of a Service."""
    authority = base64.b64encode(plane.authority.certificate.read_bytes()).decode()
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "training"},
        "webhooks": [
            {
                "name": f"validator.{kind}.training-operator.kubeflow.org",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "rules": [
                    {
                        "apiGroups": ["kubeflow.org"],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE", "UPDATE", "DELETE"],
                        "resources": [f"{kind}s"],
                    }
                ],
                "clientConfig": {
                    "url": f"https://{LOOPBACK}:{port}/validate-kubeflow-org-v1-{kind}",
                    "caBundle": authority,
                },
            }
            for kind in _WITH_WEBHOOKS
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
        assert process.poll() is None, f"the Training Operator ended:\n{plane.log_end('training')}"
        assert time.monotonic() < deadline, f"the Training Operator is not ready:\n{plane.log_end('training')}"
        time.sleep(0.1)


if __name__ == "__main__":
    reason = TRAINING.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{TRAINING.build()}\n")
