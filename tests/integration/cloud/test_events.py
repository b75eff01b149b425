"""Cloud events received from an SQS queue: each becomes one fact and stays queued until that fact is recorded.

The queue is moto's, with the simulated cloud's faults. Published facts are folded into the state unless a test drops
them.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.aws import Region, served_region
from tests.support.timed_facts import EPOCH, TimedFact, record

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.node import InstanceState, NodeInstanceObserved, NodeObserved
from gpu_autoscaler.events.scaling import ScalingNodeDrained
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotRebalanceRecommended
from gpu_autoscaler.model.errors import TransientError
from gpu_autoscaler.model.ids import ActionId, NodeUid, PlanId, ProviderId
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.aws.queue import AwsQueue
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler.simcloud.faults import Fault
from gpu_autoscaler_services.spot_watcher.interruption_queue import InterruptionQueue

pytestmark = [pytest.mark.timeout(120)]
SPOT, GROUPED = "i-0aaaaaaaaaaaaaaaa", "i-0bbbbbbbbbbbbbbbb"


def provider_id_of(instance_id: str) -> ProviderId:
    """Return the instance's provider ID."""
    return ProviderId(f"aws:///eu-west-1a/{instance_id}")


def listed(instance_id: str, state: InstanceState = "running", version: int = 2) -> NodeInstanceObserved:
    """Return the fact that the scaler listed this instance of ours."""
    return NodeInstanceObserved(
        epoch=EPOCH,
        version=version,
        provider_id=provider_id_of(instance_id),
        action_id=ActionId(f"buy-{instance_id}"),
        state=state,
        instance_type="g4dn.xlarge",
        zone="eu-west-1a",
        capacity_type=CapacityType.SPOT,
        price_micro_usd_per_hour=1,
        launched_at=datetime(2026, 11, 22, tzinfo=UTC),
    )


class Rig:
    """A queue and the spot watcher's reader of it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.bridge = region.fake.bridge
        self.queue_url = self.bridge.open_queue()
        self.view = StateView()
        self.unread_count = 0
        self.ahead = timedelta(0)  # of the watcher's clock
        self.queue = AwsQueue(
            region.options(queue_url=self.queue_url),
            url=region.url,
            call_seconds_max=20.0,
            now=lambda: datetime.now(UTC) + self.ahead,
            visible_again_seconds=1,
        )
        self.events = InterruptionQueue(self.view, self.queue, self._unread)
        self.know(listed(SPOT), listed(GROUPED))

    def _unread(self) -> None:
        self.unread_count += 1

    def know(self, *facts: Fact) -> None:
        """Record facts."""
        told = [TimedFact(fact, datetime.now(UTC)) for fact in facts]
        self.view.advance(fold(self.view.state, record(told)), {})

    async def read(self, *, is_stored: bool = True) -> list[Fact]:
        """Receive the visible messages and return the facts that they become."""
        facts = [fact for event in await self.queue.receive() for fact in await self.events.on_event(event)]
        if is_stored:
            self.know(*facts)
        return facts

    async def read_again(self) -> list[Fact]:
        """Read after the messages that were left are visible again."""
        await asyncio.sleep(1.1)
        return await self.read()

    def call_count(self, name: str) -> int:
        """Return how many calls of this name the cloud received."""
        return len(self.region.fake.asked_of(name))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """An empty queue."""
    with served_region() as region:
        region.fake.now = region.fake.bridge._now = lambda: datetime.now(UTC)
        rig = Rig(region)
        yield rig
        await rig.queue.close()


@pytest.mark.cloud("aws", calls=("ReceiveMessage", "DeleteMessage"), notices=("spot interruption, EventBridge",))
async def test_a_warning_is_published_once_and_deleted_when_recorded(rig: Rig) -> None:
    """Until it is recorded it stays in the queue: a lost fact is published again with the same condition."""
    rig.bridge.warn(SPOT)
    (lost,) = await rig.read(is_stored=False)
    assert rig.bridge.left_count() == 1
    (notice,) = await rig.read_again()
    assert isinstance(notice, SpotNoticeReceived)
    assert (notice.provider_id, notice.kind, notice.channel) == (provider_id_of(SPOT), "terminate", "queue")
    assert lost.condition() == notice.condition()
    assert rig.bridge.left_count() == 1
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", notices=("spot interruption, EventBridge", "spot interruption, metadata"))
async def test_several_events_of_an_interruption_are_one_notice(rig: Rig) -> None:
    """Warning, duplicate and state change: the first event names the notice, the earliest deadline counts."""
    first = rig.bridge.warn(SPOT)
    rig.bridge.warn(SPOT)
    await rig.read()
    rig.bridge.state_changed(SPOT, "shutting-down")
    rig.ahead = timedelta(seconds=31)
    await rig.read_again()
    (standing,) = rig.view.state.notices.values()
    assert standing.notice.provider_event == first
    assert standing.notice.reclaim_at is not None
    assert standing.notice.reclaim_at <= datetime.now(UTC)
    await rig.read_again()
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", notices=("rebalance recommendation, EventBridge",))
async def test_a_recommendation_is_published_once(rig: Rig) -> None:
    """As SpotRebalanceRecommended, not as a notice."""
    rig.bridge.tell("EC2 Instance Rebalance Recommendation", {"instance-id": SPOT})
    (notice,) = await rig.read()
    assert isinstance(notice, SpotRebalanceRecommended)
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", notices=("instance state change, EventBridge",))
async def test_a_listed_termination_needs_no_notice(rig: Rig) -> None:
    """The scaler lists every few seconds; only an end that is not listed after 30 s becomes a notice."""
    rig.bridge.state_changed(SPOT, "terminated")
    assert await rig.read() == []
    rig.know(listed(SPOT, "terminated", 4))
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0
    rig.bridge.state_changed(GROUPED, "terminated")
    rig.ahead = timedelta(seconds=31)
    (notice,) = await rig.read()
    assert isinstance(notice, SpotNoticeReceived)
    assert notice.reclaim_at is not None
    assert notice.reclaim_at <= notice.received_at


@pytest.mark.cloud(
    "aws",
    calls=("CompleteLifecycleAction", "RecordLifecycleActionHeartbeat"),
    notices=("group's lifecycle action, EventBridge",),
)
async def test_a_hook_is_completed_only_when_the_node_is_drained(rig: Rig) -> None:
    """Until then it is extended; afterwards the message is deleted."""
    node = NodeObserved(
        epoch=EPOCH,
        version=1,
        node_uid=NodeUid("n1"),
        name="n1",
        is_ready=True,
        allocatable=Resources(),
        created_at=datetime(2026, 11, 22, tzinfo=UTC),
        provider_id=provider_id_of(GROUPED),
        action_id=ActionId("buy"),
    )
    rig.know(node)
    token = rig.bridge.hook(GROUPED, "gpu-workers")
    (notice,) = await rig.read()
    assert isinstance(notice, SpotNoticeReceived)
    assert await rig.read_again() == []
    assert (rig.bridge.heartbeats_count, token in rig.bridge.waiting) == (2, True)
    drained = ScalingNodeDrained(
        plan_id=PlanId("p"),
        action_id=ActionId("drain"),
        node_uid=NodeUid("n1"),
        node_name="n1",
        provider_id=provider_id_of(GROUPED),
        drained_at=datetime.now(UTC),
    )
    rig.know(drained)
    assert await rig.read_again() == []
    assert (token in rig.bridge.waiting, rig.bridge.left_count()) == (False, 0)


async def test_the_message_of_an_expired_hook_is_deleted(rig: Rig) -> None:
    """AWS no longer knows its token."""
    token = rig.bridge.hook(GROUPED, "gpu-workers")
    rig.bridge.waiting.discard(token)
    rig.know(listed(GROUPED, "terminated", 4))
    assert await rig.read() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", calls=("ChangeMessageVisibility",), notices=("scheduled change, AWS Health",))
async def test_unreadable_messages_are_hidden(rig: Rig) -> None:
    """They are counted once and hidden for hours, not deleted. So is maintenance that is days ahead."""
    rig.bridge.write("no json")
    rig.bridge.tell("EC2 Something New", {"instance-id": SPOT})
    starts = datetime.now(UTC) + timedelta(days=9)
    detail = {
        "service": "EC2",
        "eventTypeCategory": "scheduledChange",
        "eventArn": "arn:1",
        "startTime": starts.strftime("%a, %d %b %Y %H:%M:%S GMT"),
        "affectedEntities": [{"entityValue": SPOT}],
    }
    rig.bridge.tell("AWS Health Event", detail, source="aws.health")
    assert await rig.read() == []
    assert rig.unread_count == 2
    assert await rig.read_again() == []
    assert (rig.unread_count, rig.bridge.left_count()) == (2, 3)


async def test_a_warning_of_an_instance_of_others_is_deleted(rig: Rig) -> None:
    """The instance may not be listed yet, so its message stays for two minutes."""
    rig.bridge.warn("i-0ccccccccccccccccc")
    assert await rig.read() == []
    assert rig.bridge.left_count() == 1
    rig.ahead = timedelta(seconds=121)
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", errors=("RequestLimitExceeded", "UnauthorizedOperation", "answer lost"))
@pytest.mark.parametrize("fault", ["RequestLimitExceeded", "AccessDenied", "lost"])
async def test_queue_failures_lose_no_message(rig: Rig, fault: str) -> None:
    """Throttled, forbidden, or the answer lost after the message was received: it is received again."""
    rig.bridge.warn(SPOT)
    kind = Fault(kind="lost", call="ReceiveMessage", left_count=1)
    if fault != "lost":
        kind = Fault(kind="refused", call="ReceiveMessage", code=fault, left_count=1)
    rig.region.fake.faults.add(kind)
    with pytest.raises(TransientError):
        await rig.read()
    (notice,) = await rig.read_again()
    assert isinstance(notice, SpotNoticeReceived)
    rig.region.fake.faults.add(Fault(kind="lost", call="DeleteMessage", left_count=1))
    with pytest.raises(TransientError):
        await rig.read_again()
    await rig.read_again()
    assert (await rig.read_again(), rig.bridge.left_count(), rig.call_count("DeleteMessage")) == ([], 0, 1)
