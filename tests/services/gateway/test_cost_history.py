"""Spend of days that the stream no longer holds, from the store: pages add up to every charge, each once."""

import contextlib
from collections.abc import AsyncIterator
from datetime import date, datetime, timedelta
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.contract.store.contract import roll_up, span
from tests.support.front import front
from tests.support.postgres import postgres, postgres_server_url, postgres_url

from gpu_autoscaler.core.state.ledger import period_start
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.store.opening import open_store
from gpu_autoscaler.store.protocol import Store
from gpu_autoscaler_services.gateway import cost_history, schema
from gpu_autoscaler_services.gateway.cost_history import CostHistory, page_end
from gpu_autoscaler_services.gateway.ledger import Ledger

__all__ = ["postgres", "postgres_server_url", "postgres_url"]  # fixtures

DAY = timedelta(days=1)
DAYS_COUNT = 45
NOW = Clock.wall_now()
FIRST = period_start("day", NOW) - DAYS_COUNT * DAY


def charges() -> list[CostAccrued]:
    """Return the charges of two instances by the half day, up to now; each day costs another amount."""
    return [
        msgspec.structs.replace(span(0, provider_id=name, total=1001 + number), from_at=start, to_at=start + DAY / 2)
        for number in range(2 * DAYS_COUNT)
        for start in (FIRST + number * DAY / 2,)
        for name in ("sim:///a/i-1", "sim:///a/i-2")
    ]


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """A store with all charges, the older ones merged to days."""
    opened = await open_store(store_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(opened.close)
        await opened.charge(charges())
        for charge in charges():
            await opened.confirm_charge(charge)
        await roll_up(opened, NOW - DAY)
        yield opened


def history(store: Store, read_since: datetime = NOW) -> CostHistory:
    """Return the history of a gateway whose stream begins at this instant."""
    ledger = Ledger()
    for charge in charges():
        if charge.from_at >= read_since:
            ledger.add(charge)
    return CostHistory(ledger, store, lambda: NOW, span_days=1, ledger_days=400)


def spent(cost: schema.Cost) -> int:
    """Return the total; spans and projects must add up to it."""
    assert sum(entry.allocated_micro_usd for entry in cost.spans) == cost.allocated_micro_usd
    assert sum(entry.idle_micro_usd for entry in cost.spans) == cost.idle_micro_usd
    assert sum(entry.allocated_micro_usd for entry in cost.projects) == cost.allocated_micro_usd
    return cost.allocated_micro_usd + cost.idle_micro_usd


async def pages(costs: CostHistory, days_count: int, span_seconds: int = 86_400) -> list[schema.Cost]:
    """Return all pages, newest first."""
    found: list[schema.Cost] = []
    before: date | None = None
    while True:
        found.append(await costs.cost(span_seconds, before=before, days_count=days_count))
        if (cursor := found[-1].next_cursor) is None:
            return found
        before = page_end(cursor)


@pytest.mark.parametrize("days_count", [1, 7, 31])
async def test_pages_hold_every_charge_once(store: Store, days_count: int) -> None:
    """The stream begins within a day: that day and those before are the store's, with the sums of each."""
    found = await pages(history(store, FIRST + 38.4 * DAY), days_count)
    assert sum(spent(page) for page in found) == sum(charge.total_micro_usd for charge in charges())
    by_day = {entry.from_at: entry.allocated_micro_usd + entry.idle_micro_usd for page in found for entry in page.spans}
    assert by_day == {
        FIRST + number * DAY: sum(2 * (1001 + 2 * number + half) for half in range(2)) for number in range(DAYS_COUNT)
    }
    assert all(len(page.spans) <= days_count for page in found)
    assert found[0].daily_before == (FIRST + 39 * DAY if days_count > 10 else None)


async def test_a_restarted_gateway_shows_a_month(store: Store) -> None:
    """The stream holds three days of charges; the default answer has 31, also by the hour."""
    costs = history(store, NOW - 3 * DAY)
    cost = await costs.cost(3600, before=None, days_count=31)
    first = period_start("day", NOW) - 30 * DAY
    assert cost.from_at == first
    assert page_end(cost.next_cursor or "") == first.date()
    assert spent(cost) == sum(charge.total_micro_usd for charge in charges() if charge.from_at >= first)
    daily = await costs.cost(86_400, before=None, days_count=31)
    assert spent(daily) == spent(cost)


async def test_an_answer_has_fewer_days_where_a_day_has_many_charges(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages together still have everything; too many charges of one day are refused for now."""
    whole = sum(charge.total_micro_usd for charge in charges())
    monkeypatch.setattr(cost_history, "ROWS_COUNT_MAX", 20)
    found = await pages(history(store, NOW - 3 * DAY), 31)
    assert len(found) > 45 / 31 + 1
    assert sum(spent(page) for page in found) == whole
    monkeypatch.setattr(cost_history, "ROWS_COUNT_MAX", 2)
    with pytest.raises(TransientError, match="not merged yet"):
        await history(store, NOW - 3 * DAY).cost(3600, before=FIRST.date() + 20 * DAY, days_count=5)


async def test_past_days_are_served_over_rest(tmp_path: Path) -> None:
    """Page by page from the store, though the stream is empty; limits are checked."""
    async with front(tmp_path) as gate, aiohttp.ClientSession() as http:
        await gate.model.store.charge(charges())
        for charge in charges():
            await gate.model.store.confirm_charge(charge)
        await roll_up(gate.model.store, NOW - DAY)
        total, query = 0, ""
        for _ in range(3):
            async with http.get(f"{gate.url}/api/v1/cost?span_seconds=86400{query}") as response:
                page = await response.json()
            total += page["allocated_micro_usd"] + page["idle_micro_usd"]
            if page["next_cursor"] is None:
                break
            query = f"&cursor={page['next_cursor']}"
        # What is not merged yet is the stream's to tell.
        merged = [each for each in charges() if each.from_at < period_start("day", NOW) - DAY]
        assert total == sum(each.total_micro_usd for each in merged)
        for wrong in ("days=32", "days=0", "before=yesterday"):
            async with http.get(f"{gate.url}/api/v1/cost?{wrong}") as response:
                assert response.status == 422
