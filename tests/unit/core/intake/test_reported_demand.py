"""Reported demand (`demand.reported`): the last report of a source, served after all work, within limits."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import (
    HOUR,
    MINUTE,
    T0,
    Story,
    TimedFact,
    given,
    job,
    node,
    offer,
    on_sale,
    pod,
    policy,
    record,
)

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.intake.reported_demand import SOURCES_COUNT_MAX, violations_of
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.model.decisions import DrainNode, Plan
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit

# With a disk: reported demand requests a small one by default.
SPOT = msgspec.structs.replace(
    offer(), resources=msgspec.structs.replace(offer().resources, ephemeral_storage_bytes=100 * GIBIBYTE)
)


def report(source: str = "kafka", count: int | None = 1, *, at: datetime = T0, gpus: int = 8, **more: Any) -> Story:  # noqa: ANN401 - fields of the fact
    """Demand of this many members, for an hour."""
    until = more.pop("until", at + HOUR)
    return (
        TimedFact(
            DemandReported(source=source, shape=DemandShape(gpu_count=gpus), count=count, until=until, **more), at
        ),
    )


def planned(*stories: Story, at: datetime = T0, **rules: Any) -> Plan:  # noqa: ANN401 - fields of the policy
    """The plan, accepted by the plan check."""
    state, under = given(*stories, on_sale(SPOT), as_of=at), policy(**rules)
    return accepted_plan(state, under, at)


def test_nodes_are_bought_for_reported_demand() -> None:
    """Two members of a node each: two nodes, each with its reason."""
    nodes = planned(report(count=2)).purchases
    assert len(nodes) == 2
    reason = nodes[0].reason
    assert isinstance(reason, UnmetDemand)
    assert reason.demand == ("demand/kafka/1",)


def test_existing_capacity_is_used_and_kept() -> None:
    """A node for reported demand is not idle."""
    result = planned(node("n1", SPOT), report(at=T0 + HOUR), at=T0 + HOUR)
    assert result.purchases == []
    assert not result.drains
    assert [one for one in planned(node("n1", SPOT), at=T0 + HOUR).decisions if isinstance(one, DrainNode)]


@pytest.mark.parametrize("last", [report(count=0, at=T0 + MINUTE), report(until=T0 + MINUTE)])
def test_a_report_of_zero_or_an_expired_one_buys_nothing(last: Story) -> None:
    """Zero is a valid count."""
    assert planned(report(count=2), last, at=T0 + MINUTE).purchases == []


def test_an_unknown_count_is_not_zero() -> None:
    """The last report of the source stays active until it expires."""
    stories = (report(count=2), report(count=None, at=T0 + MINUTE))
    assert len(planned(*stories, at=T0 + MINUTE).purchases) == 2
    assert planned(*stories, at=T0 + HOUR).purchases == []


def test_a_redelivered_report_does_not_replace_a_newer_one() -> None:
    """Found by simulator seed 1."""
    recorded = record([*report(count=3), *report(count=0, at=T0 + MINUTE)])
    state = fold(EMPTY_STATE, recorded)
    assert fold(state, reversed(recorded)) == state


def test_work_is_served_before_reported_demand() -> None:
    """Whatever the priority of the report; its deferral names the limit."""
    result = planned(report(priority="high"), pod("a", gpus=8), nodes_count_max=1)
    (node_,) = result.purchases
    assert isinstance(node_.reason, UnmetDemand)
    assert node_.reason.demand == ("pod/uid-a",)
    assert [(held.subject, type(held.reason)) for held in result.deferred] == [("demand/kafka/1", NodesLimit)]


def test_reported_demand_does_not_block_jobs() -> None:
    """Jobs may use its capacity."""
    state = given(report(priority="high"), node("n1", SPOT), job("train", gpus=8))
    assert [placed.job_id for placed in schedule(state, policy(), T0).placements] == ["train"]


def test_each_violation_of_a_report_names_its_field() -> None:
    """An invalid report is ignored."""
    fact = DemandReported(
        source="no such source!",
        shape=DemandShape(gpu_count=-1, cpu="lots"),
        count=5000,
        until=T0 - MINUTE,
        priority="now!",
    )
    assert {violation.field for violation in violations_of(fact, T0)} == {
        "source", "shape.gpu_count", "shape.cpu", "count", "until", "priority",
    }  # fmt: skip
    assert given((TimedFact(fact, T0),)).reported_demand == {}
    late = msgspec.structs.replace(fact, until=T0 + timedelta(days=8))
    assert "until" in {violation.field for violation in violations_of(late, T0)}


def test_the_number_of_sources_is_bounded() -> None:
    """The report that expires first is removed."""
    ends = [T0 + MINUTE * (number + 1) for number in range(SOURCES_COUNT_MAX + 9)]
    event = [each for number in range(SOURCES_COUNT_MAX + 9) for each in report(f"s{number}", until=ends[number])]
    state = fold(EMPTY_STATE, record(event))
    assert len(state.reported_demand) == SOURCES_COUNT_MAX
    assert "s0" not in state.reported_demand


def test_demand_without_spot_buys_no_spot() -> None:
    """Non-preemptible demand is served by other capacity, here by none."""
    result = planned(report(preemptible=False))
    assert result.purchases == []
    assert SPOT.capacity_type == "spot"


@pytest.mark.parametrize("until", ["0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_the_ends_of_time_are_a_violation_and_no_error(until: str) -> None:
    """Anybody may report, so no date may stop the fold of a service."""
    document = {"source": "kafka", "shape": {"gpu_count": 1}, "count": 1, "until": until}
    report = msgspec.json.decode(msgspec.json.encode(document), type=DemandReported)
    assert [violation.field for violation in violations_of(report, T0)] == ["until"]
    assert fold(EMPTY_STATE, record([TimedFact(report, T0)])).reported_demand == {}
