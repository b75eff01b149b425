"""How long an empty node is kept: as long as it costs less than its boot would, if it were let go and needed again.

Nobody knows when work comes. Who keeps a node until it has cost what another one would, and then lets it go, never pays
more than twice what one pays who knew (Karlin, Manasse, Rudolph, Sleator, "Competitive Snoopy Caching", 1988: to rent
or to buy). What another one costs is the time in which it boots, at its price, and that somebody waits for it.
"""

from gpu_autoscaler.core.nodes.life import NodeView
from gpu_autoscaler.core.policy import ScalingPolicy
from gpu_autoscaler.model.offers import CapacityType, Offer


def idle_seconds_allowed(view: NodeView, policy: ScalingPolicy) -> float:
    """Return after how long without pods the node goes; the policy's most where nobody knows what it was sold as."""
    decision = None if view.order is None else view.order.decision
    return policy.idle_seconds_max if decision is None else idle_seconds_worth(decision.offer, policy)


def idle_seconds_worth(offer: Offer, policy: ScalingPolicy) -> float:
    """Return how long a node of the offer is worth its keep, at most `idle_seconds_max`; what is reserved is paid."""
    price = 0 if offer.capacity_type is CapacityType.RESERVED else offer.price_micro_usd_per_hour
    hourly = None if price is None else price + policy.node_overhead_micro_usd_per_hour
    if not hourly:
        return policy.idle_seconds_max
    again = offer.boot_seconds * (1.0 + policy.removal.waiting_micro_usd_per_hour / hourly)
    return min(policy.idle_seconds_max, again)
