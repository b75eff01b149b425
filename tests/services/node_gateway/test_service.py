"""What nodes report becomes a fact once, under the instance of the subject, whoever else reported it."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from tests.support.purchases import drained
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, given, node, provider_id, record
from tests.support.timed_facts import TimedFact

from gpu_autoscaler.bus.nats.requests import Request
from gpu_autoscaler.cloudmeta.reports import DRAINED_COUNT_MAX, ReportAnswer, report_subject
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.scaling import ScalingNodeDrained
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, SpotRebalanceRecommended
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, ProviderId
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler_services.node_gateway.service import (
    INSTANCES_WAITING_MAX,
    REPORTS_AT_ONCE_MAX,
    NodeGateway,
    ReportInbox,
)

MINE = provider_id("buy-n1")
DEADLINE = T0 + 2 * MINUTE


def shown(at: datetime = DEADLINE) -> dict[str, Any]:
    """A notice as EC2's metadata shows it."""
    return {"kind": "terminate", "provider_event": at.isoformat(), "reclaim_at": at.isoformat()}


def emptied(name: str) -> Story:
    """No workload pod is left on the node of this name."""
    fact = ScalingNodeDrained(
        action_id=ActionId(f"drain-{name}"),
        plan_id=PlanId(f"plan-drain-{name}"),
        node_uid=NodeUid(f"uid-{name}"),
        node_name=name,
        provider_id=provider_id(f"buy-{name}"),
        drained_at=T0 + MINUTE,
    )
    return (TimedFact(fact, T0 + MINUTE),)


class Desk:
    """A gateway; published facts are folded, as the runtime does."""

    def __init__(self, *stories: Story) -> None:
        self.at = T0
        self.view = StateView(given(*stories))
        self.outcomes: list[str] = []
        self.inbox = ReportInbox(lambda: self.at, self.outcomes.append)
        self.service = NodeGateway(self.view, self.inbox, self.outcomes.append)
        self.answers: list[ReportAnswer] = []

    def send(self, report: dict[str, Any], instance: ProviderId = MINE) -> None:
        """Send a report."""
        self.inbox.receive(self.request(report_subject(instance), msgspec.json.encode(report)))

    def request(self, subject: str, payload: bytes) -> Request:
        """A request whose answer is kept."""

        async def answer(content: bytes) -> None:
            self.answers.append(msgspec.json.decode(content, type=ReportAnswer))

        return Request(subject=subject, payload=payload, answer=answer)

    async def take(self, *, is_stored: bool = True) -> Sequence[Fact]:
        """Handle what has arrived, a second later."""
        self.at += SECOND
        facts = await self.service.on_item(await anext(aiter(self.inbox)))
        if is_stored:
            self.fold(*facts)
        return facts

    def fold(self, *facts: Fact) -> None:
        """Let the state know."""
        self.view.advance(fold(self.view.state, record([TimedFact(fact, self.at) for fact in facts])), {})

    async def report(self, report: dict[str, Any], *, is_stored: bool = True) -> Sequence[Fact]:
        """Send a report and handle it."""
        self.send(report)
        return await self.take(is_stored=is_stored)


async def test_a_notice_is_published_once_and_then_settled() -> None:
    """With the node's name and our own time; the repeat is answered as settled."""
    desk = Desk(node("n1"))
    (notice,) = await desk.report({"shown": [shown()]})
    assert notice == SpotNoticeReceived(
        provider_id=MINE,
        kind="terminate",
        provider_event=DEADLINE.isoformat(),
        reclaim_at=DEADLINE,
        node_name="n1",
        received_at=T0,
    )
    assert await desk.report({"shown": [shown()]}) == []
    assert [answer.is_settled for answer in desk.answers] == [False, True]
    assert desk.outcomes == ["published", "known"]


async def test_an_unstored_notice_is_not_settled() -> None:
    """It is published again, with the same id."""
    desk = Desk(node("n1"))
    (first,) = await desk.report({"shown": [shown()]}, is_stored=False)
    (again,) = await desk.report({"shown": [shown()]})
    assert first.condition() == again.condition()
    assert [answer.is_settled for answer in desk.answers] == [False, False]


async def test_a_notice_that_is_no_longer_shown_is_withdrawn() -> None:
    """And one that returns is a new fact, which no duplicate check of the broker drops."""
    desk = Desk(node("n1"))
    (first,) = await desk.report({"shown": [shown()]})
    (withdrawn,) = await desk.report({})
    assert isinstance(withdrawn, SpotNoticeWithdrawn)
    (back,) = await desk.report({"shown": [shown()]})
    assert back.condition() != first.condition()


async def test_a_notice_of_the_queue_is_not_repeated() -> None:
    """One interruption is one notice; only an earlier deadline is news, under the first name."""
    desk = Desk(node("n1"))
    queued = SpotNoticeReceived(
        provider_id=MINE,
        kind="terminate",
        provider_event="queue-event-7",
        reclaim_at=DEADLINE,
        received_at=T0,
        channel="queue",
    )
    desk.fold(queued)
    assert await desk.report({"shown": [shown()]}) == []
    (earlier,) = await desk.report({"shown": [shown(DEADLINE - 10 * SECOND)]})
    assert isinstance(earlier, SpotNoticeReceived)
    assert earlier.notice_id == queued.notice_id


async def test_a_recommendation_is_published_once() -> None:
    """One that the state has forgotten for its age is settled, too: it would be forgotten at once again."""
    desk = Desk(node("n1"))
    (fact,) = await desk.report({"rebalance_at": T0.isoformat()})
    assert isinstance(fact, SpotRebalanceRecommended)
    assert await desk.report({"rebalance_at": T0.isoformat()}) == []
    assert await desk.report({"rebalance_at": (T0 - 30 * 24 * HOUR).isoformat()}) == []
    assert [answer.is_settled for answer in desk.answers] == [False, True, True]


async def test_an_instance_is_published_whether_its_node_is_known_or_not() -> None:
    """The list of nodes may be late."""
    (notice,) = await Desk().report({"shown": [shown()]})
    assert isinstance(notice, SpotNoticeReceived)
    assert (notice.provider_id, notice.node_name) == (MINE, None)


async def test_an_invalid_report_is_refused_with_the_reason() -> None:
    """The watcher shows it; nothing is published."""
    desk = Desk(node("n1"))
    desk.inbox.receive(desk.request(report_subject(MINE), b'{"shown": 7}'))
    desk.inbox.receive(desk.request("node_report.!", b"{}"))
    await asyncio.sleep(0)
    assert [answer.error is not None for answer in desk.answers] == [True, True]
    assert "shown" in str(desk.answers[0].error)
    assert desk.outcomes == ["refused", "refused"]


async def test_a_node_that_floods_replaces_its_own_reports_only() -> None:
    """The report of another instance keeps its place."""
    desk = Desk(node("n1"), node("n2"))
    other = provider_id("buy-n2")
    desk.send({"shown": [shown()]}, other)
    for seconds in range(1000):
        desk.send({"shown": [shown(DEADLINE + seconds * SECOND)]})
    facts = await desk.take()
    assert [fact.provider_id for fact in facts if isinstance(fact, SpotNoticeReceived)] == [other, MINE]
    assert desk.outcomes.count("replaced") == 999


async def test_reports_are_limited_and_taken_in_batches() -> None:
    """What exceeds the limit is dropped: its watcher repeats it."""
    desk = Desk()
    for number in range(INSTANCES_WAITING_MAX + 5):
        desk.send({}, ProviderId(f"aws:///a/i-{number}"))
    assert desk.outcomes.count("dropped") == 5
    await desk.take()
    assert len(desk.answers) == REPORTS_AT_ONCE_MAX


async def test_an_answer_names_a_limited_number_of_drained_instances() -> None:
    """The last ones: an event of many machines is approved as they are drained."""
    names = [f"n{number:03}" for number in range(DRAINED_COUNT_MAX + 3)]
    desk = Desk(*(story for name in names for story in (drained(name), emptied(name))))
    await desk.report({"needs_drained": True})
    await desk.report({})
    assert [answer.drained for answer in desk.answers] == [tuple(provider_id(f"buy-{name}") for name in names[3:]), ()]
