"""A plan changes with time alone only at the instants that it notes (`core/next_change.py`)."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import msgspec
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.situations import Situation, situations

from gpu_autoscaler.core.checked_plan import checked_plan
from gpu_autoscaler.core.next_change import TrackedInstant
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import Plan

_STEPS_COUNT_MAX = 8  # instants in a row
_HORIZON = timedelta(days=2)
_MOMENT = timedelta(microseconds=1)
_HOURLY = {"schedule": "5 * * * *", "duration_seconds": 600.0}
_QUEUES: tuple[dict[str, Any], ...] = (
    {"name": "q", "scheduling_policy": "fcfs-strict", "reserve_after_seconds": 4000.0},
    {"name": "q", "scheduling_policy": "priority", "aging_hourly_priority": 700.0, "reserve_after_seconds": 9000.0},
    {"name": "q", "scheduling_policy": "fair-share", "reserve_after_seconds": 20_000.0},
)


@st.composite
def timed_policies(draw: st.DrawFn, policy: ScalingPolicy) -> ScalingPolicy:
    """The policy with rules that depend on time."""

    def sometimes(changes: dict[str, Any]) -> dict[str, Any]:
        return changes if draw(st.booleans()) else {}

    limits = sometimes({"scale_up_cooldown_seconds": 400.0}) | sometimes(
        {"spend": {"day_micro_usd_max": draw(st.sampled_from((0, 100_000_000, 900_000_000))), "is_hard": True}}
    )
    removal = sometimes({"expire_seconds_max": 3700.0, "expire_grace_seconds": 500.0}) | sometimes(
        {"disruption_budgets": [{"nodes_count_max": 0, **_HOURLY}]}
    )
    changes: dict[str, Any] = (
        {"limits": limits, "removal": removal}
        # Lists and prices that grow old at once would hide everything that follows.
        | {"watch_age_seconds_max": draw(st.sampled_from((1e6, 1e6, 60.0)))}
        | {"prices": {"age_seconds_max": draw(st.sampled_from((1e6, 1e6, 1800.0)))}}
        | sometimes({"spot": {"low_priority_wait_seconds": 900.0}})
        | sometimes({"batching": {"wait_seconds_max": 60.0, "quiet_seconds": 30.0}})
        | sometimes({"pending_pod_timeout_seconds": 300.0, "queued_timeout_seconds": 4000.0})
        | sometimes({"headrooms": [{"name": "h", "free_gpu_count": 4, "lead_seconds": 90.0, **_HOURLY}]})
        | sometimes({"scheduled_limits": [{"name": "l", "nodes_count_max": 3, **_HOURLY}]})
        | sometimes({"utilization_trigger": "direct"})
        | sometimes({"queues": [draw(st.sampled_from(_QUEUES))]})
    )
    return msgspec.convert(_merged(msgspec.to_builtins(policy), changes), ScalingPolicy)


def _merged(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return before | {
        key: _merged(before[key], value) if isinstance(value, dict) else value for key, value in changes.items()
    }


def decided(plan: Plan | None) -> object:
    """What a plan decides and defers. The seconds in a reason are no decision."""
    if plan is None:
        return None
    return (
        Counter((type(decision).__name__, decision.reason.tag()) for decision in plan.decisions),
        frozenset((deferred.step, deferred.subject, deferred.reason.tag()) for deferred in plan.deferred),
        plan.brake is None,
        len(plan.rejected),
    )


def change_ahead(as_of: TrackedInstant, last: datetime) -> datetime:
    """The noted instant, at most `last`."""
    return min(as_of.next_change_at or last, last)


@settings(max_examples=100, deadline=None)
@for_all(situations(), st.data())
def test_a_plan_changes_only_at_the_instants_that_it_notes(situation: Situation, data: st.DataObject) -> None:
    """Right before the noted instant nothing else is decided or deferred; walked from instant to instant."""
    state, policy = situation.state, data.draw(timed_policies(situation.policy))
    at, last = situation.as_of, situation.as_of + _HORIZON
    for _ in range(_STEPS_COUNT_MAX):
        as_of = TrackedInstant.of(at)
        before = checked_plan(state, policy, as_of).plan
        at = change_ahead(as_of, last)
        for instant in (at - _MOMENT, as_of.plain + (at - as_of) / 2):
            assert decided(checked_plan(state, policy, instant).plan) == decided(before), (as_of, instant)


@settings(max_examples=60, deadline=None)
@for_all(situations(), st.data())
def test_a_schedule_changes_only_at_the_instants_that_it_notes(situation: Situation, data: st.DataObject) -> None:
    """As plans do."""
    state, policy = situation.state, data.draw(timed_policies(situation.policy))
    at, last = situation.as_of, situation.as_of + _HORIZON
    for _ in range(_STEPS_COUNT_MAX):
        as_of = TrackedInstant.of(at)
        before = outcome(state, policy, as_of)
        at = change_ahead(as_of, last)
        assert outcome(state, policy, at - _MOMENT) == before, (as_of, at)


def outcome(state: ClusterState, policy: ScalingPolicy, as_of: datetime) -> object:
    """What a schedule starts and defers."""
    made = schedule(state, policy, as_of)
    return made.placements, frozenset((deferred.subject, deferred.reason.tag()) for deferred in made.deferred)


@settings(max_examples=60, deadline=None)
@for_all(situations())
def test_tracking_changes_no_plan(situation: Situation) -> None:
    """Byte for byte: no decision and no reason holds a tracked instant, which could not be encoded."""
    plans = [
        checked_plan(situation.state, situation.policy, as_of)
        for as_of in (situation.as_of, TrackedInstant.of(situation.as_of))
    ]
    assert msgspec.json.encode(plans[0].plan) == msgspec.json.encode(plans[1].plan)
