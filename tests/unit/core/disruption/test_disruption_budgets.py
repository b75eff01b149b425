"""Disruption budgets by cause, count, share and schedule."""

from datetime import datetime

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, T0, given, node, notice, on_sale, pod, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import DisruptionBudget, RemovalCause, RemovalPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.reasons.defer_limits import DisruptionBudgetReached

NOW = T0 + HOUR  # 13:00 UTC on a Saturday
TEN_IDLE = tuple(node(f"n{number}") for number in range(10))


def budgets(*each: DisruptionBudget) -> ScalingPolicy:
    """Nothing limits but these."""
    return policy(disruption_ratio_max=1, removal=RemovalPolicy(disruption_budgets=each))


def leaving_count(state: ClusterState, rules: ScalingPolicy, as_of: datetime = NOW) -> int:
    """Nodes that a plan drains, which the plan check finds nothing against."""
    made = accepted_plan(state, rules, as_of)
    return sum(1 for each in made.drains if each.is_voluntary)


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        (DisruptionBudget(nodes_count_max=3), 3),
        (DisruptionBudget(nodes_count_max=0), 0),
        (DisruptionBudget(nodes_ratio_max=0.31), 4),  # rounded up
        (DisruptionBudget(nodes_ratio_max=0.3), 3),
        (DisruptionBudget(nodes_count_max=5, nodes_ratio_max=0.2), 2),
        (DisruptionBudget(nodes_count_max=0, causes=(RemovalCause.UNDERUSED,)), 10),
        (DisruptionBudget(nodes_count_max=1, causes=(RemovalCause.EMPTY, RemovalCause.DRIFTED)), 1),
        (DisruptionBudget(nodes_count_max=0, schedule="0 9 * * sat,sun", duration_seconds=8 * 3600.0), 0),
        (DisruptionBudget(nodes_count_max=0, schedule="0 9 * * sat,sun", duration_seconds=3600.0), 10),
        (DisruptionBudget(nodes_count_max=0, schedule="0 9 * * mon-fri", duration_seconds=8 * 3600.0), 10),
        (
            DisruptionBudget(
                nodes_count_max=0, schedule="0 8 * * *", duration_seconds=3600.0, time_zone="America/New_York"
            ),
            0,
        ),
    ],
)
def test_a_budget_limits_its_causes(budget: DisruptionBudget, count: int) -> None:
    """By count or share, while its schedule is active (it is Saturday, 13:00 UTC)."""
    assert leaving_count(given(*TEN_IDLE, as_of=NOW), budgets(budget)) == count


def test_the_smallest_budget_applies() -> None:
    """Four and two are two."""
    rules = budgets(DisruptionBudget(nodes_count_max=4), DisruptionBudget(nodes_count_max=2))

    assert leaving_count(given(*TEN_IDLE, as_of=NOW), rules) == 2


@pytest.mark.parametrize(
    "bad",
    [
        DisruptionBudget(),
        DisruptionBudget(nodes_count_max=5, schedule="0 9 * *", duration_seconds=3600.0),
        DisruptionBudget(nodes_count_max=5, schedule="0 9 * * *"),
        DisruptionBudget(nodes_count_max=5, duration_seconds=3600.0),
        DisruptionBudget(nodes_count_max=5, schedule="0 9 * * *", duration_seconds=3600.0, time_zone="Mars/Olympus"),
    ],
)
def test_an_invalid_budget_allows_nothing(bad: DisruptionBudget) -> None:
    """It was meant to protect; its violations are reported when the policy is loaded."""
    assert leaving_count(given(*TEN_IDLE, as_of=NOW), budgets(bad)) == 0
    assert list(bad.violations())


def test_a_lost_node_counts_as_disrupted() -> None:
    """One of ten is lost: of three allowed removals two are left."""
    silent = node("n0", is_ready=False, version=2, at=NOW)
    state = given(*TEN_IDLE, silent[-1:], as_of=NOW)

    assert leaving_count(state, budgets(DisruptionBudget(nodes_count_max=3))) == 2


def test_notices_ignore_budgets() -> None:
    """A node under notice drains."""
    state = given(node("n1"), pod("a", on="n1"), notice("n1", reclaim_at=NOW + HOUR, at=NOW), on_sale(), as_of=NOW)
    made = plan(state, budgets(DisruptionBudget(nodes_count_max=0)), NOW)

    assert made.drains


def test_a_deferral_by_a_budget_is_reported() -> None:
    """With the number allowed."""
    made = plan(given(*TEN_IDLE, as_of=NOW), budgets(DisruptionBudget(nodes_count_max=3)), NOW)
    said = [each.reason for each in made.deferred if isinstance(each.reason, DisruptionBudgetReached)]

    assert len(said) == 7
    assert said[0] == DisruptionBudgetReached(disrupting_count=3, disrupting_count_max=3)
