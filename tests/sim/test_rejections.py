"""Runs with a bug in the planner: the plan check refuses some purchases for a while, and every promise is kept."""

import zlib
from collections.abc import Mapping
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from gpu_autoscaler.core import checked_plan
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingPlanMade
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, Plan
from gpu_autoscaler.model.reasons.defer import PlanRejected
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler.sim.virtual_time import ORIGIN
from gpu_autoscaler_services.simulation import ROLES

BUG_BEGINS_AT, BUG_ENDS_AT = ORIGIN + timedelta(minutes=5), ORIGIN + timedelta(minutes=20)
HOURS = 0.5


def broken_plan(
    state: ClusterState, policy: ScalingPolicy, as_of: datetime, rejected: Mapping[str, PlanRejected] | None = None
) -> Plan:
    """Plan, and for half of the work at prices that no offer has."""
    made = plan(state, policy, as_of, rejected)
    if not BUG_BEGINS_AT <= as_of < BUG_ENDS_AT:
        return made
    return replace(made, decisions=tuple(map(_broken, made.decisions)))


def _broken(decision: AnyDecision) -> AnyDecision:
    if isinstance(decision, BuyNode) and any(zlib.crc32(key.encode()) % 2 for key in _work(decision)):
        return replace(decision, offer=replace(decision.offer, price_micro_usd_per_hour=1))
    return decision


def _work(decision: BuyNode) -> tuple[str, ...]:
    work: tuple[str, ...] = getattr(decision.reason, "demand", ())
    return work


class BrokenRun(Simulation):
    """A run in which a refused plan is expected."""

    refused_count = 0

    def _on_refused_plan(self) -> None:
        self.refused_count += 1


def run(seed: int) -> BrokenRun:
    """Return the run after its end."""
    simulation = BrokenRun(
        Setting(seed=seed, hours=HOURS, kinds=("notice_120", "notice_30"), faults_times=40.0, jobs_per_hour=30.0), ROLES
    )
    simulation.run()
    return simulation


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_refused_purchases_break_no_promise(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work is served, notices are handled in time, what was set aside is served at last; plans are recomputed."""
    monkeypatch.setattr(checked_plan, "plan", broken_plan)
    simulation = run(seed)
    plans = [recorded.fact.plan for recorded in simulation.bus.published if isinstance(recorded.fact, ScalingPlanMade)]
    assert tuple(map(str, simulation.monitor.violations)) == ()
    assert simulation.refused_count > 0
    refused = [made for made in plans if made.rejected]
    assert refused
    assert max(made.as_of for made in refused) < BUG_ENDS_AT
    assert any(made.decisions for made in plans if refused[0].as_of <= made.as_of < BUG_ENDS_AT)


def test_scaler_that_drops_a_refused_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same runs find a scaler that publishes nothing while the check refuses something."""
    monkeypatch.setattr(checked_plan, "plan", broken_plan)
    monkeypatch.setattr(checked_plan, "_reject", lambda *_: None)
    monkeypatch.setattr(checked_plan, "_forced_part", lambda *_: None)
    assert any(run(seed).monitor.violations for seed in (1, 2, 3))
