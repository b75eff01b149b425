"""A cloud's events through a real queue protocol: each becomes one fact, and stays queued until that fact is on record.

The queue is moto's behind the fake's faults; what is published is folded, unless a test loses it.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.aws import Region, served_region
from tests.support.told import EPOCH, Told, record

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


def named(instance_id: str) -> ProviderId:
    """As Kubernetes names it."""
    return ProviderId(f"aws:///eu-west-1a/{instance_id}")


def shown(instance_id: str, state: InstanceState = "running", version: int = 2) -> NodeInstanceObserved:
    """One of our instances, as the scaler lists it."""
    return NodeInstanceObserved(
        epoch=EPOCH,
        version=version,
        provider_id=named(instance_id),
        action_id=ActionId(f"buy-{instance_id}"),
        state=state,
        instance_type="g4dn.xlarge",
        zone="eu-west-1a",
        capacity_type=CapacityType.SPOT,
        price_micro_usd_per_hour=1,
        launched_at=datetime(2026, 11, 22, tzinfo=UTC),
    )


class Rig:
    """A queue, and the watcher's reading of it; the queue's clock is the wall's."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.bridge = region.fake.bridge
        self.queue_url = self.bridge.open_queue()
        self.view = StateView()
        self.unread_count = 0
        self.ahead = timedelta(0)  # how much later it is for the watcher
        self.queue = AwsQueue(
            region.options(queue_url=self.queue_url),
            url=region.url,
            call_seconds_max=20.0,
            now=lambda: datetime.now(UTC) + self.ahead,
            visible_again_seconds=1,
        )
        self.events = InterruptionQueue(self.view, self.queue, self._unread)
        self.know(shown(SPOT), shown(GROUPED))

    def _unread(self) -> None:
        self.unread_count += 1

    def know(self, *facts: Fact) -> None:
        """Have facts on record."""
        told = [Told(fact, datetime.now(UTC)) for fact in facts]
        self.view.advance(fold(self.view.state, record(told)), {})

    async def read(self, *, is_stored: bool = True) -> list[Fact]:
        """Read what can be read now."""
        facts = [fact for event in await self.queue.receive() for fact in await self.events.on_event(event)]
        if is_stored:
            self.know(*facts)
        return facts

    async def read_again(self) -> list[Fact]:
        """Read when what was left is visible once more."""
        await asyncio.sleep(1.1)
        return await self.read()

    def asked_count(self, name: str) -> int:
        """How often this was asked of the cloud."""
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
async def test_a_warning_is_told_once_and_deleted_when_it_is_on_record(rig: Rig) -> None:
    """Until then it stays: a fact that was lost is told again, under the same name."""
    rig.bridge.warn(SPOT)
    (lost,) = await rig.read(is_stored=False)
    assert rig.bridge.left_count() == 1
    (told,) = await rig.read_again()
    assert isinstance(told, SpotNoticeReceived)
    assert (told.provider_id, told.kind, told.way) == (named(SPOT), "terminate", "queue")
    assert lost.condition() == told.condition()
    assert rig.bridge.left_count() == 1
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", notices=("spot interruption, EventBridge", "spot interruption, metadata"))
async def test_an_interruption_told_by_several_events_is_one_notice(rig: Rig) -> None:
    """The warning, its repeat, the hook's word and the end: the first names it, the earliest deadline stands."""
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
async def test_a_recommendation_is_told_once(rig: Rig) -> None:
    """As a hint, not as a notice."""
    rig.bridge.tell("EC2 Instance Rebalance Recommendation", {"instance-id": SPOT})
    (told,) = await rig.read()
    assert isinstance(told, SpotRebalanceRecommended)
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", notices=("instance state change, EventBridge",))
async def test_an_end_that_the_list_shows_needs_no_notice(rig: Rig) -> None:
    """The scaler lists every few seconds; only what it has not shown after half a minute is told here."""
    rig.bridge.state_changed(SPOT, "terminated")
    assert await rig.read() == []
    rig.know(shown(SPOT, "terminated", 4))
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0
    rig.bridge.state_changed(GROUPED, "terminated")
    rig.ahead = timedelta(seconds=31)
    (told,) = await rig.read()
    assert isinstance(told, SpotNoticeReceived)
    assert told.reclaim_at is not None
    assert told.reclaim_at <= told.received_at


@pytest.mark.cloud(
    "aws",
    calls=("CompleteLifecycleAction", "RecordLifecycleActionHeartbeat"),
    notices=("group's lifecycle action, EventBridge",),
)
async def test_a_hook_is_completed_when_the_node_is_drained_and_not_before(rig: Rig) -> None:
    """Until then it gets heartbeats; afterwards the message goes."""
    node = NodeObserved(
        epoch=EPOCH,
        version=1,
        node_uid=NodeUid("n1"),
        name="n1",
        is_ready=True,
        allocatable=Resources(),
        created_at=datetime(2026, 11, 22, tzinfo=UTC),
        provider_id=named(GROUPED),
        action_id=ActionId("buy"),
    )
    rig.know(node)
    token = rig.bridge.hook(GROUPED, "gpu-workers")
    (told,) = await rig.read()
    assert isinstance(told, SpotNoticeReceived)
    assert await rig.read_again() == []
    assert (rig.bridge.heartbeats_count, token in rig.bridge.waiting) == (2, True)
    drained = ScalingNodeDrained(
        plan_id=PlanId("p"),
        action_id=ActionId("drain"),
        node_uid=NodeUid("n1"),
        node_name="n1",
        provider_id=named(GROUPED),
        drained_at=datetime.now(UTC),
    )
    rig.know(drained)
    assert await rig.read_again() == []
    assert (token in rig.bridge.waiting, rig.bridge.left_count()) == (False, 0)


async def test_a_hook_that_waits_no_more_is_done_with(rig: Rig) -> None:
    """Its time was over: AWS knows the token no more, and the message goes all the same."""
    token = rig.bridge.hook(GROUPED, "gpu-workers")
    rig.bridge.waiting.discard(token)
    rig.know(shown(GROUPED, "terminated", 4))
    assert await rig.read() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", calls=("ChangeMessageVisibility",), notices=("scheduled change, AWS Health",))
async def test_what_is_not_understood_is_left_out_of_the_way(rig: Rig) -> None:
    """Told, hidden for hours, never deleted, not read again and again. So waits maintenance that is far ahead."""
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


async def test_other_peoples_instances_are_nobodys_notice(rig: Rig) -> None:
    """One that is not known yet may be ours, so its message waits two minutes for the list."""
    rig.bridge.warn("i-0ccccccccccccccccc")
    assert await rig.read() == []
    assert rig.bridge.left_count() == 1
    rig.ahead = timedelta(seconds=121)
    assert await rig.read_again() == []
    assert rig.bridge.left_count() == 0


@pytest.mark.cloud("aws", errors=("RequestLimitExceeded", "UnauthorizedOperation", "answer lost"))
@pytest.mark.parametrize("fault", ["RequestLimitExceeded", "AccessDenied", "lost"])
async def test_a_queue_that_fails_loses_nothing(rig: Rig, fault: str) -> None:
    """Throttled, forbidden, or the answer lost after the message was handed out: it comes again."""
    rig.bridge.warn(SPOT)
    kind = Fault(kind="lost", call="ReceiveMessage", left_count=1)
    if fault != "lost":
        kind = Fault(kind="refused", call="ReceiveMessage", code=fault, left_count=1)
    rig.region.fake.faults.add(kind)
    with pytest.raises(TransientError):
        await rig.read()
    (told,) = await rig.read_again()
    assert isinstance(told, SpotNoticeReceived)
    rig.region.fake.faults.add(Fault(kind="lost", call="DeleteMessage", left_count=1))
    with pytest.raises(TransientError):
        await rig.read_again()
    await rig.read_again()
    assert (await rig.read_again(), rig.bridge.left_count(), rig.asked_count("DeleteMessage")) == ([], 0, 1)
