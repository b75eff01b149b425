"""Which offers a pool lets in. Asked by the market, by admission and by the check of policies."""

from gpu_autoscaler.core.policy import NodePool
from gpu_autoscaler.core.slicing import slices_of
from gpu_autoscaler.model.offers import Offer


def pool_allows(pool: NodePool, offer: Offer) -> bool:
    """True when the pool's filters let this offer in."""
    return (
        (not pool.instance_types or offer.instance_type in pool.instance_types)
        and (not pool.gpu_models or offer.gpu_model in pool.gpu_models)
        and (not pool.zones or offer.zone in pool.zones)
        and (not pool.capacity_types or offer.capacity_type in pool.capacity_types)
        and (pool.sharing is None or slices_of(pool.sharing, offer) is not None)
    )
