"""Publishes what node watchers report, as far as the state does not know it yet.

The watchers fold nothing: this service has the state that tells a new notice from a known one, from a withdrawn one,
and from one that the cloud's queue reported first.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from datetime import datetime
from itertools import islice
from typing import ClassVar

import msgspec

from gpu_autoscaler.bus.nats.requests import Request
from gpu_autoscaler.cloudmeta.notices import notice_facts, rebalance_fact
from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.cloudmeta.reports import (
    DRAINED_COUNT_MAX,
    NodeReport,
    ReportAnswer,
    read_report,
    reporting_instance,
)
from gpu_autoscaler.core.state.retention import is_past_retention
from gpu_autoscaler.core.state.state import ClusterState, NoticeRecord
from gpu_autoscaler.events.catalog import INSTANCE_FACTS
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, SpotRebalanceRecommended
from gpu_autoscaler.model.errors import InvalidFact
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.runtime.projection import StateView

INSTANCES_WAITING_MAX = 20_000
REPORTS_AT_ONCE_MAX = 256  # published together

Answer = Callable[[bytes], Awaitable[None]]


class ReceivedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report with the instance that its subject names."""

    provider_id: ProviderId
    report: NodeReport
    received_at: datetime  # by our clock: that of the node does not count
    answer: Answer


class ReportInbox:
    """The latest unread report of each instance: one that reports too often replaces its own only."""

    def __init__(self, now: Callable[[], datetime], on_outcome: Callable[[str], None] = lambda _: None) -> None:
        """`on_outcome`: refused, replaced, dropped."""
        self._now = now
        self._on_outcome = on_outcome
        self._reports: OrderedDict[ProviderId, ReceivedReport] = OrderedDict()
        self._arrived = asyncio.Event()
        self._refusals: set[asyncio.Future[None]] = set()

    def receive(self, request: Request) -> None:
        """Store a report; refuse an invalid one, and drop it if too many instances wait: the watcher repeats it."""
        try:
            provider_id, report = reporting_instance(request.subject), read_report(request.payload)
        except InvalidFact as exc:
            self._on_outcome("refused")
            self._refuse(request, str(exc))
            return
        if provider_id not in self._reports and len(self._reports) >= INSTANCES_WAITING_MAX:
            self._on_outcome("dropped")
            return
        if provider_id in self._reports:
            self._on_outcome("replaced")
        self._reports[provider_id] = ReceivedReport(
            provider_id=provider_id, report=report, received_at=self._now(), answer=request.answer
        )
        self._arrived.set()

    def _refuse(self, request: Request, error: str) -> None:
        answering = asyncio.ensure_future(request.answer(msgspec.json.encode(ReportAnswer(error=error))))
        self._refusals.add(answering)
        answering.add_done_callback(self._refusals.discard)

    async def __aiter__(self) -> AsyncIterator[Sequence[ReceivedReport]]:
        """Yield what has arrived, oldest first, at most REPORTS_AT_ONCE_MAX at a time; endlessly."""
        while True:
            await self._arrived.wait()
            batch = [self._reports.pop(key) for key in tuple(islice(self._reports, REPORTS_AT_ONCE_MAX))]
            if not self._reports:
                self._arrived.clear()
            yield batch


class NodeGateway:
    """Turns reports into facts. Keeps nothing: a watcher repeats its report until the state knows all of it."""

    name: ClassVar[str] = "node_gateway"
    consumes: ClassVar[tuple[type[Fact], ...]] = ()
    folds: ClassVar[tuple[type[Fact], ...]] = INSTANCE_FACTS
    publishes: ClassVar[tuple[type[Fact], ...]] = (SpotNoticeReceived, SpotNoticeWithdrawn, SpotRebalanceRecommended)
    urgent: ClassVar[tuple[type[Fact], ...]] = ()
    tick_seconds: ClassVar[float | None] = None

    def __init__(self, view: StateView, inbox: ReportInbox, on_outcome: Callable[[str], None] = lambda _: None) -> None:
        """`on_outcome`: known, published."""
        self._view = view
        self._inbox = inbox
        self._on_outcome = on_outcome

    def sources(self) -> Sequence[AsyncIterator[Sequence[ReceivedReport]]]:
        """Return the reports."""
        return [aiter(self._inbox)]

    async def on_item(self, item: Sequence[ReceivedReport]) -> Sequence[Fact]:
        """Return what the state does not know yet, and answer every report."""
        state = self._view.state
        names = {node.provider_id: node.name for node in state.nodes.values() if node.provider_id is not None}
        known: defaultdict[ProviderId, list[NoticeRecord]] = defaultdict(list)
        for record in state.notices.values():
            known[record.notice.provider_id].append(record)
        facts: list[Fact] = []
        for received in item:
            provider_id = received.provider_id
            news = _news(received, names.get(provider_id), known.get(provider_id, ()), state)
            self._on_outcome("published" if news else "known")
            facts += news
            drained = _drained(state) if received.report.needs_drained else ()
            await received.answer(msgspec.json.encode(ReportAnswer(is_settled=not news, drained=drained)))
        return facts


def _news(
    received: ReceivedReport, node_name: str | None, known: Collection[NoticeRecord], state: ClusterState
) -> list[Fact]:
    """Return the facts of a report that the state lacks."""
    report, provider_id = received.report, received.provider_id
    shown = [ReclaimNotice(notice.kind, notice.provider_event, notice.reclaim_at) for notice in report.shown]
    facts = notice_facts(provider_id, node_name, shown, tuple(known), received.received_at)
    if report.rebalance_at is not None and not is_past_retention(report.rebalance_at, received.received_at):
        known_at = state.rebalance_recommended_at.get(provider_id)
        if known_at is None or known_at < report.rebalance_at:
            facts.append(rebalance_fact(provider_id, node_name, report.rebalance_at))
    return facts


def _drained(state: ClusterState) -> tuple[ProviderId, ...]:
    """Return the instances that were drained last."""
    facts = [record.drained for record in state.drains.values() if record.drained is not None]
    drained = [fact.provider_id for fact in facts if fact.provider_id is not None]
    return tuple(drained[-DRAINED_COUNT_MAX:])
