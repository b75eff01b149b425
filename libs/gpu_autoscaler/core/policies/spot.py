"""What the policy says about capacity that the cloud may take back: how much of it, for what, and how it is spread."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ranges import Count, Ratio, Seconds

# Shares that are told with two digits add up to one only roughly.
_SHARES_ERROR_MAX = 0.001


class MixPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of our GPUs by capacity type, which add up to one. Reserved capacity that is paid comes first anyway."""

    spot_ratio: Annotated[
        Ratio,
        Meta(
            description="Spot at least, while it is to be had, cheaper, and seldom taken. Source: S67, Decisions, mix."
        ),
    ] = 0.60
    on_demand_ratio: Annotated[
        Ratio, Meta(description="On-demand at most where spot would do. Source: S67, Decisions, mix.")
    ] = 0.35
    reserved_ratio: Annotated[
        Ratio,
        Meta(description="Reserved; what is missing of it may be on-demand as well. Source: S67, Decisions, mix."),
    ] = 0.05

    def mistakes(self) -> Iterator[str]:
        """Yield what cannot be meant."""
        together = self.spot_ratio + self.on_demand_ratio + self.reserved_ratio
        if abs(together - 1.0) > _SHARES_ERROR_MAX:
            yield (
                f"spot.mix: spot_ratio, on_demand_ratio and reserved_ratio add up to {together:g}; "
                "raise or lower one of them until they make 1"
            )


class SpotPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When spot is bought, how much of it in one place, and what it is expected to cost besides its price.

    A place is an instance type in a zone: what one storm takes.
    """

    mix: Annotated[MixPolicy, Meta(description="Shares by capacity type. Source: S67.")] = MixPolicy()
    interruption_ratio_max: Annotated[
        Ratio,
        Meta(description="Where more of the nodes are taken than this, less spot is bought. Source: S78."),
    ] = 0.10
    on_demand_fallback_ratio_min: Annotated[
        Ratio,
        Meta(
            description="Where more are taken than this, on-demand stands in, at its price. Source: S69, our default."
        ),
    ] = 0.30
    capacity_pool_gpu_ratio_max: Annotated[
        Ratio,
        Meta(description="Share of our GPUs that are spot in one place, at most. Source: S62, S69, our default."),
    ] = 0.5
    capacity_pool_gpu_count_min: Annotated[
        Count, Meta(description="So many GPUs in one calm place are never too many. Source: our own.")
    ] = 32
    capacity_pool_extra_cost_ratio_max: Annotated[
        Ratio,
        Meta(description="Work goes to another place where it costs at most this share more. Source: our own."),
    ] = 0.25
    node_lifetime_hours: Annotated[
        float,
        Meta(gt=0, description="How long a node lives, over which boot and lost work are spread. Source: our own."),
    ] = 1.0
    lost_work_seconds: Annotated[
        Seconds,
        Meta(description="Work done again after an interruption: half a checkpoint interval. Source: S80."),
    ] = 450.0

    interruptions_count_max: Annotated[
        Count,
        Meta(
            description="A job that lost its place so often is bought on-demand; before its last retry it always is."
            " Source: S80, Decisions."
        ),
    ] = 3
    on_demand_wait_seconds: Annotated[
        Seconds,
        Meta(description="Such a job waits so long for on-demand; then spot is better than no place. Source: our own."),
    ] = 1800.0
    low_priority_wait_seconds: Annotated[
        Seconds,
        Meta(description="Work of low priority waits so long for spot, at most; 0: not at all. Source: our own."),
    ] = 300.0
    wait_saving_ratio_min: Annotated[
        Ratio,
        Meta(description="It waits where spot costs at least this share less. Source: our own."),
    ] = 0.3

    return_to_spot_seconds_min: Annotated[
        Seconds,
        Meta(description="An on-demand node that spot could replace stays at least so long. Source: our own."),
    ] = 1800.0
    rebalance_avoid_seconds: Annotated[
        Seconds,
        Meta(description="So long after a hint that it may be taken a node gets no new work. Source: our own."),
    ] = 3600.0

    is_test_annotation_on: Annotated[
        bool,
        Meta(description="A node's annotation is taken for a notice of the cloud, to try what it does. Source: S79."),
    ] = False

    def mistakes(self) -> Iterator[str]:
        """Yield what cannot be meant."""
        yield from self.mix.mistakes()
        if self.capacity_pool_gpu_ratio_max == 0 and self.mix.spot_ratio > 0:
            yield (
                "spot.capacity_pool_gpu_ratio_max: 0 contradicts spot.mix.spot_ratio "
                f"{self.mix.spot_ratio:g}; allow a share in one place, or no spot"
            )
