"""What an instant notes about the comparisons with it."""

from bisect import bisect_right
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from tests.support.stories import MINUTE, T0, given, node, offer, on_sale, policy

from gpu_autoscaler.core.next_change import (
    TrackedInstant,
    has_lasted,
    has_lasted_longer,
    note,
    note_always,
    note_whole,
    plain,
)
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.prewarm_settings import Headroom
from gpu_autoscaler.model.decisions import DrainNode
from gpu_autoscaler.model.offers import CapacityType

AT = datetime(2026, 11, 21, 12, 0, 30, tzinfo=UTC)
SECOND, MOMENT = timedelta(seconds=1), timedelta(microseconds=1)


def test_the_first_change_ahead_is_noted() -> None:
    """From either side of the comparison; what is past changes nothing."""
    as_of = TrackedInstant.of(AT)
    assert as_of > AT - SECOND
    assert as_of > AT - SECOND
    assert as_of.next_change_at is None
    assert as_of < AT + 3 * SECOND
    assert as_of <= AT + 2 * SECOND
    assert as_of.next_change_at == AT + 2 * SECOND
    assert as_of <= AT
    assert as_of.next_change_at == AT + MOMENT  # right after it the answer is another one


def test_a_search_notes_its_neighbor() -> None:
    """`bisect` compares with the next instant of the list."""
    as_of = TrackedInstant.of(AT)
    assert bisect_right([AT - SECOND, AT, AT + 5 * SECOND, AT + 9 * SECOND], as_of) == 2
    assert as_of.next_change_at == AT + 5 * SECOND


@pytest.mark.parametrize("lasts", [has_lasted, has_lasted_longer])
def test_a_duration_is_noted_until_it_is_over(lasts: object) -> None:
    """At its end, and not before; both differ only at the end itself."""
    assert lasts in (has_lasted, has_lasted_longer)
    function = has_lasted if lasts is has_lasted else has_lasted_longer
    as_of = TrackedInstant.of(AT)
    assert not function(AT - SECOND, 10.0, as_of)
    assert as_of.next_change_at == AT + 9 * SECOND
    at_end, after = TrackedInstant.of(AT + 9 * SECOND), TrackedInstant.of(AT + 9 * SECOND + MOMENT)
    assert function(AT - SECOND, 10.0, at_end) is (function is has_lasted)
    assert at_end.next_change_at == (None if function is has_lasted else AT + 9 * SECOND + MOMENT)
    assert function(AT - SECOND, 10.0, after)
    assert after.next_change_at is None


def test_a_duration_that_never_passes_is_not_noted() -> None:
    """A policy may say never by a large number."""
    as_of = TrackedInstant.of(AT)
    assert not has_lasted(AT, 1e300, as_of)
    assert as_of < datetime.max.replace(tzinfo=UTC)
    assert as_of.next_change_at is None


def test_whole_minutes_and_what_always_changes() -> None:
    """The end of the minute; at once if a decision depends on each instant."""
    as_of = TrackedInstant.of(AT)
    note_whole(as_of, 60)
    assert as_of.next_change_at == AT + 30 * SECOND
    note_always(as_of)
    assert as_of.next_change_at == AT + MOMENT
    note(AT, AT + SECOND)  # a plain instant notes nothing


def test_a_schedule_notes_its_end_and_its_next_start() -> None:
    """The next start counts from the lead."""
    headroom = Headroom(name="h", free_gpu_count=1, schedule="0 12 * * *", duration_seconds=90.0)
    for offset, is_active, ahead in ((0, True, 60), (60, False, 86_370), (-31, False, -30)):
        as_of = TrackedInstant.of(AT + offset * SECOND)
        assert headroom.is_active(as_of) is is_active
        assert as_of.next_change_at is not None
        assert (as_of.next_change_at - AT).total_seconds() == ahead


def test_a_plan_notes_when_an_empty_node_has_been_idle_for_long_enough() -> None:
    """And what else comes before: here the lists would grow old."""
    sold = offer(capacity_type=CapacityType.ON_DEMAND)
    rules = policy(watch_age_seconds_max=1e6, prices={"age_seconds_max": 1e6}, idle_seconds=840.0)
    state = given(on_sale(sold), node("n1", sold, at=T0), as_of=T0 + 12 * MINUTE)
    as_of = TrackedInstant.of(T0 + 12 * MINUTE)
    assert plan(state, rules, as_of).decisions == ()
    assert as_of.next_change_at == T0 + 14 * MINUTE
    (removal,) = plan(state, rules, T0 + 14 * MINUTE).decisions
    assert isinstance(removal, DrainNode)
    as_of = TrackedInstant.of(T0 + 12 * MINUTE)
    assert plan(state, policy(watch_age_seconds_max=100.0, idle_seconds=840.0), as_of).decisions == ()
    assert as_of.next_change_at == T0 + 12 * MINUTE + 100 * SECOND


def test_no_result_of_arithmetic_is_tracked() -> None:
    """Facts are encoded, and a tracked instant cannot be."""
    as_of = TrackedInstant.of(AT)
    results = (as_of + SECOND, as_of - SECOND, plain(as_of), as_of.astimezone(UTC))
    assert [type(result) for result in results] == [datetime] * 4
    assert (as_of - AT, AT - as_of, AT + SECOND - as_of) == (timedelta(), timedelta(), SECOND)
    assert (as_of == AT, hash(as_of) == hash(AT), plain(AT) is AT) == (True, True, True)
    with pytest.raises(TypeError):
        msgspec.json.encode(as_of)
