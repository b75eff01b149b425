"""Nodes that went again with less than was promised: what their offer is taken to be for a while.

A node that is there speaks for its offer itself (`core/buying/market.py`). One that never offered what was promised is
given back, and would be bought again at once for the same pod, had nobody remembered it. Part of `fold`: what a node
had is said by its own stream alone, whatever was promised is for the reader to compare.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.resources import Resources

# A device plugin needs minutes at most: what a node did not show by then it does not have. Source: our own.
SETTLED_SECONDS = 240.0
# Long enough not to buy it again and again, short enough for a machine that was bad by chance. Source: our own.
REMEMBERED_SECONDS = 3600.0


class ObservedAllocatable(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The most that a node of an offer ever had, and when it went."""

    allocatable: Resources
    gone_at: Instant


def observed_allocatable_of(node: NodeObserved | None, gone_at: datetime) -> tuple[str, ObservedAllocatable] | None:
    """Return the offer, as `pool/type/zone/capacity type`, and what the node had; None: nobody can tell what it had."""
    if node is None or not node.is_ready or node.ready_since is None or node.action_id is None:
        return None
    pool = dict(node.labels).get(labels.POOL)
    if pool is None or gone_at - node.ready_since < timedelta(seconds=SETTLED_SECONDS):
        return None
    key = f"{pool}/{node.instance_type}/{node.zone}/{node.capacity_type}"
    return key, ObservedAllocatable(allocatable=node.allocatable, gone_at=gone_at)


def shortfall(promised: Resources, came: Mapping[str, ObservedAllocatable], key: str, as_of: datetime) -> Resources | None:
    """Return what the next node of the offer is taken to have; None: what was promised."""
    said = came.get(key)
    if said is None or as_of - said.gone_at > timedelta(seconds=REMEMBERED_SECONDS):
        return None
    had = said.allocatable
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
