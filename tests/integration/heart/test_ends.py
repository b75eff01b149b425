"""Each job ends exactly once: cancelled in each of its states, over its time limit, or both."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.cluster import until
from tests.support.line import Line, running_line
from tests.support.stories import policy, request

from gpu_autoscaler.core.state.queries import job_state
from gpu_autoscaler.events.job import JobCancelRequested, JobFinished, JobPreempted, JobQueued, JobRequested, JobStarted
from gpu_autoscaler.events.scaling import ScalingNodeOrdered
from gpu_autoscaler.kube.protocol import PODS
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.jobs import JobState
from gpu_autoscaler.simcluster.api import DeleteOptions
from gpu_autoscaler.simcluster.kinds import PODS as SERVED_PODS
from gpu_autoscaler.simcluster.objects import is_true
from gpu_autoscaler.store.protocol import JobOutcome

pytestmark = [pytest.mark.integration, pytest.mark.slow]

POLICY = policy(idle_seconds_max=60.0, scale_down_cooldown_seconds=30.0, disruption_ratio_max=1.0)
TRAIN = JobId("train")
CANCEL = JobCancelRequested(job_id=TRAIN, requested_by="ana")


async def is_in(line: Line, state: JobState) -> bool:
    """Return True if the job is in this state."""
    return job_state(await line.state(), TRAIN) is state


async def is_stored_as(line: Line, outcome: JobOutcome) -> bool:
    """Return True if the store has this outcome; it is written as the effect of the fact."""
    row = await line.store.job(TRAIN)
    return row is not None and row.outcome == outcome


async def evict(line: Line, pod_name: str) -> None:
    """Cordon the pod's node and evict the pod."""
    pod = await line.here.kube.get(PODS, "default", pod_name)
    assert pod.spec.node_name is not None
    await line.here.kube.patch_node(pod.spec.node_name, {"spec": {"unschedulable": True}})
    await line.here.kube.evict_pod(pod)


async def pending(line: Line) -> None:
    """Submit a job without a scheduler."""
    await line.stop("scheduler")
    await line.say(request("train", run_seconds=4000.0))


async def queued(line: Line) -> None:
    """Submit a job without a scaler."""
    await line.stop("scaler")
    await line.say(request("train", run_seconds=4000.0))
    await line.wait_for(JobQueued)


async def provisioning(line: Line) -> None:
    """Submit a job and wait for an order."""
    await line.say(request("train", run_seconds=4000.0))
    await line.wait_for(ScalingNodeOrdered)
    await line.kill("pod_watcher")  # nobody sees the node come: else the job would run before anybody looks at it


async def running(line: Line) -> None:
    """Submit a job and wait until all its members run."""
    await line.say(request("train", run_seconds=4000.0))
    await line.wait_for(JobStarted)


async def preempted(line: Line) -> None:
    """Evict the pod of a running job, without a scaler."""
    await running(line)
    await line.stop("scaler")  # no other one is bought
    await evict(line, line.here.items("pods")[0]["metadata"]["name"])
    await line.wait_for(JobPreempted)


STATES: dict[JobState, Callable[[Line], Awaitable[None]]] = {
    JobState.PENDING: pending,
    JobState.QUEUED: queued,
    JobState.PROVISIONING: provisioning,
    JobState.RUNNING: running,
    JobState.PREEMPTED: preempted,
}


@pytest.mark.parametrize("state", STATES)
async def test_job_is_cancelled_once_in_each_state(tmp_path: Path, state: JobState) -> None:
    """Two requests, one end; its Kubernetes Job and pods are deleted, and there are no dead letters."""
    async with running_line(tmp_path, POLICY) as line:
        await STATES[state](line)
        await until(partial(is_in, line, state))
        await line.say(CANCEL)
        await line.start("scheduler")
        end = await line.wait_for(JobFinished)
        assert (end.outcome, end.message) == ("cancelled", "cancelled by ana")
        await line.say(CANCEL)
        await until(lambda: not line.here.items("jobs") and not line.here.items("pods"))
        await line.start("scheduler")  # what it had in hand comes again
        await until(partial(is_in, line, JobState.CANCELLED))
        await until(partial(is_stored_as, line, "cancelled"))
        assert len(await line.said(JobFinished)) == 1
        assert await line.dead_letters() == []


async def test_cancel_of_finished_job_changes_nothing(tmp_path: Path) -> None:
    """It stays completed, and the Kubernetes Job is kept for inspection."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=30.0))
        await line.wait_for(JobFinished)
        await line.say(CANCEL)
        await line.say(request("next", run_seconds=30.0))
        await line.wait_for(JobFinished, lambda fact: fact.job_id == "next")
        assert [fact.outcome for fact in await line.said(JobFinished)] == ["completed", "completed"]
        assert line.here.item("jobs", "train")
        assert await line.dead_letters() == []


async def test_cancel_racing_with_end_leaves_one_end(tmp_path: Path) -> None:
    """The work is done but not published when the cancellation arrives: the first fact counts."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=None))
        await line.wait_for(JobStarted)
        await line.kill("pod_watcher")
        line.here.world.kubelets.end_work()
        await until(lambda: is_true(line.here.item("jobs", "train"), "Complete"))
        await line.say(CANCEL)
        end = await line.wait_for(JobFinished)
        assert end.outcome == "cancelled"
        await line.start("pod_watcher")
        await line.say(request("next", run_seconds=30.0))
        await line.wait_for(JobFinished, lambda fact: fact.job_id == "next")
        assert len(await line.said(JobFinished, lambda fact: fact.job_id == TRAIN)) == 1
        await until(partial(is_stored_as, line, "cancelled"))


async def test_job_over_its_time_limit_fails(tmp_path: Path) -> None:
    """Kubernetes ends both members: one end, no loss, and nothing is bought."""
    asked: JobRequested = request("train", members=2, run_seconds=4000.0, max_duration_hours=300 / 3600)
    async with running_line(tmp_path, POLICY) as line:
        await line.say(asked)
        await line.wait_for(JobStarted)
        end = await line.wait_for(JobFinished)
        assert end.outcome == "failed"
        assert end.message == "DeadlineExceeded: Job was active longer than specified deadline"
        await until(lambda: not line.here.items("pods"))
        await until(lambda: all(machine.state == "terminated" for machine in line.here.cloud.machines))
        assert await line.said(JobPreempted) == []
        assert len(await line.said(JobFinished)) == 1
        await until(partial(is_stored_as, line, "failed"))
        assert await line.dead_letters() == []


async def test_member_evicted_unseen_is_replaced(tmp_path: Path) -> None:
    """Evicted without a pod watcher: the new pod gets a node, and no attempt is counted."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", members=2, run_seconds=200.0))
        await line.wait_for(JobStarted)
        await line.kill("pod_watcher")
        lost = line.here.items("pods")[0]["metadata"]
        await evict(line, lost["name"])
        await until(lambda: lost["uid"] not in {pod["metadata"]["uid"] for pod in line.here.items("pods")})
        await line.start("pod_watcher")
        end = await line.wait_for(JobFinished)
        assert end.outcome == "completed"
        assert await line.said(JobPreempted) == []
        assert await line.dead_letters() == []


async def test_member_deleted_unseen_fails_its_job(tmp_path: Path) -> None:
    """The Job controller does not replace it; the job ends once, as failed."""
    async with running_line(tmp_path, POLICY) as line:
        await line.say(request("train", run_seconds=4000.0))
        await line.wait_for(JobStarted)
        await line.kill("pod_watcher")
        (lost,) = line.here.items("pods")
        line.here.world.api.delete(SERVED_PODS, f"default/{lost['metadata']['name']}", DeleteOptions())
        await until(lambda: not line.here.items("pods"))
        await line.start("pod_watcher")
        end = await line.wait_for(JobFinished)
        assert end.outcome == "failed"
        assert end.message.startswith("BackoffLimitExceeded")
        assert len(await line.said(JobFinished)) == 1
