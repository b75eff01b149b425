"""Facts about a policy that runs in shadow: what it would decide. Nobody acts on them."""

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import Cut, Difference, Plan
from gpu_autoscaler.model.ids import PlanId


class ShadowPlanMade(Fact, frozen=True, kw_only=True):
    """What another policy would decide of the real state, and where the policy in force decides otherwise.

    Said when that changes. Both plans are of one state and one instant: that of a real plan, or of the shadow's own
    tick. The state is the real one, so a difference is about what would be done now, not about the fleet that the other
    policy would have had by now (`replay --policy`).
    """

    plan_id: PlanId
    parent_sequence: int  # of the shadow's own last plan in its stream; 0: none. Not `plan.parent_sequence`, a real one
    plan: Plan
    cut: Cut
    policy_digest: str  # of the policy in shadow
    real_policy_digest: str  # of the one in force, that it is compared with
    core_digest: str
    real_plan_id: PlanId | None = None  # the real plan that it stands beside; None: a tick without one
    differences: tuple[Difference, ...] = ()  # in what is done; `made` is the policy in force, `other` the shadow
    service_version: str = ""

    def condition(self) -> str | None:
        """A plan is made once."""
        return f"shadow_plan/{self.plan_id}"

    def entity(self) -> str | None:
        """The plan."""
        return f"shadow_plan/{self.plan_id}"
