"""A ledger that is older than the stream is completed from it, and nothing is charged twice."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.support.runners import Place
from tests.support.stories import MINUTE, T0

from gpu_autoscaler.bus.protocol import Bus
from gpu_autoscaler.events.cost import CostAccrued, CostShare
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker import recovery
from gpu_autoscaler_services.cost_tracker.recovery import complete_ledger

FIRST = CostAccrued(
    provider_id=ProviderId("i-1"),
    node_name="n1",
    instance_type="g4dn.xlarge",
    capacity_type=CapacityType.SPOT,
    from_at=T0,
    to_at=T0 + MINUTE,
    total_micro_usd=1000,
    idle_micro_usd=400,
    shares=(CostShare(allocated_micro_usd=600, used_micro_usd=None, job_id=JobId("train")),),
    price_micro_usd_per_hour=60_000,
    price_source="test",
    price_at=T0,
)


def spans(count: int, name: str = "i-1") -> list[CostAccrued]:
    """Spans of a minute, one after the other."""
    starts = [T0 + number * MINUTE for number in range(count)]
    return [
        msgspec.structs.replace(FIRST, provider_id=ProviderId(name), from_at=start, to_at=start + MINUTE)
        for start in starts
    ]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """An empty store."""
    opened = await SqliteStore.open(tmp_path / "store.db")
    yield opened
    await opened.close()


async def published(*facts: CostAccrued) -> Bus:
    """A broker with these spans, in this order."""
    place = Place()
    for span in facts:
        await place.say(span)
    return await place.bus()


async def test_a_ledger_from_a_backup_is_completed(store: SqliteStore) -> None:
    """By what was charged since, once, and with its shares; none of it is published again."""
    await store.charge(spans(2))
    bus = await published(*spans(5), *spans(3, "i-2"))

    assert await complete_ledger(store, bus, Clock()) == 6
    assert await complete_ledger(store, bus, Clock()) == 0

    charges = await store.last_charges()
    assert {name: (charge.last.to_at, charge.total_micro_usd) for name, charge in charges.items()} == {
        "i-1": (T0 + 5 * MINUTE, 5000),
        "i-2": (T0 + 3 * MINUTE, 3000),
    }
    assert await store.spent_by_job() == {"train": 8 * 600}
    assert not await store.unconfirmed_charges(10)


async def test_a_new_database_gets_what_the_stream_has(store: SqliteStore) -> None:
    """From the oldest span on."""
    bus = await published(*spans(4)[2:])

    assert await complete_ledger(store, bus, Clock()) == 2

    (charge,) = (await store.last_charges()).values()
    assert (charge.from_at, charge.last.to_at) == (T0 + 2 * MINUTE, T0 + 4 * MINUTE)


async def test_spans_that_were_stored_in_disorder_are_committed_in_order(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one says up to when its instance is charged, also where they are committed in parts."""
    monkeypatch.setattr(recovery, "SORTED_COUNT", 4)
    monkeypatch.setattr(recovery, "_KEPT_COUNT", 2)
    in_order = spans(9)
    for place in (1, 4, 6):
        in_order[place], in_order[place + 1] = in_order[place + 1], in_order[place]
    bus = await published(*in_order)

    assert await complete_ledger(store, bus, Clock()) == 9

    (charge,) = (await store.last_charges()).values()
    assert (charge.from_at, charge.last.to_at, charge.total_micro_usd) == (T0, T0 + timedelta(minutes=9), 9000)


async def test_a_complete_ledger_is_not_read(store: SqliteStore) -> None:
    """Nor is an empty stream; a ledger that is ahead of the stream publishes the rest as always."""
    assert await complete_ledger(store, await published(), Clock()) == 0
    bus = await published(*spans(2))
    await store.charge(spans(3))

    assert await complete_ledger(store, bus, Clock()) == 0

    assert len(await store.unconfirmed_charges(10)) == 3
