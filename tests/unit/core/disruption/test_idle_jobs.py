"""Jobs that are canceled because their GPUs are idle: only if it is certain, and switched on."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, TimedFact, given, job, node, pod, policy
from tests.support.telemetry import minutes

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import IdleJobsPolicy
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.job import JobCancelRequested
from gpu_autoscaler.model.decisions import AnnounceIdleJob, CancelIdleJob
from gpu_autoscaler.model.labels import IDLE_ANNOUNCED_AT, IDLE_ENDS_AT

NOW = T0 + HOUR
ON = policy(idle_jobs=IdleJobsPolicy(is_on=True))
HELD = dict.fromkeys(range(4), "default/a")
IDLE: dict[str, Any] = {"busy": 0.03, "pods": HELD}
GRACE_IS_OVER = {IDLE_ANNOUNCED_AT: (NOW - 12 * MINUTE).isoformat(), IDLE_ENDS_AT: (NOW - 2 * MINUTE).isoformat()}
WORKS = {number: {"utilization_ratio_mean": 0.9, "utilization_ratio_max": 0.9} for number in range(4, 8)}


def cancellations(state: ClusterState, rules: ScalingPolicy, at: datetime) -> tuple[CancelIdleJob, ...]:
    """Return the jobs that a checked plan of the state cancels."""
    made = plan(state, rules, at)
    assert [violation for violation in check(made, state, rules) if violation.action_ids] == []
    return tuple(decision for decision in made.upkeep_decisions if isinstance(decision, CancelIdleJob))


def holder(*more: Story, annotations: dict[str, str] = GRACE_IS_OVER) -> ClusterState:
    """A job that holds four GPUs of n1 for an hour; its end was announced."""
    held = pod("a", on="n1", gpus=4, owner_kind="Job", job_id="train", annotations=annotations)
    return given(node("n1"), job("train", gpus=4, placed_on=("n1",), is_running=True), held, *more, as_of=NOW)


def ended(*more: Story, rules: ScalingPolicy = ON, **of_pod: Any) -> tuple[CancelIdleJob, ...]:  # noqa: ANN401 - of `holder`
    """Which jobs the plan cancels, of one that holds four GPUs of n1 for an hour."""
    return cancellations(holder(*more, **of_pod), rules, NOW)


def test_an_idle_job_is_canceled() -> None:
    """At most 5 % on each of its GPUs for the whole hour; other GPUs of the node do not count."""
    (one,) = ended(minutes("n1", 60, sick=WORKS, **IDLE))

    assert one.job_id == "train"
    assert one.reason.note() == "its GPU utilization was at most 5 % for 1 h"


def test_an_idle_job_is_announced_before_it_is_canceled() -> None:
    """On its pods with GPUs, with the end of the grace; an announcement from before it worked does not count."""
    idle = minutes("n1", 60, sick=WORKS, **IDLE)
    worked = (*minutes("n1", 20, busy=0.5, pods=HELD), *minutes("n1", 40, start=T0 + 20 * MINUTE, sick=WORKS, **IDLE))
    old = {IDLE_ANNOUNCED_AT: T0.isoformat(), IDLE_ENDS_AT: (T0 + 10 * MINUTE).isoformat()}
    for state in (holder(idle, annotations={}), holder(worked, annotations=old)):
        assert cancellations(state, ON, NOW) == ()
        (act,) = (act for act in plan(state, ON, NOW).upkeep_decisions if isinstance(act, AnnounceIdleJob))
        assert (act.job_id, [named.name for named in act.pods]) == ("train", ["a"])
        assert (act.announced_at, act.ends_at) == (NOW, NOW + 10 * MINUTE)
        assert act.sentence().startswith("Announce the end of job train at 2026-11-21 13:10:00 UTC.")


def test_a_job_is_canceled_after_its_grace() -> None:
    """Not before, and it is not announced again meanwhile."""
    idle, ends_at = minutes("n1", 60, sick=WORKS, **IDLE), NOW + MINUTE
    early = holder(idle, annotations=GRACE_IS_OVER | {IDLE_ENDS_AT: ends_at.isoformat()})
    acts = [act.tag() for act in plan(early, ON, NOW).upkeep_decisions]
    assert not {"announce_idle_job", "cancel_idle_job"}.intersection(acts)


def test_by_default_no_job_is_canceled() -> None:
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
def test_without_certainty_no_job_is_canceled(telemetry: Story) -> None:
    """Unless every GPU was observed idle all the time."""
    assert ended(telemetry) == ()


def test_a_job_that_holds_memory_and_computes_nothing_is_idle() -> None:
    """A forgotten notebook: zero utilization, and a sensor that reads its memory."""
    memory = {number: {"memory_used_bytes_max": 2**30} for number in range(4)}
    other = (node("n2"), pod("b", on="n2", gpus=8), minutes("n2", 60))

    assert [one.job_id for one in ended(minutes("n1", 60, busy=0.0, pods=HELD, sick=memory), *other)] == ["train"]


@pytest.mark.parametrize(("busy_slice", "canceled"), [(2, ["train"]), (1, [])])
def test_a_job_of_mig_slices_is_idle_with_its_own_slices(busy_slice: int, canceled: list[str]) -> None:
    """Another slice of the same GPU may work; telemetry has an entry for each slice."""
    profile = "nvidia.com/mig-1g.5gb"
    held = pod("a", on="n1", slices={profile: 2}, owner_kind="Job", job_id="train", annotations=GRACE_IS_OVER)
    other = pod("b", on="n1", slices={profile: 1})
    works = {busy_slice: {"utilization_ratio_mean": 0.9, "utilization_ratio_max": 0.9}}
    holders = {0: "default/a", 1: "default/a", 2: "default/b"}
    telemetry = minutes("n1", 60, busy=0.03, pods=holders, sick=works)
    train = job("train", gpus=0, placed_on=("n1",), is_running=True)
    state = given(node("n1", slices={profile: 7}), train, held, other, telemetry, as_of=NOW)
    assert [act.job_id for act in cancellations(state, ON, NOW)] == canceled


def test_a_protected_job_is_not_canceled() -> None:
    """The annotation is that of moves."""
    keep = {"karpenter.sh/do-not-disrupt": "true"}

    assert ended(minutes("n1", 60, **IDLE), annotations=keep) == ()


def test_a_canceled_job_is_not_canceled_again() -> None:
    """The wish is on record, and once is enough."""
    (one,) = ended(minutes("n1", 60, sick=WORKS, **IDLE))
    canceled = JobCancelRequested(job_id=one.job_id)
    state = given(
        node("n1"), job("train", gpus=4, placed_on=("n1",), is_running=True), minutes("n1", 60, sick=WORKS, **IDLE),
        pod("a", on="n1", gpus=4, owner_kind="Job", job_id="train", annotations=GRACE_IS_OVER),
        (TimedFact(canceled, NOW),),
        as_of=NOW + timedelta(minutes=1),
    )  # fmt: skip

    assert cancellations(state, ON, NOW + timedelta(minutes=1)) == ()


def test_a_freeze_defers_the_cancellation() -> None:
    """With its reason, and the job."""
    story = (
        node("n1"),
        job("train", gpus=4, placed_on=("n1",), is_running=True),
        minutes("n1", 60, sick=WORKS, **IDLE),
    )
    held = pod("a", on="n1", gpus=4, owner_kind="Job", job_id="train", annotations=GRACE_IS_OVER)
    state = given(*story, held, as_of=NOW)
    frozen = policy(idle_jobs=IdleJobsPolicy(is_on=True), is_frozen=True)
    assert cancellations(state, frozen, NOW) == ()
    deferred = [act for act in plan(state, frozen, NOW).upkeep_deferred if act.decision == "cancel_idle_job"]
    assert [(act.subjects, act.reason.tag()) for act in deferred] == [(("job/train",), "frozen")]
