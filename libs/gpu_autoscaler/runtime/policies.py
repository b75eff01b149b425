"""Loads the scaling policy from its file and validates it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, ScalingPolicy
from gpu_autoscaler.core.policy.pools import with_filters_of_labels
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.runtime.documents import load_documents, read_struct


def load_policy(path: Path | None) -> ScalingPolicy:
    """Return the policy of the file (TOML or YAML), the default policy without one. Raises ConfigError listing every
    error.
    """
    if path is None:
        return DEFAULT_POLICY
    documents = load_documents(path)
    if len(documents) > 1:
        raise ConfigError(str(path), [f"{len(documents)} documents; keep the policy in one"])
    return policy_of(documents[0] if documents else {}, str(path))


def policy_of(document: Mapping[str, Any], source: str, offers: tuple[Offer, ...] | None = None) -> ScalingPolicy:
    """Return the policy that the document describes. Raises ConfigError listing every error."""
    policy = with_filters_of_labels(read_struct(document, ScalingPolicy, source))
    if found := policy_violations(policy, offers):
        raise ConfigError(source, found)
    return policy
