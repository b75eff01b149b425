"""Nodes that miss GPUs at their boot deadline and run pods already."""

import msgspec
from tests.support.stories import HOUR, T0, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import BuyNode, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.drain import BootTimedOut

NOW = T0 + HOUR
# Its GPUs never appeared, and a service without GPUs runs on it.
LATE = (node("n1", gpus_allocatable=0), pod("web-0", on="n1", gpus=0))
ROOM = (node("n2"), pod("train-0", on="n2", gpus=8))


def test_a_late_node_with_work_is_drained() -> None:
    """Its pods are evicted first, within an hour, if they have capacity elsewhere."""
    state = given(*LATE, *ROOM, as_of=NOW)
    result = plan(state, policy(), NOW)
    (drain,) = result.drains

    assert (drain.node_name, drain.is_voluntary, drain.deadline_at) == ("n1", False, NOW + HOUR)
    assert isinstance(drain.reason, BootTimedOut)
    assert (drain.reason.missing_step, drain.reason.detail) == ("gpus", "0 of 8 nvidia.com/gpu")
    assert check(result, state, policy()) == ()


def test_a_late_node_is_replaced_before_its_drain() -> None:
    """It stays until the replacement is ready."""
    state = given(*LATE, on_sale(at=NOW), as_of=NOW)
    result = plan(state, policy(), NOW)
    (buy,) = result.decisions

    assert isinstance(buy, BuyNode)
    assert isinstance(buy.reason, ReplacesNodes)
    assert buy.reason.demand == ("pod/uid-web-0",)
    assert check(result, state, policy()) == ()


def test_the_plan_check_knows_late_nodes_and_their_pods() -> None:
    """No forced drain before the boot deadline, and no termination with pods after it."""
    late = given(*LATE, *ROOM, as_of=NOW)
    result = plan(late, policy(), NOW)
    (drain,) = result.drains
    assert isinstance(drain.reason, BootTimedOut)
    release = ReleaseInstance(
        action_id=drain.action_id,
        provider_id=drain.provider_id,
        order_action_id=ActionId("buy-n1"),
        reason=drain.reason,
    )
    ended = msgspec.structs.replace(result, decisions=(release,))
    assert any("runs on it" in each for each in check(ended, late, policy()))
    usable = given(node("n1"), pod("web-0", on="n1", gpus=0), *ROOM, as_of=NOW)
    assert any("was usable" in each for each in check(result, usable, policy()))
