"""How long an empty node is kept: by its cost, compared with that of another boot."""

from datetime import timedelta

import msgspec
import pytest
from tests.support.stories import HOUR, MINUTE, T0, given, node, offer, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.defer import NotYetIdle
from gpu_autoscaler.model.reasons.drain import NodeIdle

NOW = T0 + HOUR


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
    rules = policy(scale_down_cooldown_seconds=0.0)
    before, after = (plan(state, rules, T0 + timedelta(seconds=seconds + each)) for each in (-1.0, 0.0))

    assert kept(before).idle_seconds_max == seconds
    assert [each.reason for each in after.decisions] == [NodeIdle(idle_seconds=seconds, idle_seconds_max=seconds)]


def test_reserved_nodes_are_kept_longest() -> None:
    """Removing one saves only its overhead."""
    paid = offer(capacity_type=CapacityType.RESERVED, usd_per_hour=9.0)
    made = plan(given(node("n1", paid), as_of=T0 + 5 * MINUTE), policy(), T0 + 5 * MINUTE)

    assert kept(made).idle_seconds_max == 600.0
