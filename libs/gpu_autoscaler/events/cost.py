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

    def condition(self) -> str | None:
        """An instance's time is charged once: spans of an instance follow each other without a gap."""
        return f"cost_accrued/{self.provider_id}/{self.from_at.isoformat()}"

    def entity(self) -> str | None:
        """The instance."""
        return f"instance/{self.provider_id}"


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
