"""A cloud with launch groups, and real services that are killed anywhere."""

from collections import defaultdict

import pytest

from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingNodeLaunched, ScalingPlanMade
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.sim.simulation import Setting, Simulation
from gpu_autoscaler_services.simulation import ROLES

KINDS = (
    "launched_together", "launch_refused", "launch_answer_lost", "launch_slow", "launch_throttled", "two_scalers",
    "killed_in_call", "killed_before_publish", "killed_before_ack", "message_repeated", "instance_visible_late",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_no_gang_is_launched_partially() -> None:
    """Refused as a whole, lost and retried, killed between call and publish: each transaction has one outcome, and
    every instance was ordered.
    """
    simulation = Simulation(Setting(seed=8, hours=0.5, kinds=KINDS, faults_times=6.0, jobs_per_hour=40.0), ROLES)
    assert simulation.run().violations == ()
    facts = [recorded.fact for recorded in simulation.bus.published]
    transactions: dict[str, set[str]] = defaultdict(set)
    for made in facts:
        for decision in made.plan.decisions if isinstance(made, ScalingPlanMade) else ():
            if isinstance(decision, BuyNode) and decision.transaction is not None:
                transactions[decision.transaction].add(decision.action_id)
    launched = {fact.action_id for fact in facts if isinstance(fact, ScalingNodeLaunched)}
    refused = {fact.action_id for fact in facts if isinstance(fact, ScalingLaunchRefused)}
    words = [(len(orders), len(orders & launched), len(orders & refused)) for orders in transactions.values()]
    assert any(count == launched_count for count, launched_count, _ in words)
    assert any(count == refused_count for count, _, refused_count in words)
    assert all(0 in (launched_count, refused_count) for _, launched_count, refused_count in words)
    bought = [machine.order.action_id for machine in simulation.cloud.machines]
    assert len(bought) == len(set(bought))
