"""Periodic requests to save checkpoints: when a job is asked, at which interval, and what defers a request."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, TimedFact, given, job, node, offer, pod, policy
from tests.support.timed_facts import record

from gpu_autoscaler.core.disruption.protection import request_annotations
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.policy.disruption_settings import CheckpointsPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState, SpotTerminations
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import Cut, Plan, RequestJobCheckpoint
from gpu_autoscaler.model.ids import JobId, PlanId
from gpu_autoscaler.model.labels import CHECKPOINTED_AT
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.preempt import PriorityPreempted

NOW = T0 + HOUR
SPOT = offer(capacity_type=CapacityType.SPOT)


def saved(at: datetime | None = None, asked_at: datetime | None = None) -> dict[str, str]:
    """Return the annotations of a pod that saves on request: asked, and saved, at these instants."""
    asked = {} if asked_at is None else request_annotations(asked_at, asked_at + 10 * MINUTE)
    return {**asked, CHECKPOINTED_AT: "" if at is None else at.isoformat()}


def training(name: str, on: str, *saves: dict[str, str], **of_job: Any) -> Story:  # noqa: ANN401 - of `job`
    """A job that has run on the node since T0, with a pod for each of these annotations."""
    members = [
        pod(f"{name}-{index}", on=on, gpus=1, owner_kind="Job", job_id=name, annotations=annotations)
        for index, annotations in enumerate(saves)
    ]
    running = job(name, gpus=1, members=len(saves) or 1, placed_on=(on,), is_running=True, **of_job)
    return (*running, *(fact for member in members for fact in member))


def requests(state: ClusterState, at: datetime = NOW, rules: ScalingPolicy | None = None) -> Plan:
    """Return the plan of the state, which the plan check accepts, with its requests alone."""
    return accepted_plan(state, rules or policy(), at)


def asked(made: Plan) -> list[tuple[str, float]]:
    """Return which jobs the plan asks, and their intervals in seconds."""
    acts = (act for act in made.upkeep_decisions if isinstance(act, RequestJobCheckpoint))
    return [(act.job_id, act.reason.interval_seconds) for act in acts]


def deferred(made: Plan) -> list[tuple[str, str]]:
    """Return the deferred requests: job and reason."""
    acts = [act for act in made.upkeep_deferred if act.decision == RequestJobCheckpoint.tag()]
    return [(deferral.subject, deferral.reason.tag()) for act in acts for deferral in act.each()]


@pytest.mark.parametrize(
    ("saves", "is_asked"),
    [
        ([saved()], True),
        ([saved(NOW - 16 * MINUTE)], True),
        ([saved(NOW - 14 * MINUTE)], False),
        ([saved(NOW - 14 * MINUTE), saved()], False),
        ([saved(NOW - 40 * MINUTE), saved(NOW - 20 * MINUTE)], True),
        ([{}], False),
    ],
    ids=["never saved", "long ago", "lately", "one of a gang lately", "each long ago", "saves on no request"],
)
def test_a_job_is_asked_an_interval_after_its_last_save(*, saves: list[dict[str, str]], is_asked: bool) -> None:
    """Every 15 minutes by default. A job that saves by itself is not asked, nor one that cannot save."""
    made = requests(given(node("n1"), training("train", "n1", *saves), as_of=NOW))
    assert asked(made) == ([("train", 900.0)] if is_asked else [])
    assert deferred(made) == []


@pytest.mark.parametrize(
    ("ended_for", "is_asked"),
    [
        (None, True),
        (PriorityPreempted(for_job=JobId("other"), for_priority=1000, priority=500, barred_by="gpus_limit"), False),
    ],
    ids=["one pod was lost", "ended as a whole"],
)
def test_the_pods_that_stay_of_an_ended_attempt_are_asked(
    ended_for: PriorityPreempted | None, *, is_asked: bool
) -> None:
    """They work on while the job waits for a place for the one that was lost. The Job of an attempt that was ended as a
    whole is suspended: its pods end."""
    lost = JobPreempted(
        job_id=JobId("train"), attempt=1, cause="a pod was lost", preempted_at=NOW - 20 * MINUTE, preemption=ended_for
    )
    state = given(node("n1"), training("train", "n1", saved()), (TimedFact(lost, lost.preempted_at),), as_of=NOW)
    assert asked(requests(state)) == ([("train", 900.0)] if is_asked else [])


@pytest.mark.parametrize(
    ("setting", "expected"), [(300.0, [("train", 300.0)]), (0.0, []), (3000.0, []), ("auto", [("train", 900.0)])]
)
def test_a_job_names_its_own_interval(setting: float | str, expected: list[tuple[str, float]]) -> None:
    """Zero asks never; an interval that cannot be computed is the policy's."""
    story = training("train", "n1", saved(NOW - 20 * MINUTE), checkpoint_interval_seconds=setting)
    assert asked(requests(given(node("n1"), story, as_of=NOW))) == expected


def test_the_policy_switches_requests_off_and_sets_their_interval() -> None:
    """For jobs that name no interval of their own."""
    state = given(node("n1"), training("train", "n1", saved(NOW - 6 * MINUTE)), as_of=NOW)
    assert asked(requests(state, rules=policy(checkpoints=CheckpointsPolicy(is_on=False)))) == []
    assert asked(requests(state, rules=policy(checkpoints=CheckpointsPolicy(interval_seconds=300.0)))) == [
        ("train", 300.0)
    ]


def test_the_next_change_of_a_plan_is_the_next_request() -> None:
    """No tick is needed before it."""
    state, at = given(node("n1"), training("train", "n1", saved()), as_of=T0), TrackedInstant.of(T0 + MINUTE)
    requests(state, at)
    assert at.next_change_at is not None
    assert at.next_change_at <= T0 + 15 * MINUTE
    assert asked(requests(state, T0 + 15 * MINUTE - SECOND)) == []
    assert asked(requests(state, T0 + 15 * MINUTE)) == [("train", 900.0)]


# ---- the interval of `auto`


def interrupted(count: int, save_seconds: float = 50.0, **of_job: Any) -> ClusterState:  # noqa: ANN401 - of `job`
    """A job on one of ten spot nodes, which ran for an hour each while `count` others were interrupted."""
    nodes = [node(f"n{number}", SPOT) for number in range(10)]
    asked_at = NOW - 50 * MINUTE
    story = training("train", "n1", saved(asked_at + timedelta(seconds=save_seconds), asked_at), **of_job)
    state = given(*nodes, story, as_of=NOW)
    ends = {int(NOW.timestamp()) // 3600: SpotTerminations(count=count, interrupted_count=count)}
    return replace(state, spot_terminations={f"{SPOT.instance_type}/{SPOT.zone}": ends} if count else {})


def test_auto_follows_young_and_daly() -> None:
    """The square root of 2 x 50 s x 2.5 h: ten nodes ran for an hour each, and four were interrupted."""
    ((_, seconds),) = asked(requests(interrupted(4, checkpoint_interval_seconds="auto")))
    assert seconds == pytest.approx((2 * 50.0 * 9000.0) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("count", "save_seconds", "bound"), [(4000, 1.0, 120.0), (1, 590.0, 2400.0)], ids=["shortest", "longest"]
)
def test_auto_is_bounded_by_the_policy(count: int, save_seconds: float, bound: float) -> None:
    """Neither saves all the time, nor hardly ever."""
    rules = policy(checkpoints=CheckpointsPolicy(interval_seconds_max=2400.0))
    made = requests(interrupted(count, save_seconds, checkpoint_interval_seconds="auto"), rules=rules)
    assert asked(made) == [("train", bound)]


def test_without_an_interruption_auto_is_the_default() -> None:
    """Unknown is not never."""
    assert asked(requests(interrupted(0, checkpoint_interval_seconds="auto"))) == [("train", 900.0)]


# ---- what defers a request


def test_a_job_that_asked_for_requests_but_cannot_save_is_deferred_with_the_reason() -> None:
    """`why` tells which annotation is missing."""
    made = requests(given(node("n1"), training("train", "n1", {}, checkpoint_interval_seconds=300.0), as_of=NOW))
    assert (asked(made), deferred(made)) == ([], [("job/train", "checkpoints_unsupported")])


def test_a_save_in_progress_is_not_asked_for_again() -> None:
    """A drain has asked; until its deadline the pods have time."""
    state = given(node("n1"), training("train", "n1", saved(NOW - 20 * MINUTE, NOW - MINUTE)), as_of=NOW)
    made = requests(state)
    assert (asked(made), deferred(made)) == ([], [("job/train", "save_in_progress")])
    assert asked(requests(state, NOW + 10 * MINUTE)) == [("train", 900.0)]


def test_only_so_many_jobs_save_at_once() -> None:
    """The longest without a save first; the others have the reason."""
    jobs = [training(f"job-{number}", "n1", saved(NOW - (20 + number) * MINUTE)) for number in range(4)]
    rules = policy(checkpoints=CheckpointsPolicy(saves_count_max=2))
    made = requests(given(node("n1"), *jobs, as_of=NOW), rules=rules)
    assert [name for name, _ in asked(made)] == ["job-3", "job-2"]
    assert deferred(made) == [("job/job-0", "saves_concurrent_limit"), ("job/job-1", "saves_concurrent_limit")]


def folded(state: ClusterState, made: Plan) -> ClusterState:
    """Return the state with the recorded plan."""
    fact = ScalingPlanMade(plan_id=PlanId("p1"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    return fold(state, record((TimedFact(fact, made.as_of),)))


def test_a_job_is_asked_once_and_again_if_it_does_not_answer() -> None:
    """After ten minutes; a save in between begins a new interval, with a first attempt."""
    story = training("train", "n1", saved(NOW - 20 * MINUTE))
    state = given(node("n1"), story, as_of=NOW)
    state = folded(state, requests(state))
    assert asked(requests(state, NOW + 5 * MINUTE)) == []
    (again,) = requests(state, NOW + 10 * MINUTE).upkeep_decisions[-1:]
    assert again.attempts_count == 2

    answered = replace(state, pods={uid: replace(seen, annotations=tuple(sorted(saved(NOW + MINUTE).items())))
                                    for uid, seen in state.pods.items()})  # fmt: skip
    assert asked(requests(answered, NOW + 11 * MINUTE)) == []
    (next_one,) = requests(answered, NOW + 16 * MINUTE).upkeep_decisions[-1:]
    assert next_one.attempts_count == 1
