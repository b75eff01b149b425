"""AutoscalingPolicy objects for tests, and the definition that a server needs for them."""

from pathlib import Path
from typing import Any

from tests.controlplane.plane import ControlPlane

DEFINITION_FILE = Path(__file__).resolve().parents[2] / "deploy/charts/gpu-autoscaler/crds/autoscalingpolicies.yaml"


def defined(plane: ControlPlane) -> None:
    """Install the definition; returns when the server serves it."""
    plane.kubectl("apply", "-f", str(DEFINITION_FILE))
    plane.kubectl("wait", "--for=condition=Established", "crd/autoscalingpolicies.gpu-autoscaler.io", "--timeout=60s")


def policy(name: str, **spec: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """An AutoscalingPolicy; one pool of its own name where none is said."""
    return {
        "apiVersion": "gpu-autoscaler.io/v1alpha1",
        "kind": "AutoscalingPolicy",
        "metadata": {"name": name},
        "spec": {"nodePools": [{"name": name}]} | spec,
    }
