"""What an instance costs from one instant to another, and who owes it. Called by the cost tracker; sums are exact.

A lifetime's cost is rounded once, and each span is the difference to what was charged before: whatever the spans,
they add up to the provider's own invoice, to the micro-dollar. Allocated money is a node's GPUs held over time
(CPUs where it has no GPU), idle money is the rest (CHECKLIST, Decisions, "cost formula").
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from gpu_autoscaler.events.cost import CostShare
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.money import cost_micro_usd, split_micro_usd
from gpu_autoscaler.model.observed import Instant

_MICROSECOND = timedelta(microseconds=1)


class Owner(msgspec.Struct, frozen=True, order=True):
    """Who pays for what a pod holds. Fields are in sorting order; empty: not known."""

    project_id: str
    namespace: str
    job_id: str


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a node that somebody held for a time."""

    owner: Owner
    units: int  # GPUs, or CPU thousandths on a node without GPUs
    from_at: Instant
    until_at: Instant | None  # None: still held


class CostSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A span's cost by owner. Idle and allocated add up to the total."""

    idle_micro_usd: int
    shares: tuple[CostShare, ...]  # in order of owner


def span_micro_usd(
    price_micro_usd_per_hour: int, *, launched_at: datetime, to_at: datetime, charged_micro_usd: int
) -> int:
    """Return what is still to be charged up to `to_at` for an instance that was charged so much already.

    Negative where too much was charged: billing ended before what was thought.
    """
    return cost_micro_usd(price_micro_usd_per_hour, to_at - launched_at) - charged_micro_usd


def split(
    total_micro_usd: int,
    holdings: Sequence[Allocation],
    *,
    units: int,
    from_at: datetime,
    to_at: datetime,
    used_units: float | None = None,
) -> CostSplit:
    """Split the cost of a span by what was held over time; what nobody held is idle.

    `units` is all that the node has; zero: not known, then what was held is all there is. A negative or zero total has
    no holders. `used_units` is how much of what was held was busy on average; None: unknown, which is not zero.
    """
    held: dict[Owner, int] = {}
    for holding in holdings:
        weight = holding.units * _overlap_microseconds(holding, from_at, to_at)
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


def busy_gpus(window: GpuNodeSummarised | None, *, from_at: datetime, to_at: datetime) -> float | None:
    """Return how many of a node's GPUs were busy on average; None where no telemetry speaks of the span and of all."""
    if window is None:
        return None
    ended_at = window.window_started_at + timedelta(seconds=window.window_seconds)
    if ended_at <= from_at or window.window_started_at >= to_at:
        return None
    means = [gpu.utilization_ratio_mean for gpu in window.gpus if gpu.utilization_ratio_mean is not None]
    return sum(means) if means and len(means) == len(window.gpus) else None


def thresholds_crossed(spent_micro_usd: int, limit_micro_usd: int, marks: Sequence[float]) -> tuple[float, ...]:
    """Return the marks (ratios of the limit) that spending has reached, in the order given."""
    return tuple(mark for mark in marks if limit_micro_usd > 0 and spent_micro_usd >= limit_micro_usd * mark)


def _overlap_microseconds(holding: Allocation, from_at: datetime, to_at: datetime) -> int:
    ends_at = to_at if holding.until_at is None else min(holding.until_at, to_at)
    return max(0, (ends_at - max(holding.from_at, from_at)) // _MICROSECOND)
