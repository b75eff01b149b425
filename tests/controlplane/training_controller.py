"""Kubeflow's Training Operator with its webhooks, as a process for a control plane. Built by `make controlplane`.

Sources: `cmd/training-operator.v1/main.go`, `pkg/cert/cert.go` and `manifests/base/webhook` of
github.com/kubeflow/training-operator v1.8.1 (read 2026-11-24). `training/go.mod` pins it.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.controlplane.controllers import (
    are_served,
    build,
    define,
    give_certificates,
    needed_program,
    running_program,
    webhook_client,
)
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

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
needed = partial(needed_program, TRAINING)
# The operator waits for this file, which a Secret gives it in its pod; the webhook server reads below TMPDIR.
_MOUNTED = Path("/tmp/k8s-webhook-server/serving-certs/tls.crt")  # noqa: S108 - fixed by the operator
_ROTATED = "validator.training-operator.kubeflow.org"


@contextlib.contextmanager
def running(plane: ControlPlane, *flags: str) -> Iterator[None]:
    """Run definitions, controllers and webhooks on this plane. `flags`: further ones of the operator."""
    paths = [f"/apis/kubeflow.org/v1/{plural}" for plural in _PLURALS]
    define(plane, (TRAINING.folder() / f"{plural}.yaml" for plural in _PLURALS), lambda: are_served(plane, paths))
    give_certificates(plane, plane.folder / "training" / "k8s-webhook-server" / "serving-certs")
    _MOUNTED.parent.mkdir(parents=True, exist_ok=True)
    _MOUNTED.touch()
    for document in _rotated():
        plane.kubectl("apply", "-f", "-", text=json.dumps(document))
    webhook, health = free_port(), free_port()
    command = ["--metrics-bind-address=0", f"--health-probe-bind-address={LOOPBACK}:{health}"]
    command += [f"--webhook-server-port={webhook}", *(f"--enable-scheme={plural[:-1]}" for plural in _PLURALS), *flags]
    environment = {
        "PATH": os.environ["PATH"], "TMPDIR": str(plane.folder / "training"), "MY_POD_NAMESPACE": "default"
    }  # fmt: skip
    with running_program(plane, TRAINING, command, health_port=health, environment=environment):
        plane.kubectl("apply", "-f", "-", text=json.dumps(_webhooks(webhook, plane)))
        yield


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
                "clientConfig": webhook_client(plane, port, f"/validate-kubeflow-org-v1-{kind}"),
            }
            for kind in _WITH_WEBHOOKS
        ],
    }


if __name__ == "__main__":
    build(TRAINING)
