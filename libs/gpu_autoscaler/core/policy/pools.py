"""Filters of a pool, also as users of other tools write them: product names of GPUs, labels that name an offer."""

import msgspec

from gpu_autoscaler.core.policy.gpu_slices import slices_of
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.gpu import GIBIBYTE, gpu_model_name
from gpu_autoscaler.model.offers import CapacityType, Offer

# The default pause where an idle time is set. Source: docs/decisions.md#scale-down-cooldown
_COOLDOWN_SECONDS_WITH_IDLE_TIME = 600.0
_CAPACITY_TYPES = frozenset(map(str, CapacityType))


def idle_seconds_set(policy: ScalingPolicy, pool: str | None) -> float | None:
    """Return the idle time that is set for nodes of the pool; None: none is, the break-even rule decides."""
    own = next((known.idle_seconds for known in policy.pools if known.name == pool), None)
    return policy.idle_seconds if own is None else own


def removal_cooldown_seconds(policy: ScalingPolicy, pool: str | None) -> float:
    """Return the pause of the pool after a plan that removes nodes of it by choice."""
    if policy.removal.pool_cooldown_seconds is not None:
        return policy.removal.pool_cooldown_seconds
    return 0.0 if idle_seconds_set(policy, pool) is None else _COOLDOWN_SECONDS_WITH_IDLE_TIME


def with_filters_of_labels(policy: ScalingPolicy) -> ScalingPolicy:
    """Return the policy with the filters that labels of its pools stand for; the same object if there are none."""
    pools = tuple(map(pool_with_filters_of_labels, policy.pools))
    return policy if pools == policy.pools else msgspec.structs.replace(policy, pools=pools)


def pool_with_filters_of_labels(pool: NodePool) -> NodePool:
    """Return the pool with GPU models by name, and with its labels of an offer as filters. A label that contradicts
    the filter stays, and validation reports it."""
    models = tuple(dict.fromkeys(gpu_model_name(name) or name for name in pool.gpu_models))
    pool = msgspec.structs.replace(pool, gpu_models=models)
    capacity_type = pool.labels.get(labels.CAPACITY_TYPE, "")
    if capacity_type in _CAPACITY_TYPES and capacity_type in (pool.capacity_types or _CAPACITY_TYPES):
        pool = msgspec.structs.replace(
            pool, capacity_types=(CapacityType(capacity_type),), labels=_without(pool, labels.CAPACITY_TYPE)
        )
    model = gpu_model_name(pool.labels.get(labels.GPU_MODEL, ""))
    if model is not None and model in (pool.gpu_models or (model,)):
        pool = msgspec.structs.replace(pool, gpu_models=(model,), labels=_without(pool, labels.GPU_MODEL))
    return pool


def _without(pool: NodePool, key: str) -> dict[str, str]:
    return {name: value for name, value in pool.labels.items() if name != key}


def pool_allows(pool: NodePool, offer: Offer) -> bool:
    """True if the offer passes the filters of the pool."""
    return (
        (not pool.instance_types or offer.instance_type in pool.instance_types)
        and (not pool.gpu_models or offer.gpu_model in pool.gpu_models)
        and (not pool.gpu_memory_gib_min or _memory_gib(offer) >= pool.gpu_memory_gib_min)
        and (not pool.zones or offer.zone in pool.zones)
        and (not pool.capacity_types or offer.capacity_type in pool.capacity_types)
        and (pool.sharing is None or slices_of(pool.sharing, offer) is not None)
    )


def _memory_gib(offer: Offer) -> int:
    """Return the memory of one GPU as clouds name it, which report some mebibytes less; 0: unknown."""
    return round((offer.gpu_memory_bytes or 0) / GIBIBYTE)
