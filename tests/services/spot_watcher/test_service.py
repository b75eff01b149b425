"""Notices, hints and offers become facts, each once; a failed poll says nothing."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
import pytest
from tests.support.stories import MINUTE, SECOND, T0, Story, given, node, offer, provider_id, record
from tests.support.told import Told

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
from gpu_autoscaler.providers.fake import FakeCapacity
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.runtime.service import Outcome, Outputs
from gpu_autoscaler_services.spot_watcher.metadata_poller import OwnNodePoller, ManagedNodesPoller
from gpu_autoscaler_services.spot_watcher.offers import OffersPoller
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher

DEADLINE = T0 + 2 * MINUTE


def reclaim(at: datetime = DEADLINE) -> ReclaimNotice:
    """A notice as EC2's metadata gives it."""
    return ReclaimNotice("terminate", at.isoformat(), at)


def facts_of(outputs: Outputs) -> list[Fact]:
    """What a door said."""
    return list(outputs.facts if isinstance(outputs, Outcome) else outputs)


class Metadata:
    """What one instance's metadata shows."""

    def __init__(self) -> None:
        self.notice: ReclaimNotice | None = None
        self.hint_at: datetime | None = None
        self.is_deaf = False
        self.hangs = False
        self.hint_is_deaf = False

    async def reclaim_notices(self) -> Sequence[ReclaimNotice]:
        """The notice, none, or no answer."""
        if self.hangs:
            await asyncio.sleep(60)
        if self.is_deaf:
            raise TransientError("no answer")
        return () if self.notice is None else (self.notice,)

    async def rebalance_recommended_at(self) -> datetime | None:
        """The hint, none, or no answer."""
        if self.hint_is_deaf:
            raise TransientError("no answer")
        return self.hint_at

    async def provider_id(self) -> ProviderId:
        """The instance of node n1."""
        return provider_id("buy-n1")


class Rig:
    """Nodes with metadata; what is published is folded, as the runtime does."""

    def __init__(self, *stories: Story) -> None:
        self.view = StateView(given(*stories))
        self.metadata: dict[str, Metadata] = {}
        self.service = SpotWatcher(ManagedNodesPoller(self.view, self.open, metadata_url="http://{node_name}"))
        self.at = T0

    def open(self, url: str) -> InstanceMetadata:
        """The metadata behind an address."""
        return self.of(url.removeprefix("http://"))

    def of(self, name: str) -> Metadata:
        """The metadata of a node."""
        return self.metadata.setdefault(name, Metadata())

    async def tick(self, *, is_stored: bool = True) -> list[Fact]:
        """One tick, five seconds after the last."""
        self.at += 5 * SECOND
        facts = facts_of(await self.service.on_tick(self.at))
        if is_stored:
            told = [Told(fact, self.at) for fact in facts]
            self.view.advance(fold(self.view.state, record(told)), {})
        return facts


async def test_a_notice_is_told_once() -> None:
    """With instance, node and deadline; read again it is no news."""
    rig = Rig(node("n1"))
    assert await rig.tick() == []
    rig.of("n1").notice = reclaim()
    (told,) = await rig.tick()
    assert told == SpotNoticeReceived(
        provider_id=provider_id("buy-n1"),
        kind="terminate",
        provider_event=DEADLINE.isoformat(),
        reclaim_at=DEADLINE,
        node_name="n1",
        received_at=rig.at,
    )
    assert await rig.tick() == []


async def test_a_notice_that_was_not_stored_is_told_again() -> None:
    """Under the same name, so that it is one fact if it was stored after all."""
    rig = Rig(node("n1"))
    rig.of("n1").notice = reclaim()
    (first,) = await rig.tick(is_stored=False)
    (second,) = await rig.tick()
    assert first.condition() == second.condition()


async def test_a_restart_neither_repeats_nor_forgets() -> None:
    """What was said is in the record: known notices are not told again, and their end is."""
    rig = Rig(node("n1"))
    rig.of("n1").notice = reclaim()
    await rig.tick()
    rig.service = SpotWatcher(ManagedNodesPoller(rig.view, rig.open, metadata_url="http://{node_name}"))
    assert await rig.tick() == []
    rig.of("n1").notice = None
    (withdrawn,) = await rig.tick()
    assert isinstance(withdrawn, SpotNoticeWithdrawn)
    assert withdrawn.notice_id == f"spot_notice/{provider_id('buy-n1')}/terminate/{DEADLINE.isoformat()}"
    assert await rig.tick() == []


async def test_a_notice_that_comes_back_is_told_under_a_name_of_its_own() -> None:
    """One wrong "none" must not hide the notice behind the broker's memory of its id; nor its end the next end."""
    rig = Rig(node("n1"))
    names: list[str | None] = []
    for shown in (reclaim(), None, reclaim(), None, reclaim()):
        rig.of("n1").notice = shown
        (told,) = await rig.tick()
        assert isinstance(told, SpotNoticeReceived) == (shown is not None)
        names.append(told.condition())
        assert await rig.tick() == []
    assert len(set(names)) == 5
    assert [record.is_active for record in rig.view.state.notices.values()] == [True]


async def test_a_failed_poll_is_not_no_notice() -> None:
    """Nothing is withdrawn while nobody answers, and other nodes are read all the same."""
    rig = Rig(node("n1"), node("n2"))
    rig.of("n1").notice = reclaim()
    await rig.tick()
    rig.of("n1").is_deaf = True
    rig.of("n2").notice = reclaim()
    assert [type(fact) for fact in await rig.tick()] == [SpotNoticeReceived]
    assert await rig.tick() == []


async def test_one_address_that_hangs_holds_up_nobody_for_long() -> None:
    """The others' notices come within the limit of one poll."""
    rig = Rig(node("n1"), node("n2"))
    rig.service = SpotWatcher(
        ManagedNodesPoller(rig.view, rig.open, metadata_url="http://{node_name}", poll_seconds_max=0.05)
    )
    rig.of("n1").hangs = True
    rig.of("n2").notice = reclaim()
    async with asyncio.timeout(60):
        assert len(await rig.tick()) == 1


def test_one_address_for_all_nodes_is_refused() -> None:
    """One node's notice would be told of every node."""
    with pytest.raises(ConfigError, match="one address for all nodes"):
        ManagedNodesPoller(StateView(), lambda _: Metadata(), metadata_url="http://169.254.169.254")


async def test_a_failing_hint_does_not_hide_a_notice() -> None:
    """What was read is told."""
    rig = Rig(node("n1"))
    rig.of("n1").notice = reclaim()
    rig.of("n1").hint_is_deaf = True
    assert [type(fact) for fact in await rig.tick()] == [SpotNoticeReceived]


async def test_another_deadline_is_another_notice() -> None:
    """The new one is told, the old one taken back."""
    rig = Rig(node("n1"))
    rig.of("n1").notice = reclaim()
    await rig.tick()
    rig.of("n1").notice = reclaim(DEADLINE - MINUTE)
    assert {type(fact) for fact in await rig.tick()} == {SpotNoticeReceived, SpotNoticeWithdrawn}


async def test_a_deadline_that_is_no_longer_said_stands() -> None:
    """Azure leaves it out once the event has started: the same notice, and nothing new."""
    rig = Rig(node("n1"))
    rig.of("n1").notice = ReclaimNotice("terminate", "event-7", DEADLINE)
    await rig.tick()
    rig.of("n1").notice = ReclaimNotice("terminate", "event-7", None)
    assert await rig.tick() == []


async def test_a_deadline_that_has_passed_is_not_withdrawn() -> None:
    """Metadata that no longer answers for a dead instance takes nothing back."""
    rig = Rig(node("n1"))
    rig.of("n1").notice = reclaim(T0 + 6 * SECOND)
    await rig.tick()
    rig.of("n1").notice = None
    assert await rig.tick() == []


async def test_a_notice_from_elsewhere_is_not_metadata_s_to_withdraw() -> None:
    """It came another way, which metadata knows nothing of."""
    rig = Rig(node("n1"))
    other = SpotNoticeReceived(
        provider_id=provider_id("buy-n1"),
        kind="terminate",
        provider_event="queue-event-7",
        reclaim_at=DEADLINE,
        received_at=T0,
        way="queue",
    )
    rig.view.advance(fold(rig.view.state, record([Told(other, T0)])), {})
    assert await rig.tick() == []


async def test_a_hint_is_told_once() -> None:
    """Within half a minute, with its own instant."""
    rig = Rig(node("n1"))
    await rig.tick()
    rig.of("n1").hint_at = T0
    facts = [fact for _ in range(12) for fact in await rig.tick()]
    assert facts == [SpotRebalanceRecommended(provider_id=provider_id("buy-n1"), noticed_at=T0, node_name="n1")]


async def test_only_our_nodes_that_may_be_taken_are_asked() -> None:
    """Not on-demand ones, not other people's; one whose capacity type is unknown may be spot."""
    on_demand = offer(capacity_type=CapacityType.ON_DEMAND)
    rig = Rig(node("spot"), node("on-demand", on_demand), node("theirs", is_ours=False), node("unknown"))
    (found,) = [each for each in rig.view.state.nodes.values() if each.name == "unknown"]
    unknown = msgspec.structs.replace(found, capacity_type=None)
    state = msgspec.structs.replace(rig.view.state, nodes={**rig.view.state.nodes, unknown.node_uid: unknown})
    rig.view.advance(state, {})
    await rig.tick()
    assert rig.metadata.keys() == {"spot", "unknown"}


async def test_on_its_own_node_it_knows_the_instance_by_metadata() -> None:
    """Role node: no state of nodes is needed to name the instance."""
    metadata = Metadata()
    metadata.notice = reclaim()
    service = SpotWatcher(OwnNodePoller(StateView(), metadata, node_name="n1"))
    outcome = await service.on_tick(T0)
    assert isinstance(outcome, Outcome)
    (told,) = outcome.facts
    assert isinstance(told, SpotNoticeReceived)
    assert (told.provider_id, told.node_name) == (provider_id("buy-n1"), "n1")
    assert outcome.next_tick_seconds == 1.0


async def test_maintenance_is_told_a_quarter_of_an_hour_ahead() -> None:
    """It is announced weeks before; until then the node works as ever."""
    rig = Rig(node("n1"))
    rig.of("n1").notice = ReclaimNotice("maintenance", "event-7", T0 + 20 * MINUTE)
    assert await rig.tick() == []
    rig.at = T0 + 5 * MINUTE
    (told,) = await rig.tick()
    assert isinstance(told, SpotNoticeReceived)
    assert (told.kind, told.provider_event, told.reclaim_at) == ("maintenance", "event-7", T0 + 20 * MINUTE)


def from_queue(deadline: datetime) -> SpotNoticeReceived:
    """The same interruption as a queue of the cloud's events tells it."""
    return SpotNoticeReceived(
        provider_id=provider_id("buy-n1"),
        kind="terminate",
        provider_event="queue-event-7",
        reclaim_at=deadline,
        received_at=T0,
        way="queue",
    )


async def test_what_the_queue_told_metadata_does_not_tell_again() -> None:
    """One interruption is one notice; with an earlier deadline it is told under its first name."""
    rig = Rig(node("n1"))
    rig.view.advance(fold(rig.view.state, record([Told(from_queue(DEADLINE), T0)])), {})
    rig.of("n1").notice = reclaim()
    assert await rig.tick() == []
    rig.of("n1").notice = reclaim(DEADLINE - 10 * SECOND)
    (told,) = await rig.tick()
    assert isinstance(told, SpotNoticeReceived)
    assert told.notice_id == from_queue(DEADLINE).notice_id
    (standing,) = rig.view.state.notices.values()
    assert standing.notice.reclaim_at == DEADLINE - 10 * SECOND
    assert await rig.tick() == []


class Market:
    """Role central against a fake cloud; what is published is folded unless it was lost."""

    def __init__(self) -> None:
        self.view = StateView()
        self.cloud = FakeCapacity([offer(), offer("g5.xlarge")], installation="ours", now=lambda: T0)
        self.service = SpotWatcher(OffersPoller(self.view, self.cloud))

    async def tick(self, after: timedelta, *, is_stored: bool = True) -> list[Fact]:
        """One tick, that long after the start."""
        facts = facts_of(await self.service.on_tick(T0 + after))
        if is_stored:
            told = [Told(fact, T0 + after) for fact in facts]
            self.view.advance(fold(self.view.state, record(told)), {})
        return facts


async def test_offers_are_told_at_once_and_every_five_minutes() -> None:
    """Whole, sorted by key; unchanged ones are not repeated in between."""
    market = Market()
    (first,) = await market.tick(0 * SECOND)
    between = [fact for seconds in range(5, 300, 5) for fact in await market.tick(seconds * SECOND)]
    again = await market.tick(301 * SECOND)

    assert isinstance(first, SpotOffersSampled)
    assert (first.provider, first.sampled_at) == ("fake", T0)
    assert [each.key for each in first.offers] == sorted(each.key for each in (offer(), offer("g5.xlarge")))
    assert between == []
    assert len(again) == 1


async def test_a_new_price_is_told_within_a_minute() -> None:
    """Without waiting for the five."""
    market = Market()
    await market.tick(0 * SECOND)
    market.service = SpotWatcher(
        OffersPoller(market.view, FakeCapacity([offer(usd_per_hour=9.0)], installation="ours", now=lambda: T0))
    )
    (told,) = await market.tick(60 * SECOND)
    assert isinstance(told, SpotOffersSampled)
    assert told.offers[0].price_micro_usd_per_hour == 9_000_000


async def test_offers_that_were_not_stored_are_told_again() -> None:
    """A broker that was away does not cost five minutes without prices."""
    market = Market()
    await market.tick(0 * SECOND, is_stored=False)
    assert len(await market.tick(5 * SECOND)) == 1


async def test_a_cloud_that_does_not_answer_has_no_empty_market() -> None:
    """The error goes to the runtime; the next tick asks again."""
    market = Market()
    market.cloud.lose_answers(1)
    with pytest.raises(TransientError):
        await market.tick(0 * SECOND)
    assert len(await market.tick(5 * SECOND)) == 1


async def test_metadata_that_does_not_answer_is_told_until_it_does() -> None:
    """By node and with what to look at; on its own node also while the instance is not known."""
    metadata, told = Metadata(), []
    service = SpotWatcher(
        OwnNodePoller(StateView(), metadata, node_name="n1", on_unreadable=lambda deaf: told.append(dict(deaf)))
    )
    metadata.is_deaf = True
    await service.on_tick(T0)
    await service.on_tick(T0 + SECOND)
    metadata.is_deaf = False
    await service.on_tick(T0 + 2 * SECOND)
    (who,) = told[0]
    assert (who, told[1:]) == (provider_id("buy-n1"), [{}])
    assert "hostNetwork" in told[0][who]
