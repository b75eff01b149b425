"""When the next tick is due: at once for one fact, a moment later for a burst, never later than a part of a tick."""

from gpu_autoscaler.runtime.urgency import BatchWindow, Urgency

WINDOW = BatchWindow(gap_seconds=0.002, seconds_min=0.005, seconds_max=0.1, tick_ratio=0.5)


def after_a_tick(*, began_at: float, ended_at: float) -> Urgency:
    """Nothing urgent yet."""
    urgency = Urgency(WINDOW)
    urgency.start_tick(began_at)
    urgency.end_tick(ended_at)
    return urgency


def close(one: float | None, other: float) -> bool:
    """Equal but for the last digits."""
    return one is not None and abs(one - other) < 1e-9


def test_nothing_urgent_brings_nothing_forward() -> None:
    """The next tick is the regular one, also where the last one decided on something urgent."""
    urgency = Urgency(WINDOW)
    urgency.record(3, 1.0)
    urgency.start_tick(1.1)
    urgency.end_tick(1.2)

    assert urgency.due_at is None
    assert urgency.waited_seconds == 0.0


def test_a_lone_fact_waits_for_nothing() -> None:
    """Neither long after the tick, nor right after it, nor when it came while the tick went on."""
    for came_at, due_at in ((9.0, 9.0), (1.0401, 1.0401), (1.02, 1.04)):
        urgency = Urgency(WINDOW)
        urgency.start_tick(1.0)
        if came_at < 1.04:
            urgency.record(1, came_at)
            urgency.end_tick(1.04)
        else:
            urgency.end_tick(1.04)
            urgency.record(1, came_at)

        assert urgency.due_at == due_at
        assert urgency.waited_seconds == 0.0


def test_a_second_fact_opens_a_window_that_ends_with_the_burst() -> None:
    """Each further fact moves it on; a moment of silence ends it."""
    urgency = after_a_tick(began_at=1.0, ended_at=1.04)
    urgency.record(1, 2.0)
    urgency.record(1, 2.001)
    second = urgency.due_at
    urgency.record(1, 2.0025)

    assert close(second, 2.003)
    assert close(urgency.due_at, 2.0045)
    assert close(urgency.waited_seconds, 0.0045)


def test_a_burst_without_end_is_decided_on_after_a_part_of_a_tick() -> None:
    """However long it goes on: half of what the last tick took, between five milliseconds and a tenth of a second."""
    for took_seconds, window_seconds in ((0.04, 0.02), (0.0, 0.005), (3.0, 0.1)):
        urgency = after_a_tick(began_at=1.0, ended_at=1.0 + took_seconds)
        for step in range(500):
            urgency.record(4, 10.0 + step / 1000)

        assert close(urgency.due_at, 10.0 + window_seconds)


def test_what_came_during_a_tick_is_listened_to_from_its_end() -> None:
    """A burst that is over needs no window; one that goes on has it."""
    over, going_on = Urgency(WINDOW), Urgency(WINDOW)
    for urgency, last_at in ((over, 1.01), (going_on, 1.0395)):
        urgency.start_tick(1.0)
        urgency.record(1, 1.005)
        urgency.record(5, last_at)
        urgency.end_tick(1.04)

    assert close(over.due_at, 1.04)
    assert close(going_on.due_at, 1.0415)
