"""Work that can wait for capacity that is certain to come is not bought for; high priority never waits."""

from datetime import datetime, timedelta

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, SECOND, T0, Story, given, job, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.model.decisions import Deferred, Plan
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected

GOING_AT = T0 + MINUTE


def made(*stories: Story, at: datetime = GOING_AT, **changes: float) -> Plan:
    """The plan after the stories, accepted by the plan check."""
    state, rules = given(*stories, on_sale(), as_of=at), policy(**changes)
    return accepted_plan(state, rules, at)


def deleted_pod(grace_seconds: float = 30.0) -> Story:
    """A full node whose pod is being deleted since GOING_AT."""
    busy = pod("old", on="n1", gpus=8, deleting_since=GOING_AT, grace_seconds=grace_seconds)
    return (*node("n1"), *busy)


def bought(found: Plan) -> int:
    """Number of nodes bought."""
    return len(found.purchases)


def expected(found: Plan, subject: str) -> CapacityExpected | None:
    """The capacity that the subject waits for."""
    reasons = [each.reason for each in found.deferred if each.subject == subject]
    return next((each for each in reasons if isinstance(each, CapacityExpected)), None)


@pytest.mark.parametrize(
    "waits", [pod("new", gpus=8, at=GOING_AT), job("new", gpus=8, at=GOING_AT)], ids=["pod", "job"]
)
def test_the_capacity_of_a_deleted_pod_is_waited_for(waits: Story) -> None:
    """Its grace period ends soon: nothing is bought, with node and time in the reason."""
    found = made(deleted_pod(), waits)
    assert bought(found) == 0
    (reason,) = [each.reason for each in found.deferred if isinstance(each.reason, CapacityExpected)]
    assert reason == CapacityExpected(node="n1", expected_at=GOING_AT + 30 * SECOND)


def test_no_work_waits_longer_than_allowed() -> None:
    """Counted from when the work began to wait; later, or for a longer grace period, it is bought for."""
    assert bought(made(deleted_pod(grace_seconds=121), pod("new", gpus=8, at=GOING_AT))) == 1
    assert bought(made(deleted_pod(grace_seconds=121), job("new", gpus=8, at=GOING_AT))) == 0
    assert bought(made(deleted_pod(), pod("new", gpus=8, at=T0 - 2 * MINUTE))) == 1
    assert bought(made(deleted_pod(), pod("new", gpus=8, at=GOING_AT), pending_pod_timeout_seconds=0)) == 1


def test_overdue_capacity_is_not_waited_for() -> None:
    """The grace period is over, and the pod is still there."""
    assert bought(made(deleted_pod(), pod("new", gpus=8, at=GOING_AT), at=GOING_AT + 31 * SECOND)) == 1


def test_high_priority_never_waits() -> None:
    """It is bought for at once."""
    assert bought(made(deleted_pod(), job("new", gpus=8, priority=1000, at=GOING_AT))) == 1


def test_expected_capacity_is_reserved_once() -> None:
    """Of two items the first waits for it, the other is bought for."""
    found = made(deleted_pod(), job("first", gpus=8, priority=600, at=GOING_AT), job("second", gpus=8, at=GOING_AT))
    assert bought(found) == 1
    assert expected(found, "job/first") is not None
    assert expected(found, "job/second") is None


def test_the_capacity_of_a_job_at_its_time_limit_is_waited_for() -> None:
    """Its end before the limit is unknown."""
    old = job("old", placed_on=("n1",), is_running=True, duration_seconds_max=3600.0)
    running = (*node("n1"), *old, *pod("p", on="n1", gpus=8, job_id="old"))
    soon = T0 + HOUR - MINUTE
    found = made(running, job("new", gpus=8, at=soon), at=soon)
    assert bought(found) == 0
    assert expected(found, "job/new") == CapacityExpected(node="n1", expected_at=T0 + HOUR)
    early = T0 + HOUR - timedelta(minutes=20)
    assert bought(made(running, job("new", gpus=8, at=early), at=early)) == 1


def test_a_gang_waits_whole_or_is_bought_whole() -> None:
    """Capacity for one of two members is nothing to wait for."""
    found = made(deleted_pod(), job("new", gpus=8, members=2, at=GOING_AT))
    assert bought(found) == 2


def test_the_plan_check_rejects_a_wait_that_is_too_long() -> None:
    """Checked against the records."""
    state = given(deleted_pod(), job("new", gpus=8, priority=1000, at=T0), as_of=GOING_AT)
    late = Deferred(step="cover_demand", subject="job/new", reason=CapacityExpected(node="n1", expected_at=T0 + HOUR))
    wrong = Plan(as_of=GOING_AT, parent_sequence=state.last_plan_sequence, deferred=(late,))
    told = " ".join(check(wrong, state, policy()))
    assert "has high priority and waits" in told
    assert "longer than allowed" in told
