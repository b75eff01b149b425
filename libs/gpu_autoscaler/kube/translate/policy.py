"""Translates `AutoscalingPolicy` objects to documents: percentages to ratios, GPU product names to models."""

from datetime import UTC, datetime

import msgspec

from gpu_autoscaler.kube.wire.policy import Policy, PolicySpec, PolicyStatus, PoolSpec
from gpu_autoscaler.model.errors import PermanentError
from gpu_autoscaler.model.gpu import gpu_model_name
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument

_BEFORE_ALL = datetime.min.replace(tzinfo=UTC)
_specs = msgspec.json.Decoder(PolicySpec)
_statuses = msgspec.json.Decoder(PolicyStatus)


def spec_of(policy: Policy) -> PolicySpec:
    """Return the spec of the policy. Raises PermanentError for one that only another version of the CRD admits."""
    try:
        return _specs.decode(policy.spec)
    except msgspec.DecodeError as exc:
        raise PermanentError(f"spec: {exc}; install the CustomResourceDefinition of this version") from exc


def status_of(policy: Policy) -> PolicyStatus:
    """Return the status of the policy, an empty one when it is invalid."""
    try:
        return _statuses.decode(policy.status)
    except msgspec.DecodeError:
        return PolicyStatus()


def document(policy: Policy, spec: PolicySpec, generation: int) -> PolicyDocument:
    """Return the spec of this generation as a document."""
    return PolicyDocument(
        name=policy.metadata.name,
        uid=policy.metadata.uid,
        generation=generation,
        created_at=policy.metadata.creation_timestamp or _BEFORE_ALL,
        is_enabled=spec.enabled,
        provider=spec.provider,
        high_ratio=spec.scale_up_threshold,
        low_ratio=spec.scale_down_threshold,
        scale_up_cooldown_seconds=spec.scale_up_cooldown_seconds,
        scale_down_cooldown_seconds=spec.scale_down_cooldown_seconds,
        pending_pod_timeout_seconds=spec.pending_pod_timeout_seconds,
        nodes_count_min=spec.min_nodes,
        nodes_count_max=spec.max_nodes,
        spot_ratio=ratio_of(spec.spot_instance_percentage),
        is_spot_allowed=spec.enable_spot_instances,
        is_multi_tier=spec.enable_multi_tier_scaling,
        is_forecast_on=spec.enable_predictive_scaling,
        idle_seconds=spec.idle_seconds,
        pools=tuple(_pool(pool) for pool in spec.node_pools),
    )


def _pool(pool: PoolSpec) -> DocumentPool:
    # An unknown model is kept: validation refuses the policy with its name.
    models = () if pool.gpu_type is None else (gpu_model_name(pool.gpu_type) or pool.gpu_type,)
    return DocumentPool(
        name=pool.name,
        nodes_count_min=pool.min_size,
        nodes_count_max=pool.max_size,
        gpu_models=models,
        instance_types=pool.instance_types,
        capacity_type=None if pool.capacity_type == "mixed" else CapacityType(pool.capacity_type),
        spot_ratio=ratio_of(pool.spot_percentage),
        priority=pool.priority,
        labels=pool.labels,
        zones=pool.availability_zones,
        gpu_memory_gib_min=pool.gpu_memory_gib,
        idle_seconds=pool.idle_seconds,
    )


def ratio_of(share: float | None) -> float | None:
    """Return the ratio of a share: up to 1 it is one (1 is everything), above 1 a percentage. None: unset."""
    return share if share is None or share <= 1 else share / 100
