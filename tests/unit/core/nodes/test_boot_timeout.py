"""A node that was not what was bought when its time to boot was over, and that pods had found all the same."""

import msgspec
from tests.support.stories import HOUR, T0, given, node, on_sale, pod, policy

from gpu_autoscaler.core.check.plan_check import check
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.model.decisions import BuyNode, DrainNode, Plan, ReleaseInstance
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.reasons.buy import ReplacesNodes
from gpu_autoscaler.model.reasons.drain import BootTimedOut

NOW = T0 + HOUR
# Its GPUs never came, and a service without GPUs found it.
LATE = (node("n1", gpus_allocatable=0), pod("web-0", on="n1", gpus=0))
ROOM = (node("n2"), pod("train-0", on="n2", gpus=8))


def removals(made: Plan) -> list[DrainNode]:
    """What the plan drains."""
    return [decision for decision in made.decisions if isinstance(decision, DrainNode)]


def test_a_late_node_with_work_on_it_is_emptied_and_not_just_ended() -> None:
    """Its pods are evicted first, within an hour at most, to where there is room for them."""
    state = given(*LATE, *ROOM, as_of=NOW)
    made = plan(state, policy(), NOW)
    (drain,) = removals(made)

    assert (drain.node_name, drain.is_voluntary, drain.deadline_at) == ("n1", False, NOW + HOUR)
    assert isinstance(drain.reason, BootTimedOut)
    assert (drain.reason.missing_step, drain.reason.detail) == ("gpus", "0 of 8 nvidia.com/gpu")
    assert check(made, state, policy()) == ()


def test_a_late_node_whose_work_has_no_place_is_replaced_first() -> None:
    """Until then it stays, and nothing of it is forgotten."""
    state = given(*LATE, on_sale(at=NOW), as_of=NOW)
    made = plan(state, policy(), NOW)
    (buy,) = made.decisions

    assert isinstance(buy, BuyNode)
    assert isinstance(buy.reason, ReplacesNodes)
    assert buy.reason.demand == ("pod/uid-web-0",)
    assert check(made, state, policy()) == ()


def test_the_second_opinion_knows_when_a_node_is_late_and_what_runs_on_it() -> None:
    """Nobody is emptied by force before the deadline of the boot, nor ended with pods on it after it."""
    late = given(*LATE, *ROOM, as_of=NOW)
    made = plan(late, policy(), NOW)
    (drain,) = removals(made)
    assert isinstance(drain.reason, BootTimedOut)
    release = ReleaseInstance(
        action_id=drain.action_id,
        provider_id=drain.provider_id,
        order_action_id=ActionId("buy-n1"),
        reason=drain.reason,
    )
    ended = msgspec.structs.replace(made, decisions=(release,))
    assert any("runs on it" in each for each in check(ended, late, policy()))
    usable = given(node("n1"), pod("web-0", on="n1", gpus=0), *ROOM, as_of=NOW)
    assert any("was usable" in each for each in check(made, usable, policy()))
