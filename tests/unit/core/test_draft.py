"""Launch groups: which purchases are one launch, and their check."""

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
    """A node of gang job/a, with its own action id in its labels."""
    result = purchase(name, gang="job/a", labels={ACTION_ID: name})
    return msgspec.structs.replace(result, **how)


def transactions(*decisions: BuyNode) -> list[str | None]:
    """The launch group of each purchase."""
    return [one.transaction for one in assign_launch_groups(decisions)]


def test_equal_nodes_of_one_gang_are_one_launch_group() -> None:
    """With the id of the first; the action id in labels makes no difference."""
    assert transactions(node("a"), node("b"), node("c")) == ["a", "a", "a"]


def test_single_nodes_have_no_launch_group() -> None:
    """The only node of a gang, and nodes without a gang."""
    assert transactions(node("a")) == [None]
    assert transactions(node("a", gang=None), node("b", gang=None)) == [None, None]


def test_gangs_have_separate_launch_groups() -> None:
    """In any order."""
    assert transactions(node("a"), node("x", gang="job/x"), node("b"), node("y", gang="job/x")) == ["a", "x", "a", "x"]


def test_different_nodes_have_separate_launch_groups() -> None:
    """Type, zone, capacity type, pool, taints, labels, slices, deadline."""
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


def test_the_plan_check_accepts_launch_groups() -> None:
    """What is put together here passes there."""
    decisions = assign_launch_groups([node("a"), node("x", gang="job/x"), node("b"), node("c", pool="other")])
    assert (
        list(launch_group_violations(Plan(as_of=T0, parent_sequence=0, decisions=decisions), ClusterState(), POLICY))
        == []
    )


def test_the_plan_check_rejects_invalid_launch_groups() -> None:
    """Of two gangs, different, single, or with an unknown id."""
    for wrong, word in (
        ((node("a", transaction="a"), node("b", gang="job/b", transaction="a")), "not of one gang"),
        ((node("a", gang=None, transaction="a"), node("b", gang=None, transaction="a")), "not of one gang"),
        ((node("a", transaction="a"), node("b", pool="other", transaction="a")), "not identical"),
        ((node("a", transaction="a"), node("b", offer=offer(zone="zone-b"), transaction="a")), "not identical"),
        ((node("a", transaction="a"),), "first of two or more"),
        ((node("a", transaction="z"), node("b", transaction="z")), "first of two or more"),
    ):
        violations = list(
            launch_group_violations(Plan(as_of=T0, parent_sequence=0, decisions=wrong), ClusterState(), POLICY)
        )
        assert word in "".join(violations), wrong
