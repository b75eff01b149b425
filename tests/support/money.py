"""Facts of the ledger, in one line each."""

from datetime import datetime, timedelta

from tests.support.purchases import provider_id
from tests.support.timed_facts import T0, Story, TimedFact

from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, SpendPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events.cost import ChargedUntil, CostAccrued, CostLedgerReported, CostShare, Spent
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.money import MICRO_USD_PER_USD, cost_micro_usd
from gpu_autoscaler.model.offers import CapacityType

USD = MICRO_USD_PER_USD


def ledger(*spent: Spent, charged: tuple[ChargedUntil, ...] = (), at: datetime = T0) -> Story:
    """The store's sums are known: zero by default."""
    return (TimedFact(CostLedgerReported(spent=spent, charged=charged, jobs=(), reported_at=at), at),)


def spent(usd: float, *, period: str = "2026-11-21", owner: str = "cluster") -> Spent:
    """So much was charged."""
    return Spent(period=period, owner=owner, micro_usd=round(usd * USD))


def charged(
    name: str,
    *,
    from_at: datetime = T0,
    to_at: datetime,
    usd_per_hour: float = 10.0,
    total_usd: float | None = None,
    pool: str | None = "default",
    zone: str | None = "zone-a",
    project: str | None = None,
    job_id: str | None = None,
) -> Story:
    """The ledger charged the instance of `buy-<name>` for this time."""
    price = round(usd_per_hour * USD)
    total = cost_micro_usd(price, max(to_at - from_at, timedelta())) if total_usd is None else round(total_usd * USD)
    shares = (
        () if job_id is None else (CostShare(allocated_micro_usd=total, used_micro_usd=None, job_id=JobId(job_id)),)
    )
    fact = CostAccrued(
        provider_id=provider_id(f"buy-{name}"),
        node_name=name,
        instance_type="p4d.24xlarge",
        capacity_type=CapacityType.SPOT,
        from_at=from_at,
        to_at=to_at,
        total_micro_usd=total,
        idle_micro_usd=0 if shares else total,
        shares=shares,
        price_micro_usd_per_hour=price,
        price_source="story",
        price_at=from_at,
        pool=pool,
        zone=zone,
        bought_for=project,
    )
    return (TimedFact(fact, to_at),)


def at_most(*, day: float | None = None, month: float | None = None, is_hard: bool = True) -> SpendPolicy:
    """Limits in USD."""
    return SpendPolicy(
        day_micro_usd_max=None if day is None else round(day * USD),
        month_micro_usd_max=None if month is None else round(month * USD),
        is_hard=is_hard,
    )


def clusters(**limits: float | bool | None) -> ScalingPolicy:
    """A policy with these limits for the whole cluster, in USD."""
    return ScalingPolicy(limits=LimitsPolicy(spend=at_most(**limits)))  # type: ignore[arg-type]
