"""Which purchases are one call, and what the second opinion says of a plan that has it wrong."""

from datetime import timedelta

import msgspec
from tests.support.stories import T0, offer, purchase

from gpu_autoscaler.core.check.purchase_rules import launch_group_violations
from gpu_autoscaler.core.draft import assign_launch_groups
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.labels import ACTION_ID, PROJECT_ID
from gpu_autoscaler.model.offers import CapacityType

POLICY = ScalingPolicy()


def node(name: str, **how: object) -> BuyNode:
    """A node of gang job/a, whose labels have its own name as those of every order do."""
    made = purchase(name, gang="job/a", labels={ACTION_ID: name})
    return msgspec.structs.replace(made, **how)


def transactions(*decisions: BuyNode) -> list[str | None]:
    """What each is bought with."""
    return [one.transaction for one in assign_launch_groups(decisions)]


def test_nodes_of_one_gang_that_are_alike_are_one_transaction() -> None:
    """It has the name of the first; what its labels say of the order's own name is no difference."""
    assert transactions(node("a"), node("b"), node("c")) == ["a", "a", "a"]


def test_what_is_alone_or_of_no_gang_is_bought_by_itself() -> None:
    """A gang's only node, and nodes for pods that stand for themselves."""
    assert transactions(node("a")) == [None]
    assert transactions(node("a", gang=None), node("b", gang=None)) == [None, None]


def test_gangs_are_not_mixed() -> None:
    """Each has its own transaction, in whichever order they come."""
    assert transactions(node("a"), node("x", gang="job/x"), node("b"), node("y", gang="job/x")) == ["a", "x", "a", "x"]


def test_what_differs_is_another_transaction() -> None:
    """Type, zone, purchase option, pool, taints, labels, how GPUs are cut, and by when."""
    other_zone = offer(zone="zone-b")
    other_type = offer("g5.xlarge", gpus=1, model="A10G", gpu_memory_gib=24)
    on_demand = offer(capacity_type=CapacityType.ON_DEMAND)
    differing: list[dict[str, object]] = [
        {"offer": other_zone},
        {"offer": other_type},
        {"offer": on_demand},
        {"pool": "other"},
        {"labels": ((ACTION_ID, "z"), (PROJECT_ID, "p"))},
        {"slices": (("1g.5gb", 7),)},
        {"deadline_at": T0 + timedelta(days=1)},
    ]
    for how in differing:
        assert transactions(node("a"), node("b"), node("z", **how)) == ["a", "a", None], how


def test_the_second_opinion_finds_nothing_wrong_with_it() -> None:
    """What is put together here passes there."""
    decisions = assign_launch_groups([node("a"), node("x", gang="job/x"), node("b"), node("c", pool="other")])
    assert (
        list(launch_group_violations(Plan(as_of=T0, parent_sequence=0, decisions=decisions), ClusterState(), POLICY))
        == []
    )


def test_the_second_opinion_refuses_what_does_not_belong_together() -> None:
    """Of two gangs, unlike, alone, or named after nobody."""
    for wrong, word in (
        ((node("a", transaction="a"), node("b", gang="job/b", transaction="a")), "not of one gang"),
        ((node("a", gang=None, transaction="a"), node("b", gang=None, transaction="a")), "not of one gang"),
        ((node("a", transaction="a"), node("b", pool="other", transaction="a")), "not alike"),
        ((node("a", transaction="a"), node("b", offer=offer(zone="zone-b"), transaction="a")), "not alike"),
        ((node("a", transaction="a"),), "first of two or more"),
        ((node("a", transaction="z"), node("b", transaction="z")), "first of two or more"),
    ):
        said = list(launch_group_violations(Plan(as_of=T0, parent_sequence=0, decisions=wrong), ClusterState(), POLICY))
        assert word in "".join(said), wrong
