"""What a group gives its nodes, and no order can: pods find it before there is a node, and only in the group's pool."""

import msgspec
from tests.support.stories import T0, Story, bought, given, offer, on_sale, pod, policy
from tests.unit.core.provisioning.test_scale_up import held, purchases

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import NodePool
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import NodeMarks
from gpu_autoscaler.model.reasons.defer import NoOfferFits
from gpu_autoscaler.model.scheduling import NodeDemands, Taint, Toleration

MARKS = NodeMarks(pool="vision", labels=(("team", "vision"),), taints=(Taint("dedicated", "NoSchedule", "vision"),))
MARKED = msgspec.structs.replace(offer(), marks=(MARKS,))
UNDER = policy(pools=(NodePool(name="vision"),))
TOLERATED = (Toleration(key="dedicated", operator="Exists"),)
SELECTED = (("team", "vision"),)


def planned(*stories: Story, under: object = UNDER) -> Plan:
    """The plan with the marked offer for sale; the second opinion has nothing against it."""
    state = given(*stories, on_sale(MARKED))
    made = plan(state, under, T0)  # type: ignore[arg-type]
    assert check(made, state, under) == ()  # type: ignore[arg-type]
    return made


def test_a_label_of_the_group_is_found_before_there_is_a_node() -> None:
    """A pod that selects it gets a node; the order itself carries the pool's labels and taints alone."""
    asking = pod("a", demands=NodeDemands(node_selector=SELECTED, tolerations=TOLERATED))
    (buy,) = purchases(planned(asking))

    assert (buy.pool, buy.taints) == ("vision", ())
    assert "team" not in dict(buy.labels)


def test_a_taint_of_the_group_keeps_away_who_does_not_tolerate_it() -> None:
    """A node is not bought for a pod that could never run there."""
    made = planned(pod("a"))

    assert purchases(made) == []
    assert "labels, taints" in held(made, "pod/uid-a", NoOfferFits).detail


def test_another_pool_s_nodes_have_nothing_of_it() -> None:
    """The same offer is made from another template there."""
    other = policy(pools=(NodePool(name="other"),))
    asking = pod("a", demands=NodeDemands(node_selector=SELECTED, tolerations=TOLERATED))

    assert [buy.pool for buy in purchases(planned(pod("a"), under=other))] == ["other"]
    assert purchases(planned(asking, under=other)) == []


def test_a_node_that_boots_has_what_its_group_gives_it() -> None:
    """Who fits waits for it and buys no second one; who does not tolerate its taint does not count on it."""
    asking = pod("a", demands=NodeDemands(node_selector=SELECTED, tolerations=TOLERATED))
    (buy,) = purchases(planned(asking))

    assert purchases(planned(asking, bought(buy))) == []
    assert "labels, taints" in held(planned(pod("b"), bought(buy)), "pod/uid-b", NoOfferFits).detail
