"""Refused offers have a growing back-off, and a quota until it has capacity again."""

from datetime import datetime, timedelta

import msgspec
import pytest
from hypothesis import given as given_random
from hypothesis import settings
from hypothesis.strategies import integers, lists, sampled_from, tuples
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
from tests.unit.core.provisioning.test_scale_up import held

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.check.purchase_rules import is_unavailable
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.provisioning.unavailable_offers import Unavailability, active_unavailability, scopes_of
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.model.offers import CapacityType, Offer, UnavailabilityCause
from gpu_autoscaler.model.reasons.defer import OffersUnavailable

OFFERS = (
    offer(),
    offer(zone="zone-b"),
    offer(capacity_type=CapacityType.ON_DEMAND),
    offer("g5.48xlarge", usd_per_hour=16.0),
)
MINUTES = integers(0, 4)
# Minutes of the plan, to its answer and to the next try; sold or refused, of what.
TRIES = tuples(MINUTES, MINUTES, integers(1, 6), sampled_from(["sold", "refused", "refused"]), sampled_from(OFFERS))
EMPTY_PLAN = plan(given(), policy(), T0)


def refused(
    name: str,
    at: datetime,
    *,
    scope: str = "offer",
    of: Offer | None = None,
    after: timedelta = timedelta(),
    wait: timedelta = 3 * MINUTE,
) -> Story:
    """An order of this instant that the cloud refused after some time, to retry after the wait."""
    story, refused_at = bought(purchase(name, of, at=at), at=at, is_refused=True), at + after
    return tuple(
        TimedFact(
            msgspec.structs.replace(each.fact, scope=scope, refused_at=refused_at, retry_at=refused_at + wait),
            refused_at,
        )
        if isinstance(each.fact, ScalingLaunchRefused)
        else each
        for each in story
    )


def the_one(*stories: Story, as_of: datetime) -> Unavailability:
    """The one active refusal."""
    (found,) = active_unavailability(given(*stories, as_of=as_of), as_of).values()
    return found


@pytest.mark.parametrize(("tries", "minutes"), [(1, 1), (2, 2), (3, 4), (4, 5), (9, 5)])
def test_each_refusal_in_a_row_doubles_the_wait(tries: int, minutes: int) -> None:
    """One minute, two, four, to five at most."""
    stories = [refused(f"o{each}", T0 + each * 6 * MINUTE, wait=MINUTE) for each in range(tries)]
    last_at = T0 + (tries - 1) * 6 * MINUTE
    found = the_one(*stories, as_of=last_at + MINUTE / 2)

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


def test_a_slow_refusal_of_an_earlier_plan_counts_from_its_answer() -> None:
    """It is the cloud's latest word, although a later plan was refused before it."""
    slow, quick = refused("slow", T0, after=MINUTE, wait=2 * MINUTE), refused("quick", T0 + MINUTE / 2, wait=2 * MINUTE)

    assert the_one(slow, quick, as_of=T0 + MINUTE).until == T0 + 5 * MINUTE


def test_capacity_that_ended_before_one_of_two_refusals_of_a_plan_lifts_neither() -> None:
    """The second answer came after the end, so the quota was exhausted again; the first one lasts as long."""
    first = refused("first", T0, scope="region", wait=4 * MINUTE)
    second = refused("second", T0, scope="region", after=MINUTE, wait=3 * MINUTE)
    (seen, *_) = instance(purchase("ended"), state="terminated", at=T0 - timedelta(hours=1))
    ended = (TimedFact(msgspec.structs.replace(seen.fact, terminated_at=T0 + MINUTE), T0 + MINUTE),)

    assert the_one(first, second, ended, as_of=T0 + 2 * MINUTE).until == T0 + 4 * MINUTE


@settings(max_examples=300)
@given_random(
    tries=lists(TRIES, min_size=2, max_size=4),
    scope=sampled_from(["offer", "zone", "region"]),
    ends=lists(MINUTES, max_size=1),
    now=integers(4, 10),
)
def test_what_the_plan_check_refuses_is_not_requested(
    tries: list[tuple[int, int, int, str, Offer]], scope: str, ends: list[int], now: int
) -> None:
    """For any offers, waits and answer times; the check has rules of its own."""
    as_of, stories = T0 + now * MINUTE, []
    for number, (planned, after, wait, answer, asked) in enumerate(tries):
        name, at = f"o{number}", T0 + planned * MINUTE
        if answer == "sold":
            stories.append(bought(purchase(name, asked, at=at), at=at))
        else:
            stories.append(refused(name, at, scope=scope, of=asked, after=after * MINUTE, wait=wait * MINUTE))
    for minute in ends:
        (seen, *_) = instance(purchase("ended"), state="terminated", at=T0 - timedelta(hours=1))
        stories.append((TimedFact(msgspec.structs.replace(seen.fact, terminated_at=T0 + minute * MINUTE), as_of),))
    state = given(*stories, as_of=as_of)
    unavailable, now_plan = active_unavailability(state, as_of), msgspec.structs.replace(EMPTY_PLAN, as_of=as_of)

    for each in OFFERS:
        assert not is_unavailable(each, now_plan, state) or set(scopes_of(each)) & set(unavailable)


def test_a_quota_applies_to_its_family_and_capacity_type_in_the_region() -> None:
    """Other zones are included, other families are not."""
    elsewhere, other = offer(zone="zone-b"), offer("g5.48xlarge", zone="zone-b", usd_per_hour=16.0)
    full = refused("full", T0, scope="region")
    state = given(full, on_sale(elsewhere), job("train"))
    made = plan(state, policy(), T0)
    assert held(made, "job/train", OffersUnavailable).retry_at == T0 + 3 * MINUTE

    state = given(full, on_sale(elsewhere, other), job("train"))
    made = plan(state, policy(), T0)
    assert [bought.offer.key for bought in made.purchases] == [other.key]
    assert check(made, state, policy()) == ()


def test_a_quota_is_available_again_when_an_instance_ends() -> None:
    """The wait is over at once."""
    as_of = T0 + MINUTE
    old = instance(purchase("old"), state="terminated", at=T0 - timedelta(hours=1))
    gone = (TimedFact(msgspec.structs.replace(old[0].fact, terminated_at=T0 + MINUTE / 2), as_of),)
    state = given(refused("full", T0, scope="region"), gone, on_sale(), job("train"), as_of=as_of)
    made = plan(state, policy(), as_of)

    assert len(made.purchases) == 1
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
    assert [bought.offer.key for bought in plan(state, policy(), T0).purchases] == [other.key]
    (stands,) = active_unavailability(state, T0 + 60 * MINUTE).values()
    assert (stands.message, stands.until) == (why, T0 + 61 * MINUTE)

    free = plan(given(on_sale(offer()), job("train")), policy(), T0)
    decision = msgspec.structs.replace(free.purchases[0], offer=barred)
    planted = msgspec.structs.replace(free, decisions=(decision,))
    assert any(why in finding for finding in check(planted, given(on_sale(barred), job("train")), policy()))
