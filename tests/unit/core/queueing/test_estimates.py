"""When a queued job is expected to start and what it is to cost, with how that is known; scored when it starts."""

from datetime import datetime, timedelta

from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    T0,
    Story,
    Told,
    bought,
    given,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.estimates import START_SECONDS, Estimates
from gpu_autoscaler.core.queueing.scoring import estimates_due
from gpu_autoscaler.events.job import JobEstimated, JobEstimateScored, JobFinished, JobStarted
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.model.estimates import Estimate
from gpu_autoscaler.model.ids import JobId

SOON = timedelta(seconds=START_SECONDS)


def expected(*stories: Story, under: ScalingPolicy | None = None, at: datetime = T0, of: str = "train") -> Estimate:
    """What is expected of the job after the stories."""
    found = Estimates(given(*stories, as_of=at), under or policy(), at).of(JobId(of))
    assert found is not None
    return found


def test_a_job_with_room_starts_with_the_next_tick() -> None:
    """At the price of the nodes that take it, by its share of their GPUs."""
    found = expected(node("n1"), job("train", gpus=4, duration_seconds_max=7200.0), on_sale())
    assert (found.basis, found.start_at) == ("room", T0 + SOON)
    assert (found.cost_micro_usd, found.cost_micro_usd_max) == (10_000_000, 10_000_000)


def test_a_job_that_is_bought_for_starts_when_its_nodes_are_usable() -> None:
    """By the offer's promise, from the order on; of nodes that took twice as long, twice that."""
    order = purchase("buy-1", offer(boot_seconds=120))
    found = expected(job("train"), bought(order), on_sale(), at=T0 + MINUTE)
    assert (found.basis, found.start_at) == ("nodes_coming", T0 + 2 * MINUTE + SOON)
    assert "as the cloud's offers promise" in found.why

    none = expected(job("train"), on_sale(offer(boot_seconds=120)))
    assert (none.basis, none.start_at) == ("to_be_bought", T0 + 2 * MINUTE + SOON)
    assert none.start_at_latest == T0 + 4 * MINUTE + SOON


def test_boot_times_that_were_seen_go_before_what_is_promised() -> None:
    """Five nodes took three times as long: so will the next one; the range is theirs."""
    slow = tuple(told for number in range(5) for told in _slow(f"n{number}", minutes=5 + number / 2))
    found = expected(slow, job("train"), on_sale(offer(boot_seconds=120)), at=T0 + HOUR)
    assert found.start_at == T0 + HOUR + 6 * MINUTE + SOON
    assert found.start_at_earliest == T0 + HOUR + 5 * MINUTE + SOON
    assert found.start_at_latest is not None
    assert found.start_at < found.start_at_latest
    assert "as 5 nodes of late took" in found.why


def _slow(name: str, *, minutes: float) -> Story:
    """A node, full of work, that was usable so long after its order."""
    there = node(name, offer(boot_seconds=120), at=T0 + timedelta(minutes=minutes))
    ordered = bought(purchase(f"buy-{name}", offer(boot_seconds=120)), at=T0)
    busy = job(f"busy-{name}", placed_on=(name,), is_running=True)
    return (*ordered, *there[len(ordered):], *busy, *_pod_of(name))  # fmt: skip


def _pod_of(name: str) -> Story:
    return pod(f"p-{name}", on=name, gpus=8, job_id=f"busy-{name}")


def test_behind_a_limit_a_job_waits_for_work_that_ends() -> None:
    """By its time limit at the latest; likely when jobs of its name took that long. The one behind waits longer."""
    rules = policy(nodes_count_max=1)
    busy = (*job("busy", placed_on=("n1",), is_running=True, duration_seconds_max=7200.0), *_pod_of("n1"))
    found = expected(node("n1"), busy, job("train"), on_sale(), under=rules, at=T0 + MINUTE)
    assert (found.basis, found.start_at) == ("work_ending", None)
    assert found.start_at_latest == T0 + 2 * HOUR + SOON
    assert "nodes" in found.why or "node" in found.why

    before = (*job("old", job_name="busy", placed_on=("n1",), is_running=True), *_ended("old", T0 + 30 * MINUTE))
    known = expected(node("n1"), busy, before, job("train"), on_sale(), under=rules, at=T0 + MINUTE)
    assert known.start_at == T0 + 30 * MINUTE

    second = expected(node("n1"), busy, job("train"), job("next", at=T0 + MINUTE), on_sale(), under=rules,
                      at=T0 + MINUTE, of="next")  # fmt: skip
    assert second.basis == "unknown"


def _ended(name: str, at: datetime) -> Story:
    return (Told(JobFinished(job_id=JobId(name), outcome="completed", finished_at=at), at),)


def test_what_is_unknown_says_why_and_when_at_the_earliest() -> None:
    """Nothing for sale fits; or the cloud refused, and is asked again at an instant."""
    nothing = expected(job("train", gpus=16), on_sale())
    assert (nothing.basis, nothing.start_at, nothing.start_at_earliest) == ("unknown", None, None)
    assert "no offer has 16 GPUs" in nothing.why

    order = purchase("buy-1")
    refusal = ScalingLaunchRefused(
        action_id=order.action_id, plan_id=bought(order)[0].fact.plan_id, offer=order.offer, scope="offer",  # type: ignore[attr-defined]
        code="capacity", message="none", retry_at=T0 + HOUR, refused_at=T0,
    )  # fmt: skip
    refused = expected(job("train"), bought(order), (Told(refusal, T0),), on_sale(), at=T0 + MINUTE)
    assert (refused.basis, refused.start_at_earliest) == ("unknown", T0 + HOUR)


def test_the_cost_is_for_as_long_as_jobs_of_its_name_ran() -> None:
    """Half an hour of late, two hours at most."""
    old = (
        *job("old", job_name="train", at=T0 - HOUR, placed_on=("n1",), is_running=True),
        *_ended("old", T0 - HOUR / 2),
    )
    found = expected(node("n1"), old, job("train", duration_seconds_max=7200.0), on_sale())
    assert (found.cost_micro_usd, found.cost_micro_usd_max, found.run_seconds) == (5_000_000, 20_000_000, 1800.0)


def test_an_estimate_is_said_once_and_scored_when_the_job_starts() -> None:
    """How much later it started, whether that was in the range, and what its nodes cost more."""
    waiting = given(job("train", duration_seconds_max=7200.0), on_sale(offer(boot_seconds=120)))
    (said,) = estimates_due(waiting, policy(), T0)
    assert isinstance(said, JobEstimated)
    told = (Told(said, T0),)
    again = given(job("train", duration_seconds_max=7200.0), told, on_sale())
    assert estimates_due(again, policy(), T0 + MINUTE) == ()

    at = T0 + 3 * MINUTE
    placed = job("train", placed_on=("n1",), duration_seconds_max=7200.0)
    started = JobStarted(epoch=EPOCH, version=1, job_id=JobId("train"), kube_job="jobs/train", started_at=at)
    dear = offer(usd_per_hour=12.0)
    ran = given(placed, told, node("n1", dear), (Told(started, at),), on_sale(), as_of=at)
    (score,) = estimates_due(ran, policy(), at)
    assert score == JobEstimateScored(
        job_id=JobId("train"), basis="to_be_bought", start_error_seconds=50.0, was_within=True,
        cost_error_micro_usd=4_000_000, scored_at=at,
    )  # fmt: skip
    over = given(placed, told, node("n1", dear), (Told(started, at), Told(score, at)), on_sale(), as_of=at)
    assert estimates_due(over, policy(), at) == ()
