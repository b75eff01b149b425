"""Charges each instance from launch to termination, says who owes it, and when a job's budget is crossed.

The ledger in the store is written first; a span counts as told when its own fact comes back from the stream.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import ClassVar

import structlog
from prometheus_client import Gauge

from gpu_autoscaler.core.folding.ledger import period_start
from gpu_autoscaler.core.spending.accrual import busy_gpus, thresholds_crossed, span_micro_usd, split
from gpu_autoscaler.events.cost import ChargedUntil, CostAccrued, CostBudgetCrossed, CostLedgerTold, SpentByJob
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarised
from gpu_autoscaler.events.job import JobFinished, JobQueued
from gpu_autoscaler.events.node import NodeGone, NodeInstanceListed, NodeInstanceObserved, NodeListed, NodeObserved
from gpu_autoscaler.events.pod import PodGone, PodListed, PodObserved
from gpu_autoscaler.events.scaling import (
    ScalingLaunchRefused,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
)
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.store.protocol import LastCharge, Store
from gpu_autoscaler_services.cost_tracker.bills import Bill, Bills, NodeShape, Price, confirmed_until
from gpu_autoscaler_services.cost_tracker.holdings import Holdings

log = structlog.get_logger()

SPAN_SECONDS_MIN = 60.0  # of an instance that runs on; its last span ends when it ends
TOLD_COUNT_MAX = 500  # spans told in one tick
BUDGET_MARKS = (0.8, 1.0)  # CHECKLIST S116: soft 80 %, hard 100 %
FORGOTTEN = timedelta(hours=6)  # pods of nodes that nobody bills us for
TIDIED = timedelta(minutes=5)  # between two looks at what may be forgotten


class CostTracker:
    """Turns the cloud's words into money. All that must survive is in the store; the rest is read again at start."""

    name: ClassVar[str] = "cost_tracker"
    consumes: ClassVar[tuple[type[Fact], ...]] = (CostAccrued,)
    folds: ClassVar[tuple[type[Fact], ...]] = (
        NodeObserved,
        NodeGone,
        NodeListed,
        NodeInstanceObserved,
        NodeInstanceListed,
        PodObserved,
        PodGone,
        PodListed,
        JobQueued,
        JobFinished,
        GpuNodeSummarised,
        ScalingNodeOrdered,
        ScalingNodeLaunched,
        ScalingLaunchRefused,
        ScalingNodeTerminated,
        CostBudgetCrossed,
        CostLedgerTold,
    )
    publishes: ClassVar[tuple[type[Fact], ...]] = (CostAccrued, CostBudgetCrossed, CostLedgerTold)
    urgent: ClassVar[tuple[type[Fact], ...]] = (ScalingNodeTerminated,)
    tick_seconds: ClassVar[float | None] = 5.0
    starts_from_snapshot: ClassVar[bool] = False  # bills are remembered longer than the state remembers instances

    def __init__(self, view: StateView, store: Store, *, instances_without_price: Gauge) -> None:
        self._view = view
        self._store = store
        self._instances_without_price = instances_without_price
        self._bills = Bills()
        self._holdings = Holdings()
        self._charges: dict[ProviderId, LastCharge] = {}
        self._spent: dict[JobId, int] = {}
        self._is_loaded = False
        self._open: tuple[tuple[Bill, ...], tuple[Bill, ...]] | None = (
            None  # all bills, and those not paid to their end
        )
        self._without_price: set[ProviderId] = set()
        self._marks_told: set[str | None] = set()  # by condition
        self._to_look_at: set[JobId] = set()  # jobs whose budget may be crossed, and nobody was told of
        self._tidied_at: datetime | None = None
        self._ledger_told_at: datetime | None = None

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember instances and pods that the state forgets before they are charged, and marks that were told."""
        self._bills.note(recorded)
        self._holdings.note(recorded)
        for item in recorded:
            if isinstance(item.fact, CostBudgetCrossed):
                self._marks_told.add(item.fact.condition())
            elif isinstance(item.fact, CostLedgerTold):
                self._ledger_told_at = item.fact.told_at
            elif isinstance(item.fact, JobQueued):  # its budget is known from now on
                self._to_look_at.add(item.fact.job_id)

    async def on_fact(self, recorded: Recorded) -> list[Fact]:
        """Our own span came back: the stream has it."""
        if isinstance(recorded.fact, CostAccrued):
            await self._store.confirm_charge(recorded.fact)
        return []

    async def on_tick(self, now: datetime) -> list[Fact]:
        """Charge what is due, and tell what is charged and not known to be on the stream."""
        if not self._is_loaded:
            self._charges = dict(await self._store.last_charges())
            self._spent = dict(await self._store.spent_by_job())
            self._to_look_at.update(self._spent)
            self._is_loaded, self._open = True, None
        spans = [span for bill in self._unpaid() if (span := self._due(bill, now)) is not None]
        if spans:
            # Read anew after a failure, and where another tracker was first.
            self._is_loaded = False
            if await self._store.charge(spans) == len(spans):
                self._charged(spans)
                self._is_loaded = True
        self._forget(now)
        # A span that the sums have in them already is known to be, whichever of the two is heard first.
        told = await self._ledger_told(now) if self._is_loaded else ()
        return [*told, *await self._store.unconfirmed_charges(TOLD_COUNT_MAX), *self._budgets(now)]

    async def _ledger_told(self, now: datetime) -> tuple[CostLedgerTold, ...]:
        """All sums of the ledger, once a day, for whoever never heard them; nothing where today they were told.

        Whose job has not ended the store knows: on a new stream nobody has said so yet, and its budget counts on.
        """
        if self._ledger_told_at is not None and period_start("day", self._ledger_told_at) >= period_start("day", now):
            return ()
        open_jobs = {row.spec.job_id for row in await self._store.unfinished_jobs()}
        told = CostLedgerTold(
            spent=tuple(await self._store.spent_by_period(period_start("month", now) - timedelta(days=1))),
            charged=tuple(
                ChargedUntil(provider_id=provider_id, until_at=max(charge.last.from_at, charge.last.to_at))
                for provider_id, charge in sorted(self._charges.items())
                if now - charge.last.to_at < FORGOTTEN
            ),
            jobs=tuple(
                SpentByJob(job_id=job_id, micro_usd=spent)
                for job_id, spent in sorted(self._spent.items())
                if job_id in open_jobs
            ),
            told_at=now,
        )
        return (told,)

    def _unpaid(self) -> tuple[Bill, ...]:
        """Bills that are not paid to their end. Most are, so they are sought only after a change."""
        bills = self._bills.all()
        if self._open is None or self._open[0] is not bills:
            self._open = bills, tuple(bill for bill in bills if not self._is_paid(bill))
        return self._open[1]

    def _is_paid(self, bill: Bill) -> bool:
        charge = self._charges.get(bill.provider_id)
        return charge is not None and charge.last.to_at == bill.terminated_at

    def _due(self, bill: Bill, now: datetime) -> CostAccrued | None:
        """The next span of an instance; None where nothing is due yet, or nobody knows the price."""
        charge = self._charges.get(bill.provider_id)
        price = bill.price if charge is None else _price_of(charge)
        if price is None:
            self._hold(bill)
            return None
        launched_at = bill.launched_at if charge is None else charge.from_at
        from_at = bill.launched_at if charge is None else charge.last.to_at
        to_at = confirmed_until(bill, self._view.state, now)
        if to_at is None or to_at == from_at:
            return None
        if bill.terminated_at is None and (to_at - from_at).total_seconds() < SPAN_SECONDS_MIN:
            return None
        charged = 0 if charge is None else charge.total_micro_usd
        total = span_micro_usd(
            price.micro_usd_per_hour, launched_at=launched_at, to_at=to_at, charged_micro_usd=charged
        )
        return self._span(bill, price, total, from_at, to_at)

    def _span(self, bill: Bill, price: Price, total: int, from_at: datetime, to_at: datetime) -> CostAccrued:
        state, shape = self._view.state, self._bills.shape(bill.provider_id)
        parts = split(
            total,
            [] if shape is None else self._holdings.on_node(shape, state),
            units=0 if shape is None else shape.units,
            from_at=from_at,
            to_at=to_at,
            used_units=None if shape is None else self._used_units(shape, from_at, to_at),
        )
        account = self._bills.account(bill)
        return CostAccrued(
            provider_id=bill.provider_id,
            node_name=None if shape is None else shape.name,
            instance_type=bill.instance_type,
            capacity_type=bill.capacity_type,
            from_at=from_at,
            to_at=to_at,
            total_micro_usd=total,
            idle_micro_usd=parts.idle_micro_usd,
            shares=parts.shares,
            price_micro_usd_per_hour=price.micro_usd_per_hour,
            price_source=price.source,
            price_at=price.at,
            pool=account.pool,
            zone=account.zone,
            bought_for=account.project,
        )

    def _used_units(self, shape: NodeShape, from_at: datetime, to_at: datetime) -> float | None:
        """How much of the node's GPUs was busy on average, in its units; None: unknown, or it has none."""
        window = self._view.state.telemetry.get(shape.node_uid)
        busy = busy_gpus(window, from_at=from_at, to_at=to_at) if shape.gpus.has_gpus else None
        if busy is None or window is None or not shape.gpus.slices:
            return busy
        return busy / len(window.gpus) * shape.units

    def _hold(self, bill: Bill) -> None:
        """No price is not free: the time is charged once somebody says it."""
        if bill.provider_id not in self._without_price:
            self._without_price.add(bill.provider_id)
            log.warning(
                "instance without price is not charged; make the provider tell its price",
                provider_id=bill.provider_id,
                instance_type=bill.instance_type,
            )

    def _charged(self, spans: Sequence[CostAccrued]) -> None:
        """The ledger has these spans: go on from their ends."""
        self._open = None
        for span in spans:
            before = self._charges.get(span.provider_id)
            self._charges[span.provider_id] = LastCharge(
                last=span,
                from_at=span.from_at if before is None else before.from_at,
                total_micro_usd=span.total_micro_usd + (0 if before is None else before.total_micro_usd),
            )
            self._without_price.discard(span.provider_id)
            if span.node_name is not None:
                self._holdings.forget(span.node_name, span.to_at, self._view.state)
            for share in span.shares:
                if share.job_id is not None:
                    self._spent[share.job_id] = self._spent.get(share.job_id, 0) + share.allocated_micro_usd
                    self._to_look_at.add(share.job_id)
        self._instances_without_price.set(len(self._without_price))

    def _forget(self, now: datetime) -> None:
        """Keep memory as large as the cluster, not as long as its history."""
        self._instances_without_price.set(len(self._without_price))
        if self._tidied_at is not None and now - self._tidied_at < TIDIED:
            return
        self._tidied_at = now
        for bill in self._bills.all():
            if self._is_paid(bill) and bill.terminated_at is not None and now - bill.terminated_at > FORGOTTEN:
                self._bills.close(bill.provider_id)
        for node_name in self._holdings.nodes():
            self._holdings.forget(node_name, now - FORGOTTEN, self._view.state)

    def _budgets(self, now: datetime) -> list[Fact]:
        """Marks that jobs have crossed and nobody was told of, by the stream's own account."""
        crossed: list[Fact] = []
        for job_id in sorted(self._to_look_at):
            record, spent = self._view.state.jobs.get(job_id), self._spent.get(job_id, 0)
            limit = None if record is None or record.queued is None else record.queued.spec.budget_limit_micro_usd
            untold = [] if limit is None else self._untold(job_id, spent, limit, now)
            crossed += untold
            if not untold:  # else looked at again until the stream has it
                self._to_look_at.discard(job_id)
        return crossed

    def _untold(self, job_id: JobId, spent: int, limit: int, now: datetime) -> list[CostBudgetCrossed]:
        facts = (
            CostBudgetCrossed(
                scope="job",
                scope_id=job_id,
                mark_ratio=mark,
                spent_micro_usd=spent,
                limit_micro_usd=limit,
                crossed_at=now,
            )
            for mark in thresholds_crossed(spent, limit, BUDGET_MARKS)
        )
        return [fact for fact in facts if fact.condition() not in self._marks_told]


def _price_of(charge: LastCharge) -> Price:
    """An instance keeps the price that it was first charged at: spans of a lifetime add up at one price only."""
    last = charge.last
    return Price(micro_usd_per_hour=last.price_micro_usd_per_hour, source=last.price_source, at=last.price_at)
