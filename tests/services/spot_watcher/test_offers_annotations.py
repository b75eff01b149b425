"""A notice by annotation: only where the policy allows it, once, of our nodes, and taken back when it is taken off."""

from datetime import datetime

import msgspec
import pytest
from tests.services.spot_watcher.test_service import DEADLINE, facts_of
from tests.support.stories import MINUTE, SECOND, T0, given, node, offer, record
from tests.support.told import Told

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import SpotPolicy
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, SpotOffersSampled
from gpu_autoscaler.providers.fake import FakeCapacity
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler_services.spot_watcher.offers import OffersPoller
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher


class Annotated:
    """Role central with a node that people annotate."""

    def __init__(self, *, is_allowed: bool) -> None:
        self.view = StateView(given(node("n1"), node("theirs", is_ours=False)))
        cloud = FakeCapacity([offer()], installation="ours", now=lambda: T0)
        spot = SpotPolicy(is_test_annotation_on=is_allowed)
        self.service = SpotWatcher(OffersPoller(self.view, cloud, ScalingPolicy(spot=spot)))

    async def tick(self, at: datetime, **annotations: str) -> list[Fact]:
        """One tick, with these annotations on every node; notices alone."""
        pairs = tuple((f"gpu-autoscaler.io/spot-{key.replace('_', '-')}", value) for key, value in annotations.items())
        nodes = {uid: msgspec.structs.replace(each, annotations=pairs) for uid, each in self.view.state.nodes.items()}
        self.view.advance(msgspec.structs.replace(self.view.state, nodes=nodes), {})
        facts = facts_of(await self.service.on_tick(at))
        self.view.advance(fold(self.view.state, record([Told(fact, at) for fact in facts])), {})
        return [fact for fact in facts if not isinstance(fact, SpotOffersSampled)]


async def test_an_annotation_is_a_notice_where_the_policy_says_so() -> None:
    """Once, with the time that it carries, of our nodes alone; taken off in time it is taken back."""
    rig = Annotated(is_allowed=True)
    text = DEADLINE.isoformat()
    (told,) = await rig.tick(T0, interruption_warning="true", termination_time=text)
    assert isinstance(told, SpotNoticeReceived)
    assert (told.node_name, told.reclaim_at, told.way) == ("n1", DEADLINE, "annotation")
    assert await rig.tick(T0 + SECOND, interruption_warning="true", termination_time=text) == []
    (withdrawn,) = await rig.tick(T0 + 2 * SECOND)
    assert isinstance(withdrawn, SpotNoticeWithdrawn)
    assert await rig.tick(T0 + 3 * SECOND) == []


@pytest.mark.parametrize("time", ["", "soon", "2026-11-21T12:02:00"])
async def test_an_annotation_without_a_time_leaves_two_minutes(time: str) -> None:
    """Counted once, from when it was first seen; a time without its zone is none."""
    rig = Annotated(is_allowed=True)
    (told,) = await rig.tick(T0, interruption_warning="true", termination_time=time)
    assert isinstance(told, SpotNoticeReceived)
    assert told.reclaim_at == T0 + 2 * MINUTE
    assert await rig.tick(T0 + SECOND, interruption_warning="true", termination_time=time) == []


async def test_by_default_nobody_gives_notice_by_annotation() -> None:
    """Whoever may annotate a node could empty it."""
    rig = Annotated(is_allowed=False)
    assert await rig.tick(T0, interruption_warning="true", termination_time=DEADLINE.isoformat()) == []
