"""A service that makes empty plans, for tests of the fence and of the lease."""

from datetime import datetime
from typing import ClassVar

from tests.support.runners import Probe

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.runtime.service import Outcome, Outputs


class Planner(Probe):
    """Makes a plan when the test asks for one."""

    name = "planner"
    folds: ClassVar[tuple[type[Fact], ...]] = (ScalingPlanMade,)
    publishes: ClassVar[tuple[type[Fact], ...]] = (ScalingPlanMade,)
    tick_seconds: ClassVar[float | None] = 0.01
    wanted = 0

    async def on_tick(self, now: datetime) -> Outputs:
        await super().on_tick(now)
        return plan_of(self, now) if self.wanted else ()


def plan_of(planner: Planner, now: datetime) -> Outcome:
    """Return the next plan of this planner, fenced by the last one that it knows."""
    parent = planner.view.state.last_plan_sequence
    fact = ScalingPlanMade(
        plan_id=PlanId(f"{id(planner)}-{len(planner.ticks)}-{now.isoformat()}"),
        plan=Plan(as_of=now, parent_sequence=parent),
        cut=planner.view.cut,
        policy_digest="p",
        core_digest="c",
    )
    folded = dict(planner.view.cut.last_sequences).get("SCALING", 0)
    return Outcome(facts=(fact,), expected_last_sequence=parent, folded_sequence=folded)
