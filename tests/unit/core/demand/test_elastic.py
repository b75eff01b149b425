"""Elastic jobs: the gang starts whole or not at all, further members are optional."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    request,
)

from gpu_autoscaler.core.explain.status import StatusView, job_line
from gpu_autoscaler.core.intake.admission import Supply, admit
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPreempted
from gpu_autoscaler.events.pod import PodGone, PodPhase
from gpu_autoscaler.kube.translate.job import are_all_running
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import JobSpec, Violation
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected, GangPending
from gpu_autoscaler.model.reasons.drain import GangAbandoned
from gpu_autoscaler.model.reasons.preempt import QuotaReclaimed
from gpu_autoscaler_services.cli.jobs import Request
from gpu_autoscaler_services.scheduler.attempts import losses
from gpu_autoscaler_services.scheduler.manifest import job_manifest


def five(**changes: Any) -> Story:  # noqa: ANN401 - fields of the job
    """Job `a` of five members, of which two are the gang."""
    return job("a", members=5, member_count_min=2, **changes)


def placed(state: ClusterState) -> list[tuple[str, ...]]:
    """The nodes of each job that starts."""
    return [each.node_names for each in schedule(state, policy(), T0).placements]


def buys(state: ClusterState, under: ScalingPolicy | None = None) -> list[BuyNode]:
    """What the plan buys; accepted by the plan check."""
    result = accepted_plan(state, under, T0)
    return result.purchases


GANG = ("job/a",)


def wanted(decision: BuyNode) -> tuple[str, ...]:
    """The demand that the node is bought for."""
    assert isinstance(decision.reason, UnmetDemand)
    return decision.reason.demand


def reasons_for_members(state: ClusterState, under: ScalingPolicy) -> dict[str, DeferReason]:
    """Why elastic members are not bought for."""
    held = {each.subject: each.reason for each in plan(state, under, T0).deferred}
    return {key: reason for key, reason in held.items() if key.startswith("member/")}


def member(number: int, *, on: str | None = None, **more: Any) -> Story:  # noqa: ANN401 - of `pod`
    """A pod of job `a`."""
    return pod(f"a-{number}", gpus=8, on=on, job_id="a", owner_kind="Job", labels={labels.JOB_ID: "a"}, **more)


def deleted(number: int, at_seconds: float, *, phase: PodPhase = "running") -> Story:
    """The pod was deleted in this phase."""
    fact = PodGone(
        epoch=EPOCH, version=2, pod_uid=PodUid(f"uid-a-{number}"), namespace="default", name=f"a-{number}",
        node_name=f"n{number}", job_id=JobId("a"), phase=phase,
    )  # fmt: skip
    return (TimedFact(fact, T0 + timedelta(seconds=at_seconds)),)


def running(count: int, *, least: int | None = 2) -> tuple[Story, ...]:
    """Job `a` of five members, of which this many run, each on its own node."""
    names = tuple(f"n{number}" for number in range(count))
    nodes = [node(name) for name in names]
    pods = [member(number, on=f"n{number}" if number < count else None) for number in range(5)]
    started = job("a", members=5, member_count_min=least, placed_on=names, is_running=True)
    return (*nodes, *pods, started)


@pytest.mark.parametrize(("nodes", "starts"), [(1, 0), (2, 2), (3, 3), (5, 5), (7, 5)])
def test_it_starts_with_two_to_five_members(nodes: int, starts: int) -> None:
    """As many as have capacity."""
    state = given(*(node(f"n{number}") for number in range(nodes)), five())

    assert [len(each) for each in placed(state)] == ([starts] if starts else [])


def test_without_a_minimum_all_members_are_the_gang() -> None:
    """What was so before stays so."""
    nodes = [node(f"n{number}") for number in range(4)]

    assert placed(given(*nodes, job("a", members=5))) == []


def test_gang_and_elastic_members_are_bought_in_one_plan() -> None:
    """Two nodes of one transaction for the gang, one for each of the other three."""
    five_bought = buys(given(five(), on_sale(offer())))

    assert [each.gang for each in five_bought] == ["job/a", "job/a", None, None, None]
    assert [wanted(each) for each in five_bought] == [GANG, GANG, *(("member/a/3",), ("member/a/4",), ("member/a/5",))]


@pytest.mark.parametrize(("most", "count"), [(0, 0), (1, 0), (2, 2), (3, 3), (4, 4), (9, 5)])
def test_a_limit_drops_elastic_members_first(most: int, count: int) -> None:
    """Below two nothing is bought; above it as many as allowed, and the others are deferred."""
    limited, state = policy(nodes_count_max=most), given(five(), on_sale(offer()))
    event = reasons_for_members(state, limited)

    assert len(buys(state, limited)) == count
    expected = [GangPending] * 3 if count < 2 else [NodesLimit] * (5 - count)
    assert [type(each) for each in event.values()] == expected


def test_gangs_come_before_elastic_members_of_equal_priority() -> None:
    """Also the gang of a later job."""
    limited = policy(nodes_count_max=4)
    state = given(five(), job("b", gpus=8, members=2, at=T0 + SECOND), on_sale(offer()), as_of=T0 + MINUTE)

    assert [each.gang for each in buys(state, limited)] == ["job/a", "job/a", "job/b", "job/b"]
    assert [type(each) for each in reasons_for_members(state, limited).values()] == [NodesLimit] * 3


def test_elastic_members_use_no_capacity_before_their_gang() -> None:
    """One node is free and nothing may be bought: another job gets the node."""
    frozen = policy(nodes_count_max=1)
    state = given(node("n0"), five(), job("b", gpus=8, at=T0 + SECOND), on_sale(offer()), as_of=T0 + MINUTE)
    result = accepted_plan(state, frozen, T0 + MINUTE)
    held = {each.subject: each.reason for each in result.deferred}
    assert isinstance(held["job/b"], CapacityExpected)
    assert [type(held[f"member/a/{number}"]) for number in (3, 4, 5)] == [GangPending] * 3
    assert placed(state) == [("n0",)]


def test_elastic_members_do_not_use_booting_nodes_of_the_gang() -> None:
    """Launches of the others were refused: three more are bought for them."""
    waits = (five(), on_sale(offer()))
    first = buys(given(*waits))
    again = buys(given(*waits, *(bought(each) for each in first if each.gang is not None)))

    assert [wanted(each) for each in again] == [("member/a/3",), ("member/a/4",), ("member/a/5",)]
    assert [each.gang for each in again] == [None] * 3


def test_the_gang_does_not_use_booting_nodes_of_elastic_members() -> None:
    """Launches of the gang were refused: both are bought again, as one transaction."""
    waits = (five(), on_sale(offer()))
    first = buys(given(*waits))
    again = buys(given(*waits, *(bought(each) for each in first if each.gang is None)))

    assert [each.gang for each in again] == ["job/a", "job/a"]


def test_nodes_bought_for_members_are_used_by_their_pods() -> None:
    """The gang runs, three pods wait, and their nodes still boot."""
    waits = (five(), on_sale(offer()))
    coming = [bought(each) for each in buys(given(*waits)) if each.gang is None]

    assert len(coming) == 3
    assert buys(given(*running(2), *coming, on_sale(offer()))) == []


def test_an_abandoned_gang_releases_nodes_of_elastic_members() -> None:
    """There are no offers, and the gang has no node."""
    waits, limited = (five(), on_sale(offer())), policy(nodes_count_max=3)
    coming = [bought(each) for each in buys(given(*waits)) if each.gang is None]
    result = accepted_plan(given(*waits, *coming), limited, T0)
    back = result.releases
    assert [type(each.reason) for each in back] == [GangAbandoned] * 3
    assert buys(given(*waits, *coming), limited) == []


def test_the_gang_keeps_its_nodes_under_a_lower_limit() -> None:
    """Two nodes boot and stay; the other members are deferred."""
    waits, limited = (five(), on_sale(offer())), policy(nodes_count_max=2)
    state = given(*waits, *(bought(each) for each in buys(given(*waits)) if each.gang is not None))

    assert plan(state, limited, T0).decisions == ()
    assert [type(each) for each in reasons_for_members(state, limited).values()] == [NodesLimit] * 3


def test_members_in_one_domain_wait_for_their_gang() -> None:
    """The zone is unknown until the gang is placed."""
    together = buys(given(five(within=labels.ZONE), on_sale(offer())))

    assert [each.gang for each in together] == ["job/a", "job/a"]


def test_why_explains_deferred_elastic_members() -> None:
    """The nodes of the gang boot; two of three others exceed the limit."""
    limited, waits = policy(nodes_count_max=3), (five(), on_sale(offer()))
    state = given(*waits, *(bought(each) for each in buys(given(*waits), limited)))
    line = job_line("a", StatusView.of(state, limited, T0, plan(state, limited, T0)))

    assert "2 nodes, which were bought for it, are on their way" in line
    assert "The job starts without elastic member 4 of job a (and 1 more), which waits: " in line
    assert "Raise nodes_count_max (3)" in line


def test_elastic_members_are_bought_up_to_the_limit() -> None:
    """Two of five run; two of three pending pods fit the limit."""
    limited = policy(nodes_count_max=4)
    state = given(*running(2), on_sale(offer()))
    result = accepted_plan(state, limited, T0)
    assert [each.gang for each in buys(state, limited)] == [None, None]
    assert [type(each.reason) for each in result.deferred if each.subject.startswith("pod/")] == [NodesLimit]


def test_the_capacity_of_a_placement_is_reserved_until_its_pods_exist() -> None:
    """Three of five are placed: three nodes are used, the fourth is free."""
    names = ("n0", "n1", "n2")
    nodes = [node(f"n{number}") for number in range(4)]
    state = given(*nodes, five(placed_on=names), job("b", gpus=8))

    assert placed(state) == [("n3",)]


def after(state: ClusterState) -> list[type]:
    """Effect of the loss on the job."""
    return [type(each) for facts in losses(state, policy(), T0 + 2 * HOUR).values() for each in facts]


def test_a_loss_above_the_minimum_is_no_preemption() -> None:
    """Two of three keep running."""
    story = running(3)

    assert after(given(*story, deleted(2, 60.0), as_of=T0 + HOUR)) == []
    assert after(given(*running(3, least=None), deleted(2, 60.0), as_of=T0 + HOUR)) == [JobPreempted]


def test_a_loss_below_the_minimum_ends_the_attempt() -> None:
    """At the time of the loss that left too few."""
    state = given(*running(3), deleted(1, 60.0), deleted(2, 90.0), as_of=T0 + HOUR)
    (lost,) = losses(state, policy(), T0 + 2 * HOUR)[JobId("a")]

    assert isinstance(lost, JobPreempted)
    assert lost.preempted_at == T0 + 90 * SECOND
    assert "a-2" in lost.cause


def completed(count: int) -> tuple[Story, ...]:
    """The pods of this many members have completed and were deleted, as with their nodes."""
    return tuple(deleted(number, 60.0, phase="succeeded") for number in range(count))


def test_completed_members_count_without_their_pods() -> None:
    """Two have completed, the third is lost: the gang had all its members."""
    assert after(given(*running(3), *completed(2), deleted(2, 90.0), as_of=T0 + HOUR)) == []
    assert after(given(*running(3), *completed(1), deleted(2, 90.0), as_of=T0 + HOUR)) == []
    assert after(given(*running(2), *completed(1), deleted(1, 90.0), as_of=T0 + HOUR)) == [JobPreempted]


def test_a_job_whose_members_have_all_completed_needs_nothing() -> None:
    """Its end is not reported yet."""
    state = given(job("a", members=2), *completed(2), on_sale(offer()))

    assert buys(state) == []


@pytest.mark.parametrize(
    ("least", "completed_count", "bought_for"),
    [
        (2, 1, ["job/a", "member/a/3", "member/a/4", "member/a/5"]),
        (2, 3, ["job/a", "member/a/5"]),
        (2, 4, ["job/a"]),
        (None, 3, ["job/a", "job/a"]),
    ],
)
def test_nothing_is_bought_for_completed_members(
    least: int | None, completed_count: int, bought_for: list[str]
) -> None:
    """All members have lost their nodes. A Job creates no pod in place of a completed one."""
    names = tuple(f"n{number}" for number in range(5))
    queued = job("a", members=5, member_count_min=least, placed_on=names, at=T0 - HOUR)
    preempted = (TimedFact(_preempted(), T0 - MINUTE),)
    lost = tuple(deleted(number, -60.0) for number in range(completed_count, 5))
    state = given(queued, *completed(completed_count), *lost, preempted, on_sale(offer()))

    assert sorted(key for each in buys(state) for key in wanted(each)) == bought_for


def test_the_next_attempt_starts_with_the_minimum_bound() -> None:
    """Two of five members are bound by Kubernetes: that is a placement."""
    story = (*running(3), deleted(1, 60.0), deleted(2, 90.0))
    state = given(*story, (TimedFact(_preempted(), T0 + 91 * SECOND),), as_of=T0 + HOUR)
    assert schedule(state, policy(), T0 + HOUR).placements == ()

    back = (node("n9"), pod("a-1b", gpus=8, on="n9", job_id="a", owner_kind="Job", at=T0 + HOUR))
    state = given(*story, *back, (TimedFact(_preempted(), T0 + 91 * SECOND),), as_of=T0 + HOUR)
    (again,) = schedule(state, policy(), T0 + HOUR).placements
    assert (again.attempt, again.node_names) == (2, ("n0", "n9"))


@pytest.mark.parametrize(("nominal", "starts"), [(8, [("n3", "n3")]), (4, [])])
def test_the_rest_waits_for_quota_though_the_minimum_has_completed(nominal: int, starts: list[tuple[str, ...]]) -> None:
    """Three of five members have completed. The others were preempted for another job, and do not exist."""
    done = [member(number, on=f"n{number}", phase="succeeded") for number in range(3)]
    queued = job("a", members=5, member_count_min=2, gpus=1, project_id="vision", placed_on=("n0", "n1", "n2"))
    reason = QuotaReclaimed(
        for_job=JobId("b"),
        for_project="speech",
        project="vision",
        cohort="all",
        borrowed_gpu_count=1,
        nominal_gpu_count=8,
    )
    preempted = (TimedFact(msgspec.structs.replace(_preempted(), preemption=reason), T0 + 90 * SECOND),)
    state = given(node("n3"), queued, *done, preempted, as_of=T0 + HOUR)
    rules = policy(quotas={"projects": [{"name": "vision", "nominal_gpu_count": nominal}]})

    assert [each.node_names for each in schedule(state, rules, T0 + HOUR).placements] == starts


def _preempted() -> JobPreempted:
    return JobPreempted(job_id=JobId("a"), attempt=1, cause="lost", preempted_at=T0 + 90 * SECOND)


def test_only_lost_attempts_use_retries() -> None:
    """Losses above the minimum do not fail the job."""
    story = (*running(3), deleted(2, 60.0))

    assert losses(given(*story, as_of=T0 + HOUR), policy(job_retries_count_max=0), T0 + 2 * HOUR) == {}
    ended = losses(given(*story, deleted(1, 70.0), as_of=T0 + HOUR), policy(job_retries_count_max=0), T0 + 2 * HOUR)[
        JobId("a")
    ]
    assert [type(each) for each in ended] == [JobPreempted, JobFinished]


def test_the_kubernetes_job_has_all_members_and_the_minimum() -> None:
    """The watcher reports it started once enough pods are ready."""
    spec = _admitted(members=5, min_members=2)
    assert isinstance(spec, JobSpec)
    manifest = job_manifest(spec, given())
    assert (manifest["spec"]["parallelism"], manifest["spec"]["completions"]) == (5, 5)

    one, two = (_ready(manifest["metadata"]["annotations"], count) for count in (1, 2))
    assert (are_all_running(one), are_all_running(two)) == (False, True)
    assert not are_all_running(_ready({}, 4))


def _ready(annotations: dict[str, str], count: int) -> core.Job:
    return core.Job(
        metadata=core.Metadata(annotations=annotations),
        spec=core.JobSpecification(parallelism=5),
        status=core.JobStatus(ready=count),
    )


def _admitted(**changes: int | str) -> JobSpec | tuple[Violation, ...]:
    changed = msgspec.structs.replace(request("a"), **changes)
    return admit(changed, event_id="e", at=T0, now=T0, policy=policy(), supply=Supply(gpus_per_node_max=8))


def test_an_invalid_minimum_is_rejected() -> None:
    """Zero, or above the number of members; equal is an ordinary gang."""
    for least in (0, 6):
        refused = _admitted(members=5, min_members=least)
        assert isinstance(refused, tuple)
        assert [each.field for each in refused] == ["min_members"]
    others = _admitted(members=5, min_members=2, runtime="jobset")
    assert isinstance(others, tuple)
    assert "for runtime job only" in others[0].reason
    spec = _admitted(members=5, min_members=5)
    assert isinstance(spec, JobSpec)
    assert (spec.member_count_min, spec.gang_count) == (None, 5)


def test_the_command_line_sets_the_minimum() -> None:
    """The flag is the field of the request."""
    assert Request(members=5, min_members=2).body({}, ()) == {"members": 5, "min_members": 2}


def test_booting_nodes_are_not_bought_again() -> None:
    """Five nodes boot for it."""
    waits = (five(), on_sale(offer()))
    coming = [bought(each) for each in buys(given(*waits))]

    assert len(coming) == 5
    assert buys(given(*waits, *coming)) == []
