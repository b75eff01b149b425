"""The cost tracker on a bus: the stream has what the ledger has, and confirms it."""

from datetime import UTC, datetime
from pathlib import Path

from tests.support.runners import Place, running, until
from tests.support.timed_facts import HOUR, MINUTE

from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.node import NodeInstanceObserved
from gpu_autoscaler.events.scaling import ScalingNodeTerminated
from gpu_autoscaler.model.ids import ActionId, PlanId, ProviderId
from gpu_autoscaler.model.money import cost_micro_usd
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.metrics import Metrics
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.store.sqlite import SqliteStore
from gpu_autoscaler_services.cost_tracker.service import CostTracker


async def test_end_is_charged_at_once_and_published_once(tmp_path: Path) -> None:
    """The executor's fact is urgent: no regular tick is awaited; the span is confirmed."""
    now = datetime.now(UTC)
    launched = NodeInstanceObserved(
        epoch=1,
        version=2,
        provider_id=ProviderId("sim:///a/i-1"),
        action_id=ActionId("buy"),
        state="running",
        instance_type="g5.xlarge",
        zone="a",
        capacity_type=CapacityType.ON_DEMAND,
        price_micro_usd_per_hour=1_006_000,
        launched_at=now - HOUR,
    )
    ended = ScalingNodeTerminated(
        action_id=ActionId("drain"),
        plan_id=PlanId("p"),
        provider_id=launched.provider_id,
        order_action_id=None,
        node_name=None,
        terminated_at=now - MINUTE,
    )
    place, view, store = Place(), StateView(), await SqliteStore.open(tmp_path / "store.db")
    tracker = CostTracker(view, store, instances_without_price=Metrics("cost_tracker").instances_without_price)
    await place.say(launched, at=now - HOUR)
    async with running(place, tracker, view=view) as runner:
        await until(lambda: runner.readiness.is_ready)
        await place.say(ended, at=now)
        await until(lambda: is_confirmed(store, 1))
    spans = [recorded.fact for recorded in await place.stored(CostAccrued)]
    assert sum(span.total_micro_usd for span in spans if isinstance(span, CostAccrued)) == cost_micro_usd(
        1_006_000, HOUR - MINUTE
    )
    assert tuple(reversed(spans)) == (await store.ledger()).rows
    assert [span.to_at for span in spans if isinstance(span, CostAccrued)][-1] == ended.terminated_at
    await store.close()


async def is_confirmed(store: SqliteStore, count_min: int) -> bool:
    """Return True if there are spans and the stream has them all."""
    return len((await store.ledger()).rows) >= count_min and not await store.unconfirmed_charges(10)
