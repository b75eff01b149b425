"""What the rules of the second opinion read of all pods, read once for all of them: ten thousand are many to go through
with each plan. Called by `core/check.py` and the rules beside it; `plan` reads them for itself."""

from collections.abc import Mapping

import msgspec

from gpu_autoscaler.core.remembered import remembered
from gpu_autoscaler.events.pod import PodObserved
from gpu_autoscaler.model.ids import JobId, PodUid


class PodsRead(msgspec.Struct, frozen=True):
    """What was found."""

    unbound: tuple[PodObserved, ...]  # on no node, in the order of the state
    mind_neighbours: bool  # some pod has a rule about who stands beside it


@remembered(2)
def pods_read(pods: Mapping[PodUid, PodObserved]) -> PodsRead:
    """Return what is to be known of these pods."""
    unbound: list[PodObserved] = []
    mind_neighbours = False
    for pod in pods.values():
        if pod.node_name is None:
            unbound.append(pod)
        if pod.neighbours is not None:
            mind_neighbours = True
    return PodsRead(tuple(unbound), mind_neighbours)


def job_named(key: str) -> JobId | None:
    """Return the job of `job/<id>` and of `member/<id>/<number>`, one beyond its gang; None: it is a pod's."""
    kind, _, name = key.partition("/")
    return JobId(name) if kind == "job" else JobId(name.rpartition("/")[0]) if kind == "member" else None
