"""Preemption: nominal quota is reclaimed from borrowers, priority counts only where buying is barred."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import MINUTE, SECOND, T0, Story, TimedFact, given, job, node, on_sale, pod, policy, quota
from tests.support.timed_facts import record

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.disruption.protection import request_annotations
from gpu_autoscaler.core.draft import Preemption, save_key
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.queueing import preemption
from gpu_autoscaler.core.queueing.preemption import barred_jobs, may_need_priority, preemptions
from gpu_autoscaler.core.queueing.schedule import Schedule, schedule
from gpu_autoscaler.core.state.state import ClusterState, UpkeepRecord
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Cut, Plan, RequestPreemptionCheckpoint, Upkeep
from gpu_autoscaler.model.ids import JobId, PlanId
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import CohortQuotaReached, PreemptedForJob
from gpu_autoscaler.model.reasons.defer_waits import QueueHeadWaits
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted, QuotaReclaimed

NODES: Story = (*node("n1"), *node("n2"))


def cohort(**settings: Any) -> ScalingPolicy:  # noqa: ANN401 - fields of QuotasPolicy
    """Projects a and b with 8 GPUs each, in one cohort."""
    projects = [{"name": name, "gpu_count_max": None, "nominal_gpu_count": 8} for name in ("a", "b")]
    return policy(quotas={"projects": projects, **settings})


def running(
    name: str,
    project: str = "a",
    *,
    gpus: int = 4,
    on: str = "n1",
    saved_at: str | None = None,
    marks: dict[str, str] | None = None,
    **changes: Any,  # noqa: ANN401 - fields of JobSpec
) -> Story:
    """A running job of one member, which saves checkpoints if `saved_at` is set."""
    annotations = {**(marks or {}), **({} if saved_at is None else {labels.CHECKPOINTED_AT: saved_at})}
    return (
        *job(name, gpus=gpus, project_id=project, placed_on=(on,), is_running=True, **changes),
        *pod(f"{name}-0", on=on, gpus=gpus, job_id=name, owner_kind="Job", annotations=annotations),
    )


def chosen(state: ClusterState, rules: ScalingPolicy) -> tuple[Preemption, ...]:
    """The attempts that are to end at T0."""
    made = schedule(state, rules, T0)
    barred = barred_jobs(plan(state, rules, T0).deferred) if may_need_priority(state, rules, made.deferred) else {}
    return preemptions(state, rules, T0, scheduled=made, barred=barred)


def names(state: ClusterState, rules: ScalingPolicy) -> list[str]:
    """The jobs whose attempt is to end, in order."""
    return [str(preemption.job_id) for preemption in chosen(state, rules)]


def why(state: ClusterState, rules: ScalingPolicy, job_id: str) -> DeferReason:
    """Why this job does not start."""
    (reason,) = [held.reason for held in schedule(state, rules, T0).deferred if held.subject == f"job/{job_id}"]
    return reason


def four_of_a(**changes: Any) -> list[Story]:  # noqa: ANN401 - fields of JobSpec
    """Project a uses 16 of the cohort's 16 GPUs, 8 of them borrowed."""
    return [running(f"a{number}", on="n1" if number < 3 else "n2", **changes) for number in (1, 2, 3, 4)]


# ---- nominal quota


def test_a_project_reclaims_its_nominal_quota_from_a_borrower() -> None:
    """B needs 4 of its 8 GPUs: one job of a ends, and the reason names both projects."""
    state = given(NODES, *four_of_a(), job("b1", gpus=4, project_id="b"))

    (preemption,) = chosen(state, cohort())
    assert preemption.attempt == 1
    assert preemption.reason == QuotaReclaimed(
        for_job=JobId("b1"), for_project="b", project="a", cohort="default", borrowed_gpu_count=8, nominal_gpu_count=8
    )


def test_nothing_beyond_the_nominal_quota_is_reclaimed() -> None:
    """B may have 8 of its own, not 12; and a keeps its own 8, whoever needs them."""
    twelve = given(NODES, *four_of_a(), job("b1", gpus=4, members=3, project_id="b"))
    own = given(NODES, running("a1"), running("a2"), running("b1", "b", gpus=8, on="n2"), job("b2", project_id="b"))

    assert names(twelve, cohort()) == []
    assert names(own, cohort()) == []


def test_a_project_whose_own_job_ends_now_reclaims_once_it_has_ended() -> None:
    """A uses 10 of 8: a2 ends for b. Until it has, a is not within its quota and takes nothing back from c."""
    rules = policy(quotas={"projects": [{"name": name, "nominal_gpu_count": 8} for name in ("a", "b", "c")]})
    of_a = (running("a1"), running("a2", gpus=6, on="n2", priority=0))
    of_c = (running("c1", "c", gpus=8, on="n3"), running("c2", "c", gpus=3, on="n4", priority=0))
    waiting = (job("b2", gpus=5, project_id="b"), job("a3", gpus=4, project_id="a", at=T0 + SECOND))
    nodes = (*NODES, *node("n3"), *node("n4"))
    state = given(nodes, *of_a, running("b1", "b", gpus=3, priority=900), *of_c, *waiting)

    assert names(state, rules) == ["a2"]


def test_nothing_is_reclaimed_while_quota_is_free() -> None:
    """A uses 12 of 16; 4 are free for b."""
    state = given(NODES, *four_of_a()[:3], job("b1", gpus=4, project_id="b"))

    assert names(state, cohort()) == []
    assert names(given(NODES, *four_of_a()), cohort()) == []


def test_jobs_behind_the_head_of_a_strict_queue_reclaim_nothing() -> None:
    """With more quota they would wait for the head all the same."""
    rules = msgspec.structs.replace(cohort(), queues=(QueuePolicy(name="all", scheduling_policy="fcfs-strict"),))
    first = job("b1", gpus=2, project_id="b", model="H100", at=T0 - 2 * MINUTE)
    state = given(NODES, *four_of_a()[:3], first, job("b2", gpus=6, project_id="b", at=T0 - MINUTE))

    assert why(state, rules, "b2") == QueueHeadWaits(queue="all", job_id=JobId("b1"))
    assert names(state, rules) == []
    assert names(state, cohort()) == ["a1"]


def test_jobs_that_wait_for_capacity_keep_the_quota_that_they_were_granted() -> None:
    """Of b's nominal quota of 8 the first two jobs have 4, so the third one would borrow: nobody ends for it."""
    first = job("b1", gpus=2, project_id="b", model="H100", at=T0 - 3 * MINUTE)
    second = job("b2", gpus=2, project_id="b", model="H100", at=T0 - 2 * MINUTE)
    third = job("b3", gpus=5, project_id="b", at=T0 - MINUTE)
    state = given(NODES, *four_of_a()[:3], first, second, third)

    assert isinstance(why(state, cohort(), "b3"), CohortQuotaReached)
    assert names(state, cohort()) == []


def test_a_job_that_a_resource_quota_refuses_reclaims_nothing() -> None:
    """Its pods could not be created with any quota of the policy."""
    waiting = job("b1", gpus=4, project_id="b", namespace="b")
    full = quota("gpus", {"requests.nvidia.com/gpu": 2}, namespace="b")

    assert names(given(NODES, *four_of_a(), waiting, full), cohort()) == []
    assert names(given(NODES, *four_of_a(), waiting), cohort()) == ["a1"]


def test_reclaiming_can_be_turned_off() -> None:
    """Then the owner waits until borrowers end."""
    state = given(NODES, *four_of_a(), job("b1", gpus=4, project_id="b"))

    assert names(state, cohort(is_reclaim_on=False)) == []


def test_victims_are_of_the_lowest_priority_first_then_by_the_latest_checkpoint() -> None:
    """Priority decides, then the newer save; a job without a checkpoint loses most and comes last."""
    old, new = (T0 - 30 * MINUTE).isoformat(), (T0 - MINUTE).isoformat()
    story = (
        running("a1", on="n1", priority=900, saved_at=new),
        running("a2", on="n1", saved_at=""),
        running("a3", on="n2", saved_at=old),
        running("a4", on="n2", saved_at=new),
    )
    assert names(given(NODES, *story, job("b1", gpus=4, project_id="b")), cohort()) == ["a4"]
    assert names(given(NODES, *story, job("b1", project_id="b")), cohort()) == ["a4", "a3"]


def test_a_job_that_was_asked_to_save_stays_the_victim() -> None:
    """Otherwise each save of another job would move the choice, and nobody would ever end."""
    new = (T0 - MINUTE).isoformat()
    story = (running("a1", saved_at=""), running("a2", saved_at=new), *four_of_a()[2:])
    state = given(NODES, *story, job("b1", gpus=4, project_id="b"))

    assert names(state, cohort()) == ["a2"]
    asked = UpkeepRecord(attempts_count=1, retry_at=T0, decided_at=T0)
    assert names(msgspec.structs.replace(state, upkeep={save_key(JobId("a1"), 1): asked}), cohort()) == ["a1"]


def test_a_protected_job_is_no_victim() -> None:
    """By the annotation of its pods or of its request, or because it is not preemptible."""
    story = (
        running("a1", marks={labels.DO_NOT_DISRUPT: "true"}),
        running("a2", is_preemptible=False),
        running("a3", on="n2", pod_annotations={labels.KARPENTER_DO_NOT_DISRUPT: "true"}),
        running("a4", on="n2", marks={labels.SAFE_TO_EVICT: "false"}),
    )
    assert names(given(NODES, *story, job("b1", gpus=4, project_id="b")), cohort()) == []


def test_no_victim_ends_in_vain() -> None:
    """B needs 8, only 4 are not protected: nobody ends. And a small victim is spared beside a larger one."""
    guarded = {labels.DO_NOT_DISRUPT: "true"}
    story = (running("a1"), *(running(name, on="n2", marks=guarded) for name in ("a2", "a3", "a4")))
    assert names(given(NODES, *story, job("b1", project_id="b")), cohort()) == []

    mixed = (running("a1", gpus=8, priority=500), running("a2", on="n2", priority=100), running("a3", on="n2"))
    assert names(given(NODES, *mixed, job("b1", project_id="b")), cohort()) == ["a1"]


def preempted(job_id: str, for_job: str) -> Story:
    """The job was preempted for another."""
    reason = PriorityPreempted(for_job=JobId(for_job), for_priority=1000, priority=100, barred_by="gpus_limit")
    fact = JobPreempted(job_id=JobId(job_id), attempt=1, cause="preempted", preempted_at=T0, preemption=reason)
    return (TimedFact(fact, T0),)


def test_the_victim_keeps_its_quota_until_its_pods_are_gone() -> None:
    """Then the beneficiary starts, and the victim waits for that."""
    pods = running("a1", gpus=8)
    without_pods = job("a1", gpus=8, project_id="a", placed_on=("n1",), is_running=True)
    needs = job("b1", project_id="b", gpus=8)
    rest = (node("n1"), *four_of_a()[2:])

    ending = given(*rest, node("n2"), pods, preempted("a1", "b1"), needs)
    assert isinstance(reason := why(ending, cohort(), "a1"), PreemptedForJob)
    assert reason.pods_remaining_count == 1
    assert why(ending, cohort(), "b1").tag() == "cohort_quota_reached"
    assert names(ending, cohort()) == []  # its quota is about to return

    ended = given(*rest, node("n2"), without_pods, preempted("a1", "b1"), needs)
    assert {str(placement.job_id) for placement in schedule(ended, cohort(), T0).placements} == {"b1"}
    assert why(ended, cohort(), "a1") == PreemptedForJob(for_job=JobId("b1"), until=T0 + timedelta(seconds=600))


def test_nothing_is_bought_for_a_victim_before_its_pods_are_gone() -> None:
    """The other job has its place already. The pods still use the victim's quota; its next attempt needs it again."""
    victim = job("a1", gpus=8, project_id="a", placed_on=("n1",), is_running=True)
    deleted = pod("a1-0", on="n1", gpus=8, job_id="a1", owner_kind="Job", deleting_since=T0)
    started = job("b1", project_id="b", gpus=8, placed_on=("n3",))
    state = given(NODES, node("n3"), four_of_a()[2], four_of_a()[3], victim, deleted, preempted("a1", "b1"), started)

    (reason,) = [held.reason for held in plan(state, cohort(), T0).deferred if held.subject == "job/a1"]
    assert isinstance(reason, PreemptedForJob)
    assert reason.pods_remaining_count == 1


def test_nobody_borrows_what_its_owner_has_once_its_own_victim_has_ended() -> None:
    """B runs nothing else and may have 8 soon; a, which would borrow 4 of them, keeps its 8 and loses no job."""
    ending = (*running("b1", "b", on="n2"), *preempted("b1", "a1"))
    borrows = job("a2", project_id="a", gpus=4, priority=900)
    state = given(NODES, node("n3"), running("a1", gpus=8), ending, borrows, job("b2", project_id="b", gpus=8))

    made = schedule(state, cohort(), T0)

    assert made.placements == ()
    assert {why(state, cohort(), name).tag() for name in ("a2", "b2")} == {"cohort_quota_reached"}
    assert names(state, cohort()) == []


def test_a_victim_larger_than_what_its_project_borrows_is_reported_truly() -> None:
    """The job of 12 GPUs ends, of which 4 were borrowed."""
    large = running("a1", gpus=12)
    state = given(NODES, large, job("b1", project_id="b", gpus=8))

    (preemption,) = chosen(state, cohort())
    assert isinstance(preemption.reason, QuotaReclaimed)
    assert preemption.reason.borrowed_gpu_count == 4


def test_a_victim_does_not_wait_for_ever() -> None:
    """If the beneficiary has not started after ten minutes, or has ended, the victim is placed again."""
    blocked = job("b1", project_id="b", gpus=8, model="H100")
    state = given(NODES, job("a1", gpus=4, project_id="a", placed_on=("n1",)), preempted("a1", "b1"), blocked)

    assert {str(placed.job_id) for placed in schedule(state, cohort(), T0 + timedelta(seconds=599)).placements} == set()
    later = given(
        NODES,
        job("a1", gpus=4, project_id="a", placed_on=("n1",)),
        preempted("a1", "b1"),
        blocked,
        as_of=T0 + timedelta(seconds=600),
    )
    placed = schedule(later, cohort(), T0 + timedelta(seconds=600)).placements
    assert [(str(placement.job_id), placement.attempt) for placement in placed] == [("a1", 2)]


# ---- priority

BARRED: dict[str, Any] = {"gpu_count_max": 0}


def test_a_higher_priority_preempts_only_where_buying_is_barred() -> None:
    """With an offer a node is bought; at the limit of GPUs the job of low priority ends."""
    story = (node("n1"), on_sale(), running("low", gpus=8, priority=100), job("high", priority=1000))
    rules = policy(quotas={"is_priority_preemption_on": True})
    barred = policy(quotas={"is_priority_preemption_on": True}, **BARRED)

    assert names(given(*story), rules) == []
    assert plan(given(*story), rules, T0).purchases
    (preemption,) = chosen(given(*story), barred)
    assert preemption.reason == PriorityPreempted(
        for_job=JobId("high"), for_priority=1000, priority=100, barred_by="gpus_limit"
    )
    assert names(given(*story), policy(**BARRED)) == []


def test_equal_priority_preempts_nobody() -> None:
    """It waits its turn."""
    story = (node("n1"), on_sale(), running("first", gpus=8), job("second"))

    assert names(given(*story), policy(quotas={"is_priority_preemption_on": True}, **BARRED)) == []


def test_the_lowest_priorities_that_make_room_are_chosen() -> None:
    """Of 4 + 2 + 2 GPUs a job of 4 needs both small ones, of the lowest priority; the others stay."""
    story = (
        node("n1"),
        on_sale(),
        running("middle", gpus=4, priority=500),
        running("low1", gpus=2, priority=100),
        running("low2", gpus=2, priority=100),
        job("high", gpus=4, priority=1000),
    )
    rules = policy(quotas={"is_priority_preemption_on": True}, **BARRED)

    assert sorted(names(given(*story), rules)) == ["low1", "low2"]
    one = (*story[:-1], job("high", gpus=2, priority=1000))
    assert len(names(given(*one), rules)) == 1


def test_nobody_ends_for_a_job_that_would_not_fit_anyway() -> None:
    """A job of 16 GPUs on one node of 8 gains nothing."""
    story = (node("n1"), on_sale(), running("low", gpus=8, priority=100), job("high", gpus=8, members=2, priority=1000))

    assert names(given(*story), policy(quotas={"is_priority_preemption_on": True}, **BARRED)) == []


def test_jobs_of_one_priority_are_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule without the candidates tells of every waiting job; with one for each, many jobs delay the plan."""
    tried: list[ClusterState] = []

    def counted(state: ClusterState, rules: ScalingPolicy, as_of: datetime) -> Schedule:
        tried.append(state)
        return schedule(state, rules, as_of)

    rules = policy(quotas={"is_priority_preemption_on": True}, **BARRED)
    story = [node("n1"), on_sale(), running("low", gpus=8, priority=100)]
    state = given(*story, *(job(f"high{number}", gpus=8, members=2, priority=1000) for number in range(30)))
    made, barred = schedule(state, rules, T0), barred_jobs(plan(state, rules, T0).deferred)
    monkeypatch.setattr(preemption, "schedule", counted)

    assert len(barred) == 30
    assert preemptions(state, rules, T0, scheduled=made, barred=barred) == ()
    assert len(tried) == 1


def test_victims_are_the_same_whatever_is_derived_already() -> None:
    """What is derived from the state is handed on to the states without victims."""
    small = [running(f"low{number}", on=f"n{1 + number % 2}", gpus=2, priority=100 + number) for number in range(8)]
    state = given(NODES, on_sale(), *small, job("high", gpus=6, members=2, priority=1000))
    rules = policy(quotas={"is_priority_preemption_on": True}, **BARRED)
    again = chosen(state, rules), chosen(state, rules)

    assert len(again[0]) == 6
    assert again == (chosen(msgspec.structs.replace(state), rules),) * 2


# ---- the save before the end


def asks(made: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """Which jobs the plan asks to save, and on which nodes."""
    acts = (act for act in made.upkeep_decisions if isinstance(act, RequestPreemptionCheckpoint))
    return [(act.job_id, act.node_names) for act in acts]


def saving_borrower(requested: dict[str, str] | None = None) -> ClusterState:
    """Project a borrows 8 GPUs with jobs that save on request; b needs 4 of them."""
    first = running("a1", saved_at="", marks=requested)
    story = (first, *(running(f"a{number}", on="n2", priority=900, saved_at="") for number in (2, 3, 4)))
    return given(NODES, *story, job("b1", gpus=4, project_id="b"))


def test_a_plan_asks_the_victim_to_save_before_it_ends() -> None:
    """Once: with the deadline of the policy, the reason of the preemption, and what `why` tells about it."""
    state, rules = saving_borrower(), cohort(checkpoint_seconds_max=60)
    made = accepted_plan(state, rules, T0)
    assert asks(made) == [("a1", ("n1",))]
    (act,) = (act for act in made.upkeep_decisions if isinstance(act, RequestPreemptionCheckpoint))
    assert (act.requested_at, act.deadline_at) == (T0, T0 + MINUTE)
    assert isinstance(act.reason, QuotaReclaimed)
    assert act.sentence().startswith("Ask job a1 to save by ")

    fact = ScalingPlanMade(plan_id=PlanId("p"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    after = fold(state, record((TimedFact(fact, T0),)))
    known = after.upkeep[save_key(JobId("a1"), 1)]
    assert known.decided_at == T0
    assert asks(plan(after, rules, T0 + SECOND)) == []
    requested = request_annotations(T0, T0 + MINUTE)
    answered = msgspec.structs.replace(after, pods=saving_borrower(requested).pods)
    assert asks(plan(answered, rules, T0 + 20 * SECOND)) == []
    second = plan(after, rules, T0 + 20 * SECOND)
    assert asks(second) == [("a1", ("n1",))], "the first request has not reached its pod"
    again = msgspec.structs.replace(fact, plan_id=PlanId("p2"), plan=second)
    repeated = fold(after, record((TimedFact(again, T0 + 20 * SECOND),)))
    assert repeated.upkeep[save_key(JobId("a1"), 1)].decided_at == T0
    deferred = plan(repeated, rules, T0 + 21 * SECOND).upkeep_deferred
    reasons = [held.reason.tag() for held in deferred if held.decision == RequestPreemptionCheckpoint.tag()]
    assert reasons == ["upkeep_repeated"]


def test_nobody_is_asked_who_cannot_save_or_is_not_preempted() -> None:
    """Jobs without checkpoints end at once; without a waiting owner nobody is asked."""
    assert asks(plan(given(NODES, *four_of_a(), job("b1", gpus=4, project_id="b")), cohort(), T0)) == []
    idle = given(NODES, running("a1", saved_at=""), running("a2", saved_at=""))
    assert asks(plan(idle, cohort(), T0)) == []


def test_with_old_data_nobody_is_asked() -> None:
    """Pods that were not listed lately may have ended, or have saved; neither is a victim chosen."""
    made = plan(saving_borrower(), cohort(), T0 + timedelta(hours=2))
    assert asks(made) == []


def test_a_job_that_lost_its_node_counts_as_borrowed() -> None:
    """Its Job is not suspended, so it keeps its quota: project a uses 12 of 8 with it, and b may reclaim 4."""
    lost = TimedFact(JobPreempted(job_id=JobId("a2"), attempt=1, cause="gone", preempted_at=T0), T0)
    of_a = (running("a1", saved_at=""), running("a2", saved_at=""), (lost,), running("a3", on="n2", saved_at=""))
    state = given(NODES, *of_a, running("b1", "b", on="n2"), job("b2", gpus=4, project_id="b"))
    made = plan(state, cohort(), T0)

    assert len(asks(made)) == 1
    assert check(made, state, cohort()) == ()


def test_a_job_whose_placement_is_lost_counts_as_borrowed() -> None:
    """It runs, as its pod shows: project a uses 12 of 8 with it, also by the plan check."""
    unknown = (*job("a1", gpus=4, project_id="a"), *pod("a1-0", on="n1", gpus=4, job_id="a1", owner_kind="Job"))
    known = [running(f"a{number}", on="n2", saved_at="") for number in (2, 3)]
    made = accepted_plan(given(NODES, unknown, *known, job("b1", gpus=8, project_id="b")), cohort(), T0)

    assert len(asks(made)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 2},
        {"job_id": JobId("b1")},
        {"node_names": ("n2",)},
        {"node_names": ()},
        {"deadline_at": T0 + 2 * MINUTE},
        {"requested_at": T0 - MINUTE},
    ],
)
def test_the_plan_check_refuses_each_wrong_request(changes: dict[str, Any]) -> None:
    """It reads the state again: another attempt, other nodes, another deadline, a job that waits itself."""
    state, rules = saving_borrower(), cohort(checkpoint_seconds_max=60)
    assert is_refused(changes, state, rules)


def test_the_plan_check_knows_what_the_policy_and_the_cohort_allow() -> None:
    """No reclaim, no borrower, an owner whose job does not wait, and a protected job are each refused."""
    state, rules = saving_borrower(), cohort(checkpoint_seconds_max=60)
    assert not is_refused({}, state, rules)
    assert is_refused({}, state, rules, judged_by=cohort(checkpoint_seconds_max=60, is_reclaim_on=False))
    nominal = [{"name": name, "nominal_gpu_count": count} for name, count in (("a", 16), ("b", 8))]
    rich = policy(quotas={"projects": nominal, "checkpoint_seconds_max": 60})
    assert is_refused({}, state, rules, judged_by=rich)
    reason = {"for_job": JobId("a2"), "for_project": "a"}
    assert is_refused({}, state, rules, reason=reason)


def is_refused(
    changes: dict[str, Any],
    state: ClusterState,
    rules: ScalingPolicy,
    *,
    judged_by: ScalingPolicy | None = None,
    reason: dict[str, Any] | None = None,
) -> bool:
    """True if the check refuses the plan's request with these changes."""
    made = plan(state, rules, T0)
    (act,) = (act for act in made.upkeep_decisions if isinstance(act, RequestPreemptionCheckpoint))
    changed = msgspec.structs.replace(act, reason=msgspec.structs.replace(act.reason, **(reason or {})), **changes)
    judged = msgspec.structs.replace(made, upkeep=Upkeep(decisions=(changed,)))
    return any(act.action_id in violation.action_ids for violation in check(judged, state, judged_by or rules))
