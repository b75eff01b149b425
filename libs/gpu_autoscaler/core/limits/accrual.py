"""Cost of an instance over time, and its split by owner (docs/decisions.md#cost-formula). Used by the cost tracker.

The cost of a lifetime is rounded once, and each span is the difference to earlier charges, so spans add up to the
invoice to the micro-dollar. Allocated cost is the share of the GPUs (CPUs without GPUs) held over time.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.events.cost import CostShare
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.money import cost_micro_usd, split_micro_usd
from gpu_autoscaler.model.observed import Instant

_MICROSECOND = timedelta(microseconds=1)


class Owner(msgspec.Struct, frozen=True, order=True):
    """Who pays for a pod. Fields are in sorting order; empty: unknown."""

    project_id: str
    namespace: str
    job_id: str


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a node held by an owner for some time."""

    owner: Owner
    units: int  # GPUs, or CPU thousandths on a node without GPUs
    from_at: Instant
    until_at: Instant | None  # None: still held


class CostSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a span by owner. Idle and allocated cost add up to the total."""

    idle_micro_usd: int
    shares: tuple[CostShare, ...]  # in order of owner


def span_micro_usd(
    price_micro_usd_per_hour: int, *, launched_at: datetime, to_at: datetime, charged_micro_usd: int
) -> int:
    """Return what remains to be charged up to `to_at`; negative if billing ended earlier than charged."""
    return cost_micro_usd(price_micro_usd_per_hour, to_at - launched_at) - charged_micro_usd


def split_cost(
    total_micro_usd: int,
    holdings: Sequence[Allocation],
    *,
    units: int,
    from_at: datetime,
    to_at: datetime,
    used_units: float | None = None,
) -> CostSplit:
    """Split the cost of a span by allocation over time; the rest is idle.

    `units` are those of the node; zero: unknown, and there is no idle share. A negative or zero total is not split.
    `used_units` are the busy ones on average; None: unknown, which is not zero.
    """
    held: dict[Owner, int] = {}
    for holding in holdings:
        ends_at = to_at if holding.until_at is None else min(holding.until_at, to_at)
        weight = holding.units * max(0, (ends_at - max(holding.from_at, from_at)) // _MICROSECOND)
        if weight > 0:
            held[holding.owner] = held.get(holding.owner, 0) + weight
    if total_micro_usd <= 0 or not held:
        return CostSplit(idle_micro_usd=total_micro_usd, shares=())
    owners = sorted(held)
    all_held = sum(held.values())
    idle_weight = max(0, units * ((to_at - from_at) // _MICROSECOND) - all_held)
    *allocated, idle = split_micro_usd(total_micro_usd, [*(held[owner] for owner in owners), idle_weight])
    mean_units_held = all_held / ((to_at - from_at) / _MICROSECOND)
    used_ratio = None if used_units is None else min(1.0, used_units / mean_units_held)
    shares = tuple(
        CostShare(
            allocated_micro_usd=amount,
            used_micro_usd=None if used_ratio is None else int(amount * used_ratio),
            job_id=JobId(owner.job_id) if owner.job_id else None,
            project_id=owner.project_id or None,
            namespace=owner.namespace or None,
        )
        for owner, amount in zip(owners, allocated, strict=True)
    )
    return CostSplit(idle_micro_usd=idle, shares=shares)


def busy_gpus(window: GpuNodeSummarized | None, *, from_at: datetime, to_at: datetime) -> float | None:
    """Return the average number of busy GPUs; None without telemetry of all GPUs in the span."""
    if window is None:
        return None
    ended_at = window.window_started_at + timedelta(seconds=window.window_seconds)
    if ended_at <= from_at or window.window_started_at >= to_at:
        return None
    means = [gpu.utilization_ratio_mean for gpu in window.gpus if gpu.utilization_ratio_mean is not None]
    return sum(means) if means and len(means) == len(window.gpus) else None


def thresholds_crossed(spent_micro_usd: int, limit_micro_usd: int, thresholds: Sequence[float]) -> tuple[float, ...]:
    """Return the thresholds (ratios of the limit) that the spend has reached, in the order given."""
    return tuple(
        threshold for threshold in thresholds if limit_micro_usd > 0 and spent_micro_usd >= limit_micro_usd * threshold
    )
