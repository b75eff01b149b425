"""The policy: every threshold of every decision, with unit, range, default and source. The runtime loads it from TOML.

Ratios run from 0 to 1; durations are seconds of cluster time.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.disruption_settings import (
    IdleJobsPolicy,
    RemovalPolicy,
    UtilizationPolicy,
    UtilizationTrigger,
)
from gpu_autoscaler.core.policy.gpu_slices import GpuSharing
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, SpendPolicy
from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy, Headroom, ScheduledLimit
from gpu_autoscaler.core.policy.provisioning_settings import BatchingPolicy, GangPolicy, PricePolicy, SpotPolicy
from gpu_autoscaler.core.policy.ranges import Count, MicroUsdPerHour, Ratio, Seconds
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint

PlacementName = Literal[
    "fragmentation-gradient", "best-fit", "packing", "spreading", "least-loaded", "round-robin", "random"
]


class NodePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of nodes with equal labels, taints and limits. An empty filter allows every available offer."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=63,
            description="Name of the pool, unique in the policy; label gpu-autoscaler.io/pool of its nodes."
            " Source: docs/decisions.md#policy-object.",
        ),
    ]
    priority: Annotated[
        int,
        Meta(
            ge=-1000,
            le=1000,
            description="Purchases try pools of higher priority first. Source: Karpenter, NodePools, spec.weight.",
        ),
    ] = 0
    instance_types: Annotated[
        tuple[str, ...],
        Meta(description="Allowed instance types; empty: all. Source: docs/decisions.md#policy-object."),
    ] = ()
    gpu_models: Annotated[
        tuple[str, ...], Meta(description="Allowed GPU models; empty: all. Source: docs/decisions.md#policy-object.")
    ] = ()
    zones: Annotated[
        tuple[str, ...], Meta(description="Allowed zones; empty: all. Source: docs/decisions.md#policy-object.")
    ] = ()
    capacity_types: Annotated[
        tuple[CapacityType, ...],
        Meta(description="Allowed capacity types; empty: all. Source: docs/decisions.md#policy-object."),
    ] = ()
    is_paused: Annotated[
        bool,
        Meta(
            description="If true, the pool neither scales up nor loses nodes by choice."
            " Source: docs/decisions.md#policy-object."
        ),
    ] = False
    nodes_count_min: Annotated[
        Count,
        Meta(description="Minimum number of nodes with GPUs, within all limits. Source: docs/decisions.md#limits."),
    ] = 0
    nodes_count_max: Annotated[
        Count | None,
        Meta(
            description="Maximum number of nodes, launches in flight included; unset: only the limit of the cluster"
            " applies. Source: docs/decisions.md#limits."
        ),
    ] = None
    gpu_count_max: Annotated[
        Count | None,
        Meta(
            description="Maximum number of GPUs, launches in flight included; unset: only the limit of the cluster"
            " applies. Source: docs/decisions.md#limits."
        ),
    ] = None
    sharing: Annotated[
        GpuSharing | None,
        Meta(
            description="How pods share the GPUs of the pool (MIG, time-slicing or MPS); unset: whole GPUs."
            " Source: docs/decisions.md#gpu-fractions."
        ),
    ] = None
    spend: Annotated[
        SpendPolicy,
        Meta(description="Spend budgets of the pool per day and month. Source: docs/decisions.md#spend-budgets."),
    ] = SpendPolicy()
    labels: Annotated[
        dict[str, str], Meta(description="Labels of every node of the pool. Source: docs/decisions.md#policy-object.")
    ] = {}
    taints: Annotated[
        tuple[Taint, ...],
        Meta(description="Taints of every node of the pool. Source: Kubernetes, Taints and Tolerations."),
    ] = ()
    startup_taints: Annotated[
        tuple[Taint, ...],
        Meta(
            description="Taints that a node registers with and that are removed before it accepts pods."
            " Source: Karpenter, NodePools, startupTaints."
        ),
    ] = ()


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every input of a decision except facts."""

    is_frozen: Annotated[
        bool,
        Meta(
            description="If true, every purchase and voluntary removal is deferred."
            " Source: docs/decisions.md#limits-never-exceeded."
        ),
    ] = False

    pending_pod_timeout_seconds: Annotated[
        Seconds,
        Meta(
            description="Maximum time that a pending pod waits for capacity that running work is certain to release;"
            " after it a node is bought. Source: docs/decisions.md#waiting-before-scale-up."
        ),
    ] = 120.0
    queued_timeout_seconds: Annotated[
        Seconds,
        Meta(
            description="Maximum time that a queued job waits for such capacity; jobs of high priority do not wait."
            " Source: docs/decisions.md#waiting-before-scale-up."
        ),
    ] = 300.0
    boot_seconds_max: Annotated[
        Seconds,
        Meta(
            description="Time from the decision until a node must accept pods; a later one is terminated."
            " Source: cluster-autoscaler, FAQ, max-node-provision-time."
        ),
    ] = 900.0
    idle_seconds_max: Annotated[
        Seconds,
        Meta(
            description="Upper bound of the time that an empty node is kept; the break-even rule usually ends it"
            " earlier, see removal.waiting_micro_usd_per_hour. Source: docs/decisions.md#idle-node."
        ),
    ] = 600.0
    scale_down_cooldown_seconds: Annotated[
        Seconds,
        Meta(
            description="Minimum time that a node is kept after it became ready."
            " Source: docs/decisions.md#scale-down-rules."
        ),
    ] = 600.0
    drain_seconds_max: Annotated[
        Seconds,
        Meta(
            description="A voluntary drain that takes longer is canceled."
            " Source: cluster-autoscaler, FAQ, max-graceful-termination-sec."
        ),
    ] = 600.0
    notice_seconds_default: Annotated[
        Seconds,
        Meta(
            description="Assumed time to termination of an interruption notice without a deadline."
            " Source: Google Cloud, Spot VMs, preemption process."
        ),
    ] = 30.0
    reservation_drain_seconds: Annotated[
        Seconds,
        Meta(
            description="Nodes of a reservation start to drain this long before the reservation ends."
            " Source: project default, equal to drain_seconds_max."
        ),
    ] = 600.0
    watch_age_seconds_max: Annotated[
        Seconds,
        Meta(
            description="Maximum age of a list or watch before purchases and scale-down are suspended."
            " Source: docs/decisions.md#missing-data."
        ),
    ] = 120.0

    nodes_count_min: Annotated[
        Count, Meta(description="Minimum number of nodes. Source: docs/decisions.md#limits.")
    ] = 0
    nodes_count_max: Annotated[
        Count,
        Meta(description="Maximum number of nodes, launches in flight included. Source: docs/decisions.md#limits."),
    ] = 100
    gpu_count_max: Annotated[
        Count | None,
        Meta(
            description="Maximum number of GPUs, launches in flight included; unset: no limit."
            " Source: docs/decisions.md#limits."
        ),
    ] = None
    price_micro_usd_per_hour_max: Annotated[
        MicroUsdPerHour | None,
        Meta(
            description="Maximum price of all nodes per hour; unset: no limit. Source: docs/decisions.md#spend-budgets."
        ),
    ] = None
    prices: Annotated[
        PricePolicy, Meta(description="When a price is stale, and what follows. Source: docs/decisions.md#prices.")
    ] = PricePolicy()
    limits: Annotated[
        LimitsPolicy,
        Meta(
            description="Spend budgets, scale-up cooldown, and limits of zones and projects."
            " Source: docs/decisions.md#limits."
        ),
    ] = LimitsPolicy()
    placement: Annotated[
        PlacementName,
        Meta(
            description="Scoring policy that selects the node of each pod. Source: docs/decisions.md#placement-policies."
        ),
    ] = "fragmentation-gradient"
    node_overhead_micro_usd_per_hour: Annotated[
        MicroUsdPerHour,
        Meta(
            description="Cost of a node besides its price, such as agents, addresses and disks; fewer, larger nodes win"
            " ties. Source: docs/scores.md."
        ),
    ] = 100_000
    disruption_ratio_max: Annotated[
        Ratio,
        Meta(
            description="Maximum share of the nodes, rounded up, that voluntary drains remove at the same time."
            " Source: Karpenter, Disruption, Budgets."
        ),
    ] = 0.1
    consolidation_saving_ratio_min: Annotated[
        Ratio,
        Meta(
            description="Consolidation must save at least this share of the price of the nodes that it replaces."
            " Source: docs/decisions.md#consolidation."
        ),
    ] = 0.15
    consolidation_requested_ratio_max: Annotated[
        Ratio,
        Meta(
            description="Nodes with more than this share of their resources requested are not consolidated."
            " Source: cluster-autoscaler, FAQ, scale-down-utilization-threshold."
        ),
    ] = 0.5
    is_consolidation_on: Annotated[
        bool,
        Meta(
            description="If true, nodes are drained when their pods fit elsewhere."
            " Source: docs/decisions.md#consolidation."
        ),
    ] = True

    max_gpus_per_job: Annotated[
        Count,
        Meta(description="Maximum number of GPUs of all members of a job. Source: docs/decisions.md#job-limits."),
    ] = 1024
    queue_count_max: Annotated[
        Count,
        Meta(
            description="Maximum number of queued jobs; further requests are rejected."
            " Source: docs/decisions.md#job-limits."
        ),
    ] = 1000
    job_duration_hours_default: Annotated[
        float,
        Meta(
            gt=0,
            description="Time limit of a job that requests none. Source: docs/decisions.md#job-time-limit.",
        ),
    ] = 24.0
    job_duration_hours_max: Annotated[
        float,
        Meta(
            gt=0,
            description="Maximum time limit that a job may request. Source: docs/decisions.md#job-time-limit.",
        ),
    ] = 48.0
    job_retries_count_max: Annotated[
        Count,
        Meta(description="Maximum number of retries after preemption. Source: docs/decisions.md#spot-retries."),
    ] = 3

    pools: Annotated[
        tuple[NodePool, ...],
        Meta(
            min_length=1,
            description="Node pools; purchases try them by priority. Source: docs/decisions.md#policy-object.",
        ),
    ] = (NodePool(name="default"),)
    removal: Annotated[
        RemovalPolicy,
        Meta(
            description="Voluntary removal of nodes: causes, pace and protected work."
            " Source: docs/decisions.md#scale-down-rules."
        ),
    ] = RemovalPolicy()
    spot: Annotated[
        SpotPolicy,
        Meta(description="Use of spot capacity and the capacity mix. Source: docs/decisions.md#capacity-mix."),
    ] = SpotPolicy()
    gangs: Annotated[
        GangPolicy,
        Meta(
            description="Deadline and back-off of gangs, whose nodes are bought all together or not at all."
            " Source: docs/decisions.md#purchase-batching."
        ),
    ] = GangPolicy()
    batching: Annotated[
        BatchingPolicy,
        Meta(
            description="Window in which a burst of pods is collected into one purchase."
            " Source: docs/decisions.md#purchase-batching."
        ),
    ] = BatchingPolicy()
    headrooms: Annotated[
        tuple[Headroom, ...],
        Meta(description="GPUs that are kept free, always or on a schedule. Source: docs/decisions.md#limits."),
    ] = ()
    scheduled_limits: Annotated[
        tuple[ScheduledLimit, ...],
        Meta(
            description="Minimum and maximum number of nodes on a schedule; of several the narrowest applies."
            " Source: docs/decisions.md#limits."
        ),
    ] = ()
    utilization_trigger: Annotated[
        UtilizationTrigger,
        Meta(
            description="gated: utilization alone neither buys nor removes a node; direct: it may change one node per"
            " cooldown. Source: docs/decisions.md#utilization-triggers."
        ),
    ] = "gated"
    utilization: Annotated[
        UtilizationPolicy,
        Meta(
            description="Thresholds of GPU utilization and when telemetry is trusted."
            " Source: docs/decisions.md#utilization-triggers."
        ),
    ] = UtilizationPolicy()
    idle_jobs: Annotated[
        IdleJobsPolicy,
        Meta(
            description="Termination of jobs that hold GPUs without using them."
            " Source: docs/decisions.md#scale-down-rules."
        ),
    ] = IdleJobsPolicy()
    forecast: Annotated[
        ForecastPolicy,
        Meta(description="Demand forecast and prewarming. Source: docs/decisions.md#forecast-slots."),
    ] = ForecastPolicy()


DEFAULT_POLICY = ScalingPolicy()
