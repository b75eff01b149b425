"""Telemetry history: step functions, gaps, holders, Xids."""

import random
from datetime import datetime

import pytest
from tests.support.stories import MINUTE, T0, Story, given
from tests.support.telemetry import minute, minutes

from gpu_autoscaler.core.state.telemetry_history import NodeTelemetryHistory, since_at_most
from gpu_autoscaler.model.ids import NodeUid

N1 = NodeUid("uid-n1")


def history(*stories: Story) -> NodeTelemetryHistory:
    """The history of n1."""
    return given(*stories, is_synced=False).telemetry_history[N1]


def test_the_step_function_of_random_windows() -> None:
    """For every level equal to a scan of all windows."""
    chance = random.Random(4)  # noqa: S311 - figures of a made-up node
    ratios = [round(chance.random() ** 3, 3) for _ in range(100)]
    event = tuple(each for at, busy in enumerate(ratios) for each in minute("n1", T0 + at * MINUTE, busy=busy))
    result = history(event)
    for level in range(0, 101, 5):
        low = 0
        for past, ratio in enumerate(ratios):
            low = past + 1 if ratio * 100 > level else low
        expected: datetime | None = None if low == len(ratios) else T0 + low * MINUTE
        assert since_at_most(result.utilization, level) == expected
        assert since_at_most(result.gpus[3].utilization, level) == expected


def test_a_gap_ends_the_history() -> None:
    """A single lost minute does not."""
    one_lost = history(minutes("n1", 10, busy=0.0), minutes("n1", 10, start=T0 + 11 * MINUTE, busy=0.0))
    silent = history(
        minutes("n1", 10, busy=0.0),
        minutes("n1", 5, start=T0 + 10 * MINUTE, is_silent=True),
        minutes("n1", 10, start=T0 + 15 * MINUTE, busy=0.0),
    )

    assert since_at_most(one_lost.utilization, 5) == T0
    assert since_at_most(silent.utilization, 5) == T0 + 15 * MINUTE


def test_unknown_figures_end_the_history() -> None:
    """Invalid figures of one minute prove nothing."""
    event = history(minutes("n1", 5, busy=0.0), minutes("n1", 1, start=T0 + 5 * MINUTE, busy=None, celsius=None))

    assert event.utilization == event.gpus[0].utilization == event.gpus[0].negated_celsius == ()
    assert event.busy_ratio is None


def test_a_new_holder_restarts_the_utilization_of_a_gpu() -> None:
    """That of the node continues."""
    event = history(
        minutes("n1", 30, busy=0.01, pods={0: "ml/a", 1: "ml/b"}),
        minutes("n1", 2, start=T0 + 30 * MINUTE, busy=0.01, pods={0: "ml/c", 1: "ml/b"}),
    )

    assert [since_at_most(each.utilization, 5) for each in event.gpus[:2]] == [T0 + 30 * MINUTE, T0]
    assert since_at_most(event.utilization, 5) == T0


def test_an_application_xid_does_not_hide_a_hardware_xid() -> None:
    """The gauge shows the last Xid only; 79 is kept until the driver is reloaded."""
    broken = (
        *minutes("n1", 2, sick={3: {"xid_last": 79, "xids": (79,)}}),
        *minutes("n1", 2, start=T0 + 2 * MINUTE, sick={3: {"xid_last": 45, "xids": (45,)}}),
        *minutes("n1", 1, start=T0 + 4 * MINUTE, sick={3: {"xid_last": None}}),
    )

    assert history(broken).gpus[3].xids == ((79, T0), (45, T0 + 2 * MINUTE))
    assert history(broken, minutes("n1", 1, start=T0 + 5 * MINUTE)).gpus[3].xids == ()


@pytest.mark.parametrize(("watts", "changed"), [(60.0, 1), (None, 20)])
def test_stuck_telemetry_is_detected(watts: float | None, changed: int) -> None:
    """Real sensors vary; identical figures for minutes are stuck."""
    assert history(minutes("n1", 20, busy=0.0, watts=watts)).changed_at == T0 + changed * MINUTE
