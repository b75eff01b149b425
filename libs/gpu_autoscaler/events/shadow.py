"""Facts about a shadow policy: what it would decide. Nothing acts on them."""

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import Cut, Difference, Plan
from gpu_autoscaler.model.ids import PlanId


class ShadowPlanMade(Fact, frozen=True, kw_only=True):
    """What another policy would decide in the real state, and where the active policy decides differently.

    Published when that changes. Both plans have the same state and time: those of a real plan, or of the shadow's own
    tick. The state is the real one: differences are about the next decisions, not about the fleet that the other policy
    would have by now (`replay --policy`).
    """

    plan_id: PlanId
    parent_sequence: int  # of the previous shadow plan, in its stream; 0: none. `plan` has that of a real plan
    plan: Plan  # of the shadow policy
    cut: Cut
    policy_digest: str  # of the shadow policy
    real_policy_digest: str  # of the active policy
    core_digest: str
    real_plan_id: PlanId | None = None  # the real plan compared with; None: a tick without one
    differences: tuple[Difference, ...] = ()  # in decisions; `made` is the active policy, `other` the shadow policy
    service_version: str = ""

    def condition(self) -> str | None:
        """One fact per plan."""
        return f"shadow_plan/{self.plan_id}"

    def entity(self) -> str | None:
        return f"shadow_plan/{self.plan_id}"
