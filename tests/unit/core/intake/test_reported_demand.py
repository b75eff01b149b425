"""Wishes for room (`demand.reported`): the last word of a source, kept after all work, bought for within limits."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from tests.support.stories import HOUR, MINUTE, T0, Story, Told, given, job, node, offer, on_sale, pod, policy, record

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.intake.reported_demand import SOURCES_COUNT_MAX, violations_of
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.queueing.schedule import schedule
from gpu_autoscaler.core.state.state import EMPTY_STATE
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.demands import DemandShape
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit

# With a disk, of which a wish asks for a little by default.
SPOT = msgspec.structs.replace(
    offer(), resources=msgspec.structs.replace(offer().resources, ephemeral_storage_bytes=100 * GIBIBYTE)
)


def wish(source: str = "kafka", count: int | None = 1, *, at: datetime = T0, gpus: int = 8, **more: Any) -> Story:  # noqa: ANN401 - fields of the fact
    """Room for so many members, for an hour."""
    until = more.pop("until", at + HOUR)
    return (
        Told(DemandReported(source=source, shape=DemandShape(gpu_count=gpus), count=count, until=until, **more), at),
    )


def planned(*stories: Story, at: datetime = T0, **rules: Any) -> Plan:  # noqa: ANN401 - fields of the policy
    """The plan of the situation, which the second opinion must find nothing wrong with."""
    state, under = given(*stories, on_sale(SPOT), as_of=at), policy(**rules)
    made = plan(state, under, at)
    assert check(made, state, under) == ()
    return made


def bought(made: Plan) -> list[BuyNode]:
    """The nodes that are bought."""
    return [decision for decision in made.decisions if isinstance(decision, BuyNode)]


def test_room_is_bought_for_a_wish() -> None:
    """Two members of a node each: two nodes, each with its reason."""
    nodes = bought(planned(wish(count=2)))
    assert len(nodes) == 2
    reason = nodes[0].reason
    assert isinstance(reason, UnmetDemand)
    assert reason.demand == ("demand/kafka/1",)


def test_room_that_is_there_is_not_bought_again_and_stays() -> None:
    """A node that a wish counts on is not idle, however long nothing ran there."""
    made = planned(node("n1", SPOT), wish(at=T0 + HOUR), at=T0 + HOUR)
    assert bought(made) == []
    assert not [decision for decision in made.decisions if isinstance(decision, DrainNode)]
    assert [one for one in planned(node("n1", SPOT), at=T0 + HOUR).decisions if isinstance(one, DrainNode)]


@pytest.mark.parametrize("last", [wish(count=0, at=T0 + MINUTE), wish(until=T0 + MINUTE)])
def test_a_wish_that_is_taken_back_or_over_buys_nothing(last: Story) -> None:
    """Zero is a word: nothing is needed."""
    assert bought(planned(wish(count=2), last, at=T0 + MINUTE)) == []


def test_not_known_is_not_zero() -> None:
    """A source that cannot tell leaves its last word standing, until that is over."""
    stories = (wish(count=2), wish(count=None, at=T0 + MINUTE))
    assert len(bought(planned(*stories, at=T0 + MINUTE))) == 2
    assert bought(planned(*stories, at=T0 + HOUR)) == []


def test_an_older_word_that_is_read_again_does_not_overrule_a_newer_one() -> None:
    """Found by seed 1 once programs asked for room in the simulator."""
    said = record([*wish(count=3), *wish(count=0, at=T0 + MINUTE)])
    state = fold(EMPTY_STATE, said)
    assert fold(state, reversed(said)) == state


def test_work_comes_before_wishes() -> None:
    """Whatever the wish's priority: the pod gets the node that the limit allows, and the wish says which limit."""
    made = planned(wish(priority="high"), pod("a", gpus=8), nodes_count_max=1)
    (node_,) = bought(made)
    assert isinstance(node_.reason, UnmetDemand)
    assert node_.reason.demand == ("pod/uid-a",)
    assert [(held.subject, type(held.reason)) for held in made.deferred] == [("demand/kafka/1", NodesLimit)]


def test_a_wish_keeps_no_job_from_starting() -> None:
    """Room is wished for so that work may have it."""
    state = given(wish(priority="high"), node("n1", SPOT), job("train", gpus=8))
    assert [placed.job_id for placed in schedule(state, policy(), T0).placements] == ["train"]


def test_each_mistake_of_a_wish_is_named() -> None:
    """By the wish's own fields; and such a wish is none."""
    fact = DemandReported(
        source="no such source!",
        shape=DemandShape(gpu_count=-1, cpu="lots"),
        count=5000,
        until=T0 - MINUTE,
        priority="now!",
    )
    assert {mistake.field for mistake in violations_of(fact, T0)} == {
        "source", "shape.gpu_count", "shape.cpu", "count", "until", "priority",
    }  # fmt: skip
    assert given((Told(fact, T0),)).reported_demand == {}
    late = msgspec.structs.replace(fact, until=T0 + timedelta(days=8))
    assert "until" in {mistake.field for mistake in violations_of(late, T0)}


def test_sources_are_bounded() -> None:
    """Whoever sends what: those that are over first make room."""
    ends = [T0 + MINUTE * (number + 1) for number in range(SOURCES_COUNT_MAX + 9)]
    told = [each for number in range(SOURCES_COUNT_MAX + 9) for each in wish(f"s{number}", until=ends[number])]
    state = fold(EMPTY_STATE, record(told))
    assert len(state.reported_demand) == SOURCES_COUNT_MAX
    assert "s0" not in state.reported_demand


def test_spot_is_not_trusted_where_the_wish_says_so() -> None:
    """A wish for lasting room is served by lasting nodes alone, here by none."""
    made = planned(wish(preemptible=False))
    assert bought(made) == []
    assert SPOT.capacity_type == "spot"
