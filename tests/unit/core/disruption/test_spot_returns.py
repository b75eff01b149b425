"""Whole jobs go back to spot that no drain moves: bought for, asked to save, ended as one, at a price."""

from datetime import datetime
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    HOUR,
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    given,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    quota,
)
from tests.support.stories import planned as ordered

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.disruption.protection import request_annotations
from gpu_autoscaler.core.draft import Preemption, save_key
from gpu_autoscaler.core.explain.status import StatusView, job_line
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.preemption import is_saving, preemptions
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState, UpkeepRecord
from gpu_autoscaler.events.job import JobPreempted
from gpu_autoscaler.events.policy import PolicyDirectiveGiven
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan, RequestPreemptionCheckpoint, Upkeep
from gpu_autoscaler.model.directives import Freeze
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.defer_limits import PreemptedForJob
from gpu_autoscaler.model.reasons.preempt import MovedToSpot

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
SALE = on_sale(SPOT, ON_DEMAND)
LATER = T0 + 31 * MINUTE
SAVED = LATER - MINUTE
BRIDGE: Story = (*node("n1", ON_DEMAND), *node("n2", ON_DEMAND))
FREE: Story = (*node("s1", SPOT, at=LATER - MINUTE), *node("s2", SPOT, at=LATER - MINUTE))


def gang(
    *on: str,
    saved_at: datetime | None = SAVED,
    marks: dict[str, str] | None = None,
    started_at: datetime = T0,
    **changes: Any,  # noqa: ANN401 - fields of JobSpec
) -> Story:
    """A running job with one member of 8 GPUs on each of these nodes, which saves on request if `saved_at` is set."""
    annotations = {**(marks or {}), **({} if saved_at is None else {labels.CHECKPOINTED_AT: saved_at.isoformat()})}
    story = job("train", members=len(on), placed_on=on, is_running=True, **changes)
    for number, name in enumerate(on):
        member = pod(
            f"train-{number}", on=name, gpus=8, job_id="train", owner_kind="Job", annotations=annotations, at=started_at
        )
        story = (*story, *member)
    return story


def bought_for(made: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """The offers that replace nodes, with the nodes."""
    replacing = [(buy.offer.key, buy.reason) for buy in made.purchases]
    return [(key, reason.node_names) for key, reason in replacing if isinstance(reason, ReplacesNodes)]


def asked(made: Plan) -> list[RequestPreemptionCheckpoint]:
    """The requests to save before an attempt ends."""
    return [act for act in made.upkeep_decisions if isinstance(act, RequestPreemptionCheckpoint)]


def planned(*stories: Story, at: datetime = LATER, under: ScalingPolicy | None = None) -> Plan:
    """The plan of this instant, which the plan check agrees with."""
    under = under or policy()
    return accepted_plan(given(*stories, as_of=at), under, at)


def said(*stories: Story, at: datetime = LATER) -> str:
    """What `why` says of the job."""
    return job_line("train", StatusView.of(given(*stories, as_of=at), policy(), at, planned(*stories, at=at)))


# ---- the plan


def test_why_tells_what_keeps_a_job_on_demand() -> None:
    """The saving, the price of the move, or the pause after nodes were bought for it; nothing while those boot."""
    near = on_sale(offer(usd_per_hour=29.0), ON_DEMAND)
    assert "It does not go back to spot: Moving the pods would save 9 % of the node's price" in said(
        BRIDGE, gang("n1", "n2"), near
    )
    short, sale = gang("n1", "n2", expected_duration_seconds=2700.0), on_sale(offer(usd_per_hour=26.0), ON_DEMAND)
    assert "It does not go back to spot: Moving the pods would save $" in said(BRIDGE, short, sale)
    first = planned(BRIDGE, gang("n1", "n2"), SALE)
    booting = ordered(*first.purchases, at=LATER)
    assert "spot" not in said(BRIDGE, gang("n1", "n2"), SALE, booting, at=LATER + MINUTE)
    assert "It does not go back to spot: " in said(BRIDGE, gang("n1", "n2"), SALE, booting, at=LATER + HOUR)


def test_spot_is_bought_for_a_gang_as_a_whole() -> None:
    """Half an hour after the purchase of its nodes, together, for both of them."""
    assert bought_for(planned(BRIDGE, gang("n1", "n2"), SALE, at=T0 + 29 * MINUTE)) == []

    made = planned(BRIDGE, gang("n1", "n2"), SALE)
    assert bought_for(made) == [(SPOT.key, ("n1", "n2"))] * 2
    assert asked(made) == [], "there is nothing yet to which it could move"
    assert not made.drains


def test_a_gang_with_free_spot_is_asked_to_save() -> None:
    """All its pods at once. The reason has what the move saves and costs; the spot nodes stay meanwhile."""
    made = planned(BRIDGE, FREE, gang("n1", "n2"), SALE)

    (act,) = asked(made)
    assert (act.job_id, act.attempt, act.node_names) == ("train", 1, ("n1", "n2"))
    assert isinstance(act.reason, MovedToSpot)
    assert act.reason.node_names == ("n1", "n2")
    saved_usd = 2 * (32.0 - 9.83)
    assert act.reason.saving_micro_usd_per_hour / 1e6 == pytest.approx(saved_usd, rel=0.01)
    assert act.reason.sentence().startswith("The job moves from 2 on-demand nodes (n1 and n2) to free spot nodes")
    late = planned(BRIDGE, FREE, gang("n1", "n2", saved_at=LATER), SALE, at=LATER + 20 * MINUTE)
    assert not late.drains, "empty for 21 minutes, and kept for the job"
    assert bought_for(made) == []


def test_free_spot_for_a_part_of_the_gang_is_not_enough() -> None:
    """All members move or none."""
    made = planned(BRIDGE, node("s1", SPOT, at=LATER), gang("n1", "n2"), SALE)

    assert asked(made) == []
    assert bought_for(made) == [(SPOT.key, ("n1", "n2"))] * 2


def test_a_member_that_is_on_spot_already_needs_no_other_place() -> None:
    """The job runs on s1 and n1: one place is enough."""
    made = planned(node("n1", ON_DEMAND), FREE, gang("s1", "n1"), SALE)

    (act,) = asked(made)
    assert isinstance(act.reason, MovedToSpot)
    assert (act.node_names, act.reason.node_names) == (("n1", "s1"), ("n1",))


def test_a_job_of_high_priority_moves_as_well() -> None:
    """No drain moves it; one of medium priority on one node is left to a drain."""
    high = planned(node("n1", ON_DEMAND), FREE, gang("n1", priority=1000), SALE)
    medium = planned(node("n1", ON_DEMAND), FREE, gang("n1"), SALE)

    assert [act.job_id for act in asked(high)] == ["train"]
    assert asked(medium) == []


@pytest.mark.parametrize(
    "stays",
    [
        gang("n1", "n2", saved_at=None),
        gang("n1", "n2", marks={labels.DO_NOT_DISRUPT: "true"}),
        gang("n1", "n2", is_preemptible=False),
        gang("n1", "n2", within="topology.kubernetes.io/zone"),
        gang("n1", "n2", started_at=LATER - 4 * MINUTE),
        gang("n1", "n2", duration_seconds_max=2700.0),
        (*gang("n1", "n2"), *pod("other", on="n1", gpus=0), *pod("others", on="n2", gpus=0)),
    ],
    ids=["saves_nothing", "protected", "off_spot", "domain", "just_began", "nearly_done", "shared_nodes"],
)
def test_a_job_stays_that_must_or_for_which_it_is_not_worth_it(stays: Story) -> None:
    """It cannot save, may not move, needs one domain, began or ends soon, or its nodes would stay for others."""
    made = planned(BRIDGE, FREE, stays, SALE)

    assert asked(made) == []
    assert bought_for(made) == []


def test_a_job_stays_while_one_of_its_nodes_is_young_or_leaves() -> None:
    """Its member there would need a place as well."""
    young = (*node("n1", ON_DEMAND), *node("n2", ON_DEMAND, at=LATER - 10 * MINUTE))
    deleted = (*node("n1", ON_DEMAND), *node("n2", ON_DEMAND, deleting_since=LATER, has_finalizer=True))

    for nodes in (young, deleted):
        assert asked(planned(nodes, FREE, gang("n1", "n2"), SALE)) == []


def test_a_job_stays_where_the_policy_moves_no_work() -> None:
    """Frozen, without consolidation, or for a saving that is too small a share."""
    for under in (
        policy(is_frozen=True),
        policy(is_consolidation_on=False),
        policy(consolidation_saving_ratio_min=0.9),
    ):
        made = planned(BRIDGE, FREE, gang("n1", "n2"), SALE, under=under)
        assert (asked(made), bought_for(made)) == ([], [])


def test_nothing_is_bought_again_for_hours() -> None:
    """The last purchase was taken by other work: the job waits for the next one, or for free spot."""
    first = planned(BRIDGE, gang("n1", "n2"), SALE)
    reasons = [buy.reason for buy in first.purchases]
    taken = [node(f"s{number}", SPOT, at=LATER, reason=reason) for number, reason in enumerate(reasons, 1)]
    busy = [pod(f"other-{number}", on=f"s{number}", gpus=8, at=LATER) for number in (1, 2)]

    assert bought_for(planned(BRIDGE, *taken, *busy, gang("n1", "n2"), SALE, at=LATER + HOUR)) == []
    later = planned(BRIDGE, *taken, *busy, gang("n1", "n2"), SALE, at=LATER + 7 * HOUR)
    assert bought_for(later) == [(SPOT.key, ("n1", "n2"))] * 2


# ---- the end of the attempt


def ended(*stories: Story, at: datetime = LATER, is_asked: bool = True) -> tuple[Preemption, ...]:
    """The attempts that are to end; `is_asked`: a plan has asked the job to save a minute ago."""
    state = _asked(given(*stories, as_of=at), is_asked=is_asked)
    return preemptions(state, policy(), at, scheduled=schedule(state, policy(), at), barred={})


def _asked(state: ClusterState, *, is_asked: bool = True) -> ClusterState:
    known = UpkeepRecord(attempts_count=1, retry_at=LATER, decided_at=SAVED - SECOND)
    return msgspec.structs.replace(state, upkeep={save_key(JobId("train"), 1): known} if is_asked else {})


def test_the_attempt_ends_once_a_plan_has_asked() -> None:
    """And while the free spot nodes are there: what others take is not free."""
    (preemption,) = ended(BRIDGE, FREE, gang("n1", "n2"), SALE)
    assert (preemption.job_id, preemption.attempt, preemption.retries_used_count) == ("train", 1, 0)

    assert ended(BRIDGE, FREE, gang("n1", "n2"), SALE, is_asked=False) == ()
    assert ended(BRIDGE, FREE, gang("n1", "n2"), job("other", at=LATER), SALE) == ()


def test_the_free_nodes_are_kept_for_a_limited_time() -> None:
    """Minutes after the request the attempt has not ended: nobody is asked again, and the nodes leave."""
    stories = (BRIDGE, FREE, gang("n1", "n2", saved_at=LATER + 19 * MINUTE), SALE)
    late = LATER + 20 * MINUTE
    state = given(*stories, as_of=late)
    known = UpkeepRecord(attempts_count=2, retry_at=LATER + MINUTE, decided_at=LATER)
    state = msgspec.structs.replace(state, upkeep={save_key(JobId("train"), 1): known})

    made = accepted_plan(state, policy(), late)
    assert asked(made) == []
    assert [drain.node_name for drain in made.drains] == ["s1"], "one at a time"
    assert schedule(state, policy(), late).returning is None


def freeze() -> Story:
    """A directive that freezes the cluster."""
    fact = PolicyDirectiveGiven(
        directive=Freeze(), given_by="ops", reason="looking", given_at=SAVED, until=LATER + HOUR
    )
    return (TimedFact(fact, SAVED),)


def test_no_attempt_ends_under_a_freeze() -> None:
    """Of the policy, or a directive that came after the request to save."""
    state = _asked(given(BRIDGE, FREE, gang("n1", "n2"), SALE, freeze(), as_of=LATER))
    assert schedule(state, policy(), LATER).returning is None
    state = _asked(given(BRIDGE, FREE, gang("n1", "n2"), SALE, as_of=LATER))
    assert schedule(state, policy(is_frozen=True), LATER).returning is None
    assert schedule(state, policy(), LATER).returning is not None


def test_a_spot_node_of_unknown_price_is_no_place_to_save_money() -> None:
    """Unknown is not free."""
    unknown = [node(name, offer(usd_per_hour=None), at=SAVED) for name in ("s1", "s2")]
    assert asked(planned(BRIDGE, *unknown, gang("n1", "n2"), SALE)) == []


def test_all_pods_save_before_the_attempt_ends() -> None:
    """One that has not answered is waited for."""
    requested = request_annotations(SAVED - SECOND, SAVED + MINUTE)
    stories = (BRIDGE, FREE, gang("n1", "n2", marks=requested), SALE)
    state = _asked(given(*stories, as_of=LATER))
    (preemption,) = ended(*stories)
    assert not is_saving(preemption, state, policy(), LATER)

    first, second = preemption.pods
    old = tuple((key, "" if key == labels.CHECKPOINTED_AT else value) for key, value in second.annotations)
    waited = msgspec.structs.replace(preemption, pods=(first, msgspec.structs.replace(second, annotations=old)))
    assert is_saving(waited, state, policy(), LATER)


def test_work_that_was_not_saved_lately_counts_as_lost() -> None:
    """The last save was half an hour ago: what both nodes have done since costs more than the move saves."""
    assert len(ended(BRIDGE, FREE, gang("n1", "n2", expected_duration_seconds=2700.0), SALE)) == 1
    assert ended(BRIDGE, FREE, gang("n1", "n2", expected_duration_seconds=2700.0, saved_at=T0), SALE) == ()


MOVED = MovedToSpot(
    node_names=("n1", "n2"), saving_micro_usd_per_hour=44_000_000, remaining_seconds=3600.0, move_micro_usd=4_000_000
)


def moved(at: datetime) -> Story:
    """The end of the attempt."""
    fact = JobPreempted(
        job_id=JobId("train"),
        attempt=1,
        cause="moved_to_spot",
        preempted_at=at,
        is_own_choice=True,
        retries_used_count=0,
        preemption=MOVED,
    )
    return (TimedFact(fact, at),)


def test_the_job_keeps_its_places_on_spot_until_its_pods_have_ended() -> None:
    """Another job does not take them; then it is placed on spot, though its old nodes are free too."""
    other = job("other", at=LATER, priority=400)
    ending = given(BRIDGE, FREE, gang("n1", "n2", priority=500), moved(LATER), other, SALE, as_of=LATER)
    held = {entry.subject: entry.reason for entry in schedule(ending, policy(), LATER).deferred}
    reason = held["job/train"]
    assert isinstance(reason, PreemptedForJob)
    assert (reason.for_job, reason.pods_remaining_count) == (None, 2)
    assert reason.sentence() == "The job moves; 2 pods of it must end first."
    assert schedule(ending, policy(), LATER).placements == ()

    gone = msgspec.structs.replace(ending, pods={})
    placed = {str(each.job_id): each.node_names for each in schedule(gone, policy(), LATER).placements}
    assert sorted(placed["train"]) == ["s1", "s2"]


def test_the_job_keeps_its_places_where_its_own_pods_fill_a_resource_quota() -> None:
    """They free it as they end: that quota holds nobody else's places."""
    other = job("other", at=LATER, priority=400, namespace="elsewhere")
    full = quota("gpus", {"requests.nvidia.com/gpu": 16}, {"requests.nvidia.com/gpu": 16}, namespace="default")
    own = gang("n1", "n2", namespace="default")
    ending = given(BRIDGE, FREE, own, moved(LATER), other, full, SALE, as_of=LATER)

    made = schedule(ending, policy(), LATER)
    assert made.placements == ()
    assert isinstance({entry.subject: entry.reason for entry in made.deferred}["job/train"], PreemptedForJob)


# ---- the plan check


def refused(changes: dict[str, Any], *stories: Story, under: ScalingPolicy | None = None) -> list[str]:
    """What the plan check says in this state to the request that a plan makes with two free spot nodes, its reason
    changed."""
    (act,) = asked(made := planned(BRIDGE, FREE, gang("n1", "n2"), SALE))
    act = msgspec.structs.replace(act, reason=msgspec.structs.replace(act.reason, **changes))
    judged = msgspec.structs.replace(made, upkeep=Upkeep(decisions=(act,)))
    return [str(violation) for violation in check(judged, given(*stories, SALE, as_of=LATER), under or policy())]


@pytest.mark.parametrize(
    ("changes", "stories", "sentence"),
    [
        ({}, (*BRIDGE, *node("s1", SPOT)), "fewer than 2 members fit on free spot nodes"),
        ({"node_names": ("s1",)}, (*BRIDGE, *FREE), "does not leave on-demand nodes"),
        ({"move_micro_usd": 50_000_000}, (*BRIDGE, *FREE), "costs more than it saves"),
        ({"saving_micro_usd_per_hour": 65_000_000}, (*BRIDGE, *FREE), "less than the saving"),
        ({}, (*node("n1", ON_DEMAND, at=SAVED), *node("n2", ON_DEMAND), *FREE), "is younger than 1800 s"),
    ],
)
def test_the_plan_check_judges_the_move_by_itself(changes: dict[str, Any], stories: Story, sentence: str) -> None:
    """Free places, the nodes left, their age, and the figures."""
    assert any(sentence in violation for violation in refused(changes, stories, gang("n1", "n2")))


def test_the_plan_check_judges_pods_and_policy() -> None:
    """Protected pods, pods that save nothing, a freeze."""
    for other in (gang("n1", "n2", marks={labels.DO_NOT_DISRUPT: "true"}), gang("n1", "n2", saved_at=None)):
        assert refused({}, BRIDGE, FREE, other)
    said = refused({}, BRIDGE, FREE, gang("n1", "n2"), under=policy(is_frozen=True))
    assert any("the policy moves no work by choice" in violation for violation in said)
    assert refused({}, BRIDGE, FREE, gang("n1", "n2")) == []
