"""Which jobs are ended because they leave their GPUs idle: those of which it is sure, and only where that is wanted."""

from datetime import timedelta
from typing import Any

import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, Told, given, job, node, pod, policy
from tests.support.telemetry import minutes

from gpu_autoscaler.core.disruption.idle_jobs import idle_job_cancellations
from gpu_autoscaler.core.policy.disruption_settings import IdleJobsPolicy
from gpu_autoscaler.events.job import JobCancelRequested

NOW = T0 + HOUR
ON = policy(idle_jobs=IdleJobsPolicy(is_on=True))
HELD = dict.fromkeys(range(4), "default/a")
IDLE: dict[str, Any] = {"busy": 0.03, "pods": HELD}
WORKS = {number: {"utilization_ratio_mean": 0.9, "utilization_ratio_max": 0.9} for number in range(4, 8)}


def ended(*more: Story, rules: object = ON, **of_pod: object) -> tuple[JobCancelRequested, ...]:
    """Which jobs are ended, of one that holds four GPUs of n1 for an hour."""
    held = pod("a", on="n1", gpus=4, owner_kind="Job", job_id="train", **of_pod)  # type: ignore[arg-type]
    story = (node("n1"), job("train", gpus=4, placed_on=("n1",), is_running=True), held, *more)
    return idle_job_cancellations(given(*story, as_of=NOW), rules, NOW)  # type: ignore[arg-type]


def test_a_job_that_left_its_gpus_idle_for_too_long_is_ended() -> None:
    """At most 5 % on each of its GPUs for the whole hour; the other GPUs of the node are not its."""
    (one,) = ended(minutes("n1", 60, sick=WORKS, **IDLE))

    assert (one.job_id, one.requested_by) == ("train", "gpu-autoscaler")
    assert one.note == "its GPUs were used at 5 % at most for 1 h"


def test_by_default_nobody_is_ended() -> None:
    """It is people's work; who wants it switches it on."""
    assert ended(minutes("n1", 60, **IDLE), rules=policy()) == ()


@pytest.mark.parametrize(
    "telemetry",
    [
        (),
        minutes("n1", 29, **IDLE),
        (*minutes("n1", 35, busy=0.5, pods=HELD), *minutes("n1", 25, start=T0 + 35 * MINUTE, **IDLE)),
        (*minutes("n1", 30, **IDLE), *minutes("n1", 5, start=T0 + 30 * MINUTE, is_silent=True),
         *minutes("n1", 25, start=T0 + 35 * MINUTE, **IDLE)),
        minutes("n1", 60, sick={2: {"utilization_ratio_mean": 0.06}}, **IDLE),
        minutes("n1", 60, busy=0.0, pods=HELD),
        minutes("n1", 60, watts=60.0, **IDLE),
        minutes("n1", 60, busy=None, pods=HELD),
        minutes("n1", 60, busy=0.03, pods={0: "default/a", 1: "default/a"}),
        minutes("n1", 60, busy=0.03),
    ],
    ids=["never heard of", "stale", "not long", "silent between", "one works", "all zero", "frozen", "absurd",
         "not all seen", "held by nobody"],
)  # fmt: skip
def test_a_job_is_never_ended_in_the_dark(telemetry: Story) -> None:
    """Where it is not sure that every GPU of it was idle for all of the time, it goes on."""
    assert ended(telemetry) == ()


def test_a_job_that_holds_memory_and_computes_nothing_is_idle() -> None:
    """A notebook that somebody forgot: zero use, read by a sensor that reads its memory."""
    memory = {number: {"memory_used_bytes_max": 2**30} for number in range(4)}
    other = (node("n2"), pod("b", on="n2", gpus=8), minutes("n2", 60))

    assert [one.job_id for one in ended(minutes("n1", 60, busy=0.0, pods=HELD, sick=memory), *other)] == ["train"]


def test_a_job_that_must_not_be_disturbed_goes_on() -> None:
    """The same mark as for moves."""
    keep = {"karpenter.sh/do-not-disrupt": "true"}

    assert ended(minutes("n1", 60, **IDLE), annotations=keep) == ()


def test_what_somebody_asked_to_end_is_not_asked_for_again() -> None:
    """The wish is on record, and once is enough."""
    (one,) = ended(minutes("n1", 60, sick=WORKS, **IDLE))
    state = given(
        node("n1"), job("train", gpus=4, placed_on=("n1",), is_running=True), minutes("n1", 60, sick=WORKS, **IDLE),
        pod("a", on="n1", gpus=4, owner_kind="Job", job_id="train"), (Told(one, NOW),),
        as_of=NOW + timedelta(minutes=1),
    )  # fmt: skip

    assert idle_job_cancellations(state, ON, NOW + timedelta(minutes=1)) == ()
