"""The placement policy `least-utilized`: GPUs that pods hold count by their measured use, or as used."""

from typing import Any

import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, given, job, node, pod, policy
from tests.support.telemetry import minutes

from gpu_autoscaler.core.queueing.schedule import Placement, schedule

NOW = T0 + HOUR
MINE = dict.fromkeys(range(4), "default/n1")


def read(busy: float, count: int = 60, ago: int = 0, **more: Any) -> Story:  # noqa: ANN401 - of `minutes`
    """The GPUs of n1 were this busy for `count` minutes, until `ago` minutes ago; a pod holds four of its eight."""
    return minutes("n1", count, start=NOW - (count + ago) * MINUTE, **{"busy": busy, "pods": MINE, **more})


def placed(*telemetry: Story, name: str = "least-utilized") -> Placement:
    """Where a job of one GPU goes: a pod holds four GPUs of n1, another two of n2, which are busy."""
    held = (pod("n1", on="n1", gpus=4), pod("n2", on="n2", gpus=2))
    busy = minutes("n2", 60, busy=0.9, pods=dict.fromkeys(range(2), "default/n2"))
    state = given(node("n1"), node("n2"), *held, busy, *telemetry, job("new", gpus=1, at=NOW), as_of=NOW)
    (placement,) = schedule(state, policy(placement=name), NOW).placements
    return placement


def test_held_gpus_of_little_use_count_as_free_as_far_as_they_are_idle() -> None:
    """In use are 0.2 of 8 GPUs of n1, 1.8 of n2; of n2 more are free. The figure is recorded."""
    measured, by_requests = placed(read(0.05)), placed(read(0.05), name="least-loaded")
    assert (measured.node_names, measured.gpu_use_ratios) == (("n1",), (0.025,))
    assert (by_requests.node_names, by_requests.gpu_use_ratios) == (("n2",), ())


@pytest.mark.parametrize(
    ("telemetry", "ratio_of_n2"),
    [
        pytest.param((), None, id="no telemetry, so that the fleet's is unreliable"),
        pytest.param(read(0.05, ago=6), None, id="old"),
        pytest.param(read(0.05, watts=200.0), None, id="stuck"),
        pytest.param(read(0.05, count=4), 0.225, id="of four minutes only"),
        pytest.param((*read(0.9, count=57, ago=3), *read(0.05, count=3)), 0.225, id="busy four minutes ago"),
        pytest.param(read(0.05, pods=dict.fromkeys(range(4), "default/earlier")), 0.225, id="of an earlier holder"),
        pytest.param(read(0.05, pods=dict.fromkeys(range(3), "default/n1")), 0.225, id="of three of four GPUs"),
    ],
)
def test_without_certainty_held_gpus_count_as_used(telemetry: Story, ratio_of_n2: float | None) -> None:
    """Unknown is not zero: n2 has more left. Its own figure is unknown, too, where the fleet's telemetry is."""
    placement = placed(telemetry)
    assert (placement.node_names, placement.gpu_use_ratios) == (("n2",), (ratio_of_n2,))


def test_members_that_are_placed_now_count_as_used() -> None:
    """Each makes its node worse for the next one."""
    state = given(
        node("n1"), node("n2"), pod("n1", on="n1", gpus=4), pod("n2", on="n2", gpus=2), read(0.05),
        minutes("n2", 60, busy=0.5, pods=dict.fromkeys(range(2), "default/n2")),
        job("new", gpus=1, members=4, at=NOW), as_of=NOW,
    )  # fmt: skip
    (placement,) = schedule(state, policy(placement="least-utilized"), NOW).placements
    assert list(zip(placement.node_names, placement.gpu_use_ratios, strict=True)) == [
        ("n1", 0.025), ("n2", 0.125), ("n1", 0.025), ("n2", 0.125),
    ]  # fmt: skip
