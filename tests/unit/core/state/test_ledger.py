"""The ledger in the state: every span once, by UTC day and month and by owner."""

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.money import USD, charged, ledger, spent
from tests.support.stories import HOUR, MINUTE, T0, provider_id, record
from tests.support.timed_facts import Story, TimedFact

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.state.ledger import period_end, period_name, period_start, spent_in
from gpu_autoscaler.core.state.state import EMPTY_STATE, ClusterState
from gpu_autoscaler.events.cost import ChargedUntil, CostAccrued

MIDNIGHT = datetime(2026, 12, 1, tzinfo=UTC)


def folded(*stories: Story) -> ClusterState:
    """The state after these facts of the ledger."""
    return fold(EMPTY_STATE, record([each for story in stories for each in story]))


def ended(name: str, *, from_at: datetime = T0, to_at: datetime) -> Story:
    """The final span of an instance."""
    (span,) = charged(name, from_at=from_at, to_at=to_at)
    return (TimedFact(replace(span.fact, is_final=True), to_at),)


def test_a_span_counts_for_all_its_owners() -> None:
    """Cluster, pool, zone and project of the node."""
    state = folded(ledger(), charged("n", to_at=T0 + HOUR, project="speech"))

    owners = dict.fromkeys(("cluster", "pool/default", "zone/zone-a", "project/speech"), 10 * USD)
    assert state.spent == {"2026-11-21": owners, "2026-11": owners}


def test_a_span_over_midnight_is_split_to_the_micro_dollar() -> None:
    """Twenty minutes in the old month, ten in the new one; together the whole."""
    span = charged("n", from_at=MIDNIGHT - 20 * MINUTE, to_at=MIDNIGHT + 10 * MINUTE, usd_per_hour=10.000001)
    state = folded(ledger(), span)

    assert state.spent["2026-11"]["cluster"] == state.spent["2026-11-30"]["cluster"] == 3_333_333
    assert state.spent["2026-12"]["cluster"] + state.spent["2026-11"]["cluster"] == 5_000_000


def test_spans_count_once_in_any_order() -> None:
    """A retrying publisher may send a later span first; repeats add nothing."""
    spans = [charged("n", from_at=T0 + each * MINUTE, to_at=T0 + (each + 1) * MINUTE) for each in range(4)]
    whole = folded(ledger(), *spans).spent

    for order in itertools.permutations(spans):
        assert folded(ledger(), *order, *order).spent == whole


def test_a_refund_counts_once() -> None:
    """Billing ended earlier than charged: a negative span."""
    back = charged("n", from_at=T0 + 2 * MINUTE, to_at=T0 + MINUTE, total_usd=-1 / 6)
    state = folded(ledger(), charged("n", to_at=T0 + 2 * MINUTE), back, back)

    assert state.spent["2026-11-21"]["cluster"] == 333_333 - 166_667


def test_sums_of_the_store_are_imported_once() -> None:
    """Spans included in them add nothing, later ones do."""
    known = ChargedUntil(provider_id=provider_id("buy-n"), until_at=T0 + HOUR)
    sums = ledger(spent(25.0), spent(300.0, period="2026-11"), charged=(known,), at=T0 + HOUR)
    state = folded(sums, charged("n", to_at=T0 + HOUR), charged("n", from_at=T0 + HOUR, to_at=T0 + 2 * HOUR), ledger())

    assert state.spent["2026-11-21"]["cluster"] == 35 * USD
    assert state.spent["2026-11"]["cluster"] == 310 * USD


def test_the_cost_of_a_job_is_summed() -> None:
    """Over all its nodes and attempts."""
    state = folded(
        charged("a", to_at=T0 + HOUR, job_id="train"),
        charged("b", from_at=T0 + HOUR, to_at=T0 + 2 * HOUR, job_id="train"),
    )

    assert {job_id: job.micro_usd for job_id, job in state.spent_by_job.items()} == {"train": 20 * USD}


def test_old_periods_and_charges_are_pruned() -> None:
    """The last month is kept."""
    late = T0 + 80 * 24 * HOUR
    more = (charged(name, from_at=late + hours * HOUR, to_at=late + hours * HOUR) for hours, name in enumerate("bc"))
    state = folded(ledger(), charged("a", to_at=T0 + HOUR), *more)

    assert sorted(state.spent) == ["2027-02", "2027-02-09"]
    assert sorted(state.charges) == [provider_id("buy-b"), provider_id("buy-c")]


def test_the_charge_of_a_living_instance_is_kept_while_its_spans_pause() -> None:
    """For as long as a kept sum may include it; that of an ended instance is pruned after hours."""
    for pause, kept in ((7 * HOUR, ["buy-b", "buy-quiet"]), (61 * 24 * HOUR, ["buy-b", "buy-quiet"])):
        state = folded(
            ledger(),
            charged("quiet", to_at=T0 + HOUR),
            ended("over", to_at=T0 + HOUR),
            charged("b", from_at=T0 + HOUR + pause, to_at=T0 + HOUR + pause),
        )
        assert sorted(state.charges) == [provider_id(name) for name in kept]


def test_no_current_sum_has_time_of_a_pruned_charge() -> None:
    """So the time of the instance can be counted from its launch again."""
    late = T0 + 63 * 24 * HOUR
    state = folded(ledger(), charged("a", to_at=T0 + HOUR), charged("b", from_at=late, to_at=late + HOUR))

    assert sorted(state.charges) == [provider_id("buy-b")]
    assert {period: state.spent[period]["cluster"] for period in ("2027-01", "2027-01-23")} == dict.fromkeys(
        ("2027-01", "2027-01-23"), 10 * USD
    )


def test_the_end_of_a_charge_arrives_in_any_order() -> None:
    """A retrying publisher may send the final span first; the imported sums know it too."""
    first, last = charged("n", to_at=T0 + MINUTE), ended("n", from_at=T0 + MINUTE, to_at=T0 + 2 * MINUTE)
    for order in itertools.permutations((first, last)):
        assert folded(ledger(), *order).charges[provider_id("buy-n")].is_final
    known = ChargedUntil(provider_id=provider_id("buy-n"), until_at=T0, is_final=True)
    assert folded(ledger(charged=(known,))).charges[provider_id("buy-n")].is_final


@for_all(start=st.integers(0, 86_400 * 70), seconds=st.integers(0, 86_400 * 3), price=st.integers(0, 100_000_000))
def test_days_and_months_of_a_span_add_up(start: int, seconds: int, price: int) -> None:
    """Of any span."""
    from_at = T0 + timedelta(seconds=start)
    story = charged("n", from_at=from_at, to_at=from_at + timedelta(seconds=seconds), usd_per_hour=price / USD)
    span = story[0].fact
    assert isinstance(span, CostAccrued)
    parts = [(period, amount) for period, owner, amount in spent_in(span) if owner == "cluster"]

    for length in (7, 10):
        assert sum(amount for period, amount in parts if len(period) == length) == span.total_micro_usd


@pytest.mark.parametrize("at", [T0, MIDNIGHT, MIDNIGHT - timedelta(microseconds=1)])
def test_periods_are_contiguous(at: datetime) -> None:
    """The end of one is the start of the next."""
    for period in ("day", "month"):
        start, end = period_start(period, at), period_end(period, at)
        assert start <= at < end
        assert period_name(period, start) == period_name(period, at) != period_name(period, end)
