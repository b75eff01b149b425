"""The first line of `why`: what work waits for and the next step, and what keeps a node."""

from datetime import datetime

import msgspec
from tests.support.stories import (
    MINUTE,
    T0,
    Story,
    bought,
    given,
    job,
    node,
    notice,
    offer,
    on_sale,
    pod,
    policy,
    purchase,
)

from gpu_autoscaler.core.explain.status import StatusView, job_line, node_line, pod_line
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_waits import CapacityExpected


def view_of(*stories: Story, under: ScalingPolicy | None = None, at: datetime = T0) -> StatusView:
    """The status view after the stories, with the plan that follows from them."""
    state, rules = given(*stories, as_of=at), under or policy()
    return StatusView.of(state, rules, at, plan(state, rules, at))


def test_a_job_at_a_limit_names_the_limit() -> None:
    """And how many members have capacity: a gang starts whole."""
    line = job_line("train", view_of(job("train", gpus=8, members=2), on_sale(), under=policy(nodes_count_max=1)))
    assert line.startswith("Waiting: Another node would exceed the limit of 1 node (now: ")
    assert "Raise nodes_count_max (1)" in line
    assert "Only 0 of 2 members of job train have capacity" in line


def test_a_job_that_no_offer_fits_shows_what_is_missing() -> None:
    """Found by its name as well as by its id."""
    line = job_line("train", view_of(job("train", gpus=16), on_sale()))
    assert line == (
        "Waiting: No offer satisfies the request: no offer has 16 GPUs on one node (most: 8). Request less, or allow "
        "an instance type, zone or capacity type that satisfies it in a pool of the policy. Only 0 of 1 member of job "
        "train have capacity; a gang starts whole or not at all."
    )


def test_a_job_with_a_launching_node_shows_when_it_starts() -> None:
    """The node that was bought for it, and when it is expected."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=1)
    order = msgspec.structs.replace(purchase("buy-1"), reason=reason)
    line = job_line("train", view_of(job("train"), bought(order), on_sale()))
    assert line.startswith(
        "Waiting: node p4d.24xlarge in zone-a (ordered), which was bought for it, is expected about "
    )


def test_a_job_with_a_budget_and_no_price_shows_the_remedy() -> None:
    """It would wait forever where the price of an existing node is unknown: which one, and both remedies."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    story = (node("n1", unknown), on_sale(), job("train", budget_limit_micro_usd=1_000_000))
    line = job_line("train", view_of(*story))

    assert line.startswith(f"Waiting: The price of {unknown.key} is unknown")
    assert f"Add the price of {unknown.key} to the provider's price file" in line
    assert "without budget_limit_usd" in line
    assert "price" not in job_line("train", view_of(*story[:-1], job("train")))


def test_a_running_job_shows_its_node() -> None:
    """Empty for a job that the state does not have."""
    status = view_of(node("n1"), job("train", placed_on=("n1",), is_running=True))
    assert job_line("train", status).startswith("Runs on n1 since")
    assert job_line("nobody", status) == ""


def test_a_pod_shows_what_it_waits_for() -> None:
    """The reason of the plan; without one, the message of the Kubernetes scheduler."""
    frozen = view_of(pod("a"), on_sale(), under=policy(is_frozen=True))
    assert "Set is_frozen to false in the policy." in pod_line("a", frozen)

    state = given(pod("a", unschedulable_message="0/3 nodes are available."))
    unplanned = pod_line("default/a", StatusView.of(state, policy(), T0, None))
    assert unplanned == (
        "Waiting: the Kubernetes scheduler found no node for the pod: 0/3 nodes are available; no plan covers the pod "
        "yet."
    )
    assert pod_line("uid-b", view_of(node("n1"), pod("b", on="n1"))) == "Runs on node n1."


def test_a_freeze_is_named_beside_a_limit_that_defers_already() -> None:
    """Raising the limit alone would not help."""
    limited = view_of(pod("a"), on_sale(), under=policy(is_frozen=True, nodes_count_max=0))
    assert "Raise nodes_count_max (0), or wait until a node is removed. In addition: The policy is frozen" in pod_line(
        "a", limited
    )
    assert pod_line("a", limited).endswith("Set is_frozen to false in the policy.")

    queued = view_of(job("train"), on_sale(), under=policy(is_frozen=True, nodes_count_max=0))
    assert "In addition: The policy is frozen" in job_line("train", queued)
    free = view_of(pod("a"), on_sale(), under=policy(nodes_count_max=0))
    assert "In addition" not in pod_line("a", free)


def test_a_gated_pod_waits_for_its_job() -> None:
    """The gate is ours: what defers the job defers the pod."""
    line = pod_line("a", view_of(job("train", gpus=16), pod("a", job_id="train", is_gated=True), on_sale()))
    assert line.startswith("Held by its scheduling gate until job train may start. ")


def test_a_node_shows_why_it_exists_and_what_keeps_it() -> None:
    """Pods by name; why its removal is deferred; empty for a node that does not exist."""
    busy = view_of(node("n1"), pod("a", on="n1", gpus=8))
    line = node_line("n1", busy)
    assert line.startswith("Bought: ")
    assert "Used by 1 pod (default/a)." in line
    assert "No pod uses the node. Its removal is deferred: The node has been empty for 1 min" in node_line(
        "n1", view_of(node("n1"), at=T0 + MINUTE)
    )
    assert "it is never removed" in node_line("n1", view_of(node("n1", is_ours=False)))
    assert "The cloud reclaims the node at" in node_line(
        "n1", view_of(node("n1"), notice("n1", reclaim_at=T0 + MINUTE))
    )
    assert node_line("n2", busy) == ""


def test_pods_and_ordered_nodes_are_named_and_not_their_uids() -> None:
    """In the reason of a purchase, and in what work waits for."""
    pod_a = pod("a", gpus=8)
    order = purchase("0123abcd", reason=wants("pod/uid-a"))
    status = view_of(pod_a, bought(order), on_sale())
    for line in (pod_line("a", status), node_line("0123abcd", status)):
        assert "uid-a" not in line
    assert "has capacity for pod default/a;" in node_line("0123abcd", status)
    assert pod_line("a", status).startswith(
        "Waiting: node p4d.24xlarge in zone-a (ordered), which was bought for it, is"
    )
    assert "0123abcd" not in status.explain(CapacityExpected(node="0123abcd", expected_at=None))


def wants(key: str) -> UnmetDemand:
    """The reason of a purchase for this."""
    return UnmetDemand(demand=(key,), offers_considered=1, price_micro_usd_per_hour=1)
