"""Acts of upkeep as the plan of a state decides them, carried out at once."""

from collections.abc import Callable
from datetime import UTC, datetime

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.kube.checkpoint_hooks import CheckpointHooks
from gpu_autoscaler.kube.protocol import KubeApi
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.providers.protocol import CapacityProvider
from gpu_autoscaler_services.scaler.checkpoint_notices import CheckpointNotices
from gpu_autoscaler_services.scaler.finalizers import Finalizers
from gpu_autoscaler_services.scaler.idle_workloads import IdleWorkloads
from gpu_autoscaler_services.scaler.node_taints import NodeTaints
from gpu_autoscaler_services.scaler.orphaned_nodes import OrphanedNodes
from gpu_autoscaler_services.scaler.request_answers import RequestAnswers
from gpu_autoscaler_services.scaler.upkeep import UpkeepSteps


def steps_of(
    kube: KubeApi, provider: CapacityProvider, now: Callable[[], datetime], hooks: CheckpointHooks | None = None
) -> UpkeepSteps:
    """Return the steps on this cluster and cloud."""
    return UpkeepSteps(
        Finalizers(kube),
        NodeTaints(kube),
        CheckpointNotices(kube, hooks),
        OrphanedNodes(kube, provider),
        RequestAnswers(kube),
        IdleWorkloads(kube),
        now,
    )


class PlannedUpkeep:
    """Plans and carries out at instants that the test chooses. No plan is folded: each one is a first attempt."""

    def __init__(self, kube: KubeApi, provider: CapacityProvider, hooks: CheckpointHooks | None = None) -> None:
        self._at = datetime.min.replace(tzinfo=UTC)
        self._steps = steps_of(kube, provider, lambda: self._at, hooks)

    async def take(self, state: ClusterState, policy: ScalingPolicy, at: datetime) -> list[Fact]:
        """Carry out what a plan of this state decides; return the facts about it."""
        self._at = at
        decisions = plan(state, policy, at).upkeep_decisions
        return [fact for decision in decisions for fact in await self._steps.take(decision, PlanId("p"))]
