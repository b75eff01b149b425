"""Real Karpenter with its KWOK provider, as a process beside a control plane for tests.

Sources: `kwok/main.go`, `kwok/cloudprovider/helpers.go` and `pkg/operator/options` of sigs.k8s.io/karpenter v1.12.1
(read 2026-11-21). `controller/go.mod` pins it; it is built into a cache outside of the repository.
"""

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.controlplane.plane import ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler.model.money import MICRO_USD_PER_USD
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler_services.local.child import free_port

_MODULE = "sigs.k8s.io/karpenter"
_READY_SECONDS_MAX = 60.0
_DEFINITIONS = ("nodepools", "nodeclaims", "nodeoverlays")
KARPENTER = Recipe(
    name="karpenter-controller",
    words="Karpenter",
    module=Path(__file__).parent / "controller",
    programs={"karpenter": f"{_MODULE}/kwok"},
    files={
        **{f"{name}.yaml": (_MODULE, f"pkg/apis/crds/karpenter.sh_{name}.yaml") for name in _DEFINITIONS},
        "kwoknodeclasses.yaml": (_MODULE, "kwok/apis/crds/karpenter.kwok.sh_kwoknodeclasses.yaml"),
    },
)


NODE_CLASS = "karpenter.kwok.sh/KWOKNodeClass/default"


def node_class(name: str = "default", boot_seconds: int = 0) -> str:
    """What its machines are made from: they register so long after they were ordered."""
    spec = {"spec": {"nodeRegistrationDelay": f"{boot_seconds}s"}} if boot_seconds else {}
    return json.dumps(
        {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass", "metadata": {"name": name}, **spec}
    )


def node_pool(limits: Mapping[str, str]) -> str:
    """Return a NodePool of all on-demand offers without consolidation."""
    requirements = [
        {"key": key, "operator": "In", "values": values}
        for key, values in (
            ("kubernetes.io/arch", ["amd64"]),
            ("kubernetes.io/os", ["linux"]),
            ("karpenter.sh/capacity-type", ["on-demand"]),
        )
    ]
    reference = {"name": "default", "kind": "KWOKNodeClass", "group": "karpenter.kwok.sh"}
    pool = {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": "default"},
        "spec": {
            "template": {"spec": {"requirements": requirements, "nodeClassRef": reference, "expireAfter": "Never"}},
            "limits": dict(limits),
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "Never"},
        },
    }
    return json.dumps(pool)


def instance_types(offers: Iterable[Offer]) -> list[dict[str, Any]]:
    """The same offers in the form that its provider reads."""
    by_type: dict[str, list[Offer]] = {}
    for offer in offers:
        by_type.setdefault(offer.instance_type, []).append(offer)
    return [
        {
            "name": name,
            "architecture": "amd64",
            "operatingSystems": ["linux"],
            "resources": {
                "cpu": f"{sold[0].resources.cpu_milli}m",
                "memory": str(sold[0].resources.memory_bytes),
                "ephemeral-storage": str(sold[0].resources.ephemeral_storage_bytes),
                "pods": str(sold[0].resources.pod_count),
                GPU_RESOURCE: str(sold[0].resources.gpu_count),
            },
            "offerings": [_offering(offer) for offer in sold],
        }
        for name, sold in by_type.items()
    ]


def _offering(offer: Offer) -> dict[str, Any]:
    assert offer.price_micro_usd_per_hour is not None, f"{offer.key} has no price, which is not free"
    where = (("karpenter.sh/capacity-type", offer.capacity_type.value), ("topology.kubernetes.io/zone", offer.zone))
    return {
        "Price": offer.price_micro_usd_per_hour / MICRO_USD_PER_USD,
        "Available": True,
        "Requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in where],
    }


@contextlib.contextmanager
def running(
    plane: ControlPlane,
    offers: Iterable[Offer],
    limits: Mapping[str, str] | None,
    boot_seconds: int = 0,
    gates: str = "",
) -> Iterator[subprocess.Popen[bytes]]:
    """Karpenter on this plane, with a pool that may buy these offers up to the limits; None: without any pool, so that
    it buys what others claim, and nothing else. `gates`: features that are switched otherwise than it has them."""
    folder = KARPENTER.folder()
    for name in (*_DEFINITIONS, "kwoknodeclasses"):
        plane.kubectl("apply", "--server-side", "-f", str(folder / f"{name}.yaml"))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
    types = plane.folder / "instance-types.json"
    types.write_text(json.dumps(instance_types(offers)))
    environment = {
        "KUBECONFIG": str(plane.kubeconfig()),
        "SYSTEM_NAMESPACE": "kube-system",
        "DISABLE_LEADER_ELECTION": "true",
        "INSTANCE_TYPES_FILE_PATH": str(types),
        "METRICS_PORT": str(free_port()),
        "HEALTH_PROBE_PORT": str(health := free_port()),
        "KARPENTER_SERVICE": "karpenter",
        "HOME": str(plane.folder),
        **({"FEATURE_GATES": gates} if gates else {}),
    }
    with (plane.folder / "logs" / "karpenter.log").open("ab") as log:
        process = subprocess.Popen([str(folder / "karpenter")], env=environment, stdout=log, stderr=log)
    try:
        _until_healthy(process, health, plane)
        plane.kubectl("apply", "-f", "-", text=node_class(boot_seconds=boot_seconds))
        if limits is not None:
            plane.kubectl("apply", "-f", "-", text=node_pool(limits))
            plane.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "nodepool/default")
        yield process
    finally:
        process.kill()
        process.wait()


def _until_healthy(process: subprocess.Popen[bytes], port: int, plane: ControlPlane) -> None:
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while True:
        assert process.poll() is None, plane.log_end("karpenter")
        assert time.monotonic() < deadline, plane.log_end("karpenter")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    reason = KARPENTER.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{KARPENTER.build()}\n")
