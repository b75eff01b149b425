"""Labels and taints that a node group adds to its nodes: known before a node exists, and only in the group's pool."""

import msgspec
from tests.support.accepted import accepted_plan
from tests.support.stories import T0, Story, bought, given, offer, on_sale, pod, policy
from tests.unit.core.provisioning.test_scale_up import held

from gpu_autoscaler.core.policy.policy import NodePool, ScalingPolicy
from gpu_autoscaler.model.decisions import Plan
from gpu_autoscaler.model.offers import NodeMarks
from gpu_autoscaler.model.reasons.defer import NoOfferFits
from gpu_autoscaler.model.scheduling import NodeDemands, Taint, Toleration

MARKS = NodeMarks(pool="vision", labels=(("team", "vision"),), taints=(Taint("dedicated", "NoSchedule", "vision"),))
MARKED = msgspec.structs.replace(offer(), marks=(MARKS,))
UNDER = policy(pools=(NodePool(name="vision"),))
TOLERATED = (Toleration(key="dedicated", operator="Exists"),)
SELECTED = (("team", "vision"),)


def planned(*stories: Story, under: ScalingPolicy = UNDER) -> Plan:
    """The plan with the marked offer available, accepted by the plan check."""
    state = given(*stories, on_sale(MARKED))
    return accepted_plan(state, under, T0)


def test_a_label_of_the_group_is_known_before_a_node_exists() -> None:
    """A pod that selects it gets a node; the order has only the pool's labels and taints."""
    asking = pod("a", demands=NodeDemands(node_selector=SELECTED, tolerations=TOLERATED))
    (buy,) = planned(asking).purchases

    assert (buy.pool, buy.taints) == ("vision", ())
    assert "team" not in dict(buy.labels)


def test_a_taint_of_the_group_excludes_pods_that_do_not_tolerate_it() -> None:
    """No node is bought for a pod that could never run there."""
    made = planned(pod("a"))

    assert made.purchases == []
    assert "labels, taints" in held(made, "pod/uid-a", NoOfferFits).detail


def test_nodes_of_another_pool_lack_it() -> None:
    """The same offer uses another template there."""
    other = policy(pools=(NodePool(name="other"),))
    asking = pod("a", demands=NodeDemands(node_selector=SELECTED, tolerations=TOLERATED))

    assert [buy.pool for buy in planned(pod("a"), under=other).purchases] == ["other"]
    assert planned(asking, under=other).purchases == []


def test_a_booting_node_has_the_labels_of_its_group() -> None:
    """A pod that fits waits for it; a pod that does not tolerate its taint does not."""
    asking = pod("a", demands=NodeDemands(node_selector=SELECTED, tolerations=TOLERATED))
    (buy,) = planned(asking).purchases

    assert planned(asking, bought(buy)).purchases == []
    assert "labels, taints" in held(planned(pod("b"), bought(buy)), "pod/uid-b", NoOfferFits).detail
