"""What jobs of queues wait for, in one line."""

from tests.support.stories import HOUR, T0, given, job, node, pod, policy

from gpu_autoscaler.core.explain.status import StatusView, job_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.state.state import ClusterState


def lines(state: ClusterState, rules: ScalingPolicy, *job_ids: str) -> list[str]:
    """The line of each of these jobs, with the plan of now."""
    status = StatusView.of(state, rules, T0, plan(state, rules, T0))
    return [job_line(job_id, status) for job_id in job_ids]


def cluster() -> ClusterState:
    """A node half used for two more hours, a gang that needs all of it, and a small job that fits."""
    running = job("r", gpus=4, at=T0 - HOUR, placed_on=("n1",), is_running=True, duration_seconds_max=3 * 3600.0)
    member = pod("r-0", on="n1", gpus=4, at=T0 - HOUR, owner_kind="Job", job_id="r")
    gang = job("gang", gpus=8, at=T0 - 2 * HOUR, project_id="vision")
    return given(node("n1"), running, member, gang, job("small", gpus=4), as_of=T0)


def test_a_reservation_is_named_by_both_sides() -> None:
    """The job that reserves says until when, the job behind says behind whom."""
    queue = QueuePolicy(name="all", reserve_after_seconds=3600.0)
    gang, small = lines(cluster(), policy(queues=(queue,), nodes_count_max=1), "gang", "small")

    until = (T0 + 2 * HOUR).strftime("%Y-%m-%d %H:%M:%S UTC")
    assert f"8 GPUs are reserved for job gang; running jobs release them by {until}." in gang
    assert small.startswith(f"Waiting: Job gang has waited longer and reserves 8 GPUs until it starts, at {until}")


def test_a_strict_queue_names_the_job_ahead() -> None:
    """In the plan as well: nothing is bought for what would not start."""
    queue = QueuePolicy(name="all", scheduling_policy="fcfs-strict")
    _, small = lines(cluster(), policy(queues=(queue,), nodes_count_max=1), "gang", "small")

    assert small.startswith("Waiting: Job gang is ahead in queue all and waits; in this queue (fcfs-strict) none")


def test_fair_share_tells_use_and_average() -> None:
    """Four GPUs for an hour, less what decayed since the last part of the day; the other project none."""
    queue = QueuePolicy(name="all", scheduling_policy="fair-share")
    gang, small = lines(cluster(), policy(queues=(queue,), nodes_count_max=1), "gang", "small")

    assert "Its project used 0.0 GPU-hours lately, below the average of 2.0 in queue all (fair-share)." in gang
    assert "Its project used 3.9 GPU-hours lately, not below the average of 2.0 in queue all (fair-share)." in small


def test_without_queues_the_line_is_as_before() -> None:
    """No word about queues."""
    (gang,) = lines(cluster(), policy(nodes_count_max=1), "gang")

    assert "queue" not in gang
