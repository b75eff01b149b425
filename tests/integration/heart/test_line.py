"""The line from request to effect and back: four real services, a simulated cluster, no broker process."""

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
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.ids import JobId, ProviderId
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.simcluster.api import DeleteOptions
from gpu_autoscaler.simcluster.kinds import JOBS

pytestmark = [pytest.mark.integration, pytest.mark.slow]

POLICY = policy(idle_seconds_max=60.0, scale_down_cooldown_seconds=30.0, disruption_ratio_max=1.0)


def alive(line: Line) -> list[str]:
    """Provider ids of the machines that cost money."""
    return [machine.provider_id for machine in line.here.cloud.machines if machine.state != "terminated"]


async def ended(line: Line, provider_ids: set[ProviderId]) -> bool:
    """Whether the record has the end of each of these instances."""
    return provider_ids <= {fact.provider_id for fact in await line.said(ScalingNodeTerminated)}


async def plans_are_kept(line: Line) -> bool:
    """Whether the store has every plan on record; each is written as the effect of its fact."""
    return len((await line.store.plans()).rows) == len(await line.said(ScalingPlanMade))


def is_about(job_id: str, fact: JobStarted | JobFinished) -> bool:
    """Whether the fact is about this job."""
    return fact.job_id == job_id


async def letters(line: Line, count: int) -> list[str]:
    """The reasons of the dead letters, once there are so many."""
    found = await line.dead_letters()
    return found if len(found) >= count else []


async def finished(line: Line, count: int) -> list[JobFinished]:
    """How the jobs ended, once so many have."""
    ends = await line.said(JobFinished)
    return ends if len(ends) >= count else []


async def test_a_job_gets_its_node_runs_and_leaves_an_empty_cluster(tmp_path: Path) -> None:
    """Requested, queued, bought for, placed, started, finished; then the node idles and goes. No letter is dead."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", members=2, run_seconds=60.0))
        end = await line.wait_for(JobFinished)
        assert (end.job_id, end.outcome) == ("train", "completed")
        assert len(await line.said(JobPlaced)) == 1
        assert len(await line.said(JobStarted)) == 1
        launched = await line.said(ScalingNodeLaunched)
        assert len(launched) == len(await line.said(ScalingNodeOrdered))
        await until(lambda: not alive(line))
        await until(partial(ended, line, {one.provider_id for one in launched}))
        row = await line.store.job(JobId("train"))
        assert row is not None
        assert row.outcome == "completed"
        await until(partial(plans_are_kept, line))
        assert await line.dead_letters() == []


async def test_a_notice_moves_the_work_before_the_deadline(tmp_path: Path) -> None:
    """Cordoned, told to save, evicted, replaced elsewhere: the job loses one attempt and completes."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=None))
        await line.wait_for(JobStarted)
        doomed = line.here.cloud.machines[0]
        reclaim_at = line.here.cloud.give_notice(doomed, "terminate", 400.0)  # 20 s for the processes of this test
        await line.say(
            SpotNoticeReceived(
                provider_id=ProviderId(doomed.provider_id),
                kind="terminate",
                provider_event="1",
                reclaim_at=reclaim_at,
                node_name=doomed.node_name,
                received_at=line.here.clock.now(),
            )
        )
        await line.wait_for(ScalingDrainStarted)
        await line.wait_for(ScalingPodEvicted)
        drained = await line.wait_for(ScalingNodeDrained)
        assert drained.drained_at < reclaim_at
        lost = await line.wait_for(JobPreempted)
        assert "spot_reclaim" in lost.cause
        again = await line.wait_for(JobPlaced, lambda fact: fact.attempt == 2)
        assert doomed.node_name not in again.node_names
        await line.wait_for(JobStarted, lambda fact: fact.started_at >= again.placed_at)
        line.here.world.kubelets.end_work()
        end = await line.wait_for(JobFinished)
        assert end.outcome == "completed"
        assert await line.dead_letters() == []


async def test_a_cancelled_job_leaves_nothing_behind(tmp_path: Path) -> None:
    """Cancelled while it runs: its end is said once, its pods and its Kubernetes Job go."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=4000.0))
        await line.wait_for(JobStarted)
        await line.say(JobCancelRequested(job_id=JobId("train"), requested_by="ana"))
        end = await line.wait_for(JobFinished)
        assert (end.outcome, end.message) == ("cancelled", "cancelled by ana")
        await until(lambda: not line.here.items("jobs") and not line.here.items("pods"))
        assert job_state(await line.state(), JobId("train")) is JobState.CANCELLED
        assert len(await line.said(JobFinished)) == 1


async def test_a_job_that_is_deleted_while_nobody_watches_is_cancelled(tmp_path: Path) -> None:
    """The Kubernetes Job goes with the pod watcher away; the next one's list lacks it, and the job ends once."""
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
        assert "nobody saw how it ended" in end.message
        last = await line.wait_for(JobFinished, partial(is_about, "other"))
        assert last.outcome == "completed"
        assert len(await line.said(JobFinished)) == 2
        assert await line.dead_letters() == []


async def test_a_job_that_was_never_made_is_made_after_the_next_list(tmp_path: Path) -> None:
    """Kubernetes loses the suspended Job unseen: it is made again, and the job completes."""
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


async def test_what_cannot_be_accepted_is_told_and_set_aside(tmp_path: Path) -> None:
    """Mistakes by field; a taken id does not touch the job that has it; a cancel of nothing is a dead letter."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("good"))
        await until(lambda: line.here.item("jobs", "good"))
        await line.say(request("good-2", members=0))
        rejected = await line.wait_for(JobRejected)
        assert [mistake.field for mistake in rejected.mistakes] == ["members"]
        await line.say(JobCancelRequested(job_id=JobId("nobody")))
        reasons = await until(partial(letters, line, 2))
        assert any("members" in reason for reason in reasons)
        assert any("nobody" in reason for reason in reasons)


async def test_killing_each_service_in_turn_changes_nothing(tmp_path: Path) -> None:
    """Every service dies in the middle of it; the jobs complete, one launch an action, no machine is left."""
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
        await until(lambda: not alive(line))
        actions = [machine.action_id for machine in line.here.cloud.machines]
        assert len(actions) == len(set(actions))
        assert await line.dead_letters() == []
