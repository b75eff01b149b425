"""Nodes with startup taints are booting: not bought again, and released at their deadline."""

from datetime import datetime

import msgspec
import pytest
from tests.support.stories import HOUR, T0, Story, TimedFact, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import node_views
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.decisions import BuyNode
from gpu_autoscaler.model.scheduling import Taint

STARTUP = Taint(key="startup-taint.cluster-autoscaler.kubernetes.io/driver", effect="NoSchedule")


def tainted(story: Story, *taints: Taint, version: int = 1) -> Story:
    """The same node with further taints."""
    return tuple(
        TimedFact(msgspec.structs.replace(event.fact, taints=taints, version=version), event.at)
        if isinstance(event.fact, NodeObserved)
        else event
        for event in story
    )


def phase(state: ClusterState, at: datetime = T0) -> NodePhase:
    """The phase of the only node."""
    (view,) = node_views(state, at)
    return view.phase


@pytest.mark.parametrize(
    "key",
    [STARTUP.key, "startup-taint.gpu-autoscaler.io/mine", "node.kubernetes.io/not-ready", "karpenter.sh/unregistered"],
)
def test_a_pod_waits_for_the_startup_taint(key: str) -> None:
    """Nothing is bought: the node will accept it."""
    state = given(tainted(node("n1"), Taint(key=key, effect="NoExecute")), pod("p", gpus=8), on_sale())
    result = plan(state, policy(), T0)
    assert phase(state) is NodePhase.REGISTERED
    assert result.purchases == []
    assert check(result, state, policy()) == ()


def test_a_returning_startup_taint_does_not_undo_ready() -> None:
    """A restarted agent taints its node again; pods keep running."""
    before, after = tainted(node("n1"), STARTUP), tainted(node("n1"), version=2)
    again = tainted(node("n1"), STARTUP, version=3)
    assert phase(given(before)) is NodePhase.REGISTERED
    assert phase(given(before, after)) is NodePhase.READY
    assert phase(given(before, after, again)) is NodePhase.READY


def test_a_node_with_a_permanent_startup_taint_fails() -> None:
    """At its boot deadline."""
    assert phase(given(tainted(node("n1"), STARTUP)), at=T0 + HOUR) is NodePhase.FAILED


def test_another_taint_blocks_pods() -> None:
    """It does not disappear: another node is bought."""
    own = Taint(key="team", value="other", effect="NoSchedule")
    state = given(tainted(node("n1"), own), pod("p", gpus=8), on_sale())
    result = plan(state, policy(), T0)
    assert phase(state) is NodePhase.READY
    assert [type(each) for each in result.decisions].count(BuyNode) == 1
