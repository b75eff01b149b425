"""The pause of a pool after a plan that removes nodes of it by choice, and nodes of paid reservations."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, drained, given, node, offer, on_sale, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause
from gpu_autoscaler.model.reasons.defer import KeptAsBuffer
from gpu_autoscaler.model.reasons.defer_limits import Cooldown
from gpu_autoscaler.model.reasons.drain import DrainReason, NodeIdle, NodeUnhealthy

NOW = T0 + HOUR
IDLE = NodeIdle(idle_seconds=700, idle_seconds_max=600)


def removed(made: Plan) -> list[str]:
    """Names of the nodes that are drained."""
    return [decision.node_name for decision in made.drains]


def waits(made: Plan) -> list[float]:
    """Remaining seconds of each pause."""
    return [each.reason.remaining_seconds for each in made.deferred if isinstance(each.reason, Cooldown)]


def earlier_drain(ago: timedelta, pool: str = "default", reason: DrainReason = IDLE) -> Story:
    """A node of the pool that was drained by choice this long ago."""
    return (*node("n0", pool=pool), *drained("n0", at=NOW - ago, reason=reason))


def plan_after(ago: timedelta, *, pool: str = "default", reason: DrainReason = IDLE, **fields: Any) -> Plan:  # noqa: ANN401
    """The plan for an empty node beside one that was removed."""
    rules = policy(disruption_ratio_max=1.0, **fields)
    state = given(earlier_drain(ago, pool, reason), node("n1"), on_sale(), as_of=NOW)
    return accepted_plan(state, rules, NOW)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0.0),
        ({"idle_seconds": 60.0}, 600.0),
        ({"idle_seconds": 60.0, "removal": RemovalPolicy(pool_cooldown_seconds=0.0)}, 0.0),
        ({"removal": RemovalPolicy(pool_cooldown_seconds=900.0)}, 900.0),
        ({"pools": (NodePool(name="default", idle_seconds=60.0),)}, 600.0),
    ],
)
def test_a_pool_pauses_after_it_lost_nodes_by_choice(fields: dict[str, Any], seconds: float) -> None:
    """Ten minutes where an idle time is set; with the break-even rule only if the policy says so."""
    early = plan_after(5 * MINUTE, **fields)
    assert removed(early) == ([] if seconds else ["n1"])
    assert waits(early) == ([seconds - 300.0] if seconds else [])
    if seconds:
        assert removed(plan_after(timedelta(seconds=seconds), **fields)) == ["n1"]


def test_each_pool_has_a_pause_of_its_own() -> None:
    """A removal in another pool does not count."""
    pools = (NodePool(name="default"), NodePool(name="other"))
    assert removed(plan_after(5 * MINUTE, pool="other", idle_seconds=60.0, pools=pools)) == ["n1"]


def test_an_unhealthy_node_starts_no_pause() -> None:
    """Its removal is no choice of the policy."""
    reason = NodeUnhealthy(evidence="not ready", unhealthy_seconds=2000.0, unhealthy_seconds_max=1200.0)
    assert removed(plan_after(5 * MINUTE, reason=reason, idle_seconds=60.0)) == ["n1"]


def test_all_nodes_that_are_due_leave_in_one_plan() -> None:
    """The pause starts after the plan, not after the first of its nodes."""
    rules = policy(disruption_ratio_max=1.0, idle_seconds=60.0)
    made = plan(given(*(node(f"n{number}") for number in range(5)), as_of=NOW), rules, NOW)
    assert sorted(removed(made)) == ["n0", "n1", "n2", "n3", "n4"]


# ---- reservations

PAID = offer(capacity_type=CapacityType.RESERVED)
OVER = msgspec.structs.replace(PAID, unavailable_because="gone", unavailable_by=UnavailabilityCause.NO_RESERVATION)
USED_UP = msgspec.structs.replace(PAID, unavailable_because="used", unavailable_by=UnavailabilityCause.RESERVATION)


@pytest.mark.parametrize(("listed", "is_kept"), [((PAID,), True), ((USED_UP,), True), ((OVER,), False), ((), False)])
def test_an_empty_node_of_a_paid_reservation_is_kept(listed: tuple[Offer, ...], *, is_kept: bool) -> None:
    """Also with an idle time that is set; not once the reservation is gone, nor if the policy says so."""
    state = given(node("n1", PAID), on_sale(*listed, offer()), as_of=NOW)
    made = plan(state, policy(idle_seconds=60.0), NOW)
    assert removed(made) == ([] if is_kept else ["n1"])
    reasons = [each.reason for each in made.deferred if isinstance(each.reason, KeptAsBuffer)]
    assert [reason.kept_for for reason in reasons] == ([f"reservation/{PAID.key}"] if is_kept else [])
    for reason in reasons:
        assert "is paid in any case" in reason.sentence()
        assert "removal.is_paid_reservation_kept" in str(reason.remedy())
    free = policy(idle_seconds=60.0, removal=RemovalPolicy(is_paid_reservation_kept=False))
    assert removed(plan(state, free, NOW)) == ["n1"]
