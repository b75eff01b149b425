"""The selection of offers: least expected cost, in the policy's order and mix, spread over capacity pools."""

from collections import Counter
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.purchases import spread
from tests.support.stories import HOUR, T0, Story, given, job, node, notice, offer, on_sale, pod, policy

from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import MixPolicy, SpotPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import RejectedOffer, RejectionCause, ReplacesAtRiskNode, UnmetDemand

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)


def spot(zone: str, usd_per_hour: float | None, *, taken_ratio: float | None = None, **changes: Any) -> Offer:  # noqa: ANN401
    """A spot offer in this zone with this published interruption ratio."""
    made = offer(zone=zone, usd_per_hour=usd_per_hour, **changes)
    return msgspec.structs.replace(made, interruption_ratio=taken_ratio)


def bought(*stories: Story, under: ScalingPolicy | None = None) -> list[BuyNode]:
    """The purchases of the current plan, accepted by the plan check."""
    state = given(*stories)
    made = accepted_plan(state, under, T0)
    return made.purchases


def one(*stories: Story, under: ScalingPolicy | None = None) -> tuple[str, RejectionCause | None]:
    """The offer of the one purchase, and why no cheaper one."""
    (buy,) = bought(*stories, under=under)
    assert isinstance(buy.reason, UnmetDemand | ReplacesAtRiskNode)
    return buy.offer.key, None if buy.reason.instead_of is None else buy.reason.instead_of.because


def zones(buys: list[BuyNode]) -> Counter[str]:
    """Number of nodes bought in each zone."""
    return Counter(buy.offer.zone for buy in buys)


def waiting(count: int) -> tuple[Story, ...]:
    """This many single pods that need a whole node each."""
    return tuple(pod(f"p{number}", gpus=8) for number in range(count))


def test_the_cheapest_offer_is_bought() -> None:
    """No cheaper one is reported as rejected."""
    assert one(pod("a"), on_sale(SPOT, ON_DEMAND)) == (SPOT.key, None)


def test_work_lost_to_interruptions_is_part_of_the_cost() -> None:
    """A cent more an hour without interruptions beats a zone with one interruption in eleven."""
    taken, calm = spot("zone-a", 10.0, taken_ratio=0.09), spot("zone-b", 10.1, taken_ratio=0.0)

    assert one(pod("a"), on_sale(taken, calm)) == (calm.key, RejectionCause.EXPECTED_COST)
    assert one(pod("a"), on_sale(taken, spot("zone-b", 11.0, taken_ratio=0.0))) == (taken.key, None)


def test_high_priority_pays_for_a_faster_boot() -> None:
    """Three minutes are worth a tenth of the price to high priority, and not to low."""
    slow, fast = offer(boot_seconds=240), offer(zone="zone-b", usd_per_hour=11.0, boot_seconds=60)

    assert one(job("a", priority=1000), on_sale(slow, fast)) == (fast.key, RejectionCause.EXPECTED_COST)
    assert one(job("a", priority=100), on_sale(slow, fast)) == (slow.key, None)


def test_reserved_capacity_comes_first() -> None:
    """Whatever its price and its pool's priority."""
    reserved = offer(capacity_type=CapacityType.RESERVED, usd_per_hour=20.0, zone="zone-b")
    pools = policy(pools=(NodePool(name="a", priority=5, zones=("zone-a",)), NodePool(name="b", zones=("zone-b",))))

    assert one(pod("a"), on_sale(SPOT, reserved)) == (reserved.key, RejectionCause.RESERVED_FIRST)
    assert one(pod("a"), on_sale(SPOT, reserved), under=pools) == (reserved.key, RejectionCause.RESERVED_FIRST)


def test_pools_of_higher_priority_come_before_cheaper_ones() -> None:
    """The order of pools is the policy's."""
    under = policy(
        pools=(
            NodePool(name="first", priority=10, capacity_types=(CapacityType.ON_DEMAND,)),
            NodePool(name="then", priority=5, capacity_types=(CapacityType.SPOT,)),
        )
    )

    assert one(pod("a"), on_sale(SPOT, ON_DEMAND), under=under) == (ON_DEMAND.key, RejectionCause.POOL_PRIORITY)


@pytest.mark.parametrize("work", [job("a", is_preemptible=False), pod("a", gpus=8, priority=2_000_000_000)])
def test_work_that_must_not_be_interrupted_is_never_on_spot(work: Story) -> None:
    """Neither a job that declares so nor a pod critical to the cluster; the reason reports the cost."""
    assert one(work, on_sale(SPOT, ON_DEMAND)) == (ON_DEMAND.key, RejectionCause.SPOT_NOT_ALLOWED)


def test_the_reason_reports_the_rejected_offer() -> None:
    """Its name, its price, and why."""
    (buy,) = bought(job("a", is_preemptible=False), on_sale(SPOT, ON_DEMAND))
    assert isinstance(buy.reason, UnmetDemand)

    assert buy.reason.instead_of == RejectedOffer(
        offer=SPOT.key, price_micro_usd_per_hour=10_000_000, because=RejectionCause.SPOT_NOT_ALLOWED
    )
    assert buy.reason.sentence().endswith(f"{SPOT.key} at $10.00/h was not selected: this work must not run on spot.")


def test_an_offer_without_a_price_is_not_the_cheaper_one() -> None:
    """An unknown price is neither rejected nor bought; the purchase reports its own price."""
    unpriced = spot("zone-b", None)
    (buy,) = bought(job("a", is_preemptible=False), on_sale(unpriced, ON_DEMAND))
    assert isinstance(buy.reason, UnmetDemand)

    assert buy.reason.instead_of is None
    assert buy.reason.price_micro_usd_per_hour == ON_DEMAND.price_micro_usd_per_hour


# ---- the mix


def test_spot_has_its_share_even_if_on_demand_is_expected_to_cost_less() -> None:
    """Spot at a similar price with interruptions is no bargain, but the policy wants 60 % of it."""
    risky = spot("zone-a", 10.0, taken_ratio=0.09)
    spread = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=10.1)
    without = policy(spot=SpotPolicy(mix=MixPolicy(spot_ratio=0.0, on_demand_ratio=1.0, reserved_ratio=0.0)))

    assert one(pod("a"), on_sale(risky, spread)) == (risky.key, None)
    assert one(pod("a"), on_sale(risky, spread), under=without) == (spread.key, RejectionCause.EXPECTED_COST)


def test_the_share_of_spot_applies_only_with_few_interruptions() -> None:
    """At 11 % the least expected cost wins."""
    risky = spot("zone-a", 10.0, taken_ratio=0.11)
    spread = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=10.1)

    assert one(pod("a"), on_sale(risky, spread)) == (spread.key, RejectionCause.EXPECTED_COST)


def test_on_demand_may_fill_the_missing_reserved_share() -> None:
    """38 of 100 GPUs are on-demand: allowed while nothing is reserved, as 35 and 5 are 40."""
    fleet = [
        node("od", offer("big", gpus=30, capacity_type=CapacityType.ON_DEMAND)),
        node("spot", offer("big", gpus=62)),
        pod("x", on="od", gpus=30),
        pod("y", on="spot", gpus=62),
    ]
    risky = spot("zone-b", 10.0, taken_ratio=0.09)
    spread = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=10.1)

    assert one(*fleet, pod("a"), on_sale(risky, spread))[0] == spread.key
    tight = policy(spot=SpotPolicy(mix=MixPolicy(spot_ratio=0.65, on_demand_ratio=0.35, reserved_ratio=0.0)))
    assert one(*fleet, pod("a"), on_sale(risky, spread), under=tight)[0] == risky.key


def test_a_mix_that_does_not_add_up_is_invalid() -> None:
    """With the sum, and what to do."""
    under = policy(spot=SpotPolicy(mix=MixPolicy(spot_ratio=0.8)))

    (mistake,) = policy_violations(under)
    assert mistake.startswith("spot.mix: spot_ratio, on_demand_ratio and reserved_ratio add up to 1.2;")


# ---- storms


def test_one_capacity_pool_has_at_most_half() -> None:
    """Of twelve nodes six are bought in the second zone at little more cost, with the reason."""
    buys = bought(*waiting(12), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))
    reasons = {buy.offer.zone: buy.reason.instead_of for buy in buys if isinstance(buy.reason, UnmetDemand)}

    assert zones(buys) == {"zone-a": 6, "zone-b": 6}
    assert reasons["zone-a"] is None
    assert reasons["zone-b"] is not None
    assert reasons["zone-b"].because is RejectionCause.CAPACITY_POOL_SHARE


def test_a_small_fleet_is_not_spread() -> None:
    """Four nodes of eight GPUs are not too many for one capacity pool."""
    assert zones(bought(*waiting(4), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))) == {"zone-a": 4}


def test_the_fleet_is_spread_only_at_little_cost() -> None:
    """Not for half as much again, nor for on-demand."""
    sale = on_sale(spot("zone-a", 10.0), spot("zone-b", 15.0), ON_DEMAND)

    assert zones(bought(*waiting(12), sale)) == {"zone-a": 12}


@pytest.mark.parametrize(("usd_per_month_max", "in_zone_a"), [(366, 6), (365, 12), (0, 12)])
def test_the_fleet_is_spread_until_that_costs_what_the_policy_allows(usd_per_month_max: int, in_zone_a: int) -> None:
    """A present node costs 0.50 USD an hour more than the offer that the share excluded: 365 USD a month."""
    present = node("n1", offer("small", usd_per_hour=2.5, gpus=1), reason=spread(2.5, 2.0), at=T0 - HOUR)
    under = policy(spot={"capacity_pool_month_micro_usd_max": usd_per_month_max * 1_000_000})

    buys = bought(present, *waiting(12), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)), under=under)

    assert zones(buys)["zone-a"] == in_zone_a


def test_the_reason_names_what_the_share_costs_a_month() -> None:
    """The difference of the two prices for 730 hours."""
    told = "too many GPUs would depend on one spot capacity pool. Not depending on it costs $365.00 a month."
    assert spread(2.5, 2.0).sentence().endswith(told)
    assert "a month" not in spread(2.0, 2.0).sentence()


def test_what_a_plan_spreads_counts_in_its_next_purchase() -> None:
    """Six of the first twelve nodes cost 0.50 USD an hour more; then the share no longer limits purchases."""
    high = tuple(pod(f"h{number}", gpus=8, priority=900) for number in range(12))
    sale = on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5))
    under = policy(spot={"capacity_pool_month_micro_usd_max": 100_000_000})

    assert zones(bought(*high, *waiting(12), sale, under=under)) == {"zone-a": 18, "zone-b": 6}


def test_a_gang_is_not_spread() -> None:
    """The loss of one member is the loss of all: two zones would double the interruptions."""
    buys = bought(job("train", members=12), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))

    assert zones(buys) == {"zone-a": 12}


def test_existing_nodes_count_for_the_spread() -> None:
    """Six nodes in one zone: the next ones are bought in the other."""
    there = [each for number in range(6) for each in (node(f"n{number}"), pod(f"r{number}", on=f"n{number}", gpus=8))]
    buys = bought(*there, *waiting(2), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))

    assert zones(buys) == {"zone-b": 2}


def interrupted_zone(count: int) -> list[Story]:
    """This many spot nodes with work in zone a, all under notice."""
    return [
        story
        for number in range(count)
        for story in (
            node(f"n{number}"),
            pod(f"r{number}", on=f"n{number}", gpus=8),
            notice(f"n{number}", reclaim_at=T0 + timedelta(seconds=120)),
        )
    ]


def test_fewer_nodes_are_bought_in_an_interrupted_zone() -> None:
    """Eight nodes are interrupted in zone a: replacements on on-demand, with the reason."""
    buys = bought(*interrupted_zone(8), on_sale(spot("zone-a", 10.0), ON_DEMAND))
    reasons = [buy.reason.instead_of for buy in buys if isinstance(buy.reason, ReplacesAtRiskNode)]

    assert {buy.offer.capacity_type for buy in buys} == {CapacityType.ON_DEMAND}
    assert [each and each.because for each in reasons] == [RejectionCause.INTERRUPTION_RATE] * 8


def test_spot_in_another_zone_precedes_on_demand() -> None:
    """It has few interruptions and is cheaper."""
    buys = bought(*interrupted_zone(4), on_sale(spot("zone-a", 10.0), spot("zone-b", 12.0), ON_DEMAND))

    assert zones(buys) == {"zone-b": 4}


def test_replacements_stay_within_the_spend_limit() -> None:
    """If on-demand would exceed the limit, spot is better than nothing."""
    fleet_micro_usd_per_hour = 4 * 10_000_000
    under = policy(price_micro_usd_per_hour_max=fleet_micro_usd_per_hour + 20_000_000)
    buys = bought(*interrupted_zone(4), on_sale(spot("zone-a", 10.0), ON_DEMAND), under=under)

    assert [buy.offer.capacity_type for buy in buys] == [CapacityType.SPOT] * 2
