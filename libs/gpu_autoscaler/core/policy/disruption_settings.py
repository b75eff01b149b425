"""Policy of voluntary removals: causes, pace, protected work, GPU health, utilization."""

import enum
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.policy.cron import Scheduled
from gpu_autoscaler.core.policy.ranges import Count, MicroUsdPerHour, Ratio, Seconds, about

UtilizationTrigger = Literal["gated", "direct"]
Priority = Annotated[int, Meta(ge=0, le=1000)]
Xid = Annotated[int, Meta(ge=1)]

# NVIDIA, "Xid catalog" (deploy/xid-errors) and "Health Validation, Xid checks" (read 2026-11-21): the GPU must be
# reset or serviced. 46 stopped, 48 double-bit error, 62 internal controller halt, 64 row remapping failed, 74 NVLink,
# 79 fell off the bus, 95 uncontained memory error, 119 and 120 GSP, 140 unrecovered memory error.
_FATAL = (46, 48, 62, 64, 74, 79, 95, 119, 120, 140)
# The same pages: a row remapping is pending (63), a contained memory error ended one application (94). The GPU keeps
# working until a reset at a convenient time.
_DEGRADED = (63, 94)
# Ended drains are remembered for this long (`core/state/retention.py`).
POOL_COOLDOWN_SECONDS_MAX = 6 * 3600.0
# Saves that come faster than this are no checkpoints; a request needs seconds to be read. Source: our own.
CHECKPOINT_SECONDS_MIN = 60.0
_PoolCooldown = Annotated[float, Meta(ge=0, le=POOL_COOLDOWN_SECONDS_MAX)]


class UtilizationPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Utilization thresholds. `utilization_trigger` says what they may cause."""

    high_ratio: Annotated[
        Ratio, about("Mean utilization of all GPUs above which it is high.", "#utilization-triggers")
    ] = 0.8
    low_ratio: Annotated[
        Ratio, about("Mean utilization of the GPUs of a node up to which it is low.", "#utilization-triggers")
    ] = 0.2
    low_seconds: Annotated[
        Seconds, about("Time that utilization must stay low before it counts.", "#scale-down-rules")
    ] = 600.0
    cooldown_seconds: Annotated[
        Seconds, about("Minimum time between two nodes bought for utilization alone.", "#scale-up-triggers")
    ] = 180.0
    telemetry_age_seconds_max: Annotated[
        Seconds, about("Maximum age of telemetry that is used.", "KAI Scheduler, usage maxStaleness")
    ] = 300.0
    unchanged_seconds_max: Annotated[
        Seconds, about("Telemetry whose figures do not change for longer is stuck and not used.", "#missing-data")
    ] = 300.0
    telemetry_coverage_ratio_min: Annotated[
        Ratio,
        about("Minimum share of GPU nodes with usable telemetry; below it utilization has no effect.", "#missing-data"),
    ] = 0.9


class IdleJobsPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Termination of jobs, and of other workloads in opted-in namespaces, that hold GPUs without using them."""

    is_on: Annotated[
        bool,
        about(
            "If true, idle jobs are announced and canceled; off by default because it ends running work.",
            "#scale-down-rules",
        ),
    ] = False
    idle_seconds: Annotated[
        Seconds, about("Idle time after which the end of a job is announced.", "#scale-down-rules")
    ] = 1800.0
    busy_ratio_max: Annotated[Ratio, about("Maximum utilization of every GPU of an idle job.", "#scale-down-rules")] = (
        0.05
    )
    grace_seconds: Annotated[
        Seconds,
        about("Time between the announcement on the pods and the end of the job or workload.", "#idle-workloads"),
    ] = 600.0
    namespaces: Annotated[
        tuple[str, ...],
        about(
            "Namespaces whose workloads with GPUs end as well, whoever created them, beside those with the label "
            "gpu-autoscaler.io/end-idle-workloads=true.",
            "#idle-workloads",
        ),
    ] = ()


class CheckpointsPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Periodic requests to running jobs to save a checkpoint. Jobs that do not save on request are not asked."""

    is_on: Annotated[
        bool, about("If true, running jobs that save on request are asked periodically.", "#checkpoint-interval")
    ] = True
    interval_seconds: Annotated[
        float,
        about(
            "Time without a save after which a job is asked, unless the job names its own.",
            "#checkpoint-interval",
            ge=CHECKPOINT_SECONDS_MIN,
        ),
    ] = 900.0
    interval_seconds_min: Annotated[
        float, about("Shortest interval that is computed for a job.", "#checkpoint-interval", ge=CHECKPOINT_SECONDS_MIN)
    ] = 120.0
    interval_seconds_max: Annotated[
        float, about("Longest interval that is computed for a job.", "#checkpoint-interval", ge=CHECKPOINT_SECONDS_MIN)
    ] = 3600.0
    saves_count_max: Annotated[
        int, about("Maximum number of jobs that save on request at the same time.", "#checkpoint-interval", ge=1)
    ] = 64


class GpuHealthPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evidence by which a GPU is unhealthy.

    Xids of applications (13, 31, 43, 45 and others) are in neither list: they say nothing about the GPU. Neither does
    zero utilization while a job holds the GPU.
    """

    evidence_seconds: Annotated[
        Seconds, about("Time that evidence must persist before a GPU is unhealthy.", "#gpu-health")
    ] = 600.0
    celsius_max: Annotated[
        float, about("A GPU that never gets cooler than this is unhealthy.", "#gpu-health", ge=60, le=120)
    ] = 85.0
    xids_fatal: Annotated[
        tuple[Xid, ...], about("Xids after which the node is drained, by force if necessary.", "NVIDIA, Xid catalog")
    ] = _FATAL
    xids_degraded: Annotated[
        tuple[Xid, ...], about("Xids after which the node is drained once its work may move.", "NVIDIA, Xid catalog")
    ] = _DEGRADED


class ProtectionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work that voluntary removals leave in place."""

    run_seconds_min: Annotated[
        Seconds,
        about(
            "Pods that run for less time are not moved; for a job it doubles with each move, up to 256 times.",
            "#consolidation",
        ),
    ] = 300.0
    ending_soon_seconds: Annotated[
        Seconds, about("Work that ends within this time is not moved.", "#checkpoint-interval")
    ] = 900.0
    job_priority_min: Annotated[
        Priority | None, about("Jobs of at least this priority are not moved; unset: all may be.", "#priority")
    ] = 1000


class RemovalCause(enum.StrEnum):
    """Cause of a voluntary removal, as named in disruption budgets."""

    EMPTY = "empty"
    UNDERUSED = "underused"
    DRIFTED = "drifted"
    EXPIRED = "expired"
    UNHEALTHY = "unhealthy"
    REBALANCE_RECOMMENDED = "rebalance_recommended"  # the cloud signals a higher risk of interruption


class DisruptionBudget(Scheduled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many nodes may be removed at the same time. Of several active budgets the smallest applies."""

    causes: Annotated[
        tuple[RemovalCause, ...], about("Causes that the budget limits; empty: all.", "Karpenter, Disruption, Budgets")
    ] = ()
    nodes_count_max: Annotated[
        Count | None, about("Maximum number of nodes being removed; unset: no limit.", "Karpenter, Disruption, Budgets")
    ] = None
    nodes_ratio_max: Annotated[
        Ratio | None,
        about("The same as a share of the nodes, rounded up; unset: no limit.", "Karpenter, Disruption, Budgets"),
    ] = None

    def violations(self) -> Iterator[str]:
        if self.nodes_count_max is None and self.nodes_ratio_max is None:
            yield "set nodes_count_max or nodes_ratio_max: without them the budget has no effect"
        yield from super().violations()


class BrakePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much may be removed by force in an hour for other causes than a cloud notice or a deletion by a user.

    What would exceed a limit is held, and so is every later forced removal, until a person resumes.
    """

    is_on: Annotated[
        bool, about("If true, forced removals beyond the limits wait for a person; false: no limits.", "#brake")
    ] = True
    nodes_ratio_max: Annotated[
        Ratio,
        about(
            "Maximum share of the nodes, rounded up, that is removed by force within an hour; "
            "1: no limit, 0: only nodes_ok_count.",
            "Karpenter, Disruption, Node Auto Repair",
        ),
    ] = 0.2
    nodes_ok_count: Annotated[
        Count,
        about(
            "Up to this number, nodes are removed by force within an hour whatever their share.",
            "cluster-autoscaler, FAQ, ok-total-unready-count",
        ),
    ] = 3
    price_micro_usd_per_hour_max: Annotated[
        MicroUsdPerHour,
        about(
            "Maximum price of all nodes that are removed by force within an hour; 0: none is. An unknown price counts "
            "as the highest known one.",
            "#brake",
        ),
    ] = 1_000_000_000


class RemovalPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Causes of voluntary removal besides emptiness, and its pace."""

    disruption_budgets: Annotated[
        tuple[DisruptionBudget, ...],
        about(
            "Disruption budgets besides disruption_ratio_max; the smallest applies.", "Karpenter, Disruption, Budgets"
        ),
    ] = ()
    pool_cooldown_seconds: Annotated[
        _PoolCooldown | None,
        about(
            "Pause of a pool after a plan that removes nodes of it by choice, unhealthy nodes excepted; unset: 600 "
            "where idle_seconds is set, else 0.",
            "#scale-down-cooldown",
        ),
    ] = None
    is_paid_reservation_kept: Annotated[
        bool,
        about(
            "If true, empty nodes of reserved capacity are kept while the reservation is paid.", "#reserved-capacity"
        ),
    ] = True
    expire_seconds_max: Annotated[
        Seconds | None, about("Age at which a node is replaced; unset: never.", "Karpenter, Disruption, expireAfter")
    ] = 7 * 24 * 3600.0
    expire_jitter_ratio: Annotated[
        Ratio,
        about(
            "A node expires earlier by up to this share of the age, derived from its name, so that nodes do "
            "not expire together.",
            "project default, against mass replacement",
        ),
    ] = 0.1
    expire_grace_seconds: Annotated[
        Seconds,
        about("Time that an expired node waits for protected work before it is drained by force.", "#job-time-limit"),
    ] = 24 * 3600.0
    is_drift_on: Annotated[
        bool, about("If true, nodes that no longer match their pool are replaced.", "Karpenter, Disruption, Drift")
    ] = True
    is_avoid_taint_on: Annotated[
        bool,
        about(
            "If true, GPU nodes that cost most for their work get the taint gpu-autoscaler.io/avoid "
            "(PreferNoSchedule) while pods with GPUs run that do not tolerate it, as jobs of the queue do: new ones go "
            "elsewhere where they can, and the nodes become empty. False removes the taints, for instance before an "
            "uninstall.",
            "cluster-autoscaler FAQ, soft taints of unneeded nodes",
        ),
    ] = True
    is_finalizer_on: Annotated[
        bool,
        about(
            "If true, node objects get a finalizer, so that a node deleted by hand is drained and terminated; "
            "false removes the finalizers, for instance before an uninstall.",
            "Karpenter, Disruption, Termination Controller",
        ),
    ] = True
    unhealthy_seconds_max: Annotated[
        Seconds,
        about(
            "A node that is not ready, or misses GPUs, for longer is unhealthy.",
            "cluster-autoscaler, FAQ, scale-down-unready-time",
        ),
    ] = 1200.0
    unhealthy_ratio_max: Annotated[
        Ratio,
        about(
            "If a larger share of the nodes is unhealthy, none of them is removed.",
            "cluster-autoscaler, FAQ, max-total-unready-percentage",
        ),
    ] = 0.45
    unhealthy_nodes_ok_count: Annotated[
        Count,
        about(
            "Up to this number, unhealthy nodes are removed whatever their share.",
            "cluster-autoscaler, FAQ, ok-total-unready-count",
        ),
    ] = 3
    protection: Annotated[ProtectionPolicy, about("Work that voluntary removals leave in place.", "#consolidation")] = (
        ProtectionPolicy()
    )
    gpu_health: Annotated[GpuHealthPolicy, about("Evidence by which a GPU is unhealthy.", "#gpu-health")] = (
        GpuHealthPolicy()
    )
    forced_drain_seconds: Annotated[
        Seconds,
        about(
            "Time that the drain of an unhealthy or overdue node may take before pods are evicted by force.",
            "project default, time to save a checkpoint",
        ),
    ] = 3600.0
    brake: Annotated[
        BrakePolicy, about("How much may be removed by force in an hour before a person has to resume.", "#brake")
    ] = BrakePolicy()
    drain_retry_seconds: Annotated[
        Seconds,
        about(
            "Time before a node whose drain was canceled is drained again.",
            "cluster-autoscaler, FAQ, unremovable-node-recheck-timeout",
        ),
    ] = 300.0
    waiting_micro_usd_per_hour: Annotated[
        MicroUsdPerHour,
        about(
            "Value of an hour that work waits for a boot. An empty node is removed once its idle time cost as "
            "much as a new boot, and work leaves an expensive node unused where a new one costs less by more than "
            "this; a higher value keeps nodes longer, up to idle_seconds_max, and lets less work wait.",
            "docs/scores.md",
        ),
    ] = 5_000_000
    unneeded_idle_seconds: Annotated[
        Seconds,
        about(
            "Time after which an empty GPU node is removed, whatever its age, if the arrivals of the last two hours "
            "would rarely have used it. From idle_seconds_max on, this rule removes nothing earlier.",
            "#idle-node",
        ),
    ] = 15.0
    replacement_payback_hours: Annotated[
        float,
        about(
            "A cheaper replacement must pay for itself within this time, and is not replaced before.",
            "#consolidation",
            ge=0,
        ),
    ] = 1.0
    checkpoint_interval_seconds: Annotated[
        Seconds, about("Maximum work that a moved pod repeats.", "#checkpoint-interval")
    ] = 900.0
    replacement_cooldown_seconds: Annotated[
        Seconds, about("Minimum time between two replacements of a node.", "#consolidation")
    ] = 6 * 3600.0
