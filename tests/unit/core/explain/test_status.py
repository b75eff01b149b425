"""The first line of `why`: the one thing that would let work start, and what keeps a node."""

from datetime import datetime
from typing import cast, get_args

import msgspec
import pytest
from tests.support.samples import sample
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
from gpu_autoscaler.model.ids import JobId
from gpu_autoscaler.model.reasons.base import Reason
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer import DeferReason, OffersUnavailable
from gpu_autoscaler.model.reasons.defer_limits import Frozen, KeptByOverride, OverrideReached, PoolPaused
from gpu_autoscaler.model.reasons.defer_waits import GangIncomplete


def seen(*stories: Story, under: ScalingPolicy | None = None, at: datetime = T0) -> StatusView:
    """The sight after the stories, with the plan that is made of them."""
    state, rules = given(*stories, as_of=at), under or policy()
    return StatusView.of(state, rules, at, plan(state, rules, at))


def test_a_job_at_a_limit_names_the_limit() -> None:
    """And how many members have a place: a gang starts whole."""
    line = job_line("train", seen(job("train", gpus=8, members=2), on_sale(), under=policy(nodes_count_max=1)))
    assert line.startswith("Waiting because orders on their way counted, there would be more than 1 node (now: ")
    assert "nodes_count_max (1) is raised" in line
    assert "Only 0 of 2 members of job train have a place" in line


def test_a_job_that_nothing_can_hold_says_what_is_missing() -> None:
    """Found by its name as well as by its id."""
    line = job_line("train", seen(job("train", gpus=16), on_sale()))
    assert line == (
        "Waiting because nothing on sale can hold it: no offer has 16 GPUs on one node (most: 8); it starts when "
        "something that can hold it is for sale, or it asks for less. Only 0 of 1 member of job train have a place; "
        "it starts whole or not at all."
    )


def test_a_job_with_a_node_on_its_way_says_when() -> None:
    """The node that was bought for it, with the instant at which it is expected."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=1, price_micro_usd_per_hour=1)
    order = msgspec.structs.replace(purchase("buy-1"), reason=reason)
    line = job_line("train", seen(job("train"), bought(order), on_sale()))
    assert line.startswith("Waiting because the node that was bought for it is on the way; it starts when buy-1 is")


def test_a_job_that_its_budget_keeps_from_its_room_says_what_to_do() -> None:
    """It would wait for ever where nobody tells the price of a node that is there: which one, and both ways out."""
    unknown = msgspec.structs.replace(offer(), price_micro_usd_per_hour=None)
    story = (node("n1", unknown), on_sale(), job("train", budget_limit_micro_usd=1_000_000))
    line = job_line("train", seen(*story))

    assert line.startswith(f"Waiting because the price of {unknown.key} is unknown")
    assert "add the price to the provider's list of prices" in line
    assert "without budget_limit_usd" in line
    assert "price" not in job_line("train", seen(*story[:-1], job("train")))


def test_what_became_of_a_job_is_the_line_of_one_that_does_not_wait() -> None:
    """Nothing is said of a job that the state does not have."""
    sight = seen(node("n1"), job("train", placed_on=("n1",), is_running=True))
    assert job_line("train", sight).startswith("Runs on n1 since")
    assert job_line("nobody", sight) == ""


def test_a_pod_says_what_it_waits_for() -> None:
    """A plan's reason first; without one, Kubernetes' own word."""
    frozen = seen(pod("a"), on_sale(), under=policy(is_frozen=True))
    assert "it starts when the policy's is_frozen is false again" in pod_line("a", frozen)

    state = given(pod("a", unschedulable_message="0/3 nodes are available."))
    unplanned = pod_line("default/a", StatusView.of(state, policy(), T0, None))
    assert unplanned == (
        "Waiting because Kubernetes found no node for it: 0/3 nodes are available; no plan has spoken of it yet."
    )
    assert pod_line("uid-b", seen(node("n1"), pod("b", on="n1"))) == "Runs on node n1."


def test_a_freeze_is_told_where_a_limit_holds_back_already() -> None:
    """Who only raised the limit would wait on."""
    limited = seen(pod("a"), on_sale(), under=policy(is_frozen=True, nodes_count_max=0))
    assert "nodes_count_max (0) is raised. Besides, the policy is frozen" in pod_line("a", limited)
    assert pod_line("a", limited).endswith("; nothing is bought until the policy's is_frozen is false again.")

    queued = seen(job("train"), on_sale(), under=policy(is_frozen=True, nodes_count_max=0))
    assert "Besides, the policy is frozen" in job_line("train", queued)
    free = seen(pod("a"), on_sale(), under=policy(nodes_count_max=0))
    assert "Besides" not in pod_line("a", free)


def test_a_gated_pod_waits_for_its_job() -> None:
    """The gate is ours; what holds the job holds the pod."""
    line = pod_line("a", seen(job("train", gpus=16), pod("a", job_id="train", is_gated=True), on_sale()))
    assert line.startswith("Held at its gate until job train may start. ")


def test_a_node_says_why_it_exists_and_what_keeps_it() -> None:
    """Pods by name; what the plan holds back for it; nothing for one that is gone."""
    busy = seen(node("n1"), pod("a", on="n1", gpus=8))
    line = node_line("n1", busy)
    assert line.startswith("Bought because: ")
    assert "It is kept by 1 pod (default/a)." in line
    assert "Nothing runs on it. It has been empty for 1 min" in node_line("n1", seen(node("n1"), at=T0 + MINUTE))
    assert "nobody here removes it" in node_line("n1", seen(node("n1", is_ours=False)))
    assert "The cloud takes it back at" in node_line("n1", seen(node("n1"), notice("n1", reclaim_at=T0 + MINUTE)))
    assert node_line("n2", busy) == ""


@pytest.mark.parametrize("kind", get_args(DeferReason), ids=lambda kind: kind.tag())
def test_every_reason_to_wait_has_an_end_of_its_own(kind: type[Reason]) -> None:
    """Nobody is told to wait for something to change: it is said what, and no two reasons say the same."""
    said = {one: cast("DeferReason", sample(one)).remedy() for one in get_args(DeferReason)}
    text = said[kind]
    assert text
    assert text[0].islower() or text.startswith(("gpu-7", "GPU"))
    assert not text.endswith(".")
    assert not any(trace in text for trace in ("None", "{", "datetime", "that has changed"))
    overruling = {Frozen, PoolPaused, OverrideReached, KeptByOverride}  # all end with the word that began them
    assert sum(other == text for other in said.values()) == (len(overruling) if kind in overruling else 1)


@pytest.mark.parametrize(
    ("reason", "when"),
    [
        (Frozen(), "the policy's is_frozen is false again"),
        (OffersUnavailable(offers=("a",), retry_at=T0), "which it is asked for after 2026-11-21 12:00:00 UTC"),
        (
            GangIncomplete(job_id=JobId("a"), members_placed=3, members_count=4),
            "the other 1 member has a place as well",
        ),
    ],
)
def test_each_reason_says_what_has_to_change(reason: Frozen | OffersUnavailable | GangIncomplete, when: str) -> None:
    """A wait without an end is no answer."""
    assert when in reason.remedy()
