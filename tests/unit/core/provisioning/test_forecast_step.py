"""Capacity before anybody waits for it: the minimum, headroom, sizes by schedule, and demand that is foreseen."""

from datetime import UTC, datetime

from tests.support.stories import HOUR, MINUTE, T0, Story, Told, given, node, notice, offer, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.demand.history_samples import sample_due
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.prewarm_settings import ForecastPolicy, Headroom, ScheduledLimit
from gpu_autoscaler.core.provisioning.forecast_step import ForecastGauges, foresight
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.scaling import ScalingDemandSampled, ScalingForecastScored
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.forecasts import Score
from gpu_autoscaler.model.reasons.buy import BelowMinimum, CapacityBuffer
from gpu_autoscaler.model.reasons.defer import ForecastUncertain, KeptAsBuffer, WatchStale
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit

CHEAP = offer("g4dn.xlarge", gpus=1, model="T4", gpu_memory_gib=16, usd_per_hour=0.5)


def bought(state: ClusterState, nodes_count_min: int) -> list[BuyNode]:
    """What is bought to keep this minimum."""
    made = plan(state, policy(nodes_count_min=nodes_count_min), T0)
    return [decision for decision in made.decisions if isinstance(decision, BuyNode)]


def test_the_minimum_is_kept_with_the_cheapest_nodes() -> None:
    """Nodes that the policy wants are bought although nobody waits; those that are there count."""
    two = bought(given(on_sale(offer(), CHEAP)), 2)

    assert [decision.offer.key for decision in two] == [CHEAP.key, CHEAP.key]
    assert two[0].reason == BelowMinimum(nodes_count=0, nodes_count_min=2)
    assert len(bought(given(node("n1"), on_sale(CHEAP)), 2)) == 1
    assert bought(given(node("n1"), node("n2"), on_sale(CHEAP)), 2) == []


def test_a_node_that_leaves_does_not_count() -> None:
    """The cloud takes the only one: another is bought at once."""
    state = given(node("n1"), notice("n1", reclaim_at=T0 + MINUTE), on_sale(CHEAP))

    assert [decision.reason for decision in bought(state, 1)] == [BelowMinimum(nodes_count=1, nodes_count_min=1)]


def test_the_minimum_is_not_counted_on_an_old_picture() -> None:
    """Nodes that were not listed may be there all the same."""
    state = given(on_sale(CHEAP), is_synced=False)
    (held,) = [each for each in plan(state, policy(nodes_count_min=1), T0).deferred if each.step == "prepare"]

    assert bought(state, 1) == []
    assert held.subject == "cluster"
    assert isinstance(held.reason, WatchStale)


# ---- headroom and schedules


def made(state: ClusterState, as_of: datetime = T0, **changes: object) -> Plan:
    """The plan under a policy with these fields; the second opinion finds nothing wrong with it."""
    changed = policy(**changes)
    decided = plan(state, changed, as_of)
    assert check(decided, state, changed) == ()
    return decided


def purchases(decided: Plan) -> list[BuyNode]:
    """What a plan buys."""
    return [decision for decision in decided.decisions if isinstance(decision, BuyNode)]


def test_headroom_is_bought_and_what_is_on_its_way_counts() -> None:
    """Two T4 are to be free: two nodes of one are bought, and with one on its way only the other."""
    rooms = (Headroom(name="warm", free_gpu_count=2, gpu_model="T4"),)
    both = purchases(made(given(on_sale(offer(), CHEAP)), headrooms=rooms))
    one = purchases(made(given(on_sale(offer(), CHEAP), node("n1", CHEAP)), headrooms=rooms))

    assert [decision.offer.key for decision in both] == [CHEAP.key, CHEAP.key]
    assert both[0].reason == CapacityBuffer(demand=("headroom/warm",), free_gpu_count=0, wanted_gpu_count=2)
    assert both[0].reason.sentence() == "2 GPUs are to be free for headroom warm (free or on their way: 0)."
    assert len(one) == 1
    assert purchases(made(given(on_sale(CHEAP), node("n1", CHEAP), node("n2", CHEAP)), headrooms=rooms)) == []


def test_a_node_that_is_kept_free_does_not_go_for_being_idle() -> None:
    """Empty for an hour, but headroom wants it; the other one goes."""
    rooms = (Headroom(name="warm", free_gpu_count=1),)
    state = given(node("n1", CHEAP), node("n2", CHEAP), on_sale(CHEAP), as_of=T0 + HOUR)
    decided = made(state, T0 + HOUR, headrooms=rooms)
    kept = [held for held in decided.deferred if isinstance(held.reason, KeptAsBuffer)]

    assert [held.subject for held in kept] == ["node/uid-n1"]
    assert kept[0].reason.sentence() == "Its GPUs are kept free for headroom warm."
    assert [one.node_name for one in decided.decisions if isinstance(one, DrainNode)] == ["n2"]


def test_headroom_by_schedule_is_ordered_ahead_of_its_beginning() -> None:
    """From nine to five in Berlin: ordered at half past eight, not before, and not kept after five."""
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
        counts[at] = len(purchases(made(given(on_sale(CHEAP, at=as_of), as_of=as_of), as_of, headrooms=rooms)))

    assert counts == {7.4: 0, 7.6: 1, 12.0: 1, 15.9: 1, 16.1: 0}


def test_a_size_by_schedule_narrows_the_bounds_while_it_holds() -> None:
    """At night one node at most: the second pod waits with the limit as its reason; by day it is bought for."""
    sizes = (ScheduledLimit(name="night", nodes_count_max=1, schedule="0 22 * * *", duration_seconds=8 * 3600.0),)
    night, day = T0 + 11 * HOUR, T0 + 2 * HOUR

    def seen(as_of: datetime) -> Plan:
        waiting = (pod(name, gpus=1, at=as_of, unschedulable_since=as_of) for name in ("a", "b"))
        return made(given(*waiting, on_sale(CHEAP, at=as_of), as_of=as_of), as_of, scheduled_limits=sizes)

    assert len(purchases(seen(day))) == 2
    assert len(purchases(seen(night))) == 1
    assert [held.reason for held in seen(night).deferred] == [NodesLimit(nodes_count=1, nodes_count_max=1)]
    least = (ScheduledLimit(name="rush", nodes_count_min=2, schedule="0 14 * * *", duration_seconds=3600.0),)
    assert len(purchases(made(given(on_sale(CHEAP), as_of=T0), T0, scheduled_limits=least))) == 0
    assert (
        len(purchases(made(given(on_sale(CHEAP), as_of=T0 + 1.6 * HOUR), T0 + 1.6 * HOUR, scheduled_limits=least))) == 2
    )


# ---- what is foreseen

WEEK_AGO = T0 - 7 * 24 * HOUR


def asked_for(until: datetime) -> Story:
    """A week of samples: four T4 more are asked for in each hour's second half."""
    first, last = int(WEEK_AGO.timestamp()) // 60, int(until.timestamp()) // 60
    return tuple(
        Told(
            ScalingDemandSampled(minute=minute, gpu_counts=(("T4", 4 if minute % 60 >= 30 else 0),)),
            WEEK_AGO + (minute - first) * MINUTE,
        )
        for minute in range(first, last)
    )


def scored(*, is_right: bool) -> Story:
    """Two days of scores: the forecast held, or was passed all the time."""
    hour = int(T0.timestamp()) // 3600
    kept = 60 if is_right else 6
    missed = 0 if is_right else 200
    return tuple(
        Told(
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


def test_a_forecast_that_was_right_is_bought_for() -> None:
    """Four more are foreseen within the half hour, and the last days' forecasts held: four nodes of one are bought."""
    at = T0 + 29 * MINUTE
    state = given(asked_for(at), scored(is_right=True), on_sale(CHEAP), as_of=at)
    bought_ahead = purchases(made(state, at, forecast=FORESEEING))

    assert len(bought_ahead) == 4
    assert bought_ahead[0].reason == CapacityBuffer(demand=("forecast/T4",), free_gpu_count=0, wanted_gpu_count=4)
    assert purchases(made(state, at)) == []


def test_a_forecast_that_was_wrong_for_days_is_silent_and_says_so() -> None:
    """Nothing is bought on its word; so it is with one that was never scored."""
    at = T0 + 29 * MINUTE
    wrong = made(given(asked_for(at), scored(is_right=False), on_sale(CHEAP), as_of=at), at, forecast=FORESEEING)
    untried = made(given(asked_for(at), on_sale(CHEAP), as_of=at), at, forecast=FORESEEING)

    assert purchases(wrong) == purchases(untried) == []
    (held,) = wrong.deferred
    assert isinstance(held.reason, ForecastUncertain)
    assert held.subject == "forecast/T4"
    assert held.reason.sentence() == (
        "More demand is foreseen, but forecasts of late deserve 14 % of trust; 70 % are asked for."
    )
    (never,) = untried.deferred
    assert never.reason == ForecastUncertain(confidence_ratio=None, confidence_ratio_min=0.7)
    assert "tried for long enough" in never.reason.sentence()


def test_what_is_foreseen_is_two_figures_and_unknown_where_there_is_none() -> None:
    """Four GPUs more for the eight that are there; without a forecast, a node or scores, unknown is not zero."""
    at, rules = T0 + 29 * MINUTE, policy(forecast=FORESEEING)
    there = given(asked_for(at), scored(is_right=True), node("n1"), as_of=at)
    assert foresight(there, rules, at).utilization_ratio == 0.5
    assert foresight(there, rules, at).confidence_ratio == 1.0
    assert foresight(there, policy(), at) == ForecastGauges()
    empty = given(asked_for(at), as_of=at)
    assert foresight(empty, rules, at) == ForecastGauges()
    assert foresight(there, rules, at + HOUR) == ForecastGauges()


def test_an_old_sample_foresees_nothing() -> None:
    """Ten minutes without a sample: nobody knows what is asked for now."""
    state = given(asked_for(T0 + 29 * MINUTE), scored(is_right=True), on_sale(CHEAP), as_of=T0 + 40 * MINUTE)

    assert purchases(made(state, T0 + 40 * MINUTE, forecast=FORESEEING)) == []


def test_demand_is_sampled_once_a_minute_and_scored_when_hours_are_over() -> None:
    """What runs and what waits is asked for; said only where a forecast is wanted, and each thing once."""
    at = T0 + 29 * MINUTE
    waiting = (pod("a", gpus=1, unschedulable_since=T0), pod("b", gpus=3), node("n1", CHEAP), pod("c", gpus=1, on="n1"))
    state = given(*waiting, asked_for(at), on_sale(CHEAP), as_of=at)
    sample, *scores = sample_due(state, policy(forecast=FORESEEING), at)

    assert sample == ScalingDemandSampled(minute=int(at.timestamp()) // 60, gpu_counts=(("any", 5),))
    assert scores
    assert all(isinstance(each, ScalingForecastScored) for each in scores)
    again = given(*waiting, asked_for(at), tuple(Told(each, at) for each in (sample, *scores)), as_of=at)
    assert sample_due(again, policy(forecast=FORESEEING), at) == ()
    (_, *more) = sample_due(again, policy(forecast=FORESEEING), at + MINUTE)
    assert more == []
    assert sample_due(state, policy(), at) == ()
