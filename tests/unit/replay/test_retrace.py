"""Ticks between two recorded plans: an act that the last plan decided is under way, and no difference."""

import msgspec
import pytest
from tests.support.stories import MINUTE, SECOND, TimedFact, record
from tests.unit.core.test_upkeep import DUE, RULES, Plans, orphans

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.events.node import NodeInstanceListed
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan, Upkeep
from gpu_autoscaler.model.ids import PlanId
from gpu_autoscaler.replay.recording import Head, Recording
from gpu_autoscaler.replay.retrace import retrace
from gpu_autoscaler.runtime.history import Stored

STATE = Plans(orphans()).state
MADE = plan(STATE, RULES, DUE)
UNTIL = DUE + MINUTE  # the next attempt is due ten seconds later


def recording(made: Plan) -> Recording:
    """The plan, and the scaler's heartbeats afterwards."""
    fact = ScalingPlanMade(plan_id=PlanId("p1"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    alive = [NodeInstanceListed(provider_ids=(), listed_at=DUE + count * SECOND) for count in range(1, 91)]
    story = (TimedFact(fact, DUE), *(TimedFact(listed, listed.listed_at) for listed in alive))
    facts = [Stored(at=entry.envelope.time, recorded=entry) for entry in record(story)]
    return Recording(head=Head(policy=RULES, from_at=DUE, to_at=UNTIL, state=STATE), facts=facts)


@pytest.mark.parametrize("made", [MADE, msgspec.structs.replace(MADE, upkeep=None)], ids=["now", "release 0.2"])
def test_an_act_under_way_is_no_difference(made: Plan) -> None:
    """Neither after its plan, nor after a plan of a release that had no record of its acts."""
    assert [decision.tag() for decision in MADE.upkeep_decisions] == ["remove_orphaned_node"]
    result = retrace(recording(made))
    assert result.ticks_count == 11
    assert [deviation.difference.kind for deviation in result.decisions] == []


def test_an_act_that_no_plan_decided_is_a_difference() -> None:
    """A plan of this release that lacks it."""
    result = retrace(recording(msgspec.structs.replace(MADE, upkeep=Upkeep())))
    kinds = [deviation.difference.kind for deviation in result.decisions]
    assert kinds == ["nothing -> remove_orphaned_node (instance_gone)"]
