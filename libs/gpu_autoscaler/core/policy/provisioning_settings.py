"""Policy of purchases: batching, gangs, prices, spot capacity."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.ranges import Count, MicroUsd, Ratio, Seconds, about

# A window longer than a node's boot time gains nothing.
_Window = Annotated[float, Meta(ge=0, le=60)]
# Abandoned gangs are forgotten after hours, so no back-off is longer.
_Backoff = Annotated[float, Meta(ge=0, le=7200)]
# Ratios written with two digits add up to 1 only approximately.
_RATIO_ERROR_MAX = 0.001


class BatchingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the first pods of a burst wait for the rest. One purchase for all needs fewer and cheaper nodes."""

    wait_seconds_max: Annotated[
        _Window,
        about(
            "Maximum time that the first pod of a burst waits for the rest; 0: purchases are never batched.",
            "Karpenter, Settings, BATCH_MAX_DURATION",
        ),
    ] = 10.0
    quiet_seconds: Annotated[
        _Window,
        about(
            "A burst ends when no pod arrives for this time; 2 s longer than in Karpenter because pod "
            "timestamps are whole seconds and arrive late under load.",
            "Karpenter, Settings, BATCH_IDLE_DURATION",
        ),
    ] = 3.0
    members_count_min: Annotated[
        Count,
        about(
            "Number of pods within quiet_seconds that counts as a burst even if the scheduler already "
            "reported each of them as unschedulable.",
            "docs/performance.md",
        ),
    ] = 20


class GangPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadline and back-off of gangs. All nodes of a gang are one purchase."""

    complete_seconds_max: Annotated[
        Seconds,
        about(
            "Time from the first launch until all nodes of a gang must be ready; after it all are released.",
            "project default, twice boot_seconds_max",
        ),
    ] = 1800.0
    backoff_seconds_min: Annotated[_Backoff, about("Back-off after the first failed purchase.", "project default")] = (
        60.0
    )
    backoff_seconds_max: Annotated[
        _Backoff,
        about(
            "Upper bound of the back-off, which doubles with every further failure.",
            "project default, equal to complete_seconds_max",
        ),
    ] = 1800.0


class PricePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Age of prices. Stale prices are always shown by `gpu-autoscaler offers` and as a metric."""

    age_seconds_max: Annotated[float, about("A price that was not updated for longer is stale.", "#prices", gt=0)] = (
        21_600.0
    )
    is_stale_price_allowed: Annotated[
        bool, about("If false, offers with a stale price are not bought; work may then wait.", "#prices")
    ] = True


class MixPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Target shares of GPUs by capacity type; they add up to 1. Reservations that are already paid are used first."""

    spot_ratio: Annotated[
        Ratio, about("Minimum share of spot while it is available, cheaper and rarely interrupted.", "#capacity-mix")
    ] = 0.60
    on_demand_ratio: Annotated[
        Ratio, about("Maximum share of on-demand for work that may run on spot.", "#capacity-mix")
    ] = 0.35
    reserved_ratio: Annotated[
        Ratio, about("Share of reserved capacity; on-demand may replace what is missing.", "#capacity-mix")
    ] = 0.05

    def violations(self) -> Iterator[str]:
        total = self.spot_ratio + self.on_demand_ratio + self.reserved_ratio
        if abs(total - 1.0) > _RATIO_ERROR_MAX:
            yield (
                f"spot.mix: spot_ratio, on_demand_ratio and reserved_ratio add up to {total:g}; "
                "change them so that they add up to 1"
            )


class SpotPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When spot is bought, how it is spread, and its expected cost besides the price.

    A capacity pool is an instance type in a zone, as in the EC2 documentation: one shortage interrupts all of it.
    """

    mix: Annotated[MixPolicy, about("Target shares by capacity type.", "#capacity-mix")] = MixPolicy()
    interruption_ratio_max: Annotated[
        Ratio, about("In capacity pools with a higher interruption rate less spot is bought.", "#spot-interruptions")
    ] = 0.10
    on_demand_fallback_ratio_min: Annotated[
        Ratio,
        about(
            "If no other capacity pool is left, on-demand replaces spot in pools with a higher interruption rate.",
            "#spot-interruptions",
        ),
    ] = 0.30
    capacity_pool_gpu_ratio_max: Annotated[
        Ratio, about("Maximum share of all GPUs that are spot in one capacity pool.", "#capacity-mix")
    ] = 0.5
    capacity_pool_gpu_count_min: Annotated[
        Count,
        about(
            "Number of spot GPUs that one capacity pool may always have, whatever their share; fewer where "
            "interruptions are frequent.",
            "#capacity-mix",
        ),
    ] = 32
    capacity_pool_extra_cost_ratio_max: Annotated[
        Ratio,
        about("Maximum extra cost of another capacity pool; above it the share may be exceeded.", "#capacity-mix"),
    ] = 0.25
    capacity_pool_month_micro_usd_max: Annotated[
        MicroUsd | None,
        about(
            "What the share may cost: once the present nodes cost this much more than those that it excluded, it no "
            "longer limits purchases; unset: no limit.",
            "#capacity-mix",
        ),
    ] = None
    node_lifetime_hours: Annotated[
        float,
        about("Assumed lifetime of a node, over which boot time and lost work are spread.", "docs/scores.md", gt=0),
    ] = 1.0
    lost_work_seconds: Annotated[
        Seconds, about("Expected work lost in an interruption: half a checkpoint interval.", "#checkpoint-interval")
    ] = 450.0

    interruptions_count_max: Annotated[
        Count,
        about("Interruptions after which a job is placed on on-demand; its last retry always is.", "#spot-retries"),
    ] = 3
    on_demand_wait_seconds: Annotated[
        Seconds,
        about("Maximum time that such a job waits for on-demand; after it spot is used again.", "#spot-retries"),
    ] = 1800.0
    low_priority_wait_seconds: Annotated[
        Seconds, about("Maximum time that work of low priority waits for spot; 0: it does not wait.", "#capacity-mix")
    ] = 300.0
    medium_priority_wait_seconds: Annotated[
        Seconds,
        about(
            "The same of other work below high priority, at most queued_timeout_seconds for jobs and "
            "pending_pod_timeout_seconds for other pods; 0: it does not wait.",
            "#capacity-mix",
        ),
    ] = 300.0
    wait_saving_ratio_min: Annotated[
        Ratio, about("It waits only if spot is cheaper by at least this share.", "#capacity-mix")
    ] = 0.3

    return_to_spot_seconds_min: Annotated[
        Seconds, about("Minimum age of an on-demand node before spot replaces it.", "#consolidation")
    ] = 1800.0
    rebalance_avoid_seconds: Annotated[
        Seconds,
        about(
            "A node gets no new work for this long after the cloud recommended to rebalance it.", "#spot-interruptions"
        ),
    ] = 3600.0

    is_test_annotation_on: Annotated[
        bool,
        about(
            "If true, annotation gpu-autoscaler.io/spot-interruption-warning on a node counts as an "
            "interruption notice, for tests.",
            "#spot-interruptions",
        ),
    ] = False

    def violations(self) -> Iterator[str]:
        yield from self.mix.violations()
        if self.capacity_pool_gpu_ratio_max == 0 and self.mix.spot_ratio > 0:
            yield (
                "spot.capacity_pool_gpu_ratio_max: 0 contradicts spot.mix.spot_ratio "
                f"{self.mix.spot_ratio:g}; allow a share per capacity pool, or set spot_ratio to 0"
            )
