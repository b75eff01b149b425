"""Notices by annotation: only if the policy allows them, once, for our nodes, withdrawn with the annotation."""

from datetime import datetime

import msgspec
import pytest
from tests.services.spot_watcher.test_service import DEADLINE, facts_of
from tests.support.fake_capacity import FakeCapacity
from tests.support.stories import MINUTE, SECOND, T0, given, node, offer, record
from tests.support.timed_facts import TimedFact

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.provisioning_settings import SpotPolicy
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, SpotOffersSampled
from gpu_autoscaler.runtime.projection import StateView
from gpu_autoscaler_services.spot_watcher.offers import OffersPoller
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher


class AnnotationBench:
    """Role central with nodes that are annotated."""

    def __init__(self, *, is_allowed: bool) -> None:
        self.view = StateView(given(node("n1"), node("theirs", is_ours=False)))
        cloud = FakeCapacity([offer()], installation="ours", now=lambda: T0)
        spot = SpotPolicy(is_test_annotation_on=is_allowed)
        self.service = SpotWatcher(OffersPoller(self.view, cloud, ScalingPolicy(spot=spot)))

    async def tick(self, at: datetime, **annotations: str) -> list[Fact]:
        """One tick, with these annotations on every node; notices alone."""
        pairs = tuple((f"gpu-autoscaler.io/spot-{key.replace('_', '-')}", value) for key, value in annotations.items())
        nodes = {uid: msgspec.structs.replace(node, annotations=pairs) for uid, node in self.view.state.nodes.items()}
        self.view.advance(msgspec.structs.replace(self.view.state, nodes=nodes), {})
        facts = facts_of(await self.service.on_tick(at))
        self.view.advance(fold(self.view.state, record([TimedFact(fact, at) for fact in facts])), {})
        return [fact for fact in facts if not isinstance(fact, SpotOffersSampled)]


async def test_annotation_is_notice_if_policy_allows() -> None:
    """Once, with its time, for our nodes only; withdrawn if removed in time."""
    bench = AnnotationBench(is_allowed=True)
    text = DEADLINE.isoformat()
    (notice,) = await bench.tick(T0, interruption_warning="true", termination_time=text)
    assert isinstance(notice, SpotNoticeReceived)
    assert (notice.node_name, notice.reclaim_at, notice.channel) == ("n1", DEADLINE, "annotation")
    assert await bench.tick(T0 + SECOND, interruption_warning="true", termination_time=text) == []
    (withdrawn,) = await bench.tick(T0 + 2 * SECOND)
    assert isinstance(withdrawn, SpotNoticeWithdrawn)
    assert await bench.tick(T0 + 3 * SECOND) == []


@pytest.mark.parametrize("time", ["", "soon", "2026-11-21T12:02:00"])
async def test_annotation_without_time_leaves_two_minutes(time: str) -> None:
    """Counted from when it was first seen; a time without a zone is ignored."""
    bench = AnnotationBench(is_allowed=True)
    (notice,) = await bench.tick(T0, interruption_warning="true", termination_time=time)
    assert isinstance(notice, SpotNoticeReceived)
    assert notice.reclaim_at == T0 + 2 * MINUTE
    assert await bench.tick(T0 + SECOND, interruption_warning="true", termination_time=time) == []


async def test_annotations_are_ignored_by_default() -> None:
    """Otherwise anyone who may annotate nodes could drain them."""
    bench = AnnotationBench(is_allowed=False)
    assert await bench.tick(T0, interruption_warning="true", termination_time=DEADLINE.isoformat()) == []
