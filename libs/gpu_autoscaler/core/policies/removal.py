"""The policy's part about nodes that go by our choice: how many at a time, when, and what makes one due for it."""

import enum
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from gpu_autoscaler.core.cron import schedule
from gpu_autoscaler.core.policies.health import GpuHealthPolicy
from gpu_autoscaler.core.policies.patience import ProtectionPolicy
from gpu_autoscaler.core.policies.ranges import Count, MicroUsdPerHour, Ratio, Seconds


class RemovalCause(enum.StrEnum):
    """Why a node is to go, as budgets name it."""

    EMPTY = "empty"
    UNDERUSED = "underused"
    DRIFTED = "drifted"
    EXPIRED = "expired"
    UNHEALTHY = "unhealthy"
    REBALANCE_RECOMMENDED = "rebalance_recommended"  # the cloud says that it may take them


class DisruptionBudget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many nodes may be leaving at once, for some causes, at some times. Of several budgets the smallest holds."""

    causes: Annotated[
        tuple[RemovalCause, ...], Meta(description="Causes that it limits; empty: all. Source: Karpenter budgets.")
    ] = ()
    nodes_count_max: Annotated[
        Count | None, Meta(description="Nodes leaving at a time at most. Source: Karpenter budgets.")
    ] = None
    nodes_ratio_max: Annotated[
        Ratio | None, Meta(description="The same as a share of our nodes, rounded up. Source: Karpenter budgets.")
    ] = None
    schedule: Annotated[
        str | None, Meta(description="When it begins to hold, as cron has it; none: always. Source: Karpenter budgets.")
    ] = None
    duration_seconds: Annotated[
        Seconds | None, Meta(description="How long it holds from then on, 31 days at most. Source: Karpenter budgets.")
    ] = None
    time_zone: Annotated[str, Meta(description="Time zone of the schedule, as in Europe/Berlin. Source: our own.")] = (
        "UTC"
    )

    def mistakes(self) -> Iterator[str]:
        """Yield what cannot be meant, one sentence each; nothing for a budget that can hold."""
        if self.nodes_count_max is None and self.nodes_ratio_max is None:
            yield "neither nodes_count_max nor nodes_ratio_max is set: it limits nothing"
        if (self.schedule is None) != (self.duration_seconds is None):
            yield "schedule and duration_seconds are set together or not at all"
        if self.duration_seconds is not None and not 0 < self.duration_seconds <= DURATION_SECONDS_MAX:
            yield f"duration_seconds: {self.duration_seconds:g} is not above 0 and up to {DURATION_SECONDS_MAX:g}"
        if self.schedule is not None:
            try:
                schedule(self.schedule, self.time_zone)
            except ValueError as error:
                yield f"schedule: {error}"

    def holds_at(self, as_of: datetime) -> bool:
        """True when it limits at this instant. A budget without mistakes only."""
        if self.schedule is None or self.duration_seconds is None:
            return True
        since = as_of - timedelta(seconds=self.duration_seconds)
        return schedule(self.schedule, self.time_zone).last_start(as_of, since) is not None


DURATION_SECONDS_MAX = 31 * 24 * 3600.0


class RemovalPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a node due to go besides being empty, and at which pace nodes go."""

    disruption_budgets: Annotated[
        tuple[DisruptionBudget, ...],
        Meta(description="Budgets besides disruption_ratio_max; the smallest holds. Source: Karpenter budgets."),
    ] = ()
    expire_seconds_max: Annotated[
        Seconds | None, Meta(description="A node goes at this age; none: never. Source: S57, ttlSecondsUntilExpired.")
    ] = 7 * 24 * 3600.0
    expire_jitter_ratio: Annotated[
        Ratio,
        Meta(description="Up to this share earlier, by the node's name, so that not all go at once. Source: our own."),
    ] = 0.1
    expire_grace_seconds: Annotated[
        Seconds,
        Meta(description="Expired, it waits so long for protected work. Source: Decisions, job time limit."),
    ] = 24 * 3600.0
    is_drift_on: Annotated[
        bool, Meta(description="Replace nodes that the policy would not buy today. Source: Karpenter drift.")
    ] = True
    is_finalizer_on: Annotated[
        bool,
        Meta(
            description="Hold our node objects by a finalizer, so that one deleted by hand is emptied and ended."
            " Source: Karpenter, termination. Off: the finalizers are taken away, as before an uninstall."
        ),
    ] = True
    unhealthy_seconds_max: Annotated[
        Seconds, Meta(description="A node that is amiss for longer is sick. Source: cluster-autoscaler, unready time.")
    ] = 1200.0
    unhealthy_ratio_max: Annotated[
        Ratio, Meta(description="Of more sick nodes than this share none is touched. Source: cluster-autoscaler.")
    ] = 0.45
    unhealthy_nodes_ok_count: Annotated[
        Count, Meta(description="So many sick nodes are never too many. Source: cluster-autoscaler.")
    ] = 3
    protection: Annotated[
        ProtectionPolicy, Meta(description="Work that is left alone for now. Source: S77, S80, Decisions, priority.")
    ] = ProtectionPolicy()
    gpu_health: Annotated[
        GpuHealthPolicy, Meta(description="What telemetry proves against a GPU. Source: S103, Decisions.")
    ] = GpuHealthPolicy()
    forced_drain_seconds: Annotated[
        Seconds,
        Meta(description="A sick or overdue node is emptied by force after this. Source: our own, an hour to save."),
    ] = 3600.0
    drain_retry_seconds: Annotated[
        Seconds,
        Meta(description="A node whose drain was given up is left alone so long. Source: cluster-autoscaler."),
    ] = 300.0
    waiting_micro_usd_per_hour: Annotated[
        MicroUsdPerHour,
        Meta(
            description="What an hour of waiting for a node is worth: an empty one goes once it cost its boot and that"
            " wait; the more it is, the nearer to idle_seconds_max. Source: our own, see docs/scores.md."
        ),
    ] = 2_000_000
    replacement_payback_hours: Annotated[
        float,
        Meta(ge=0, description="A cheaper node must pay within this time, and stands for it. Source: our own."),
    ] = 4.0
    checkpoint_interval_seconds: Annotated[
        Seconds, Meta(description="Work done twice by a pod that moves, at most. Source: S80, checkpoint interval.")
    ] = 900.0
    replacement_cooldown_seconds: Annotated[
        Seconds,
        Meta(description="A node is bought a replacement at most once in this time. Source: our own, against thrash."),
    ] = 6 * 3600.0


def budget_mistakes(policy: RemovalPolicy) -> list[str]:
    """Return a sentence for each budget that cannot be meant."""
    return [
        f"removal.disruption_budgets[{number}]: {mistake}"
        for number, budget in enumerate(policy.disruption_budgets)
        for mistake in budget.mistakes()
    ]
