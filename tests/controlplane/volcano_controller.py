"""Volcano's own controllers, as a process for a control plane. Built by `make controlplane`.

Its scheduler and webhooks do not run: the tests admit the PodGroup and bind the pods. Source:
`cmd/controller-manager/app/options/options.go` of volcano.sh/volcano v1.10.0 (read 2026-11-22). `volcano/go.mod` pins
it.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.controlplane.definitions import needed_definition
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

_READY_SECONDS_MAX = 60.0
VOLCANO = Recipe(
    name="volcano-controller",
    words="Volcano's controllers",
    module=Path(__file__).parent / "volcano",
    programs={"controller-manager": "volcano.sh/volcano/cmd/controller-manager"},
)
_QUEUE = '{"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue", "metadata": {"name": "default"}, "spec": {}}'
_SERVED = {
    "jobs.batch.volcano.sh": "/apis/batch.volcano.sh/v1alpha1/jobs",
    "commands.bus.volcano.sh": "/apis/bus.volcano.sh/v1alpha1/commands",
    "podgroups.scheduling.volcano.sh": "/apis/scheduling.volcano.sh/v1beta1/podgroups",
    "queues.scheduling.volcano.sh": "/apis/scheduling.volcano.sh/v1beta1/queues",
}


def needed() -> Path:
    """Return the program. Skips the test if it is not built."""
    program = VOLCANO.folder() / "controller-manager"
    if not program.is_file():
        pytest.skip(f"no controllers of Volcano: {VOLCANO.missing() or 'they are not built yet'}; `make controlplane`")
    return program


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definitions and controllers on this plane."""
    program = needed()
    for name in _SERVED:
        plane.kubectl("apply", "--server-side", "-f", str(needed_definition(name)))
    deadline = time.monotonic() + _READY_SECONDS_MAX
    while any(plane.ask(path)[0] != 200 for path in _SERVED.values()):
        assert time.monotonic() < deadline, "Volcano's kinds were defined and are not served"
        time.sleep(0.1)
    plane.kubectl("apply", "-f", "-", text=_QUEUE)
    command = [str(program), "--kubeconfig", str(plane.kubeconfig()), "--leader-elect=false", "--v=3"]
    command += ["--controllers=job-controller", "--enable-healthz", f"--healthz-address={LOOPBACK}:{free_port()}"]
    with (plane.folder / "logs" / "volcano.log").open("ab") as log:
        process = subprocess.Popen(command, env={"HOME": str(plane.folder)}, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    reason = VOLCANO.missing()
    sys.exit(reason) if reason else sys.stdout.write(f"{VOLCANO.build()}\n")
