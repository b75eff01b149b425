"""A process that plans on each tick and drains nothing: the real scaler's ticks over a state that does not change."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import ClassVar

import msgspec
from prometheus_client import CollectorRegistry
from tests.support.runners import Probe
from tests.support.stories import T0, Story, given, policy

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import DeferredGroup
from gpu_autoscaler.model.reasons.defer import NoOfferFits
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler.sim.adapters.store import MemoryStore, Tables
from gpu_autoscaler_services.scaler.inventory import InstancesListed
from gpu_autoscaler_services.scaler.recovery import DecisionRecovery
from gpu_autoscaler_services.scaler.service import Digests, Scaler


class _NoExecutor:
    """Executes nothing."""


async def _no_instances() -> AsyncIterator[InstancesListed]:
    """A cloud without instances."""
    yield InstancesListed(instances=(), listed_at=T0)


class Planner(Probe):
    """Plans as of T0 and receives its own plans. `deferred_bytes`: of further groups in each plan."""

    name: ClassVar[str] = "scaler"
    consumes: ClassVar[tuple[type[Fact], ...]] = (ScalingPlanMade,)
    publishes: ClassVar[tuple[type[Fact], ...]] = Scaler.publishes
    tick_seconds: ClassVar[float | None] = 0.1

    def __init__(self, *stories: Story, deferred_bytes: int = 0) -> None:
        super().__init__()
        state_view = StateView()
        state_view.advance(given(*stories), {"JOB": 1})
        self._deferred_bytes = deferred_bytes
        self.scaler = Scaler(
            state_view,
            policy(),
            executor=_NoExecutor(),  # type: ignore[arg-type]  # nothing is carried out here
            recovery=DecisionRecovery(MemoryStore(Tables()), policy()),
            instances=_no_instances(),
            digests=Digests(policy="p", core="c"),
            metrics=Metrics("scaler", CollectorRegistry()),
        )

    async def on_tick(self, now: datetime) -> Outputs:
        """Return the scaler's plan, with more that it defers."""
        self.ticks.append(now)
        outcome = await self.scaler.on_tick(T0)
        if not isinstance(outcome, Outcome):
            return outcome
        outcome = msgspec.structs.replace(outcome, expected_last_sequence=0)  # the stream is empty
        if not self._deferred_bytes:
            return outcome
        (made,) = outcome.facts
        assert isinstance(made, ScalingPlanMade)
        group = DeferredGroup(
            step="cover_demand", kind="pod", reason=NoOfferFits(detail="x" * self._deferred_bytes), objects_count=7
        )
        longer = msgspec.structs.replace(made.plan, deferred_groups=(*made.plan.deferred_groups, group))
        return msgspec.structs.replace(outcome, facts=(msgspec.structs.replace(made, plan=longer),))

    @property
    def plans(self) -> list[ScalingPlanMade]:
        """The plans that came back."""
        return [recorded.fact for recorded in self.given if isinstance(recorded.fact, ScalingPlanMade)]

    def drained(self) -> list[str]:
        """The nodes that the first plan that came back drains."""
        return [decision.node_name for decision in self.plans[0].plan.drains]
