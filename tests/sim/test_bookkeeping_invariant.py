"""The monitor's rule on charges: the scaler knows up to when each instance is charged."""

import asyncio
import random

import pytest
from tests.support.timed_facts import TimedFact, record

from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.cost import CostAccrued, CostLedgerReported
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.providers.protocol import Order
from gpu_autoscaler.sim.adapters.store import Tables
from gpu_autoscaler.sim.cluster.cloud import Cloud, Machine
from gpu_autoscaler.sim.cluster.controllers import Workloads
from gpu_autoscaler.sim.cluster.objects import Kubernetes
from gpu_autoscaler.sim.faults.injection import COST_TRACKER
from gpu_autoscaler.sim.invariants.bookkeeping import CALM_SECONDS, CHECK_SECONDS, BookkeepingInvariant
from gpu_autoscaler.sim.virtual_time import VirtualLoop
from gpu_autoscaler.store.protocol import LastCharge

AWAY_SECONDS = 600.0


class World:
    """A charged machine, and a scaler that knows of no charge; the cost tracker is away until AWAY_SECONDS."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        cluster = Kubernetes(self.loop.now)
        workloads = Workloads(cluster, self.loop, random.Random(1))  # noqa: S311 - start times, not secrets
        cloud = Cloud(workloads, random.Random(1))  # noqa: S311 - as above
        order = Order(
            action_id=ActionId("a"), installation="test", pool="default", offer=cloud.offers[0], labels=(), taints=()
        )
        machine = cloud.launch(order, visible_in_seconds=0.0, comes_up=True, shows_gpus=True)
        tables = Tables()
        span = _span(machine, self.loop)
        tables.charges[machine.provider_id] = LastCharge(last=span, from_at=span.from_at, total_micro_usd=1)
        self.invariant = BookkeepingInvariant(
            self.loop,
            cluster,
            cloud,
            tables,
            lambda _, what: self.violations.append(what),
            lambda: EMPTY_STATE,
            calm_since=lambda *places: AWAY_SECONDS if COST_TRACKER in places else 0.0,
        )

    def run(self, seconds: float) -> list[str]:
        """Check every minute for this time; return what the monitor reports."""
        self.invariant.begin()
        self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()
        return self.violations


def _span(machine: Machine, loop: VirtualLoop) -> CostAccrued:
    return CostAccrued(
        provider_id=machine.provider_id,
        node_name=None,
        instance_type=machine.offer.instance_type,
        capacity_type=machine.offer.capacity_type,
        from_at=loop.now(),
        to_at=loop.now(),
        total_micro_usd=1,
        idle_micro_usd=1,
        shares=(),
        price_micro_usd_per_hour=1,
        price_source="list",
        price_at=loop.now(),
    )


def test_a_charge_that_the_scaler_has_forgotten_is_reported() -> None:
    """Also while the cost tracker is away: the streams have what it charged before."""
    assert "which the scaler has forgotten" in World().run(CALM_SECONDS + CHECK_SECONDS + 1.0)[0]


def test_after_the_streams_are_lost_charges_are_known_once_the_cost_tracker_is_back() -> None:
    """Nobody else can report the sums of the ledger."""
    world = World()
    world.invariant.streams_lost()
    assert world.run(AWAY_SECONDS) == []
    assert world.run(CALM_SECONDS + CHECK_SECONDS + 1.0) != []


@pytest.mark.parametrize("is_reported", [True, False])
def test_sums_that_were_reported_again_are_to_be_known(*, is_reported: bool) -> None:
    """The cost tracker may leave again."""
    world = World()
    world.invariant.streams_lost()
    if is_reported:
        sums = CostLedgerReported(spent=(), charged=(), jobs=(), reported_at=world.loop.now())
        world.invariant.on_fact(record((TimedFact(sums, world.loop.now()),))[0])
    assert bool(world.run(CALM_SECONDS + CHECK_SECONDS + 1.0)) is is_reported
