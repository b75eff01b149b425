"""Sentences for every reason, and whole stories told from recorded facts."""

from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from gpu_autoscaler.core.explain.reasons import AnyReason
from tests.support.samples import sample
from tests.support.stories import (
    MINUTE,
    SECOND,
    T0,
    Told,
    bought,
    drained,
    job,
    node,
    notice,
    offer,
    pod,
    provider_id,
    purchase,
    record,
)

from gpu_autoscaler.core.explain.story import why_job, why_node, why_pod
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobFinished, JobPreempted
from gpu_autoscaler.events.scaling import ScalingNodeTerminated, ScalingPlanMade, ScalingPodEvicted
from gpu_autoscaler.model.decisions import Cut, Deferred, Plan
from gpu_autoscaler.model.format import counted, duration, listed, money, price, subject_name
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.reasons.base import Reason
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.reasons.defer import NotYetIdle, OffersUnavailable
from gpu_autoscaler.model.reasons.defer_limits import Frozen
from gpu_autoscaler.model.reasons.drain import SpotReclaim

Why = Callable[[Sequence[Recorded], str], tuple[str, ...]]


@pytest.mark.parametrize("reason", get_args(AnyReason), ids=lambda reason: reason.tag())
def test_every_reason_has_a_sentence_of_its_own(reason: type[Reason]) -> None:
    """One sentence, begun and ended as one, without a trace of how it is stored."""
    text = sample(reason).sentence()  # type: ignore[arg-type]

    assert text[0].isupper() or text[0].isdigit()
    assert text.endswith(".")
    assert not any(trace in text for trace in ("None", "{", "UTC)", "datetime", ".."))


def test_amounts_read_as_people_write_them() -> None:
    """Cents at least, small prices whole; the two largest units of time; lists that end."""
    assert [money(amount) for amount in (2_460_000, 526_000, 10_000_000, 120, 1_234_500_000)] == [
        "$2.46",
        "$0.526",
        "$10.00",
        "$0.00012",
        "$1,234.50",
    ]
    assert (price(2_460_000), price(None)) == ("$2.46/h", "an unknown price")
    assert [duration(seconds) for seconds in (0, 59.6, 90, 600, 3600, 5400)] == [
        "0 s",
        "1 min",
        "1 min 30 s",
        "10 min",
        "1 h",
        "1 h 30 min",
    ]
    assert [listed(names) for names in ((), ("a",), ("a", "b"), ("a", "b", "c", "d", "e"))] == [
        "",
        "a",
        "a and b",
        "a, b, c and 2 more",
    ]
    assert (counted(1, "node"), counted(0, "node")) == ("1 node", "0 nodes")
    assert (subject_name("job/train"), subject_name("cluster")) == ("job train", "the whole cluster")


def test_a_decision_says_what_and_why() -> None:
    """The sentence carries offer, pool, price and reason."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=12, price_micro_usd_per_hour=2_460_000)
    text = purchase("buy-1", offer(usd_per_hour=2.46), reason=reason).sentence()

    assert text == (
        "Buy p4d.24xlarge in zone-a as spot for pool default at $2.46/h. Job train cannot run on anything that runs, "
        "boots or is ordered; of 12 offers considered this was the choice, at $2.46/h."
    )


def test_what_was_held_back_names_step_and_subject() -> None:
    """A plan that does nothing still says what it did not do."""
    held = Deferred(step="cover_demand", subject="job/train", reason=Frozen())

    assert held.sentence() == (
        "Held back for job train (step cover_demand): The policy is frozen: nothing is to be changed."
    )


def told_story() -> tuple[Recorded, ...]:
    """A job waits, a launch is refused, another works; the job runs, a notice comes, the node goes."""
    demand = UnmetDemand(demand=("job/train",), offers_considered=2, price_micro_usd_per_hour=10_000_000)
    held = Deferred(
        step="cover_demand",
        subject="job/train",
        reason=OffersUnavailable(offers=("p4d.24xlarge/zone-a/spot",), retry_at=T0 + 3 * MINUTE),
    )
    other = Deferred(step="cover_demand", subject="job/other", reason=Frozen())
    plan = Plan(as_of=T0 + 5 * SECOND, parent_sequence=1, deferred=(held, other))
    waits = ScalingPlanMade(plan_id=PlanId("plan-2"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")
    first = purchase("buy-n0", reason=demand, at=T0 + SECOND)
    second = purchase("buy-n1", offer(zone="zone-b"), reason=demand, at=T0 + 10 * SECOND)
    late = T0 + 30 * MINUTE
    reclaim = SpotReclaim(notice_id="n", kind="terminate", reclaim_at=late + 2 * MINUTE)
    ended = ScalingNodeTerminated(
        action_id=ActionId("drain-n1"),
        plan_id=PlanId("plan-drain-n1"),
        provider_id=provider_id("buy-n1"),
        order_action_id=ActionId("buy-n1"),
        node_name="n1",
        terminated_at=late + MINUTE,
    )
    evicted = ScalingPodEvicted(
        action_id=ActionId("drain-n1"),
        plan_id=PlanId("plan-drain-n1"),
        node_name="n1",
        pod_uid=PodUid("uid-train-0"),
        pod="default/train-0",
        is_forced=False,
        evicted_at=late + 2 * SECOND,
    )
    preempted = JobPreempted(
        job_id=JobId("train"), attempt=1, cause="node n1 was drained: spot_reclaim", preempted_at=late + 3 * SECOND
    )
    finished = JobFinished(job_id=JobId("train"), outcome="completed", finished_at=late + 60 * MINUTE)
    ready = T0 + 3 * MINUTE
    return record(
        [
            *job("other"),
            *job("train", at=T0),
            *bought(first, at=T0 + SECOND, is_refused=True),
            Told(waits, T0 + 5 * SECOND),
            Told(waits, T0 + 6 * SECOND),
            *bought(second, at=T0 + 10 * SECOND),
            *node("n1", offer(zone="zone-b"), is_ready=False, at=ready)[-1:],
            *node("n1", offer(zone="zone-b"), at=ready + 10 * SECOND, version=2)[-1:],
            *node("n9", at=ready),
            *job("train", at=ready + 11 * SECOND, placed_on=("n1",), is_running=True)[-2:],
            *pod("train-0", on="n1", gpus=8, job_id="train", at=ready + 12 * SECOND),
            *notice("n1", reclaim_at=late + 2 * MINUTE, at=late),
            *drained("n1", reason=reclaim, is_voluntary=False, at=late + SECOND),
            Told(evicted, late + 2 * SECOND),
            Told(preempted, late + 3 * SECOND),
            Told(ended, late + MINUTE),
            Told(finished, late + 60 * MINUTE),
        ]
    )


def in_order(story: tuple[str, ...], *parts: str) -> bool:
    """True when sentences with these parts come one after another."""
    lines = iter(story)
    return all(any(part in line for line in lines) for part in parts)


def test_a_node_is_explained_back_to_the_job_and_on_to_its_end() -> None:
    """The request, the plan with its offer and price, the steps, the notice, the drain, the end."""
    story = why_node(told_story(), "n1")

    assert in_order(
        story,
        "asked for job train",
        "Job train was accepted",
        "Buy p4d.24xlarge in zone-b as spot",
        "The executor ordered p4d.24xlarge/zone-b/spot",
        "The cloud made",
        "is registered, not ready",
        "is ready with 8 GPUs",
        "The cloud gave notice that it takes n1 back",
        "Drain node n1 without a choice",
        "was cordoned for its drain",
        "Pod default/train-0 on node n1 was asked to go",
        "is gone, at",
    )
    assert story[0].startswith("2026-11-21 12:00:00 UTC: ")
    assert story[0].endswith("[JOB 3]")
    assert not any("n9" in line or "job other" in line for line in story)


@pytest.mark.parametrize("name", ["uid-n1", provider_id("buy-n1"), "buy-n1"])
def test_a_node_is_found_by_each_of_its_names(name: str) -> None:
    """Name, uid, provider id and action tell the same story."""
    assert why_node(told_story(), name) == why_node(told_story(), "n1") != ()


def test_a_job_is_explained_with_what_was_considered_and_held_back() -> None:
    """The refused launch, what the plan waited for (told once), the purchase, the place, the loss, the end."""
    story = why_job(told_story(), "train")

    assert in_order(
        story,
        "asked for job train",
        "Buy p4d.24xlarge in zone-a as spot",
        "The cloud refused p4d.24xlarge/zone-a/spot: InsufficientInstanceCapacity",
        "The cloud had no capacity for p4d.24xlarge/zone-a/spot",
        "Buy p4d.24xlarge in zone-b as spot",
        "got its place on n1",
        "All members of job train run.",
        "lost its place (attempt 1): node n1 was drained",
        "Job train completed.",
    )
    assert sum("Held back" in line for line in story) == 1
    assert not any("other" in line for line in story)


def test_a_pod_is_explained_by_its_job_and_the_drain_that_moved_it() -> None:
    """From the request to the node it ran on, and why it had to leave."""
    story = why_pod(told_story(), "default/train-0")

    assert in_order(
        story,
        "asked for job train",
        "Buy p4d.24xlarge in zone-b",
        "Pod default/train-0 runs on node n1",
        "The cloud gave notice",
        "The cloud takes the instance back",
        "Pod default/train-0 on node n1 was asked to go",
    )
    assert why_pod(told_story(), "train-0") == why_pod(told_story(), "uid-train-0") == story


def test_a_replacement_is_explained_by_the_notice_of_the_node_before_it() -> None:
    """A node that was bought in time leads back to the notice that another one got."""
    reason = ReplacesAtRiskNode(node_uid=NodeUid("uid-n1"), node_name="n1", reclaim_at=T0 + 2 * MINUTE)
    history = record(
        [
            *node("n1"),
            *notice("n1", reclaim_at=T0 + 2 * MINUTE, at=T0 + SECOND),
            *bought(purchase("buy-n2", reason=reason), at=T0 + 2 * SECOND),
        ]
    )
    story = why_node(history, "buy-n2")

    assert in_order(story, "gave notice that it takes n1 back", "Node n1 will be gone at", "The cloud made")


def test_nodes_of_one_kind_for_a_gang_are_told_in_one_sentence() -> None:
    """Four members, four nodes, one reason."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=2, price_micro_usd_per_hour=10_000_000)
    decisions = tuple(purchase(f"buy-n{number}", reason=reason) for number in range(4))
    plan = Plan(as_of=T0, parent_sequence=1, decisions=decisions)
    made = ScalingPlanMade(plan_id=PlanId("plan-9"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")

    story = why_job(record([*job("train"), Told(made, T0 + SECOND)]), "train")

    assert [line for line in story if "Buy" in line] == [line for line in story if "plan-9: 4 times: Buy p4d" in line]


def test_what_keeps_a_node_is_its_own_story_and_told_by_its_name() -> None:
    """Uids are for machines; and a job does not care why its node was not removed an hour later."""
    kept = Deferred(step="release_idle", subject="node/uid-n1", reason=NotYetIdle(idle_seconds=1, idle_seconds_max=150))
    plan = Plan(as_of=T0 + MINUTE, parent_sequence=1, deferred=(kept,))
    made = ScalingPlanMade(plan_id=PlanId("plan-9"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")
    demand = UnmetDemand(demand=("job/train",), offers_considered=2, price_micro_usd_per_hour=10_000_000)
    bought_node = bought(purchase("buy-n1", reason=demand), at=T0)
    history = record([*job("train"), *bought_node, *node("n1"), Told(made, T0 + MINUTE)])

    told = "Held back for node n1 (step release_idle): It has been empty for 1 s of 2 min 30 s."
    assert any(told in line for line in why_node(history, "n1"))
    assert not any("Held back" in line for line in why_job(history, "train"))


@pytest.mark.parametrize("why", [why_node, why_pod, why_job])
def test_what_nobody_heard_of_has_no_story(why: Why) -> None:
    """Nothing found is an empty story, not a guess."""
    assert why(told_story(), "nobody") == ()
    assert why((), "nobody") == ()


def test_repeated_observations_are_told_once() -> None:
    """A node that is seen a hundred times in the same shape is one sentence."""
    many = [each for version in range(1, 100) for each in node("n1", version=version, at=T0)[-1:]]
    story = why_node(record(many), "n1")

    assert len(story) == 1
