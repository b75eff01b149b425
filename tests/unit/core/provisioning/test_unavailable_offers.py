"""Refused offers have a growing back-off, and a quota until it has capacity again."""

from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.stories import (
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    instance,
    job,
    offer,
    on_sale,
    policy,
    purchase,
)
from tests.unit.core.provisioning.test_scale_up import held, purchases

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.provisioning.unavailable_offers import Unavailability, active_unavailability
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.model.offers import Offer, UnavailabilityCause
from gpu_autoscaler.model.reasons.defer import OffersUnavailable


def refused(name: str, at: datetime, *, scope: str = "offer", of: Offer | None = None) -> Story:
    """An order of this instant that the cloud refused, to retry after three minutes."""
    story = bought(purchase(name, of, at=at), at=at, is_refused=True)
    return tuple(
        TimedFact(msgspec.structs.replace(each.fact, scope=scope), each.at)
        if isinstance(each.fact, ScalingLaunchRefused)
        else each
        for each in story
    )


def the_one(*stories: Story, as_of: datetime) -> Unavailability:
    """The one active refusal."""
    (found,) = active_unavailability(given(*stories, as_of=as_of), as_of).values()
    return found


@pytest.mark.parametrize(("tries", "minutes"), [(1, 3), (2, 6), (3, 12), (4, 24), (5, 30), (9, 30)])
def test_each_refusal_in_a_row_doubles_the_wait(tries: int, minutes: int) -> None:
    """Three minutes, six, twelve, to half an hour at most."""
    stories = [refused(f"o{each}", T0 + each * 31 * MINUTE) for each in range(tries)]
    last_at = T0 + (tries - 1) * 31 * MINUTE
    found = the_one(*stories, as_of=last_at + MINUTE)

    assert found.until == last_at + minutes * MINUTE
    assert (found.tries_count, found.code) == (tries, "InsufficientInstanceCapacity")


def test_orders_of_one_plan_are_one_try() -> None:
    """Five nodes of one gang refused at once are one try."""
    stories = [refused(f"o{each}", T0) for each in range(5)]

    assert the_one(*stories, as_of=T0).until == T0 + 3 * MINUTE


def test_a_launch_resets_the_back_off() -> None:
    """The next refusal waits as long as a first one."""
    sold = bought(purchase("sold", at=T0 + 10 * MINUTE), at=T0 + 10 * MINUTE)
    stories = (refused("a", T0), refused("b", T0 + 5 * MINUTE), sold, refused("c", T0 + 20 * MINUTE))

    assert the_one(*stories, as_of=T0 + 20 * MINUTE).until == T0 + 23 * MINUTE


def test_a_quota_applies_to_its_family_and_capacity_type_in_the_region() -> None:
    """Other zones are included, other families are not."""
    elsewhere, other = offer(zone="zone-b"), offer("g5.48xlarge", zone="zone-b", usd_per_hour=16.0)
    full = refused("full", T0, scope="region")
    state = given(full, on_sale(elsewhere), job("train"))
    made = plan(state, policy(), T0)
    assert held(made, "job/train", OffersUnavailable).retry_at == T0 + 3 * MINUTE

    state = given(full, on_sale(elsewhere, other), job("train"))
    made = plan(state, policy(), T0)
    assert [bought.offer.key for bought in purchases(made)] == [other.key]
    assert check(made, state, policy()) == ()


def test_a_quota_is_available_again_when_an_instance_ends() -> None:
    """The wait is over at once."""
    as_of = T0 + MINUTE
    old = instance(purchase("old"), state="terminated", at=T0 - timedelta(hours=1))
    gone = (TimedFact(msgspec.structs.replace(old[0].fact, terminated_at=T0 + MINUTE / 2), as_of),)
    state = given(refused("full", T0, scope="region"), gone, on_sale(), job("train"), as_of=as_of)
    made = plan(state, policy(), as_of)

    assert len(purchases(made)) == 1
    assert check(made, state, policy()) == ()


@pytest.mark.parametrize(
    ("by", "code"),
    [
        (None, "QuotaTooSmall"),
        (UnavailabilityCause.QUOTA, "QuotaTooSmall"),
        (UnavailabilityCause.RESERVATION, "ReservationUsedUp"),
    ],
)
def test_a_barred_offer_reports_its_cause(by: UnavailabilityCause | None, code: str) -> None:
    """A used-up reservation is no quota; older facts had no cause."""
    barred = msgspec.structs.replace(offer(), unavailable_because="it is full", unavailable_by=by)
    (stands,) = active_unavailability(given(on_sale(barred)), T0).values()
    assert (stands.code, stands.message) == (code, "it is full")


def test_an_offer_beyond_its_quota_is_not_requested() -> None:
    """Before the cloud refuses it, as of the last sample; the plan check rejects such a purchase."""
    why = "quota L-1 is 0 vCPUs"
    barred = msgspec.structs.replace(offer(), unavailable_because=why)
    other = offer("g5.48xlarge", usd_per_hour=16.0)
    alone = plan(given(on_sale(barred), job("train")), policy(), T0)
    assert held(alone, "job/train", OffersUnavailable).offers == (barred.key,)

    state = given(on_sale(barred, other), job("train"))
    assert [bought.offer.key for bought in purchases(plan(state, policy(), T0))] == [other.key]
    (stands,) = active_unavailability(state, T0 + 60 * MINUTE).values()
    assert (stands.message, stands.until) == (why, T0 + 61 * MINUTE)

    free = plan(given(on_sale(offer()), job("train")), policy(), T0)
    decision = msgspec.structs.replace(purchases(free)[0], offer=barred)
    planted = msgspec.structs.replace(free, decisions=(decision,))
    assert any(why in finding for finding in check(planted, given(on_sale(barred), job("train")), policy()))
