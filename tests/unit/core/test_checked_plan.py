"""A planner with a bug: what the plan check refuses is set aside, everything else goes on."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    given,
    node,
    notice,
    offer,
    on_sale,
    pod,
    policy,
    record,
)

from gpu_autoscaler.core import checked_plan as module
from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.check.violation import Violation
from gpu_autoscaler.core.checked_plan import ROUNDS_COUNT_MAX, CheckedPlan, checked_plan, recomputed_plan
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.rejections import BACKOFF_SECONDS_MAX
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, Cut, Deferred, Plan, Rejection
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.reasons.defer import PlanRejected
from gpu_autoscaler.model.reasons.defer_limits import Frozen
from gpu_autoscaler.model.reasons.drain import SpotReclaim

RULES = policy(nodes_count_max=50)
BAD, GOOD = "pod/uid-bad", "pod/uid-good"
LATER = T0 + 10 * SECOND  # no burst is under way
Bug = Callable[[Plan], Plan]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Bug], None]]:
    """Plant a bug in the planner: it changes each plan that is made."""

    def planted(bug: Bug) -> None:
        def broken(
            state: ClusterState,
            rules: ScalingPolicy,
            as_of: datetime,
            rejected: Mapping[str, PlanRejected] | None = None,
        ) -> Plan:
            return bug(plan(state, rules, as_of, rejected))

        monkeypatch.setattr(module, "plan", broken)

    yield planted
    monkeypatch.undo()


def cluster(*stories: Story) -> ClusterState:
    """Return a cluster with two waiting pods and a node under notice."""
    doomed = (*node("doomed", offer(gpus=8)), *notice("doomed", reclaim_at=T0 + 2 * MINUTE))
    waiting = (*pod("bad", gpus=8), *pod("good", gpus=8))
    return given(on_sale(offer(gpus=8)), doomed, waiting, *stories)


def misprice(made: Plan) -> Plan:
    """Buy for the bad pod at a price that no offer has."""
    return replace(made, decisions=tuple(map(_mispriced, made.decisions)))


def _mispriced(decision: AnyDecision) -> AnyDecision:
    if isinstance(decision, BuyNode) and BAD in getattr(decision.reason, "demand", ()):
        return replace(decision, offer=replace(decision.offer, price_micro_usd_per_hour=1))
    return decision


def served(made: Plan) -> set[str]:
    """Return the demand that is bought for."""
    return {key for buy in made.purchases for key in getattr(buy.reason, "demand", ())}


def drained(made: Plan) -> set[str]:
    """Return the nodes that are drained."""
    return {decision.node_name for decision in made.drains}


def deferral(made: Plan, subject: str) -> Deferred:
    """Return the deferral of the subject."""
    (held,) = (held for held in made.deferred if held.subject == subject)
    return held


def accepted(checked: CheckedPlan) -> Plan:
    """Return the plan, which must be there."""
    assert checked.plan is not None
    return checked.plan


def stored(state: ClusterState, made: Plan) -> ClusterState:
    """Return the state with this plan as the last one; its facts are as fresh as it is."""
    fact = ScalingPlanMade(
        plan_id=PlanId(made.as_of.isoformat()), plan=made, cut=Cut(), policy_digest="p", core_digest="c"
    )
    sequence = state.last_plan_sequence + 1
    (recorded,) = record((TimedFact(fact, made.as_of),))
    return fold(state, [replace(recorded, sequence=sequence)])


def rejections_only(state: ClusterState) -> ClusterState:
    """Return a fresh cluster that knows what was set aside, and nothing else of the plans."""
    return replace(cluster(), rejections=state.rejections)


def test_the_sentence_of_a_rejection_is_cut(plant: Callable[[Bug], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan stays small, whatever its violations name."""
    monkeypatch.setattr(module, "VIOLATION_LENGTH_MAX", 20)
    plant(misprice)
    (rejection,) = accepted(checked_plan(cluster(), RULES, LATER)).rejected
    assert len(rejection.violation) == 20


def test_sound_plan_is_left_as_it_is() -> None:
    """Nothing is set aside, and the plan is byte for byte that of the planner."""
    state = cluster()
    checked = checked_plan(state, RULES, LATER)
    assert checked.violations == ()
    assert checked.plan == plan(state, RULES, LATER)
    assert served(accepted(checked)) == {BAD, GOOD}


def test_refused_purchase_is_set_aside_and_the_rest_goes_out(plant: Callable[[Bug], None]) -> None:
    """The other pod is served, the node under notice is drained, and the plan that goes out passes the check."""
    state = cluster()
    plant(misprice)
    checked = checked_plan(state, RULES, LATER)
    made = accepted(checked)
    assert any("not an available offer" in violation for violation in checked.violations)
    assert (served(made), drained(made)) == ({GOOD}, {"doomed"})
    assert check(made, state, RULES) == ()
    (rejection,) = made.rejected
    assert rejection.subjects == (BAD,)
    reason = deferral(made, BAD).reason
    assert isinstance(reason, PlanRejected)
    assert (reason.attempts_count, reason.retry_at) == (1, LATER + MINUTE)
    assert "not an available offer" in reason.sentence()
    assert "Report it" in reason.remedy()


def test_purchase_for_deferred_demand_sets_only_that_demand_aside(plant: Callable[[Bug], None]) -> None:
    """The plan that defers what it buys for serves the other pod and drains the node under notice."""

    def deferred_too(made: Plan) -> Plan:
        if BAD not in served(made):
            return made
        return replace(made, deferred=(*made.deferred, Deferred(step="limits", subject=BAD, reason=Frozen())))

    state = cluster()
    plant(deferred_too)
    checked = checked_plan(state, RULES, LATER)
    made = accepted(checked)
    (violation,) = checked.violations
    assert isinstance(violation, Violation)
    assert (violation.demand, violation.action_ids) == ((BAD,), frozenset())
    assert "is bought for pod/uid-bad, which frozen defers" in violation
    assert (served(made), drained(made)) == ({GOOD}, {"doomed"})
    assert isinstance(deferral(made, BAD).reason, PlanRejected)


def test_set_aside_demand_is_retried_after_its_back_off(plant: Callable[[Bug], None]) -> None:
    """Until then no plan is refused again; each refusal in a row doubles the wait; with the bug gone it is served."""
    plant(misprice)
    state = rejections_only(stored(cluster(), accepted(checked_plan(cluster(), RULES, LATER))))
    before = checked_plan(state, RULES, LATER + MINUTE - SECOND)
    assert before.violations == ()
    assert isinstance(deferral(accepted(before), BAD).reason, PlanRejected)
    again = accepted(checked_plan(state, RULES, LATER + MINUTE))
    (rejection,) = again.rejected
    assert rejection.retry_at == LATER + 3 * MINUTE
    plant(lambda made: made)
    assert BAD in served(accepted(checked_plan(state, RULES, LATER + MINUTE)))


def test_back_off_has_a_limit_and_is_forgotten(plant: Callable[[Bug], None]) -> None:
    """At most an hour between two attempts; an hour after the last one the count starts anew."""
    plant(misprice)
    state = cluster()
    waits = []
    for _ in range(9):
        made = accepted(checked_plan(rejections_only(state), RULES, LATER))
        (rejection,) = made.rejected
        waits.append((rejection.retry_at - LATER) / SECOND)
        state = stored(
            state, replace(made, rejected=(replace(rejection, retry_at=LATER - MINUTE + len(waits) * SECOND),))
        )
    assert waits[:4] == [60.0, 120.0, 240.0, 480.0]
    assert max(waits) == waits[-1] == BACKOFF_SECONDS_MAX
    old = {BAD: replace(state.rejections[BAD], retry_at=LATER - 2 * HOUR)}
    late = accepted(checked_plan(replace(cluster(), rejections=old), RULES, LATER))
    assert late.rejected[0].retry_at == LATER + MINUTE


def test_recorded_plan_is_recomputed_byte_for_byte(plant: Callable[[Bug], None]) -> None:
    """With the same bug, what was set aside follows from the state."""
    state = cluster()
    plant(misprice)
    for at in (LATER, LATER + 30 * SECOND, LATER + 90 * SECOND):
        made = accepted(checked_plan(state, RULES, at))
        assert msgspec.json.encode(recomputed_plan(made, state, RULES)) == msgspec.json.encode(made)
        state = stored(state, made)


def test_drains_that_no_notice_allows_are_dropped_and_real_ones_kept(plant: Callable[[Bug], None]) -> None:
    """What the cloud forces is judged as well, and never set aside for longer than one plan."""
    state = cluster(node("fine", offer(gpus=8)))
    fine = next(known for known in state.nodes.values() if known.name == "fine")

    def drain_another(made: Plan) -> Plan:
        real = made.drains[0]
        wrong = replace(
            real, action_id=ActionId("wrong"), node_uid=fine.node_uid, node_name="fine", provider_id=fine.provider_id
        )
        return replace(made, decisions=(*made.decisions, wrong))

    plant(drain_another)
    made = accepted(checked_plan(state, RULES, LATER))
    assert drained(made) == {"doomed"}
    assert all(isinstance(decision.reason, SpotReclaim) for decision in made.decisions)
    assert fine.node_uid not in {subject for rejection in made.rejected for subject in rejection.subjects}


def test_violation_without_a_cause_leaves_only_what_the_cloud_forces(plant: Callable[[Bug], None]) -> None:
    """Another node under notice is forgotten by the planner: the known one is drained, the purchases wait."""
    state = cluster(node("forgotten", offer(gpus=8)), notice("forgotten", reclaim_at=T0 + 2 * MINUTE))

    def forget(made: Plan) -> Plan:
        kept = (decision for decision in made.decisions if getattr(decision, "node_name", "") != "forgotten")
        return replace(made, decisions=tuple(kept))

    plant(forget)
    checked = checked_plan(state, RULES, LATER)
    made = accepted(checked)
    assert any("nothing drains it" in violation for violation in checked.violations)
    assert (served(made), drained(made), made.rejected) == (set(), {"doomed"}, ())
    assert isinstance(deferral(made, GOOD).reason, PlanRejected)


def test_bug_that_moves_on_each_round_ends_with_what_the_cloud_forces(plant: Callable[[Bug], None]) -> None:
    """The rounds are bounded; what was named on the way is set aside, and the next plan goes on from there."""
    waiting = tuple(part for number in range(2 * ROUNDS_COUNT_MAX) for part in pod(f"w{number}", gpus=8))
    state = cluster(waiting)

    def misprice_first(made: Plan) -> Plan:
        purchases = made.purchases
        wrong = [replace(buy, offer=replace(buy.offer, price_micro_usd_per_hour=1)) for buy in purchases[:1]]
        others = [decision for decision in made.decisions if decision not in purchases[:1]]
        return replace(made, decisions=(*wrong, *others))

    plant(misprice_first)
    made = accepted(checked_plan(state, RULES, LATER))
    assert (served(made), drained(made)) == (set(), {"doomed"})
    assert len(made.rejected) == ROUNDS_COUNT_MAX
    then = stored(state, made)
    assert len(then.rejections) == ROUNDS_COUNT_MAX


def test_more_than_the_table_takes_leaves_what_the_cloud_forces(
    plant: Callable[[Bug], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan names a bounded number of subjects; nothing is published beyond the drains."""
    monkeypatch.setattr(module, "REJECTIONS_COUNT_MAX", 1)
    plant(lambda made: replace(made, decisions=tuple(map(_without_price, made.decisions))))
    made = accepted(checked_plan(cluster(), RULES, LATER))
    assert (served(made), drained(made)) == (set(), {"doomed"})
    assert sum(len(rejection.subjects) for rejection in made.rejected) <= 1


def _without_price(decision: AnyDecision) -> AnyDecision:
    if not isinstance(decision, BuyNode):
        return decision
    return replace(decision, offer=replace(decision.offer, price_micro_usd_per_hour=None))


def test_state_keeps_a_bounded_number_of_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose next attempt comes first are removed."""
    monkeypatch.setattr("gpu_autoscaler.core.intake.fold.REJECTIONS_COUNT_MAX", 3)
    rejected = tuple(
        Rejection(violation="v", subjects=(f"pod/{number}",), retry_at=T0 + number * MINUTE) for number in range(1, 6)
    )
    state = stored(given(), Plan(as_of=T0, parent_sequence=0, rejected=rejected))
    assert sorted(state.rejections) == ["pod/3", "pod/4", "pod/5"]


def test_rejections_are_forgotten_an_hour_after_their_end() -> None:
    """Whatever plan comes next; a repeated delivery of a plan counts once."""
    first = Plan(
        as_of=T0, parent_sequence=0, rejected=(Rejection(violation="v", subjects=("pod/a",), retry_at=T0 + MINUTE),)
    )
    state = stored(stored(given(), first), first)
    assert state.rejections["pod/a"].attempts_count == 1
    kept = stored(state, Plan(as_of=T0 + HOUR, parent_sequence=2))
    assert set(kept.rejections) == {"pod/a"}
    assert stored(kept, Plan(as_of=T0 + HOUR + 2 * MINUTE, parent_sequence=3)).rejections == {}


def test_violation_names_decisions_and_demand() -> None:
    """And is its sentence."""
    violation = Violation("too much", demand=("pod/a",))
    assert violation == "too much"
    assert (violation.action_ids, violation.demand, violation.is_attributed) == (frozenset(), ("pod/a",), True)
    assert not Violation("something is wrong").is_attributed
