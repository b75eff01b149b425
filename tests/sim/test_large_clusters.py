"""Large clusters have enough nodes, pods and faults for their hours to count."""

import pytest
from msgspec.structs import replace

from gpu_autoscaler.sim.actors import large_clusters
from gpu_autoscaler.sim.faults.injection import Faults, kinds_of_seed
from gpu_autoscaler.sim.simulation import Setting
from gpu_autoscaler.sim.sweep import is_counted
from gpu_autoscaler_services.simulate import run_one

SEEDS = range(1, 2_000, 10)


def test_limits_of_a_large_cluster_bind_at_ten_nodes() -> None:
    """No limit is below the needs of ten nodes, and some limit can still be reached."""
    policies = [large_clusters.policies_of(seed, lambda: None).file for seed in SEEDS]
    assert all(policy.nodes_count_max >= 14 and (policy.gpu_count_max or 40) >= 40 for policy in policies)
    assert all((policy.price_micro_usd_per_hour_max or 40_000_000) >= 40_000_000 for policy in policies)
    assert sum(policy.nodes_count_max == 14 for policy in policies) > 20
    assert sum(policy.limits.spend.day_micro_usd_max is not None for policy in policies) > 20


def test_every_large_cluster_has_faults() -> None:
    """Seeds with too few faults get a few kinds anyway."""
    assert not all(map(kinds_of_seed, SEEDS))
    assert all(len(large_clusters.kinds_of(seed)) >= 5 for seed in SEEDS)


def test_a_sweep_of_24_seeds_has_closed_metadata() -> None:
    """Few seeds have it, and it strikes in half of them: by chance, 24 seeds had none."""
    kind = "metadata_closed"
    struck = [seed for seed in range(1, 25) if Faults(seed, kinds=large_clusters.kinds_of(seed)).strikes(kind)]
    assert struck
    assert len(struck) < 6, "where it strikes no notice is taken back, and none comes by metadata"


@pytest.mark.sweep
def test_hours_of_a_large_cluster_count() -> None:
    """A shortened run of the sweep that `.ci/run` plays violates nothing and counts."""
    setting = Setting(seed=17, hours=1.0, is_large=True)
    result = run_one(setting)
    assert result.violations == ()
    assert is_counted(result)
    assert not is_counted(replace(result, faults={}))
