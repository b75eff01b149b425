"""Facts about spend. Allocated and idle cost add up to the bill of the provider, to the micro-dollar."""

from typing import Literal

import msgspec

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.ids import JobId, ProviderId, derive_id
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType

# Longer ids of clouds, as those of Azure, would be a third of a span: each message has its own id twice.
_ID_LENGTH_MAX = 100


class CostShare(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The share of one user in the cost of a node for a span of time."""

    allocated_micro_usd: int
    used_micro_usd: int | None  # by utilization, at most the allocated cost; None: no telemetry
    job_id: JobId | None = None  # None: a pod without a job of ours
    project_id: str | None = None  # None: none
    namespace: str | None = None  # of its pods; None: unknown


class CostAccrued(Fact, frozen=True, kw_only=True):
    """The cost of an instance for a span of time: all minutes since its last span."""

    provider_id: ProviderId
    node_name: str | None  # None: the instance has no node
    instance_type: str
    capacity_type: CapacityType
    from_at: Instant
    to_at: Instant  # when the span ends
    total_micro_usd: int  # allocated of all shares + idle
    idle_micro_usd: int
    shares: tuple[CostShare, ...]  # one for each user; the rest is idle
    price_micro_usd_per_hour: int
    price_source: str  # where the price comes from
    price_at: Instant  # and when it was read
    # Whose budgets it counts against, from the purchase of the node; None if unknown or without.
    pool: str | None = None
    zone: str | None = None  # None: unknown
    bought_for: str | None = None  # the project; None: unknown, or none
    is_final: bool = False  # the instance has ended at `to_at`; False in records of 0.2, also of the last span

    def condition(self) -> str | None:
        """Each time is charged once: the spans of an instance are contiguous."""
        instance = self.provider_id if len(self.provider_id) <= _ID_LENGTH_MAX else derive_id(self.provider_id)
        return f"cost_accrued/{instance}/{self.from_at.isoformat()}"

    def entity(self) -> str | None:
        return f"instance/{self.provider_id}"


class Spent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The spend of one owner in a day or month of UTC."""

    period: str  # 2026-11-21 or 2026-11
    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    micro_usd: int


class ChargedUntil(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The time until which an instance is charged."""

    provider_id: ProviderId
    until_at: Instant  # end of the last span
    is_final: bool = False  # the instance has ended then


class SpentByJob(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The cost allocated to a job so far."""

    job_id: JobId
    micro_usd: int


class CostLedgerReported(Fact, frozen=True, kw_only=True):
    """All sums of the ledger in the store, including spans that are not published yet: what was charged before the
    stream began, or before its oldest fact. Redundant for consumers that have folded all facts."""

    spent: tuple[Spent, ...]  # of this month and the previous one
    charged: tuple[ChargedUntil, ...]  # instances whose spans may repeat or continue
    jobs: tuple[SpentByJob, ...]  # running jobs, and those that ended recently
    reported_at: Instant  # when the sums were read

    def condition(self) -> str | None:
        """One fact per day."""
        return f"ledger_told/{self.reported_at:%Y-%m-%d}"


class CostBudgetCrossed(Fact, frozen=True, kw_only=True):
    """Spend crossed a threshold of a budget."""

    scope: Literal["job", "project", "cluster"]  # whose budget it is
    scope_id: str  # id of the job, or name of the project
    mark_ratio: float  # 0.8 warns, 1.0 is the limit itself
    spent_micro_usd: int
    limit_micro_usd: int
    crossed_at: Instant  # when it was noticed

    def condition(self) -> str | None:
        """One fact per threshold and limit."""
        return f"budget/{self.scope}/{self.scope_id}/{self.limit_micro_usd}/{self.mark_ratio}"
