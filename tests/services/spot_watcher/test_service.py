"""Notices, rebalance recommendations and offers become facts, each once; a failed poll publishes nothing."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.fake_capacity import FakeCapacity
from tests.support.stories import MINUTE, SECOND, T0, Story, given, node, offer, provider_id, record
from tests.support.timed_facts import TimedFact

from gpu_autoscaler.cloudmeta.protocol import InstanceMetadata, ReclaimNotice
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import (
    SpotNoticeReceived,
    SpotNoticeWithdrawn,
    SpotOffersSampled,
    SpotRebalanceRecommended,
)
from gpu_autoscaler.model.errors import ConfigError, TransientError
from gpu_autoscaler.model.ids import ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler_services.spot_watcher.metadata_poller import ManagedNodesPoller
from gpu_autoscaler_services.spot_watcher.offers import OffersPoller
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher

DEADLINE = T0 + 2 * MINUTE


def reclaim(at: datetime = DEADLINE) -> ReclaimNotice:
    """Return a notice as EC2's metadata shows it."""
    return ReclaimNotice("terminate", at.isoformat(), at)


def facts_of(outputs: Outputs) -> list[Fact]:
    """Return the facts of an output."""
    return list(outputs.facts if isinstance(outputs, Outcome) else outputs)


class Metadata:
    """The metadata of one instance."""

    def __init__(self) -> None:
        self.notice: ReclaimNotice | None = None
        self.hint_at: datetime | None = None
        self.is_unreachable = False
        self.hangs = False
        self.is_hint_unreachable = False

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """Return the notice, none, or fail."""
        if self.hangs:
            await asyncio.sleep(60)
        if self.is_unreachable:
            raise TransientError("no answer")
        return () if self.notice is None else (self.notice,)

    async def rebalance_recommended_at(self) -> datetime | None:
        """Return the recommendation, none, or fail."""
        if self.is_hint_unreachable:
            raise TransientError("no answer")
        return self.hint_at

    async def provider_id(self) -> ProviderId:
        """Return the instance of node n1."""
        return provider_id("buy-n1")


class Bench:
    """Nodes with metadata; published facts are folded, as the runtime does."""

    def __init__(self, *stories: Story) -> None:
        self.view = StateView(given(*stories))
        self.metadata: dict[str, Metadata] = {}
        self.service = SpotWatcher(ManagedNodesPoller(self.view, self.open, metadata_url="http://{node_name}"))
        self.at = T0

    def open(self, url: str) -> InstanceMetadata:
        """Return the metadata of an address."""
        return self.of(url.removeprefix("http://"))

    def of(self, name: str) -> Metadata:
        """Return the metadata of a node."""
        return self.metadata.setdefault(name, Metadata())

    async def tick(self, *, is_stored: bool = True) -> list[Fact]:
        """One tick, five seconds after the last."""
        self.at += 5 * SECOND
        facts = facts_of(await self.service.on_tick(self.at))
        if is_stored:
            recorded = [TimedFact(fact, self.at) for fact in facts]
            self.view.advance(fold(self.view.state, record(recorded)), {})
        return facts


async def test_notice_is_published_once() -> None:
    """With instance, node and deadline; read again it is no news."""
    bench = Bench(node("n1"))
    assert await bench.tick() == []
    bench.of("n1").notice = reclaim()
    (notice,) = await bench.tick()
    assert notice == SpotNoticeReceived(
        provider_id=provider_id("buy-n1"),
        kind="terminate",
        provider_event=DEADLINE.isoformat(),
        reclaim_at=DEADLINE,
        node_name="n1",
        received_at=bench.at,
    )
    assert await bench.tick() == []


async def test_unstored_notice_is_published_again() -> None:
    """With the same id, so that it is one fact if it was stored after all."""
    bench = Bench(node("n1"))
    bench.of("n1").notice = reclaim()
    (first,) = await bench.tick(is_stored=False)
    (second,) = await bench.tick()
    assert first.condition() == second.condition()


async def test_restart_neither_repeats_nor_forgets_notices() -> None:
    """Published notices are in the state: they are not repeated, and their end is published."""
    bench = Bench(node("n1"))
    bench.of("n1").notice = reclaim()
    await bench.tick()
    bench.service = SpotWatcher(ManagedNodesPoller(bench.view, bench.open, metadata_url="http://{node_name}"))
    assert await bench.tick() == []
    bench.of("n1").notice = None
    (withdrawn,) = await bench.tick()
    assert isinstance(withdrawn, SpotNoticeWithdrawn)
    assert withdrawn.notice_id == f"spot_notice/{provider_id('buy-n1')}/terminate/{DEADLINE.isoformat()}"
    assert await bench.tick() == []


async def test_returning_notice_is_a_new_fact() -> None:
    """The broker's deduplication must not hide it, nor its end the next end."""
    bench = Bench(node("n1"))
    names: list[str | None] = []
    for shown in (reclaim(), None, reclaim(), None, reclaim()):
        bench.of("n1").notice = shown
        (notice,) = await bench.tick()
        assert isinstance(notice, SpotNoticeReceived) == (shown is not None)
        names.append(notice.condition())
        assert await bench.tick() == []
    assert len(set(names)) == 5
    assert [record.is_active for record in bench.view.state.notices.values()] == [True]


async def test_failed_poll_withdraws_nothing() -> None:
    """Other nodes are still polled."""
    bench = Bench(node("n1"), node("n2"))
    bench.of("n1").notice = reclaim()
    await bench.tick()
    bench.of("n1").is_unreachable = True
    bench.of("n2").notice = reclaim()
    assert [type(fact) for fact in await bench.tick()] == [SpotNoticeReceived]
    assert await bench.tick() == []


async def test_hanging_address_does_not_delay_others() -> None:
    """The others' notices arrive within the time limit of one poll."""
    bench = Bench(node("n1"), node("n2"))
    bench.service = SpotWatcher(
        ManagedNodesPoller(bench.view, bench.open, metadata_url="http://{node_name}", poll_seconds_max=0.05)
    )
    bench.of("n1").hangs = True
    bench.of("n2").notice = reclaim()
    async with asyncio.timeout(60):
        assert len(await bench.tick()) == 1


def test_one_address_for_all_nodes_is_refused() -> None:
    """One node's notice would be published for every node."""
    with pytest.raises(ConfigError, match="one address for all nodes"):
        ManagedNodesPoller(StateView(), lambda _: Metadata(), metadata_url="http://169.254.169.254")


async def test_failed_recommendation_read_keeps_notice() -> None:
    """What was read before is published."""
    bench = Bench(node("n1"))
    bench.of("n1").notice = reclaim()
    bench.of("n1").is_hint_unreachable = True
    assert [type(fact) for fact in await bench.tick()] == [SpotNoticeReceived]


async def test_new_deadline_replaces_notice() -> None:
    """The new notice is published, the old one withdrawn."""
    bench = Bench(node("n1"))
    bench.of("n1").notice = reclaim()
    await bench.tick()
    bench.of("n1").notice = reclaim(DEADLINE - MINUTE)
    assert {type(fact) for fact in await bench.tick()} == {SpotNoticeReceived, SpotNoticeWithdrawn}


async def test_deadline_no_longer_shown_is_kept() -> None:
    """Azure omits it once the event has started: the same notice."""
    bench = Bench(node("n1"))
    bench.of("n1").notice = ReclaimNotice("terminate", "event-7", DEADLINE)
    await bench.tick()
    bench.of("n1").notice = ReclaimNotice("terminate", "event-7", None)
    assert await bench.tick() == []


async def test_notice_is_not_withdrawn_after_its_deadline() -> None:
    """Metadata that no longer answers for a terminated instance withdraws nothing."""
    bench = Bench(node("n1"))
    bench.of("n1").notice = reclaim(T0 + 6 * SECOND)
    await bench.tick()
    bench.of("n1").notice = None
    assert await bench.tick() == []


async def test_metadata_does_not_withdraw_queue_notice() -> None:
    """The metadata does not know it."""
    bench = Bench(node("n1"))
    other = SpotNoticeReceived(
        provider_id=provider_id("buy-n1"),
        kind="terminate",
        provider_event="queue-event-7",
        reclaim_at=DEADLINE,
        received_at=T0,
        channel="queue",
    )
    bench.view.advance(fold(bench.view.state, record([TimedFact(other, T0)])), {})
    assert await bench.tick() == []


async def test_rebalance_recommendation_is_published_once() -> None:
    """Within half a minute, with its own instant."""
    bench = Bench(node("n1"))
    await bench.tick()
    bench.of("n1").hint_at = T0
    facts = [fact for _ in range(12) for fact in await bench.tick()]
    assert facts == [SpotRebalanceRecommended(provider_id=provider_id("buy-n1"), noticed_at=T0, node_name="n1")]


async def test_only_our_spot_nodes_are_polled() -> None:
    """Not on-demand nodes, not foreign ones; an unknown capacity type may be spot."""
    on_demand = offer(capacity_type=CapacityType.ON_DEMAND)
    bench = Bench(node("spot"), node("on-demand", on_demand), node("theirs", is_ours=False), node("unknown"))
    (found,) = [node for node in bench.view.state.nodes.values() if node.name == "unknown"]
    unknown = msgspec.structs.replace(found, capacity_type=None)
    state = msgspec.structs.replace(bench.view.state, nodes={**bench.view.state.nodes, unknown.node_uid: unknown})
    bench.view.advance(state, {})
    await bench.tick()
    assert bench.metadata.keys() == {"spot", "unknown"}


async def test_maintenance_is_published_fifteen_minutes_ahead() -> None:
    """It is announced weeks before; until then the node is used."""
    bench = Bench(node("n1"))
    bench.of("n1").notice = ReclaimNotice("maintenance", "event-7", T0 + 20 * MINUTE)
    assert await bench.tick() == []
    bench.at = T0 + 5 * MINUTE
    (notice,) = await bench.tick()
    assert isinstance(notice, SpotNoticeReceived)
    assert (notice.kind, notice.provider_event, notice.reclaim_at) == ("maintenance", "event-7", T0 + 20 * MINUTE)


def from_queue(deadline: datetime) -> SpotNoticeReceived:
    """Return the same interruption as the cloud's queue reports it."""
    return SpotNoticeReceived(
        provider_id=provider_id("buy-n1"),
        kind="terminate",
        provider_event="queue-event-7",
        reclaim_at=deadline,
        received_at=T0,
        channel="queue",
    )


async def test_notice_of_queue_is_not_repeated_by_metadata() -> None:
    """One interruption is one notice; an earlier deadline is published under its first name."""
    bench = Bench(node("n1"))
    bench.view.advance(fold(bench.view.state, record([TimedFact(from_queue(DEADLINE), T0)])), {})
    bench.of("n1").notice = reclaim()
    assert await bench.tick() == []
    bench.of("n1").notice = reclaim(DEADLINE - 10 * SECOND)
    (notice,) = await bench.tick()
    assert isinstance(notice, SpotNoticeReceived)
    assert notice.notice_id == from_queue(DEADLINE).notice_id
    (standing,) = bench.view.state.notices.values()
    assert standing.notice.reclaim_at == DEADLINE - 10 * SECOND
    assert await bench.tick() == []


class OffersBench:
    """Role central with a fake cloud; published facts are folded unless they were lost."""

    def __init__(self) -> None:
        self.view = StateView()
        self.cloud = FakeCapacity([offer(), offer("g5.xlarge")], installation="ours", now=lambda: T0)
        self.service = SpotWatcher(OffersPoller(self.view, self.cloud))

    async def tick(self, after: timedelta, *, is_stored: bool = True) -> list[Fact]:
        """One tick, that long after the start."""
        facts = facts_of(await self.service.on_tick(T0 + after))
        if is_stored:
            recorded = [TimedFact(fact, T0 + after) for fact in facts]
            self.view.advance(fold(self.view.state, record(recorded)), {})
        return facts


async def test_offers_are_published_at_once_and_every_five_minutes() -> None:
    """All of them, sorted by key; unchanged offers are not repeated in between."""
    bench = OffersBench()
    (first,) = await bench.tick(0 * SECOND)
    between = [fact for seconds in range(5, 300, 5) for fact in await bench.tick(seconds * SECOND)]
    again = await bench.tick(301 * SECOND)

    assert isinstance(first, SpotOffersSampled)
    assert (first.provider, first.sampled_at) == ("fake", T0)
    assert [offered.key for offered in first.offers] == sorted(listed.key for listed in (offer(), offer("g5.xlarge")))
    assert between == []
    assert len(again) == 1


async def test_new_price_is_published_within_a_minute() -> None:
    """Without waiting for the five minutes."""
    bench = OffersBench()
    await bench.tick(0 * SECOND)
    bench.service = SpotWatcher(
        OffersPoller(bench.view, FakeCapacity([offer(usd_per_hour=9.0)], installation="ours", now=lambda: T0))
    )
    (notice,) = await bench.tick(60 * SECOND)
    assert isinstance(notice, SpotOffersSampled)
    assert notice.offers[0].price_micro_usd_per_hour == 9_000_000


async def test_small_price_changes_wait_for_the_next_regular_list() -> None:
    """A list of hundreds of offers for every cent would fill the stream; what is not sold any more is news at once."""
    bench = OffersBench()

    async def published(seconds: float, **changes: object) -> bool:
        offers = [msgspec.structs.replace(offer(), **changes)]
        bench.service = SpotWatcher(OffersPoller(bench.view, FakeCapacity(offers, installation="ours", now=lambda: T0)))
        return bool(await bench.tick(seconds * SECOND))

    assert await published(0)
    assert not await published(60, price_micro_usd_per_hour=10_400_000)
    assert await published(120, price_micro_usd_per_hour=10_600_000)
    assert not await published(180, price_micro_usd_per_hour=10_500_000)
    assert await published(240, price_micro_usd_per_hour=10_500_000, unavailable_because="the quota is used up")
    assert not await published(300, price_micro_usd_per_hour=10_400_000, unavailable_because="the quota is used up")
    assert await published(540, price_micro_usd_per_hour=10_400_000, unavailable_because="the quota is used up")


async def test_unstored_offers_are_published_again() -> None:
    """An unreachable broker does not cost five minutes without prices."""
    bench = OffersBench()
    await bench.tick(0 * SECOND, is_stored=False)
    assert len(await bench.tick(5 * SECOND)) == 1


async def test_failed_offer_poll_publishes_nothing() -> None:
    """The error is raised to the runtime; the next tick retries."""
    bench = OffersBench()
    bench.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await bench.tick(0 * SECOND)
    assert len(await bench.tick(5 * SECOND)) == 1
