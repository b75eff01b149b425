"""Loads the scaling policy from its TOML file and validates it."""

from pathlib import Path

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.core.policy.pools import with_filters_of_labels
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.runtime.documents import load_toml, read_struct


def load_policy(path: Path | None, offers: tuple[Offer, ...] | None = None) -> ScalingPolicy:
    """Return the policy of the file, the default policy without one. Raises ConfigError listing every error.

    With `offers` (all available offers) a pool that matches none of them is an error too.
    """
    if path is None:
        return DEFAULT_POLICY
    policy = with_filters_of_labels(read_struct(load_toml(path), ScalingPolicy, str(path)))
    if found := policy_violations(policy, offers):
        raise ConfigError(str(path), found)
    return policy
