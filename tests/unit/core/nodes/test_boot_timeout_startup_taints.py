"""A node that still carries its start-up taints is on its way: waited for, not bought again, and given up in time."""

from datetime import datetime

import msgspec
import pytest
from tests.support.stories import HOUR, T0, Story, Told, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.nodes.views import NodePhase, node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.scheduling import Taint

STARTUP = Taint(key="startup-taint.cluster-autoscaler.kubernetes.io/driver", effect="NoSchedule")


def tainted(story: Story, *taints: Taint, version: int = 1) -> Story:
    """The same, with taints that nobody promised."""
    return tuple(
        Told(msgspec.structs.replace(told.fact, taints=taints, version=version), told.at)
        if isinstance(told.fact, NodeObserved)
        else told
        for told in story
    )


def phase(state: ClusterState, at: datetime = T0) -> NodePhase:
    """Of the only node."""
    (view,) = node_views(state, at)
    return view.phase


@pytest.mark.parametrize(
    "key",
    [STARTUP.key, "startup-taint.gpu-autoscaler.io/mine", "node.kubernetes.io/not-ready", "karpenter.sh/unregistered"],
)
def test_a_pod_waits_for_the_taint_to_vanish(key: str) -> None:
    """Nothing is bought in the meantime: the node will take it."""
    state = given(tainted(node("n1"), Taint(key=key, effect="NoExecute")), pod("p", gpus=8), on_sale())
    made = plan(state, policy(), T0)
    assert phase(state) is NodePhase.REGISTERED
    assert [each for each in made.decisions if isinstance(each, BuyNode)] == []
    assert check(made, state, policy()) == ()


def test_a_node_is_ready_once_the_taint_is_gone_and_stays_so_when_it_comes_back() -> None:
    """An agent that restarts taints its node again; what runs there goes on."""
    before, after = tainted(node("n1"), STARTUP), tainted(node("n1"), version=2)
    again = tainted(node("n1"), STARTUP, version=3)
    assert phase(given(before)) is NodePhase.REGISTERED
    assert phase(given(before, after)) is NodePhase.READY
    assert phase(given(before, after, again)) is NodePhase.READY


def test_a_node_whose_taint_never_goes_is_given_up() -> None:
    """By the deadline of its purchase, as one that never gets ready."""
    assert phase(given(tainted(node("n1"), STARTUP)), at=T0 + HOUR) is NodePhase.FAILED


def test_any_other_taint_keeps_pods_away() -> None:
    """It does not vanish by itself: another node is bought."""
    own = Taint(key="team", value="other", effect="NoSchedule")
    state = given(tainted(node("n1"), own), pod("p", gpus=8), on_sale())
    made = plan(state, policy(), T0)
    assert phase(state) is NodePhase.READY
    assert [type(each) for each in made.decisions].count(BuyNode) == 1
