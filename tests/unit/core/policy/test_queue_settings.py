"""Validation of queues: every violation names its field and the next step."""

import pytest
from tests.support.stories import policy

from gpu_autoscaler.core.policy.queue_settings import QueuePolicy
from gpu_autoscaler.core.policy.validation import policy_violations


@pytest.mark.parametrize(
    ("queues", "violation"),
    [
        (
            (QueuePolicy(name="a", projects=("x",)), QueuePolicy(name="b", projects=("x",))),
            "queues[1].projects: 'x' is in queue 'a' already; name it in one queue only",
        ),
        (
            (QueuePolicy(name="a"), QueuePolicy(name="b")),
            "queues[1].projects: is empty, and queue 'a' takes all other projects already; name the projects of queue 'b'",  # noqa: E501 - one sentence
        ),
        (
            (QueuePolicy(name="a"), QueuePolicy(name="a", projects=("x",))),
            "queues: name 'a' is used 2 times; use unique names",
        ),
        (
            (QueuePolicy(name="a", half_life_hours=48.0),),
            "queues[0].half_life_hours: has no effect with priority; remove it, or use fair-share",
        ),
        (
            (QueuePolicy(name="a", scheduling_policy="fcfs-strict", aging_hourly_priority=10.0),),
            "queues[0].aging_hourly_priority: has no effect with fcfs-strict, which goes by waiting time; remove it, or use priority or fair-share",  # noqa: E501 - one sentence
        ),
    ],
)
def test_contradictions_of_queues_are_violations(queues: tuple[QueuePolicy, ...], violation: str) -> None:
    """One sentence each."""
    assert policy_violations(policy(queues=queues)) == (violation,)


def test_queues_that_complete_each_other_are_valid() -> None:
    """Named projects, and one queue for the others."""
    queues = (
        QueuePolicy(name="research", projects=("x", "y"), scheduling_policy="fair-share", half_life_hours=48.0),
        QueuePolicy(name="rest", aging_hourly_priority=10.0, reserve_after_seconds=3600.0),
    )

    assert policy_violations(policy(queues=queues)) == ()
