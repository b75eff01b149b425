"""What is bought for the jobs of queues."""

import pytest
from tests.support.stories import HOUR, T0, given, job, offer, on_sale, policy

from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.queue_settings import QueuePolicy, SchedulingPolicy
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import QueueHeadWaits


def bought_for(scheduling_policy: SchedulingPolicy, *, members: int = 1, gpus_max: int | None = 8) -> list[str]:
    """Jobs that nodes are bought for, of an older large one and a small one; GPUs are limited."""
    queues = (QueuePolicy(name="all", scheduling_policy=scheduling_policy),)
    small = offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=4.0)
    large = job("large", gpus=8, members=3, at=T0 - HOUR)
    state = given(on_sale(offer(), small), large, job("small", gpus=4, members=members), as_of=T0)
    made = plan(state, policy(queues=queues, gpu_count_max=gpus_max), T0)
    reasons = [decision.reason for decision in made.purchases]
    if scheduling_policy == "fcfs-strict" and gpus_max == 8:
        held = {deferred.subject: deferred.reason for deferred in made.deferred}
        assert held["job/small"] == QueueHeadWaits(queue="all", job_id="large")  # type: ignore[arg-type]
    return sorted({key for reason in reasons if isinstance(reason, UnmetDemand) for key in reason.demand})


@pytest.mark.parametrize("members", [1, 2])
def test_nothing_is_bought_behind_the_head_of_a_strict_queue(members: int) -> None:
    """It would wait, and the node would be empty; under best effort it starts, so it gets its node."""
    assert bought_for("fcfs-strict", members=members) == []
    assert bought_for("fcfs-best-effort", members=members) == ["job/small"]


def test_all_of_a_strict_queue_is_bought_for_if_its_head_is() -> None:
    """Within the limits the queue is no obstacle."""
    assert bought_for("fcfs-strict", gpus_max=None) == ["job/large", "job/small"]
