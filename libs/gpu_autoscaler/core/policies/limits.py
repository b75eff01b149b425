"""Limits of a part of the cluster: a zone, a project. Those of the whole and of pools stand in `core/policy.py`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.money import SpendPolicy
from gpu_autoscaler.core.policies.ranges import Count, Seconds

_Name = Annotated[str, Meta(min_length=1, max_length=253)]


class PartLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one zone or one project may have of what this system buys, orders in flight counted."""

    name: Annotated[_Name, Meta(description="Name of the zone or of the project. Source: S62, S116.")]
    nodes_count_max: Annotated[Count | None, Meta(description="Nodes at most; none: no limit. Source: S71.")] = None
    gpu_count_max: Annotated[Count | None, Meta(description="GPUs at most; none: no limit. Source: S63.")] = None
    spend: Annotated[SpendPolicy, Meta(description="Money by day and month at most. Source: S5, S116.")] = SpendPolicy()


class LimitsPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits besides those of the cluster and of its pools."""

    spend: Annotated[
        SpendPolicy, Meta(description="Money of the whole cluster by day and month at most. Source: S5, S116.")
    ] = SpendPolicy()
    scale_up_cooldown_seconds: Annotated[
        Seconds,
        Meta(
            description="After a purchase for waiting work the next waits, unless it is urgent; 0: none (S50: 180)."
            " Source: S50; Decisions, waiting before scale-up."
        ),
    ] = 0.0
    zones: Annotated[
        tuple[PartLimit, ...], Meta(description="Limits of single zones, by name. Source: Decisions, limits.")
    ] = ()
    projects: Annotated[
        tuple[PartLimit, ...],
        Meta(
            description="Limits of what is bought for single projects; a node counts for the project that it was bought"
            " for. Source: S96, S116."
        ),
    ] = ()
