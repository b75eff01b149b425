"""For how long telemetry says the same: stairs, gaps, holders, errors that stay in their gauge."""

import random
from datetime import datetime

import pytest
from tests.support.stories import MINUTE, T0, Story, given
from tests.support.telemetry import minute, minutes

from gpu_autoscaler.core.state.telemetry_history import NodeTelemetryHistory, since_at_most
from gpu_autoscaler.model.ids import NodeUid

N1 = NodeUid("uid-n1")


def trail(*stories: Story) -> NodeTelemetryHistory:
    """The trail of n1."""
    return given(*stories, is_synced=False).telemetry_history[N1]


def test_the_stairs_say_since_when_nothing_was_above_a_level() -> None:
    """A hundred windows by chance: for every level, the answer is that of going through them all."""
    chance = random.Random(4)  # noqa: S311 - figures of a made-up node
    ratios = [round(chance.random() ** 3, 3) for _ in range(100)]
    told = tuple(each for at, busy in enumerate(ratios) for each in minute("n1", T0 + at * MINUTE, busy=busy))
    found = trail(told)
    for level in range(0, 101, 5):
        low = 0
        for past, ratio in enumerate(ratios):
            low = past + 1 if ratio * 100 > level else low
        expected: datetime | None = None if low == len(ratios) else T0 + low * MINUTE
        assert since_at_most(found.utilization, level) == expected
        assert since_at_most(found.gpus[3].utilization, level) == expected


def test_silence_breaks_a_trail_and_a_lost_minute_does_not() -> None:
    """Of minutes that were not seen nobody knows how busy they were."""
    one_lost = trail(minutes("n1", 10, busy=0.0), minutes("n1", 10, start=T0 + 11 * MINUTE, busy=0.0))
    silent = trail(
        minutes("n1", 10, busy=0.0),
        minutes("n1", 5, start=T0 + 10 * MINUTE, is_silent=True),
        minutes("n1", 10, start=T0 + 15 * MINUTE, busy=0.0),
    )

    assert since_at_most(one_lost.utilization, 5) == T0
    assert since_at_most(silent.utilization, 5) == T0 + 15 * MINUTE


def test_figures_that_are_not_known_break_it_too() -> None:
    """An exporter that says nonsense for a minute says nothing about it."""
    told = trail(minutes("n1", 5, busy=0.0), minutes("n1", 1, start=T0 + 5 * MINUTE, busy=None, celsius=None))

    assert told.utilization == told.gpus[0].utilization == told.gpus[0].negated_celsius == ()
    assert told.busy_ratio is None


def test_who_takes_a_gpu_over_begins_anew() -> None:
    """The idleness of one job is not the next one's; the node's own goes on."""
    told = trail(
        minutes("n1", 30, busy=0.01, pods={0: "ml/a", 1: "ml/b"}),
        minutes("n1", 2, start=T0 + 30 * MINUTE, busy=0.01, pods={0: "ml/c", 1: "ml/b"}),
    )

    assert [since_at_most(each.utilization, 5) for each in told.gpus[:2]] == [T0 + 30 * MINUTE, T0]
    assert since_at_most(told.utilization, 5) == T0


def test_an_error_of_an_application_does_not_cover_the_broken_gpu() -> None:
    """The gauge shows the last error alone: 79, then 45, is still 79, until the driver is loaded again."""
    broken = (
        *minutes("n1", 2, sick={3: {"xid_last": 79, "xids": (79,)}}),
        *minutes("n1", 2, start=T0 + 2 * MINUTE, sick={3: {"xid_last": 45, "xids": (45,)}}),
        *minutes("n1", 1, start=T0 + 4 * MINUTE, sick={3: {"xid_last": None}}),
    )

    assert trail(broken).gpus[3].xids == ((79, T0), (45, T0 + 2 * MINUTE))
    assert trail(broken, minutes("n1", 1, start=T0 + 5 * MINUTE)).gpus[3].xids == ()


@pytest.mark.parametrize(("watts", "changed"), [(60.0, 1), (None, 20)])
def test_a_frozen_page_is_told_from_a_quiet_gpu(watts: float | None, changed: int) -> None:
    """A real sensor wavers; the very same figures minute after minute are one page again and again."""
    assert trail(minutes("n1", 20, busy=0.0, watts=watts)).changed_at == T0 + changed * MINUTE
