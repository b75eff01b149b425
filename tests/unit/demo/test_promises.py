"""A broken promise is found: each check of a live run is shown to fail on a run that broke it."""

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
from gpu_autoscaler.model.decisions import BuyNode
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


def a_run(*, without: tuple[type[Fact], ...] = (), late: Mapping[type[Fact], float] | None = None) -> Record:
    """The examples as one run in which every promise is kept, less some facts, some told later (seconds)."""
    record = Record()
    for number, kind in enumerate(KEPT, 1):
        if kind not in without:
            add(record, BY_TYPE[kind], number, (late or {}).get(kind, 0.0))
    return record


def add(record: Record, fact: Fact, number: int, late_seconds: float = 0.0) -> None:
    """Record a fact."""
    envelope = Envelope(id=FactId(str(number)), source="/t", time=examples.NOON, fact=fact)
    recorded = Recorded(envelope=envelope, stream=fact.stream(), sequence=number)
    record.add(Seen(recorded=recorded, stored_at=WALL + timedelta(seconds=late_seconds)))


def truth(*, launches: int = 1, left: tuple[str, ...] = (), bill_change: int = 0) -> GroundTruth:
    """What is true outside: one launch, nothing left, and a bill equal to what was charged."""
    assert isinstance(CHARGED, CostAccrued)
    return GroundTruth(
        launches_by_token={examples.BUY: launches},
        instances_left=left,
        bill_micro_usd={examples.INSTANCE: CHARGED.total_micro_usd + bill_change},
    )


def broken(
    record: Record, true: GroundTruth | None = None, *, nodes_count_max: int = 100, price_max: int | None = None
) -> str:
    """The broken promises in one text."""
    policy = ScalingPolicy(nodes_count_max=nodes_count_max, price_micro_usd_per_hour_max=price_max)
    return "\n".join(broken_promises(record, true or truth(), policy, clock_factor=1.0))


def test_a_run_that_kept_all_is_not_accused() -> None:
    """The example run breaks nothing."""
    assert broken(a_run()) == ""
    assert jobs_have_ended(a_run())


def test_an_accepted_job_without_an_end_is_found() -> None:
    """No accepted job is lost."""
    assert "0 final states" in broken(a_run(without=(JobFinished,)))
    assert not jobs_have_ended(a_run(without=(JobFinished,)))


def test_two_different_ends_are_found_and_a_repeat_is_not() -> None:
    """Exactly one final state; the same one told twice is one."""
    record = a_run()
    add(record, BY_TYPE[JobFinished], 90)
    assert broken(record) == ""
    finished = BY_TYPE[JobFinished]
    assert isinstance(finished, JobFinished)
    add(record, msgspec.structs.replace(finished, outcome="failed"), 91)
    assert "2 final states" in broken(record)


def test_a_request_that_vanished_is_found() -> None:
    """What was asked for is queued or rejected."""
    assert "neither queued nor rejected" in broken(a_run(without=(JobQueued, JobFinished)))


def test_two_launches_for_one_action_are_found() -> None:
    """The token makes a second try harmless, or the promise is broken."""
    assert "made 2 instances" in broken(a_run(), truth(launches=2))


def test_a_limit_that_was_overshot_is_found() -> None:
    """Orders count from their plan on."""
    assert "allowed are 0" in broken(a_run(), nodes_count_max=0)


def test_a_price_an_hour_that_was_overshot_is_found() -> None:
    """Money counts from the plan on, and no more once the cloud has refused."""
    record = a_run()
    assert "allowed are 1000" in broken(record, price_max=1000)
    assert broken(record, price_max=10**9) == ""
    plan, refused = BY_TYPE[ScalingPlanMade], BY_TYPE[ScalingLaunchRefused]
    assert isinstance(plan, ScalingPlanMade)
    (bought,) = (one for one in plan.plan.decisions if isinstance(one, BuyNode))
    limit = bought.offer.price_micro_usd_per_hour
    record = Record()
    add(record, plan, 1)
    add(record, msgspec.structs.replace(refused, action_id=bought.action_id), 2)
    again = msgspec.structs.replace(bought, action_id=ActionId("another"))
    add(record, msgspec.structs.replace(plan, plan=msgspec.structs.replace(plan.plan, decisions=(again,))), 3)
    assert "micro-USD an hour" not in broken(record, price_max=limit)


def test_an_order_without_a_price_breaks_a_limit_of_money() -> None:
    """Unknown is not free; where no limit of money stands, nothing is broken."""
    plan = BY_TYPE[ScalingPlanMade]
    assert isinstance(plan, ScalingPlanMade)
    (bought,) = (one for one in plan.plan.decisions if isinstance(one, BuyNode))
    offer = msgspec.structs.replace(bought.offer, price_micro_usd_per_hour=None)
    unpriced = msgspec.structs.replace(bought, offer=offer)
    record = a_run(without=(ScalingPlanMade,))
    add(record, msgspec.structs.replace(plan, plan=msgspec.structs.replace(plan.plan, decisions=(unpriced,))), 90)
    assert "no known price" in broken(record, price_max=10**9)
    assert broken(record) == ""


def test_an_instance_left_over_is_found() -> None:
    """Nothing is ordered and forgotten."""
    assert "left over" in broken(a_run(), truth(left=("sim:///sim-a/i-1",)))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (a_run(without=(ScalingDrainStarted,)), "never answered"),
        (a_run(late={ScalingDrainStarted: 10.5}), "answered after 10.5 s"),
        (a_run(without=(ScalingNodeDrained,)), "not drained by its deadline"),
    ],
)
def test_a_notice_that_was_not_answered_in_time_is_found(record: Record, words: str) -> None:
    """Cordoned within ten seconds, drained by the deadline."""
    assert words in broken(record)


def test_force_by_choice_is_found() -> None:
    """A voluntary drain never forces a pod."""
    record = a_run(without=(ScalingDrainStarted, ScalingPodEvicted, SpotNoticeReceived))
    started, evicted = BY_TYPE[ScalingDrainStarted], BY_TYPE[ScalingPodEvicted]
    add(record, msgspec.structs.replace(started, is_voluntary=True), 90)
    add(record, msgspec.structs.replace(evicted, is_forced=True), 91)
    assert "forced off" in broken(record)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_micro_dollar_of_difference_is_found(change: int) -> None:
    """The bill is the provider's, to the micro-dollar."""
    assert "the provider bills" in broken(a_run(), truth(bill_change=change))


def test_shares_that_do_not_add_up_are_found() -> None:
    """Allocated and idle are the total."""
    record = a_run(without=(CostAccrued,))
    add(record, msgspec.structs.replace(CHARGED, idle_micro_usd=5), 90)
    assert "shares and idle" in broken(record)


def test_the_report_adds_up() -> None:
    """Figures come from the record and the truth."""
    late = make_report(
        a_run(late={ScalingDrainStarted: 1.5}), truth(), ScalingPolicy(), clock_factor=1.0, wall_seconds=1.0
    )
    assert late.notice_answer_seconds_p99 == 1.5
    report = make_report(a_run(), truth(), ScalingPolicy(), clock_factor=1.0, wall_seconds=1.0, broken=("x",))
    assert (report.jobs_requested, report.jobs_completed, report.notices_answered) == (1, 1, 1)
    assert report.bill_micro_usd == report.allocated_micro_usd + report.idle_micro_usd
    assert report.broken_promises == ("x",)


def test_a_quantile_is_a_value_that_was_seen() -> None:
    """Nothing is interpolated, and of nothing there is none."""
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
