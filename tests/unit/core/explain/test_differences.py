"""Two plans of one state differ about subjects, each side with its reason."""

import msgspec
from tests.support.stories import HOUR, MINUTE, T0, given, job, node, on_sale, policy

from gpu_autoscaler.core.explain.differences import differences
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY
from gpu_autoscaler.core.state.state import ClusterState
from gpu_autoscaler.model.decisions import BuyNode, Plan

AS_OF = T0 + HOUR


def _waiting() -> ClusterState:
    """An idle node that is too small, and a job that fits on no node."""
    return given(on_sale(at=T0), node("small", at=T0), job("train", gpus=8, members=2, at=AS_OF - MINUTE), as_of=AS_OF)


def test_equal_plans_do_not_differ() -> None:
    """Not even at different times: how long a node has been idle makes no difference."""
    state = given(on_sale(at=T0), node("n1", at=T0), as_of=AS_OF)

    earlier, later = plan(state, DEFAULT_POLICY, AS_OF), plan(state, DEFAULT_POLICY, AS_OF + MINUTE)

    assert earlier.decisions
    assert differences(earlier, later, state) == ()


def test_a_purchase_that_another_policy_defers_has_both_reasons() -> None:
    """What is bought and for what work, and the limit of the other policy."""
    state = _waiting()
    made, other = (plan(state, one, AS_OF) for one in (DEFAULT_POLICY, policy(nodes_count_max=1)))

    (about,) = [one for one in differences(made, other, state) if one.subject == "job/train"]

    assert (about.made.what, about.made.reason) == ("buy_node", "unmet_demand")
    assert (about.other.what, about.other.reason) == ("deferred", "nodes_limit")
    assert about.kind == "buy_node (unmet_demand) -> deferred (nodes_limit)"
    assert "train" in about.made.sentence
    assert about.is_decision


PATIENT = {"waiting_micro_usd_per_hour": 10**12}  # an idle node is worth keeping at any price


def test_a_node_is_named_and_not_its_uid() -> None:
    """In deferrals as well, whose subject has the uid alone."""
    state = given(node("n1", at=T0), as_of=AS_OF)
    made, other = (
        plan(state, one, AS_OF) for one in (DEFAULT_POLICY, policy(idle_seconds_max=7200.0, removal=PATIENT))
    )

    (about,) = differences(made, other, state)

    assert about.name == "node/n1"
    assert (about.made.what, about.other.reason) == ("drain_node", "not_yet_idle")
    assert "n1" in about.other.sentence


def test_what_defers_the_whole_cluster_is_the_reason_of_each_subject() -> None:
    """A frozen policy defers once, for the cluster."""
    state = given(node("n1", at=T0), as_of=AS_OF)
    made, other = (plan(state, one, AS_OF) for one in (DEFAULT_POLICY, policy(is_frozen=True)))

    found = {one.subject: one for one in differences(made, other, state)}

    drained = [one for one in found.values() if one.made.what == "drain_node"]
    assert drained
    assert all(one.other.reason == "frozen" for one in drained)


def test_another_offer_for_the_same_work_is_a_difference() -> None:
    """Both buy, but different offers."""
    state = _waiting()
    made = plan(state, DEFAULT_POLICY, AS_OF)
    dearer = _with_zone(made, "zone-z")

    (about,) = differences(made, dearer, state)

    assert (about.subject, about.made.what, about.other.what) == ("job/train", "buy_node", "buy_node")
    assert "zone-z" in about.other.sentence


def _with_zone(made: Plan, zone: str) -> Plan:
    decisions = tuple(
        msgspec.structs.replace(one, offer=msgspec.structs.replace(one.offer, zone=zone))
        if isinstance(one, BuyNode)
        else one
        for one in made.decisions
    )
    return msgspec.structs.replace(made, decisions=decisions)
