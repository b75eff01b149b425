"""The watcher of one node: it reports changes, repeats what is not settled, and is silent at rest."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from datetime import timedelta

import msgspec
import pytest
from tests.support.node_watchers import Metadata, until

from gpu_autoscaler.cloudmeta.protocol import ReclaimNotice
from gpu_autoscaler.cloudmeta.reports import NodeReport, ReportAnswer, report_subject
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.runtime.clock import Clock
from gpu_autoscaler_services.spot_watcher import node_reporter
from gpu_autoscaler_services.spot_watcher.metadata_poller import Unreadable
from gpu_autoscaler_services.spot_watcher.node_reporter import NodeReporter

MINE = ProviderId("azure:///subscriptions/s/resourceGroups/g/vm1")
NOTICE = ReclaimNotice("terminate", "event-7", Clock().now() + timedelta(seconds=120))


class Link:
    """A connection whose other side answers as told. The broker's own is in tests/integration/bus."""

    def __init__(self) -> None:
        self.connections_count = 0
        self.answers: list[ReportAnswer | None] = []  # of the next requests; None: no answer; then settled
        self.reports: list[NodeReport] = []
        self.subjects: set[str] = set()
        self.hurries_count = 0
        self.on_change: Callable[[], None] = lambda: None
        self.is_up = False

    @property
    def failure(self) -> str | None:
        """Why it is down."""
        return None if self.is_up else "away"

    def hurry(self) -> None:
        """Count."""
        self.hurries_count += 1

    def connect(self) -> None:
        """Open it."""
        self.is_up, self.connections_count = True, self.connections_count + 1
        self.on_change()

    def lose(self) -> None:
        """Break it."""
        self.is_up = False
        self.on_change()

    async def run(self) -> None:
        """Nothing to do."""
        await asyncio.Event().wait()

    async def request(self, subject: str, payload: bytes, seconds_max: float) -> bytes:
        """Answer, or not."""
        assert seconds_max > 0
        self.subjects.add(subject)
        self.reports.append(msgspec.json.decode(payload, type=NodeReport))
        answer = self.answers.pop(0) if self.answers else ReportAnswer(is_settled=True)
        if answer is None:
            raise TransientError("no answer")
        return msgspec.json.encode(answer)


class AzureLike(Metadata):
    """Metadata of a cloud whose events wait for approval."""

    released: frozenset[ProviderId] = frozenset()

    async def release(self, drained: Collection[ProviderId]) -> None:
        """Take what is drained."""
        self.released = frozenset(drained)


class Rig:
    """A watcher with its metadata and its connection."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata, self.link = metadata, Link()
        self.broker: list[str | None] = []
        self.refused: list[str | None] = []
        self.unreadable: list[dict[str, str]] = []


@asynccontextmanager
async def running(metadata: Metadata | None = None, *, is_connected: bool = True) -> AsyncIterator[Rig]:
    """A watcher that runs."""
    rig = Rig(metadata or Metadata(MINE))

    def open_link(_: ProviderId, on_change: Callable[[], None]) -> Link:
        rig.link.on_change = on_change
        return rig.link

    reporter = NodeReporter(
        rig.metadata,
        open_link,
        Unreadable(lambda unreadable: rig.unreadable.append(dict(unreadable))),
        node_name="n1",
        now=Clock().now,
        on_broker=rig.broker.append,
        on_refused=rig.refused.append,
    )
    work = asyncio.create_task(reporter.run())
    try:
        if is_connected:
            await asyncio.sleep(0.01)
            rig.link.connect()
        yield rig
    finally:
        reporter.stop()
        await work


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second takes 20 ms."""
    for name in ("POLL_SECONDS", "REPEAT_SECONDS", "REFUSED_SECONDS", "STOP_SECONDS_MAX"):
        monkeypatch.setattr(node_reporter, name, getattr(node_reporter, name) / 50.0)


async def test_at_rest_nothing_is_sent_but_one_report_a_connection() -> None:
    """That one withdraws what an earlier process reported."""
    async with running() as rig:
        await until(lambda: rig.link.reports)
        await asyncio.sleep(1.0)  # 50 polls
        assert rig.link.reports == [NodeReport()]
        assert rig.link.subjects == {report_subject(MINE)}
        rig.link.lose()
        rig.link.connect()
        await until(lambda: len(rig.link.reports) == 2)
        assert rig.link.hurries_count == 0


async def test_a_notice_is_repeated_until_it_is_settled() -> None:
    """Whatever is lost on the way."""
    async with running() as rig:
        await until(lambda: rig.link.reports)
        rig.link.answers = [None, ReportAnswer(), None, ReportAnswer(is_settled=True)]
        rig.metadata.notices = (NOTICE,)
        await until(lambda: not rig.link.answers)
        assert {report.shown[0].provider_event for report in rig.link.reports[1:]} == {"event-7"}


async def test_a_notice_hurries_the_connection() -> None:
    """A watcher without one would wait half a minute."""
    async with running(is_connected=False) as rig:
        rig.metadata.notices = (NOTICE,)
        await until(lambda: rig.link.hurries_count)
        assert rig.link.reports == []
        rig.link.connect()
        await until(lambda: rig.link.reports)


async def test_a_report_that_is_never_settled_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not repeated for ever; a change is reported as ever."""
    monkeypatch.setattr(node_reporter, "UNSETTLED_SECONDS_MAX", 0.2)
    async with running() as rig:
        await until(lambda: rig.link.reports)
        rig.link.answers = [ReportAnswer()] * 1000
        rig.metadata.rebalance_at = Clock().now()
        await until(lambda: len(rig.link.reports) > 2)
        await asyncio.sleep(1.5)
        count = len(rig.link.reports)
        await asyncio.sleep(1.0)
        assert len(rig.link.reports) == count
        rig.metadata.notices = (NOTICE,)
        await until(lambda: rig.link.reports[-1].shown)


async def test_a_refused_report_is_shown_and_repeated_slowly() -> None:
    """The pod is unready with the reason, until a report is taken."""
    async with running() as rig:
        rig.link.answers = [ReportAnswer(error="invalid report"), ReportAnswer(is_settled=True)]
        await until(lambda: rig.refused[-1:] == [None])
        assert "invalid report" in rig.refused


async def test_a_failed_poll_changes_nothing() -> None:
    """It does not mean that the notice is gone; the pod is unready until the metadata answers again."""
    async with running() as rig:
        rig.metadata.notices = (NOTICE,)
        await until(lambda: rig.link.reports and rig.link.reports[-1].shown)
        rig.metadata.is_unreachable = True
        await until(lambda: rig.unreadable)
        await asyncio.sleep(0.1)
        assert rig.link.reports[-1].shown
        rig.metadata.is_unreachable = False
        await until(lambda: rig.unreadable[-1] == {})
    assert "hostNetwork" in str(rig.unreadable)


async def test_early_maintenance_is_not_reported_yet() -> None:
    """It is announced weeks ahead: until then the watcher is at rest."""
    async with running() as rig:
        rig.metadata.notices = (ReclaimNotice("maintenance", "m", Clock().now() + timedelta(days=7)),)
        await asyncio.sleep(0.3)
        assert rig.link.reports == [NodeReport()]


async def test_an_event_is_approved_when_its_machines_are_drained() -> None:
    """The gateway tells which are."""
    metadata = AzureLike(MINE)
    async with running(metadata) as rig:
        rig.metadata.notices = (NOTICE,)
        await until(lambda: any(report.needs_drained for report in rig.link.reports))
        rig.link.answers = [ReportAnswer(is_settled=True, drained=(MINE,))] * 1000
        await until(lambda: metadata.released == {MINE})


async def test_a_stop_waits_for_a_notice_in_hand() -> None:
    """The node may be shutting down because of it."""
    async with running() as rig:
        await until(lambda: rig.link.reports)
        rig.link.answers = [None] * 3
        rig.metadata.notices = (NOTICE,)
        await until(lambda: len(rig.link.reports) > 1)
    assert rig.link.reports[-1].shown


async def test_the_broker_is_shown_as_it_is() -> None:
    """Up, down, up."""
    async with running() as rig:
        rig.link.lose()
        rig.link.connect()
    assert rig.broker == [None, "away", None]
