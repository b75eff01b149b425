"""Volcano's own controllers, as a process for a control plane. Built by `make controlplane`.

Its scheduler and webhooks do not run: the tests admit the PodGroup and bind the pods. Source:
`cmd/controller-manager/app/options/options.go` of volcano.sh/volcano v1.10.0 (read 2026-11-22). `volcano/go.mod` pins
it.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.controlplane.controllers import are_served, build, define, needed_program, running_program
from tests.controlplane.definitions import needed_definition
from tests.controlplane.plane import LOOPBACK, ControlPlane
from tests.controlplane.recipes import Recipe

from gpu_autoscaler_services.local.child import free_port

VOLCANO = Recipe(
    name="volcano-controller",
    words="Volcano's controllers",
    module=Path(__file__).parent / "volcano",
    programs={"controller-manager": "volcano.sh/volcano/cmd/controller-manager"},
)
needed = partial(needed_program, VOLCANO)
_QUEUE = '{"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue", "metadata": {"name": "default"}, "spec": {}}'
_SERVED = {
    "jobs.batch.volcano.sh": "/apis/batch.volcano.sh/v1alpha1/jobs",
    "commands.bus.volcano.sh": "/apis/bus.volcano.sh/v1alpha1/commands",
    "podgroups.scheduling.volcano.sh": "/apis/scheduling.volcano.sh/v1beta1/podgroups",
    "queues.scheduling.volcano.sh": "/apis/scheduling.volcano.sh/v1beta1/queues",
}


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """Run definitions and controllers on this plane."""
    define(plane, (needed_definition(name) for name in _SERVED), lambda: are_served(plane, _SERVED.values()))
    plane.kubectl("apply", "-f", "-", text=_QUEUE)
    command = ["--kubeconfig", str(plane.kubeconfig()), "--leader-elect=false", "--v=3"]
    command += ["--controllers=job-controller", "--enable-healthz", f"--healthz-address={LOOPBACK}:{free_port()}"]
    with running_program(plane, VOLCANO, command):
        yield


if __name__ == "__main__":
    build(VOLCANO)
