"""The tables of bounds and of ablations, and the policies of the latter."""

import pytest
from msgspec.structs import replace
from tests.support.scoring import job, scenario

from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.sim.scoring.baselines.known_demand import BOUND, score_omniscient
from gpu_autoscaler.sim.scoring.baselines.offline import OFFLINE
from gpu_autoscaler.sim.scoring.metrics import ALL, Score
from gpu_autoscaler.sim.scoring.ours import OURS, WITHOUT_LEVER, score_ours, score_without_lever
from gpu_autoscaler.sim.scoring.runner import POLICY
from gpu_autoscaler.sim.scoring.scenario import Shortage
from gpu_autoscaler.simcluster.offers import ZONES
from gpu_autoscaler_services.score_page import ScenarioScores, bound_rows, lever_rows
from gpu_autoscaler_services.simulation import ROLES

RULE = "without consolidation"


def scores(**usd: float) -> tuple[Score, ...]:
    """Scores that differ in system and cost alone."""
    systems = {"karpenter": "karpenter-like", "ours": OURS, "offline": OFFLINE, "bound": BOUND, "rule": RULE}
    any_score = score_omniscient(scenario(job("a", 0.0, 60.0), hours=0.1))
    return tuple(replace(any_score, system=systems[name], cost_usd=amount) for name, amount in usd.items())


def rounds(*scored: tuple[Score, ...]) -> list[ScenarioScores]:
    """One scenario with these scores for each seed from 1."""
    return [
        ScenarioScores(world="steady", description="a test", scores=of_seed, seed=seed)
        for seed, of_seed in enumerate(scored, 1)
    ]


def test_bounds_are_relative_to_karpenter_like() -> None:
    """One row for each seed with an offline schedule; what was not scored is unknown."""
    rows = list(
        bound_rows(
            rounds(scores(karpenter=8.0, ours=6.0, offline=4.0, bound=2.0), scores(ours=6.0), scores(offline=4.0))
        )
    )
    assert rows == [
        ("steady, 1", "8.00", "6.00", "4.00", "2.00", "0.75", "0.50", "0.25"),
        ("steady, 3", "-", "-", "4.00", "-", "-", "-", "-"),
    ]


def test_an_ablation_shows_the_change_of_the_ratio() -> None:
    """Geometric means over seeds: 6 and 9 of 8 USD without the rule, 4 and 6 with it."""
    ((rule, world, usd, change, *_),) = lever_rows(
        rounds(scores(karpenter=8.0, ours=4.0, rule=6.0), scores(karpenter=8.0, ours=6.0, rule=9.0))
    )
    assert (rule, world, usd, change) == (RULE, "steady", "1.50", "+0.306")
    ((_, _, _, unknown, *_),) = lever_rows(rounds(scores(ours=4.0, rule=6.0)))
    assert unknown == "-"


@pytest.mark.parametrize("name", WITHOUT_LEVER)
def test_each_ablation_is_another_valid_policy(name: str) -> None:
    """It differs from the default and from all others."""
    assert policy_violations(WITHOUT_LEVER[name]) == ()
    assert [other for other, policy in WITHOUT_LEVER.items() if policy in (POLICY, WITHOUT_LEVER[name])] == [name]


def test_a_switched_off_rule_has_no_effect() -> None:
    """In a shortage of four minutes a job waits for spot; with that rule off it runs on-demand at once."""
    shortages = tuple(Shortage(zone=zone, from_seconds=0.0, to_seconds=240.0) for zone in ZONES)
    whole = replace(scenario(job("a", 30.0, 300.0, gpus=4), hours=0.15), shortages=shortages)
    ours, without = score_ours(whole, ROLES), score_without_lever(whole, ROLES, "without waiting for spot")
    assert without.system == "without waiting for spot"
    assert without.waiting[ALL].mean_seconds < ours.waiting[ALL].mean_seconds - 60.0
    assert without.cost_usd > ours.cost_usd
