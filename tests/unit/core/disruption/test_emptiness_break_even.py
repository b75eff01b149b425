"""How long an empty node is kept: by its cost, compared with that of another boot."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.support.stories import HOUR, MINUTE, T0, given, node, offer, on_sale, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.limits.spend import ENDING_SECONDS, tail_seconds
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalPolicy
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.base import IdleRule
from gpu_autoscaler.model.reasons.defer import NotYetIdle
from gpu_autoscaler.model.reasons.drain import NodeIdle

NOW = T0 + HOUR
TWO_USD = RemovalPolicy(waiting_micro_usd_per_hour=2_000_000)  # an hour of waiting


def kept(made: Plan) -> NotYetIdle:
    """Why the one node stays."""
    (reason,) = (each.reason for each in made.deferred if isinstance(each.reason, NotYetIdle))
    return reason


@pytest.mark.parametrize(("usd_per_hour", "seconds"), [(0.1, 600.0), (0.9, 360.0), (3.9, 180.0), (None, 600.0)])
def test_an_empty_node_is_kept_while_that_costs_less_than_a_boot(usd_per_hour: float | None, seconds: float) -> None:
    """Two minutes of boot at price and overhead, and two minutes of wait at 2 USD an hour; 10 min at most."""
    sold = offer(usd_per_hour=usd_per_hour or 1.0)
    if usd_per_hour is None:
        sold = msgspec.structs.replace(sold, price_micro_usd_per_hour=None)
    state = given(node("n1", sold), as_of=NOW)
    rules = policy(scale_down_cooldown_seconds=0.0, removal=TWO_USD)
    before, after = (plan(state, rules, T0 + timedelta(seconds=seconds + each)) for each in (-1.0, 0.0))

    assert kept(before).idle_seconds_max == seconds
    (removed,) = (each.reason for each in after.decisions)
    assert isinstance(removed, NodeIdle)
    assert (removed.idle_seconds, removed.idle_seconds_max) == (seconds, seconds)


def test_reserved_nodes_are_kept_longest() -> None:
    """Removing one saves only its overhead."""
    paid = offer(capacity_type=CapacityType.RESERVED, usd_per_hour=9.0)
    made = plan(given(node("n1", paid), as_of=T0 + 5 * MINUTE), policy(), T0 + 5 * MINUTE)

    assert kept(made).idle_seconds_max == 600.0


# ---- an idle time that is set


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"idle_seconds": 900.0}, 900.0),
        ({"idle_seconds": 0.0}, 0.0),
        ({"idle_seconds": 900.0, "pools": (NodePool(name="default", idle_seconds=60.0),)}, 60.0),
        ({"pools": (NodePool(name="default", idle_seconds=1200.0),)}, 1200.0),
        ({"pools": (NodePool(name="other", idle_seconds=60.0), NodePool(name="default"))}, 180.0),
    ],
)
def test_an_idle_time_that_is_set_is_exact(fields: dict[str, Any], seconds: float) -> None:
    """Of the pool before that of the policy, above and below break-even and its maximum."""
    sold = offer(usd_per_hour=3.9)
    rules = policy(scale_down_cooldown_seconds=0.0, removal=TWO_USD, **fields)
    state = given(node("n1", sold), on_sale(sold), as_of=NOW)
    if seconds:
        assert kept(plan(state, rules, T0 + timedelta(seconds=seconds - 1))).idle_seconds_max == seconds
    due = plan(state, rules, T0 + timedelta(seconds=seconds))
    assert [isinstance(each.reason, NodeIdle) for each in due.decisions] == [True]
    assert check(due, state, rules) == ()


def test_a_reason_shows_which_rule_applied_and_its_figures() -> None:
    """In the sentences of the removal and of the wait: the time that is set, break-even, or its maximum."""
    state = given(node("n1", offer(usd_per_hour=3.9)), as_of=NOW)
    at = T0 + timedelta(seconds=30)
    by_cost = kept(plan(state, policy(removal=TWO_USD), at))
    assert by_cost.rule == IdleRule(
        name="break_even", boot_seconds=120.0, node_micro_usd_per_hour=4_000_000, waiting_micro_usd_per_hour=2_000_000
    )
    assert by_cost.sentence().endswith(
        "That is break-even: keeping the node costs $4.00/h, a new boot takes 2 min at that price and at $2.00/h for"
        " work that waits."
    )
    bounded = kept(plan(state, policy(idle_seconds_max=60.0), at))
    assert "That is idle_seconds_max of the policy, below break-even: keeping the node costs" in bounded.sentence()
    set_time = kept(plan(state, policy(idle_seconds=700.0), at))
    assert set_time.sentence().endswith("That is the idle_seconds of the policy or the pool.")


@pytest.mark.parametrize(("fields", "seconds"), [({}, 600.0), ({"idle_seconds": 5000.0}, 5000.0)])
def test_the_longest_idle_time_bounds_the_run_after_work(fields: dict[str, Any], seconds: float) -> None:
    """Spend budgets reserve for as long as a node may be kept."""
    rules = policy(**fields)
    assert tail_seconds(rules) == seconds + rules.drain_seconds_max + ENDING_SECONDS
