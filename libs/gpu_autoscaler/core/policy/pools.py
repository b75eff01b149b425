"""Filters of a pool."""

from gpu_autoscaler.core.policy.gpu_slices import slices_of
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.model.offers import Offer


def pool_allows(pool: NodePool, offer: Offer) -> bool:
    """True if the offer passes the filters of the pool."""
    return (
        (not pool.instance_types or offer.instance_type in pool.instance_types)
        and (not pool.gpu_models or offer.gpu_model in pool.gpu_models)
        and (not pool.zones or offer.zone in pool.zones)
        and (not pool.capacity_types or offer.capacity_type in pool.capacity_types)
        and (pool.sharing is None or slices_of(pool.sharing, offer) is not None)
    )
