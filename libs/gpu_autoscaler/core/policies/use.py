"""The policy's part about how busy GPUs are: what counts as high and low, and which telemetry can be trusted."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ranges import Ratio, Seconds

UtilizationTrigger = Literal["gated", "direct"]


class UtilizationPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When figures of use have a say. What they may do is told by `utilization_trigger`."""

    high_ratio: Annotated[Ratio, Meta(description="Mean of all GPUs above which use is high. Source: S46.")] = 0.8
    low_ratio: Annotated[Ratio, Meta(description="Mean of a node's GPUs up to which use is low. Source: S55.")] = 0.2
    low_seconds: Annotated[Seconds, Meta(description="Use is low for so long before it counts. Source: S55.")] = 600.0
    cooldown_seconds: Annotated[
        Seconds, Meta(description="Between two nodes bought for use alone. Source: S50, scale-up cooldown.")
    ] = 180.0
    telemetry_age_seconds_max: Annotated[
        Seconds, Meta(description="Older telemetry says nothing. Source: KAI scheduler, maxStaleness.")
    ] = 300.0
    unchanged_seconds_max: Annotated[
        Seconds,
        Meta(description="Figures that never change for so long are one page again and again. Source: our own."),
    ] = 300.0
    telemetry_coverage_ratio_min: Annotated[
        Ratio, Meta(description="Share of GPU nodes whose telemetry can be trusted, at least. Source: our own.")
    ] = 0.9


class IdleJobsPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs that hold GPUs and leave them idle are ended, where that is wanted."""

    is_on: Annotated[bool, Meta(description="End idle jobs. Off: it ends people's work. Source: S60, our default.")] = (
        False
    )
    idle_seconds: Annotated[Seconds, Meta(description="Idle for so long, a job is ended. Source: S60.")] = 1800.0
    busy_ratio_max: Annotated[Ratio, Meta(description="Use of each GPU up to which it is idle. Source: S60.")] = 0.05
