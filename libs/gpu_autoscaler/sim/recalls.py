"""Invariant: a withdrawn notice empties no node; a drain started only for the notice is canceled.

The node may be drained later for another cause, so each drain is judged by the cause in its own decision.
"""

from collections.abc import Callable

from gpu_autoscaler.events.scaling import ScalingNodeDrained
from gpu_autoscaler.model.decisions import DrainNode, Plan
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons import SpotReclaim
from gpu_autoscaler.sim.cloud import Cloud, Machine
from gpu_autoscaler.sim.timeline import VirtualLoop

NOTICE_ANSWERED = "a notice is answered"
HEARD_SECONDS = 20.0  # without faults, until the scaler knows: a poll, a tick and a step


class Recalls:
    """Tracks withdrawn notices and the drains decided for notices."""

    def __init__(
        self,
        loop: VirtualLoop,
        cloud: Cloud,
        breaks: Callable[[str, str], None],
        *,
        calm_since: Callable[..., float],
    ) -> None:
        """`calm_since`: when the last fault ended, in seconds of the loop."""
        self._loop = loop
        self._cloud = cloud
        self._breaks = breaks
        self._calm_since = calm_since
        self._withdrawn_at: dict[str, float] = {}  # by node name
        self._for_notices: set[ActionId] = set()  # drains decided because of a notice

    def withdrawn(self, machine: Machine) -> None:
        """The cloud withdrew a notice."""
        self._withdrawn_at[machine.node_name] = self._loop.time()

    def withdrawn_at(self, node_name: str) -> float | None:
        """Return when the node's last notice was withdrawn, in seconds of the loop; None if none was."""
        return self._withdrawn_at.get(node_name)

    def planned(self, plan: Plan) -> None:
        """A plan was made."""
        drains = (each for each in plan.decisions if isinstance(each, DrainNode))
        self._for_notices.update(each.action_id for each in drains if isinstance(each.reason, SpotReclaim))

    def drained(self, drained: ScalingNodeDrained) -> None:
        """A node is empty and will be terminated."""
        machine, withdrawn_at = self._cloud.of_node(drained.node_name), self._withdrawn_at.get(drained.node_name)
        if drained.action_id not in self._for_notices or withdrawn_at is None:
            return
        if machine is None or not machine.is_alive or machine.notice is not None or machine.has_broken_gpu:
            return
        if self._loop.time() - max(withdrawn_at, self._calm_since()) > HEARD_SECONDS:
            self._breaks(NOTICE_ANSWERED, f"{drained.node_name} was drained on, its notice taken back long ago")
