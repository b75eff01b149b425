"""Pods of one group, by whoever's label, are bought for whole or not at all; head and workers may differ."""

from typing import Any

import pytest
from tests.support.stories import T0, Story, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model import labels
from gpu_autoscaler.model.decisions import BuyNode, Plan
from gpu_autoscaler.model.reasons.defer import GroupIncomplete
from gpu_autoscaler.model.reasons.defer_limits import NodesLimit

GANG = "group/default/train"
NAMED = {labels.POD_GROUP_LABELS[0]: "train"}


def group(*gpus: int, **more: Any) -> Story:  # noqa: ANN401 - fields of the pod
    """A pod of the group for each number of GPUs."""
    how = more or {"labels": NAMED}
    return tuple(told for number, count in enumerate(gpus) for told in pod(f"m{number}", gpus=count, **how))


def planned(*stories: Story, **rules: Any) -> Plan:  # noqa: ANN401 - fields of the policy
    """The plan, which the second opinion must find nothing wrong with."""
    state, under = given(*stories, on_sale()), policy(**rules)
    made = plan(state, under, T0)
    assert check(made, state, under) == ()
    return made


def bought(made: Plan) -> list[BuyNode]:
    """The nodes that are bought."""
    return [decision for decision in made.decisions if isinstance(decision, BuyNode)]


@pytest.mark.parametrize(
    "said",
    [{"labels": {key: "train"}} for key in labels.POD_GROUP_LABELS]
    + [{"annotations": {labels.POD_GROUP_ANNOTATION: "train"}}],
)
def test_a_group_over_the_limit_buys_nothing(said: dict[str, Any]) -> None:
    """Four pods of a node each under a limit of two nodes: none is bought, and each pod and the group say why."""
    made = planned(group(8, 8, 8, 8, **said), nodes_count_max=2)
    assert bought(made) == []
    assert {held.subject for held in made.deferred} == {GANG, *(f"pod/uid-m{number}" for number in range(4))}
    assert all(isinstance(held.reason, NodesLimit) for held in made.deferred)


def test_pods_without_a_group_are_bought_for_one_by_one() -> None:
    """The same four without the label: as many as the limit allows."""
    assert len(bought(planned(group(8, 8, 8, 8, labels={}), nodes_count_max=2))) == 2


def test_a_group_that_volcano_made_up_is_none() -> None:
    """Its minimum is one pod, whatever its controller runs."""
    made_up = {labels.POD_GROUP_ANNOTATION: "podgroup-0b6a1d4e"}
    assert len(bought(planned(group(8, 8, 8, 8, annotations=made_up), nodes_count_max=2))) == 2


def test_a_group_within_the_limit_is_one_transaction() -> None:
    """All orders carry the gang, so that they stand or fall together."""
    assert [decision.gang for decision in bought(planned(group(8, 8), nodes_count_max=2))] == [GANG, GANG]


def test_a_head_that_fits_does_not_start_workers_that_do_not() -> None:
    """A small head would fit on what is there; its workers need two nodes, and one may be bought: nothing is."""
    made = planned(node("n1"), group(1, 8, 8), nodes_count_max=2)
    assert bought(made) == []
    assert len(bought(planned(node("n1"), group(1, 8, 8), nodes_count_max=3))) == 2


def test_what_a_group_could_not_have_is_left_for_others() -> None:
    """Nothing of a gang that is held back stays in the way of the pod behind it."""
    late = pod("late", gpus=8, priority=-1)
    (decision,) = bought(planned(group(1, 8, 8), late, nodes_count_max=1))
    assert decision.gang is None
    assert decision.reason.demand == ("pod/uid-late",)  # type: ignore[union-attr]


def test_a_group_waits_for_the_pods_that_it_needs() -> None:
    """Two of three are there: nothing is bought before the third can be seen, and the reason counts them."""
    made = planned(group(8, 8, labels=NAMED, group_count_min=3))
    assert bought(made) == []
    wanted = GroupIncomplete(group=GANG, members_present=2, members_count_min=3)
    assert {held.subject: held.reason for held in made.deferred} == {f"pod/uid-m{number}": wanted for number in (0, 1)}


def test_more_pods_than_the_group_needs_are_pods_like_any_other() -> None:
    """Two of four start together; under a limit of three nodes the third is bought for, and the fourth is not."""
    made = planned(group(8, 8, 8, 8, labels=NAMED, group_count_min=2), nodes_count_max=3)
    assert [decision.gang for decision in bought(made)] == [GANG, GANG, None]
    made = planned(group(8, 8, 8, 8, labels=NAMED, group_count_min=2), nodes_count_max=1)
    assert {decision.gang for decision in bought(made)} <= {None}


def test_members_that_run_count_towards_the_minimum() -> None:
    """One of three runs: the two that wait are the gang that is left."""
    there = (*node("n1"), *pod("m9", gpus=8, on="n1", labels=NAMED, group_count_min=3))
    made = planned(there, group(8, 8, labels=NAMED, group_count_min=3), nodes_count_max=3)
    assert [decision.gang for decision in bought(made)] == [GANG, GANG]


@pytest.mark.parametrize("key", [*labels.POD_GROUP_MIN_AVAILABLE, labels.POD_GROUP_TOTAL_COUNT])
def test_pods_may_say_themselves_how_many_they_are(key: str) -> None:
    """As Kueue and the first Coscheduling have it: by annotation or label."""
    made = planned(group(8, 8, labels=NAMED, annotations={key: "3"}))
    assert bought(made) == []
    assert any(isinstance(held.reason, GroupIncomplete) for held in made.deferred)
