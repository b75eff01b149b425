"""State kept in NodePool annotations and the limits that follow from it, without a server."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.providers.karpenter.node_pools import (
    ABANDONED_SECONDS,
    ORDERS,
    OWNER,
    POOLS,
    WRITTEN,
    NodePool,
    PoolState,
    marks_of,
    note_of,
    pool_state,
)
from gpu_autoscaler.providers.karpenter.wire import CLAIMS, NodeClaim
from gpu_autoscaler.providers.protocol import Order

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
GPUS = 4
OFFER = Offer(
    instance_type="gpu-4x",
    zone="a",
    capacity_type=CapacityType.ON_DEMAND,
    resources=Resources(cpu_milli=1000, memory_bytes=1, gpu_count=GPUS),
    gpu_model="A10G",
    price_micro_usd_per_hour=4_000_000,
)


def order(action: str) -> Order:
    """One more machine, for a project."""
    marks = (("gpu-autoscaler.io/project-id", "vision"),)
    return Order(action_id=ActionId(action), installation="us", pool="gpu", offer=OFFER, labels=marks, taints=())


def standing(*actions: str, seconds: float = 0.0, is_withdrawing: bool = False) -> str:
    """As it is written on the pool: orders of so long ago."""
    second = int(NOW.timestamp() - seconds)
    return " ".join(f"+{action}/{note_of(order(action), second, is_withdrawing=is_withdrawing)}" for action in actions)


def pool(limit: int | None, orders: str = "", *, owner: str | None = "us", written: int | None = None) -> NodePool:
    """As the API server has it."""
    notes = {} if owner is None else {OWNER: owner, ORDERS: orders, WRITTEN: str(limit if written is None else written)}
    limits = {} if limit is None else {"limits": {"nvidia.com/gpu": limit}}
    item = {"metadata": {"name": "gpu", "annotations": notes}, "spec": limits}
    return POOLS.decode(msgspec.json.encode(item), "test")


def claim(name: str, *, age: float = 0.0, action: str | None = None, is_ending: bool = False) -> NodeClaim:
    """One of the pool's; `action`: it carries our labels already."""
    ours = {} if action is None else {"gpu-autoscaler.io/installation": "us", "gpu-autoscaler.io/action-id": action}
    metadata: dict[str, Any] = {"name": name, "uid": f"0-{name}", "labels": ours}
    metadata["creationTimestamp"] = (NOW - timedelta(seconds=age)).isoformat()
    if is_ending:
        metadata["deletionTimestamp"] = NOW.isoformat()
    return CLAIMS.decode(msgspec.json.encode({"metadata": metadata}), "test")


def look(of: NodePool, *claims: NodeClaim, asked: str = "", ending: frozenset[str] = frozenset()) -> PoolState:
    """Now, by us."""
    return pool_state(of, claims, "us", NOW.timestamp(), ending, asked)


def due(seen: PoolState) -> int:
    """What is to be allowed."""
    return seen.required_gpus(seen.ledger, GPUS)


def test_new_claims_are_assigned_to_orders_by_age() -> None:
    """By creation time, not by name; the third belongs to no order but is ours."""
    seen = look(pool(8, standing("a1", "a2")), claim("z", age=9), claim("y", age=5), claim("x", age=1))
    named = {name: action for name, (action, _) in seen.newly_assigned.items()}
    assert (named["z"], named["y"], named["x"]) == ("a1", "a2", "0x")
    assert (seen.ledger.pending, due(seen)) == ((), 12)


def test_earlier_claims_are_foreign() -> None:
    """They count towards the limit and stay foreign."""
    before = look(pool(4, owner=None), claim("old"))
    assert before.problem("us", GPUS) is None
    assert (before.newly_assigned, before.ledger.foreign_members, due(before)) == ({}, frozenset({"old"}), 4)
    after = look(pool(8, f"-old {standing('a1')}"), claim("old"), claim("new"))
    assert list(after.newly_assigned) == ["new"]


def test_an_order_with_a_claim_is_not_pending() -> None:
    """Also if a process was killed after it labeled the claim and before it removed the order."""
    seen = look(pool(4, standing("a1")), claim("x", action="a1"))
    assert (seen.newly_assigned, seen.ledger.pending, due(seen)) == ({}, (), 4)
    assert seen.claim_of(ActionId("a1")) is not None


def test_terminating_claims_are_not_counted() -> None:
    """As Karpenter counts; a cancelled order stays for a late claim but raises no limit."""
    ended = claim("x", action="a1", is_ending=True)
    assert due(look(pool(8), ended, claim("y", action="a2"))) == 4
    assert due(look(pool(8), claim("x", action="a1"), ending=frozenset({"x", "gone"}))) == 0
    withdrawing = look(pool(4, standing("a3", is_withdrawing=True)))
    assert (due(withdrawing), withdrawing.wants(ActionId("a3"))) == (0, False)
    late = look(pool(4, standing("a3", is_withdrawing=True)), claim("z"))
    assert late.newly_assigned["z"][0] == "a3"


def test_an_abandoned_order_is_removed() -> None:
    """After an hour, unless it is requested now."""
    old = pool(4, standing("a1", seconds=ABANDONED_SECONDS + 1))
    assert due(look(old)) == 0
    assert due(look(old, asked="a1")) == 4


def test_a_pool_of_others_is_refused_by_name() -> None:
    """Limits or pools of others, pools not assigned to us; our own limit is accepted."""
    assert look(pool(4), claim("x", action="a1")).problem("us", GPUS) is None
    problems = {
        "LimitsChanged": pool(8, written=4),
        "NodePoolNotOwned": pool(4, owner="them"),
        "LimitsNotOurs": pool(None, owner=None),
    }
    for code, one in problems.items():
        found = look(one).problem("us", GPUS)
        assert found is not None
        assert found[0] == code
    assert look(pool(None, written=4)).problem("us", GPUS) is not None, "the limit was taken away"


def test_a_claim_has_the_terms_of_its_order() -> None:
    """Price, pool and project of the order; without an order, the pool's known price."""
    marks, notes = marks_of(ActionId("a1"), note_of(order("a1"), 7), OFFER, "us")
    assert marks == {
        "gpu-autoscaler.io/installation": "us",
        "gpu-autoscaler.io/action-id": "a1",
        "gpu-autoscaler.io/capacity-type": "on-demand",
        "gpu-autoscaler.io/gpu-model": "A10G",
        "gpu-autoscaler.io/pool": "gpu",
        "gpu-autoscaler.io/project-id": "vision",
    }
    assert notes == {"gpu-autoscaler.io/offer": OFFER.key, "gpu-autoscaler.io/price-micro-usd-per-hour": "4000000"}
    seen = look(pool(4), claim("x"))
    alone, price = marks_of(*seen.newly_assigned["x"], OFFER, "us")
    assert "gpu-autoscaler.io/pool" not in alone
    assert price == notes
