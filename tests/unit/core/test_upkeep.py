"""Acts of upkeep: decided once, again after a back-off, within the limits of a plan; the memory rides on plans."""

from datetime import datetime, timedelta

import msgspec
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, TimedFact, node, policy, synced
from tests.support.timed_facts import record

from gpu_autoscaler.core.checked_plan import recomputed_plan
from gpu_autoscaler.core.explain.story import why_node
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.core.state.tables import Batch
from gpu_autoscaler.core.state.upkeep_attempts import RECORDS_COUNT_MAX, fold_upkeep
from gpu_autoscaler.events.node import NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan, RemoveOrphanedNode, Upkeep
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, ProviderId
from gpu_autoscaler.model.reasons.defer import PlanRejected
from gpu_autoscaler.model.reasons.upkeep import InstanceGone

DUE = T0 + HOUR
RULES = policy(watch_age_seconds_max=86_400.0, removal=RemovalPolicy(is_finalizer_on=False))


def orphans(count: int = 1) -> Story:
    """Nodes of ours that have been silent, and whose instances have ended, for half an hour."""
    story: list[TimedFact] = []
    for number in range(count):
        for told in node(f"n{number:03}"):
            story.append(told)
            if isinstance(told.fact, NodeObserved):
                silent = msgspec.structs.replace(told.fact, is_ready=False, version=2)
                story.append(TimedFact(silent, DUE - 30 * MINUTE))
            elif isinstance(told.fact, NodeInstanceObserved):
                over = msgspec.structs.replace(
                    told.fact, state="terminated", version=4, terminated_at=DUE - 30 * MINUTE
                )
                story.append(TimedFact(over, DUE - 30 * MINUTE))
    return tuple(story)


class Plans:
    """Plans of a cluster in which no act ever has an effect; each plan is folded."""

    def __init__(self, story: Story, rules: ScalingPolicy = RULES) -> None:
        self._story = [*story, *synced(story, as_of=DUE)]
        self._rules = rules
        self.state = fold(EMPTY_STATE, record(self._story))

    def plan(self, at: datetime) -> Plan:
        """Return the plan at this instant."""
        made = accepted_plan(self.state, self._rules, at)
        self.fold(made)
        return made

    def fold(self, made: Plan) -> None:
        """Fold a plan, also once more."""
        fact = ScalingPlanMade(
            plan_id=PlanId(made.as_of.isoformat()), plan=made, cut=Cut(), policy_digest="p", core_digest="c"
        )
        self._story.append(TimedFact(fact, made.as_of))
        self.state = fold(self.state, record(self._story)[-1:])

    def why(self, name: str) -> str:
        """Return the story of the node."""
        return "\n".join(why_node(record(self._story), name))


def test_a_decided_act_is_under_way_until_its_next_attempt() -> None:
    """It is neither decided again nor deferred, and the plan notes the instant of the next attempt."""
    plans = Plans(orphans())
    (first,) = plans.plan(DUE).upkeep_decisions
    assert (first.attempts_count, first.retry_at, first.subject) == (1, DUE + 70 * SECOND, "node/uid-n000")
    assert plans.plan(DUE + SECOND).upkeep == Upkeep()
    as_of = TrackedInstant.of(DUE + 69 * SECOND)
    assert plan(plans.state, RULES, as_of).upkeep == Upkeep()
    assert as_of.next_change_at == first.retry_at
    (second,) = plans.plan(first.retry_at).upkeep_decisions
    assert (second.attempts_count, second.retry_at) == (2, first.retry_at + 140 * SECOND)


def test_a_failing_act_is_decided_some_eight_times_an_hour() -> None:
    """The back-off doubles up to ten minutes; from the second attempt on the wait is a deferral."""
    plans = Plans(orphans())
    made = [plans.plan(DUE + number * 30 * SECOND) for number in range(2 * 120)]
    attempts = [decision.attempts_count for each in made for decision in each.upkeep_decisions]
    assert attempts == list(range(1, len(attempts) + 1))
    assert 12 <= len(attempts) <= 15
    (deferral,) = made[-1].upkeep_deferred
    assert (deferral.decision, deferral.objects_count, deferral.subjects) == (
        "remove_orphaned_node", 1, ("node/uid-n000",),
    )  # fmt: skip
    assert deferral.reason.tag() == "upkeep_repeated"
    assert not any(each.upkeep_deferred for each in made[:3]), "the first attempt is no deferral"


def test_attempts_are_counted_anew_after_ten_minutes_without_one() -> None:
    """Then the last one had an effect, or nothing was due."""
    plans = Plans(orphans())
    (first,) = plans.plan(DUE).upkeep_decisions
    (late,) = plans.plan(first.retry_at + 10 * MINUTE + SECOND).upkeep_decisions
    assert late.attempts_count == 1


def test_a_repeated_plan_changes_nothing() -> None:
    """Plans are delivered again, also long after they are forgotten."""
    plans = Plans(orphans())
    first = plans.plan(DUE)
    second = plans.plan(DUE + 70 * SECOND)
    before = plans.state.upkeep
    plans.fold(first)
    assert plans.state.upkeep == before
    plans.plan(second.upkeep_decisions[0].retry_at + 20 * MINUTE)
    assert {known.attempts_count for known in plans.state.upkeep.values()} == {1}
    before = plans.state.upkeep
    plans.fold(second)
    assert plans.state.upkeep == before


def test_one_plan_decides_a_limited_number_of_acts() -> None:
    """The others are deferred with the number of those that are decided, and follow in the next plans."""
    plans = Plans(orphans(200))
    first = plans.plan(DUE)
    assert [decision.subject for decision in first.upkeep_decisions] == [f"node/uid-n{n:03}" for n in range(8)]
    (deferral,) = first.upkeep_deferred
    assert (deferral.reason.tag(), deferral.objects_count, len(deferral.subjects)) == ("plan_full", 192, 64)
    second = plans.plan(DUE + SECOND)
    assert [decision.subject for decision in second.upkeep_decisions] == [f"node/uid-n{n:03}" for n in range(8, 16)]
    assert second.upkeep_deferred[0].objects_count == 184


def test_what_the_plan_check_refused_is_set_aside_alone() -> None:
    """The node's other decisions go on."""
    state = Plans(orphans(2)).state
    reason = PlanRejected(violation="v", attempts_count=1, retry_at=DUE + MINUTE)
    made = plan(state, RULES, DUE, {"upkeep/remove_orphaned_node/node/uid-n000": reason})
    assert [decision.subject for decision in made.upkeep_decisions] == ["node/uid-n001"]
    (deferral,) = made.upkeep_deferred
    assert (deferral.subjects, deferral.reason) == (("node/uid-n000",), reason)


def test_the_number_of_records_is_limited() -> None:
    """Those whose next attempt comes first are removed."""
    acts = tuple(
        RemoveOrphanedNode(
            action_id=ActionId(f"a{number}"), node_uid=NodeUid(f"{number:05}"), node_name="n",
            provider_id=ProviderId("p"), reason=InstanceGone(gone_since=DUE),
            retry_at=DUE + timedelta(seconds=1 + number),
        )
        for number in range(RECORDS_COUNT_MAX + 3)
    )  # fmt: skip
    batch = Batch(ClusterState())
    fold_upkeep(batch, Plan(as_of=DUE, parent_sequence=0, upkeep=Upkeep(decisions=acts)))
    kept = batch.state().upkeep
    assert len(kept) == RECORDS_COUNT_MAX
    assert min(kept) == "upkeep/remove_orphaned_node/node/00003"


def test_a_story_names_decision_attempts_and_deferral() -> None:
    """`why` of the node."""
    plans = Plans(orphans())
    for seconds in (0, 70, 75):
        plans.plan(DUE + seconds * SECOND)
    told = plans.why("n000")
    assert "Remove node object n000 if the cloud confirms the end. The instance of the node has ended" in told
    assert "Deferred for node n000 (step remove_orphaned_node): 2 attempts had no effect so far" in told


def test_a_plan_of_an_earlier_release_is_compared_without_upkeep() -> None:
    """It acted without a record; a replay does not find a difference in each of its plans."""
    state = Plans(orphans()).state
    made = plan(state, RULES, DUE)
    earlier = msgspec.structs.replace(made, upkeep=None)
    assert msgspec.json.decode(msgspec.json.encode(earlier), type=Plan) == earlier
    assert recomputed_plan(earlier, state, RULES) == earlier
    assert recomputed_plan(made, state, RULES) == made
