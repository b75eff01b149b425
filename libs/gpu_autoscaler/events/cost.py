"""Facts about money. Allocated and idle add up to what the provider bills, to the micro-dollar."""

from typing import Literal

import msgspec

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.offers import CapacityType


class CostShare(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one user of a node owes for a span of time."""

    allocated_micro_usd: int
    used_micro_usd: int | None  # by utilisation; None: no telemetry. At most allocated
    job_id: JobId | None = None  # None: a pod without a job of ours
    project_id: str | None = None
    namespace: str | None = None


class CostAccrued(Fact, frozen=True, kw_only=True):
    """An instance cost this much from one instant to another."""

    provider_id: ProviderId
    node_name: str | None
    instance_type: str
    capacity_type: CapacityType
    from_at: Instant
    to_at: Instant
    total_micro_usd: int  # allocated of all shares + idle
    idle_micro_usd: int
    shares: tuple[CostShare, ...]
    price_micro_usd_per_hour: int
    price_source: str  # who said the price
    price_at: Instant  # and when
    # Whose limits it counts against, as the node was bought; None: not known, or not bought like that.
    pool: str | None = None
    zone: str | None = None
    bought_for: str | None = None  # the project

    def condition(self) -> str | None:
        """An instance's time is charged once: spans of an instance follow each other without a gap."""
        return f"cost_accrued/{self.provider_id}/{self.from_at.isoformat()}"

    def entity(self) -> str | None:
        """The instance."""
        return f"instance/{self.provider_id}"


class Spent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What was charged in a day or month of UTC, of all that counts against one owner's limits."""

    period: str  # 2026-11-21 or 2026-11
    owner: str  # cluster, pool/<name>, zone/<name> or project/<name>
    micro_usd: int


class ChargedUntil(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How far an instance is charged."""

    provider_id: ProviderId
    until_at: Instant


class SpentByJob(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a job was allocated so far."""

    job_id: JobId
    micro_usd: int


class CostLedgerTold(Fact, frozen=True, kw_only=True):
    """All sums of the ledger in the store, spans that are not told yet counted in: what was charged before this stream
    began, or before what it still has. Whoever knows them already learns nothing from it."""

    spent: tuple[Spent, ...]  # of this month and the one before
    charged: tuple[ChargedUntil, ...]  # instances of which spans may come again, or go on
    jobs: tuple[SpentByJob, ...]  # that are not over, or were not lately
    told_at: Instant

    def condition(self) -> str | None:
        """It is told once a day, for whoever has lost it."""
        return f"ledger_told/{self.told_at:%Y-%m-%d}"


class CostBudgetCrossed(Fact, frozen=True, kw_only=True):
    """Spending passed a mark of a budget."""

    scope: Literal["job", "project", "cluster"]
    scope_id: str
    mark_ratio: float  # 0.8 warns, 1.0 is the limit itself
    spent_micro_usd: int
    limit_micro_usd: int
    crossed_at: Instant

    def condition(self) -> str | None:
        """A mark of a limit is crossed once."""
        return f"budget/{self.scope}/{self.scope_id}/{self.limit_micro_usd}/{self.mark_ratio}"
