"""What a process could read: plans that decide by history are recomputed from no more than that."""

from datetime import timedelta

from tests.support.stories import T0

from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import FactId, PlanId
from gpu_autoscaler.sim.adapters.bus import SimBus
from gpu_autoscaler.sim.virtual_time import VirtualLoop


def test_the_bus_notes_where_a_reader_began_after_facts_were_discarded() -> None:
    """A reader of all facts skips nothing; one that comes after the first plan was discarded skips it, once."""
    loop = VirtualLoop()
    bus = SimBus(loop)
    plan = Plan(as_of=T0, parent_sequence=0)
    fact = ScalingPlanMade(plan_id=PlanId("p"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")
    bus.publish(Envelope(id=FactId("p"), source="/test", time=loop.now(), fact=fact))
    assert len(bus.since({}, {ScalingPlanMade})) == 1
    assert bus.skipped == []

    assert bus.discard_plans(timedelta())
    assert bus.since({}, {ScalingPlanMade}) == bus.since({}, {ScalingPlanMade}) == []
    assert bus.skipped == [{"SCALING": 1}]
