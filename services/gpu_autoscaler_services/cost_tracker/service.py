"""Charges each instance from launch to termination, allocates the cost, and watches job budgets.

The ledger in the store is written first; a span is confirmed when its own fact comes back from the stream.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import ClassVar

import msgspec
import structlog
from prometheus_client import Gauge

from gpu_autoscaler.core.limits.accrual import span_micro_usd, split_cost, thresholds_crossed
from gpu_autoscaler.core.state.ledger import PERIODS_KEPT, period_start
from gpu_autoscaler.events.cost import ChargedUntil, CostAccrued, CostBudgetCrossed, CostLedgerReported, SpentByJob
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSummarized
from gpu_autoscaler.events.job import JobFinished, JobQueued, JobResynced
from gpu_autoscaler.events.node import (
    NodeGone,
    NodeInstanceListed,
    NodeInstanceObserved,
    NodeListed,
    NodeObserved,
    NodeWatched,
)
from gpu_autoscaler.events.pod import PodGone, PodListed, PodObserved
from gpu_autoscaler.events.scaling import (
    ScalingLaunchRefused,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
    ScalingOrderResynced,
)
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.store.protocol import LastCharge, Store
from gpu_autoscaler_services.cost_tracker.bills import Bill, BillMemory, Bills, Price, confirmed_until
from gpu_autoscaler_services.cost_tracker.holdings import GpuWindows, HeldPods, Holdings, Utilization
from gpu_autoscaler_services.cost_tracker.housekeeping import Housekeeping

log = structlog.get_logger()

# Of a running instance; the last span ends with the instance. A span has all minutes since the last one: a span a
# minute of 1,000 instances is up to 2.6 GiB a day on the stream, and whoever decides counts the time since the last
# span by itself (core/limits/spend.py). Less than the 15 minutes after which releases since 0.2 take the ledger for
# stale.
SPAN_SECONDS_MIN, SPAN_SECONDS_MAX = 60.0, 600.0
SPANS_PER_MINUTE_MAX = 100  # of all instances; more of them have longer spans
PUBLISHED_COUNT_MAX = 500  # spans per tick
BUDGET_MARKS = (0.8, 1.0)  # soft and hard: docs/decisions.md#spend-budgets
RETENTION = timedelta(hours=6)  # of pods on nodes that are not billed
CLEANUP_INTERVAL = timedelta(minutes=5)


class _Memory(msgspec.Struct, kw_only=True):
    """What a snapshot keeps besides the state. Only read with the same fields: `restore_memory` ignores any other."""

    bills: BillMemory
    held: HeldPods
    windows: GpuWindows = {}
    marks_published: set[str | None]  # by condition
    ledger_reported_at: Instant | None


_memory_decoder = msgspec.msgpack.Decoder(_Memory)


class CostTracker:
    """Charges instances. What was charged is in the store, which decides; what was seen is in the tracker's own
    snapshots and in the streams behind them.
    """

    name: ClassVar[str] = "cost_tracker"
    consumes: ClassVar[tuple[type[Fact], ...]] = (CostAccrued,)
    folds: ClassVar[tuple[type[Fact], ...]] = (
        NodeObserved,
        NodeGone,
        NodeListed,
        NodeInstanceObserved,
        NodeInstanceListed,
        NodeWatched,
        PodObserved,
        PodGone,
        PodListed,
        JobQueued,
        JobFinished,
        JobResynced,
        GpuNodeSummarized,
        ScalingNodeOrdered,
        ScalingNodeLaunched,
        ScalingLaunchRefused,
        ScalingNodeTerminated,
        ScalingOrderResynced,
        CostBudgetCrossed,
        CostLedgerReported,
    )
    publishes: ClassVar[tuple[type[Fact], ...]] = (CostAccrued, CostBudgetCrossed, CostLedgerReported)
    urgent: ClassVar[tuple[type[Fact], ...]] = (ScalingNodeTerminated,)
    tick_seconds: ClassVar[float | None] = 5.0

    def __init__(
        self,
        view: StateView,
        store: Store,
        *,
        instances_without_price: Gauge,
        housekeeping: Housekeeping | None = None,  # None: the store keeps everything
    ) -> None:
        self._view = view
        self._store = store
        self._housekeeping = housekeeping
        self._instances_without_price = instances_without_price
        self._bills = Bills()
        self._holdings = Holdings()
        self._utilization = Utilization()
        self._charges: dict[ProviderId, LastCharge] = {}
        self._spent: dict[JobId, int] = {}
        self._is_loaded = False
        self._open: tuple[tuple[Bill, ...], tuple[Bill, ...]] | None = (
            None  # all bills, and those not paid to their end
        )
        self._without_price: set[ProviderId] = set()
        self._marks_published: set[str | None] = set()  # by condition
        self._to_check: set[JobId] = set()  # jobs that may have crossed an unpublished mark
        self._cleaned_at: datetime | None = None
        self._ledger_reported_at: datetime | None = None

    def on_folded(self, recorded: Sequence[Recorded]) -> None:
        """Remember instances and pods that the state forgets before they are charged, and published marks."""
        self._bills.note(recorded)
        self._holdings.note(recorded)
        self._utilization.note(recorded)
        for item in recorded:
            if isinstance(item.fact, CostBudgetCrossed):
                self._marks_published.add(item.fact.condition())
            elif isinstance(item.fact, CostLedgerReported):
                self._ledger_reported_at = item.fact.reported_at
            elif isinstance(item.fact, JobQueued):  # its budget is known from now on
                self._to_check.add(item.fact.job_id)

    def encode_memory(self) -> bytes:
        memory = _Memory(
            bills=self._bills.memory,
            held=self._holdings.memory,
            windows=self._utilization.memory,
            marks_published=self._marks_published,
            ledger_reported_at=self._ledger_reported_at,
        )
        return msgspec.msgpack.encode(memory)

    def restore_memory(self, encoded: bytes) -> None:
        try:
            memory = _memory_decoder.decode(encoded)
        except msgspec.MsgspecError as exc:
            log.warning("memory of another version ignored, streams are read", error=str(exc))
            return
        self._bills, self._holdings = Bills(memory.bills), Holdings(memory.held)
        self._utilization = Utilization(memory.windows)
        self._marks_published, self._ledger_reported_at = memory.marks_published, memory.ledger_reported_at

    async def on_fact(self, recorded: Recorded) -> list[Fact]:
        """Confirm our own span: the stream has it."""
        if isinstance(recorded.fact, CostAccrued):
            await self._store.confirm_charge(recorded.fact)
        return []

    async def on_tick(self, now: datetime) -> list[Fact]:
        """Charge what is due; return the charges that the stream is not known to have, and crossed budget marks."""
        if not self._is_loaded:
            ended = [bill.provider_id for bill in self._bills.all() if bill.terminated_at is not None]
            self._charges = dict(await self._store.last_charges(ended))
            self._spent = dict(await self._store.spent_by_job())
            self._to_check.update(self._spent)
            for charge in self._charges.values():
                if _is_open(charge, now):
                    self._bills.reopen(charge)
            self._is_loaded, self._open = True, None
        unpaid = self._unpaid()
        seconds_min = span_seconds(len(unpaid))
        spans = [span for bill in unpaid if (span := self._due(bill, now, seconds_min)) is not None]
        if spans:
            # Read again after a failure, and if another tracker was faster.
            self._is_loaded = False
            if await self._store.charge(spans) == len(spans):
                self._charged(spans)
                self._is_loaded = True
        self._forget(now)
        if self._housekeeping is not None:
            await self._housekeeping.step(now)
        # The sums state up to when each instance is included, so a reader counts no span twice in either order.
        sums = await self._ledger_sums(now) if self._is_loaded else ()
        unconfirmed = await self._store.unconfirmed_charges(PUBLISHED_COUNT_MAX)
        # Marks first: after a crash in between the spans are published again, and their jobs checked again.
        return [*sums, *await self._budgets(unconfirmed, now), *unconfirmed]

    async def _ledger_sums(self, now: datetime) -> tuple[CostLedgerReported, ...]:
        """Return all sums of the ledger once a day, and on a new stream; nothing if today's are published.

        The unfinished jobs come from the store: a new stream does not have them yet, and their budgets must count on.
        """
        # The memory outlives the streams, the state does not: without a report in it they are new.
        is_in_stream = self._view.state.ledger_reported_at is not None
        reported_at = self._ledger_reported_at if is_in_stream else None
        if reported_at is not None and period_start("day", reported_at) >= period_start("day", now):
            return ()
        open_jobs = {row.spec.job_id for row in await self._store.unfinished_jobs()}
        sums = CostLedgerReported(
            spent=tuple(await self._store.spent_by_period(period_start("month", now) - timedelta(days=1))),
            charged=tuple(
                ChargedUntil(
                    provider_id=provider_id,
                    until_at=max(charge.last.from_at, charge.last.to_at),
                    is_final=charge.last.is_final,
                )
                for provider_id, charge in sorted(self._charges.items())
                if _is_open(charge, now) or now - charge.last.to_at < RETENTION
            ),
            jobs=tuple(
                SpentByJob(job_id=job_id, micro_usd=spent)
                for job_id, spent in sorted(self._spent.items())
                if job_id in open_jobs
            ),
            reported_at=now,
        )
        return (sums,)

    def _unpaid(self) -> tuple[Bill, ...]:
        """Return the bills that are not charged to their end; recomputed only after a change."""
        bills = self._bills.all()
        if self._open is None or self._open[0] is not bills:
            self._open = bills, tuple(bill for bill in bills if not self._is_paid(bill))
        return self._open[1]

    def _is_paid(self, bill: Bill) -> bool:
        charge = self._charges.get(bill.provider_id)
        return charge is not None and charge.last.to_at == bill.terminated_at

    def _due(self, bill: Bill, now: datetime, seconds_min: float) -> CostAccrued | None:
        """Return the next span of an instance; None if nothing is due or the price is unknown."""
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
        if bill.terminated_at is None and (to_at - from_at).total_seconds() < seconds_min:
            return None
        charged = 0 if charge is None else charge.total_micro_usd
        total = span_micro_usd(
            price.micro_usd_per_hour, launched_at=launched_at, to_at=to_at, charged_micro_usd=charged
        )
        return self._span(bill, charge, price, total, from_at, to_at)

    def _span(
        self, bill: Bill, charge: LastCharge | None, price: Price, total: int, from_at: datetime, to_at: datetime
    ) -> CostAccrued:
        state, shape = self._view.state, self._bills.shape(bill.provider_id)
        parts = split_cost(
            total,
            [] if shape is None else self._holdings.on_node(shape, state),
            units=0 if shape is None else shape.units,
            from_at=from_at,
            to_at=to_at,
            used_units=None if shape is None else self._utilization.used_units(shape, from_at, to_at),
        )
        account = self._bills.account(bill, charge)
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
            is_final=bill.terminated_at is not None,
        )

    def _hold(self, bill: Bill) -> None:
        """Defer the charge of an instance without a price until the price is known."""
        if bill.provider_id not in self._without_price:
            self._without_price.add(bill.provider_id)
            log.warning(
                "charge deferred, price unknown",
                provider_id=bill.provider_id,
                instance_type=bill.instance_type,
                step="configure a price for this instance type",
            )

    def _charged(self, spans: Sequence[CostAccrued]) -> None:
        """Continue from the ends of these spans, which the ledger has."""
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
        self._instances_without_price.set(len(self._without_price))

    def _forget(self, now: datetime) -> None:
        """Forget bills and pods that are charged, so that memory is bounded by the cluster's size."""
        self._instances_without_price.set(len(self._without_price))
        if self._cleaned_at is not None and now - self._cleaned_at < CLEANUP_INTERVAL:
            return
        self._cleaned_at = now
        for bill in self._bills.all():
            charge, end = self._charges.get(bill.provider_id), bill.terminated_at
            is_over = self._is_paid(bill) and end is not None and now - end > RETENTION
            # Its end was never reported. A living instance is in the cloud's list, and was charged since.
            is_lost = end is None and charge is not None and not _is_open(charge, now)
            if is_over or (is_lost and bill.provider_id not in self._view.state.instances_seen_at):
                self._bills.close(bill.provider_id)
                self._charges.pop(bill.provider_id, None)
        shapes = [self._bills.shape(bill.provider_id) for bill in self._unpaid()]
        billed = {shape.name for shape in shapes if shape is not None}
        self._utilization.keep(shape.node_uid for shape in shapes if shape is not None)
        for node_name in self._holdings.nodes():
            if node_name not in billed:
                self._holdings.forget(node_name, now - RETENTION, self._view.state)
        jobs = {*self._view.state.jobs, *self._to_check, *self._holdings.jobs()}
        self._marks_published = {mark for mark in self._marks_published if _job_of_mark(mark) in jobs}

    async def _budgets(self, unconfirmed: Sequence[CostAccrued], now: datetime) -> list[Fact]:
        """Return the budget marks that jobs have crossed and that the stream does not have.

        The store has the limit of a job of these spans that the state has forgotten: it ended while no tracker ran.
        """
        crossed: list[Fact] = []
        charged = {share.job_id for span in unconfirmed for share in span.shares if share.job_id is not None}
        for job_id in sorted(self._to_check | charged):
            record, spent = self._view.state.jobs.get(job_id), self._spent.get(job_id, 0)
            spec = None if record is None or record.queued is None else record.queued.spec
            if spec is None and job_id in charged:
                row = await self._store.job(job_id)
                spec = None if row is None else row.spec
            limit = None if spec is None else spec.budget_limit_micro_usd
            unpublished = [] if limit is None else self._unpublished(job_id, spent, limit, now)
            crossed += unpublished
            if not unpublished:  # else checked again until the stream has it
                self._to_check.discard(job_id)
        return crossed

    def _unpublished(self, job_id: JobId, spent: int, limit: int, now: datetime) -> list[CostBudgetCrossed]:
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
        return [fact for fact in facts if fact.condition() not in self._marks_published]


def span_seconds(instances_count: int) -> float:
    """Return the minimum length of a span while this many instances run."""
    return min(SPAN_SECONDS_MAX, max(SPAN_SECONDS_MIN, 60.0 * instances_count / SPANS_PER_MINUTE_MAX))


def _job_of_mark(condition: str | None) -> str | None:
    """Return the job of a mark, by its condition: budget/job/<job>/<limit>/<mark>."""
    return None if condition is None else condition.removeprefix("budget/job/").rsplit("/", 2)[0]


def _price_of(charge: LastCharge) -> Price:
    """Return the price of the first charge, which an instance keeps: its spans add up at one price only."""
    last = charge.last
    return Price(micro_usd_per_hour=last.price_micro_usd_per_hour, source=last.price_source, at=last.price_at)


def _is_open(charge: LastCharge, now: datetime) -> bool:
    """True unless the instance has ended, or has not been charged for as long as sums of spend are kept."""
    return not charge.last.is_final and now - charge.last.to_at < PERIODS_KEPT
