"""Estimates of start time and cost, their basis, and their scores."""

from datetime import datetime, timedelta
from typing import Any

from tests.support.stories import (
    EPOCH,
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
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
from gpu_autoscaler.events.job import JobEstimated, JobEstimateScored, JobFinished, JobStarted, RunScore
from gpu_autoscaler.events.scaling import ScalingLaunchRefused
from gpu_autoscaler.model.estimates import Estimate
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.offers import CapacityType

SOON = timedelta(seconds=START_SECONDS)


def estimate_of(*stories: Story, under: ScalingPolicy | None = None, at: datetime = T0, of: str = "train") -> Estimate:
    """The estimate of the job after the stories."""
    result = Estimates(given(*stories, as_of=at), under or policy(), at).of(JobId(of))
    assert result is not None
    return result


def test_a_job_with_free_capacity_starts_with_the_next_tick() -> None:
    """At the price of its share of the nodes."""
    result = estimate_of(node("n1"), job("train", gpus=4, duration_seconds_max=7200.0), on_sale())
    assert (result.basis, result.start_at) == ("free_capacity", T0 + SOON)
    assert (result.cost_micro_usd, result.cost_micro_usd_max) == (10_000_000, 10_000_000)


def test_a_job_that_leaves_expensive_capacity_unused_starts_on_a_new_node() -> None:
    """At the price of that one, as the plan buys it; where nothing is bought, on what is free."""
    large = offer(capacity_type=CapacityType.ON_DEMAND, usd_per_hour=32.0)
    small = offer("g5.xlarge", gpus=1, cpu=4, memory_gib=16, usd_per_hour=0.5)
    story = (node("n1", large), job("train", gpus=1, duration_seconds_max=7200.0), on_sale(large, small))
    result = estimate_of(*story)
    assert (result.basis, result.start_at) == ("purchase", T0 + 2 * MINUTE + SOON)
    assert result.cost_micro_usd == 1_000_000

    frozen = estimate_of(*story, under=policy(is_frozen=True))
    assert (frozen.basis, frozen.cost_micro_usd) == ("free_capacity", 8_000_000)


def test_a_job_without_gpus_costs_its_share_of_a_node_without_gpus() -> None:
    """A quarter of the CPUs for an hour; beside GPUs it is charged nothing, as the cost tracker splits by GPUs."""
    cpus = offer("m7i.4xlarge", model=None, cpu=16, memory_gib=64, usd_per_hour=0.8)
    prepare = job("train", gpus=0, cpu=4, duration_seconds_max=3600.0)
    assert estimate_of(prepare, on_sale(offer(), cpus)).cost_micro_usd == 200_000
    assert estimate_of(node("n1", cpus), prepare, on_sale(offer(), cpus)).cost_micro_usd == 200_000
    assert estimate_of(prepare, on_sale(offer(), cpus), under=policy(is_frozen=True)).cost_micro_usd == 200_000
    assert estimate_of(node("n1"), prepare, on_sale()).cost_micro_usd == 0


def test_a_job_starts_when_its_booting_nodes_are_usable() -> None:
    """By the boot time of the offer, from the order on."""
    order = purchase("buy-1", offer(boot_seconds=120))
    result = estimate_of(job("train"), bought(order), on_sale(), at=T0 + MINUTE)
    assert (result.basis, result.start_at) == ("booting_nodes", T0 + 2 * MINUTE + SOON)
    assert "boot times of the offers" in result.why

    none = estimate_of(job("train"), on_sale(offer(boot_seconds=120)))
    assert (none.basis, none.start_at) == ("purchase", T0 + 2 * MINUTE + SOON)
    assert none.start_at_latest == T0 + 4 * MINUTE + SOON


def test_observed_boot_times_replace_promised_ones() -> None:
    """Five nodes took three times as long; the range is theirs."""
    slow = tuple(event for number in range(5) for event in _slow(f"n{number}", minutes=5 + number / 2))
    result = estimate_of(slow, job("train"), on_sale(offer(boot_seconds=120)), at=T0 + HOUR)
    assert result.start_at == T0 + HOUR + 6 * MINUTE + SOON
    assert result.start_at_earliest == T0 + HOUR + 5 * MINUTE + SOON
    assert result.start_at_latest is not None
    assert result.start_at < result.start_at_latest
    assert "of 5 recent nodes" in result.why


def _slow(name: str, *, minutes: float) -> Story:
    """A full node that was usable this long after its order."""
    there = node(name, offer(boot_seconds=120), at=T0 + timedelta(minutes=minutes))
    ordered = bought(purchase(f"buy-{name}", offer(boot_seconds=120)), at=T0)
    busy = job(f"busy-{name}", placed_on=(name,), is_running=True)
    return (*ordered, *there[len(ordered):], *busy, *_pod_of(name))  # fmt: skip


def _pod_of(name: str) -> Story:
    return pod(f"p-{name}", on=name, gpus=8, job_id=f"busy-{name}")


def test_under_a_limit_a_job_waits_for_running_jobs() -> None:
    """By their time limits at the latest; likely by the run time of their name. The next job waits longer."""
    rules = policy(nodes_count_max=1)
    busy = (*job("busy", placed_on=("n1",), is_running=True, duration_seconds_max=7200.0), *_pod_of("n1"))
    result = estimate_of(node("n1"), busy, job("train"), on_sale(), under=rules, at=T0 + MINUTE)
    assert (result.basis, result.start_at) == ("job_completion", None)
    assert result.start_at_latest == T0 + 2 * HOUR + SOON
    assert "nodes" in result.why or "node" in result.why

    before = (*job("old", job_name="busy", placed_on=("n1",), is_running=True), *_ended("old", T0 + 30 * MINUTE))
    known = estimate_of(node("n1"), busy, before, job("train"), on_sale(), under=rules, at=T0 + MINUTE)
    assert known.start_at == T0 + 30 * MINUTE

    second = estimate_of(node("n1"), busy, job("train"), job("next", at=T0 + MINUTE), on_sale(), under=rules,
                      at=T0 + MINUTE, of="next")  # fmt: skip
    assert second.basis == "unknown"


def _ended(name: str, at: datetime) -> Story:
    return (TimedFact(JobFinished(job_id=JobId(name), outcome="completed", finished_at=at), at),)


def test_an_unknown_start_has_a_reason_and_an_earliest_time() -> None:
    """No offer fits, or offers are in back-off."""
    nothing = estimate_of(job("train", gpus=16), on_sale())
    assert (nothing.basis, nothing.start_at, nothing.start_at_earliest) == ("unknown", None, None)
    assert "no offer has 16 GPUs" in nothing.why

    order = purchase("buy-1")
    refusal = ScalingLaunchRefused(
        action_id=order.action_id, plan_id=bought(order)[0].fact.plan_id, offer=order.offer, scope="offer",  # type: ignore[attr-defined]
        code="capacity", message="none", retry_at=T0 + HOUR, refused_at=T0,
    )  # fmt: skip
    refused = estimate_of(job("train"), bought(order), (TimedFact(refusal, T0),), on_sale(), at=T0 + MINUTE)
    assert (refused.basis, refused.start_at_earliest) == ("unknown", T0 + HOUR)


def test_the_cost_uses_the_run_time_of_jobs_of_its_name() -> None:
    """Half an hour recently, two hours at most."""
    old = (
        *job("old", job_name="train", at=T0 - HOUR, placed_on=("n1",), is_running=True),
        *_ended("old", T0 - HOUR / 2),
    )
    result = estimate_of(node("n1"), old, job("train", duration_seconds_max=7200.0), on_sale())
    assert (result.cost_micro_usd, result.cost_micro_usd_max, result.run_seconds) == (5_000_000, 20_000_000, 1800.0)


def test_a_reservation_moves_the_starts_of_others() -> None:
    """The head of the queue starts when capacity is released, at the latest by time limits; a job that would delay it
    starts then, not on the GPUs that are free now; a short one passes."""
    rules = policy(nodes_count_max=1, queues=[{"name": "all", "reserve_after_seconds": 60}])
    busy = (*job("busy", gpus=4, placed_on=("n1",), is_running=True, duration_seconds_max=7200.0),
            *pod("p-n1", on="n1", gpus=4, job_id="busy"))  # fmt: skip
    waiting = (node("n1"), busy, job("head", gpus=8), on_sale())
    at = T0 + 2 * MINUTE
    for name, seconds, basis in (("long", 9000.0, "reservation"), ("short", 600.0, "free_capacity")):
        stories = (*waiting, job(name, gpus=4, at=T0 + MINUTE, duration_seconds_max=seconds))
        head = estimate_of(*stories, under=rules, at=at, of="head")
        latest = T0 + 2 * HOUR + SOON
        assert (head.basis, head.start_at, head.start_at_latest) == ("reservation", latest, latest)
        other = estimate_of(*stories, under=rules, at=at, of=name)
        assert other.basis == basis
        spec = job(name, gpus=4, at=T0 + MINUTE, duration_seconds_max=seconds)[1].fact.spec  # type: ignore[attr-defined]
        before = Estimates(given(*waiting, as_of=at), rules, at).of_new(spec)
        assert (before.basis, before.start_at) == (other.basis, other.start_at)
    known = (*job("old", job_name="busy", gpus=4, at=T0 - 2 * HOUR, placed_on=("n1",), is_running=True),
             *_ended("old", T0 - HOUR))  # fmt: skip
    likely = estimate_of(*waiting, known, under=rules, at=at, of="head")
    assert likely.start_at is not None
    assert likely.start_at_latest is not None
    assert T0 + HOUR <= likely.start_at < likely.start_at_latest


def test_a_predicted_run_time_is_scored_when_the_job_has_completed() -> None:
    """Once; jobs without a prediction, or that failed, are not scored."""
    limit: dict[str, Any] = {"duration_seconds_max": 7200.0, "expected_duration_seconds": 1200.0}
    (estimated,) = estimates_due(given(job("train", **limit), on_sale()), policy(), T0)
    assert isinstance(estimated, JobEstimated)
    assert (estimated.estimate.run_source, estimated.estimate.run_seconds) == ("request", 1200.0)
    ran = (*job("train", placed_on=("n1",), is_running=True, **limit), TimedFact(estimated, T0))
    start = JobEstimateScored(job_id=JobId("train"), basis="unknown", start_error_seconds=None, was_within=None,
                              cost_error_micro_usd=None, scored_at=T0)  # fmt: skip
    end = T0 + 30 * MINUTE
    over = (*ran, TimedFact(start, T0), *_ended("train", end))
    (score,) = estimates_due(given(over, as_of=end), policy(), end)
    assert isinstance(score, JobEstimateScored)
    assert score.run == RunScore(source="request", predicted_seconds=1200.0, run_seconds=1800.0, was_within=True)
    assert score.condition() != start.condition()
    assert estimates_due(given(over, (TimedFact(score, end),), as_of=end), policy(), end) == ()
    plain = (*job("train", placed_on=("n1",), is_running=True), *_ended("train", end))
    assert estimates_due(given(plain, as_of=end), policy(), end) == ()


def test_an_estimate_is_published_once_and_scored_at_the_start() -> None:
    """Error of the start, whether within the range, and error of the cost."""
    waiting = given(job("train", duration_seconds_max=7200.0), on_sale(offer(boot_seconds=120)))
    (estimated,) = estimates_due(waiting, policy(), T0)
    assert isinstance(estimated, JobEstimated)
    event = (TimedFact(estimated, T0),)
    again = given(job("train", duration_seconds_max=7200.0), event, on_sale())
    assert estimates_due(again, policy(), T0 + MINUTE) == ()

    at = T0 + 3 * MINUTE
    placed = job("train", placed_on=("n1",), duration_seconds_max=7200.0)
    started = JobStarted(epoch=EPOCH, version=1, job_id=JobId("train"), kube_job="jobs/train", started_at=at)
    expensive = offer(usd_per_hour=12.0)
    ran = given(placed, event, node("n1", expensive), (TimedFact(started, at),), on_sale(), as_of=at)
    (score,) = estimates_due(ran, policy(), at)
    assert score == JobEstimateScored(
        job_id=JobId("train"), basis="purchase", start_error_seconds=50.0, was_within=True,
        cost_error_micro_usd=4_000_000, scored_at=at,
    )  # fmt: skip
    over = given(
        placed, event, node("n1", expensive), (TimedFact(started, at), TimedFact(score, at)), on_sale(), as_of=at
    )
    assert estimates_due(over, policy(), at) == ()
