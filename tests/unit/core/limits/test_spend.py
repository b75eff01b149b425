"""Spend budgets per day and month: purchases reserve for the longest time of their work."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.money import USD, at_most, charged, clusters, ledger, spent
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    bought,
    given,
    instance,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)
from tests.unit.core.provisioning.test_scale_up import held

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.limits.spend import spend_uses
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.disruption_settings import RemovalCause
from gpu_autoscaler.core.policy.limit_settings import LimitsPolicy, PartLimit
from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.defer import PriceUnknown, WatchStale
from gpu_autoscaler.model.reasons.defer_limits import SpendLimit

DAY_END = datetime(2026, 11, 22, tzinfo=UTC)
# What a node is kept for besides an hour of work, in hours: boot, idle, drain, and the cloud's own time.
AROUND_HOURS = (900 + 600 + 600 + 120) / 3600
HOURLY = 3600.0
HALF_MINUTE = 83_335  # of 10 USD an hour, in micro-dollars: money is counted so far ahead


def planned(state: ClusterState, rules: ScalingPolicy, as_of: datetime = T0) -> Plan:
    """The plan, accepted by the plan check."""
    return accepted_plan(state, rules, as_of)


def waiting(*names: str, hours: float = 1.0, project: str = "research") -> Story:
    """Jobs that each need a node of 10 USD per hour, for at most this long."""
    return tuple(each for name in names for each in job(name, duration_seconds_max=hours * HOURLY, project_id=project))


def test_a_purchase_reserves_for_the_longest_time_of_its_work() -> None:
    """An hour of work plus boot and removal: 16.17 USD. One fits 20 USD, two do not."""
    state = given(ledger(), on_sale(), waiting("a", "b"))
    result = planned(state, clusters(day=20.0))

    assert len(result.purchases) == 1
    needed = round((1 + AROUND_HOURS) * 10 * USD)
    reason = held(result, "job/b", SpendLimit)
    assert needed <= reason.needed_micro_usd <= needed + HALF_MINUTE
    assert (reason.owner, reason.period, reason.until) == ("cluster", "day", DAY_END)
    assert len(planned(state, clusters(day=40.0)).purchases) == 2


def test_unknown_work_reserves_the_rest_of_the_period() -> None:
    """The run time of a pod is unknown: at noon half a day remains, 120 USD."""
    state = given(ledger(), on_sale(), pod("a", gpus=8, unschedulable_since=T0))

    assert len(planned(state, clusters(day=119.0)).purchases) == 0
    assert len(planned(state, clusters(day=121.0)).purchases) == 1


def test_the_period_bounds_the_reservation() -> None:
    """Ten minutes before midnight the day pays for ten minutes, the month for all of it."""
    as_of = DAY_END - 10 * MINUTE
    state = given(ledger(at=as_of), on_sale(), waiting("a", hours=24), as_of=as_of)

    assert len(planned(state, clusters(day=2.0), as_of).purchases) == 1
    assert held(planned(state, clusters(month=200.0), as_of), "job/a", SpendLimit).period == "month"


def test_launches_in_flight_are_reserved() -> None:
    """From the plan on."""
    order = bought(msgspec.structs.replace(purchase("one"), work_seconds_max=HOURLY), is_ordered=False)
    state = given(ledger(), on_sale(), order, waiting("a", "b"))

    assert held(planned(state, clusters(day=20.0)), "job/b", SpendLimit).reserved_micro_usd > 16 * USD


def test_unbilled_time_is_spent() -> None:
    """The tracker is ten minutes behind."""
    as_of = T0 + 10 * MINUTE
    state = given(
        ledger(), on_sale(), node("n"), instance(purchase("buy-n")), job("b", placed_on=("n",), is_running=True,
        duration_seconds_max=HOURLY), pod("b-0", on="n", gpus=8, job_id="b", at=T0), waiting("a"),
        as_of=as_of,
    )  # fmt: skip
    reason = held(planned(state, clusters(day=29.0), as_of), "job/a", SpendLimit)

    assert 0 <= reason.spent_micro_usd - 10 * USD / 6 <= HALF_MINUTE


def test_a_reservation_ends_with_its_node() -> None:
    """The node ended after an hour; the rest is not spent."""
    as_of = T0 + 2 * HOUR
    gone = instance(purchase("buy-one"), state="terminated")[0]
    ended = (TimedFact(msgspec.structs.replace(gone.fact, terminated_at=T0 + HOUR), gone.at),)
    paid = charged("one", to_at=T0 + HOUR)
    state = given(ledger(), on_sale(), bought(purchase("buy-one")), ended, paid, waiting("a"), as_of=as_of)

    assert len(planned(state, clusters(day=26.5), as_of).purchases) == 1
    assert held(planned(state, clusters(day=26.0), as_of), "job/a", SpendLimit).spent_micro_usd == 10 * USD


@pytest.mark.parametrize(
    ("rules", "owner"),
    [
        (policy(pools=(NodePool(name="default", spend=at_most(month=15.0)),)), "pool/default"),
        (policy(limits=LimitsPolicy(projects=(PartLimit(name="speech", spend=at_most(day=15.0)),))), "project/speech"),
        (policy(limits=LimitsPolicy(zones=(PartLimit(name="zone-a", spend=at_most(day=15.0)),))), "zone/zone-a"),
    ],
)
def test_budgets_of_pool_project_and_zone(rules: ScalingPolicy, owner: str) -> None:
    """The reason names the owner."""
    state = given(ledger(), on_sale(), waiting("a", project="speech"))
    reason = held(planned(state, rules), "job/a", SpendLimit)

    assert reason.owner == owner
    assert owner.partition("/")[2] in reason.sentence()


def test_a_project_budget_does_not_affect_other_projects() -> None:
    """It defers only purchases of its project."""
    rules = policy(limits=LimitsPolicy(projects=(PartLimit(name="speech", spend=at_most(day=1.0)),)))

    assert len(planned(given(ledger(), on_sale(), waiting("a")), rules).purchases) == 1


def test_nothing_is_bought_before_the_ledger_reported() -> None:
    """Unknown is not zero: on a new stream the budget may be spent."""
    result = planned(given(on_sale(), waiting("a")), clusters(month=1000.0))

    assert held(result, "job/a", WatchStale).source == "ledger"


def test_a_stalled_ledger_defers_purchases() -> None:
    """The instance ran for twenty minutes without a charge."""
    as_of = T0 + 20 * MINUTE
    state = given(ledger(), on_sale(), node("n"), instance(purchase("buy-n")), waiting("a", "b"), as_of=as_of)
    reason = held(planned(state, clusters(day=1000.0), as_of), "job/b", WatchStale)

    assert (reason.source, reason.age_seconds) == ("ledger", 1200.0)


def test_a_node_without_price_is_not_free() -> None:
    """Its spend is unknown."""
    order = bought(purchase("one", offer(usd_per_hour=None)))
    state = given(ledger(), on_sale(), order, waiting("a", "b"))

    assert held(planned(state, clusters(day=1000.0)), "job/b", PriceUnknown).offers == ("one",)


def test_a_new_day_starts_with_nothing_spent() -> None:
    """The month still counts it."""
    as_of = DAY_END + MINUTE
    sums = ledger(spent(500.0), spent(500.0, period="2026-11"), at=as_of)
    state = given(sums, on_sale(at=as_of), waiting("a"), as_of=as_of)

    assert len(planned(state, clusters(day=100.0), as_of).purchases) == 1
    assert len(planned(state, clusters(day=100.0, month=510.0), as_of).purchases) == 0


def test_the_use_of_a_budget_is_its_spent_share() -> None:
    """By owner and period; unknown is not zero, and without budgets there is nothing to show."""
    sums = ledger(spent(8.0), spent(30.0, period="2026-11"))
    rules = clusters(day=10.0, month=100.0)

    assert spend_uses(given(sums), rules, T0) == (("cluster", "day", 0.8), ("cluster", "month", 0.3))
    assert spend_uses(given(), rules, T0) == (("cluster", "day", None), ("cluster", "month", None))
    assert spend_uses(given(sums), clusters(day=0.0), T0) == (("cluster", "day", 1.0),)
    assert spend_uses(given(sums), policy(), T0) == ()


def test_the_plan_check_computes_spend_independently() -> None:
    """A plan above the budget, or with too short a work time, is rejected."""
    state = given(ledger(), on_sale(), waiting("a", "b"))
    result = plan(state, policy(), T0)
    assert len(result.purchases) == 2

    assert any("may spend" in violation for violation in check(result, state, clusters(day=20.0)))
    short = tuple(msgspec.structs.replace(each, work_seconds_max=60.0) for each in result.decisions)
    violations = check(msgspec.structs.replace(result, decisions=short), state, clusters(day=20.0))
    assert any("may take longer" in violation for violation in violations)


@pytest.mark.parametrize(("hours", "is_refused"), [((1.0, 2.0), False), ((2.0, 1.0), False), ((1.0, 1.0), True)])
def test_one_of_several_replacements_reserves_for_the_longest_work(
    hours: tuple[float, float], *, is_refused: bool
) -> None:
    """They do not say which pods they take."""
    state = given(ledger(), on_sale(), waiting("short"), waiting("long", hours=2.0))
    result = plan(state, policy(), T0)
    reason = ReplacesNodes(
        cause=RemovalCause.EXPIRED, node_uids=(NodeUid("n1"),), node_names=("n1",), demand=("job/short", "job/long")
    )
    together = [
        msgspec.structs.replace(each, reason=reason, work_seconds_max=most * HOURLY)
        for each, most in zip(result.purchases, hours, strict=True)
    ]
    violations = check(msgspec.structs.replace(result, decisions=tuple(together)), state, clusters(day=1000.0))
    assert any("may take longer" in violation for violation in violations) is is_refused


def test_a_daily_budget_above_the_monthly_one_is_rejected() -> None:
    """By the validation of the policy."""
    from gpu_autoscaler.core.policy.validation import policy_violations  # noqa: PLC0415 - asked here alone

    (violation,) = policy_violations(clusters(day=100.0, month=50.0))
    assert "limits.spend.day_micro_usd_max" in violation


def test_forty_pods_over_ten_seconds_stay_within_sixteen_gpus() -> None:
    """Karpenter reached 22 GPUs of a limit of 16 in this interleaving: each plan counts earlier decisions, launched or
    not."""
    single = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, cpu=4, memory_gib=16, usd_per_hour=0.5)
    quad = offer("g4dn.12xlarge", gpus=4, model="T4", gpu_memory_gib=16, cpu=48, memory_gib=192, usd_per_hour=1.9)
    rules, story, gpu_count = policy(gpu_count_max=16), list(on_sale(single, quad)), 0
    for second in range(11):
        at = T0 + timedelta(seconds=second)
        for number in range(4):
            story += pod(f"p{second}-{number}", gpus=1, model="T4", unschedulable_since=at, at=at)
        result = planned(given(tuple(story), as_of=at), rules, at)
        for decision in result.purchases:
            gpu_count += decision.offer.resources.gpu_count
            # Every third is ordered at once, the others wait for their turn.
            story += bought(decision, at=at, is_ordered=gpu_count % 3 == 0, is_launched=False)
        assert gpu_count <= 16
    assert gpu_count == 16
