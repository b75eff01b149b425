"""A cloud account with a GPU quota of zero: 390 offers, none of which can be bought, and much that waits for them."""

import msgspec
from tests.support.stories import MINUTE, T0, Story, node, notice, offer, on_sale, pod

from gpu_autoscaler.model.ids import PodUid, derive_id
from gpu_autoscaler.model.offers import CapacityType, Offer

TYPES_COUNT = 65
ZONES = ("eu-west-1a", "eu-west-1b", "eu-west-1c")
AT_RISK = "at-risk"  # the node under notice


def refused_offers() -> tuple[Offer, ...]:
    """Instance types of eight GPUs in three zones, on spot and on demand."""
    return tuple(
        msgspec.structs.replace(
            offer(f"p{number}d.24xlarge", zone=zone, capacity_type=capacity_type),
            unavailable_because=f"the quota of vCPUs for instances of type p{number}d in eu-west-1 is 0",
        )
        for number in range(TYPES_COUNT)
        for zone in ZONES
        for capacity_type in (CapacityType.SPOT, CapacityType.ON_DEMAND)
    )


def waiting_pods(count: int, *, prefix: str = "train") -> tuple[Story, ...]:
    """Pods of one GPU each, with uids as long as those of Kubernetes."""
    uids = [PodUid(derive_id("pod", prefix, number)) for number in range(count)]
    return tuple(pod(f"{prefix}-{number:05}", pod_uid=uid) for number, uid in enumerate(uids))


def world(pods_count: int) -> tuple[Story, ...]:
    """The account, the waiting pods, and a node that the cloud takes back in two minutes."""
    return (
        on_sale(*refused_offers()),
        node(AT_RISK),
        pod("serving", on=AT_RISK),
        notice(AT_RISK, reclaim_at=T0 + 2 * MINUTE),
        *waiting_pods(pods_count),
    )
