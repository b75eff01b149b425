"""JobSet's own controller with its webhooks, as a process for a control plane. Built by `make controlplane`.

Sources: `main.go`, `api/config/v1alpha1` and `config/components/webhook/manifests.yaml` of sigs.k8s.io/jobset v0.8.0
(read 2026-11-22). `jobset/go.mod` pins it.
"""

import contextlib
import json
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
from tests.controlplane.definitions import needed_definition
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

JOBSET = Recipe(
    name="jobset-controller",
    words="JobSet's controller",
    module=Path(__file__).parent / "jobset",
    programs={"jobset": "sigs.k8s.io/jobset"},
)
needed = partial(needed_program, JOBSET)


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definition, controller and webhooks on this plane."""
    path = "/apis/jobset.x-k8s.io/v1alpha2/jobsets"
    define(plane, [needed_definition("jobsets.jobset.x-k8s.io")], lambda: are_served(plane, [path]))
    webhook, health = free_port(), free_port()
    certificates = give_certificates(plane, plane.folder / "jobset")
    settings = plane.folder / "jobset.json"
    settings.write_text(json.dumps(_settings(webhook, health, certificates)), encoding="utf-8")
    with running_program(plane, JOBSET, [f"--config={settings}"], health_port=health):
        for document in _webhooks(webhook, plane):
            plane.kubectl("apply", "-f", "-", text=json.dumps(document))
        yield


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
                    "clientConfig": webhook_client(plane, port, f"/{word}-jobset-x-k8s-io-v1alpha2-jobset"),
                }
            ],
        }


if __name__ == "__main__":
    build(JOBSET)
