"""Requeue: a job that has quota and cannot start does not keep others from that quota for ever."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import MINUTE, T0, TimedFact, given, job, node, offer, on_sale, policy
from tests.support.timed_facts import record

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.quotas import requeue_key
from gpu_autoscaler.core.explain.story import why_job
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.queueing.preemption import preemptions
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan, RequeueJob, Upkeep
from gpu_autoscaler.model.ids import JobId, PlanId
from gpu_autoscaler.model.reasons.defer_limits import CohortQuotaReached
from gpu_autoscaler.model.reasons.upkeep import QuotaUnused

SIX_MINUTES_AGO = T0 - 6 * MINUTE
# One project and its quota of 8 GPUs; there is one node, and nothing can be bought.
RULES = policy(quotas={"projects": [{"name": "research", "gpu_count_max": 8}]})
# Projects a and b lend each other 4 GPUs each.
COHORT = policy(quotas={"projects": [{"name": name, "nominal_gpu_count": 4} for name in ("a", "b")]})


def waiting(*, as_of: datetime = T0, **changes: Any) -> ClusterState:  # noqa: ANN401 - fields of the first job
    """The first job needs a model that nobody sells, the second one would fit on the node."""
    first = job("first", model="H100", **{"at": SIX_MINUTES_AGO, **changes})
    second = job("second", gpus=4, at=T0 - MINUTE)
    return given(node("n1"), on_sale(offer("L4")), first, second, as_of=as_of)


def requeues(made: Plan) -> list[RequeueJob]:
    """The jobs that the plan requeues."""
    return [act for act in made.upkeep_decisions if isinstance(act, RequeueJob)]


def made_at(made: Plan) -> TimedFact:
    """The fact of the plan."""
    fact = ScalingPlanMade(plan_id=PlanId("p"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    return TimedFact(fact, made.as_of)


def after(made: Plan, state: ClusterState) -> ClusterState:
    """The state with the recorded plan."""
    return fold(state, record((made_at(made),)))


def started(state: ClusterState, rules: ScalingPolicy, at: datetime) -> list[str]:
    """The jobs that start."""
    return [str(placement.job_id) for placement in schedule(state, rules, at).placements]


def test_a_job_that_no_capacity_serves_lets_others_use_its_quota() -> None:
    """The plan records it with the bar and who waits; the second job starts, for a minute first of all."""
    state = waiting()
    assert started(state, RULES, T0) == []
    made = accepted_plan(state, RULES, T0)
    (act,) = requeues(made)
    assert act.reason == QuotaUnused(
        barred_by="no_offer_fits", waiting_job=JobId("second"), waits_since=SIX_MINUTES_AGO
    )
    assert (act.retry_at, act.attempt) == (T0 + MINUTE, 0)
    assert "Requeue job first" in act.sentence()

    recorded = after(made, state)
    assert started(recorded, RULES, T0) == ["second"]
    assert requeues(plan(recorded, RULES, T0)) == []
    assert started(recorded, RULES, T0 + MINUTE) == [], "its turn again"


def test_why_job_shows_what_barred_it_and_which_job_waits() -> None:
    """The story of the requeued job has the recorded act."""
    state = waiting()
    history = record([*job("first", model="H100", at=SIX_MINUTES_AGO), made_at(plan(state, RULES, T0))])
    (line,) = [line for line in why_job(history, "first") if "Requeue job first" in line]
    assert "(no_offer_fits)" in line
    assert "Job second waits for that quota." in line


def test_the_wait_doubles_up_to_an_hour() -> None:
    """Each turn of a job that still cannot start costs the others one plan; the turns become rare."""
    state, at, waits = waiting(), T0, []
    for _ in range(8):
        made = plan(state, RULES, at)
        (act,) = requeues(made)
        waits.append((act.retry_at - at) / MINUTE)
        at = act.retry_at
        state = msgspec.structs.replace(waiting(as_of=at), upkeep=after(made, state).upkeep)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("rules", "changes"),
    [
        (RULES, {"at": T0 - 4 * MINUTE}),
        (policy(quotas={"projects": [{"name": "research", "gpu_count_max": 16}]}), {}),
        (policy(), {}),
        (RULES, {"project_id": "other", "namespace": "other"}),
    ],
    ids=["it waits for four minutes", "quota is left", "there are no quotas", "it is another quota"],
)
def test_a_job_keeps_its_turn(rules: ScalingPolicy, changes: dict[str, Any]) -> None:
    """As long as a shortage may pass, or nobody waits for what it has."""
    assert requeues(plan(waiting(**changes), rules, T0)) == []


def test_jobs_behind_it_in_a_strict_queue_take_no_quota_either() -> None:
    """They cannot start before it; a job of another queue of the cohort can."""
    strict = QueuePolicy(name="strict", scheduling_policy="fcfs-strict", projects=("a",))
    rules = msgspec.structs.replace(COHORT, queues=(strict,))
    state = given(
        node("n1"),
        on_sale(offer("L4")),
        job("head", model="H100", gpus=4, project_id="a", at=SIX_MINUTES_AGO),
        job("behind", gpus=4, project_id="a", at=SIX_MINUTES_AGO + MINUTE),
        job("other", gpus=8, project_id="b", at=T0 - MINUTE),
    )
    made = plan(state, rules, T0)
    assert [act.job_id for act in requeues(made)] == ["head"]
    assert check(made, state, rules) == ()
    assert started(after(made, state), rules, T0) == ["other"]


def test_a_requeued_job_reclaims_nothing() -> None:
    """The borrower that uses its quota would end for a job that still could not start."""
    owner = job("owner", model="H100", gpus=4, project_id="a", at=SIX_MINUTES_AGO)
    state = given(node("n1"), on_sale(offer("L4")), owner, job("borrower", gpus=8, project_id="b", at=T0 - MINUTE))
    recorded = after(plan(state, COHORT, T0), state)
    assert started(recorded, COHORT, T0) == ["borrower"]
    borrower = job("borrower", gpus=8, project_id="b", at=T0 - MINUTE, placed_on=("n1",), is_running=True)
    running = (node("n1"), owner, borrower)

    def ends(at: datetime) -> list[str]:
        both = msgspec.structs.replace(given(*running, as_of=at), upkeep=recorded.upkeep)
        made = schedule(both, COHORT, at)
        assert any(isinstance(held.reason, CohortQuotaReached) for held in made.deferred)
        return [str(each.job_id) for each in preemptions(both, COHORT, at, scheduled=made, barred={})]

    assert ends(T0) == []
    assert ends(T0 + 5 * MINUTE) == [], "it has had its turn for four minutes"
    assert ends(T0 + 6 * MINUTE) == ["borrower"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": 1}, {}),
        ({"job_id": JobId("unknown")}, {}),
        ({"retry_at": T0 + timedelta(hours=2)}, {}),
        ({}, {"waiting_job": JobId("first")}),
        ({}, {"waiting_job": JobId("unknown")}),
        ({}, {"waits_since": T0 - 4 * MINUTE}),
    ],
)
def test_the_plan_check_refuses_each_wrong_requeue(changes: dict[str, Any], reason: dict[str, Any]) -> None:
    """It reads the state again: another attempt, no such job, too long, nobody waits, too early."""
    state = waiting()
    made = plan(state, RULES, T0)
    (act,) = requeues(made)
    changed = msgspec.structs.replace(act, reason=msgspec.structs.replace(act.reason, **reason), **changes)
    judged = msgspec.structs.replace(made, upkeep=Upkeep(decisions=(changed,)))
    assert any(act.action_id in violation.action_ids for violation in check(judged, state, RULES))


def test_a_new_attempt_begins_with_its_turn() -> None:
    """The act names the attempt, so that a job that ran meanwhile is not held for what was before."""
    assert requeue_key(JobId("a"), 0) != requeue_key(JobId("a"), 1)
