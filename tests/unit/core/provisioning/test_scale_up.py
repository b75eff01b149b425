"""Waiting work is placed on existing or coming capacity, else capacity is bought; gangs whole or not at all."""

from typing import Literal, TypeVar

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
from gpu_autoscaler.model.decisions import Plan
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


def offers(made: Plan) -> list[str]:
    """The offers that the plan buys."""
    return [decision.offer.key for decision in made.purchases]


def held(made: Plan, subject: str, reason: type[R]) -> R:
    """The one reason for which this is deferred."""
    (found,) = [each.reason for each in made.deferred if each.subject == subject]
    assert isinstance(found, reason)
    return found


def test_a_queued_job_gets_a_node_at_once() -> None:
    """No running work could free capacity, so nothing is waited for."""
    (bought_node,) = plan(given(job("train"), on_sale()), policy(), T0).purchases

    assert bought_node.reason == UnmetDemand(
        demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=10_000_000
    )
    assert (labels.POOL, "default") in bought_node.labels
    assert (labels.ACTION_ID, bought_node.action_id) in bought_node.labels
    assert bought_node.deadline_at == T0 + 15 * MINUTE


def test_pods_of_equal_shape_share_the_cheapest_node() -> None:
    """Three single GPUs at 1.50 an hour lose to four together at 1.40."""
    made = plan(given(pod("a"), pod("b"), pod("c"), on_sale(A100, T4, T4_FOUR)), policy(), T0)

    assert offers(made) == [T4_FOUR.key]


def test_the_last_pods_get_a_small_node() -> None:
    """Five GPUs are one node of four and one of one."""
    made = plan(given(*(pod(f"p{n}") for n in range(5)), on_sale(T4, T4_FOUR)), policy(), T0)

    assert offers(made) == [T4_FOUR.key, T4.key]


def test_work_of_another_shape_shares_a_bought_node() -> None:
    """A pod that fits on a bought node gets none of its own."""
    made = plan(given(pod("large", gpus=3), pod("small", gpus=1), on_sale(T4_FOUR)), policy(), T0)

    assert offers(made) == [T4_FOUR.key]
    assert made.purchases[0].reason.tag() == "unmet_demand"
    assert set(made.purchases[0].reason.demand) == {"pod/uid-large", "pod/uid-small"}  # type: ignore[union-attr]


def test_a_gang_is_bought_whole() -> None:
    """Two members of eight GPUs are two nodes in one transaction."""
    made = plan(given(job("train", gpus=8, members=2), on_sale()), policy(), T0)

    assert [decision.gang for decision in made.purchases] == ["job/train", "job/train"]


@pytest.mark.parametrize(
    "limit", [{"gpu_count_max": 16}, {"nodes_count_max": 3}, {"price_micro_usd_per_hour_max": 39_000_000}]
)
def test_part_of_a_gang_is_never_bought(limit: dict[str, int]) -> None:
    """Four nodes of eight GPUs under a lower limit: none is bought, and the limit is the reason."""
    made = plan(given(job("train", gpus=8, members=4), on_sale()), policy(**limit), T0)

    assert made.decisions == ()
    assert made.deferred[0].subject == "job/train"
    assert made.deferred[0].reason.tag() in {"gpus_limit", "nodes_limit", "hourly_price_limit"}


def test_a_gang_uses_free_capacity_and_buys_the_rest() -> None:
    """One member fits on the existing node; one node is bought for the other."""
    state = given(node("n1"), job("train", gpus=8, members=2), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_existing_capacity_is_not_bought_again() -> None:
    """A ready node with free GPUs takes the pod, as the plan reports."""
    made = plan(given(node("n1"), pod("a"), on_sale()), policy(), T0)

    assert made.decisions == ()
    assert held(made, "pod/uid-a", CapacityExpected) == CapacityExpected(node="n1", expected_at=None)


@pytest.mark.parametrize(("is_ordered", "is_launched"), [(False, False), (True, False), (True, True)])
def test_a_coming_node_is_capacity(*, is_ordered: bool, is_launched: bool) -> None:
    """From plan through order and launch, the same job is not bought for twice."""
    order = bought(purchase("order"), is_ordered=is_ordered, is_launched=is_launched)
    state = given(job("train"), order, on_sale())
    made = plan(state, policy(), T0)

    assert made.decisions == ()
    assert held(made, "job/train", CapacityExpected).expected_at == T0 + 2 * MINUTE


def test_a_node_without_its_gpus_yet_is_coming_capacity() -> None:
    """The device plugin needs time: registered is not usable, but coming."""
    state = given(node("n1", gpus_allocatable=0), pod("a", gpus=8), on_sale(), as_of=T0 + MINUTE)
    made = plan(state, policy(), T0 + MINUTE)

    assert made.purchases == []
    assert held(made, "pod/uid-a", CapacityExpected).node == "n1"


def test_a_node_past_its_deadline_is_no_capacity() -> None:
    """A late node is bought again elsewhere, and released."""
    state = given(job("train"), bought(purchase("order")), on_sale(), as_of=T0 + HOUR)
    made = plan(state, policy(), T0 + HOUR)

    assert [type(decision).__name__ for decision in made.decisions] == ["BuyNode", "ReleaseInstance"]


def test_a_refused_offer_is_not_requested_during_its_back_off() -> None:
    """The next plan uses another offer; without one it waits, with the end of the back-off."""
    refused = bought(purchase("order"), is_refused=True, retry_after=3 * MINUTE)

    elsewhere = given(job("train", priority=1000), refused, on_sale(A100, A100_ON_DEMAND))
    assert offers(plan(elsewhere, policy(), T0)) == [A100_ON_DEMAND.key]

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
def test_a_refusal_applies_to_its_scope(scope: str, bought_instead: str) -> None:
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

    assert offers(plan(given(job("train", priority=1000), refused, sale), policy(), T0)) == [bought_instead]


def test_an_unknown_price_is_not_free() -> None:
    """An offer of unknown price is not bought."""
    made = plan(given(job("train"), on_sale(offer(usd_per_hour=None))), policy(), T0)

    assert made.decisions == ()
    assert held(made, "job/train", PriceUnknown).offers == (A100.key,)


def test_a_request_beyond_every_offer_is_explained() -> None:
    """No offer has sixteen GPUs on one node."""
    made = plan(given(job("train", gpus=16), on_sale()), policy(), T0)

    assert held(made, "job/train", NoOfferFits).detail == "no offer has 16 GPUs on one node (most: 8)"


def test_a_missing_list_of_offers_is_not_an_empty_list() -> None:
    """Without a list nothing is known to be missing."""
    assert held(plan(given(job("train")), policy(), T0), "job/train", WatchStale).source == "offers"


def test_nothing_is_bought_on_a_stale_list() -> None:
    """A node that registered meanwhile would not be seen."""
    state = given(job("train"), on_sale())
    made = plan(state, policy(), T0 + HOUR)

    assert made.decisions == ()
    assert held(made, "job/train", WatchStale).source == "nodes"


def test_spot_is_bought_only_for_preemptible_work() -> None:
    """It is cheaper."""
    sale = on_sale(A100, A100_ON_DEMAND)

    assert offers(plan(given(job("a"), sale), policy(), T0)) == [A100.key]
    assert offers(plan(given(job("a", is_preemptible=False), sale), policy(), T0)) == [A100_ON_DEMAND.key]


def test_the_requested_model_is_bought() -> None:
    """A cheaper node of another model is of no use."""
    assert offers(plan(given(job("a", gpus=1, model="A100"), on_sale(A100, T4)), policy(), T0)) == [A100.key]
    assert offers(plan(given(pod("a", model="A100"), on_sale(A100, T4)), policy(), T0)) == [A100.key]


def test_work_without_gpus_gets_a_node_without_gpus() -> None:
    """Even if a GPU node costs less; only without an alternative is it bought."""
    cheap_gpu = offer("cheap", gpus=1, usd_per_hour=0.01)

    assert offers(plan(given(pod("a", gpus=0), on_sale(cheap_gpu, CPU)), policy(), T0)) == [CPU.key]
    assert offers(plan(given(pod("a", gpus=0), on_sale(cheap_gpu)), policy(), T0)) == [cheap_gpu.key]


def test_pools_are_filled_by_priority() -> None:
    """Each pool has a limit of its own."""
    pools = (
        NodePool(name="spot", priority=10, capacity_types=(CapacityType.SPOT,), nodes_count_max=1),
        NodePool(name="rest", priority=5, capacity_types=(CapacityType.ON_DEMAND,)),
    )
    dear_first = (
        NodePool(name="spot", capacity_types=(CapacityType.SPOT,)),
        NodePool(name="rest", priority=1, capacity_types=(CapacityType.ON_DEMAND,), gpu_count_max=8),
    )
    state = given(job("a"), job("b"), on_sale(A100, A100_ON_DEMAND))

    assert [decision.pool for decision in plan(state, policy(pools=pools), T0).purchases] == ["spot", "rest"]
    assert [decision.pool for decision in plan(state, policy(pools=dear_first), T0).purchases] == ["rest", "spot"]


def test_a_pool_gives_its_nodes_labels_and_taints() -> None:
    """A pod that selects the label and tolerates the taint is bought for there, another one is not."""
    taint = Taint(key="team", value="vision", effect="NoSchedule")
    pools = (NodePool(name="vision", labels={"team": "vision"}, taints=(taint,)),)
    demands = NodeDemands(node_selector=(("team", "vision"),), tolerations=(Toleration(key="team", operator="Exists"),))
    made = plan(given(pod("a", demands=demands), pod("b"), on_sale()), policy(pools=pools), T0)

    (decision,) = made.purchases
    assert ("team", "vision") in decision.labels
    assert decision.taints == (taint,)
    assert held(made, "pod/uid-b", NoOfferFits).detail.startswith("no offer matches the requested labels, taints")


@pytest.mark.parametrize(
    ("key", "value", "effect", "other_key"),
    [
        ("nvidia.com/gpu", "true", "NoSchedule", "nvidia.com/mig"),
        ("nvidia.com/gpu", "present", "NoExecute", "team"),
        ("gpu", "true", "NoSchedule", "gpu"),
    ],
)
def test_a_job_is_bought_for_in_pools_with_common_gpu_taints(
    key: str, value: str, effect: Literal["NoSchedule", "NoExecute"], other_key: str
) -> None:
    """Another key, or another value of `gpu`, keeps jobs away."""
    taints = (Taint(key=key, value=value, effect=effect), Taint(key=other_key, value="other", effect=effect))
    common, other = (
        plan(given(job("a"), on_sale()), policy(pools=(NodePool(name="gpu", taints=(taint,)),)), T0) for taint in taints
    )
    assert [decision.pool for decision in common.purchases] == ["gpu"]
    assert not other.purchases


def test_higher_priority_is_served_first() -> None:
    """With capacity for one more node the higher priority gets it, though it arrived later."""
    state = given(job("low", priority=100), job("high", priority=1000, at=T0 + MINUTE), on_sale(), as_of=T0 + MINUTE)
    made = plan(state, policy(nodes_count_max=1), T0 + MINUTE)

    assert made.purchases[0].reason.demand == ("job/high",)  # type: ignore[union-attr]
    assert held(made, "job/low", NodesLimit) == NodesLimit(nodes_count=1, nodes_count_max=1)


def test_orders_in_flight_count_against_the_limit() -> None:
    """A planned node counts like a running one."""
    state = given(job("a", gpus=8), job("b", gpus=8), bought(purchase("order"), is_ordered=False), on_sale())
    made = plan(state, policy(nodes_count_max=1), T0)

    assert made.decisions == ()
    assert held(made, "job/b", NodesLimit).nodes_count == 1


@pytest.mark.parametrize(
    "unwanted", [{"is_gated": True}, {"deleting_since": T0}, {"owner_kind": "DaemonSet"}, {"unschedulable_since": None}]
)
def test_pods_that_are_no_demand_get_no_node(unwanted: dict[str, object]) -> None:
    """Gated, being deleted, the node's own, or not judged by Kubernetes yet."""
    story = pod("a")
    changed = tuple(
        msgspec.structs.replace(each, fact=msgspec.structs.replace(each.fact, **unwanted)) for each in story
    )

    assert plan(given(changed, on_sale()), policy(), T0).decisions == ()


def test_an_unjudged_pod_reserves_capacity() -> None:
    """A new pod takes the free node; the waiting job buys its own."""
    arriving = tuple(
        msgspec.structs.replace(told, fact=msgspec.structs.replace(told.fact, unschedulable_since=None))
        for told in pod("new", gpus=8)
    )
    state = given(node("n1"), arriving, job("train"), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_a_released_job_reserves_capacity_until_its_pods_exist() -> None:
    """Between release and pods only the placement shows that the node is taken."""
    state = given(node("n1"), job("first", placed_on=("n1",)), job("second"), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_the_pods_of_a_running_job_are_not_counted_twice() -> None:
    """A placed job with its pods is no demand of its own."""
    state = given(node("n1"), job("a", placed_on=("n1",)), pod("a-0", on="n1", gpus=8, job_id="a"), on_sale())

    assert plan(state, policy(), T0).decisions == ()


def test_a_frozen_policy_buys_nothing() -> None:
    """Purchases are deferred by the freeze."""
    made = plan(given(job("train"), on_sale()), policy(is_frozen=True), T0)

    assert made.decisions == ()
    assert held(made, "job/train", Frozen) == Frozen()


def test_each_decision_has_an_id_of_its_own() -> None:
    """The action id is the idempotency token and must never be shared."""
    made = plan(given(*(job(f"j{n}") for n in range(5)), on_sale()), policy(), T0)

    assert len({decision.action_id for decision in made.decisions}) == 5


def test_a_gang_that_shares_a_node_depends_on_its_transaction() -> None:
    """Five GPUs are left on the first gang's second node: the second gang buys one node and needs the other."""
    state = given(job("a", gpus=3, members=3), job("b", gpus=5, members=2), on_sale())
    covered = cover_demand(Draft.start(state, T0), state, policy())

    assert [(each.transaction, each.depends_on) for each in covered.purchases] == [
        ("job/a", frozenset()),
        ("job/a", frozenset()),
        ("job/b", frozenset({"job/a"})),
    ]


def test_a_foreign_node_that_never_was_usable_is_no_capacity() -> None:
    """Whether it will be is unknown."""
    state = given(node("n1", is_ours=False, is_ready=False), job("train"), on_sale())

    assert offers(plan(state, policy(), T0)) == [A100.key]


def test_a_booting_node_has_its_promised_capacity() -> None:
    """Its own pods were counted in the promise and subtract nothing."""
    daemon = pod("ds", on="n1", gpus=0, cpu=24, owner_kind="DaemonSet")
    state = given(node("n1", gpus_allocatable=0), daemon, pod("a", gpus=8, cpu=90), on_sale())

    assert plan(state, policy(), T0).decisions == ()
