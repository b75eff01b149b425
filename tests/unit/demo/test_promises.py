"""Each promise check reports a run that breaks the promise."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.events import examples
from gpu_autoscaler.events.cost import CostAccrued
from gpu_autoscaler.events.envelope import Envelope, Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.job import JobFinished, JobQueued, JobRequested
from gpu_autoscaler.events.scaling import (
    ScalingDrainStarted,
    ScalingLaunchRefused,
    ScalingNodeDrained,
    ScalingNodeTerminated,
    ScalingPlanMade,
    ScalingPodEvicted,
)
from gpu_autoscaler.events.spot import SpotNoticeReceived
from gpu_autoscaler.model.ids import ActionId, FactId
from gpu_autoscaler_services.demo.promises import broken_promises, jobs_have_ended
from gpu_autoscaler_services.demo.record import Record, Seen
from gpu_autoscaler_services.demo.report import make_report, quantile
from gpu_autoscaler_services.local.simulated_world import GroundTruth

WALL = datetime(2026, 11, 21, 12, tzinfo=UTC)
BY_TYPE: Mapping[type[Fact], Fact] = {type(envelope.fact): envelope.fact for envelope in examples.examples()}
CHARGED = BY_TYPE[CostAccrued]
KEPT: tuple[type[Fact], ...] = (
    JobRequested, JobQueued, JobFinished, ScalingPlanMade, SpotNoticeReceived, ScalingDrainStarted,
    ScalingPodEvicted, ScalingNodeDrained, ScalingNodeTerminated, CostAccrued,
)  # fmt: skip


def make_run(*, without: tuple[type[Fact], ...] = (), late: Mapping[type[Fact], float] | None = None) -> Record:
    """Return the examples as a run that keeps every promise, without some facts, with some delayed (seconds)."""
    record = Record()
    for number, kind in enumerate(KEPT, 1):
        if kind not in without:
            add(record, BY_TYPE[kind], number, (late or {}).get(kind, 0.0))
    return record


def add(record: Record, fact: Fact, number: int, late_seconds: float = 0.0) -> None:
    """Add a fact to the record."""
    envelope = Envelope(id=FactId(str(number)), source="/t", time=examples.NOON, fact=fact)
    recorded = Recorded(envelope=envelope, stream=fact.stream(), sequence=number)
    record.add(Seen(recorded=recorded, stored_at=WALL + timedelta(seconds=late_seconds)))


def truth(*, launches: int = 1, left: tuple[str, ...] = (), bill_change: int = 0) -> GroundTruth:
    """Return the ground truth: one launch, no instance left, and a bill equal to the charges."""
    assert isinstance(CHARGED, CostAccrued)
    return GroundTruth(
        launches_by_token={examples.BUY: launches},
        instances_left=left,
        bill_micro_usd={examples.INSTANCE: CHARGED.total_micro_usd + bill_change},
    )


def broken(
    record: Record, true: GroundTruth | None = None, *, nodes_count_max: int = 100, price_max: int | None = None
) -> str:
    """Return the broken promises as one text."""
    policy = ScalingPolicy(nodes_count_max=nodes_count_max, price_micro_usd_per_hour_max=price_max)
    return "\n".join(broken_promises(record, true or truth(), policy, clock_factor=1.0))


def test_a_correct_run_breaks_no_promise() -> None:
    """The example run has no broken promise."""
    assert broken(make_run()) == ""
    assert jobs_have_ended(make_run())


def test_an_accepted_job_without_an_end_is_found() -> None:
    """No accepted job is lost."""
    assert "0 final states" in broken(make_run(without=(JobFinished,)))
    assert not jobs_have_ended(make_run(without=(JobFinished,)))


def test_two_different_ends_are_found_and_a_repeat_is_not() -> None:
    """A job has exactly one final state; a repeated one counts once."""
    record = make_run()
    add(record, BY_TYPE[JobFinished], 90)
    assert broken(record) == ""
    finished = BY_TYPE[JobFinished]
    assert isinstance(finished, JobFinished)
    add(record, msgspec.structs.replace(finished, outcome="failed"), 91)
    assert "2 final states" in broken(record)


def test_a_lost_request_is_found() -> None:
    """Each request is queued or rejected."""
    assert "neither queued nor rejected" in broken(make_run(without=(JobQueued, JobFinished)))


def test_two_launches_for_one_action_are_found() -> None:
    """An idempotency token launches one instance."""
    assert "launched 2 instances" in broken(make_run(), truth(launches=2))


def test_an_exceeded_node_limit_is_found() -> None:
    """Orders count from their plan on."""
    assert "the maximum is 0" in broken(make_run(), nodes_count_max=0)


def test_an_exceeded_hourly_price_is_found() -> None:
    """Orders count from their plan until the cloud refuses them."""
    record = make_run()
    assert "the maximum is 1000" in broken(record, price_max=1000)
    assert broken(record, price_max=10**9) == ""
    plan, refused = BY_TYPE[ScalingPlanMade], BY_TYPE[ScalingLaunchRefused]
    assert isinstance(plan, ScalingPlanMade)
    (bought,) = plan.plan.purchases
    limit = bought.offer.price_micro_usd_per_hour
    record = Record()
    add(record, plan, 1)
    add(record, msgspec.structs.replace(refused, action_id=bought.action_id), 2)
    second = msgspec.structs.replace(bought, action_id=ActionId("another"))
    add(record, msgspec.structs.replace(plan, plan=msgspec.structs.replace(plan.plan, decisions=(second,))), 3)
    assert "micro-USD per hour" not in broken(record, price_max=limit)


def test_an_order_without_a_price_breaks_the_price_limit() -> None:
    """An unknown price is not free; without a limit no promise is broken."""
    plan = BY_TYPE[ScalingPlanMade]
    assert isinstance(plan, ScalingPlanMade)
    (bought,) = plan.plan.purchases
    offer = msgspec.structs.replace(bought.offer, price_micro_usd_per_hour=None)
    unpriced = msgspec.structs.replace(bought, offer=offer)
    record = make_run(without=(ScalingPlanMade,))
    add(record, msgspec.structs.replace(plan, plan=msgspec.structs.replace(plan.plan, decisions=(unpriced,))), 90)
    assert "without a known price" in broken(record, price_max=10**9)
    assert broken(record) == ""


def test_a_remaining_instance_is_found() -> None:
    """Every instance is terminated."""
    assert "is left in the cloud" in broken(make_run(), truth(left=("sim:///sim-a/i-1",)))


@pytest.mark.parametrize(
    ("record", "phrase"),
    [
        (make_run(without=(ScalingDrainStarted,)), "never answered"),
        (make_run(late={ScalingDrainStarted: 10.5}), "answered after 10.5 s"),
        (make_run(without=(ScalingNodeDrained,)), "not drained by its deadline"),
    ],
)
def test_a_late_answer_to_a_notice_is_found(record: Record, phrase: str) -> None:
    """Cordon within 10 s, drain by the deadline."""
    assert phrase in broken(record)


def test_a_forced_deletion_in_a_voluntary_drain_is_found() -> None:
    """A voluntary drain never forces a pod."""
    record = make_run(without=(ScalingDrainStarted, ScalingPodEvicted, SpotNoticeReceived))
    started, evicted = BY_TYPE[ScalingDrainStarted], BY_TYPE[ScalingPodEvicted]
    add(record, msgspec.structs.replace(started, is_voluntary=True), 90)
    add(record, msgspec.structs.replace(evicted, is_forced=True), 91)
    assert "forcibly deleted" in broken(record)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_micro_dollar_of_difference_is_found(change: int) -> None:
    """Charges equal the provider's bill to the micro-dollar."""
    assert "the provider bills" in broken(make_run(), truth(bill_change=change))


def test_shares_with_a_wrong_sum_are_found() -> None:
    """Allocated and idle sum to the total."""
    record = make_run(without=(CostAccrued,))
    add(record, msgspec.structs.replace(CHARGED, idle_micro_usd=5), 90)
    assert "shares and idle" in broken(record)


def test_the_report_has_the_figures() -> None:
    """Figures come from the record and the ground truth."""
    late = make_report(
        make_run(late={ScalingDrainStarted: 1.5}), truth(), ScalingPolicy(), clock_factor=1.0, wall_seconds=1.0
    )
    assert late.notice_answer_seconds_p99 == 1.5
    report = make_report(make_run(), truth(), ScalingPolicy(), clock_factor=1.0, wall_seconds=1.0, broken=("x",))
    assert (report.jobs_requested, report.jobs_completed, report.notices_answered) == (1, 1, 1)
    assert report.bill_micro_usd == report.allocated_micro_usd + report.idle_micro_usd
    assert report.broken_promises == ("x",)


def test_a_quantile_is_an_observed_value() -> None:
    """It is not interpolated, and None without values."""
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
