"""Work moves to fewer or cheaper nodes when that pays off: bought first, drained when ready, never back."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    drained,
    given,
    instance,
    job,
    node,
    offer,
    on_sale,
    planned,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.defer import SavingTooSmall
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.reasons.drain import NodeIdle, NodeUnderused

NOW = T0 + 5 * HOUR  # longer than the horizon
BIG = offer("big", gpus=8, usd_per_hour=10.0)
SMALL = offer("small", gpus=2, usd_per_hour=2.0)
SALE = on_sale(BIG, SMALL)


def made_of(state: ClusterState, rules: ScalingPolicy | None = None, as_of: datetime = NOW) -> Plan:
    """The plan, which the plan check finds nothing against."""
    return accepted_plan(state, rules, as_of)


def observed_allocatable_of(purchase: BuyNode, name: str, at: object) -> Story:
    """The node that a purchase became."""
    fact = node(name, purchase.offer, at=at)[-1].fact  # type: ignore[arg-type]
    assert isinstance(fact, NodeObserved)
    return (TimedFact(msgspec.structs.replace(fact, action_id=purchase.action_id), at),)  # type: ignore[arg-type]


def test_work_moves_to_a_cheaper_node_once_that_is_ready() -> None:
    """Two GPUs of eight are used: a small node is bought; then it boots; then the big one drains onto it."""
    one = (node("n1", BIG), pod("a", on="n1", gpus=2), SALE)
    (purchase,) = made_of(given(*one, as_of=NOW)).decisions

    assert isinstance(purchase, BuyNode)
    assert purchase.offer.instance_type == "small"
    assert isinstance(purchase.reason, ReplacesNodes)
    assert (purchase.reason.cause, purchase.reason.node_names) == ("underused", ("n1",))
    ordered = planned(purchase, at=NOW)
    assert made_of(given(*one, ordered, as_of=NOW + MINUTE), as_of=NOW + MINUTE).decisions == ()
    later = NOW + 4 * MINUTE
    (drain,) = made_of(
        given(*one, ordered, observed_allocatable_of(purchase, "n2", later), as_of=later), as_of=later
    ).decisions
    assert isinstance(drain, DrainNode)
    assert (drain.node_name, drain.is_voluntary) == ("n1", True)
    assert isinstance(drain.reason, NodeUnderused)


def test_several_nodes_become_one_that_costs_less() -> None:
    """Each of three small ones is needed by its own pod; one large node for all is cheaper."""
    middle = offer("middle", gpus=4, usd_per_hour=9.0)
    large = offer("large", gpus=16, usd_per_hour=12.0)
    three = tuple(
        story for name in ("n1", "n2", "n3") for story in (node(name, middle), pod(f"on-{name}", on=name, gpus=3))
    )
    rules = policy(disruption_ratio_max=1, consolidation_requested_ratio_max=0.8)
    (purchase,) = made_of(given(*three, on_sale(middle, large), as_of=NOW), rules).decisions

    assert isinstance(purchase, BuyNode)
    assert purchase.offer.instance_type == "large"
    assert isinstance(purchase.reason, ReplacesNodes)
    assert purchase.reason.node_names == ("n1", "n2", "n3")
    later = NOW + 4 * MINUTE
    ready = (planned(purchase, at=NOW), observed_allocatable_of(purchase, "n4", later))
    made = made_of(given(*three, on_sale(middle, large), *ready, as_of=later), rules, later)
    assert [each.node_name for each in made.drains] == ["n1"]


def test_several_full_nodes_become_one_that_costs_less() -> None:
    """No small spot node is offered; four full ones together pay for a large one."""
    single = offer("single", gpus=1, usd_per_hour=4.0, capacity_type=CapacityType.ON_DEMAND)
    large = offer("large", gpus=4, usd_per_hour=6.0)
    four = tuple(story for name in "abcd" for story in (node(f"n-{name}", single), pod(name, on=f"n-{name}", gpus=1)))
    (purchase,) = made_of(given(*four, on_sale(single, large), as_of=NOW), policy(disruption_ratio_max=1)).purchases

    assert purchase.offer.instance_type == "large"
    assert isinstance(purchase.reason, ReplacesNodes)
    assert purchase.reason.node_names == ("n-a", "n-b", "n-c", "n-d")


@pytest.mark.parametrize(
    "kept",
    [
        pod("a", on="n1", gpus=2, owner_kind="Job"),
        pod("a", on="n1", gpus=2, annotations={labels.DO_NOT_DISRUPT: "true"}),
        (*pod("a", on="n1", gpus=2), *pod("b")),  # work that waits: its node may come here
    ],
)
def test_protected_work_is_not_moved_to_save_cost(kept: Story) -> None:
    """Nor anything while work waits for nodes."""
    made = made_of(given(node("n1", BIG), kept, on_sale(SMALL), as_of=NOW), policy(nodes_count_max=1))

    assert made.purchases == []


def test_a_small_saving_is_not_worth_a_move() -> None:
    """Nine dollars instead of ten are a tenth; a seventh is required."""
    state = given(
        node("n1", BIG), pod("a", on="n1", gpus=2), on_sale(offer("small", gpus=2, usd_per_hour=9.0)), as_of=NOW
    )
    made = made_of(state)

    assert made.decisions == ()
    (held,) = [each.reason for each in made.deferred if each.step == "replace_expensive"]
    assert isinstance(held, SavingTooSmall)


def test_a_saving_must_pay_for_the_move_within_the_payback_time() -> None:
    """A fifth over a quarter of an hour does not pay for repeated work."""
    rules = policy(removal=RemovalPolicy(replacement_payback_hours=0.25))
    sale = on_sale(offer("small", gpus=2, usd_per_hour=8.0))

    assert made_of(given(node("n1", BIG), pod("a", on="n1", gpus=2), sale, as_of=NOW), rules).decisions == ()


def test_a_replacement_stays_for_the_payback_time() -> None:
    """Changing prices do not move work back and forth: an hour, not one minute less."""
    story = (node("n1", BIG), pod("a", on="n1", gpus=5), on_sale(BIG, offer("new", gpus=8, usd_per_hour=5.0)))
    early = T0 + HOUR - MINUTE

    assert made_of(given(*story, as_of=early), as_of=early).decisions == ()
    assert made_of(given(*story, as_of=early + MINUTE), as_of=early + MINUTE).purchases


def test_equal_nodes_are_replaced_one_after_the_other() -> None:
    """Together they would save no more, and new nodes would wait for the drain of each."""
    two = (node("n1", BIG), pod("a", on="n1", gpus=5), node("n2", BIG), pod("b", on="n2", gpus=5))
    sale = on_sale(BIG, offer("new", gpus=5, usd_per_hour=3.0))
    (purchase,) = made_of(given(*two, sale, as_of=NOW), policy(disruption_ratio_max=1)).purchases

    assert isinstance(purchase.reason, ReplacesNodes)
    assert purchase.reason.node_names == ("n1",)


def training(name: str, on: str, gpus: int = 2, **of_job: Any) -> Story:  # noqa: ANN401 - of `job`
    """A job that has run since T0 on the node, and saved just now."""
    saved = {labels.CHECKPOINTED_AT: NOW.isoformat()}
    work = job(name, gpus=gpus, placed_on=(on,), is_running=True, **of_job)
    return (*work, *pod(f"{name}-0", on=on, gpus=gpus, owner_kind="Job", job_id=name, annotations=saved))


@pytest.mark.parametrize(("limit_hours", "is_moved"), [(24.0, True), (5.3, False)])
def test_work_that_ends_soon_is_not_moved(limit_hours: float, *, is_moved: bool) -> None:
    """It has run for five hours, and its limit leaves it 18 minutes: the saving lasts no longer."""
    work = training("train", "n1", expected_duration_seconds=8 * 3600.0, duration_seconds_max=limit_hours * 3600)
    sale = on_sale(BIG, offer("small", gpus=2, usd_per_hour=7.0))

    assert bool(made_of(given(node("n1", BIG), work, sale, as_of=NOW)).purchases) == is_moved


def test_the_move_that_saves_most_for_its_price_comes_first() -> None:
    """The more expensive node runs a service, which starts over; the work of the other one has just been saved."""
    middle, new = offer("middle", gpus=8, usd_per_hour=9.0), offer("new", gpus=5, usd_per_hour=3.0)
    services = (node("n1", BIG), pod("a", on="n1", gpus=5))
    state = given(*services, node("n2", middle), training("train", "n2", gpus=5), on_sale(new), as_of=NOW)
    (purchase,) = made_of(state).purchases

    assert isinstance(purchase.reason, ReplacesNodes)
    assert purchase.reason.node_names == ("n2",)


def test_a_move_that_costs_more_than_it_saves_is_explained() -> None:
    """The share of the price that is saved is large enough, but an hour does not pay for repeated work."""
    state = given(
        node("n1", BIG), pod("a", on="n1", gpus=2), on_sale(offer("new", gpus=2, usd_per_hour=8.4)), as_of=NOW
    )
    made = made_of(state)
    (held,) = [each.reason for each in made.deferred if each.step == "replace_expensive"]

    assert made.purchases == []
    assert isinstance(held, SavingTooSmall)
    assert held.saved_micro_usd == 1_600_000
    assert held.move_micro_usd is not None
    assert held.move_micro_usd > 1_600_000
    assert held.sentence().startswith("Moving the pods would save $1.60 until they end")
    assert "raise removal.replacement_payback_hours" in held.remedy()


def test_paid_reservations_are_used_and_not_left() -> None:
    """Their price is paid with or without work, until the reservation ends."""
    reserved = offer("big", gpus=8, usd_per_hour=10.0, capacity_type=CapacityType.RESERVED)
    work = pod("a", on="n1", gpus=2)

    there = (node("n1", reserved), work)
    assert made_of(given(*there, on_sale(BIG, SMALL, reserved), as_of=NOW)).decisions == ()
    over = msgspec.structs.replace(reserved, paid_until=NOW)
    (left,) = made_of(given(*there, on_sale(SMALL, over), as_of=NOW)).purchases
    assert left.offer.instance_type == "small"
    one = (node("n1", BIG), work, on_sale(BIG, reserved))
    (purchase,) = made_of(given(*one, as_of=NOW)).purchases
    assert purchase.offer.capacity_type is CapacityType.RESERVED
    later = NOW + 4 * MINUTE
    ready = (planned(purchase, at=NOW), observed_allocatable_of(purchase, "n2", later))
    assert [drain.node_name for drain in made_of(given(*one, *ready, as_of=later), as_of=later).drains] == ["n1"]


def test_a_replacement_that_became_expensive_is_not_used() -> None:
    """Decided again just before the drain."""
    one = (node("n1", BIG), pod("a", on="n1", gpus=2), SALE)
    (purchase,) = made_of(given(*one, as_of=NOW)).decisions
    assert isinstance(purchase, BuyNode)
    dear = msgspec.structs.replace(
        purchase, offer=msgspec.structs.replace(purchase.offer, price_micro_usd_per_hour=11_000_000)
    )
    later = NOW + 4 * MINUTE
    state = given(*one, planned(dear, at=NOW), observed_allocatable_of(dear, "n2", later), as_of=later)

    rules = policy(consolidation_requested_ratio_max=0)
    assert [each for each in made_of(state, rules, later).decisions if isinstance(each, DrainNode)] == []


def test_replacement_can_be_switched_off() -> None:
    """Without consolidation."""
    state = given(node("n1", BIG), pod("a", on="n1", gpus=2), SALE, as_of=NOW)

    assert made_of(state, policy(is_consolidation_on=False)).decisions == ()


@pytest.mark.parametrize(("ago", "is_bought"), [(5 * MINUTE, False), (11 * MINUTE, True)])
def test_a_recently_removed_type_is_not_bought_to_save_cost(ago: timedelta, *, is_bought: bool) -> None:
    """A small idle node was removed; cheaper work for it waits for the cooldown."""
    gone = drained("n0", at=NOW - ago, reason=NodeIdle(idle_seconds=700, idle_seconds_max=600))
    there = (*gone, *instance(purchase("buy-n0", SMALL), state="terminated", at=NOW - ago + MINUTE))
    state = given(node("n1", BIG), pod("a", on="n1", gpus=2), SALE, there, as_of=NOW)
    made = made_of(state)
    held = [each.reason for each in made.deferred if each.step == "replace_expensive"]

    assert bool(made.purchases) == is_bought
    assert is_bought or held == [Cooldown(remaining_seconds=300.0)]
    unhurried = plan(given(node("n1", BIG), pod("a", on="n1", gpus=2), SALE, as_of=NOW), policy(), NOW)
    assert is_bought or "a node of its type was removed within the cooldown" in str(check(unhurried, state, policy()))
