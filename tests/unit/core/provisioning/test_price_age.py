"""The age of prices: always reported, and prevents a purchase only if the policy requires it."""

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, SECOND, T0, given, job, offer, on_sale, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.provisioning_settings import PricePolicy
from gpu_autoscaler.core.provisioning.price_age import oldest_seconds
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.reasons.defer import DeferReason, PriceUnknown, WatchStale

SHORT = PricePolicy(age_seconds_max=6 * MINUTE.total_seconds(), is_stale_price_allowed=False)
STRICT = PricePolicy(age_seconds_max=HOUR.total_seconds(), is_stale_price_allowed=False)
OLD = msgspec.structs.replace(offer(usd_per_hour=0.1), price_source="file of prices", priced_at=T0 - 7 * HOUR)
UNPRICED = msgspec.structs.replace(OLD, price_micro_usd_per_hour=None)
FRESH = offer(zone="zone-b", usd_per_hour=9.0)


def made(*offers: Offer, prices: PricePolicy = STRICT, age: object = 0 * HOUR) -> Plan:
    """The plan this long after the list, accepted by the plan check."""
    at = T0 + age  # type: ignore[operator]
    state = given(job("train"), on_sale(*offers, at=T0), as_of=at)
    return accepted_plan(state, policy(prices=prices), at)


def bought(found: Plan) -> list[Offer]:
    """The purchases."""
    return [each.offer for each in found.purchases]


def held(found: Plan) -> DeferReason:
    """Why the work waits."""
    (one,) = [each for each in found.deferred if each.subject == "job/train"]
    return one.reason


def test_a_stale_price_is_bought_unless_the_policy_forbids_it() -> None:
    """Prices seldom change; with the setting the more expensive fresh offer is bought."""
    assert bought(made(OLD, FRESH, prices=PricePolicy())) == [OLD]
    assert bought(made(OLD, FRESH)) == [FRESH]


def test_work_without_a_fresh_price_reports_it() -> None:
    """With the age and the limit; an offer that never had a price is reported as such."""
    reason = held(made(OLD))
    assert isinstance(reason, WatchStale)
    assert (reason.source, reason.age_seconds) == ("prices", 7 * 3600.0)
    assert reason.sentence() == "The list of prices is 7 h old (limit: 1 h)."
    assert held(made(UNPRICED)) == PriceUnknown(offers=(OLD.key,))


def test_an_old_list_has_old_prices() -> None:
    """Its prices were fresh when it was sampled."""
    assert bought(made(FRESH, age=59 * MINUTE)) == [FRESH]
    assert bought(made(FRESH, age=61 * MINUTE)) == []


def test_no_price_is_read_while_nothing_waits() -> None:
    """So its age changes no plan, and no plan is made because of it."""
    changes = []
    for demand in ((), (job("train"),)):
        as_of = TrackedInstant.of(T0 + 5 * MINUTE)
        plan(given(*demand, on_sale(FRESH, at=T0), as_of=as_of.plain), policy(prices=SHORT), as_of)
        changes.append(as_of.next_change_at)
    idle, waiting = changes
    assert idle is not None and waiting is not None  # noqa: PT018 - for the type checker
    assert waiting <= T0 + 6 * MINUTE + SECOND < idle


def test_the_plan_check_rejects_stale_prices() -> None:
    """A plan made without the rule is rejected under it."""
    careless = made(OLD, prices=PricePolicy())
    state = given(job("train"), on_sale(OLD, at=T0), as_of=T0)
    assert check(careless, state, policy(prices=STRICT)) == (
        f"{OLD.key} is bought at a price that is older than the policy allows",
    )


@pytest.mark.parametrize(("offers", "age_seconds"), [((OLD, FRESH), 7 * 3600.0), ((FRESH,), 0.0), ((UNPRICED,), None)])
def test_the_age_of_the_oldest_price(offers: tuple[Offer, ...], age_seconds: float | None) -> None:
    """None without a price."""
    assert oldest_seconds(given(on_sale(*offers, at=T0), as_of=T0).offers, T0) == age_seconds
