"""Kueue's controller with its webhooks, as a process for a control plane. Built by `make controlplane`.

Sources: `cmd/kueue/main.go`, `apis/config/v1beta1`, `config/components/crd` and `config/components/webhook` of
sigs.k8s.io/kueue v0.9.0, and the definition of ProvisioningRequests in the module of the API that it is built with
(k8s.io/autoscaler/cluster-autoscaler/apis; read 2026-11-27). `kueue/go.mod` pins both.
"""

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.controlplane.controllers import (
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
needed = partial(needed_program, KUEUE)
_DISCOVERED = {
    "kueue.x-k8s.io/v1alpha1": ("cohorts", "topologies"),
    "kueue.x-k8s.io/v1beta1": tuple(name for name in _PLURALS if name not in ("cohorts", "topologies")),
    "autoscaling.x-k8s.io/v1beta1": ("provisioningrequests",),
}
# Both serve on fixed ports, or need its namespace; neither is used here.
_OFF = "VisibilityOnDemand=false,MultiKueue=false"
_GROUPS = ("kueue.x-k8s.io", "batch")  # of the kinds whose webhooks are registered; others are not installed


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definitions, controllers and webhooks on this plane."""
    define(
        plane,
        (KUEUE.folder() / f"{name}.yaml" for name in (*_PLURALS, "provisioningrequests")),
        lambda: all(_is_discovered(plane, group, kinds) for group, kinds in _DISCOVERED.items()),
    )
    webhook, health = free_port(), free_port()
    certificates = give_certificates(plane, plane.folder / "kueue")
    settings = plane.folder / "kueue.json"
    settings.write_text(json.dumps(_settings(webhook, health, certificates)), encoding="utf-8")
    with running_program(plane, KUEUE, [f"--config={settings}", f"--feature-gates={_OFF}"], health_port=health):
        for document in _webhooks(webhook, plane):
            plane.kubectl("apply", "-f", "-", text=json.dumps(document))
        yield


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
    documents = yaml.safe_load_all((KUEUE.folder() / "webhooks.yaml").read_text(encoding="utf-8"))
    for document in documents:
        hooks = [
            {**hook, "clientConfig": webhook_client(plane, port, hook["clientConfig"]["service"]["path"])}
            for hook in document["webhooks"]
            if all(rule["apiGroups"][0] in _GROUPS for rule in hook["rules"])
        ]
        yield {**document, "metadata": {"name": "kueue"}, "webhooks": hooks}


if __name__ == "__main__":
    build(KUEUE)
