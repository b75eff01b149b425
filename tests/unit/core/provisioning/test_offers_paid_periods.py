"""Reservations with a period: used first while open, and left before their end."""

import msgspec
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    given,
    job,
    node,
    notice,
    offer,
    on_sale,
    pod,
    policy,
)

from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.reasons.defer import NoOfferFits

CHEAP = offer(usd_per_hour=0.1)
BLOCK = msgspec.structs.replace(
    offer(capacity_type=CapacityType.RESERVED, usd_per_hour=0.0), paid_from=T0 + HOUR, paid_until=T0 + 5 * HOUR
)


def made(*stories: Story, at_hour: float) -> Plan:
    """The plan after the stories, accepted by the plan check."""
    at = T0 + at_hour * HOUR
    state = given(*stories, as_of=at)
    return accepted_plan(state, policy(), at)


def bought(found: Plan) -> list[Offer]:
    """The purchases."""
    return [each.offer for each in found.purchases]


def test_an_open_reservation_is_used_first() -> None:
    """Before, after, and when too little time is left, the cheapest offer is bought."""
    waits, offerings = job("train"), on_sale(CHEAP, BLOCK)
    assert bought(made(waits, offerings, at_hour=2)) == [BLOCK]
    assert bought(made(waits, offerings, at_hour=0.5)) == [CHEAP]
    assert bought(made(waits, offerings, at_hour=4.9)) == [CHEAP]
    assert bought(made(waits, offerings, at_hour=6)) == [CHEAP]


def test_work_for_a_future_reservation_reports_its_beginning() -> None:
    """Nothing is bought before; a period that has ended is reported as well."""
    early, late = (made(job("train"), on_sale(BLOCK), at_hour=hour) for hour in (0.5, 6))
    (soon,) = [each.reason for each in early.deferred]
    (over,) = [each.reason for each in late.deferred]
    assert isinstance(soon, NoOfferFits)
    assert soon.detail == "the reservation period of p4d.24xlarge/zone-a/reserved begins at 2026-11-21 13:00:00 UTC"
    assert isinstance(over, NoOfferFits)
    assert "has ended or ends soon" in over.detail


def test_non_interruptible_work_uses_no_reservation_with_an_end() -> None:
    """It might outlive the period."""
    offerings = on_sale(offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=30.0), BLOCK)
    (taken,) = bought(made(job("a", is_preemptible=False), offerings, at_hour=2))
    assert taken.capacity_type is CapacityType.ON_DEMAND


def test_the_end_of_a_reservation_is_a_notice() -> None:
    """Its node drains by the end, and its work moves to capacity outside the period."""
    at = T0 + 5 * HOUR - 10 * MINUTE
    told = notice("n1", reclaim_at=T0 + 5 * HOUR, at=at)
    over = tuple(
        TimedFact(msgspec.structs.replace(each.fact, kind="paid_period_over"), each.at)
        for each in told
        if isinstance(each.fact, SpotNoticeReceived)
    )
    found = made(node("n1", BLOCK), pod("a", on="n1", gpus=8), over, on_sale(CHEAP, BLOCK), at_hour=5 - 1 / 6)
    (drain,) = found.drains
    assert (drain.node_name, drain.deadline_at, drain.is_voluntary) == ("n1", T0 + 5 * HOUR, False)
    assert bought(found) == [CHEAP]
