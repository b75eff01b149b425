"""From request to effect and back: four real services, a simulated cluster, no broker process."""

from functools import partial
from pathlib import Path

import pytest
from tests.support.cluster import until
from tests.support.line import HEART, Line, running_line
from tests.support.stories import policy, request

from gpu_autoscaler.core.state.queries import job_state
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPlaced, JobPreempted, JobRejected, JobStarted
from gpu_autoscaler.events.scaling import (
    ScalingDrainStarted,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
    ScalingPlanMade,
    ScalingPodEvicted,
)
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.simcluster.api import DeleteOptions
from gpu_autoscaler.simcluster.kinds import JOBS

pytestmark = [pytest.mark.integration, pytest.mark.slow]

POLICY = policy(idle_seconds_max=60.0, scale_down_cooldown_seconds=30.0, disruption_ratio_max=1.0)


def running_instances(line: Line) -> list[str]:
    """Return the provider ids of the instances that cost money."""
    return [machine.provider_id for machine in line.here.cloud.machines if machine.state != "terminated"]


async def ended(line: Line, provider_ids: set[ProviderId]) -> bool:
    """Return True if the state has the end of each of these instances."""
    return provider_ids <= {fact.provider_id for fact in await line.said(ScalingNodeTerminated)}


async def plans_are_stored(line: Line) -> bool:
    """Return True if the store has every plan; each is written as the effect of its fact."""
    return len((await line.store.plans()).rows) == len(await line.said(ScalingPlanMade))


def is_about(job_id: str, fact: JobStarted | JobFinished) -> bool:
    """Return True if the fact is about this job."""
    return fact.job_id == job_id


async def dead_letter_reasons(line: Line, count: int) -> list[str]:
    """Return the reasons of the dead dead_letter_reasons once there are `count`."""
    found = await line.dead_letters()
    return found if len(found) >= count else []


async def finished(line: Line, count: int) -> list[JobFinished]:
    """Return the ends of jobs once there are `count`."""
    ends = await line.said(JobFinished)
    return ends if len(ends) >= count else []


async def test_job_gets_node_and_leaves_empty_cluster(tmp_path: Path) -> None:
    """Requested, queued, bought for, placed, started, finished; then the idle node is removed. No dead letters."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", members=2, run_seconds=60.0))
        end = await line.wait_for(JobFinished)
        assert (end.job_id, end.outcome) == ("train", "completed")
        assert len(await line.said(JobPlaced)) == 1
        assert len(await line.said(JobStarted)) == 1
        launched = await line.said(ScalingNodeLaunched)
        assert len(launched) == len(await line.said(ScalingNodeOrdered))
        await until(lambda: not running_instances(line))
        await until(partial(ended, line, {fact.provider_id for fact in launched}))
        row = await line.store.job(JobId("train"))
        assert row is not None
        assert row.outcome == "completed"
        await until(partial(plans_are_stored, line))
        assert await line.dead_letters() == []


async def test_interrupted_job_moves_before_the_deadline(tmp_path: Path) -> None:
    """Cordoned, asked to save, evicted, placed elsewhere: the job loses one attempt and completes."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=None))
        await line.wait_for(JobStarted)
        notice = await line.give_notice()
        await line.wait_for(ScalingDrainStarted)
        await line.wait_for(ScalingPodEvicted)
        drained = await line.wait_for(ScalingNodeDrained)
        assert notice.reclaim_at is not None
        assert drained.drained_at < notice.reclaim_at
        lost = await line.wait_for(JobPreempted)
        assert "spot_reclaim" in lost.cause
        again = await line.wait_for(JobPlaced, lambda fact: fact.attempt == 2)
        assert notice.node_name not in again.node_names
        await line.wait_for(JobStarted, lambda fact: fact.started_at >= again.placed_at)
        line.here.world.kubelets.end_work()
        end = await line.wait_for(JobFinished)
        assert end.outcome == "completed"
        assert await line.dead_letters() == []


async def test_cancelled_job_is_removed(tmp_path: Path) -> None:
    """Cancelled while it runs: its end is published once, its pods and its Job are deleted."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=4000.0))
        await line.wait_for(JobStarted)
        await line.say(JobCancelRequested(job_id=JobId("train"), requested_by="ana"))
        end = await line.wait_for(JobFinished)
        assert (end.outcome, end.message) == ("cancelled", "cancelled by ana")
        await until(lambda: not line.here.items("jobs") and not line.here.items("pods"))
        assert job_state(await line.state(), JobId("train")) is JobState.CANCELLED
        assert len(await line.said(JobFinished)) == 1


async def test_job_deleted_unseen_is_cancelled(tmp_path: Path) -> None:
    """The next pod watcher's list lacks its Job, and the job ends once."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=4000.0))
        await line.say(request("other", run_seconds=400.0))
        for name in ("train", "other"):
            await line.wait_for(JobStarted, partial(is_about, name))
        await line.kill("pod_watcher")
        line.here.world.api.delete(JOBS, "default/train", DeleteOptions(propagation="Background"))
        await until(lambda: not line.here.item("jobs", "train"))
        await line.start("pod_watcher")
        end = await line.wait_for(JobFinished)
        assert (end.job_id, end.outcome) == ("train", "cancelled")
        assert "how it ended is unknown" in end.message
        last = await line.wait_for(JobFinished, partial(is_about, "other"))
        assert last.outcome == "completed"
        assert len(await line.said(JobFinished)) == 2
        assert await line.dead_letters() == []


async def test_suspended_job_deleted_unseen_is_recreated(tmp_path: Path) -> None:
    """Kubernetes loses the suspended Job: it is created again, and the job completes."""
    async with running_line(tmp_path, POLICY) as line:
        await line.stop("scaler")  # nothing is bought, so the job waits
        await line.say(request("train", run_seconds=30.0))
        await until(lambda: line.here.item("jobs", "train"))
        await line.kill("pod_watcher")
        line.here.world.api.delete(JOBS, "default/train", DeleteOptions(propagation="Background"))
        await line.start("pod_watcher")
        await until(lambda: line.here.item("jobs", "train"))
        await line.start("scaler")
        end = await line.wait_for(JobFinished)
        assert end.outcome == "completed"


async def test_invalid_requests_are_rejected_and_set_aside(tmp_path: Path) -> None:
    """Violations by field; a taken id does not affect its job; a cancel of an unknown job is a dead letter."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("good"))
        await until(lambda: line.here.item("jobs", "good"))
        await line.say(request("good-2", members=0))
        rejected = await line.wait_for(JobRejected)
        assert [violation.field for violation in rejected.violations] == ["members"]
        await line.say(JobCancelRequested(job_id=JobId("nobody")))
        reasons = await until(partial(dead_letter_reasons, line, 2))
        assert any("members" in reason for reason in reasons)
        assert any("nobody" in reason for reason in reasons)


async def test_killing_each_service_changes_no_result(tmp_path: Path) -> None:
    """Every service dies while it works; the jobs complete, one launch per action, no instance is left."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("one", run_seconds=30.0))
        await line.say(request("two", members=2, run_seconds=60.0))
        signs: tuple[type[Fact], ...] = (ScalingPlanMade, ScalingNodeOrdered, JobPlaced, JobStarted)
        for name, sign in zip(HEART, signs, strict=True):
            await line.wait_for(sign)
            await line.kill(name)
            await line.start(name)
        ends = await until(partial(finished, line, 2))
        assert {(end.job_id, end.outcome) for end in ends} == {("one", "completed"), ("two", "completed")}
        await until(lambda: not running_instances(line))
        actions = [machine.action_id for machine in line.here.cloud.machines]
        assert len(actions) == len(set(actions))
        assert await line.dead_letters() == []
