"""The policy: every threshold of every decision, with unit, range, default and source. The runtime loads it from TOML.

Ratios run from 0 to 1; durations are seconds of cluster time.
"""

from typing import Annotated, Literal

import msgspec

from gpu_autoscaler.core.policy.disruption_settings import (
    CheckpointsPolicy,
    IdleJobsPolicy,
    RemovalPolicy,
    UtilizationPolicy,
    UtilizationTrigger,
)
from gpu_autoscaler.core.policy.gpu_slices import GpuSharing
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, SpendPolicy
from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy, Headroom, ScheduledLimit
from gpu_autoscaler.core.policy.provisioning_settings import BatchingPolicy, GangPolicy, PricePolicy, SpotPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.policy.quota_settings import QuotasPolicy
from gpu_autoscaler.core.policy.ranges import Count, MicroUsdPerHour, Ratio, Seconds, about
from gpu_autoscaler.core.policy.tenancy_settings import TenancyPolicy
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint

PlacementName = Literal[
    "fragmentation-gradient",
    "best-fit",
    "packing",
    "spreading",
    "least-loaded",
    "least-utilized",
    "round-robin",
    "random",
]


class NodePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of nodes with equal labels, taints and limits. An empty filter allows every available offer."""

    name: Annotated[
        str,
        about(
            "Name of the pool, unique in the policy; label gpu-autoscaler.io/pool of its nodes.",
            "#policy-object",
            min_length=1,
            max_length=63,
        ),
    ]
    priority: Annotated[
        int,
        about("Purchases try pools of higher priority first.", "Karpenter, NodePools, spec.weight", ge=-1000, le=1000),
    ] = 0
    instance_types: Annotated[tuple[str, ...], about("Allowed instance types; empty: all.", "#policy-object")] = ()
    gpu_models: Annotated[tuple[str, ...], about("Allowed GPU models; empty: all.", "#policy-object")] = ()
    gpu_memory_gib_min: Annotated[
        Count | None,
        about("Minimum memory of one GPU in GiB; unset: any. An unknown memory is too little.", "#pool-templates"),
    ] = None
    zones: Annotated[tuple[str, ...], about("Allowed zones; empty: all.", "#policy-object")] = ()
    capacity_types: Annotated[
        tuple[CapacityType, ...], about("Allowed capacity types; empty: all.", "#policy-object")
    ] = ()
    spot_ratio: Annotated[
        Ratio | None,
        about(
            "Minimum share of spot among the GPUs of the pool while it is available, cheaper and rarely interrupted; "
            "unset: spot.mix applies.",
            "#shares",
        ),
    ] = None
    idle_seconds: Annotated[
        Seconds | None,
        about(
            "Time after which an empty node of the pool is removed; unset: idle_seconds of the policy.", "#idle-node"
        ),
    ] = None
    is_paused: Annotated[
        bool, about("If true, the pool neither scales up nor loses nodes by choice.", "#policy-object")
    ] = False
    nodes_count_min: Annotated[Count, about("Minimum number of nodes with GPUs, within all limits.", "#limits")] = 0
    nodes_count_max: Annotated[
        Count | None,
        about(
            "Maximum number of nodes, launches in flight included; unset: only the limit of the cluster applies.",
            "#limits",
        ),
    ] = None
    gpu_count_max: Annotated[
        Count | None,
        about(
            "Maximum number of GPUs, launches in flight included; unset: only the limit of the cluster applies.",
            "#limits",
        ),
    ] = None
    sharing: Annotated[
        GpuSharing | None,
        about("How pods share the GPUs of the pool (MIG, time-slicing or MPS); unset: whole GPUs.", "#gpu-fractions"),
    ] = None
    spend: Annotated[SpendPolicy, about("Spend budgets of the pool per day and month.", "#spend-budgets")] = (
        SpendPolicy()
    )
    labels: Annotated[dict[str, str], about("Labels of every node of the pool.", "#policy-object")] = {}
    taints: Annotated[
        tuple[Taint, ...], about("Taints of every node of the pool.", "Kubernetes, Taints and Tolerations")
    ] = ()
    startup_taints: Annotated[
        tuple[Taint, ...],
        about(
            "Taints that a node registers with and that are removed before it accepts pods.",
            "Karpenter, NodePools, startupTaints",
        ),
    ] = ()


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every input of a decision except facts."""

    is_frozen: Annotated[
        bool, about("If true, every purchase and voluntary removal is deferred.", "#limits-never-exceeded")
    ] = False

    pending_pod_timeout_seconds: Annotated[
        Seconds,
        about(
            "Maximum time that a pending pod waits for capacity that running work is certain to release; "
            "after it a node is bought.",
            "#waiting-before-scale-up",
        ),
    ] = 120.0
    queued_timeout_seconds: Annotated[
        Seconds,
        about(
            "Maximum time that a queued job waits for such capacity; jobs of high priority do not wait.",
            "#waiting-before-scale-up",
        ),
    ] = 300.0
    new_node_wait_seconds_max: Annotated[
        Seconds,
        about(
            "Maximum time that a queued job below high priority leaves free capacity unused, where a new node costs "
            "less than to keep that one for it; 0: it uses any.",
            "#keep-or-buy",
        ),
    ] = 300.0
    boot_seconds_max: Annotated[
        Seconds,
        about(
            "Time from the decision until a node must accept pods; a later one is terminated.",
            "cluster-autoscaler, FAQ, max-node-provision-time",
        ),
    ] = 900.0
    idle_seconds: Annotated[
        Seconds | None,
        about(
            "Time after which an empty node is removed, exactly; unset: the break-even rule decides, up to "
            "idle_seconds_max.",
            "#idle-node",
        ),
    ] = None
    idle_seconds_max: Annotated[
        Seconds,
        about(
            "Upper bound of the time that an empty node is kept without idle_seconds; the break-even rule usually "
            "ends it earlier, see removal.waiting_micro_usd_per_hour.",
            "#idle-node",
        ),
    ] = 600.0
    scale_down_cooldown_seconds: Annotated[
        Seconds,
        about("Minimum time that a node is kept after it became ready, unless it is unneeded.", "#scale-down-rules"),
    ] = 600.0
    drain_seconds_max: Annotated[
        Seconds,
        about(
            "A voluntary drain that takes longer is canceled.", "cluster-autoscaler, FAQ, max-graceful-termination-sec"
        ),
    ] = 600.0
    notice_seconds_default: Annotated[
        Seconds,
        about(
            "Assumed time to termination of an interruption notice without a deadline.",
            "Google Cloud, Spot VMs, preemption process",
        ),
    ] = 30.0
    reservation_drain_seconds: Annotated[
        Seconds,
        about(
            "Nodes of a reservation start to drain this long before the reservation ends.",
            "project default, equal to drain_seconds_max",
        ),
    ] = 600.0
    watch_age_seconds_max: Annotated[
        Seconds, about("Maximum age of a list or watch before purchases and scale-down are suspended.", "#missing-data")
    ] = 120.0

    nodes_count_min: Annotated[Count, about("Minimum number of nodes.", "#limits")] = 0
    nodes_count_max: Annotated[Count, about("Maximum number of nodes, launches in flight included.", "#limits")] = 100
    gpu_count_max: Annotated[
        Count | None, about("Maximum number of GPUs, launches in flight included; unset: no limit.", "#limits")
    ] = None
    price_micro_usd_per_hour_max: Annotated[
        MicroUsdPerHour | None, about("Maximum price of all nodes per hour; unset: no limit.", "#spend-budgets")
    ] = None
    prices: Annotated[PricePolicy, about("When a price is stale, and what follows.", "#prices")] = PricePolicy()
    limits: Annotated[
        LimitsPolicy, about("Spend budgets, scale-up cooldown, and limits of zones and projects.", "#limits")
    ] = LimitsPolicy()
    placement: Annotated[
        PlacementName, about("Scoring policy that selects the node of a pod.", "#placement-policies")
    ] = "fragmentation-gradient"
    node_overhead_micro_usd_per_hour: Annotated[
        MicroUsdPerHour,
        about(
            "Cost of a node besides its price, such as agents, addresses and disks; fewer, larger nodes win ties.",
            "docs/scores.md",
        ),
    ] = 100_000
    disruption_ratio_max: Annotated[
        Ratio,
        about(
            "Maximum share of the nodes, rounded up, that voluntary drains remove at the same time.",
            "Karpenter, Disruption, Budgets",
        ),
    ] = 0.1
    consolidation_saving_ratio_min: Annotated[
        Ratio,
        about(
            "Consolidation must save at least this share of the price of the nodes that it replaces.", "#consolidation"
        ),
    ] = 0.15
    consolidation_requested_ratio_max: Annotated[
        Ratio,
        about(
            "Nodes with more than this share of their resources requested are not consolidated.",
            "cluster-autoscaler, FAQ, scale-down-utilization-threshold",
        ),
    ] = 0.5
    is_consolidation_on: Annotated[
        bool, about("If true, nodes are drained when their pods fit elsewhere.", "#consolidation")
    ] = True

    max_gpus_per_job: Annotated[Count, about("Maximum number of GPUs of all members of a job.", "#job-limits")] = 1024
    queue_count_max: Annotated[
        Count, about("Maximum number of queued jobs; further requests are rejected.", "#job-limits")
    ] = 1000
    queues: Annotated[
        tuple[QueuePolicy, ...],
        about(
            "Queues of jobs by project, each with its scheduling policy; empty: one queue, by priority, start "
            "deadline and waiting time.",
            "#queues",
        ),
    ] = ()
    job_duration_hours_default: Annotated[
        float, about("Time limit of a job that requests none.", "#job-time-limit", gt=0)
    ] = 24.0
    job_duration_hours_max: Annotated[
        float, about("Maximum time limit that a job may request.", "#job-time-limit", gt=0)
    ] = 48.0
    job_retries_count_max: Annotated[Count, about("Maximum number of retries after preemption.", "#spot-retries")] = 3
    quotas: Annotated[QuotasPolicy, about("Quotas of users and projects, and how projects share GPUs.", "#quotas")] = (
        QuotasPolicy()
    )

    pools: Annotated[
        tuple[NodePool, ...], about("Node pools; purchases try them by priority.", "#policy-object", min_length=1)
    ] = (NodePool(name="default"),)
    removal: Annotated[
        RemovalPolicy, about("Voluntary removal of nodes: causes, pace and protected work.", "#scale-down-rules")
    ] = RemovalPolicy()
    spot: Annotated[SpotPolicy, about("Use of spot capacity and the capacity mix.", "#capacity-mix")] = SpotPolicy()
    gangs: Annotated[
        GangPolicy,
        about(
            "Deadline and back-off of gangs, whose nodes are bought all together or not at all.", "#purchase-batching"
        ),
    ] = GangPolicy()
    batching: Annotated[
        BatchingPolicy, about("Window in which a burst of pods is collected into one purchase.", "#purchase-batching")
    ] = BatchingPolicy()
    headrooms: Annotated[
        tuple[Headroom, ...], about("GPUs that are kept free, always or on a schedule.", "#limits")
    ] = ()
    scheduled_limits: Annotated[
        tuple[ScheduledLimit, ...],
        about("Minimum and maximum number of nodes on a schedule; of several the narrowest applies.", "#limits"),
    ] = ()
    utilization_trigger: Annotated[
        UtilizationTrigger,
        about(
            "gated: utilization alone neither buys nor removes a node; direct: it may change one node per cooldown.",
            "#utilization-triggers",
        ),
    ] = "gated"
    utilization: Annotated[
        UtilizationPolicy,
        about("Thresholds of GPU utilization and when telemetry is trusted.", "#utilization-triggers"),
    ] = UtilizationPolicy()
    idle_jobs: Annotated[
        IdleJobsPolicy, about("Termination of jobs that hold GPUs without using them.", "#scale-down-rules")
    ] = IdleJobsPolicy()
    checkpoints: Annotated[
        CheckpointsPolicy, about("Periodic requests to save checkpoints.", "#checkpoint-interval")
    ] = CheckpointsPolicy()
    tenancy: Annotated[
        TenancyPolicy,
        about("Namespaces, quotas, cost centers and PriorityClasses of projects.", "#projects-and-namespaces"),
    ] = TenancyPolicy()
    forecast: Annotated[ForecastPolicy, about("Demand forecast and prewarming.", "#forecast-slots")] = ForecastPolicy()


DEFAULT_POLICY = ScalingPolicy()
