"""Nodes of ours that Karpenter ends by itself, with work on them that nobody has told to save.

It answers interruptions, repairs, and ends what `kubectl delete nodeclaim` names: it taints such a node and evicts its
pods at once (Karpenter, `pkg/controllers/node/termination/controller.go`, v1.12.1; read 2026-11-22). That is its to do:
nothing is cordoned or evicted here, and no notice is counted against spot. But pods that save when they are told to
would be told by nobody.

Nothing of it is decided, so nothing is on record but what the pods then carry: what is due follows from the state.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from gpu_autoscaler.core.removing.deleted import is_karpenters
from gpu_autoscaler.core.state import ClusterState
from gpu_autoscaler.core.views import counts_for_idleness, pods_by_node
from gpu_autoscaler.model import labels


class Departure(NamedTuple):
    """A node on its way out by somebody else's hand, and since when."""

    node_name: str
    since: datetime


def departures(state: ClusterState) -> tuple[Departure, ...]:
    """Return the nodes on which a pod is left that was not told since, by name."""
    found = []
    for node in state.nodes.values():
        if (since := node.deleting_since) is None or node.action_id is None or not is_karpenters(node):
            continue
        here = filter(counts_for_idleness, pods_by_node(state).get(node.name, ()))
        if not all(is_told(dict(pod.annotations), since) for pod in here):
            found.append(Departure(node.name, since))
    return tuple(sorted(found))


def is_told(annotations: Mapping[str, str], since: datetime) -> bool:
    """True for a pod that was asked to save by some instant after this one; what is older was about something else."""
    try:
        deadline_at = datetime.fromisoformat(annotations.get(labels.CHECKPOINT_REQUESTED, ""))
    except ValueError:
        return False
    return (deadline_at if deadline_at.tzinfo else deadline_at.replace(tzinfo=UTC)) >= since
