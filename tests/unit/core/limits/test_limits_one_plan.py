"""One plan holds a bounded number of decisions; the next one continues, and drains under notice never wait."""

from collections import Counter
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.situations import Situation, situations
from tests.support.stories import MINUTE, T0, given, job, node, notice, offer, on_sale, pod, policy

from gpu_autoscaler.bus.streams import MESSAGE_BYTES_MAX
from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.deferred_groups import GROUPS_BYTES_MAX
from gpu_autoscaler.core.limits import limits
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.provisioning.batching import replan_seconds
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, Plan
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import PlanFull


def waiting_for_next(made: Plan) -> set[str]:
    """What the plan leaves to the next one."""
    return {entry.subject for entry in made.deferred if isinstance(entry.reason, PlanFull)}


def test_the_next_plan_continues_at_once() -> None:
    """Three nodes a plan: the first pods have nodes, the others are deferred by name, and a plan follows at once."""
    state = given(on_sale(offer(gpus=1)), *(pod(f"p{number}") for number in range(8)))
    with patch.object(limits, "PURCHASES_COUNT_MAX", 3):
        made = plan(state, policy(), T0)

    assert len(made.purchases) == 3
    assert len(waiting_for_next(made)) == 5
    assert check(made, state, policy()) == ()
    assert replan_seconds(made, 5.0) == pytest.approx(0.05)
    assert len(plan(state, policy(), T0).purchases) == 8, "the real limit is far above"


def test_a_gang_is_never_cut() -> None:
    """A gang that does not fit waits as a whole, and fills the next plan alone even if it is larger than a plan."""
    gang = job("train", members=6)
    offers = on_sale(offer())
    alone = given(offers, gang)
    both = given(offers, gang, *(pod(f"p{number}", gpus=8, priority=1) for number in range(2)))
    with patch.object(limits, "PURCHASES_COUNT_MAX", 4):
        first, last = plan(both, policy(), T0), plan(alone, policy(), T0)

    assert {decision.gang for decision in first.purchases} == {None}
    assert waiting_for_next(first) == {"job/train"}
    assert [decision.gang for decision in last.purchases] == ["job/train"] * 6


def test_a_gang_that_no_plan_can_hold_says_so_and_blocks_nothing() -> None:
    """It is deferred with that reason; what comes after it is bought."""
    state = given(on_sale(offer()), job("train", members=6, priority=900), pod("p", gpus=8))
    with patch.multiple(limits, TRANSACTION_BYTES_MAX=2_000, PURCHASES_BYTES_MAX=2_000):
        made = plan(state, policy(), T0)

    (reason,) = {entry.reason for entry in made.deferred if entry.subject == "job/train"}
    assert reason == PlanFull(decisions_count=0, nodes_count=6, is_too_large=True)
    assert "6 nodes at once" in reason.sentence()
    assert [decision.gang for decision in made.purchases] == [None]
    assert replan_seconds(made, 5.0) is None


def test_drains_under_notice_are_in_the_first_plan() -> None:
    """Also if the plan has no place for a single purchase or other removal."""
    nodes = [entry for name in ("a", "b", "c") for entry in (node(name), notice(name, reclaim_at=T0 + 2 * MINUTE))]
    state = given(on_sale(offer()), *nodes, *(pod(f"p{number}", gpus=8) for number in range(3)))
    with patch.multiple(limits, PURCHASES_COUNT_MAX=0, REMOVALS_COUNT_MAX=0):
        made = plan(state, policy(), T0)

    assert {decision.node_name for decision in made.drains} == {"a", "b", "c"}
    assert len(made.purchases) == 1, "the first purchase of a plan always fits"


@settings(max_examples=200, deadline=None)
@for_all(situations(), st.integers(0, 2), st.integers(0, 1))
def test_a_cut_plan_keeps_every_promise(situation: Situation, purchases_max: int, removals_max: int) -> None:
    """The plan check accepts it: gangs are whole, all demand is accounted for, nodes under notice are drained."""
    with patch.multiple(limits, PURCHASES_COUNT_MAX=purchases_max, REMOVALS_COUNT_MAX=removals_max):
        made = plan(situation.state, situation.policy, situation.as_of)
    whole = plan(situation.state, situation.policy, situation.as_of)

    assert check(made, situation.state, situation.policy) == ()
    wanted = [_without_demand(decision) for decision in whole.decisions]
    # A node that work beside the gang uses is bought without the gang that the plan cannot hold.
    assert all(_without_demand(decision) in wanted for decision in made.decisions) or any(
        decision.transaction for decision in whole.purchases
    )
    gangs = Counter(decision.gang for decision in made.purchases if decision.gang)
    assert gangs.items() <= Counter(decision.gang for decision in whole.purchases).items()
    assert len(made.releases) + sum(drain.is_voluntary for drain in made.drains) <= removals_max


def _without_demand(decision: AnyDecision) -> AnyDecision:
    if not isinstance(decision, BuyNode) or not isinstance(decision.reason, UnmetDemand):
        return decision
    return msgspec.structs.replace(decision, reason=msgspec.structs.replace(decision.reason, demand=()))


def test_the_largest_plan_fits_the_broker() -> None:
    """Purchases, one gang beyond, removals and groups together stay below what the broker stores."""
    state = given(on_sale(offer()), node("a"), notice("a"), pod("x", on="a"))
    (drain, *_) = plan(state, policy(), T0).drains
    drain_bytes = len(msgspec.json.encode(drain))
    most = max(limits.PURCHASES_BYTES_MAX, limits.TRANSACTION_BYTES_MAX)

    assert most + limits.REMOVALS_COUNT_MAX * 2 * drain_bytes + GROUPS_BYTES_MAX < MESSAGE_BYTES_MAX
