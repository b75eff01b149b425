"""ProvisioningRequests are gangs: bought whole or not at all, answered by conditions, booked until their pods come."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.provisioning import (
    NO_FINALIZERS,
    answers,
    condition,
    consumer,
    deferrals,
    planned_at,
    refusals,
    request,
)
from tests.support.purchases import bought as ordered
from tests.support.purchases import provider_id, purchase
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, given, node, offer, on_sale, pod, policy
from tests.support.timed_facts import TimedFact, record, resources

from gpu_autoscaler.core.demand.provisioning_requests import (
    MEMBERS_COUNT_MAX,
    OPEN_COUNT_MAX,
    TEMPLATE_SECONDS_MAX,
    VALID_SECONDS,
)
from gpu_autoscaler.core.explain.status import StatusView, request_line
from gpu_autoscaler.core.explain.story import why_request
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.events.scaling import ScalingNodeTerminated, ScalingPlanMade
from gpu_autoscaler.model.decisions import AnswerProvisioningRequest, Cut
from gpu_autoscaler.model.demands import CHECK_CAPACITY, PodSet, ProvisioningCondition
from gpu_autoscaler.model.ids import ActionId, PlanId
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeDemands, NodeSelectorTerm

BOOKED = 10 * MINUTE
ACCEPTED = condition("Accepted")
FOUND = ("Provisioned", True, "CapacityIsProvisioned")


def provisioned(at: datetime = T0) -> tuple[ProvisioningCondition, ...]:
    """Status of a request whose capacity was found at that time."""
    return (ACCEPTED, condition("Provisioned", at=at, reason="CapacityIsProvisioned"))


def test_all_pod_sets_are_bought_for_together() -> None:
    """Two pods of 8 GPUs and one more of another set: three nodes of one gang, and the request is accepted."""
    made = planned_at(T0, request("r", 2, 1), on_sale(offer(gpus=8)))
    assert [decision.gang for decision in made.purchases] == ["provisioning/uid-r"] * 3
    assert answers(made) == [("Accepted", True, "Accepted")]


def test_a_part_of_a_request_is_never_bought() -> None:
    """Two of three nodes are allowed: none is bought, and the answer says why."""
    made = planned_at(T0, request("r", 3), on_sale(offer(gpus=8)), rules=policy(nodes_count_max=2))
    assert made.purchases == []
    assert answers(made) == [("Accepted", True, "Accepted"), ("Provisioned", False, "CapacityIsNotFound")]
    assert deferrals(made)["provisioning/uid-r"] == "nodes_limit"


def test_capacity_counts_once_all_nodes_are_ready() -> None:
    """One of two nodes boots: not yet; both are ready: provisioned, and nothing is bought for it."""
    decision = purchase("buy-n2", offer(gpus=8), at=T0)
    booting = ordered(msgspec.structs.replace(decision, gang="provisioning/uid-r"), at=T0)
    half = planned_at(T0, request(conditions=[ACCEPTED]), node("n1"), booting, on_sale(offer(gpus=8)))
    assert (half.purchases, answers(half)) == ([], [("Provisioned", False, "CapacityIsOrdered")])
    whole = planned_at(T0, request(conditions=[ACCEPTED]), node("n1"), node("n2"), on_sale(offer(gpus=8)))
    assert (whole.purchases, answers(whole)) == ([], [FOUND])


def test_an_answer_that_the_status_has_is_not_repeated() -> None:
    """Accepted, and not found for a known reason: nothing new to write."""
    known = [ACCEPTED, condition("Provisioned", is_true=False, reason="CapacityIsNotFound")]
    assert answers(planned_at(T0, request(conditions=known))) == []


# ---- checks


def test_nothing_is_bought_for_a_check() -> None:
    """One free node of two: not found, although an offer would fit; then found on both."""
    check = request(class_name=CHECK_CAPACITY, conditions=[ACCEPTED])
    made = planned_at(T0, check, node("n1"), on_sale(offer(gpus=8)))
    assert made.purchases == []
    assert answers(made) == [("Provisioned", False, "CapacityIsNotFound")]
    assert deferrals(made)["provisioning/uid-r"] == "capacity_not_free"
    made = planned_at(T0, check, node("n1"), node("n2"), on_sale(offer(gpus=8)))
    assert answers(made) == [("Provisioned", True, "CapacityIsFound")]


def test_a_check_gets_what_other_work_leaves() -> None:
    """A pod waits for one of the two nodes that the older check would need."""
    story = (node("n1"), node("n2"), pod("p", gpus=8, at=T0), on_sale(offer(gpus=8)))
    made = planned_at(T0, request(class_name=CHECK_CAPACITY, at=T0 - HOUR, conditions=[ACCEPTED]), *story)
    assert (made.purchases, answers(made)) == ([], [("Provisioned", False, "CapacityIsNotFound")])


def test_a_check_that_is_tried_once_fails() -> None:
    """With parameter noRetry, as Kueue can set it; with capacity it is found."""
    once = request(class_name=CHECK_CAPACITY, is_tried_once=True, conditions=[ACCEPTED])
    assert answers(planned_at(T0, once, node("n1"))) == [("Failed", True, "CapacityIsNotFound")]
    assert answers(planned_at(T0, once, node("n1"), node("n2"))) == [("Provisioned", True, "CapacityIsFound")]


def test_nothing_is_bought_for_the_pods_of_a_check() -> None:
    """They wait with a reason; pods of an atomic request count as any other."""
    waiting = consumer("p", class_name=CHECK_CAPACITY, gpus=8)
    made = planned_at(T0, waiting, on_sale(offer(gpus=8)))
    assert made.purchases == []
    assert deferrals(made) == {"pod/uid-p": "capacity_not_free"}
    assert len(planned_at(T0, consumer("p", gpus=8), on_sale(offer(gpus=8))).purchases) == 1


# ---- volumes, devices and priority of the pods

MISSING = "claim research/data does not exist"


def with_pods(**fields: Any) -> Story:  # noqa: ANN401 - fields of PodSet
    """A request for two pods of 8 GPUs that are so."""
    pods = PodSet(count=2, requests=resources(gpus=8, pods=1), **fields)
    return request("r", 2, pod_sets=(pods,), conditions=[ACCEPTED])


@pytest.mark.parametrize("field", ["volume_trouble", "device_trouble"])
def test_no_node_is_bought_before_volumes_and_devices_are_known(field: str) -> None:
    """Nor do free nodes count as capacity; the condition names what is missing, and it is tried again."""
    made = planned_at(T0, with_pods(**{field: MISSING}), node("n1"), node("n2"), on_sale(offer(gpus=8)))
    assert (made.purchases, answers(made)) == ([], [("Provisioned", False, "CapacityIsNotFound")])
    (act,) = (act for act in made.upkeep_decisions if isinstance(act, AnswerProvisioningRequest))
    assert MISSING in act.reason.sentence()
    assert "It is tried again." in act.reason.sentence()
    tag = deferrals(made)["provisioning/uid-r/0"]
    assert tag == {"volume_trouble": "volume_not_ready", "device_trouble": "device_claims_unsupported"}[field]


def test_nodes_are_bought_in_the_zone_of_a_volume() -> None:
    """Although another zone costs less; without an offer in the zone nothing is bought."""
    zone = NodeSelectorTerm((LabelRequirement("topology.kubernetes.io/zone", "In", ("b",)),))
    waiting = with_pods(demands=NodeDemands(node_affinity=(zone,)))
    cheap, other = offer(gpus=8, zone="a"), offer(gpus=8, zone="b", usd_per_hour=99.0)
    assert [decision.offer.zone for decision in planned_at(T0, waiting, on_sale(cheap, other)).purchases] == ["b", "b"]
    made = planned_at(T0, waiting, on_sale(cheap))
    assert (made.purchases, answers(made)) == ([], [("Provisioned", False, "CapacityIsNotFound")])


def test_a_request_of_higher_priority_is_served_first() -> None:
    """By the sign of the priority of its pods' class, as pods are, although it is younger."""
    pods = PodSet(count=1, requests=resources(gpus=8, pods=1), priority=1000)
    urgent = request("urgent", 1, pod_sets=(pods,), at=T0 + SECOND)
    made = planned_at(T0 + HOUR, request("r", 1), urgent, on_sale(offer(gpus=8)), rules=policy(nodes_count_max=1))
    assert [decision.gang for decision in made.purchases] == ["provisioning/uid-urgent"]


def test_booked_capacity_stays_booked_when_a_volume_is_lost() -> None:
    """The pods may still come."""
    pods = PodSet(count=2, requests=resources(gpus=8, pods=1), volume_trouble=MISSING)
    booked = request("r", 2, pod_sets=(pods,), conditions=provisioned())
    made = planned_at(T0, node("n1"), node("n2"), booked, pod("p", gpus=8), on_sale(offer(gpus=8)))
    assert (len(made.purchases), answers(made)) == (1, [])


# ---- booking


def test_booked_capacity_is_kept_and_not_given_to_others() -> None:
    """Two idle nodes are booked: neither is removed, and a pod gets a third one."""
    later = T0 + BOOKED - SECOND
    story = (node("n1"), node("n2"), request(conditions=provisioned()))
    made = planned_at(later, *story, on_sale(offer(gpus=8)), rules=policy(idle_seconds=60.0))
    assert not made.drains
    made = planned_at(T0, *story, pod("p", gpus=8), on_sale(offer(gpus=8)))
    assert len(made.purchases) == 1


def test_a_booking_ends_after_ten_minutes() -> None:
    """To the second; then the nodes are idle as any others."""
    story = (node("n1"), node("n2"), request(conditions=provisioned()))
    rules = policy(idle_seconds=60.0, removal={"is_finalizer_on": False})
    assert answers(planned_at(T0 + BOOKED - SECOND, *story, rules=rules)) == []
    made = planned_at(T0 + BOOKED, *story, rules=rules)
    assert answers(made) == [("BookingExpired", True, "CapacityReservationTimeExpired")]
    assert made.drains


@pytest.mark.parametrize("pods_count", [1, 2])
def test_a_pod_that_uses_a_request_counts_once(pods_count: int) -> None:
    """Booked for two: with one or two of its pods waiting, another pod still finds the third node free."""
    nodes: list[Story] = [node(name) for name in ("n1", "n2", "n3")]
    early = T0 - MINUTE  # no burst: it would not be bought for yet
    pods = [consumer(f"p{number}", gpus=8, at=early) for number in range(pods_count)]
    story = (*nodes, request(conditions=provisioned()), *pods, pod("other", gpus=8, at=early))
    assert planned_at(T0, *story, on_sale(offer(gpus=8))).purchases == []


def test_annotations_of_older_kueue_count_too() -> None:
    """Both keys name the request."""
    old = {"cluster-autoscaler.kubernetes.io/consume-provisioning-request": "r"}
    story = (node("n1"), node("n2"), request(conditions=provisioned()))
    pods = [consumer(name, gpus=8, annotations=old, at=T0 - MINUTE) for name in ("p", "q")]
    assert planned_at(T0, *story, *pods, on_sale(offer(gpus=8))).purchases == []


def test_a_booked_node_that_ends_revokes_the_capacity() -> None:
    """A node that was bought for the request ends before the pods come; without such an end nothing is revoked."""
    decision = msgspec.structs.replace(purchase("buy-n2", offer(gpus=8), at=T0), gang="provisioning/uid-r")
    end = ScalingNodeTerminated(
        plan_id=PlanId("plan-1"),
        action_id=ActionId("buy-n2"),
        order_action_id=ActionId("buy-n2"),
        provider_id=provider_id("buy-n2"),
        terminated_at=T0 + MINUTE,
        node_name="n2",
    )
    booked = request(conditions=provisioned())
    lost = planned_at(T0 + 2 * MINUTE, node("n1"), ordered(decision, at=T0), (TimedFact(end, T0 + MINUTE),), booked)
    assert answers(lost) == [("CapacityRevoked", True, "NodeLost")]
    assert answers(planned_at(T0 + 2 * MINUTE, node("n1"), booked)) == []


# ---- limits and failures


def test_a_request_fails_when_it_is_too_old() -> None:
    """After ValidUntilSeconds, or a week; a second before it is still sought."""
    valid = timedelta(seconds=60)
    short = request(valid_seconds=60.0, conditions=[ACCEPTED])
    assert answers(planned_at(T0 + valid, short)) == [("Failed", True, "Expired")]
    assert ("Failed", True, "Expired") not in answers(planned_at(T0 + valid - SECOND, short))
    made = planned_at(T0 + timedelta(seconds=VALID_SECONDS), request(conditions=[ACCEPTED]))
    assert answers(made) == [("Failed", True, "Expired")]


def test_a_request_for_too_many_pods_fails() -> None:
    """One more than the limit; at the limit it is sought."""
    most = answers(planned_at(T0, request("r", MEMBERS_COUNT_MAX)))
    assert ("Accepted", True, "Accepted") in most
    assert answers(planned_at(T0, request("r", MEMBERS_COUNT_MAX + 1))) == [("Failed", True, "FailedToCreatePods")]


def test_a_template_may_come_a_little_later() -> None:
    """Kueue creates it after the request; a minute later it is missing."""
    without = request(trouble="PodTemplate research/t does not exist", pod_sets=())
    late = T0 + timedelta(seconds=TEMPLATE_SECONDS_MAX)
    assert answers(planned_at(late - SECOND, without)) == []
    assert answers(planned_at(late, without)) == [("Failed", True, "FailedToCreatePods")]


def test_the_oldest_requests_are_served_first_up_to_a_limit() -> None:
    """The one beyond the limit waits with a reason and is not accepted."""
    story = [request(f"r{number:03}", 1, at=T0 + number * SECOND) for number in range(OPEN_COUNT_MAX + 1)]
    at = T0 + HOUR
    state = given(*story, as_of=at)
    made = plan(state, NO_FINALIZERS, at)
    last = f"provisioning/uid-r{OPEN_COUNT_MAX:03}/0"
    limited = [subject for subject, tag in deferrals(made).items() if tag == "provisioning_requests_limit"]
    assert limited == [last]
    acts = [act for act in made.upkeep_decisions if isinstance(act, AnswerProvisioningRequest)]
    assert acts
    assert all(f"{act.request_uid}/" not in last for act in acts)


def test_closed_requests_ask_for_nothing() -> None:
    """Failed, expired or revoked."""
    for kind in ("Failed", "BookingExpired", "CapacityRevoked"):
        made = planned_at(T0, request(conditions=[condition(kind)]), on_sale(offer(gpus=8)))
        assert (made.purchases, answers(made)) == ([], [])


def test_pods_that_must_share_a_zone_do() -> None:
    """Only where the request asks for it."""
    offers = on_sale(offer(gpus=8, zone="a"), offer(gpus=8, zone="b"))
    made = planned_at(T0, request("r", 2, within="topology.kubernetes.io/zone"), offers)
    assert len({decision.offer.zone for decision in made.purchases}) == 1


# ---- explanations


def test_a_request_explains_itself() -> None:
    """What it waits for now, and its story: what was asked, why nothing is bought, what was answered."""
    rules = policy(nodes_count_max=1, removal={"is_finalizer_on": False})
    story = (request("r", 2), on_sale(offer(gpus=8)))
    made = planned_at(T0, *story, rules=rules)
    now = request_line("research/r", StatusView.of(given(*story), rules, T0, made))
    assert now.startswith("Waiting: ")
    assert "nodes_count_max" in now
    fact = ScalingPlanMade(plan_id=PlanId("p"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")
    told = record([*(entry for part in story for entry in part), TimedFact(fact, T0)])
    text = "\n".join(why_request(told, "research/r"))
    for part in (
        "asks for 2 pods by best-effort-atomic",
        "Set Accepted=True on ProvisioningRequest research/r",
        "Set Provisioned=False",
        "Deferred for ProvisioningRequest research/r (step cover_demand)",
    ):
        assert part in text, text
    assert why_request(told, "research/other") == ()


def test_a_booked_request_says_until_when() -> None:
    """And a closed one since when and why."""
    booked = given(request(conditions=provisioned()), consumer("p"))
    assert request_line("r", StatusView.of(booked, NO_FINALIZERS, T0, None)) == (
        "Booked: capacity for 1 pod that do not exist yet is kept until 2026-11-21 12:10:00 UTC."
    )
    closed = given(request(conditions=[condition("Failed", reason="Expired")]))
    line = request_line("uid-r", StatusView.of(closed, NO_FINALIZERS, T0, None))
    assert line == "Closed: Failed since 2026-11-21 12:00:00 UTC (Expired)."


# ---- the plan check


def test_the_check_refuses_a_purchase_for_a_check() -> None:
    """A plan for an atomic request does not pass for a check of the same name."""
    made = planned_at(T0, request(), on_sale(offer(gpus=8)))
    state = given(request(class_name=CHECK_CAPACITY), on_sale(offer(gpus=8)))
    assert any("only checks capacity" in found for found in refusals(state, made))


def test_the_check_refuses_a_part_of_a_request() -> None:
    """One of two purchases is missing."""
    made = planned_at(T0, request(), on_sale(offer(gpus=8)))
    state = given(request(), on_sale(offer(gpus=8)))
    part = msgspec.structs.replace(made, decisions=made.decisions[:1])
    assert any("part of a gang" in found for found in refusals(state, part))


def test_the_check_refuses_capacity_that_is_not_there() -> None:
    """Provisioned is decided on two nodes, and the state has one."""
    known = request(conditions=[ACCEPTED])
    made = planned_at(T0, known, node("n1"), node("n2"))
    state = given(known, node("n1"))
    assert any("do not have the capacity" in found for found in refusals(state, made))


def test_the_check_refuses_nodes_for_a_missing_volume() -> None:
    """A purchase, and the promise of capacity, that were decided while the volume was there."""
    stuck = with_pods(volume_trouble=MISSING)
    made = planned_at(T0, with_pods(), on_sale(offer(gpus=8)))
    assert any(MISSING in found for found in refusals(given(stuck, on_sale(offer(gpus=8))), made))
    nodes = (node("n1"), node("n2"))
    made = planned_at(T0, with_pods(), *nodes)
    assert any("do not have the capacity" in found for found in refusals(given(stuck, *nodes), made))


def test_the_check_refuses_the_removal_of_a_booked_node() -> None:
    """The plan after the booking, in the state before its end."""
    rules = policy(idle_seconds=60.0, removal={"is_finalizer_on": False})
    nodes = (node("n1"), node("n2"))
    made = planned_at(T0 + BOOKED, *nodes, request(conditions=provisioned()), rules=rules)
    state = given(*nodes, request(conditions=provisioned(T0 + SECOND)), as_of=T0 + BOOKED)
    assert any("has booked capacity" in found for found in refusals(state, made, rules))


def test_the_check_refuses_answers_that_the_status_refutes() -> None:
    """A booking that has not ended, and a failure of a valid request."""
    ended = planned_at(T0 + BOOKED, request(conditions=provisioned()))
    state = given(request(conditions=provisioned(T0 + SECOND)), as_of=T0 + BOOKED)
    assert any("has not ended" in found for found in refusals(state, ended))
    failed = planned_at(T0, request("r", MEMBERS_COUNT_MAX + 1))
    assert any("is valid" in found for found in refusals(given(request("r", 2)), failed))
