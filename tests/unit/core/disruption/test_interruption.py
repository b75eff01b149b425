"""Interruption notices: the node drains by the deadline, its pods are placed by the same plan; a withdrawn notice ends
it.
"""

from datetime import timedelta

import msgspec
from tests.support.stories import (
    MINUTE,
    SECOND,
    T0,
    Story,
    TimedFact,
    bought,
    drained,
    given,
    job,
    node,
    notice,
    offer,
    on_sale,
    planned,
    pod,
    policy,
    provider_id,
    purchase,
    record,
)

from gpu_autoscaler.core.intake.fold import fold
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotNoticeWithdrawn, notice_id
from gpu_autoscaler.model.decisions import BuyNode, CancelDrain, DrainNode
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected
from gpu_autoscaler.model.reasons.drain import NoticeWithdrawn, SpotReclaim

RECLAIM = T0 + 2 * MINUTE


def withdrawn(name: str) -> Story:
    """The cloud takes its notice of this node back."""
    fact = SpotNoticeWithdrawn(
        provider_id=provider_id(f"buy-{name}"), kind="terminate", provider_event="1", withdrawn_at=T0 + SECOND
    )
    return (TimedFact(fact, T0 + SECOND),)


def reclaimed(name: str) -> SpotReclaim:
    """The reason of a drain under this node's notice."""
    return SpotReclaim(
        notice_id=notice_id(provider_id(f"buy-{name}"), "terminate", "1"), kind="terminate", reclaim_at=RECLAIM
    )


def test_the_replacement_is_bought_in_the_plan_that_drains() -> None:
    """One plan orders the new node and drains the at-risk one by the cloud's deadline."""
    made = plan(given(node("n1"), pod("a", on="n1"), notice("n1", reclaim_at=RECLAIM), on_sale()), policy(), T0)

    buy, drain = made.decisions
    assert isinstance(buy, BuyNode)
    assert buy.reason == ReplacesAtRiskNode(
        node_uid="uid-n1",  # type: ignore[arg-type]
        node_name="n1",
        reclaim_at=RECLAIM,
        demand=("pod/uid-a",),
    )
    assert isinstance(drain, DrainNode)
    assert (drain.is_voluntary, drain.deadline_at, drain.reason) == (False, RECLAIM, reclaimed("n1"))


def test_existing_capacity_replaces_without_a_purchase() -> None:
    """Only the drain is decided."""
    state = given(node("n1"), node("n2"), pod("a", on="n1"), notice("n1", reclaim_at=RECLAIM), on_sale())
    made = plan(state, policy(), T0)

    assert [type(decision) for decision in made.decisions] == [DrainNode]
    assert made.deferred[0].reason == CapacityExpected(node="n2", expected_at=None)


def test_an_empty_at_risk_node_is_drained_and_not_replaced() -> None:
    """Nobody works there: nothing is bought."""
    made = plan(given(node("n1"), notice("n1", reclaim_at=RECLAIM), on_sale()), policy(), T0)

    assert [type(decision) for decision in made.decisions] == [DrainNode]


def test_an_at_risk_node_takes_no_new_work() -> None:
    """The waiting job is bought for, though that node has capacity."""
    made = plan(given(node("n1"), notice("n1", reclaim_at=RECLAIM), job("train"), on_sale()), policy(), T0)

    assert [type(decision) for decision in made.decisions] == [BuyNode, DrainNode]


def test_a_notice_without_deadline_gets_the_shortest_one() -> None:
    """Thirty seconds from its first receipt."""
    state = given(node("n1"), notice("n1", at=T0), as_of=T0 + 10 * SECOND)
    (drain,) = plan(state, policy(), T0 + 10 * SECOND).decisions

    assert isinstance(drain, DrainNode)
    assert drain.deadline_at == T0 + timedelta(seconds=30)


def test_a_notice_causes_one_drain() -> None:
    """Its pods are still demand."""
    under_way = drained("n1", is_voluntary=False, reason=reclaimed("n1"), seconds_max=120)
    state = given(node("n1"), pod("a", on="n1"), notice("n1", reclaim_at=RECLAIM), under_way, on_sale())

    assert [type(decision) for decision in plan(state, policy(), T0).decisions] == [BuyNode]


def test_a_notice_overrules_a_drain_by_choice() -> None:
    """The deadline becomes that of the notice."""
    state = given(node("n1"), drained("n1"), notice("n1", reclaim_at=RECLAIM))
    (drain,) = plan(state, policy(), T0).decisions

    assert isinstance(drain, DrainNode)
    assert not drain.is_voluntary


def test_a_deadline_only_moves_earlier() -> None:
    """A drain with a later deadline is decided again."""
    under_way = drained("n1", is_voluntary=False, reason=reclaimed("n1"), seconds_max=600)
    (drain,) = plan(given(node("n1"), notice("n1", reclaim_at=RECLAIM), under_way), policy(), T0).decisions

    assert isinstance(drain, DrainNode)
    assert drain.deadline_at == RECLAIM


def test_a_withdrawn_notice_keeps_the_node() -> None:
    """The drain is canceled."""
    under_way = drained("n1", is_voluntary=False, reason=reclaimed("n1"), seconds_max=120)
    state = given(node("n1"), pod("a", on="n1"), notice("n1", reclaim_at=RECLAIM), withdrawn("n1"), under_way)
    (decision,) = plan(state, policy(), T0 + SECOND).decisions

    assert isinstance(decision, CancelDrain)
    assert decision.reason == NoticeWithdrawn(notice_id=reclaimed("n1").notice_id)
    decided = given(
        node("n1"), notice("n1", reclaim_at=RECLAIM), withdrawn("n1"), under_way, planned(decision, plan_id="plan-2")
    )
    assert plan(decided, policy(), T0 + SECOND).decisions == ()


def test_neither_freeze_nor_budget_nor_stale_list_stops_a_notice() -> None:
    """What the cloud takes is not ours to keep."""
    state = given(node("n1"), notice("n1", reclaim_at=RECLAIM), is_synced=False)
    made = plan(state, policy(is_frozen=True, disruption_ratio_max=0), T0)

    assert [type(decision) for decision in made.decisions] == [DrainNode]


def test_a_foreign_node_under_notice_is_drained_and_not_terminated() -> None:
    """Its pods move; its instance is not ours to terminate."""
    (drain,) = plan(given(node("n1", is_ours=False), notice("n1", reclaim_at=RECLAIM)), policy(), T0).decisions

    assert isinstance(drain, DrainNode)
    assert drain.provider_id is None


def test_an_order_under_notice_is_no_capacity() -> None:
    """The job is bought for again."""
    order = purchase("buy-n1")
    state = given(job("train"), bought(order), notice("n1", reclaim_at=RECLAIM), on_sale(offer()))

    assert [type(decision) for decision in plan(state, policy(), T0).decisions] == [BuyNode]


def test_pods_that_do_not_come_back_are_not_replaced() -> None:
    """A bare pod ends with its node."""
    state = given(node("n1"), pod("a", on="n1", owner_kind=None), notice("n1", reclaim_at=RECLAIM), on_sale())

    assert [type(decision) for decision in plan(state, policy(), T0).decisions] == [DrainNode]


def test_one_interruption_from_two_sources_is_one_notice() -> None:
    """The first one names it, and the earliest deadline applies."""
    queue = SpotNoticeReceived(
        provider_id=provider_id("buy-n1"),
        kind="terminate",
        provider_event="event-7",
        reclaim_at=T0 + 2 * MINUTE,
        received_at=T0,
        channel="queue",
    )
    metadata = msgspec.structs.replace(
        queue, provider_event="deadline", reclaim_at=T0 + MINUTE, received_at=T0 + SECOND, channel="metadata"
    )
    state = fold(given(node("n1")), record([TimedFact(queue, T0), TimedFact(metadata, T0 + SECOND)]))
    (standing,) = state.notices.values()
    assert standing.notice.notice_id == queue.notice_id
    assert standing.notice.reclaim_at == T0 + MINUTE
