"""The cost tracker rolls the store up in small steps beside its charges."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.contract.store.contract import final, span
from tests.services.cost_tracker.test_service import INSTANCE, PRICE, Bench, instance, listed, node
from tests.support.stories import pod
from tests.support.timed_facts import HOUR, T0

from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker.housekeeping import STEPS_PER_TICK, Housekeeping
from gpu_autoscaler_services.cost_tracker.service import CostTracker

DAY = 24 * HOUR


class CountedStore(SqliteStore):
    """Counts the steps, and may fail."""

    steps = 0
    is_away = False

    async def roll_up(self, *, before: datetime, after: str = "") -> str | None:
        """Count, or fail."""
        self.steps += 1
        if self.is_away:
            raise TransientError("the database is away")
        return await super().roll_up(before=before, after=after)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[CountedStore]:
    """An empty store."""
    store = await CountedStore.open(tmp_path / "store.db")
    assert isinstance(store, CountedStore)
    yield store
    await store.close()


def housekeeping(store: SqliteStore) -> Housekeeping:
    """With a day of spans in detail."""
    return Housekeeping(store, span_days=1, ledger_days=63, plan_days=14, job_days=63)


async def test_a_tick_does_a_few_steps_and_a_day_is_done_once(store: CountedStore) -> None:
    """However much there is to do; what is done is not looked at again before the next day."""
    names = [f"i-{number:03}" for number in range(30)]
    spans = [span(minute, provider_id=name) for name in names for minute in (0, 1, 2)]
    await store.charge(spans)
    for each in spans:
        await store.confirm_charge(each)
    work, now = housekeeping(store), T0 + 3 * DAY
    ticks = 0
    for _ in range(40):
        before = store.steps
        await work.step(now)
        assert store.steps - before <= STEPS_PER_TICK
        ticks += store.steps > before
    assert len(names) / STEPS_PER_TICK <= ticks <= 3
    assert len((await store.ledger(count_max=1000)).rows) == 2 * len(names)  # the day, and the last span

    done = store.steps
    await work.step(now + HOUR)
    assert store.steps == done
    await work.step(now + DAY)
    assert store.steps > done


async def test_what_fails_is_done_later_and_delays_no_charge(store: CountedStore) -> None:
    """The tick charges, and its facts are returned."""
    bench = Bench(store)
    bench.tracker = CostTracker(
        bench.view,
        store,
        instances_without_price=Metrics("t").instances_without_price,
        housekeeping=housekeeping(store),
    )
    old = [span(minute - 9 * 24 * 60, provider_id="old") for minute in range(3)]
    await store.charge(old)
    for each in old:
        await store.confirm_charge(each)
    store.is_away = True
    bench.record_stories(instance(), node(), listed(T0 + HOUR))
    assert len(await bench.tick(T0 + HOUR)) == 1
    assert len((await store.ledger(provider_id=old[0].provider_id)).rows) == 3
    store.is_away = False
    await bench.tick(T0 + HOUR)
    rows = (await store.ledger(count_max=1000)).rows
    assert [row.total_micro_usd for row in rows if row.from_at < T0 - DAY] == [100, 200]


async def test_an_ended_instance_is_not_charged_again_from_the_streams(tmp_path: Path) -> None:
    """A start reads its launch and its end from the streams, but its charge is not among the open ones, and its spans
    are rolled up: the store is asked for it."""
    store = await SqliteStore.open(tmp_path / "store.db")
    bench = Bench(store)
    bench.record_stories(instance(), node(), pod("a", on="n", gpus=3), listed(T0 + HOUR))
    await bench.tick(T0 + HOUR)
    end = T0 + 2 * HOUR
    bench.record_stories(instance("terminated", at=end, terminated_at=end))
    await bench.tick(end)
    await bench.echo()
    assert await store.last_charges() == {}
    work = housekeeping(store)
    for _ in range(5):
        await work.step(T0 + 5 * DAY)

    bench.start()
    await bench.tick(T0 + 5 * DAY)
    await bench.tick(T0 + 5 * DAY + timedelta(minutes=10))
    assert sum(row.total_micro_usd for row in (await store.ledger()).rows) == cost_micro_usd(PRICE, 2 * HOUR)
    (charge,) = (await store.last_charges([INSTANCE])).values()
    assert charge.total_micro_usd == cost_micro_usd(PRICE, 2 * HOUR)
    await store.close()


async def test_a_start_reads_open_charges_only(store: CountedStore) -> None:
    """Not all instances that ever were."""
    ended = [final(0, provider_id=f"ended-{number}") for number in range(500)]
    await store.charge([*ended, msgspec.structs.replace(span(0), provider_id=ProviderId("open"))])
    tracker = CostTracker(StateView(), store, instances_without_price=Metrics("t").instances_without_price)
    await tracker.on_tick(T0 + HOUR)
    assert set(tracker._charges) == {"open"}


async def test_a_step_passes_a_limited_number_of_instances(
    store: CountedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have only their last span, which stays; the next step goes on behind them."""
    monkeypatch.setattr("gpu_autoscaler.store.retention.PASSED_COUNT_MAX", 2)
    spans = [span(0, provider_id=f"i-{number}") for number in range(3)]
    await store.charge(spans)
    for each in spans:
        await store.confirm_charge(each)
    assert await store.roll_up(before=T0 + 3 * DAY, after="") == "i-1"
    assert await store.roll_up(before=T0 + 3 * DAY, after="i-1") is None
