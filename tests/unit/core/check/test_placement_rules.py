"""The plan check on pod constraints: right plans pass, and each wrong one is rejected for its violation."""

import msgspec
import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import SECOND, drained, given, node, offer, on_sale, pod, policy
from tests.unit.core.placement.test_pod_affinity import CACHE, EVEN, NOON, WEB, apart, in_zones, together, web

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import AnyDecision, BuyNode, CancelDrain, Plan
from gpu_autoscaler.model.ids import ActionId, NodeUid
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.drain import DemandReturned
from gpu_autoscaler.model.scheduling import NodeDemands, PodAffinitySpec, Spread, Taint

ALONE = PodAffinitySpec()


def right(state: ClusterState) -> tuple[Plan, list[BuyNode]]:
    """The plan, which nothing is wrong with, and what it buys."""
    made = accepted_plan(state, policy(), NOON)
    return made, made.purchases


def said(made: Plan, state: ClusterState, *decisions: AnyDecision) -> str:
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


@pytest.mark.parametrize(("waits", "is_uneven"), [(10, True), (0, False)])
def test_pods_without_the_rule_are_no_obstacle_if_they_are_bound_later(waits: int, *, is_uneven: bool) -> None:
    """Two of the group join a spread pod on its node: kube-scheduler binds first who has waited longest."""
    even = PodAffinitySpec(spreads=(Spread(topology_key=labels.HOSTNAME, group=WEB),))
    spread = (web(name, even, at=NOON - 5 * SECOND, gpus=1) for name in ("a", "b"))
    free = (web(name, ALONE, at=NOON - waits * SECOND, gpus=1) for name in ("c", "d"))
    state = given(*spread, *free, in_zones("eu-1a"), as_of=NOON)
    made, bought = right(state)
    one, two = (each for each in bought if "pod/uid-a" in each.reason.demand or "pod/uid-b" in each.reason.demand)  # type: ignore[union-attr]
    (name,) = (key for key in one.reason.demand if key in ("pod/uid-a", "pod/uid-b"))  # type: ignore[union-attr]
    (other,) = (key for key in two.reason.demand if key in ("pod/uid-a", "pod/uid-b"))  # type: ignore[union-attr]
    three = msgspec.structs.replace(one.reason, demand=(name, "pod/uid-c", "pod/uid-d"))
    alone = msgspec.structs.replace(two.reason, demand=(other,))
    wrong = (msgspec.structs.replace(one, reason=three), msgspec.structs.replace(two, reason=alone))

    assert ("would be uneven" in said(made, state, *wrong)) == is_uneven


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

    assert [each.node_name for each in made.drains] == ["n1"]
    assert "no other node suits" in "\n".join(check(made, minding, policy()))
    assert plan(minding, policy(), NOON).decisions == ()


def test_only_domains_open_to_the_pod_count_in_its_spread() -> None:
    """A pod that may run in one zone is even there, however many of a group are in it and few elsewhere."""
    there = NodeDemands(node_selector=((labels.ZONE, "eu-1a"),))
    counts_caches = PodAffinitySpec(spreads=(Spread(topology_key=labels.ZONE, group=CACHE),))
    caches = (web(f"c{n}", ALONE, app="cache", gpus=8, on=f"n{n}") for n in range(3))
    nodes = (node(f"n{n}", offer(zone="eu-1a")) for n in range(3))
    state = given(web("w", counts_caches, demands=there), *caches, *nodes, in_zones("eu-1a", "eu-1b"), as_of=NOON)

    assert len(right(state)[1]) == 1


def test_pods_of_another_gpu_model_show_no_domain() -> None:
    """Nodes of the model are sold in one zone; what other models have elsewhere does not make it uneven."""
    sale = on_sale(offer("a"), offer("t", model="T4", zone="zone-a"), offer("t", model="T4", zone="zone-b"), at=NOON)
    large = (web(f"a{n}", EVEN, gpus=8, model="A100") for n in range(4))
    state = given(*large, *(web(f"t{n}", EVEN, gpus=8, model="T4") for n in range(2)), sale, as_of=NOON)

    made, bought = right(state)
    assert len(bought) == 6
    assert made.deferred == ()


def test_a_pod_may_be_the_first_of_its_group() -> None:
    """One without the rule may follow elsewhere, also before the next, and one without a place may come anywhere. Two
    that must each be first cannot both be."""
    near = together(labels.ZONE, WEB)
    pods = (web("first", near, gpus=8), web("free", ALONE, gpus=8, at=NOON), web("second", near, gpus=8))
    state = given(*pods, in_zones("eu-1a", "eu-1b"), as_of=NOON)
    made, bought = right(state)
    names = {each.reason.demand[0].removeprefix("pod/uid-"): each for each in bought}  # type: ignore[union-attr]
    first, free, second = (names[name] for name in ("first", "free", "second"))

    assert said(made, state, first, in_zone(free, "eu-1b"), second) == ""
    assert said(made, state, first, free, in_zone(second, "eu-1b")) == ""
    assert "affinity over" not in said(made, state, first, in_zone(second, "eu-1b"))
    alone = msgspec.structs.replace(state, pods={uid: each for uid, each in state.pods.items() if each.name != "free"})
    assert "affinity over" in said(made, alone, first, in_zone(second, "eu-1b"))


def test_pods_stay_on_a_node_whose_drain_the_plan_cancels() -> None:
    """With the drain they leave, and the new pod may be the first again."""
    near = together(labels.ZONE, WEB)
    running = (*node("n1", offer(zone="eu-1a")), *drained("n1", at=NOON), *web("there", near, on="n1"))
    state = given(web("new", near, gpus=8), running, in_zones("eu-1b"), as_of=NOON)
    cancel = CancelDrain(
        action_id=ActionId("cancel"),
        drain_action_id=ActionId("drain-n1"),
        node_uid=NodeUid("uid-n1"),
        node_name="n1",
        reason=DemandReturned(demand=("pod/uid-there",)),
    )
    _, (bought,) = right(given(web("new", ALONE, gpus=8), in_zones("eu-1b"), as_of=NOON))
    made = Plan(as_of=NOON, parent_sequence=state.last_plan_sequence, decisions=(bought,))

    assert said(made, state, bought) == ""
    assert "affinity over" in said(made, state, bought, cancel)


@pytest.mark.parametrize("is_over_tainted_nodes", [True, False])
def test_pods_beside_a_taint_count_in_a_spread_by_its_policy(*, is_over_tainted_nodes: bool) -> None:
    """An alike pod runs where a taint came later; with nodeTaintsPolicy Honor its zone is none of the spread's."""
    rule = Spread(topology_key=labels.ZONE, group=WEB, is_over_tainted_nodes=is_over_tainted_nodes)
    even = PodAffinitySpec(spreads=(rule,))
    taints = (Taint(key="team", effect="NoSchedule"),)
    running = (*(web(f"r{number}", even, on="n1") for number in range(2)), web("r2", even, on="n2"))
    nodes = (node("n1", offer(zone="eu-1a")), node("n2", offer(zone="eu-1b"), is_ours=False, taints=taints))
    state = given(*nodes, *running, web("new", even, gpus=8), in_zones("eu-1a"), as_of=NOON)
    _, (bought,) = right(given(web("new", ALONE, gpus=8), in_zones("eu-1a"), as_of=NOON))
    made = Plan(as_of=NOON, parent_sequence=state.last_plan_sequence)

    assert ("would be uneven" in said(made, state, bought)) == is_over_tainted_nodes


def test_a_spread_over_too_few_zones_is_checked() -> None:
    """Two pods in each of two zones are even, but a third zone is required."""
    rule = PodAffinitySpec(spreads=(Spread(topology_key=labels.ZONE, group=WEB),))
    state = given(*(web(f"w{n}", rule, gpus=8) for n in range(4)), in_zones("eu-1a", "eu-1b"), as_of=NOON)
    made, bought = right(state)
    strict = PodAffinitySpec(spreads=(msgspec.structs.replace(rule.spreads[0], domains_count_min=3),))
    pods = {uid: msgspec.structs.replace(each, pod_affinity=strict) for uid, each in state.pods.items()}

    assert "would be uneven" in said(made, msgspec.structs.replace(state, pods=pods), *bought)
