"""Offers whose last node had less than promised: what the next node is assumed to have, for a while.

Such a node is released; without this record it would be bought again at once for the same pod.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.core.next_change import has_lasted_longer
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources

# A device plugin needs minutes: what a node does not show by then it does not have. Source: project default.
SETTLED_SECONDS = 240.0
# Long enough against repeated purchases, short enough for a single bad machine. Source: project default.
RETENTION_SECONDS = 3600.0


class ObservedAllocatable(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the last removed node of an offer had, and when it was removed."""

    allocatable: Resources
    gone_at: Instant


def observed_allocatable_of(node: NodeObserved | None, gone_at: datetime) -> tuple[str, ObservedAllocatable] | None:
    """Return the offer, as `pool/type/zone/capacity type`, and what the node had; None: unknown."""
    if node is None or not node.is_ready or node.ready_since is None or node.action_id is None:
        return None
    pool = dict(node.labels).get(labels.POOL)
    if pool is None or gone_at - node.ready_since < timedelta(seconds=SETTLED_SECONDS):
        return None
    key = f"{pool}/{node.instance_type}/{node.zone}/{node.capacity_type}"
    return key, ObservedAllocatable(allocatable=node.allocatable, gone_at=gone_at)


def shortfall(
    promised: Resources, observed: Mapping[str, ObservedAllocatable], key: str, as_of: datetime
) -> Resources | None:
    """Return what the next node of the offer is assumed to have; None: what is promised."""
    last = observed.get(key)
    if last is None or has_lasted_longer(last.gone_at, RETENTION_SECONDS, as_of):
        return None
    had = last.allocatable
    slices = dict(had.slices)
    least = Resources(
        cpu_milli=min(promised.cpu_milli, had.cpu_milli),
        memory_bytes=min(promised.memory_bytes, had.memory_bytes),
        gpu_count=min(promised.gpu_count, had.gpu_count),
        ephemeral_storage_bytes=min(promised.ephemeral_storage_bytes, had.ephemeral_storage_bytes),
        pod_count=min(promised.pod_count, had.pod_count),
        slices=tuple((name, min(count, slices[name])) for name, count in promised.slices if name in slices),
    )
    return None if least == promised else least
