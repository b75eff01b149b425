"""What is chosen to be bought: least expected cost, in the policy's order and mix, and never all in one place."""

from collections import Counter
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.stories import T0, Story, given, job, node, notice, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import MixPolicy, SpotPolicy
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.buy import RejectedOffer, RejectionCause, ReplacesAtRiskNode, UnmetDemand

SPOT = offer()
ON_DEMAND = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)


def spot(zone: str, usd_per_hour: float | None, *, taken_ratio: float | None = None, **changes: Any) -> Offer:  # noqa: ANN401
    """A spot offer in this zone, of which the cloud says that so many are taken."""
    made = offer(zone=zone, usd_per_hour=usd_per_hour, **changes)
    return msgspec.structs.replace(made, interruption_ratio=taken_ratio)


def bought(*stories: Story, under: ScalingPolicy | None = None) -> list[BuyNode]:
    """What the plan of now buys; the second opinion has nothing against it."""
    state = given(*stories)
    under = under or policy()
    made = plan(state, under, T0)
    assert check(made, state, under) == ()
    return [each for each in made.decisions if isinstance(each, BuyNode)]


def one(*stories: Story, under: ScalingPolicy | None = None) -> tuple[str, RejectionCause | None]:
    """The offer of the one node that is bought, and why not one of less price."""
    (buy,) = bought(*stories, under=under)
    assert isinstance(buy.reason, UnmetDemand | ReplacesAtRiskNode)
    return buy.offer.key, None if buy.reason.instead_of is None else buy.reason.instead_of.because


def zones(buys: list[BuyNode]) -> Counter[str]:
    """How many nodes are bought in each zone."""
    return Counter(buy.offer.zone for buy in buys)


def waiting(count: int) -> tuple[Story, ...]:
    """So many single pods that need a whole node each."""
    return tuple(pod(f"p{number}", gpus=8) for number in range(count))


def test_the_cheapest_is_bought_and_nothing_is_passed_over() -> None:
    """Without anything against it, the least price wins."""
    assert one(pod("a"), on_sale(SPOT, ON_DEMAND)) == (SPOT.key, None)


def test_what_interruptions_undo_is_part_of_the_cost() -> None:
    """A cent more an hour where nothing is taken beats a place where one of eleven is."""
    taken, calm = spot("zone-a", 10.0, taken_ratio=0.09), spot("zone-b", 10.1, taken_ratio=0.0)

    assert one(pod("a"), on_sale(taken, calm)) == (calm.key, RejectionCause.EXPECTED_COST)
    assert one(pod("a"), on_sale(taken, spot("zone-b", 11.0, taken_ratio=0.0))) == (taken.key, None)


def test_who_is_in_a_hurry_pays_for_a_faster_boot() -> None:
    """Three minutes sooner are worth a tenth of the price to high priority, and not to low."""
    slow, fast = offer(boot_seconds=240), offer(zone="zone-b", usd_per_hour=11.0, boot_seconds=60)

    assert one(job("a", priority=1000), on_sale(slow, fast)) == (fast.key, RejectionCause.EXPECTED_COST)
    assert one(job("a", priority=100), on_sale(slow, fast)) == (slow.key, None)


def test_what_is_reserved_is_paid_already() -> None:
    """It comes first, whatever its price and its pool's priority say."""
    reserved = offer(capacity_type=CapacityType.RESERVED, usd_per_hour=20.0, zone="zone-b")
    pools = policy(pools=(NodePool(name="a", priority=5, zones=("zone-a",)), NodePool(name="b", zones=("zone-b",))))

    assert one(pod("a"), on_sale(SPOT, reserved)) == (reserved.key, RejectionCause.RESERVED_FIRST)
    assert one(pod("a"), on_sale(SPOT, reserved), under=pools) == (reserved.key, RejectionCause.RESERVED_FIRST)


def test_pools_of_higher_priority_come_before_cheaper_ones() -> None:
    """The order of pools is the policy's word."""
    under = policy(
        pools=(
            NodePool(name="first", priority=10, capacity_types=(CapacityType.ON_DEMAND,)),
            NodePool(name="then", priority=5, capacity_types=(CapacityType.SPOT,)),
        )
    )

    assert one(pod("a"), on_sale(SPOT, ON_DEMAND), under=under) == (ON_DEMAND.key, RejectionCause.POOL_PRIORITY)


@pytest.mark.parametrize("work", [job("a", is_preemptible=False), pod("a", gpus=8, priority=2_000_000_000)])
def test_work_that_must_not_be_interrupted_is_never_on_spot(work: Story) -> None:
    """Neither a job that says so nor a pod that is critical to the cluster; the reason tells what it costs."""
    assert one(work, on_sale(SPOT, ON_DEMAND)) == (ON_DEMAND.key, RejectionCause.SPOT_NOT_ALLOWED)


def test_the_reason_says_which_offer_was_passed_over() -> None:
    """Its name, its price, and why, as one sentence more."""
    (buy,) = bought(job("a", is_preemptible=False), on_sale(SPOT, ON_DEMAND))
    assert isinstance(buy.reason, UnmetDemand)

    assert buy.reason.instead_of == RejectedOffer(
        offer=SPOT.key, price_micro_usd_per_hour=10_000_000, because=RejectionCause.SPOT_NOT_ALLOWED
    )
    assert buy.reason.sentence().endswith(f"{SPOT.key} at $10.00/h was not taken: this work must not be on spot.")


def test_an_offer_without_a_price_is_not_the_cheaper_one() -> None:
    """What costs nobody knows what was neither passed over nor bought; what was bought tells the price that it has."""
    unpriced = spot("zone-b", None)
    (buy,) = bought(job("a", is_preemptible=False), on_sale(unpriced, ON_DEMAND))
    assert isinstance(buy.reason, UnmetDemand)

    assert buy.reason.instead_of is None
    assert buy.reason.price_micro_usd_per_hour == ON_DEMAND.price_micro_usd_per_hour


# ---- the mix


def test_spot_has_its_share_where_on_demand_is_expected_to_cost_less() -> None:
    """Nearly as dear and now and then taken, spot is no bargain: but the policy wants 60 % of it."""
    risky = spot("zone-a", 10.0, taken_ratio=0.09)
    spread = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=10.1)
    without = policy(spot=SpotPolicy(mix=MixPolicy(spot_ratio=0.0, on_demand_ratio=1.0, reserved_ratio=0.0)))

    assert one(pod("a"), on_sale(risky, spread)) == (risky.key, None)
    assert one(pod("a"), on_sale(risky, spread), under=without) == (spread.key, RejectionCause.EXPECTED_COST)


def test_the_floor_holds_only_where_spot_is_seldom_taken() -> None:
    """At 11 % the floor is off, and the least expected cost wins."""
    risky = spot("zone-a", 10.0, taken_ratio=0.11)
    spread = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=10.1)

    assert one(pod("a"), on_sale(risky, spread)) == (spread.key, RejectionCause.EXPECTED_COST)


def test_on_demand_may_have_what_is_missing_of_the_reserved_share() -> None:
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


def test_a_mix_that_does_not_add_up_is_refused() -> None:
    """With the sum, and what to do."""
    under = policy(spot=SpotPolicy(mix=MixPolicy(spot_ratio=0.8)))

    (mistake,) = policy_violations(under)
    assert mistake.startswith("spot.mix: spot_ratio, on_demand_ratio and reserved_ratio add up to 1.2;")


# ---- storms


def test_one_storm_takes_half_at_most() -> None:
    """Of twelve nodes six are bought in the second zone, which costs little more; the reason says why."""
    buys = bought(*waiting(12), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))
    reasons = {buy.offer.zone: buy.reason.instead_of for buy in buys if isinstance(buy.reason, UnmetDemand)}

    assert zones(buys) == {"zone-a": 6, "zone-b": 6}
    assert reasons["zone-a"] is None
    assert reasons["zone-b"] is not None
    assert reasons["zone-b"].because is RejectionCause.STORM_SHARE


def test_a_small_fleet_is_not_spread() -> None:
    """Four nodes of eight GPUs are not too many in one place, as the policy counts."""
    assert zones(bought(*waiting(4), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))) == {"zone-a": 4}


def test_spreading_costs_little_or_is_not_done() -> None:
    """For a place that costs half as much again, or for on-demand, nothing is moved."""
    sale = on_sale(spot("zone-a", 10.0), spot("zone-b", 15.0), ON_DEMAND)

    assert zones(bought(*waiting(12), sale)) == {"zone-a": 12}


def test_a_gang_is_not_spread() -> None:
    """What loses one member loses all: half of it in another zone would be taken twice as often."""
    buys = bought(job("train", members=12), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))

    assert zones(buys) == {"zone-a": 12}


def test_nodes_that_are_there_count() -> None:
    """Six nodes in one zone: the next ones go to the other."""
    there = [each for number in range(6) for each in (node(f"n{number}"), pod(f"r{number}", on=f"n{number}", gpus=8))]
    buys = bought(*there, *waiting(2), on_sale(spot("zone-a", 10.0), spot("zone-b", 10.5)))

    assert zones(buys) == {"zone-b": 2}


def stormy(count: int) -> list[Story]:
    """So many spot nodes in zone a with work on them, all of them under notice."""
    return [
        story
        for number in range(count)
        for story in (
            node(f"n{number}"),
            pod(f"r{number}", on=f"n{number}", gpus=8),
            notice(f"n{number}", reclaim_at=T0 + timedelta(seconds=120)),
        )
    ]


def test_where_much_is_taken_less_is_bought() -> None:
    """Eight nodes are being taken in zone a: their replacements stand in for spot on on-demand, and say why."""
    buys = bought(*stormy(8), on_sale(spot("zone-a", 10.0), ON_DEMAND))
    reasons = [buy.reason.instead_of for buy in buys if isinstance(buy.reason, ReplacesAtRiskNode)]

    assert {buy.offer.capacity_type for buy in buys} == {CapacityType.ON_DEMAND}
    assert [each and each.because for each in reasons] == [RejectionCause.INTERRUPTION_RATE] * 8


def test_a_storm_goes_to_another_zone_before_on_demand() -> None:
    """Spot elsewhere is calm and cheaper."""
    buys = bought(*stormy(4), on_sale(spot("zone-a", 10.0), spot("zone-b", 12.0), ON_DEMAND))

    assert zones(buys) == {"zone-b": 4}


def test_a_storm_stays_within_the_money() -> None:
    """Where on-demand would pass the limit of money, spot is better than nothing."""
    fleet_micro_usd_per_hour = 4 * 10_000_000
    under = policy(price_micro_usd_per_hour_max=fleet_micro_usd_per_hour + 20_000_000)
    buys = bought(*stormy(4), on_sale(spot("zone-a", 10.0), ON_DEMAND), under=under)

    assert [buy.offer.capacity_type for buy in buys] == [CapacityType.SPOT] * 2
