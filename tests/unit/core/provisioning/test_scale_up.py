"""Waiting work gets room: what is there, what is coming, else what is bought; gangs whole or not at all."""

from typing import TypeVar

import msgspec
import pytest
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    bought,
    given,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.draft import Draft
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.core.provisioning.scale_up import cover_demand
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.base import Reason
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import NoOfferFits, OffersUnavailable, PriceUnknown, WatchStale
from gpu_autoscaler.model.reasons.defer_limits import Frozen, NodesLimit
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.scheduling import NodeDemands, Taint, Toleration

R = TypeVar("R", bound=Reason)

T4 = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5)
T4_FOUR = offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=1.4)
A100 = offer()
A100_ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
CPU = offer("m5.large", model=None, cpu=8, memory_gib=32, usd_per_hour=0.1)


def purchases(made: Plan) -> list[BuyNode]:
    """What the plan buys."""
    return [decision for decision in made.decisions if isinstance(decision, BuyNode)]


def offers(made: Plan) -> list[str]:
    """The offers that the plan buys."""
    return [decision.offer.key for decision in purchases(made)]


def held(made: Plan, subject: str, reason: type[R]) -> R:
    """The one reason for which this was held back."""
    (found,) = [each.reason for each in made.deferred if each.subject == subject]
    assert isinstance(found, reason)
    return found


def test_a_queued_job_gets_a_node_at_once() -> None:
    """Nothing runs that could free room, so nothing is waited for."""
    (bought_node,) = purchases(plan(given(job("train"), on_sale()), policy(), T0))

    assert bought_node.reason == UnmetDemand(
        demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=10_000_000
    )
    assert (labels.POOL, "default") in bought_node.labels
    assert (labels.ACTION_ID, bought_node.action_id) in bought_node.labels
    assert bought_node.deadline_at == T0 + 15 * MINUTE


def test_alike_pods_share_the_node_that_is_cheapest_for_each() -> None:
    """Three single GPUs for 1.50 an hour lose to four together for 1.40."""
    made = plan(given(pod("a"), pod("b"), pod("c"), on_sale(A100, T4, T4_FOUR)), policy(), T0)

    assert offers(made) == [T4_FOUR.key]


def test_the_last_pods_get_a_small_node() -> None:
    """Five GPUs are one node of four and one of one."""
    made = plan(given(*(pod(f"p{n}") for n in range(5)), on_sale(T4, T4_FOUR)), policy(), T0)

    assert offers(made) == [T4_FOUR.key, T4.key]


def test_work_of_another_shape_rides_on_what_is_bought_already() -> None:
    """A pod that fits beside a bought one gets no node of its own."""
    made = plan(given(pod("large", gpus=3), pod("small", gpus=1), on_sale(T4_FOUR)), policy(), T0)

    assert offers(made) == [T4_FOUR.key]
    assert purchases(made)[0].reason.tag() == "unmet_demand"
    assert set(purchases(made)[0].reason.demand) == {"pod/uid-large", "pod/uid-small"}  # type: ignore[union-attr]


def test_a_gang_is_bought_whole() -> None:
    """Two members of eight GPUs are two nodes that stand and fall together."""
    made = plan(given(job("train", gpus=8, members=2), on_sale()), policy(), T0)

    assert [decision.gang for decision in purchases(made)] == ["job/train", "job/train"]


@pytest.mark.parametrize(
    "limit", [{"gpu_count_max": 16}, {"nodes_count_max": 3}, {"price_micro_usd_per_hour_max": 39_000_000}]
)
def test_part_of_a_gang_is_never_bought(limit: dict[str, int]) -> None:
    """Four nodes of eight GPUs under a lower limit: none is bought, and the limit is named."""
    made = plan(given(job("train", gpus=8, members=4), on_sale()), policy(**limit), T0)

    assert made.decisions == ()
    assert made.deferred[0].subject == "job/train"
    assert made.deferred[0].reason.tag() in {"gpus_limit", "nodes_limit", "hourly_price_limit"}


def test_a_gang_fills_up_free_room_and_buys_the_rest() -> None:
    """One member fits on the node that is there; one node is bought for the other."""
    state = given(node("n1"), job("train", gpus=8, members=2), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_room_that_is_there_is_not_bought_again() -> None:
    """A ready node with free GPUs takes the pod; the plan says which."""
    made = plan(given(node("n1"), pod("a"), on_sale()), policy(), T0)

    assert made.decisions == ()
    assert held(made, "pod/uid-a", CapacityExpected) == CapacityExpected(node="n1", expected_at=None)


@pytest.mark.parametrize(("is_ordered", "is_launched"), [(False, False), (True, False), (True, True)])
def test_a_node_on_its_way_is_room(*, is_ordered: bool, is_launched: bool) -> None:
    """From the plan on, through order and launch, nobody buys for the same job twice."""
    order = bought(purchase("order"), is_ordered=is_ordered, is_launched=is_launched)
    state = given(job("train"), order, on_sale())
    made = plan(state, policy(), T0)

    assert made.decisions == ()
    assert held(made, "job/train", CapacityExpected).expected_at == T0 + 2 * MINUTE


def test_a_node_whose_gpus_are_not_there_yet_is_room() -> None:
    """The device plugin needs a while: registered is not usable, but coming."""
    state = given(node("n1", gpus_allocatable=0), pod("a", gpus=8), on_sale(), as_of=T0 + MINUTE)
    made = plan(state, policy(), T0 + MINUTE)

    assert purchases(made) == []
    assert held(made, "pod/uid-a", CapacityExpected).node == "n1"


def test_a_node_past_its_deadline_is_no_room() -> None:
    """What did not come in time is bought elsewhere, and given back."""
    state = given(job("train"), bought(purchase("order")), on_sale(), as_of=T0 + HOUR)
    made = plan(state, policy(), T0 + HOUR)

    assert [type(decision).__name__ for decision in made.decisions] == ["BuyNode", "ReleaseInstance"]


def test_a_refused_offer_is_left_alone_until_its_time() -> None:
    """The next plan goes elsewhere; with nothing else for sale it waits, and says until when."""
    refused = bought(purchase("order"), is_refused=True, retry_after=3 * MINUTE)

    external = given(job("train"), refused, on_sale(A100, A100_ON_DEMAND))
    assert offers(plan(external, policy(), T0)) == [A100_ON_DEMAND.key]

    nowhere = given(job("train"), refused, on_sale())
    made = plan(nowhere, policy(), T0)
    assert held(made, "job/train", OffersUnavailable).retry_at == T0 + 3 * MINUTE

    later = given(job("train"), refused, on_sale(), as_of=T0 + 3 * MINUTE)
    assert offers(plan(later, policy(), T0 + 3 * MINUTE)) == [A100.key]


@pytest.mark.parametrize(
    ("scope", "bought_instead"),
    [
        ("offer", "p4d.48xlarge/zone-a/spot"),
        ("zone", "p4d.24xlarge/zone-b/spot"),
        ("region", "p4d.24xlarge/zone-a/on-demand"),
    ],
)
def test_a_refusal_reaches_as_far_as_it_says(scope: str, bought_instead: str) -> None:
    """An offer, its zone, or its family and capacity type in the whole region."""
    story: Story = bought(purchase("order"), is_refused=True)
    refused = tuple(
        msgspec.structs.replace(told, fact=msgspec.structs.replace(told.fact, scope=scope))
        if told.fact.subject_root() == "scaling.launch_refused"
        else told
        for told in story
    )
    other = offer("p4d.48xlarge", usd_per_hour=11.0)
    sale = on_sale(A100, other, offer(zone="zone-b", usd_per_hour=12.0), A100_ON_DEMAND)

    assert offers(plan(given(job("train"), refused, sale), policy(), T0)) == [bought_instead]


def test_no_price_is_not_free() -> None:
    """An offer of unknown price is not bought."""
    made = plan(given(job("train"), on_sale(offer(usd_per_hour=None))), policy(), T0)

    assert made.decisions == ()
    assert held(made, "job/train", PriceUnknown).offers == (A100.key,)


def test_what_no_offer_has_is_said_in_words() -> None:
    """Sixteen GPUs on one node are not for sale, however many nodes are bought."""
    made = plan(given(job("train", gpus=16), on_sale()), policy(), T0)

    assert held(made, "job/train", NoOfferFits).detail == "no offer has 16 GPUs on one node (most: 8)"


def test_offers_that_were_never_listed_are_not_none() -> None:
    """Without a list of offers nothing is known to be missing."""
    assert held(plan(given(job("train")), policy(), T0), "job/train", WatchStale).source == "offers"


def test_nothing_is_bought_on_an_old_picture() -> None:
    """A node that came meanwhile would not be seen."""
    state = given(job("train"), on_sale())
    made = plan(state, policy(), T0 + HOUR)

    assert made.decisions == ()
    assert held(made, "job/train", WatchStale).source == "nodes"


def test_spot_is_bought_first_and_never_for_what_may_not_be_interrupted() -> None:
    """The cheaper spot node is only for preemptible work."""
    sale = on_sale(A100, A100_ON_DEMAND)

    assert offers(plan(given(job("a"), sale), policy(), T0)) == [A100.key]
    assert offers(plan(given(job("a", is_preemptible=False), sale), policy(), T0)) == [A100_ON_DEMAND.key]


def test_the_model_asked_for_is_bought() -> None:
    """A cheaper node of another model is no use."""
    assert offers(plan(given(job("a", gpus=1, model="A100"), on_sale(A100, T4)), policy(), T0)) == [A100.key]
    assert offers(plan(given(pod("a", model="A100"), on_sale(A100, T4)), policy(), T0)) == [A100.key]


def test_work_without_gpus_gets_a_node_without_gpus() -> None:
    """Even where a GPU node costs less; only where nothing else is for sale is it taken."""
    cheap_gpu = offer("cheap", gpus=1, usd_per_hour=0.01)

    assert offers(plan(given(pod("a", gpus=0), on_sale(cheap_gpu, CPU)), policy(), T0)) == [CPU.key]
    assert offers(plan(given(pod("a", gpus=0), on_sale(cheap_gpu)), policy(), T0)) == [cheap_gpu.key]


def test_the_pool_of_higher_priority_is_asked_first_and_the_next_when_it_is_full() -> None:
    """S68: pools by priority, each with a limit of its own."""
    pools = (
        NodePool(name="spot", priority=10, capacity_types=(CapacityType.SPOT,), nodes_count_max=1),
        NodePool(name="rest", priority=5, capacity_types=(CapacityType.ON_DEMAND,)),
    )
    dear_first = (
        NodePool(name="spot", capacity_types=(CapacityType.SPOT,)),
        NodePool(name="rest", priority=1, capacity_types=(CapacityType.ON_DEMAND,), gpu_count_max=8),
    )
    state = given(job("a"), job("b"), on_sale(A100, A100_ON_DEMAND))

    assert [decision.pool for decision in purchases(plan(state, policy(pools=pools), T0))] == ["spot", "rest"]
    assert [decision.pool for decision in purchases(plan(state, policy(pools=dear_first), T0))] == ["rest", "spot"]


def test_a_pool_gives_its_nodes_labels_and_taints() -> None:
    """A pod that selects the label and tolerates the taint is bought for there, another one is not."""
    taint = Taint(key="team", value="vision", effect="NoSchedule")
    pools = (NodePool(name="vision", labels={"team": "vision"}, taints=(taint,)),)
    demands = NodeDemands(node_selector=(("team", "vision"),), tolerations=(Toleration(key="team", operator="Exists"),))
    made = plan(given(pod("a", demands=demands), pod("b"), on_sale()), policy(pools=pools), T0)

    (decision,) = purchases(made)
    assert ("team", "vision") in decision.labels
    assert decision.taints == (taint,)
    assert held(made, "pod/uid-b", NoOfferFits).detail.startswith("no offer has the labels, taints")


def test_higher_priority_is_served_first() -> None:
    """With room for one node more the higher priority gets it, though it came later."""
    state = given(job("low", priority=100), job("high", priority=1000, at=T0 + MINUTE), on_sale(), as_of=T0 + MINUTE)
    made = plan(state, policy(nodes_count_max=1), T0 + MINUTE)

    assert purchases(made)[0].reason.demand == ("job/high",)  # type: ignore[union-attr]
    assert held(made, "job/low", NodesLimit) == NodesLimit(nodes_count=1, nodes_count_max=1)


def test_orders_in_flight_count_against_the_limit() -> None:
    """A node that was only planned is counted like one that runs."""
    state = given(job("a", gpus=8), job("b", gpus=8), bought(purchase("order"), is_ordered=False), on_sale())
    made = plan(state, policy(nodes_count_max=1), T0)

    assert made.decisions == ()
    assert held(made, "job/b", NodesLimit).nodes_count == 1


@pytest.mark.parametrize(
    "unwanted", [{"is_gated": True}, {"deleting_since": T0}, {"owner_kind": "DaemonSet"}, {"unschedulable_since": None}]
)
def test_a_pod_that_nobody_wants_a_node_for_gets_none(unwanted: dict[str, object]) -> None:
    """Gated, going, the node's own, or not judged by Kubernetes yet: no demand."""
    story = pod("a")
    changed = tuple(
        msgspec.structs.replace(each, fact=msgspec.structs.replace(each.fact, **unwanted)) for each in story
    )

    assert plan(given(changed, on_sale()), policy(), T0).decisions == ()


def test_a_pod_on_its_way_keeps_its_room() -> None:
    """A new pod that Kubernetes has not judged yet takes the free node; the waiting job buys its own."""
    arriving = tuple(
        msgspec.structs.replace(told, fact=msgspec.structs.replace(told.fact, unschedulable_since=None))
        for told in pod("new", gpus=8)
    )
    state = given(node("n1"), arriving, job("train"), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_a_released_job_keeps_its_room_until_its_pods_are_there() -> None:
    """Between release and pods the placement is the only word that the node is taken."""
    state = given(node("n1"), job("first", placed_on=("n1",)), job("second"), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_the_pods_of_a_running_job_are_not_counted_twice() -> None:
    """A placed job with its pods is no demand of its own."""
    state = given(node("n1"), job("a", placed_on=("n1",)), pod("a-0", on="n1", gpus=8, job_id="a"), on_sale())

    assert plan(state, policy(), T0).decisions == ()


def test_a_frozen_policy_buys_nothing_and_says_so() -> None:
    """What would have been bought is held back by the freeze."""
    made = plan(given(job("train"), on_sale()), policy(is_frozen=True), T0)

    assert made.decisions == ()
    assert held(made, "job/train", Frozen) == Frozen()


def test_each_decision_has_an_id_of_its_own() -> None:
    """The action id is the token that makes a second try harmless: it must never be shared."""
    made = plan(given(*(job(f"j{n}") for n in range(5)), on_sale()), policy(), T0)

    assert len({decision.action_id for decision in made.decisions}) == 5


def test_a_gang_that_rides_on_another_gangs_node_stands_and_falls_with_it() -> None:
    """Five GPUs are left on the first gang's second node: the second gang buys one node and needs the other."""
    state = given(job("a", gpus=3, members=3), job("b", gpus=5, members=2), on_sale())
    covered = cover_demand(Draft.start(state, T0), state, policy())

    assert [(each.transaction, each.needs) for each in covered.purchases] == [
        ("job/a", frozenset()),
        ("job/a", frozenset()),
        ("job/b", frozenset({"job/a"})),
    ]


def test_a_foreign_node_that_never_was_usable_is_no_room() -> None:
    """Nobody knows whether it will be."""
    state = given(node("n1", is_ours=False, is_ready=False), job("train"), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_a_booting_node_has_the_room_that_was_promised() -> None:
    """Its own pods were counted in the promise: they take nothing away."""
    daemon = pod("ds", on="n1", gpus=0, cpu=24, owner_kind="DaemonSet")
    state = given(node("n1", gpus_allocatable=0), daemon, pod("a", gpus=8, cpu=90), on_sale())

    assert plan(state, policy(), T0).decisions == ()
