"""Capacity ahead of demand: minimum, headroom, scheduled limits, forecast."""

from datetime import UTC, datetime

import msgspec
from tests.support.accepted import accepted_plan
from tests.support.stories import HOUR, MINUTE, T0, Story, TimedFact, given, node, notice, offer, on_sale, pod, policy

from gpu_autoscaler.core.demand.history_samples import sample_due
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy, Headroom, ScheduledLimit
from gpu_autoscaler.core.provisioning.forecast_gauges import ForecastGauges, forecast_gauges
from gpu_autoscaler.core.provisioning.forecast_step import apply_scheduled_limits
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingDemandSampled, ScalingForecastScored
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.forecasts import Score
from gpu_autoscaler.model.reasons.buy import BelowMinimum, CapacityBuffer
from gpu_autoscaler.model.reasons.defer import ForecastUncertain, KeptAsBuffer, WatchStale
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit

CHEAP = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, usd_per_hour=0.5)


def bought(state: ClusterState, nodes_count_min: int) -> list[BuyNode]:
    """What is bought for this minimum."""
    plan_of = plan(state, policy(nodes_count_min=nodes_count_min), T0)
    return plan_of.purchases


def test_the_minimum_is_bought_with_the_cheapest_nodes() -> None:
    """Existing nodes count."""
    two = bought(given(on_sale(offer(), CHEAP)), 2)

    assert [decision.offer.key for decision in two] == [CHEAP.key, CHEAP.key]
    assert two[0].reason == BelowMinimum(nodes_count=0, nodes_count_min=2)
    assert len(bought(given(node("n1"), on_sale(CHEAP)), 2)) == 1
    assert bought(given(node("n1"), node("n2"), on_sale(CHEAP)), 2) == []


def test_a_leaving_node_does_not_count() -> None:
    """The only node is interrupted: another is bought at once."""
    state = given(node("n1"), notice("n1", reclaim_at=T0 + MINUTE), on_sale(CHEAP))

    assert [decision.reason for decision in bought(state, 1)] == [BelowMinimum(nodes_count=1, nodes_count_min=1)]


def test_the_minimum_is_not_bought_on_stale_lists() -> None:
    """Nodes that were not listed may exist."""
    state = given(on_sale(CHEAP), is_synced=False)
    (held,) = [each for each in plan(state, policy(nodes_count_min=1), T0).deferred if each.step == "prepare"]

    assert bought(state, 1) == []
    assert held.subject == "cluster"
    assert isinstance(held.reason, WatchStale)


# ---- headroom and schedules


def plan_of(state: ClusterState, as_of: datetime = T0, **changes: object) -> Plan:
    """The plan under a policy with these fields, accepted by the plan check."""
    changed = policy(**changes)
    return accepted_plan(state, changed, as_of)


def test_headroom_counts_booting_nodes() -> None:
    """Two free T4: two nodes of one are bought; with one booting, one more."""
    rooms = (Headroom(name="warm", free_gpu_count=2, gpu_model="T4"),)
    both = plan_of(given(on_sale(offer(), CHEAP)), headrooms=rooms).purchases
    one = plan_of(given(on_sale(offer(), CHEAP), node("n1", CHEAP)), headrooms=rooms).purchases

    assert [decision.offer.key for decision in both] == [CHEAP.key, CHEAP.key]
    assert both[0].reason == CapacityBuffer(demand=("headroom/warm",), free_gpu_count=0, wanted_gpu_count=2)
    assert both[0].reason.sentence() == "Headroom warm: 2 GPUs must be free (0 free or ordered)."
    assert len(one) == 1
    assert plan_of(given(on_sale(CHEAP), node("n1", CHEAP), node("n2", CHEAP)), headrooms=rooms).purchases == []


def test_a_limit_allows_a_part_of_the_headroom() -> None:
    """One of two nodes is bought and the rest is deferred: the plan check, which `plan_of` runs, accepts both."""
    rooms = (Headroom(name="warm", free_gpu_count=2, gpu_model="T4"),)
    decided = plan_of(given(on_sale(CHEAP)), headrooms=rooms, nodes_count_max=1)

    assert [one.reason for one in decided.purchases] == [
        CapacityBuffer(demand=("headroom/warm",), free_gpu_count=0, wanted_gpu_count=2)
    ]
    assert [(held.subject, held.reason) for held in decided.deferred] == [
        ("headroom/warm", NodesLimit(nodes_count=1, nodes_count_max=1))
    ]


def test_a_node_of_headroom_is_not_removed() -> None:
    """Empty for an hour; the other empty node is removed."""
    rooms = (Headroom(name="warm", free_gpu_count=1),)
    state = given(node("n1", CHEAP), node("n2", CHEAP), on_sale(CHEAP), as_of=T0 + HOUR)
    decided = plan_of(state, T0 + HOUR, headrooms=rooms)
    kept = [held for held in decided.deferred if isinstance(held.reason, KeptAsBuffer)]

    assert [held.subject for held in kept] == ["node/uid-n1"]
    assert kept[0].reason.sentence() == "The GPUs of the node are kept free for headroom warm."
    assert [one.node_name for one in decided.drains] == ["n2"]


def test_scheduled_headroom_is_bought_ahead() -> None:
    """From 9 to 17 in Berlin: bought at 8:30, not kept after 17:00."""
    rooms = (
        Headroom(
            name="office", free_gpu_count=1, schedule="0 9 * * mon-fri", duration_seconds=8 * 3600.0,
            time_zone="Europe/Berlin",
        ),
    )  # fmt: skip
    monday = datetime(2026, 11, 23, tzinfo=UTC)
    counts = {}
    for at in (7.4, 7.6, 12.0, 15.9, 16.1):
        as_of = monday + at * HOUR
        counts[at] = len(plan_of(given(on_sale(CHEAP, at=as_of), as_of=as_of), as_of, headrooms=rooms).purchases)

    assert counts == {7.4: 0, 7.6: 1, 12.0: 1, 15.9: 1, 16.1: 0}


def test_a_scheduled_limit_applies_while_it_is_active() -> None:
    """One node at night: the second pod waits for the day."""
    sizes = (ScheduledLimit(name="night", nodes_count_max=1, schedule="0 22 * * *", duration_seconds=8 * 3600.0),)
    night, day = T0 + 11 * HOUR, T0 + 2 * HOUR

    def seen(as_of: datetime) -> Plan:
        waiting = (pod(name, gpus=1, at=as_of, unschedulable_since=as_of) for name in ("a", "b"))
        return plan_of(given(*waiting, on_sale(CHEAP, at=as_of), as_of=as_of), as_of, scheduled_limits=sizes)

    assert len(seen(day).purchases) == 2
    assert len(seen(night).purchases) == 1
    assert [held.reason for held in seen(night).deferred] == [NodesLimit(nodes_count=1, nodes_count_max=1)]
    least = (ScheduledLimit(name="rush", nodes_count_min=2, schedule="0 14 * * *", duration_seconds=3600.0),)
    assert len(plan_of(given(on_sale(CHEAP), as_of=T0), T0, scheduled_limits=least).purchases) == 0
    assert (
        len(plan_of(given(on_sale(CHEAP), as_of=T0 + 1.6 * HOUR), T0 + 1.6 * HOUR, scheduled_limits=least).purchases)
        == 2
    )


def test_the_policy_within_active_limits_is_one_object() -> None:
    """What is derived from a policy is found by its identity: no plan derives it again for the same limits."""
    night = ScheduledLimit(name="night", nodes_count_max=1, schedule="0 22 * * *", duration_seconds=8 * 3600.0)
    rules = policy(scheduled_limits=(night,))
    first, later = (apply_scheduled_limits(rules, T0 + hours * HOUR) for hours in (11, 12))
    assert first is later
    assert first.nodes_count_max == 1
    assert apply_scheduled_limits(rules, T0 + 2 * HOUR) is rules


# ---- what is foreseen

WEEK_AGO = T0 - 7 * 24 * HOUR


def asked_for(until: datetime) -> Story:
    """A week of samples: four more T4 in the second half of each hour."""
    first, last = int(WEEK_AGO.timestamp()) // 60, int(until.timestamp()) // 60
    return tuple(
        TimedFact(
            ScalingDemandSampled(minute=minute, gpu_counts=(("T4", 4 if minute % 60 >= 30 else 0),)),
            WEEK_AGO + (minute - first) * MINUTE,
        )
        for minute in range(first, last)
    )


def scored(*, is_right: bool) -> Story:
    """Two days of scores: the forecast was accurate, or always exceeded."""
    hour = int(T0.timestamp()) // 3600
    kept = 60 if is_right else 6
    missed = 0 if is_right else 200
    return tuple(
        TimedFact(
            ScalingForecastScored(
                kind="T4",
                score=Score(
                    hour=each, foreseen_count=4, minutes_count=60, kept_count=kept, missed_gpu_minutes=missed,
                    unused_gpu_minutes=60, rise_gpu_minutes=200 + missed,
                ),
            ),
            T0,
        )
        for each in range(hour - 48, hour)
    )  # fmt: skip


FORESEEING = ForecastPolicy(is_on=True, short_rise_quantile_ratio=0.95)


def test_a_confident_forecast_buys_nodes() -> None:
    """Four more GPUs within the half hour: four nodes of one."""
    at = T0 + 29 * MINUTE
    state = given(asked_for(at), scored(is_right=True), on_sale(CHEAP), as_of=at)
    bought_ahead = plan_of(state, at, forecast=FORESEEING).purchases

    assert len(bought_ahead) == 4
    assert bought_ahead[0].reason == CapacityBuffer(demand=("forecast/T4",), free_gpu_count=0, wanted_gpu_count=4)
    assert plan_of(state, at).purchases == []


def test_a_lower_threshold_of_utilization_prepares_more() -> None:
    """The forecast demand of four GPUs is half of eight."""
    at = T0 + 29 * MINUTE
    state = given(asked_for(at), scored(is_right=True), on_sale(CHEAP), as_of=at)
    for threshold, nodes_count in ((1.0, 4), (0.8, 5), (0.5, 8)):
        rules = msgspec.structs.replace(FORESEEING, prewarm_utilization_ratio_max=threshold)
        assert len(plan_of(state, at, forecast=rules).purchases) == nodes_count


def test_an_uncertain_forecast_buys_nothing() -> None:
    """With the reason; also without scores."""
    at = T0 + 29 * MINUTE
    wrong = plan_of(given(asked_for(at), scored(is_right=False), on_sale(CHEAP), as_of=at), at, forecast=FORESEEING)
    untried = plan_of(given(asked_for(at), on_sale(CHEAP), as_of=at), at, forecast=FORESEEING)

    assert wrong.purchases == untried.purchases == []
    (held,) = wrong.deferred
    assert isinstance(held.reason, ForecastUncertain)
    assert held.subject == "forecast/T4"
    assert held.reason.sentence() == ("Forecast confidence 14 % is below the threshold of 70 %.")
    (never,) = untried.deferred
    assert never.reason == ForecastUncertain(confidence_ratio=None, confidence_ratio_min=0.7)
    assert "too few scored hours" in never.reason.sentence()


def test_forecast_gauges() -> None:
    """Four more GPUs for eight; unknown without a forecast, a node or scores."""
    at, rules = T0 + 29 * MINUTE, policy(forecast=FORESEEING)
    there = given(asked_for(at), scored(is_right=True), node("n1"), as_of=at)
    assert forecast_gauges(there, rules, at).utilization_ratio == 0.5
    assert forecast_gauges(there, rules, at).confidence_ratio == 1.0
    assert forecast_gauges(there, policy(), at) == ForecastGauges()
    empty = given(asked_for(at), as_of=at)
    assert forecast_gauges(empty, rules, at) == ForecastGauges()
    assert forecast_gauges(there, rules, at + HOUR) == ForecastGauges()


def test_old_samples_are_not_used() -> None:
    """Ten minutes without a sample."""
    state = given(asked_for(T0 + 29 * MINUTE), scored(is_right=True), on_sale(CHEAP), as_of=T0 + 40 * MINUTE)

    assert plan_of(state, T0 + 40 * MINUTE, forecast=FORESEEING).purchases == []


def test_demand_is_sampled_every_minute_and_scored_every_hour() -> None:
    """Running and waiting work; each fact once, only with the forecast on."""
    at = T0 + 29 * MINUTE
    waiting = (pod("a", gpus=1, unschedulable_since=T0), pod("b", gpus=3), node("n1", CHEAP), pod("c", gpus=1, on="n1"))
    state = given(*waiting, asked_for(at), on_sale(CHEAP), as_of=at)
    sample, *scores = sample_due(state, policy(forecast=FORESEEING), at)

    assert sample == ScalingDemandSampled(minute=int(at.timestamp()) // 60, gpu_counts=(("any", 5),))
    assert scores
    assert all(isinstance(each, ScalingForecastScored) for each in scores)
    again = given(*waiting, asked_for(at), tuple(TimedFact(each, at) for each in (sample, *scores)), as_of=at)
    assert sample_due(again, policy(forecast=FORESEEING), at) == ()
    (_, *more) = sample_due(again, policy(forecast=FORESEEING), at + MINUTE)
    assert more == []
    assert sample_due(state, policy(), at) == ()
