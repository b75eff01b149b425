"""Spend budgets, and limits of zones and projects. Limits of the cluster and of pools are in `policy.py`."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.ranges import Count, MicroUsd, Seconds, about

_Name = Annotated[str, Meta(min_length=1, max_length=253)]


class SpendPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spend budgets per UTC day and month. A purchase reserves the cost of the longest run time of its work."""

    day_micro_usd_max: Annotated[
        MicroUsd | None, about("Maximum spend per UTC day; unset: no limit.", "#spend-budgets")
    ] = None
    month_micro_usd_max: Annotated[
        MicroUsd | None, about("Maximum spend per UTC month; unset: no limit.", "#spend-budgets")
    ] = None
    is_hard: Annotated[
        bool,
        about(
            "If true, running nodes are drained before the budget is exceeded; if false, only purchases stop.",
            "#spend-budgets",
        ),
    ] = True


def spend_violations(spend: SpendPolicy, at: str) -> Iterator[str]:
    """Yield contradictions between the two budgets."""
    day, month = spend.day_micro_usd_max, spend.month_micro_usd_max
    if day is not None and month is not None and day > month:
        yield f"{at}.day_micro_usd_max: {day} is above month_micro_usd_max {month}; lower it or raise the other"


class PartLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the nodes bought in one zone or for one project, launches in flight included."""

    name: Annotated[_Name, about("Name of the zone or project.", "#limits")]
    nodes_count_max: Annotated[Count | None, about("Maximum number of nodes; unset: no limit.", "#limits")] = None
    gpu_count_max: Annotated[Count | None, about("Maximum number of GPUs; unset: no limit.", "#limits")] = None
    spend: Annotated[SpendPolicy, about("Spend budgets per day and month.", "#spend-budgets")] = SpendPolicy()


class LimitsPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits besides those of the cluster and of its pools."""

    spend: Annotated[SpendPolicy, about("Spend budgets of the cluster per day and month.", "#spend-budgets")] = (
        SpendPolicy()
    )
    scale_up_cooldown_seconds: Annotated[
        Seconds,
        about("Time between two purchases for waiting work, except urgent ones; 0: none.", "#waiting-before-scale-up"),
    ] = 0.0
    zones: Annotated[tuple[PartLimit, ...], about("Limits of single zones, by name.", "#limits")] = ()
    projects: Annotated[
        tuple[PartLimit, ...],
        about("Limits of single projects; a node counts for the project that it was bought for.", "#limits"),
    ] = ()
