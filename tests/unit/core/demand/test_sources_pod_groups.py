"""Pod groups of any label are bought for whole or not at all, with different shapes."""

from typing import Any

import pytest
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, Story, given, node, on_sale, pod, policy

from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.reasons.defer import GroupIncomplete
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit

GANG = "group/default/train"
NAMED = {labels.POD_GROUP_LABELS[0]: "train"}


def group(*gpus: int, **more: Any) -> Story:  # noqa: ANN401 - fields of the pod
    """A pod of the group per number of GPUs."""
    how = more or {"labels": NAMED}
    return tuple(event for number, count in enumerate(gpus) for event in pod(f"m{number}", gpus=count, **how))


def planned(*stories: Story, **rules: Any) -> Plan:  # noqa: ANN401 - fields of the policy
    """The plan, accepted by the plan check."""
    state, under = given(*stories, on_sale()), policy(**rules)
    return accepted_plan(state, under, T0)


@pytest.mark.parametrize(
    "metadata",
    [{"labels": {key: "train"}} for key in labels.POD_GROUP_LABELS]
    + [{"annotations": {labels.POD_GROUP_ANNOTATION: "train"}}],
)
def test_a_group_over_the_limit_buys_nothing(metadata: dict[str, Any]) -> None:
    """Four pods of a node each under a limit of two nodes: all pods and the group are deferred."""
    result = planned(group(8, 8, 8, 8, **metadata), nodes_count_max=2)
    assert result.purchases == []
    assert {held.subject for held in result.deferred} == {GANG, *(f"pod/uid-m{number}" for number in range(4))}
    assert all(isinstance(held.reason, NodesLimit) for held in result.deferred)


def test_pods_without_a_group_are_bought_for_one_by_one() -> None:
    """The same four without the label: as many as allowed."""
    assert len(planned(group(8, 8, 8, 8, labels={}), nodes_count_max=2).purchases) == 2


def test_a_generated_volcano_group_is_ignored() -> None:
    """Its minimum is one pod."""
    made_up = {labels.POD_GROUP_ANNOTATION: "podgroup-0b6a1d4e"}
    assert len(planned(group(8, 8, 8, 8, annotations=made_up), nodes_count_max=2).purchases) == 2


def test_a_group_within_the_limit_is_one_transaction() -> None:
    """All purchases have the gang."""
    assert [decision.gang for decision in planned(group(8, 8), nodes_count_max=2).purchases] == [GANG, GANG]


def test_a_group_with_different_shapes_is_bought_whole() -> None:
    """The small head fits, but its workers need two nodes and one is allowed."""
    result = planned(node("n1"), group(1, 8, 8), nodes_count_max=2)
    assert result.purchases == []
    assert len(planned(node("n1"), group(1, 8, 8), nodes_count_max=3).purchases) == 2


def test_a_deferred_group_uses_no_capacity() -> None:
    """The next pod is served."""
    late = pod("late", gpus=8, priority=-1)
    (decision,) = planned(group(1, 8, 8), late, nodes_count_max=1).purchases
    assert decision.gang is None
    assert decision.reason.demand == ("pod/uid-late",)  # type: ignore[union-attr]


def test_an_incomplete_group_waits() -> None:
    """Two of three pods exist; the reason has the counts."""
    result = planned(group(8, 8, labels=NAMED, group_count_min=3))
    assert result.purchases == []
    wanted = GroupIncomplete(group=GANG, members_present=2, members_count_min=3)
    assert {held.subject: held.reason for held in result.deferred} == {
        f"pod/uid-m{number}": wanted for number in (0, 1)
    }


def test_pods_beyond_the_minimum_are_ordinary_pods() -> None:
    """Two of four start together; under a limit of three nodes the third is bought for."""
    result = planned(group(8, 8, 8, 8, labels=NAMED, group_count_min=2), nodes_count_max=3)
    assert [decision.gang for decision in result.purchases] == [GANG, GANG, None]
    result = planned(group(8, 8, 8, 8, labels=NAMED, group_count_min=2), nodes_count_max=1)
    assert {decision.gang for decision in result.purchases} <= {None}


def test_running_members_count_towards_the_minimum() -> None:
    """One of three runs: the other two are the gang."""
    there = (*node("n1"), *pod("m9", gpus=8, on="n1", labels=NAMED, group_count_min=3))
    result = planned(there, group(8, 8, labels=NAMED, group_count_min=3), nodes_count_max=3)
    assert [decision.gang for decision in result.purchases] == [GANG, GANG]


@pytest.mark.parametrize("key", [*labels.POD_GROUP_MIN_AVAILABLE, labels.POD_GROUP_TOTAL_COUNT])
def test_pods_may_set_the_minimum(key: str) -> None:
    """By annotation or label, as with Kueue and Coscheduling."""
    result = planned(group(8, 8, labels=NAMED, annotations={key: "3"}))
    assert result.purchases == []
    assert any(isinstance(held.reason, GroupIncomplete) for held in result.deferred)
