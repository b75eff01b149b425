"""A job that can do with fewer members than it asks for: its gang is whole or nothing, the others come and go."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    Told,
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

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.explain.status import StatusView, job_line
from gpu_autoscaler.core.intake.admission import Supply, admit
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobFinished, JobPreempted
from gpu_autoscaler.events.pod import PodGone
from gpu_autoscaler.kube.translate.job import are_all_running
from gpu_autoscaler.kube.wire import core
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, ReleaseInstance
from gpu_autoscaler.model.ids import JobId, PodUid
from gpu_autoscaler.model.jobs import JobSpec, Violation
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import DeferReason
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected, GangPending
from gpu_autoscaler.model.reasons.drain import GangAbandoned
from gpu_autoscaler_services.cli.jobs import Request
from gpu_autoscaler_services.scheduler.attempts import losses
from gpu_autoscaler_services.scheduler.manifest import job_manifest


def five(**changes: Any) -> Story:  # noqa: ANN401 - fields of the job
    """The job `a` of five members, of which two are enough."""
    return job("a", members=5, member_count_min=2, **changes)


def placed(state: ClusterState) -> list[tuple[str, ...]]:
    """The nodes of each job that starts now."""
    return [each.node_names for each in schedule(state, policy(), T0).placements]


def buys(state: ClusterState, under: ScalingPolicy | None = None) -> list[BuyNode]:
    """What the plan of now buys; the second opinion has nothing against it."""
    under = under or policy()
    made = plan(state, under, T0)
    assert check(made, state, under) == ()
    return [each for each in made.decisions if isinstance(each, BuyNode)]


GANG = ("job/a",)


def wanted(decision: BuyNode) -> tuple[str, ...]:
    """What the node is bought for."""
    assert isinstance(decision.reason, UnmetDemand)
    return decision.reason.demand


def reasons_for_members(state: ClusterState, under: ScalingPolicy) -> dict[str, DeferReason]:
    """Why members beyond the gang are not bought for."""
    held = {each.subject: each.reason for each in plan(state, under, T0).deferred}
    return {key: reason for key, reason in held.items() if key.startswith("member/")}


def member(number: int, *, on: str | None = None) -> Story:
    """A pod of the job `a`."""
    return pod(f"a-{number}", gpus=8, on=on, job_id="a", owner_kind="Job", labels={labels.JOB_ID: "a"})


def gone(number: int, at_seconds: float) -> Story:
    """The pod went before it was done."""
    said = PodGone(
        epoch=EPOCH, version=2, pod_uid=PodUid(f"uid-a-{number}"), namespace="default", name=f"a-{number}",
        node_name=f"n{number}", job_id=JobId("a"), phase="running",
    )  # fmt: skip
    return (Told(said, T0 + timedelta(seconds=at_seconds)),)


def running(count: int, *, least: int | None = 2) -> tuple[Story, ...]:
    """The job `a` of five members, of which so many run, each on a node of its own."""
    names = tuple(f"n{number}" for number in range(count))
    nodes = [node(name) for name in names]
    pods = [member(number, on=f"n{number}" if number < count else None) for number in range(5)]
    started = job("a", members=5, member_count_min=least, placed_on=names, is_running=True)
    return (*nodes, *pods, started)


@pytest.mark.parametrize(("nodes", "starts"), [(1, 0), (2, 2), (3, 3), (5, 5), (7, 5)])
def test_it_starts_with_as_many_as_have_room_from_its_least_on(nodes: int, starts: int) -> None:
    """Below two nothing starts; above five nothing is added."""
    state = given(*(node(f"n{number}") for number in range(nodes)), five())

    assert [len(each) for each in placed(state)] == ([starts] if starts else [])


def test_without_a_least_number_all_start_or_none() -> None:
    """What was so before stays so."""
    nodes = [node(f"n{number}") for number in range(4)]

    assert placed(given(*nodes, job("a", members=5))) == []


def test_its_gang_and_the_members_beyond_it_are_bought_in_one_plan() -> None:
    """Two nodes of one transaction for the two that it cannot start without, and one for each of the other three."""
    five_bought = buys(given(five(), on_sale(offer())))

    assert [each.gang for each in five_bought] == ["job/a", "job/a", None, None, None]
    assert [wanted(each) for each in five_bought] == [GANG, GANG, *(("member/a/3",), ("member/a/4",), ("member/a/5",))]


@pytest.mark.parametrize(("most", "count"), [(0, 0), (1, 0), (2, 2), (3, 3), (4, 4), (9, 5)])
def test_a_limit_takes_from_the_members_beyond_the_gang_first(most: int, count: int) -> None:
    """Below two nothing is bought at all; above it as many as the limit allows, and each other one is told why."""
    limited, state = policy(nodes_count_max=most), given(five(), on_sale(offer()))
    told = reasons_for_members(state, limited)

    assert len(buys(state, limited)) == count
    expected = [GangPending] * 3 if count < 2 else [NodesLimit] * (5 - count)
    assert [type(each) for each in told.values()] == expected


def test_what_another_job_cannot_start_without_comes_before_members_beyond_a_gang() -> None:
    """Of equal priority both gangs are bought for though one came later, and the limit leaves nothing over."""
    limited = policy(nodes_count_max=4)
    state = given(five(), job("b", gpus=8, members=2, at=T0 + SECOND), on_sale(offer()), as_of=T0 + MINUTE)

    assert [each.gang for each in buys(state, limited)] == ["job/a", "job/a", "job/b", "job/b"]
    assert [type(each) for each in reasons_for_members(state, limited).values()] == [NodesLimit] * 3


def test_members_beyond_a_gang_take_no_room_before_it_has_its_own() -> None:
    """One node is free and nothing may be bought: the gang has no place, and the node is another's."""
    frozen = policy(nodes_count_max=1)
    state = given(node("n0"), five(), job("b", gpus=8, at=T0 + SECOND), on_sale(offer()), as_of=T0 + MINUTE)
    made = plan(state, frozen, T0 + MINUTE)

    assert check(made, state, frozen) == ()
    held = {each.subject: each.reason for each in made.deferred}
    assert isinstance(held["job/b"], CapacityExpected)
    assert [type(held[f"member/a/{number}"]) for number in (3, 4, 5)] == [GangPending] * 3
    assert placed(state) == [("n0",)]


def test_what_is_on_its_way_for_the_gang_is_not_taken_by_the_others() -> None:
    """The gang's two nodes boot, and those of the others were refused: three more are bought, for these alone."""
    waits = (five(), on_sale(offer()))
    first = buys(given(*waits))
    again = buys(given(*waits, *(bought(each) for each in first if each.gang is not None)))

    assert [wanted(each) for each in again] == [("member/a/3",), ("member/a/4",), ("member/a/5",)]
    assert [each.gang for each in again] == [None] * 3


def test_what_is_on_its_way_for_the_others_is_not_the_gangs() -> None:
    """Three nodes boot for the others, and the gang's two were refused: both are bought again, as one transaction."""
    waits = (five(), on_sale(offer()))
    first = buys(given(*waits))
    again = buys(given(*waits, *(bought(each) for each in first if each.gang is None)))

    assert [each.gang for each in again] == ["job/a", "job/a"]


def test_what_was_bought_for_the_members_is_their_pods_own() -> None:
    """The gang runs, three pods wait, and the nodes that were bought for them before they were pods still boot."""
    waits = (five(), on_sale(offer()))
    coming = [bought(each) for each in buys(given(*waits)) if each.gang is None]

    assert len(coming) == 3
    assert buys(given(*running(2), *coming, on_sale(offer()))) == []


def test_a_gang_that_is_given_up_gives_back_what_stands_by_for_the_others() -> None:
    """Nothing is for sale any more, and the gang has no node: what boots for the others has nobody to serve."""
    waits, limited = (five(), on_sale(offer())), policy(nodes_count_max=3)
    coming = [bought(each) for each in buys(given(*waits)) if each.gang is None]
    made = plan(given(*waits, *coming), limited, T0)

    assert check(made, given(*waits, *coming), limited) == ()
    back = [each for each in made.decisions if isinstance(each, ReleaseInstance)]
    assert [type(each.reason) for each in back] == [GangAbandoned] * 3
    assert buys(given(*waits, *coming), limited) == []


def test_the_gang_keeps_its_nodes_whatever_becomes_of_the_others() -> None:
    """The limit is lowered to the gang's two nodes, which boot: they stay, and each other member is told why."""
    waits, limited = (five(), on_sale(offer())), policy(nodes_count_max=2)
    state = given(*waits, *(bought(each) for each in buys(given(*waits)) if each.gang is not None))

    assert plan(state, limited, T0).decisions == ()
    assert [type(each) for each in reasons_for_members(state, limited).values()] == [NodesLimit] * 3


def test_members_that_belong_together_are_not_bought_before_their_gang_has_a_place() -> None:
    """Which zone that will be, nobody knows: the two of the gang alone."""
    together = buys(given(five(within=labels.ZONE), on_sale(offer())))

    assert [each.gang for each in together] == ["job/a", "job/a"]


def test_why_tells_what_keeps_the_members_beyond_the_gang() -> None:
    """The gang's nodes are on their way; of the three others two have no room under the limit."""
    limited, waits = policy(nodes_count_max=3), (five(), on_sale(offer()))
    state = given(*waits, *(bought(each) for each in buys(given(*waits), limited)))
    line = job_line("a", StatusView.of(state, limited, T0, plan(state, limited, T0)))

    assert "2 nodes that were bought for it are on the way" in line
    assert "It starts without member 4 of job a (1 more wait as well), which waits because" in line
    assert "nodes_count_max (3) is raised" in line


def test_members_beyond_the_gang_are_bought_as_far_as_limits_go() -> None:
    """Two of five run, three wait as pods: two more nodes are within the limit, and the third pod is told why not."""
    limited = policy(nodes_count_max=4)
    state = given(*running(2), on_sale(offer()))
    made = plan(state, limited, T0)

    assert check(made, state, limited) == ()
    assert [each.gang for each in buys(state, limited)] == [None, None]
    assert [type(each.reason) for each in made.deferred if each.subject.startswith("pod/")] == [NodesLimit]


def test_the_room_of_what_starts_is_kept_until_its_pods_are_there() -> None:
    """Placed with three of five, and no pod yet: three nodes are taken, the fourth is another's."""
    names = ("n0", "n1", "n2")
    nodes = [node(f"n{number}") for number in range(4)]
    state = given(*nodes, five(placed_on=names), job("b", gpus=8))

    assert placed(state) == [("n3",)]


def after(state: ClusterState) -> list[type]:
    """What the loss means for the job."""
    return [type(each) for facts in losses(state, policy()).values() for each in facts]


def test_a_loss_above_the_least_number_is_none() -> None:
    """Three run and one goes: two go on, and the one that comes back waits as any pod does."""
    story = running(3)

    assert after(given(*story, gone(2, 60.0), as_of=T0 + HOUR)) == []
    assert after(given(*running(3, least=None), gone(2, 60.0), as_of=T0 + HOUR)) == [JobPreempted]


def test_a_loss_below_the_least_number_ends_the_attempt() -> None:
    """Two of three go, at two times: what counts is the last one, by which too few were left."""
    state = given(*running(3), gone(1, 60.0), gone(2, 90.0), as_of=T0 + HOUR)
    (lost,) = losses(state, policy())[JobId("a")]

    assert isinstance(lost, JobPreempted)
    assert lost.preempted_at == T0 + 90 * SECOND
    assert "a-2" in lost.cause


def test_the_next_attempt_begins_when_enough_are_bound_again() -> None:
    """Of five members two are bound: that is a placement, and Kubernetes has chosen the nodes."""
    story = (*running(3), gone(1, 60.0), gone(2, 90.0))
    state = given(*story, (Told(_preempted(), T0 + 91 * SECOND),), as_of=T0 + HOUR)
    assert schedule(state, policy(), T0 + HOUR).placements == ()

    back = (node("n9"), pod("a-1b", gpus=8, on="n9", job_id="a", owner_kind="Job", at=T0 + HOUR))
    state = given(*story, *back, (Told(_preempted(), T0 + 91 * SECOND),), as_of=T0 + HOUR)
    (again,) = schedule(state, policy(), T0 + HOUR).placements
    assert (again.attempt, again.node_names) == (2, ("n0", "n9"))


def _preempted() -> JobPreempted:
    return JobPreempted(job_id=JobId("a"), attempt=1, cause="lost", preempted_at=T0 + 90 * SECOND)


def test_retries_are_spent_by_lost_attempts_alone() -> None:
    """Any number of members may be lost above the least number; the job is not failed for it."""
    story = (*running(3), gone(2, 60.0))

    assert losses(given(*story, as_of=T0 + HOUR), policy(job_retries_count_max=0)) == {}
    ended = losses(given(*story, gone(1, 70.0), as_of=T0 + HOUR), policy(job_retries_count_max=0))[JobId("a")]
    assert [type(each) for each in ended] == [JobPreempted, JobFinished]


def test_the_kubernetes_job_has_all_members_and_says_how_many_are_enough() -> None:
    """So it never changes; the watcher calls it started when enough are ready."""
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
    said = msgspec.structs.replace(request("a"), **changes)
    return admit(said, event_id="e", at=T0, now=T0, policy=policy(), supply=Supply(gpus_per_node_max=8))


def test_a_least_number_that_cannot_be_meant_is_refused() -> None:
    """None, or more than there are; as many as there are is an ordinary gang."""
    for least in (0, 6):
        refused = _admitted(members=5, min_members=least)
        assert isinstance(refused, tuple)
        assert [each.field for each in refused] == ["min_members"]
    others = _admitted(members=5, min_members=2, runtime="jobset")
    assert isinstance(others, tuple)
    assert "for the runtime job alone" in others[0].reason
    spec = _admitted(members=5, min_members=5)
    assert isinstance(spec, JobSpec)
    assert (spec.member_count_min, spec.gang_count) == (None, 5)


def test_the_command_line_says_it() -> None:
    """The flag is the field of the request."""
    assert Request(members=5, min_members=2).body({}, ()) == {"members": 5, "min_members": 2}


def test_what_was_bought_is_not_bought_again() -> None:
    """Five nodes are on their way for it: nothing more is bought until it runs."""
    waits = (five(), on_sale(offer()))
    coming = [bought(each) for each in buys(given(*waits))]

    assert len(coming) == 5
    assert buys(given(*waits, *coming)) == []
