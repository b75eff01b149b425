"""Role `node`: watches the metadata of the node that this process runs on, and reports it to the node gateway.

It folds nothing and stores nothing. The gateway has the state, and answers whether a report is settled; until then it
is repeated, so that neither a restart of any part nor a lost message loses a notice.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

import msgspec
import structlog

from gpu_autoscaler.cloudmeta.notices import is_early
from gpu_autoscaler.cloudmeta.protocol import InstanceMetadata, ReleasesEvents
from gpu_autoscaler.cloudmeta.reports import NOTICES_COUNT_MAX, NodeReport, ReportAnswer, ShownNotice, report_subject
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.runtime.retry import Backoff
from gpu_autoscaler_services.spot_watcher.metadata_poller import HINT_EVERY_POLLS, POLL_SECONDS_MAX, Unreadable

# A notice leaves two minutes, GCP's fifteen seconds; polling the host-local address may use one of them.
POLL_SECONDS = 1.0
ANSWER_SECONDS_MAX = 2.0  # of a report
BACKOFF = Backoff(first_seconds=0.25, seconds_max=5.0)
# While notices are shown: the state may have lost them with a stream, and Azure waits for drained machines.
REPEAT_SECONDS = 5.0
# A report that is never settled is given up after this long, until it changes: the gateway ignores a part of it.
UNSETTLED_SECONDS_MAX = 900.0
REFUSED_SECONDS = 60.0  # until a refused report is repeated
STOP_SECONDS_MAX = 5.0  # for a notice in hand

log = structlog.get_logger()


class ReportLink(Protocol):
    """The connection to the broker (`bus/nats/requests.py: RequestLink`)."""

    connections_count: int

    @property
    def is_up(self) -> bool:
        """True while connected."""

    @property
    def failure(self) -> str | None:
        """Why there is no connection."""

    def hurry(self) -> None:
        """Reconnect soon: there is something to send."""

    async def run(self) -> None:
        """Stay connected until canceled."""

    async def request(self, subject: str, payload: bytes, seconds_max: float) -> bytes:
        """Return the answer. Raises TransientError without one."""


OpenLink = Callable[[ProviderId, Callable[[], None]], ReportLink]


class NodeReporter:
    """Polls one instance's metadata, and reports what changed. At rest it sends nothing."""

    def __init__(
        self,
        metadata: InstanceMetadata,
        open_link: OpenLink,
        unreadable: Unreadable,
        *,
        node_name: str | None,
        now: Callable[[], datetime],
        on_broker: Callable[[str | None], None] = lambda _: None,
        on_refused: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        """`open_link`: the connection of an instance, and what it calls when it opens or breaks.

        `on_broker`: why there is no connection, None: there is one. `on_refused`: why the gateway refuses reports.
        """
        self._metadata = metadata
        self._open_link = open_link
        self._unreadable = unreadable
        self._own_name = node_name or "this node"
        self._now = now
        self._on_broker = on_broker
        self._on_refused = on_refused
        self._report: NodeReport | None = None  # None: the metadata was not read yet
        self._rebalance_at: datetime | None = None
        self._changed = asyncio.Event()  # the report or the connection
        self._settled = asyncio.Event()
        self._stopping = asyncio.Event()
        self._drained: frozenset[ProviderId] = frozenset()

    def stop(self) -> None:
        """Report nothing more, except a notice in hand."""
        self._stopping.set()

    async def run(self) -> None:
        """Poll and report until `stop`."""
        work = asyncio.create_task(self._work())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and self._report is not None and self._report.shown:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS_MAX):
                        await self._settled.wait()
        finally:
            stopping.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self) -> None:
        provider_id = await self._instance()
        link: ReportLink | None = None

        def on_change() -> None:
            self._on_broker(None if link is None else link.failure)
            self._changed.set()

        link = self._open_link(provider_id, on_change)
        async with asyncio.TaskGroup() as group:
            group.create_task(link.run())
            group.create_task(self._poll_all(provider_id))
            group.create_task(self._report_all(report_subject(provider_id), link))

    async def _instance(self) -> ProviderId:
        """Return our instance, as soon as the metadata names it."""
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS_MAX):
                    provider_id = await self._metadata.provider_id()
            except (TransientError, TimeoutError) as exc:
                self._unreadable.failed(self._own_name, str(exc) or f"no answer within {POLL_SECONDS_MAX:g} s")
                await asyncio.sleep(POLL_SECONDS)
            else:
                self._unreadable.answered(self._own_name)
                return provider_id

    async def _poll_all(self, provider_id: ProviderId) -> None:
        polls_count = 0
        while True:
            await self._poll(provider_id, with_hint=polls_count % HINT_EVERY_POLLS == 0)
            polls_count += 1
            await asyncio.sleep(POLL_SECONDS)

    async def _poll(self, provider_id: ProviderId, *, with_hint: bool) -> None:
        """Read the metadata once. A failed read changes nothing: it does not mean "no notice"."""
        try:
            async with asyncio.timeout(POLL_SECONDS_MAX):
                notices, now = await self._metadata.reclaim_notices(), self._now()
                shown = [
                    ShownNotice(kind=notice.kind, provider_event=notice.provider_event, reclaim_at=notice.reclaim_at)
                    for notice in notices
                    if not is_early(notice, now)
                ]
                self._show(tuple(shown[:NOTICES_COUNT_MAX]))
                if notices and isinstance(self._metadata, ReleasesEvents):
                    await self._metadata.release(self._drained)
                if with_hint:
                    self._rebalance_at = await self._metadata.rebalance_recommended_at() or self._rebalance_at
                    self._show(tuple(shown[:NOTICES_COUNT_MAX]))
        except (TransientError, TimeoutError) as exc:
            self._unreadable.failed(provider_id, str(exc) or f"no answer within {POLL_SECONDS_MAX:g} s")
        else:
            self._unreadable.answered(provider_id)

    def _show(self, shown: tuple[ShownNotice, ...]) -> None:
        needs_drained = bool(shown) and isinstance(self._metadata, ReleasesEvents)
        report = NodeReport(shown=shown, rebalance_at=self._rebalance_at, needs_drained=needs_drained)
        if report != self._report:
            self._report = report
            self._settled.clear()
            self._changed.set()

    async def _report_all(self, subject: str, link: ReportLink) -> None:
        """Report every change, and everything again after each connect; repeat until it is settled."""
        settled: tuple[NodeReport, int] | None = None
        tries_count, tried_at, wait_seconds = 0, 0.0, None
        while True:
            await self._wait(wait_seconds)
            report, connection, wait_seconds = self._report, link.connections_count, None
            if report is None or ((report, connection) == settled and not report.shown):
                continue
            if not link.is_up:
                if report.shown:
                    link.hurry()
                continue
            if tries_count == 0:
                tried_at = time.monotonic()
            answer = await self._ask(subject, report, link)
            if answer is None:
                tries_count += 1
                wait_seconds = BACKOFF.wait_seconds(tries_count)
                continue
            self._on_refused(answer.error)
            is_settled = answer.is_settled
            if not is_settled and answer.error is None and time.monotonic() - tried_at > UNSETTLED_SECONDS_MAX:
                log.warning("report given up, as it is never settled", report=repr(report))
                is_settled = True
            self._drained = frozenset(answer.drained)
            if is_settled:
                settled, tries_count = (report, connection), 0
                self._settled.set()
                wait_seconds = REPEAT_SECONDS if report.shown else None
            else:
                tries_count += 1
                wait_seconds = REFUSED_SECONDS if answer.error else BACKOFF.wait_seconds(tries_count)

    async def _wait(self, seconds: float | None) -> None:
        """Wait for a change, at most so long; None: without a limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _ask(self, subject: str, report: NodeReport, link: ReportLink) -> ReportAnswer | None:
        """Send the report; None without an answer."""
        try:
            answer = await link.request(subject, msgspec.json.encode(report), ANSWER_SECONDS_MAX)
            return msgspec.json.decode(answer, type=ReportAnswer)
        except (TransientError, msgspec.DecodeError) as exc:
            log.warning("report not answered, retry scheduled", error=str(exc), notices_count=len(report.shown))
            return None
