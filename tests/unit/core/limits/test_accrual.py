"""Cost accrual: spans and shares add up."""

from datetime import timedelta

from hypothesis import given, strategies
from tests.support.timed_facts import HOUR, MINUTE, SECOND, T0

from gpu_autoscaler.core.limits.accrual import (
    Allocation,
    Owner,
    busy_gpus,
    span_micro_usd,
    split_cost,
    thresholds_crossed,
)
from gpu_autoscaler.events.gpu import GpuNodeSummarized, GpuSummary
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.money import cost_micro_usd

ANA = Owner(project_id="vision", namespace="a", job_id="ana")
BEN = Owner(project_id="vision", namespace="b", job_id="ben")


def allocation(owner: Owner, units: int, *, from_minutes: float = 0, until_minutes: float | None = None) -> Allocation:
    """An allocation, in minutes after T0."""
    until_at = None if until_minutes is None else T0 + until_minutes * MINUTE
    return Allocation(owner=owner, units=units, from_at=T0 + from_minutes * MINUTE, until_at=until_at)


def window(*ratios: float | None) -> GpuNodeSummarized:
    """Telemetry of the minute after T0, one GPU per mean."""
    return GpuNodeSummarized(
        epoch=1,
        version=1,
        node_uid=NodeUid("n"),
        node_name="n",
        window_started_at=T0,
        window_seconds=60.0,
        scrapes_expected_count=6,
        scrapes_answered_count=6,
        gpus=tuple(
            GpuSummary(gpu=str(number), gpu_uuid=str(number), samples_count=6, utilization_ratio_mean=ratio)
            for number, ratio in enumerate(ratios)
        ),
    )


@given(
    price=strategies.integers(0, 10**9),
    seconds=strategies.lists(strategies.floats(0, 10**6, allow_nan=False), min_size=1, max_size=30),
)
def test_spans_add_up_to_the_invoice(price: int, seconds: list[float]) -> None:
    """For any spans of a lifetime, to the micro-dollar."""
    charged = 0
    ends = sorted(T0 + timedelta(seconds=second) for second in seconds)
    for end in ends:
        charged += span_micro_usd(price, launched_at=T0, to_at=end, charged_micro_usd=charged)
    assert charged == cost_micro_usd(price, ends[-1] - T0)


def test_a_refund_is_a_negative_span() -> None:
    """Billing ended half an hour before the last charge."""
    assert span_micro_usd(1000, launched_at=T0, to_at=T0 + HOUR / 2, charged_micro_usd=1000) == -500


holdings = strategies.lists(
    strategies.builds(
        allocation,
        strategies.sampled_from([ANA, BEN, Owner("", "c", "")]),
        strategies.integers(0, 16),
        from_minutes=strategies.floats(-5, 5, allow_nan=False),
        until_minutes=strategies.none() | strategies.floats(-5, 5, allow_nan=False),
    ),
    max_size=12,
)


@given(
    total=strategies.integers(-1000, 10**10),
    held_by=holdings,
    units=strategies.integers(0, 16),
    used_units=strategies.none() | strategies.floats(0, 20, allow_nan=False),
)
def test_allocated_and_idle_add_up_to_the_total(
    total: int, held_by: list[Allocation], units: int, used_units: float | None
) -> None:
    """For any allocations: overlapping, overcommitted, reversed, or of unknown nodes; used is never more."""
    parts = split_cost(total, held_by, units=units, from_at=T0, to_at=T0 + MINUTE, used_units=used_units)
    assert parts.idle_micro_usd + sum(share.allocated_micro_usd for share in parts.shares) == total
    for share in parts.shares:
        assert share.allocated_micro_usd >= 0
        assert (share.used_micro_usd is None) == (used_units is None)
        assert share.used_micro_usd is None or 0 <= share.used_micro_usd <= share.allocated_micro_usd


def test_cost_is_split_by_gpus_over_time() -> None:
    """Four of eight GPUs for a minute, two for half of it, the rest idle."""
    parts = split_cost(
        1600, [allocation(ANA, 4), allocation(BEN, 2, from_minutes=0.5)], units=8, from_at=T0, to_at=T0 + MINUTE
    )
    assert [(share.job_id, share.allocated_micro_usd) for share in parts.shares] == [("ana", 800), ("ben", 200)]
    assert parts.idle_micro_usd == 600


def test_a_pod_pays_until_its_end() -> None:
    """Its end counts, not whether it still exists."""
    parts = split_cost(100, [allocation(ANA, 1, until_minutes=0.25)], units=1, from_at=T0, to_at=T0 + MINUTE)
    assert (parts.shares[0].allocated_micro_usd, parts.idle_micro_usd) == (25, 75)


def test_pods_of_one_owner_are_one_share() -> None:
    """Two members of a gang on a node are one line."""
    parts = split_cost(80, [allocation(ANA, 1), allocation(ANA, 1)], units=8, from_at=T0, to_at=T0 + MINUTE)
    assert [share.allocated_micro_usd for share in parts.shares] == [20]


def test_an_empty_node_is_idle() -> None:
    """The whole cost is idle."""
    assert split_cost(100, [], units=8, from_at=T0, to_at=T0 + MINUTE).idle_micro_usd == 100


def test_used_cost_is_the_busy_part_of_allocated_cost() -> None:
    """One busy GPU of two: half of the allocated cost was used."""
    busy = busy_gpus(window(1.0, 0.0), from_at=T0, to_at=T0 + MINUTE)
    parts = split_cost(100, [allocation(ANA, 2)], units=2, from_at=T0, to_at=T0 + MINUTE, used_units=busy)
    assert parts.shares[0].used_micro_usd == 50


def test_without_telemetry_used_cost_is_unknown() -> None:
    """Unknown is not zero."""
    assert busy_gpus(None, from_at=T0, to_at=T0 + MINUTE) is None
    assert busy_gpus(window(None, None), from_at=T0, to_at=T0 + MINUTE) is None
    assert busy_gpus(window(1.0), from_at=T0 + MINUTE, to_at=T0 + HOUR) is None
    assert busy_gpus(window(0.5), from_at=T0 + 30 * SECOND, to_at=T0 + HOUR) == 0.5


def test_one_gpu_without_telemetry_makes_used_cost_unknown() -> None:
    """For all GPUs of the node."""
    assert busy_gpus(window(0.5, None), from_at=T0, to_at=T0 + MINUTE) is None


def test_a_threshold_is_crossed_when_it_is_reached() -> None:
    """80 % alerts at 80 %."""
    assert thresholds_crossed(79, 100, (0.8, 1.0)) == ()
    assert thresholds_crossed(80, 100, (0.8, 1.0)) == (0.8,)
    assert thresholds_crossed(150, 100, (0.8, 1.0)) == (0.8, 1.0)
