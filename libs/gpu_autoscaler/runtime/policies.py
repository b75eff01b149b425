"""Loads the scaling policy from its TOML file, and refuses one that contradicts itself."""

from pathlib import Path

from gpu_autoscaler.core.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.core.policy_check import mistakes
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.runtime.documents import load_toml, read_struct


def load_policy(path: Path | None, offers: tuple[Offer, ...] | None = None) -> ScalingPolicy:
    """Return the policy of the file, the defaults without one. Raises ConfigError listing every mistake.

    With `offers`, all that is for sale, a pool that none of them can reach is a mistake too.
    """
    if path is None:
        return DEFAULT_POLICY
    policy = read_struct(load_toml(path), ScalingPolicy, str(path))
    if found := mistakes(policy, offers):
        raise ConfigError(str(path), found)
    return policy
