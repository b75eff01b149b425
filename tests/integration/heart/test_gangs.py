"""A gang whose purchase is refused, in part or whole, on the running line: completed elsewhere, or given back."""

import asyncio
from pathlib import Path

import pytest
from tests.support.cluster import until
from tests.support.line import Line, running_line
from tests.support.stories import policy, request

from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingNodeLaunched, ScalingNodeOrdered, ScalingPlanMade
from gpu_autoscaler.model.decisions import ReleaseInstance
from gpu_autoscaler.model.jobs import GpuRequirements, ResourceRequest
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.model.reasons.drain import GangAbandoned
from gpu_autoscaler.providers.sim.capacity import SimCapacity
from gpu_autoscaler.simcluster.cloud import RefusalRule

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ONE_OFFER = NodePool(
    name="default", instance_types=("g4dn.xlarge",), zones=("sim-a",), capacity_types=(CapacityType.SPOT,)
)
# Long enough that nothing is seen to go because it was idle.
IDLE_SECONDS_MAX = 3600.0


async def ask_for_gang(line: Line, *, refused_count: int) -> None:
    """A gang of four, a node each; so many of the first launches find no capacity."""
    rule = RefusalRule(
        pattern="*",
        code="InsufficientInstanceCapacity",
        left_count=refused_count,
        until=None,
        retry_after_seconds=600.0,
    )
    line.here.cloud.refuse(rule)
    gang = request(
        "gang",
        members=4,
        gpu_requirements=GpuRequirements(gpu_type="T4", gpu_count=1),
        resources=ResourceRequest(cpu="3", memory="12Gi", ephemeral_storage="1Gi"),
        run_seconds=30.0,
    )
    await line.say(gang)


def of(pool: NodePool) -> ScalingPolicy:
    """A policy that buys from this pool and lets nothing idle out."""
    return policy(pools=(pool,), idle_seconds_max=IDLE_SECONDS_MAX, disruption_ratio_max=1.0)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cloud that makes its machines one after the other, as most do."""
    monkeypatch.setattr(SimCapacity, "can_launch_group", lambda *_: False)


@pytest.mark.usefixtures("one_by_one")
async def test_a_gang_that_is_refused_in_part_is_completed_elsewhere(tmp_path: Path) -> None:
    """Two of four launches find no capacity: the missing two are bought of another offer, and the gang runs."""
    small = NodePool(name="default", instance_types=("g4dn.xlarge",))
    async with running_line(tmp_path, of(small)) as line:
        await ask_for_gang(line, refused_count=2)
        end = await line.wait_for(JobFinished)
        assert end.outcome == "completed"
        refused = {one.offer.key for one in await line.said(ScalingLaunchRefused)}
        assert refused
        assert len(await line.said(ScalingNodeLaunched)) == 4
        later = {one.offer.key for one in await line.said(ScalingNodeOrdered)} - refused
        assert later


async def test_a_gang_that_cannot_be_made_whole_has_nothing_launched(tmp_path: Path) -> None:
    """Two of four find no capacity where the cloud makes all or none: each is refused, and nothing has to go back."""
    async with running_line(tmp_path, of(ONE_OFFER)) as line:
        await ask_for_gang(line, refused_count=2)
        async with asyncio.timeout(60):
            while len(refused := await line.said(ScalingLaunchRefused)) < 4:
                await asyncio.sleep(0.05)
        assert len({one.action_id for one in refused}) == 4
        assert line.here.cloud.machines == ()
        assert await line.said(ScalingNodeLaunched) == []
        plans = await line.said(ScalingPlanMade)
        assert not [each for made in plans for each in made.plan.decisions if isinstance(each, ReleaseInstance)]
        assert await line.dead_letters() == []


@pytest.mark.usefixtures("one_by_one")
async def test_a_gang_that_nothing_can_complete_gives_back_what_was_launched(tmp_path: Path) -> None:
    """Two of four launches find no capacity, and nothing else is on sale: the other two go at once, with the reason."""
    async with running_line(tmp_path, of(ONE_OFFER)) as line:
        await ask_for_gang(line, refused_count=2)
        await until(lambda: len(line.here.cloud.machines) == 2)
        await until(lambda: all(one.state == "terminated" for one in line.here.cloud.machines))
        plans = await line.said(ScalingPlanMade)
        given_back = [each for made in plans for each in made.plan.decisions if isinstance(each, ReleaseInstance)]
        assert [each.reason for each in given_back] == [
            GangAbandoned(gang="job/gang", defer_reason="offers_unavailable"),
            GangAbandoned(gang="job/gang", defer_reason="offers_unavailable"),
        ]
        assert await line.said(JobFinished) == []
        assert await line.dead_letters() == []
