"""AutoscalingPolicy objects for tests, and the definition that a server needs for them."""

import time
from pathlib import Path
from typing import Any

from tests.controlplane.plane import ControlPlane

DEFINITION_FILE = Path(__file__).resolve().parents[2] / "deploy/charts/gpu-autoscaler/crds/autoscalingpolicies.yaml"
SERVED_SECONDS_MAX = 60.0


def defined(plane: ControlPlane) -> None:
    """Install the definition; returns when the server serves it."""
    plane.kubectl("apply", "-f", str(DEFINITION_FILE))
    served(plane)


def served(plane: ControlPlane) -> None:
    """Wait until the definition that was installed is served."""
    plane.kubectl("wait", "--for=condition=Established", "crd/autoscalingpolicies.gpu-autoscaler.io", "--timeout=60s")
    deadline = time.monotonic() + SERVED_SECONDS_MAX
    while True:  # established, and told to clients that look for its short name a moment later
        try:
            plane.kubectl("get", "asp")
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def policy(name: str, **spec: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Return an AutoscalingPolicy; without pools it gets one pool of its own name."""
    return {
        "apiVersion": "gpu-autoscaler.io/v1alpha1",
        "kind": "AutoscalingPolicy",
        "metadata": {"name": name},
        "spec": {"nodePools": [{"name": name}]} | spec,
    }
