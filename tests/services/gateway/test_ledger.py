"""Sums of charges: spans, total and projects always cover the same charges."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.timed_facts import T0

from gpu_autoscaler.events.cost import CostAccrued, CostShare
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.ledger import DAYS_COUNT_MAX, Ledger, cost_of, project_cost_of

DAY = timedelta(days=1)
SPAN_SECONDS = (60, 420, 3600, 86_400, 30 * 86_400)


def _charge(
    name: str, start: timedelta, seconds: float, *, idle: int = 0, shares: Sequence[tuple[str | None, int]] = ()
) -> CostAccrued:
    """The charge of an instance from an instant on, with the allocated shares of projects."""
    return CostAccrued(
        provider_id=ProviderId(name),
        node_name=None,
        instance_type="p4d.24xlarge",
        capacity_type=CapacityType.SPOT,
        from_at=T0 + start,
        to_at=T0 + start + timedelta(seconds=seconds),
        total_micro_usd=idle + sum(amount for _, amount in shares),
        idle_micro_usd=idle,
        shares=tuple(
            CostShare(allocated_micro_usd=amount, used_micro_usd=None, project_id=project) for project, amount in shares
        ),
        price_micro_usd_per_hour=1,
        price_source="sim",
        price_at=T0,
    )


def _adds_up(cost: schema.Cost) -> None:
    assert sum(span.allocated_micro_usd for span in cost.spans) == cost.allocated_micro_usd
    assert sum(span.idle_micro_usd for span in cost.spans) == cost.idle_micro_usd
    assert sum(project.allocated_micro_usd for project in cost.projects) == cost.allocated_micro_usd


_CHARGES = st.lists(
    st.builds(
        _charge,
        st.sampled_from(["i-1", "i-2", "i-3"]),
        st.timedeltas(timedelta(0), timedelta(days=80)),
        st.floats(0, 3 * 86_400),
        idle=st.integers(0, 10**9),
        shares=st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 10**9)), max_size=3),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=50)
@given(_CHARGES)
def test_spans_and_projects_add_up_to_the_total(charges: list[CostAccrued]) -> None:
    """For every width, also where charges are late, repeated, cross midnight, or are older than the limit."""
    ledger = Ledger()
    for fact in [*charges, *charges]:
        ledger.add(fact)
    costs = [cost_of(ledger.days, span_seconds) for span_seconds in SPAN_SECONDS]
    for cost in costs:
        _adds_up(cost)
        assert (cost.allocated_micro_usd, cost.idle_micro_usd, cost.projects, cost.from_at) == (
            costs[0].allocated_micro_usd, costs[0].idle_micro_usd, costs[0].projects, costs[0].from_at
        )  # fmt: skip


def test_the_total_is_the_bill_of_the_days_that_are_kept() -> None:
    """A charge a day for twice the limit: the last days remain, of the projects as well."""
    ledger = Ledger()
    for number in range(2 * DAYS_COUNT_MAX):
        ledger.add(_charge(f"i-{number}", number * DAY, 3600, idle=7, shares=[("a", 100), (None, 11)]))
    cost = cost_of(ledger.days, 86_400)
    _adds_up(cost)
    assert (cost.allocated_micro_usd, cost.idle_micro_usd) == (111 * DAYS_COUNT_MAX, 7 * DAYS_COUNT_MAX)
    assert {entry.project_id: entry.allocated_micro_usd for entry in cost.projects} == {
        "a": 100 * DAYS_COUNT_MAX,
        None: 11 * DAYS_COUNT_MAX,
    }
    assert cost.from_at == T0 + DAYS_COUNT_MAX * DAY
    assert len(cost.spans) == DAYS_COUNT_MAX


def test_the_spend_of_a_project_is_its_own_by_day() -> None:
    """Days without spend of it are spans of zero; nothing of others, and no idle cost, is in it."""
    ledger = Ledger()
    ledger.add(_charge("i-1", timedelta(0), 3600, idle=7, shares=[("a", 100), ("b", 50), (None, 11)]))
    ledger.add(_charge("i-2", DAY, 3600, idle=7, shares=[("b", 3)]))
    ledger.add(_charge("i-3", 2 * DAY, 3600, idle=7, shares=[("a", 20)]))
    cost, start = project_cost_of(ledger.days, "a"), T0 - timedelta(hours=12)
    assert (cost.span_seconds, cost.from_at, cost.allocated_micro_usd, cost.idle_micro_usd) == (86_400, start, 120, 0)
    assert [(span.from_at, span.allocated_micro_usd) for span in cost.spans] == [
        (start, 100), (start + DAY, 0), (start + 2 * DAY, 20)
    ]  # fmt: skip
    assert cost.projects == (schema.ProjectCost(project_id="a", allocated_micro_usd=120),)
    nothing = project_cost_of(ledger.days, "c")
    assert (nothing.from_at, nothing.allocated_micro_usd, nothing.spans) == (None, 0, ())


def test_a_charge_older_than_the_limit_changes_nothing() -> None:
    """A late charge, and the repetition of one that was dropped."""
    ledger = Ledger()
    old = _charge("i-1", timedelta(0), 3600, idle=7, shares=[("a", 100)])
    ledger.add(old)
    ledger.add(_charge("i-2", 2 * DAYS_COUNT_MAX * DAY, 60, idle=1, shares=[("b", 5)]))
    before = cost_of(ledger.days, 3600)
    ledger.add(old)
    ledger.add(_charge("i-3", DAY, 60, idle=3, shares=[("c", 9)]))
    assert cost_of(ledger.days, 3600) == before
    assert before.allocated_micro_usd == 5


@pytest.mark.parametrize("span_seconds", SPAN_SECONDS)
def test_no_charges_are_a_sum(span_seconds: int) -> None:
    """Zero, from an unknown instant."""
    assert cost_of(Ledger().days, span_seconds) == schema.Cost(
        span_seconds=span_seconds, from_at=None, allocated_micro_usd=0, idle_micro_usd=0, spans=(), projects=()
    )
