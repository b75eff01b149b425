"""KubeRay's operator, as a process for a control plane. Built by `make controlplane`.

Sources: `main.go` and `config/crd/bases` of github.com/ray-project/kuberay/ray-operator v1.2.2 (read 2026-11-24).
`ray/go.mod` pins it. No Ray runs: pods start on KWOK, and the dashboard never answers the operator.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.controlplane.controllers import are_served, build, define, needed_program, running_program
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

_MODULE = "github.com/ray-project/kuberay/ray-operator"
_PLURALS = ("rayclusters", "rayjobs", "rayservices")
RAY = Recipe(
    name="ray-controller",
    words="KubeRay's operator",
    module=Path(__file__).parent / "ray",
    programs={"ray-operator": _MODULE},
    files={f"{plural}.yaml": (_MODULE, f"config/crd/bases/ray.io_{plural}.yaml") for plural in _PLURALS},
)
needed = partial(needed_program, RAY)


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definitions and operator on this plane."""
    paths = [f"/apis/ray.io/v1/{plural}" for plural in _PLURALS]
    define(plane, (RAY.folder() / f"{plural}.yaml" for plural in _PLURALS), lambda: are_served(plane, paths))
    command = ["--metrics-addr=0", f"--health-probe-bind-address={LOOPBACK}:{free_port()}"]
    with running_program(plane, RAY, [*command, "--enable-leader-election=false"]):
        yield


if __name__ == "__main__":
    build(RAY)
