"""A gang whose launch is refused, partly or completely: completed with other offers, or released."""

import asyncio
from pathlib import Path

import pytest
from tests.support.cluster import until
from tests.support.line import Line, running_line
from tests.support.stories import policy, request

from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.events.job import JobFinished
from gpu_autoscaler.events.scaling import ScalingLaunchRefused, ScalingNodeLaunched, ScalingNodeOrdered, ScalingPlanMade
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


async def submit_gang(line: Line, *, refused_count: int) -> None:
    """Submit a gang policy_of four with one node each; the first launches find no capacity."""
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


def policy_of(pool: NodePool) -> ScalingPolicy:
    """Return a policy that buys from this pool and removes no idle node."""
    return policy(pools=(pool,), idle_seconds_max=IDLE_SECONDS_MAX, disruption_ratio_max=1.0)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cloud that launches instances one by one."""
    monkeypatch.setattr(SimCapacity, "can_launch_group", lambda *_: False)


@pytest.mark.usefixtures("one_by_one")
async def test_partly_refused_gang_is_completed_with_another_offer(tmp_path: Path) -> None:
    """Two of four launches find no capacity: the missing two are bought with another offer."""
    small = NodePool(name="default", instance_types=("g4dn.xlarge",))
    async with running_line(tmp_path, policy_of(small)) as line:
        await submit_gang(line, refused_count=2)
        end = await line.wait_for(JobFinished)
        assert end.outcome == "completed"
        refused = {fact.offer.key for fact in await line.said(ScalingLaunchRefused)}
        assert refused
        assert len(await line.said(ScalingNodeLaunched)) == 4
        later = {fact.offer.key for fact in await line.said(ScalingNodeOrdered)} - refused
        assert later


async def test_group_launch_without_full_capacity_launches_nothing(tmp_path: Path) -> None:
    """Capacity for two of four: each order is refused, and nothing has to be released."""
    async with running_line(tmp_path, policy_of(ONE_OFFER)) as line:
        await submit_gang(line, refused_count=2)
        async with asyncio.timeout(60):
            while len(refused := await line.said(ScalingLaunchRefused)) < 4:
                await asyncio.sleep(0.05)
        assert len({fact.action_id for fact in refused}) == 4
        assert line.here.cloud.machines == ()
        assert await line.said(ScalingNodeLaunched) == []
        plans = await line.said(ScalingPlanMade)
        assert not [decision for made in plans for decision in made.plan.releases]
        assert await line.dead_letters() == []


@pytest.mark.usefixtures("one_by_one")
async def test_incomplete_gang_releases_its_nodes(tmp_path: Path) -> None:
    """Two of four launches find no capacity, and there is no other offer: the other two are released."""
    async with running_line(tmp_path, policy_of(ONE_OFFER)) as line:
        await submit_gang(line, refused_count=2)
        await until(lambda: len(line.here.cloud.machines) == 2)
        await until(lambda: all(machine.state == "terminated" for machine in line.here.cloud.machines))
        plans = await line.said(ScalingPlanMade)
        released = [decision for made in plans for decision in made.plan.releases]
        assert [decision.reason for decision in released] == [
            GangAbandoned(gang="job/gang", defer_reason="offers_unavailable"),
            GangAbandoned(gang="job/gang", defer_reason="offers_unavailable"),
        ]
        assert await line.said(JobFinished) == []
        assert await line.dead_letters() == []
