"""The plan check on pod constraints: right plans pass, and each wrong one is rejected for its violation."""

import msgspec
from tests.support.stories import given, node, offer, pod, policy
from tests.unit.core.placement.test_pod_affinity import CACHE, EVEN, NOON, WEB, apart, in_zones, together, web

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.scheduling import PodAffinitySpec

ALONE = PodAffinitySpec()


def right(state: ClusterState) -> tuple[Plan, list[BuyNode]]:
    """The plan, which nothing is wrong with, and what it buys."""
    made = plan(state, policy(), NOON)
    assert check(made, state, policy()) == ()
    return made, [each for each in made.decisions if isinstance(each, BuyNode)]


def said(made: Plan, state: ClusterState, *decisions: BuyNode) -> str:
    """What the plan check says of the plan with these decisions instead."""
    return "\n".join(check(msgspec.structs.replace(made, decisions=decisions), state, policy()))


def in_zone(decision: BuyNode, zone: str) -> BuyNode:
    """The same purchase elsewhere."""
    return msgspec.structs.replace(decision, offer=msgspec.structs.replace(decision.offer, zone=zone))


def test_one_node_for_pods_with_anti_affinity_is_rejected() -> None:
    """One of them would never start."""
    keep = apart(labels.HOSTNAME)
    state = given(web("a", keep, at=NOON), web("b", keep, at=NOON), in_zones("eu-1a"), as_of=NOON)
    made, (one, two) = right(state)
    demand = tuple(key for each in (one, two) for key in each.reason.demand)  # type: ignore[union-attr]
    assert isinstance(one.reason, UnmetDemand)
    both = msgspec.structs.replace(one, reason=msgspec.structs.replace(one.reason, demand=demand))

    assert f"violates its anti-affinity over {labels.HOSTNAME}" in said(made, state, both)


def test_one_zone_for_a_spread_group_is_rejected() -> None:
    """Three pods in one zone of three, with a skew of one."""
    state = given(
        *(web(name, EVEN, at=NOON, gpus=8) for name in "abc"), in_zones("eu-1a", "eu-1b", "eu-1c"),
        web("there", EVEN, on="n1"), node("n1", offer(zone="eu-1b")), as_of=NOON,
    )  # fmt: skip
    made, bought = right(state)

    assert "would be uneven" in said(made, state, *(in_zone(each, "eu-1a") for each in bought))


def test_anti_affinity_of_a_running_pod_is_checked() -> None:
    """The waiting pod has no constraint."""
    state = given(
        node("n1", offer(zone="eu-1a")), web("cache", apart(labels.ZONE), app="cache", on="n1", gpus=8),
        web("a", ALONE, at=NOON, gpus=8), in_zones("eu-1a", "eu-1b"), as_of=NOON,
    )  # fmt: skip
    made, (one,) = right(state)

    assert one.offer.zone == "eu-1b"
    assert "violates the anti-affinity of other pods" in said(made, state, in_zone(one, "eu-1a"))


def test_a_zone_without_the_affinity_is_rejected() -> None:
    """The pod of its affinity is in the other zone."""
    state = given(
        node("n1", offer(zone="eu-1b")), web("friend", ALONE, app="cache", on="n1", gpus=8),
        web("a", together(labels.ZONE, CACHE), at=NOON, gpus=8), in_zones("eu-1a", "eu-1b"), as_of=NOON,
    )  # fmt: skip
    made, (one,) = right(state)

    assert "are elsewhere" in said(made, state, in_zone(one, "eu-1a"))


def test_a_drain_is_rejected_if_no_other_node_suits_its_pod() -> None:
    """The same plan, made before the pods had constraints."""
    there = (node("n1"), node("n2"), pod("full", on="n2", gpus=5))
    keep = apart(labels.HOSTNAME, WEB)
    careless = given(*there, web("a", ALONE, on="n1"), web("b", ALONE, on="n2"), in_zones("eu-1a"), as_of=NOON)
    minding = given(*there, web("a", keep, on="n1"), web("b", keep, on="n2"), in_zones("eu-1a"), as_of=NOON)
    made, _ = right(careless)

    assert [each.node_name for each in made.decisions if isinstance(each, DrainNode)] == ["n1"]
    assert "no other node suits" in "\n".join(check(made, minding, policy()))
    assert plan(minding, policy(), NOON).decisions == ()
