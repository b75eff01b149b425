"""How long an empty node is kept: by what it costs, against what another one would."""

from datetime import timedelta

import msgspec
import pytest
from tests.support.stories import HOUR, MINUTE, T0, given, node, offer, pod, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.removal_policy import RemovalPolicy
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons import NodeIdle, NotYetIdle

NOW = T0 + HOUR


def kept(made: Plan) -> NotYetIdle:
    """Why the one node stays."""
    (reason,) = (each.reason for each in made.held_back if isinstance(each.reason, NotYetIdle))
    return reason


@pytest.mark.parametrize(("usd_per_hour", "seconds"), [(0.1, 600.0), (0.9, 360.0), (3.9, 180.0), (None, 600.0)])
def test_an_empty_node_is_kept_while_that_costs_less_than_another_one(
    usd_per_hour: float | None, seconds: float
) -> None:
    """Its boot of two minutes at its price and overhead, and a wait of two minutes at 2 USD an hour; 10 min at most."""
    sold = offer(usd_per_hour=usd_per_hour or 1.0)
    if usd_per_hour is None:
        sold = msgspec.structs.replace(sold, price_micro_usd_per_hour=None)
    state = given(node("n1", sold), as_of=NOW)
    rules = policy(scale_down_cooldown_seconds=0.0)
    before, after = (plan(state, rules, T0 + timedelta(seconds=seconds + each)) for each in (-1.0, 0.0))

    assert kept(before).idle_seconds_max == seconds
    assert [each.reason for each in after.decisions] == [NodeIdle(idle_seconds=seconds, idle_seconds_max=seconds)]


def test_what_is_reserved_is_paid_and_kept() -> None:
    """Letting it go saves its overhead alone."""
    paid = offer(capacity_type=CapacityType.RESERVED, usd_per_hour=9.0)
    made = plan(given(node("n1", paid), as_of=T0 + 5 * MINUTE), policy(), T0 + 5 * MINUTE)

    assert kept(made).idle_seconds_max == 600.0


def test_of_nodes_that_take_the_same_work_the_last_are_let_go_first() -> None:
    """One arrival fills one node. The dearest is the third place, and goes after a third of the time."""
    sold = [offer(usd_per_hour=usd) for usd in (0.9, 0.901, 0.902)]
    state = given(*(node(f"n{number}", each) for number, each in enumerate(sold)), as_of=NOW)
    made = plan(state, policy(scale_down_cooldown_seconds=0.0), T0 + timedelta(seconds=60.0))
    found = {each.subject: each.reason for each in made.held_back if isinstance(each.reason, NotYetIdle)}

    assert [found[f"node/uid-n{number}"].places_count for number in range(3)] == [1, 2, 3]
    assert [round(found[f"node/uid-n{number}"].idle_seconds_max) for number in range(3)] == [360, 180, 120]


def test_the_last_of_them_is_kept_as_if_it_were_alone() -> None:
    """Those that are gone, or going, take nothing; what is left is the first place."""
    sold = offer(usd_per_hour=0.9)
    state = given(node("n1", sold), node("n2", sold), as_of=NOW)
    rules = policy(scale_down_cooldown_seconds=0.0, disruption_ratio_max=1.0)
    made = plan(state, rules, T0 + timedelta(seconds=300.0))

    (gone,) = (each.reason for each in made.decisions if isinstance(each.reason, NodeIdle))
    assert (gone.places_count, kept(made).places_count) == (2, 1)


@pytest.mark.parametrize(
    ("busy_gpus", "places_count"),
    [(4, 5), (7, 2), (8, 1)],
    ids=["half free", "one GPU free", "full"],
)
def test_free_room_on_a_busy_node_is_a_place_too(busy_gpus: int, places_count: int) -> None:
    """A node of one GPU is needed less where another of its model has GPUs free: so many pods go there first."""
    small, large = offer(usd_per_hour=0.9, gpus=1, cpu=12, memory_gib=100), offer(usd_per_hour=9.0, gpus=8)
    state = given(node("n1", small), node("n2", large), pod("a", on="n2", gpus=busy_gpus), as_of=NOW)
    made = plan(state, policy(scale_down_cooldown_seconds=0.0), T0 + timedelta(seconds=10.0))

    assert kept(made).places_count == places_count


@pytest.mark.parametrize(
    "other",
    [
        offer(model="H100", capacity_type=CapacityType.ON_DEMAND),
        offer(capacity_type=CapacityType.SPOT),
        offer(gpus=1, capacity_type=CapacityType.ON_DEMAND),
    ],
    ids=["another model", "spot, which not all work may use", "too small"],
)
def test_a_node_that_takes_other_work_is_no_place(other: Offer) -> None:
    """What only one of them takes finds the other one of no use."""
    state = given(node("n1", offer(capacity_type=CapacityType.ON_DEMAND)), node("n2", other), as_of=NOW)
    made = plan(state, policy(scale_down_cooldown_seconds=0.0), T0 + timedelta(seconds=10.0))
    found = {each.subject: each.reason for each in made.held_back if isinstance(each.reason, NotYetIdle)}

    assert found["node/uid-n1"].places_count == 1


def test_who_never_waits_to_save_money_keeps_all_places() -> None:
    """A wait that is worth more than any node: all of them stay for as long as the policy lets them."""
    rules = policy(removal=RemovalPolicy(waiting_micro_usd_per_hour=10**12), disruption_ratio_max=1.0)
    made = plan(given(node("n1"), node("n2"), as_of=NOW), rules, T0 + timedelta(seconds=599.0))

    assert [each.reason.idle_seconds_max for each in made.held_back if isinstance(each.reason, NotYetIdle)] == [600] * 2


def test_a_node_on_which_waiting_work_is_counted_is_no_place_for_the_next() -> None:
    """It is taken already, though no pod is bound there yet."""
    sold = offer(usd_per_hour=0.9)
    state = given(node("n1", sold), node("n2", sold), pod("a", gpus=8), as_of=NOW)
    made = plan(state, policy(scale_down_cooldown_seconds=0.0), T0 + timedelta(seconds=10.0))

    assert kept(made).places_count == 1
