"""KubeRay's operator, as a process for a control plane. Built by `make controlplane`.

Sources: `main.go` and `config/crd/bases` of github.com/ray-project/kuberay/ray-operator v1.2.2 (read 2026-11-24).
`ray/go.mod` pins it. No Ray runs: pods start on KWOK, and the dashboard never answers the operator.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

_READY_SECONDS_MAX = 60.0
_MODULE = "github.com/ray-project/kuberay/ray-operator"
_PLURALS = ("rayclusters", "rayjobs", "rayservices")
RAY = Recipe(
    name="ray-controller",
    words="KubeRay's operator",
    module=Path(__file__).parent / "ray",
    programs={"ray-operator": _MODULE},
    files={f"{plural}.yaml": (_MODULE, f"config/crd/bases/ray.io_{plural}.yaml") for plural in _PLURALS},
)


def needed() -> Path:
    """Return the program. Skips the test if it is not built."""
    program = RAY.folder() / "ray-operator"
    if not program.is_file():
        pytest.skip(f"no operator of KubeRay: {RAY.missing() or 'it is not built yet'}; `make controlplane`")
    return program


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definitions and operator on this plane."""
    program = needed()
    for plural in _PLURALS:
        plane.kubectl("apply", "--server-side", "-f", str(RAY.folder() / f"{plural}.yaml"))
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while any(plane.ask(f"/apis/ray.io/v1/{plural}")[0] != 200 for plural in _PLURALS):
        assert time.monotonic() < deadline, "Ray's kinds were defined and are not served"
        time.sleep(0.1)
    command = [str(program), "--metrics-addr=0", f"--health-probe-bind-address={LOOPBACK}:{free_port()}"]
    command.append("--enable-leader-election=false")
    environment = {"KUBECONFIG": str(plane.kubeconfig()), "HOME": str(plane.folder)}
    with (plane.folder / "logs" / "ray.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None, f"KubeRay's operator ended:\n{plane.log_end('ray')}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    reason = RAY.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{RAY.build()}\n")
