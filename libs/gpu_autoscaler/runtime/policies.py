"""Loads the scaling policy from its TOML file and finds what contradicts itself."""

from collections import Counter
from pathlib import Path

from gpu_autoscaler.core.policy import DEFAULT_POLICY, NodePool, ScalingPolicy
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.gpu import GPU_MODELS
from gpu_autoscaler.runtime.documents import load_toml, read_struct, unknown_name


def load_policy(path: Path | None) -> ScalingPolicy:
    """Return the policy of the file, the defaults without one. Raises ConfigError listing every mistake."""
    if path is None:
        return DEFAULT_POLICY
    policy = read_struct(load_toml(path), ScalingPolicy, str(path))
    if found := contradictions(policy):
        raise ConfigError(str(path), found)
    return policy


def contradictions(policy: ScalingPolicy) -> list[str]:
    """Return one sentence for each pair of values that cannot both be meant."""
    found = []
    if policy.nodes_count_min > policy.nodes_count_max:
        found.append(f"nodes_count_min: {policy.nodes_count_min} is above nodes_count_max {policy.nodes_count_max}")
    if policy.job_duration_hours_default > policy.job_duration_hours_max:
        found.append(
            f"job_duration_hours_default: {policy.job_duration_hours_default:g} is above "
            f"job_duration_hours_max {policy.job_duration_hours_max:g}"
        )
    if policy.gpu_count_max == 0 and policy.nodes_count_min > 0:
        found.append(f"gpu_count_max: 0 contradicts nodes_count_min {policy.nodes_count_min}")
    counts = Counter(pool.name for pool in policy.pools)
    found += [f"pools: the name {name!r} is used {count} times" for name, count in counts.items() if count > 1]
    found += [mistake for index, pool in enumerate(policy.pools) for mistake in _contradictions_of(pool, index, policy)]
    return found


def _contradictions_of(pool: NodePool, index: int, policy: ScalingPolicy) -> list[str]:
    at = f"pools[{index}]"
    found = [
        unknown_name(f"{at}.gpu_models", model, GPU_MODELS, "GPU model")
        for model in pool.gpu_models
        if model not in GPU_MODELS
    ]
    if pool.nodes_count_max is not None and pool.nodes_count_max > policy.nodes_count_max:
        found.append(
            f"{at}.nodes_count_max: {pool.nodes_count_max} is above the cluster's nodes_count_max "
            f"{policy.nodes_count_max}"
        )
    return found
