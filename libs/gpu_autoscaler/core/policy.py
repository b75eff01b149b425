"""The policy: every threshold of every decision, with unit, range, default and source. Loaded from TOML by the runtime.

A new threshold is one field here. Ratios run 0 to 1; durations are seconds of cluster time.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policies.ahead import ForecastPolicy, Headroom, ScheduledLimit
from gpu_autoscaler.core.policies.burst import BatchingPolicy
from gpu_autoscaler.core.policies.gang import GangPolicy
from gpu_autoscaler.core.policies.limits import LimitsPolicy
from gpu_autoscaler.core.policies.money import SpendPolicy
from gpu_autoscaler.core.policies.price import PricePolicy
from gpu_autoscaler.core.policies.ranges import Count, MicroUsdPerHour, Ratio, Seconds
from gpu_autoscaler.core.policies.removal import RemovalPolicy
from gpu_autoscaler.core.policies.spot import SpotPolicy
from gpu_autoscaler.core.policies.use import IdleJobsPolicy, UtilizationPolicy, UtilizationTrigger
from gpu_autoscaler.core.slicing import GpuSharing
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.scheduling import Taint

PlacementName = Literal[
    "fragmentation-gradient", "best-fit", "packing", "spreading", "least-loaded", "round-robin", "random"
]


class NodePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of nodes that are bought alike. Empty filters allow everything that is for sale."""

    name: Annotated[str, Meta(min_length=1, max_length=63, description="Name of the pool. Source: S68.")]
    priority: Annotated[
        int, Meta(ge=-1000, le=1000, description="Pools of higher priority are asked first. Source: S68.")
    ] = 0
    instance_types: Annotated[
        tuple[str, ...], Meta(description="Instance types allowed; empty: all. Source: S68.")
    ] = ()
    gpu_models: Annotated[tuple[str, ...], Meta(description="GPU models allowed; empty: all. Source: S135.")] = ()
    zones: Annotated[tuple[str, ...], Meta(description="Zones allowed; empty: all. Source: S68.")] = ()
    capacity_types: Annotated[
        tuple[CapacityType, ...], Meta(description="Capacity types allowed; empty: all. Source: S135.")
    ] = ()
    is_paused: Annotated[
        bool, Meta(description="Nothing is bought for it, and none of its nodes goes by choice. Source: S135, enabled.")
    ] = False
    nodes_count_min: Annotated[
        Count, Meta(description="Nodes with GPUs at least, within all limits. Source: S135, minSize.")
    ] = 0
    nodes_count_max: Annotated[
        Count | None, Meta(description="Nodes at most; none: only the cluster's. Source: S68.")
    ] = None
    gpu_count_max: Annotated[
        Count | None, Meta(description="GPUs at most; none: no limit of its own. Source: Decisions, limits.")
    ] = None
    sharing: Annotated[
        GpuSharing | None,
        Meta(description="How its GPUs are shared by pods; none: they are whole. Source: S104, S106."),
    ] = None
    spend: Annotated[SpendPolicy, Meta(description="Money by day and month at most. Source: S5, S116.")] = SpendPolicy()
    labels: Annotated[dict[str, str], Meta(description="Labels of each node of the pool. Source: S68.")] = {}
    taints: Annotated[tuple[Taint, ...], Meta(description="Taints of each node of the pool. Source: S70.")] = ()
    startup_taints: Annotated[
        tuple[Taint, ...],
        Meta(
            description="Taints that each node begins with, and that vanish before it is of use. Source: Karpenter,"
            " NodePools, startupTaints."
        ),
    ] = ()


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decisions depend on besides facts."""

    is_frozen: Annotated[bool, Meta(description="Change nothing: hold everything back. Source: DESIGN 6, limits.")] = (
        False
    )

    pending_pod_timeout_seconds: Annotated[
        Seconds,
        Meta(description="A pod waits so long at most for room that running work surely gives back. Source: S45."),
    ] = 120.0
    queued_timeout_seconds: Annotated[
        Seconds,
        Meta(description="A queued job waits so long at most for such room; high priority never. Source: S44, S47."),
    ] = 300.0
    boot_seconds_max: Annotated[
        Seconds,
        Meta(description="A bought node is usable by then or given back. Source: cluster-autoscaler."),
    ] = 900.0
    idle_seconds_max: Annotated[
        Seconds, Meta(description="An empty node goes after this at the latest. Source: S54, S57.")
    ] = 600.0
    scale_down_cooldown_seconds: Annotated[
        Seconds, Meta(description="A node stays at least this long after it became usable. Source: S56.")
    ] = 600.0
    drain_seconds_max: Annotated[
        Seconds,
        Meta(description="A voluntary drain is given up after this. Source: cluster-autoscaler."),
    ] = 600.0
    notice_seconds_default: Annotated[
        Seconds, Meta(description="Deadline of a notice that carries none. Source: GCP's preemption notice, S75.")
    ] = 30.0
    reservation_drain_seconds: Annotated[
        Seconds,
        Meta(description="Nodes of a paid period drain so long before its end. Source: our own, as a voluntary drain."),
    ] = 600.0
    watch_age_seconds_max: Annotated[
        Seconds,
        Meta(description="Older pictures of the world prove no absence. Source: Decisions, missing data."),
    ] = 120.0

    nodes_count_min: Annotated[Count, Meta(description="Nodes at least. Source: S71.")] = 0
    nodes_count_max: Annotated[Count, Meta(description="Nodes at most, orders in flight counted. Source: S71.")] = 100
    gpu_count_max: Annotated[
        Count | None, Meta(description="GPUs at most, orders in flight counted; none: no limit. Source: S63.")
    ] = None
    price_micro_usd_per_hour_max: Annotated[
        MicroUsdPerHour | None, Meta(description="Fleet price an hour at most; none: no limit. Source: S5.")
    ] = None
    prices: Annotated[PricePolicy, Meta(description="How old a price may be. Source: our own.")] = PricePolicy()
    limits: Annotated[LimitsPolicy, Meta(description="Limits of zones and of projects. Source: S62, S96, S116.")] = (
        LimitsPolicy()
    )
    placement: Annotated[
        PlacementName, Meta(description="By which policy nodes are filled. Source: S89, S93, S94, S95.")
    ] = "fragmentation-gradient"
    node_overhead_micro_usd_per_hour: Annotated[
        MicroUsdPerHour,
        Meta(description="What a node costs besides its price: agents, addresses, upkeep. Source: bench case V5."),
    ] = 100_000
    disruption_ratio_max: Annotated[
        Ratio,
        Meta(description="Share of nodes, rounded up, leaving at once by choice. Source: Karpenter budgets."),
    ] = 0.1
    consolidation_saving_ratio_min: Annotated[
        Ratio,
        Meta(
            description="Nodes are merged only if this share of their price is saved. Source: our own, against thrash."
        ),
    ] = 0.15
    consolidation_requested_ratio_max: Annotated[
        Ratio,
        Meta(description="Nodes that are asked for more than this stay. Source: cluster-autoscaler."),
    ] = 0.5
    is_consolidation_on: Annotated[
        bool, Meta(description="Empty nodes by moving pods that fit elsewhere. Source: S57.")
    ] = True

    max_gpus_per_job: Annotated[
        Count, Meta(description="GPUs of all members of a job at most. Source: S96, our default.")
    ] = 1024
    queue_count_max: Annotated[Count, Meta(description="Jobs waiting at most; more are refused. Source: S96.")] = 1000
    job_duration_hours_default: Annotated[
        float, Meta(gt=0, description="Time limit of a job. Source: Decisions, job time limit.")
    ] = 24.0
    job_duration_hours_max: Annotated[float, Meta(gt=0, description="Longest time limit of a job. Source: S96.")] = 48.0
    job_retries_count_max: Annotated[Count, Meta(description="Attempts after preemption. Source: S80, S136.")] = 3

    pools: Annotated[
        tuple[NodePool, ...], Meta(min_length=1, description="Where nodes may be bought, by priority. Source: S68.")
    ] = (NodePool(name="default"),)
    removal: Annotated[
        RemovalPolicy,
        Meta(description="Nodes that go by our choice: their pace, and which are due. Source: S58, S103."),
    ] = RemovalPolicy()
    spot: Annotated[
        SpotPolicy, Meta(description="Capacity that the cloud may take back, and the mix. Source: S67, S78, S80.")
    ] = SpotPolicy()
    gangs: Annotated[
        GangPolicy, Meta(description="Deadline and waits of what is bought whole or not at all. Source: S31.")
    ] = GangPolicy()
    batching: Annotated[
        BatchingPolicy, Meta(description="How long the first work of a burst waits for the rest. Source: S53.")
    ] = BatchingPolicy()
    headrooms: Annotated[
        tuple[Headroom, ...], Meta(description="GPUs that are kept free, always or at times. Source: S71.")
    ] = ()
    scheduled_limits: Annotated[
        tuple[ScheduledLimit, ...], Meta(description="Least and most nodes at some times; the narrowest holds. Source: S71.")
    ] = ()
    utilization_trigger: Annotated[
        UtilizationTrigger,
        Meta(description="gated: use alone moves no node; direct: one node a cooldown. Source: Decisions, S46, S55."),
    ] = "gated"
    utilization: Annotated[
        UtilizationPolicy,
        Meta(description="What high and low use is, and whom to believe. Source: S46, S55, Decisions."),
    ] = UtilizationPolicy()
    idle_jobs: Annotated[
        IdleJobsPolicy, Meta(description="What becomes of jobs that hold GPUs and leave them idle. Source: S60.")
    ] = IdleJobsPolicy()
    forecast: Annotated[
        ForecastPolicy, Meta(description="Demand that is foreseen, and bought for ahead. Source: S48, S131, S173.")
    ] = ForecastPolicy()


DEFAULT_POLICY = ScalingPolicy()
