"""Quotas: limits of users and projects, GPU-hours of a month, cohorts with borrowing and lending, strategies."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, TimedFact, given, job, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.quotas import QuotaUsage, queue_violations
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.policy.quota_settings import lenders_of
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.core.queueing.estimates import Estimates
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state import usage_history
from gpu_autoscaler.core.state.ledger import period_end, period_start
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.core.state.usage_history import OTHERS, time_between
from gpu_autoscaler.events.job import JobFinished, JobPreempted
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import Violation
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import CohortQuotaReached, QuotaReached


def quotas(**settings: Any) -> ScalingPolicy:  # noqa: ANN401 - fields of QuotasPolicy
    """The default policy with these quotas."""
    return policy(quotas=settings)


def cohort(*names: str, nominal: int = 8, **settings: Any) -> list[dict[str, object]]:  # noqa: ANN401 - of each project
    """Projects of one cohort with equal quotas."""
    return [{"name": name, "nominal_gpu_count": nominal, **settings} for name in names]


def ended(job_id: str, at: datetime) -> Story:
    """The job completed."""
    return (TimedFact(JobFinished(job_id=JobId(job_id), outcome="completed", finished_at=at), at),)


def started(state: ClusterState, rules: ScalingPolicy, at: datetime = T0) -> set[str]:
    """The jobs that start."""
    return {str(placement.job_id) for placement in schedule(state, rules, at).placements}


def why(state: ClusterState, rules: ScalingPolicy, job_id: str, at: datetime = T0) -> DeferReason:
    """Why this job does not start."""
    (reason,) = [held.reason for held in schedule(state, rules, at).deferred if held.subject == f"job/{job_id}"]
    return reason


NODES: Story = (*node("n1"), *node("n2"), *node("n3"), *node("n4"))


def test_a_project_starts_no_more_jobs_than_its_quota_of_gpus() -> None:
    """Of two jobs of 8 GPUs one starts; the other names the quota, what is used, and the limit."""
    rules = quotas(projects=[{"name": "research", "gpu_count_max": 8}])
    state = given(NODES, job("a"), job("b", at=T0 + MINUTE))

    assert started(state, rules) == {"a"}
    reason = why(state, rules, "b")
    assert reason == QuotaReached(owner="project/research", quota="gpu_count_max", used=8, needed=8, limit=8)
    assert "quota of 8 GPUs at once of project research" in reason.sentence()
    assert started(state, policy()) == {"a", "b"}


def test_a_job_with_pods_counts_although_its_placement_is_lost() -> None:
    """After the loss of a stream the last placement may be known by its pods alone; another job does not start."""
    rules = quotas(projects=[{"name": "research", "gpu_count_max": 8}])
    runs = (*job("a", at=T0 + MINUTE), *pod("a-0", on="n1", gpus=8, job_id="a", owner_kind="Job"))
    state = given(NODES, runs, job("b"))

    assert started(state, rules) == {"a"}
    assert why(state, rules, "b") == QuotaReached(
        owner="project/research", quota="gpu_count_max", used=8, needed=8, limit=8
    )


def test_a_member_is_bought_for_a_job_whose_placement_is_lost() -> None:
    """It has its quota, also where the quota was lowered since; so says the plan check."""
    rules = quotas(projects=[{"name": "research", "gpu_count_max": 8}])
    runs = (*job("a", members=2), *pod("a-0", on="n1", gpus=8, job_id="a", owner_kind="Job"))

    made = accepted_plan(given(node("n1"), on_sale(), runs), rules, T0)

    assert len(made.purchases) == 1


def test_a_running_job_counts_until_it_ends() -> None:
    """The next job starts when the first has ended, not before."""
    rules = quotas(project_default={"gpu_count_max": 8})
    running = given(NODES, job("a", placed_on=("n1",), is_running=True), job("b"))
    over = given(NODES, job("a", placed_on=("n1",)), ended("a", T0), job("b"))

    assert started(running, rules) == set()
    assert started(over, rules) == {"b"}


def test_a_job_that_lost_its_node_keeps_its_quota() -> None:
    """Its Job is not suspended: Kubernetes creates its pods again, whatever started meanwhile."""
    rules = quotas(project_default={"gpu_count_max": 8})
    lost = JobPreempted(job_id=JobId("a"), attempt=1, cause="gone", preempted_at=T0)
    state = given(NODES, job("a", placed_on=("n1",), priority=0), (TimedFact(lost, T0),), job("b", priority=1000))

    assert started(state, rules) == {"a"}
    assert isinstance(why(state, rules, "b"), QuotaReached)


def test_the_quota_of_a_user_counts_over_projects() -> None:
    """Ann has 8 GPUs in all projects together; others are not limited by hers."""
    rules = quotas(user_default={"gpu_count_max": 8}, users=[{"name": "root", "gpu_count_max": 16}])
    ann = [job(name, project_id=name, submitted_by="ann") for name in ("a", "b")]
    root = [job(name, project_id=name, submitted_by="root") for name in ("c", "d")]
    state = given(NODES, *ann, *root)

    assert started(state, rules) == {"a", "c", "d"}
    assert why(state, rules, "b") == QuotaReached(owner="user/ann", quota="gpu_count_max", used=8, needed=8, limit=8)


def test_jobs_of_unknown_users_have_one_quota_together() -> None:
    """Nobody gets around the quota by leaving out the name."""
    rules = quotas(user_default={"gpu_count_max": 8})
    state = given(NODES, job("a"), job("b"))

    assert started(state, rules) == {"a"}
    assert "jobs without a known user" in why(state, rules, "b").sentence()


def test_an_elastic_job_counts_with_all_its_members() -> None:
    """It may grow at any time: a job of 1 to 4 members of 4 GPUs uses 16."""
    rules = quotas(project_default={"gpu_count_max": 16})
    state = given(NODES, job("a", gpus=4, members=4, member_count_min=1), job("b", gpus=1))

    assert started(state, rules) == {"a"}


def test_nothing_is_bought_for_a_job_over_its_quota() -> None:
    """The plan defers it with the same reason, and its estimate says so; without the quota a node is bought."""
    rules = quotas(projects=[{"name": "research", "gpu_count_max": 4}])
    state = given(on_sale(), job("a"))
    made = plan(state, rules, T0 + HOUR)

    assert not made.purchases
    assert [held.reason.tag() for held in made.deferred if held.subject == "job/a"] == ["quota_reached"]
    estimate = Estimates(state, rules, T0).of(JobId("a"))
    assert estimate is not None
    assert estimate.basis == "unknown"
    assert plan(state, policy(), T0).purchases


# ---- GPU-hours of a month

START = datetime(2026, 11, 1, tzinfo=UTC)


def _later(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def _gpu_hours(state: ClusterState, owner: str, at: datetime = START) -> float:
    used = time_between(state.gpu_time[owner], period_start("month", at), period_end("month", at))
    return used * timedelta(microseconds=1) / timedelta(hours=1)


def test_gpu_hours_of_ended_attempts_are_counted_once() -> None:
    """Two hours with 8 GPUs are 16 GPU-hours of the project and the user, also when facts are repeated."""
    story = (*job("a", placed_on=("n1",), at=START, submitted_by="ann"), *ended("a", _later(2)))
    state = given(story, story, as_of=_later(2))

    hours = {owner: _gpu_hours(state, owner) for owner in state.gpu_time}
    assert hours == {"project/research": 16.0, "user/ann": 16.0, "member/research/ann": 16.0}


def test_an_attempt_across_months_is_split() -> None:
    """An hour before and two after midnight of the first of December."""
    begin, end = datetime(2026, 11, 30, 23, tzinfo=UTC), datetime(2026, 12, 1, 2, tzinfo=UTC)
    state = given(job("a", gpus=1, placed_on=("n1",), at=begin), ended("a", end), as_of=end)

    assert _gpu_hours(state, "project/research") == 1.0
    assert _gpu_hours(state, "project/research", at=end) == 2.0


def test_a_preempted_attempt_and_the_next_one_both_count() -> None:
    """An hour each; the time between them does not count."""
    lost = JobPreempted(job_id=JobId("a"), attempt=1, cause="gone", preempted_at=_later(1))
    again = job("a", gpus=1, placed_on=("n1",), attempt=2, at=_later(5))[-1:]
    first = job("a", gpus=1, placed_on=("n1",), at=START)
    state = given(first, (TimedFact(lost, _later(1)),), again, ended("a", _later(6)), as_of=_later(6))

    assert _gpu_hours(state, "project/research") == 2.0


def test_forgotten_owners_count_for_the_quota_of_each_owner_without_gpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of owners the earliest project becomes others; its 16 GPU-hours leave too little for a new job."""
    monkeypatch.setattr(usage_history, "OWNERS_COUNT_MAX", 3)
    first = (*job("a", placed_on=("n1",), at=START, submitted_by="ann"), *ended("a", _later(2)))
    later = (*job("b", project_id="serving", placed_on=("n1",), at=_later(8)), *ended("b", _later(9)))
    waiting = job("c", at=_later(10), submitted_by="ann", duration_seconds_max=3600)
    rules = quotas(projects=[{"name": "research", "month_gpu_hours_max": 23}])
    state = given(first, later, waiting, NODES, as_of=_later(10))

    assert "project/research" not in state.gpu_time
    assert _gpu_hours(state, OTHERS) == 32.0  # as project and as user
    assert started(state, rules, _later(10)) == set()
    assert started(state, quotas(projects=[{"name": "research", "month_gpu_hours_max": 40}]), _later(10)) == {"c"}


def test_a_job_starts_only_if_its_whole_time_limit_is_left_in_the_month() -> None:
    """16 of 24 GPU-hours are used: a job of 8 GPUs for one hour starts, one for two hours does not."""
    rules = quotas(projects=[{"name": "research", "month_gpu_hours_max": 24}])
    used = (*job("old", placed_on=("n1",), at=START), *ended("old", _later(2)))
    short, long = job("short", duration_seconds_max=3600.0), job("long", duration_seconds_max=7200.0)

    assert started(given(NODES, used, short, as_of=_later(3)), rules, _later(3)) == {"short"}
    state = given(NODES, used, long, as_of=_later(3))
    assert started(state, rules, _later(3)) == set()
    reason = why(state, rules, "long", _later(3))
    assert reason == QuotaReached(
        owner="project/research",
        quota="month_gpu_hours_max",
        used=16.0,
        needed=16.0,
        limit=24.0,
        until=datetime(2026, 12, 1, tzinfo=UTC),
    )
    december = datetime(2026, 12, 1, tzinfo=UTC)
    assert started(given(NODES, used, long, as_of=december), rules, december) == {"long"}


def test_running_jobs_reserve_their_time_limit_in_the_month() -> None:
    """Two jobs of 8 GPUs for two hours do not fit into 24 GPU-hours, although neither has used any yet."""
    rules = quotas(user_default={"month_gpu_hours_max": 24})
    jobs = [job(name, duration_seconds_max=7200.0, submitted_by="ann") for name in ("a", "b")]

    assert started(given(NODES, *jobs), rules) == {"a"}


# ---- cohorts


def test_a_project_borrows_what_its_cohort_does_not_use() -> None:
    """Of 8 GPUs each, a runs 16 while b runs nothing; a third job waits, and names what is available."""
    rules = quotas(projects=cohort("a", "b"))
    jobs = [job(f"a{number}", project_id="a", at=T0 + number * MINUTE) for number in (1, 2, 3)]
    state = given(NODES, *jobs)

    assert started(state, rules) == {"a1", "a2"}
    reason = why(state, rules, "a3")
    assert isinstance(reason, CohortQuotaReached)
    assert (reason.used_gpu_count, reason.nominal_gpu_count, reason.available_gpu_count) == (16, 8, 0)


def test_a_borrower_keeps_the_owner_waiting_and_is_named() -> None:
    """Project b has 8 GPUs of its own, all used by a."""
    rules = quotas(projects=cohort("a", "b"))
    state = given(
        NODES, job("a1", gpus=8, members=2, project_id="a", placed_on=("n1", "n2")), job("b1", project_id="b")
    )

    reason = why(state, rules, "b1")
    assert isinstance(reason, CohortQuotaReached)
    assert reason.borrowed_by == ("a",)
    assert started(given(NODES, job("a1", project_id="a", placed_on=("n1",)), job("b1", project_id="b")), rules) == {
        "b1"
    }


def test_nominal_quota_is_granted_before_any_is_borrowed() -> None:
    """Of 16 GPUs 8 are left. The job of a came first, but borrows; the later one of b is within its own quota."""
    rules = quotas(projects=cohort("a", "b"))
    used = job("a1", project_id="a", placed_on=("n1",))
    borrower, owner = job("a2", project_id="a", at=T0 - MINUTE), job("b1", project_id="b")

    assert started(given(NODES, used, borrower), rules) == {"a2"}
    assert started(given(NODES, used, borrower, owner), rules) == {"b1"}


@pytest.mark.parametrize(
    ("lender", "borrower", "available"),
    [
        pytest.param({}, {}, 16, id="all"),
        pytest.param({}, {"borrowing_gpu_count_max": 4}, 12, id="borrowing limit"),
        pytest.param({"lending_gpu_count_max": 2}, {}, 10, id="lending limit"),
        pytest.param({"lending_gpu_count_max": 2}, {"borrowing_gpu_count_max": 4}, 10, id="the narrower of both"),
        pytest.param({"cohort": "other"}, {}, 8, id="another cohort"),
        pytest.param({}, {"cohort": ""}, 8, id="no cohort"),
    ],
)
def test_what_a_project_may_use_of_an_idle_cohort(
    lender: dict[str, Any], borrower: dict[str, Any], available: int
) -> None:
    """Its nominal quota, and what others lend within its borrowing limit."""
    rules = quotas(projects=[*cohort("mine", **borrower), *cohort("lender", **lender)])
    usage = QuotaUsage(given(), rules, T0)

    assert usage.available(lenders_of(rules.quotas)["mine"]) == available


@pytest.mark.parametrize(("strategy", "available"), [("static", 10), ("dynamic", 20), ("hybrid", 17)])
def test_strategies_over_the_same_cohort(strategy: str, available: int) -> None:
    """Of 10 + 10 GPUs: static keeps all, dynamic lends all, hybrid keeps 3 of each."""
    rules = quotas(projects=cohort("mine", "other", nominal=10), strategy=strategy)
    usage = QuotaUsage(given(), rules, T0)

    assert usage.available(lenders_of(rules.quotas)["mine"]) == available


# ---- admission and validation


def test_the_queue_of_a_project_is_full_at_its_quota() -> None:
    """Two of two places are taken; other projects are not concerned."""
    rules = quotas(projects=[{"name": "research", "queue_count_max": 2}])
    state = given(job("a"), job("b"), job("c", placed_on=("n1",)))
    spec = state.jobs[JobId("a")].queued
    assert spec is not None

    (violation,) = queue_violations(spec.spec, state, rules)
    assert (violation.field, violation.kind) == ("queue", "quota")
    assert "project research: 2 wait, queue_count_max is 2" in violation.reason
    assert queue_violations(spec.spec, given(job("a")), rules) == ()
    assert queue_violations(spec.spec, state, policy()) == ()


def test_contradictions_of_cohorts_are_named() -> None:
    """Limits without a nominal quota, without a cohort, and above the nominal quota."""
    rules = quotas(
        projects=[
            {"name": "a", "borrowing_gpu_count_max": 1},
            {"name": "b", "nominal_gpu_count": 2, "cohort": "", "lending_gpu_count_max": 1},
            {"name": "c", "nominal_gpu_count": 2, "lending_gpu_count_max": 3},
            {"name": "d", "nominal_gpu_count": 9, "gpu_count_max": 8},
        ]
    )
    assert [text.partition(":")[0] for text in policy_violations(rules)] == [
        "quotas.projects[0].borrowing_gpu_count_max",
        "quotas.projects[1].lending_gpu_count_max",
        "quotas.projects[2].lending_gpu_count_max",
        "quotas.projects[3].nominal_gpu_count",
    ]


def test_a_violation_of_a_field_says_no_kind_on_the_wire() -> None:
    """What clients of the last release read is unchanged."""
    assert msgspec.to_builtins(Violation("members", "is 0")) == {"field": "members", "reason": "is 0"}


# ---- the plan check, which shares no code with the above


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        pytest.param({"projects": [{"name": "research", "gpu_count_max": 4}]}, "8 GPUs of its quota of 4", id="gpus"),
        pytest.param({"project_default": {"gpu_count_max": 4}}, "8 GPUs of its quota of 4", id="default"),
        pytest.param({"user_default": {"month_gpu_hours_max": 100}}, "192 GPU-hours of 100 this month", id="month"),
        pytest.param(
            {"projects": cohort("research", "other", nominal=4, borrowing_gpu_count_max=2)},
            "it may borrow 2",
            id="borrowing limit",
        ),
        pytest.param(
            {"projects": cohort("research", "other", nominal=3)}, "2 GPUs more than its projects lend", id="cohort"
        ),
        pytest.param(
            {"projects": cohort("research", "other", nominal=4), "strategy": "static"}, "borrow 0", id="static"
        ),
    ],
)
def test_the_check_refuses_a_purchase_over_a_quota(settings: dict[str, Any], part: str) -> None:
    """A plan that was made without the quota buys for a job that may not start under it."""
    state = given(on_sale(), job("a"))
    bought = plan(state, policy(), T0)

    sentences = [sentence for sentence in check(bought, state, quotas(**settings)) if part in sentence]
    assert len(sentences) == 1
    assert not check(bought, state, quotas(projects=cohort("research", "other", nominal=8)))


def test_behind_a_job_of_a_strict_queue_that_waits_no_nominal_quota_is_granted() -> None:
    """The first job borrows what the one behind it would keep for itself: that one cannot start before it."""
    first = job("first", gpus=6, project_id="a", at=T0 - 2 * HOUR)
    behind = job("behind", gpus=4, project_id="b", at=T0 - HOUR)
    rules = policy(
        quotas={"projects": [{"name": name, "nominal_gpu_count": 4} for name in ("a", "b")]},
        queues=(QueuePolicy(name="all", scheduling_policy="fcfs-strict"),),
    )

    made = schedule(given(node("n1"), first, behind), rules, T0)

    assert [placement.job_id for placement in made.placements] == ["first"]
