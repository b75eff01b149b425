"""Sentences of decisions, and whole stories built from recorded facts."""

from collections.abc import Callable, Sequence

import pytest
from tests.support.stories import (
    MINUTE,
    SECOND,
    T0,
    TimedFact,
    bought,
    drained,
    given,
    job,
    node,
    notice,
    offer,
    on_sale,
    pod,
    policy,
    provider_id,
    purchase,
    quota,
    record,
)

from gpu_autoscaler.core.explain.story import why_job, why_node, why_pod
from gpu_autoscaler.core.plan import plan
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.job import JobFinished, JobPlaced, JobPreempted
from gpu_autoscaler.events.scaling import ScalingNodeTerminated, ScalingPlanMade, ScalingPodEvicted
from gpu_autoscaler.model.decisions import Cut, Deferred, Plan
from gpu_autoscaler.model.ids import ActionId, JobId, NodeUid, PlanId, PodUid
from gpu_autoscaler.model.reasons.buy import ReplacesAtRiskNode, UnmetDemand
from gpu_autoscaler.model.reasons.defer import NotYetIdle, OffersUnavailable
from gpu_autoscaler.model.reasons.defer_limits import Frozen
from gpu_autoscaler.model.reasons.drain import SpotReclaim
from gpu_autoscaler.model.reasons.preempt import QuotaReclaimed

Why = Callable[[Sequence[Recorded], str], tuple[str, ...]]


def test_a_decision_shows_the_action_and_the_reason() -> None:
    """The sentence carries offer, pool, price and reason."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=12, price_micro_usd_per_hour=2_460_000)
    text = purchase("buy-1", offer(usd_per_hour=2.46), reason=reason).sentence()

    assert text == (
        "Buy p4d.24xlarge in zone-a as spot for pool default at $2.46/h. No running, booting or ordered node has "
        "capacity for job train; selected from 12 offers at $2.46/h."
    )


def test_a_deferral_names_step_and_subject() -> None:
    """A plan without decisions still says what it defers."""
    held = Deferred(step="cover_demand", subject="job/train", reason=Frozen())

    assert held.sentence() == (
        "Deferred for job train (step cover_demand): The policy is frozen: nothing is bought or removed voluntarily."
    )


def full_story() -> tuple[Recorded, ...]:
    """A job waits, one launch is refused, the next succeeds; the job runs, a notice arrives, the node is terminated."""
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
            TimedFact(waits, T0 + 5 * SECOND),
            TimedFact(waits, T0 + 6 * SECOND),
            *bought(second, at=T0 + 10 * SECOND),
            *node("n1", offer(zone="zone-b"), is_ready=False, at=ready)[-1:],
            *node("n1", offer(zone="zone-b"), at=ready + 10 * SECOND, version=2)[-1:],
            *node("n9", at=ready),
            *job("train", at=ready + 11 * SECOND, placed_on=("n1",), is_running=True)[-2:],
            *pod("train-0", on="n1", gpus=8, job_id="train", at=ready + 12 * SECOND),
            *notice("n1", reclaim_at=late + 2 * MINUTE, at=late),
            *drained("n1", reason=reclaim, is_voluntary=False, at=late + SECOND),
            TimedFact(evicted, late + 2 * SECOND),
            TimedFact(preempted, late + 3 * SECOND),
            TimedFact(ended, late + MINUTE),
            TimedFact(finished, late + 60 * MINUTE),
        ]
    )


def in_order(story: tuple[str, ...], *parts: str) -> bool:
    """True when sentences with these parts come one after another."""
    lines = iter(story)
    return all(any(part in line for line in lines) for part in parts)


def test_a_node_is_explained_back_to_the_job_and_on_to_its_end() -> None:
    """The request, the plan with its offer and price, the steps, the notice, the drain, the end."""
    story = why_node(full_story(), "n1")

    assert in_order(
        story,
        "requested job train",
        "Job train was accepted",
        "Buy p4d.24xlarge in zone-b as spot",
        "The executor ordered p4d.24xlarge/zone-b/spot",
        "The cloud launched",
        "is registered, not ready",
        "is ready with 8 GPUs",
        "interruption notice: it reclaims n1",
        "Forced drain of node n1",
        "was cordoned; its drain ends by",
        "Pod default/train-0 on node n1 was evicted",
        "confirmed the termination of",
    )
    assert story[0].startswith("2026-11-21 12:00:00 UTC: ")
    assert story[0].endswith("[JOB 3]")
    assert not any("n9" in line or "job other" in line for line in story)


@pytest.mark.parametrize("name", ["uid-n1", provider_id("buy-n1"), "buy-n1"])
def test_a_node_is_found_by_each_of_its_names(name: str) -> None:
    """Name, uid, provider id and action tell the same story."""
    assert why_node(full_story(), name) == why_node(full_story(), "n1") != ()


def test_a_job_is_explained_with_decisions_and_deferrals() -> None:
    """The refused launch, the deferral (once), the purchase, the placement, the preemption, the end."""
    story = why_job(full_story(), "train")

    assert in_order(
        story,
        "requested job train",
        "Buy p4d.24xlarge in zone-a as spot",
        "The cloud refused to launch p4d.24xlarge/zone-a/spot: InsufficientInstanceCapacity",
        "The cloud has no capacity for p4d.24xlarge/zone-a/spot",
        "Buy p4d.24xlarge in zone-b as spot",
        "was placed on n1",
        "All members of job train run.",
        "was preempted (attempt 1): node n1 was drained",
        "Job train completed.",
    )
    assert sum("Deferred for" in line for line in story) == 1
    assert not any("other" in line for line in story)


def test_a_placement_by_measured_use_names_the_figures() -> None:
    """An unknown one as unknown."""
    placed = JobPlaced(
        job_id=JobId("train"), attempt=1, node_uids=(NodeUid("uid-n1"), NodeUid("uid-n2")), node_names=("n1", "n2"),
        placed_at=T0, gpu_use_ratios=(0.025, None),
    )  # fmt: skip
    (line,) = [line for line in why_job(record([*job("train"), TimedFact(placed, T0)]), "train") if "placed" in line]
    assert "on n1 and n2 (attempt 1) by the measured use of GPUs: n1 2 % and n2 unknown." in line


@pytest.mark.parametrize("is_own_choice", [True, False])
def test_a_loss_by_our_own_choice_says_that_it_used_up_no_retry(*, is_own_choice: bool) -> None:
    """Whoever counts the attempts of a job needs to know which ones count."""
    lost = JobPreempted(
        job_id=JobId("train"), attempt=2, cause="n1 was drained", preempted_at=T0, is_own_choice=is_own_choice
    )
    (line,) = [line for line in why_job(record([*job("train"), TimedFact(lost, T0)]), "train") if "preempted" in line]
    assert (": n1 was drained. This used up no retry." in line) == is_own_choice


def test_a_preemption_is_part_of_the_stories_of_both_jobs() -> None:
    """The victim learns for whom it ended, the beneficiary who ended for it; other jobs learn nothing."""
    reason = QuotaReclaimed(
        for_job=JobId("mine"), for_project="b", project="a", cohort="default", borrowed_gpu_count=8, nominal_gpu_count=8
    )
    fact = JobPreempted(job_id=JobId("low"), attempt=1, cause="preempted", preempted_at=T0, preemption=reason)
    jobs = (job("low", project_id="a", placed_on=("n1",)), job("mine", project_id="b"), job("third"))
    history = tuple(record([*(each for story in jobs for each in story), TimedFact(fact, T0 + MINUTE)]))

    for name in ("low", "mine"):
        assert in_order(
            why_job(history, name), "Job low was preempted (attempt 1). Project b reclaims its nominal quota"
        )
    assert not any("preempted" in text for text in why_job(history, "third"))


def test_a_pod_is_explained_by_its_job_and_the_drain_that_moved_it() -> None:
    """From the request to the node it ran on, and why it was evicted."""
    story = why_pod(full_story(), "default/train-0")

    assert in_order(
        story,
        "requested job train",
        "Buy p4d.24xlarge in zone-b",
        "Pod default/train-0 runs on node n1",
        "The cloud sent an interruption notice",
        "The cloud reclaims the instance",
        "Pod default/train-0 on node n1 was evicted",
    )
    assert why_pod(full_story(), "train-0") == why_pod(full_story(), "uid-train-0") == story


def test_a_replacement_is_explained_by_the_notice_of_the_node_before_it() -> None:
    """A replacement leads back to the interruption notice of another node."""
    reason = ReplacesAtRiskNode(node_uid=NodeUid("uid-n1"), node_name="n1", reclaim_at=T0 + 2 * MINUTE)
    history = record(
        [
            *node("n1"),
            *notice("n1", reclaim_at=T0 + 2 * MINUTE, at=T0 + SECOND),
            *bought(purchase("buy-n2", reason=reason), at=T0 + 2 * SECOND),
        ]
    )
    story = why_node(history, "buy-n2")

    assert in_order(story, "interruption notice: it reclaims n1", "Node n1 will be removed at", "The cloud launched")


def test_equal_nodes_of_a_gang_share_one_sentence() -> None:
    """Four members, four nodes, one reason."""
    reason = UnmetDemand(demand=("job/train",), offers_considered=2, price_micro_usd_per_hour=10_000_000)
    decisions = tuple(purchase(f"buy-n{number}", reason=reason) for number in range(4))
    plan = Plan(as_of=T0, parent_sequence=1, decisions=decisions)
    made = ScalingPlanMade(plan_id=PlanId("plan-9"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")

    story = why_job(record([*job("train"), TimedFact(made, T0 + SECOND)]), "train")

    assert [line for line in story if "Buy" in line] == [line for line in story if "plan-9: 4 times: Buy p4d" in line]


def test_deferrals_of_a_node_are_part_of_its_own_story_and_use_its_name() -> None:
    """Not of the story of a job that ran on it an hour before."""
    kept = Deferred(step="release_idle", subject="node/uid-n1", reason=NotYetIdle(idle_seconds=1, idle_seconds_max=150))
    plan = Plan(as_of=T0 + MINUTE, parent_sequence=1, deferred=(kept,))
    made = ScalingPlanMade(plan_id=PlanId("plan-9"), plan=plan, cut=Cut(), policy_digest="p", core_digest="c")
    demand = UnmetDemand(demand=("job/train",), offers_considered=2, price_micro_usd_per_hour=10_000_000)
    bought_node = bought(purchase("buy-n1", reason=demand), at=T0)
    history = record([*job("train"), *bought_node, *node("n1"), TimedFact(made, T0 + MINUTE)])

    told = "Deferred for node n1 (step release_idle): The node has been empty for 1 s; an idle node is removed after"
    assert any(told in line for line in why_node(history, "n1"))
    assert not any("Deferred for" in line for line in why_job(history, "train"))


@pytest.mark.parametrize("why", [why_node, why_pod, why_job])
def test_an_unknown_object_has_no_story(why: Why) -> None:
    """Nothing found is an empty story."""
    assert why(full_story(), "nobody") == ()
    assert why((), "nobody") == ()


def test_repeated_observations_are_one_sentence() -> None:
    """A node observed a hundred times without a change."""
    many = [each for version in range(1, 100) for each in node("n1", version=version, at=T0)[-1:]]
    story = why_node(record(many), "n1")

    assert len(story) == 1


def test_a_job_that_its_resource_quota_refuses_has_the_quota_in_its_story() -> None:
    """By the plan that the facts give: which quota, what is used, what it allows, and what to do."""
    facts = (
        *on_sale(offer()), *job("train", gpus=8, namespace="research"),
        *quota("gpus", {"requests.nvidia.com/gpu": 12}, {"requests.nvidia.com/gpu": 8}),
    )  # fmt: skip
    made = plan(given(facts), policy(), T0)
    published = ScalingPlanMade(plan_id=PlanId("plan-1"), plan=made, cut=Cut(), policy_digest="p", core_digest="c")

    told = why_job(tuple(record((*facts, TimedFact(published, T0 + SECOND)))), "train")

    (sentence,) = [text for text in told if "ResourceQuota" in text]
    assert "ResourceQuota research/gpus would refuse the pods" in sentence
    assert "they need 8 more requests.nvidia.com/gpu, and 8 of 12 are used" in sentence
    assert not any("Buy " in text for text in told)
