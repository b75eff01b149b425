"""Helm values of the autoscaling guide, rendered unchanged: the policy and the settings are what they say."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.charting import Json, rendered, template
from tests.chart.test_rendering import policy_of, processes
from tests.support.sources import helm_values

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.model.offers import CapacityType


def block_with(*keys: str) -> Json:
    """Return the only block with all these keys, as dotted paths below `autoscaling`."""
    (block,) = [block for block in helm_values() if set(keys) <= paths(block["autoscaling"])]
    return block


def paths(values: Any, prefix: str = "") -> set[str]:  # noqa: ANN401 - values of a chart
    """Return the dotted paths of all keys; those of a list's entries follow the list's."""
    if isinstance(values, list):
        return {path for value in values for path in paths(value, prefix)}
    if not isinstance(values, dict):
        return set()
    return {f"{prefix}{key}" for key in values} | {
        path for key, value in values.items() for path in paths(value, f"{prefix}{key}.")
    }


def values_file(folder: Path, block: Json) -> Path:
    """Write the values; return the path of the file."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(block), encoding="utf-8")
    return path


def guide_policy(folder: Path, block: Json) -> ScalingPolicy:
    """Return the policy that the values become."""
    return policy_of(rendered(files=[values_file(folder, block)]), folder)


def mix_of(policy: ScalingPolicy) -> tuple[float, float, float]:
    """Return the shares of spot, on-demand and reserved."""
    mix = policy.spot.mix
    return mix.spot_ratio, mix.on_demand_ratio, mix.reserved_ratio


def test_the_guide_is_covered() -> None:
    """A block that the guide gains has no test yet."""
    assert len(helm_values()) == 11


def test_thresholds_and_tiers_of_the_quick_start(tmp_path: Path) -> None:
    """Shares as fractions; the pause after a removal is set."""
    block = block_with("multiTier.spotPercentage")
    group = ("aws.region=us-west-2", "aws.autoScalingGroups.spot-pool=gpu-spot-asg")
    sets = ("store.sqlite.enabled=true", *(f"autoscaling.{value}" for value in group))
    policy = policy_of(rendered(None, *sets, files=[values_file(tmp_path, block)]), tmp_path)
    assert mix_of(policy) == pytest.approx((0.6, 0.35, 0.05))
    assert (policy.utilization.high_ratio, policy.utilization.low_ratio) == (0.8, 0.2)
    assert (policy.limits.scale_up_cooldown_seconds, policy.pending_pod_timeout_seconds) == (180, 120)
    assert policy.scale_down_cooldown_seconds == policy.removal.pool_cooldown_seconds == 600
    assert (policy.nodes_count_min, policy.nodes_count_max) == (0, 100)


def test_pools_of_the_quick_start(tmp_path: Path) -> None:
    """V100 by its product name, of one capacity type each."""
    spot, on_demand = guide_policy(tmp_path, block_with("nodePools.capacityType")).pools
    assert (spot.name, spot.priority, spot.nodes_count_max) == ("spot-pool", 10, 50)
    assert (on_demand.name, on_demand.priority, on_demand.nodes_count_max) == ("on-demand-pool", 5, 30)
    assert spot.gpu_models == on_demand.gpu_models == ("V100",)
    assert (spot.instance_types, on_demand.instance_types) == (("p3.2xlarge", "p3.8xlarge"), ("p3.2xlarge",))
    assert (spot.capacity_types, on_demand.capacity_types) == ((CapacityType.SPOT,), (CapacityType.ON_DEMAND,))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("aws.autoScalingGroups", {"groups": {"spot-pool=gpu-spot-asg", "on-demand-pool=gpu-on-demand-asg"},
                                   "region": "us-west-2"}),
        ("azure.vmScaleSets", {"scale_sets": {"spot-pool=gpu-spot-vmss", "on-demand-pool=gpu-on-demand-vmss"},
                               "subscription": "xxx", "resource_group": "gpu-cluster", "region": "eastus"}),
        ("gcp.instanceGroups", {"groups": {"spot-pool=gpu-spot-mig", "on-demand-pool=gpu-on-demand-mig"},
                                "project": "my-project", "region": "us-central1"}),
    ],
)  # fmt: skip
def test_groups_of_a_cloud_reach_the_driver(tmp_path: Path, key: str, expected: Json) -> None:
    """By pool, with the region."""
    found = rendered("cluster", files=[values_file(tmp_path, block_with(key))])
    controllers = [settings for name, _, settings in processes(found) if name == "gpu-autoscaler-controller"]
    (settings,) = controllers
    options = getattr(settings, settings.provider.name)
    seen = {name: getattr(options, name) for name in expected}
    assert {name: set(value) if isinstance(value, tuple) else value for name, value in seen.items()} == expected


def test_a_group_of_google_needs_a_zone_or_a_region(tmp_path: Path) -> None:
    """Without the region, which the guide names; the refusal says what to write."""
    values = block_with("gcp.instanceGroups")
    del values["autoscaling"]["gcp"]["region"]
    result = template("cluster", files=[values_file(tmp_path, values)])
    assert "gpu-on-demand-mig names no zone; set autoscaling.gcp.region" in result.stderr
    assert "write zone/name, e.g. us-central1-a/gpu-on-demand-mig" in result.stderr


def test_values_of_the_forecast(tmp_path: Path) -> None:
    """The pre-warm threshold is a forecast utilization; the quantile of rises stays."""
    forecast = guide_policy(tmp_path, block_with("predictive.preWarmThreshold")).forecast
    assert (forecast.is_on, forecast.lookback_hours, forecast.confidence_ratio_min) == (True, 168, 0.7)
    assert forecast.prewarm_utilization_ratio_max == 0.7
    assert forecast.long_rise_quantile_ratio == DEFAULT_POLICY.forecast.long_rise_quantile_ratio


def test_hints_of_the_guide(tmp_path: Path) -> None:
    """A lower share of spot alone is one; what remains is bought on demand."""
    policies = [guide_policy(tmp_path, block) for block in helm_values()[6:]]
    diverse, less_spot, confident, longer, conservative = policies
    assert diverse.spot.capacity_pool_gpu_ratio_max == 0.5
    assert diverse.pools[0].instance_types == ("p3.2xlarge", "p3.8xlarge", "g4dn.xlarge", "g5.xlarge")
    assert mix_of(less_spot) == mix_of(conservative) == pytest.approx((0.4, 0.55, 0.05))
    assert confident.forecast.confidence_ratio_min == 0.8
    assert longer.forecast.lookback_hours == 14 * 24
    assert (conservative.utilization.high_ratio, conservative.forecast.is_on) == (0.7, False)
